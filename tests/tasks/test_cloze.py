"""Questions made of a text by rule."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import cli
from data import places
from tasks import cloze
from tasks.cloze import Gap, Passages, asked, gaps, passages_of, questions
from tasks.readers import read

BRIDGE = (
    "The Iron Bridge was opened in 1931 by Clara Whitlow. It has three arches and a toll house at "
    "its northern end. Clara Whitlow had drawn a smaller bridge for a harbour in Denmark. "
    "On market days 640 carts crossed it, and each paid a penny to the keeper."
)
HALL = (
    "The town hall stands on the square between the fountain and the old school. Its clock was "
    "repaired by Gunther Aldous, who asked for no money. The council meets there on Mondays, and "
    "anybody may listen from the gallery, which holds sixty people at most."
)


def gap(sentence: str, span: str, kind: str) -> Gap:
    start = sentence.index(span)
    return Gap(sentence, start, start + len(span), kind)


@pytest.mark.parametrize(
    ("sentence", "spans"),
    [
        ("The Iron Bridge was opened in 1931.", {"Iron Bridge": "name", "1931": "year"}),
        ("It cost 1,250 crowns on 4 May 1931.", {"1,250": "number", "4 May 1931": "date"}),
        ("On May 4, 1931, Ann's son met her.", {"May 4, 1931": "date", "Ann": "name"}),
        ("Bridges are old.", {}),  # a capital letter at the start of a sentence is no name
        ("In June they met on Monday.", {}),
        ("The queen of Spain met the Duke of York.", {"Spain": "name", "Duke of York": "name"}),
    ],
)
def test_names_numbers_and_dates_are_found_once(sentence, spans):
    assert {gap.span: gap.kind for gap in gaps(sentence)} == spans


@pytest.mark.parametrize(
    ("sentence", "span", "kind", "question"),
    [
        ("The bridge was opened in 1931 by the mayor.", "1931", "year",
         "In what year was the bridge opened by the mayor?"),
        ("The bridge, of iron, was drawn by Clara Whitlow in spring.", "Clara Whitlow", "name",
         "By whom or what was the bridge drawn in spring?"),
        ("Every day 640 carts crossed the bridge.", "640", "number",
         "Every day how many carts crossed the bridge?"),
        ("Clara Whitlow designed the bridge.", "Clara Whitlow", "name",
         "Who or what designed the bridge?"),
        ("Ann Lee (born 4 May 1931) is a painter.", "4 May 1931", "date", "When was Ann Lee born?"),
        ("In spring he was made a judge in 1931.", "1931", "year", ""),  # who is "he"?
    ],
)  # fmt: skip
def test_a_sentence_becomes_a_question(sentence, span, kind, question):
    assert asked(gap(sentence, span, kind)) == question


@pytest.mark.parametrize("form", cloze.FORMS)
def test_no_question_is_a_sentence_of_its_document_with_a_gap(form):
    made = questions(Passages(["Bridge", "Hall"], [BRIDGE, HALL]), (form,), most=9)
    assert {task.kind.split()[0] for task in made} == {form}
    assert len({task.answers for task in made}) == len(made)
    for task in made:
        document = task.document
        assert any(places(task.answers[0], document)), "the document has the answer"
        if task.question.startswith("Fill the gap: "):
            before, _, after = task.question.removeprefix("Fill the gap: ").partition("____")
            assert f"{before}{task.answers[0]}{after}" not in document
        else:
            assert task.question.rstrip("?") not in document
            assert not any(places(task.answers[0], task.question))


def test_the_same_text_gives_the_same_questions():
    found = [questions(Passages(["Bridge", "Hall"], [BRIDGE, HALL]), seed=s) for s in (1, 1)]
    assert [t.digest for t in found[0]] == [t.digest for t in found[1]]


def test_what_is_in_many_passages_is_not_asked_for():
    texts = [f"{HALL} Number {k} of the guides was printed for it." for k in range(200)]
    found = Passages([""] * 200, [*dict.fromkeys(texts)])
    assert not any("Aldous" in task.answers[0] for task in questions(found))
    assert found.left_out["span in many passages"] >= 200


def test_a_text_is_cut_into_passages_at_ends_of_sentences():
    text = f"{BRIDGE}\n\nShort.\n\n{HALL}\n\n" + " ".join([HALL] * 9)
    found = [passage for _, passage in passages_of("Town", text)]
    assert all(cloze.LEAST <= len(p.split()) <= cloze.MOST + 40 for p in found)
    assert " ".join(" ".join(found).split()) == " ".join(text.split())
    assert all(passage[-1] == "." for passage in found)


def test_the_suite_may_stand_before_the_files_and_its_forms_are_named(tmp_path):
    text = tmp_path / "town.txt"
    text.write_text(f"{BRIDGE}\n\n{HALL}")
    words = ["data", "build", "cloze", str(text), str(tmp_path / "sets"), "--lengths", "1"]
    result = CliRunner().invoke(cli.app, [*words, "--forms", "asked,keywords"])
    assert result.exit_code == 0, result.output
    tasks = read(tmp_path / "sets" / "cloze_1.jsonl.gz")
    assert {task.kind.split()[0] for task in tasks} == {"asked", "keywords"}
    result = CliRunner().invoke(cli.app, [*words, "--forms", "asked,riddles"])
    assert result.exit_code == 2 and "apart, asked, keywords, not 'riddles'" in result.output
