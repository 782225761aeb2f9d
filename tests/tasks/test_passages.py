"""SQuAD's questions among passages: what stands in a document, where, and which articles are
apart."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from itertools import pairwise

import pytest
from conftest import asked_of
from test_readers import OWN, SHARED, lines, paragraphs, real

import suites
from commands import data as taskfiles
from config.errors import UserError
from config.options import EvalConfig
from data import NOT_FOUND, Pool, normalize_answer
from suites import passages
from suites.passages import Passages, split_by_article
from tasks.mentions import separate_words
from tasks.readers import read

# Answers that stand in one paragraph; in all of an article, and in another spelling in one of the
# article before; likewise, and there within a longer number
ANSWERS = ("Queen {a}x{p}", "the Green-Bay {a}", "{a}7{a}")


def squad(path, n_articles: int = 10, n_paragraphs: int = 3):
    """Write a file of SQuAD's form, with three questions to each paragraph."""
    articles = []
    for a in range(n_articles):
        paragraphs = []
        for p in range(n_paragraphs):
            answers = [answer.format(a=a, p=p) for answer in ANSWERS]
            text = f"Paragraph {p} of {a}. {answers[0]} saw {answers[1]} in {answers[2]}."
            if p == 0:
                b = (a + 1) % n_articles
                text += f" And GREEN-BAY {b}, in 1{b}7{b}."
            qas = [
                {"id": f"{a}.{p}.{k}", "question": f"Which {k} in {p} of {a}?",
                 "answers": [{"text": answer, "answer_start": text.index(answer)}]}
                for k, answer in enumerate(answers)
            ]  # fmt: skip
            paragraphs.append({"context": text, "qas": qas})
        articles.append({"title": f"Article_{a}", "paragraphs": paragraphs})
    path.write_text(json.dumps({"version": "1.1", "data": articles}))
    return path


EXTRA = Pool([f"E{k}" for k in range(300)], [f"Extra text {k}z." for k in range(300)])


def make_tasks(questions, n, n_items=None, extra=None, seed=0, lengths=(), **how):
    """Make tasks of all questions, or of so many, by the suite's settings."""
    asked = [task for task in questions if how.get("source_split", "") in ("", task.split)]
    n_items = len(asked) if n_items is None else n_items
    return passages.make_tasks(questions, n, n_items, extra, seed, lengths, Passages(**how))


@pytest.fixture
def questions(tmp_path):
    return split_by_article(read(squad(tmp_path / "squad.json")), "4/5")


def shown(task) -> list[tuple[str, str]]:
    return [(task.pool.titles[k], task.pool.texts[k]) for k in task.order]


@pytest.mark.parametrize("n", [1, 4, 16, 64])
def test_one_passage_answers_and_no_other_contains_an_answer(questions, n):
    source = {task.id: task for task in questions}
    tasks = make_tasks(questions, n, extra=EXTRA, seed=3)
    assert sorted(task.id for task in tasks) == sorted(source)
    for task in tasks:
        own = source[task.id]
        (place,) = task.gold
        assert task.n_documents == len({*task.order}) == n and task.pool is tasks[0].pool
        assert shown(task)[place] == shown(own)[0] and task.answers == own.answers
        assert task.evidence == own.document and task.split == own.split
        for answer in task.answers:
            for k, passage in enumerate(shown(task)):
                text = "\n".join(passage)
                held = (
                    answer.lower() in text.lower()
                    or normalize_answer(answer) in normalize_answer(text)
                    or separate_words(answer) in separate_words(text)
                )
                assert held == (k == place), (task.id, passage)


def test_every_passage_without_the_answer_and_no_other_can_be_drawn(questions):
    """Of 30 paragraphs 29 lack the answer of a first question, 26 that of a second or third."""
    assert len(make_tasks(questions, 27)) == 90
    for n in (28, 30):
        assert {t.id[-1] for t in make_tasks(questions, n, 30)} == {"0"}
        with pytest.raises(UserError, match="30 of 90"):
            make_tasks(questions, n, 31)
    with pytest.raises(UserError):
        make_tasks(questions, 31, 1)


def test_training_documents_hold_nothing_of_the_test_articles(questions):
    other = Pool(["Article 4", "article_9", "Else"], ["A z.", "B z.", "C z."])
    train = make_tasks(questions, 20, 40, extra=other, source_split="train")
    test = make_tasks(questions, 20, extra=other, source_split="test")
    titles = {title for task in train for title, _ in shown(task)}
    assert titles == {*(f"Article_{a}" for a in range(10) if a % 5 != 4), "Else"}
    assert {shown(task)[task.gold[0]][0] for task in test} == {"Article_4", "Article_9"}
    assert {task.split for task in train} == {"train"} and {t.split for t in test} == {"test"}
    assert titles < {title for task in test for title, _ in shown(task)}
    # Paragraphs of the same article are among the others
    assert any(
        Counter(t for t, _ in shown(task))[shown(task)[task.gold[0]][0]] > 1 for task in test
    )


def test_which_articles_are_test(questions, tmp_path):
    split = split_by_article(questions, "0/5")
    found = {shown(task)[0][0] for task in split if task.split == "test"}
    assert found == {"Article_0", "Article_5"}
    for wrong in ("5/5", "1/0", "x", "1", "hash:1/3", "-1/5"):
        with pytest.raises(UserError):
            split_by_article(questions, wrong)
    for record in (paragraphs(1), OWN):  # not one paragraph
        with pytest.raises(UserError):
            split_by_article(read(lines(tmp_path / "other.jsonl", [record])), "4/5")
    path = squad(tmp_path / "squad.json")
    path.write_text(re.sub('"title": "[^"]*"', '"title": ""', path.read_text()))
    split = split_by_article(read(path), "0/10")  # without titles each paragraph is an article
    assert Counter(task.split for task in split) == {"train": 81, "test": 9}


def test_longer_documents_have_all_that_shorter_ones_have(questions):
    by_length = {
        n: {task.id: task for task in make_tasks(questions, n, 12, EXTRA, 1, (4, 16, 64))}
        for n in (4, 16, 64)
    }
    assert by_length[4].keys() == by_length[16].keys() == by_length[64].keys()
    for name in by_length[4]:
        sets = [{*shown(by_length[n][name])} for n in (4, 16, 64)]
        assert sets[0] < sets[1] < sets[2]
    first = [asdict(task) for task in make_tasks(questions, 16, 12, EXTRA, 1)]
    assert first == [asdict(task) for task in make_tasks(questions, 16, 12, EXTRA, 1)]
    assert first != [asdict(task) for task in make_tasks(questions, 16, 12, EXTRA, 2)]


def test_the_answer_may_stand_anywhere(questions):
    places = Counter(t.gold[0] for seed in range(20) for t in make_tasks(questions, 4, seed=seed))
    # 1,800 draws: 450 each, give or take 18
    assert {*places} == {0, 1, 2, 3} and all(abs(n - 450) < 90 for n in places.values())


def test_questions_that_cannot_be_placed_are_passed_over_at_every_length(questions):
    short = make_tasks(questions, 2, 20, lengths=(2, 29))
    long = make_tasks(questions, 29, 20, lengths=(2, 29))
    assert [t.id for t in short] == [t.id for t in long] and {t.id[-1] for t in long} == {"0"}


def test_the_suite_and_the_files_hold_the_same_tasks(tmp_path, questions, capsys):
    passages = zip(EXTRA.titles, EXTRA.texts, strict=True)
    filler = lines(tmp_path / "f.jsonl", [{"title": t, "text": x} for t, x in passages])
    data = (str(tmp_path / "squad.json"),)
    asked = dict(suite="passages", data=data, filler=(str(filler),), lengths=(1, 4, 64), n=8)
    config, suite = suites.chosen(EvalConfig, asked | {"source_split": "test"})
    columns = suite.columns(suites.scope_of(suite, config.data, config))
    names = [("squad, test articles", n) for n in (1, 4, 64)]
    assert suite.unit == "documents" and [(c.question, c.length) for c in columns] == names
    taskfiles.build_sets(data, tmp_path / "sets", config, suite)
    assert capsys.readouterr().out.count("8 questions") == 3
    for column in columns:
        made = column.make()
        written = read(tmp_path / "sets" / f"passages_{column.length}.jsonl.gz")
        assert [t.digest for t in made] == [t.digest for t in written]
        assert len(written) == 8 and {t.split for t in written} == {"test"}
        assert [(t.id, t.document) for t in made] == [(t.id, t.document) for t in written]


@pytest.mark.parametrize("fields", [
    {}, {"data": ("a", "b")}, {"source_split": "dev"}, {"test_articles": "x"},
    {"test_articles": "0/1", "source_split": "train"},
    {"suite": "ruler-hqa", "test_articles": "1/5"},
])  # fmt: skip
def test_mistakes_show_before_a_model_is_loaded(tmp_path, fields):
    data = {"data": (str(squad(tmp_path / "s.json")),)} if fields.keys() - {"data"} else {}
    with pytest.raises(UserError):
        asked_of(None, **{"suite": "passages"} | data | fields)


@real
@pytest.mark.parametrize("n", [1, 64])
def test_xquad(n):
    questions = split_by_article(read(SHARED / "xquad_en.json.gz"), "4/5")
    for split, n_articles in (("train", 39), ("test", 9)):
        tasks = make_tasks(questions, n, 60, source_split=split)
        assert len({passages.article_of(t) for t in questions if t.split == split}) == n_articles
        for task in tasks:
            (place,) = task.gold
            for answer in task.answers:
                assert [answer.lower() in text.lower() for _, text in shown(task)].count(True) == 1
                assert answer in shown(task)[place][1]


def test_few_passages_have_shared_documents_and_what_is_passed_over_is_counted(tmp_path, capsys):
    """Of 30 passages one holds the answer of a first question, four that of a second or third."""
    file = str(squad(tmp_path / "squad.json"))
    _, columns = asked_of(suite="passages", data=(file,), together=3, lengths=(4,), n=40)
    tasks = columns[0].make()
    assert len(tasks) == 30 and {task.id[-1] for task in tasks} == {"0"}
    said = " ".join(capsys.readouterr().out.split())
    assert "Passed over among 4: 60 of 90 questions" in said


@pytest.mark.parametrize("seed", range(4))
def test_in_a_shared_document_one_passage_answers_each_question(questions, seed):
    tasks = make_tasks(questions, 6, extra=EXTRA, seed=seed, together=12)
    assert len(tasks) > 40 and len({(*task.order,) for task in tasks}) < len(tasks) / 3
    for task in tasks:
        held = [normalize_answer(task.answers[0]) in normalize_answer(x) for _, x in shown(task)]
        assert held.count(True) == 1 and held[task.gold[0]], task.id


@pytest.mark.parametrize("together", [3, 2])
def test_questions_of_one_paragraph_stand_side_by_side(questions, together):
    """None is lost of a paragraph with more questions than may share a document."""
    tasks = make_tasks(questions, 1, together=together)
    assert len({task.id for task in tasks}) == len(tasks) == len(questions) == 90
    assert sum(a.order != b.order for a, b in pairwise(tasks)) == 29


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("near", [True, False])
def test_a_share_of_the_questions_has_no_answer_in_its_document(questions, near, together):
    tasks = make_tasks(questions, 6, extra=EXTRA, together=together, absent=0.4, near=near)
    absent = [task for task in tasks if task.absent]
    assert 0.2 < len(absent) / len(tasks) < 0.6
    by_id = {task.id: task for task in questions}
    for task in tasks:
        paragraph, *_ = shown(by_id[task.id])
        assert (paragraph in shown(task)) != task.absent and len(task.order) == 6
        assert task.absent == (task.kind == "absent") == (task.answers == (NOT_FOUND,))
    for task in absent:
        answers = by_id[task.id].answers
        assert not any(normalize_answer(a) in normalize_answer(task.document) for a in answers)
        assert task.gold == () and task.evidence is None
    siblings = [sum(t == shown(by_id[task.id])[0][0] for t, _ in shown(task)) for task in absent]
    # the second answer stands in all paragraphs of an article, which are then no sibling to keep
    assert (max(siblings) == 2) == near or together > 1


def test_the_others_stay_as_they_were_where_some_have_no_answer(questions):
    plain = make_tasks(questions, 6, extra=EXTRA)
    some = {task.id: task for task in make_tasks(questions, 6, extra=EXTRA, absent=0.4)}
    kept = [task for task in plain if not some[task.id].absent]
    assert kept and all(task.document == some[task.id].document for task in kept)
    assert not any(task.absent for task in plain)


def test_where_no_title_tells_what_is_near_the_likest_passages_are(tmp_path):
    """They share rare words with the paragraph: not those that stand everywhere."""
    texts = {
        "right": "The harbour of Quillan has a lighthouse of basalt. It was lit in 1871.",
        "near": "Quillan exports basalt. Its harbour freezes in a hard winter.",
        "answer": "Another lighthouse of basalt, in a harbour, was lit in 1871.",
    }
    rest = [f"The town {k} has a harbour. It is known for its fish {k}x." for k in range(120)]
    qas = [{"id": "q", "question": "When?", "answers": [{"text": "1871", "answer_start": 0}]}]
    article = {"title": "", "paragraphs": [{"context": texts["right"], "qas": qas}]}
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"version": "1.1", "data": [article]}))
    extra = Pool([""] * len(rest) + ["", ""], [*rest, texts["near"], texts["answer"]])
    (near,) = make_tasks(read(path), 4, extra=extra, together=1, absent=1.0)
    (far,) = make_tasks(read(path), 4, extra=extra, absent=1.0, near=False)
    assert texts["near"] in near.document and texts["near"] not in far.document
    for task in (near, far):
        assert texts["answer"] not in task.document and texts["right"] not in task.document
