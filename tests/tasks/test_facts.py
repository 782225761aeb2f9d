"""One-fact questions: what is asked, of which paragraph, and what is left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from conftest import asked_of
from test_readers import SHARED, array, lines, parquet, real

import suites
from commands import taskfiles
from config.errors import UserError
from config.options import BuildConfig
from data import normalize_answer
from tasks import facts, passages
from tasks.readers import read
from tasks.writers import write_built

TEXTS = {  # title -> its paragraph
    "Los Locos": "Los Locos is a 1997 film directed by Jo Vallée. Jo wrote it in Lima.",
    "Jo Vallée": "Jo Vallée ( born 9 March 1963 ) is a Peruvian director.",
    "Bank of Lima": "The Bank of Lima is in Lima. It was founded in 1870.",
    "Filler": "Nothing of the kind.",
}
TRIPLES = [
    ["Los Locos", "director", "Jo Vallée"],
    ["Jo Vallée", "date of birth", "9 March 1963"],
    ["Jo Vallée", "country of citizenship", "Peru"],  # only within a longer word
    ["Jo Vallée", "place of death", "Quito"],  # not in the paragraph
    ["Nobody", "director", "Jo Vallée"],  # without a paragraph
    ["Bank of Lima", "location", "Lima"],  # in the question
    ["Bank of Lima", "motto", "It was founded"],
]
EXPECTED = {
    "Who directed Los Locos?": ("Los Locos", "Jo Vallée"),
    "When was Jo Vallée born?": ("Jo Vallée", "9 March 1963"),
    "What is the motto of Bank of Lima?": ("Bank of Lima", "It was founded"),
}


def shared(name="a", split="train", triples=TRIPLES, **fields):
    paragraphs = [{"title": title, "text": text} for title, text in TEXTS.items()]
    record = {"id": name, "dataset": "made", "question": "Which?", "answers": ["x"], "hops": [0, 1]}
    own = {"orig_split": split, "paragraphs": paragraphs, "evidences": triples}
    return record | own | fields


def told(tasks):
    found = {t.question: (t.pool.titles[t.order[0]], *t.answers) for t in tasks}
    assert len(found) == len(tasks)
    for task in tasks:
        assert len(task.order) == 1 and task.gold == (0,) and task.kind == "one_fact"
        assert task.answers[0] in task.document and task.evidence == task.document
    return found


def test_triples_of_our_form(tmp_path):
    tasks = facts.read(lines(tmp_path / "x.jsonl.gz", [shared()]))
    assert told(tasks) == EXPECTED
    assert {t.split for t in tasks} == {"train"} and {t.dataset for t in tasks} == {"made"}
    assert [t.id for t in tasks] == ["a.0", "a.1", "a.2"] and len({id(t.pool) for t in tasks}) == 1
    assert {*tasks[0].pool.titles} == {*TEXTS}  # all are filler


def test_triples_of_the_official_json_and_of_the_hub(tmp_path):
    pairs = [[title, [text]] for title, text in TEXTS.items()]
    base = {"question": "Which?", "answer": "x", "type": "t"}
    official = base | {
        "_id": "w", "context": pairs, "supporting_facts": [["Los Locos", 0]], "evidences": TRIPLES,
    }  # fmt: skip
    assert told(facts.read(array(tmp_path / "train.json", [official]))) == EXPECTED
    columns = base | {
        "id": "h",
        "context": {"title": [*TEXTS], "sentences": [[text] for text in TEXTS.values()]},
        "supporting_facts": {"title": ["Los Locos"], "sent_id": [0]},
    }
    rows = [dict(zip(facts.TRIPLE, triple, strict=True)) for triple in TRIPLES]
    parts = {part: [row[part] for row in rows] for part in facts.TRIPLE}
    for n, evidences in enumerate((TRIPLES, rows, parts)):
        record = columns | {"evidences": evidences}
        assert told(facts.read(parquet(tmp_path / f"{n}.parquet", [record]))) == EXPECTED
    metadata = {name: columns[name] for name in ("context", "supporting_facts")}
    flash = {"id": "f", "question": "Which?", "golden_answers": ["x"]}
    flash["metadata"] = metadata | {"evidences": TRIPLES}
    assert told(facts.read(lines(tmp_path / "flash.jsonl", [flash]))) == EXPECTED


STEPS = [
    ("Los Locos >> director", "Jo Vallée", 0),
    ("when was jo born", "9 March 1963", 1),
    ("#1 >> country", "Peru", 1),
    ("What lies in #2 ?", "Lima", 2),
    ("Where is the old bank?", "Quito", 2),
]


def test_sub_questions_of_musique(tmp_path):
    steps = [{"question": q, "answer": a, "paragraph_support_idx": k} for q, a, k in STEPS]
    paragraphs = [{"title": t, "paragraph_text": x} for t, x in TEXTS.items()]
    record = {"id": "m", "question": "Which?", "answer": "x", "paragraphs": paragraphs}
    unplaced = {"question": "Who wrote it?", "answer": "Jo", "paragraph_support_idx": None}
    record["question_decomposition"] = [*steps, unplaced]
    expected = {
        "Who directed Los Locos?": ("Los Locos", "Jo Vallée"),
        "when was jo born": ("Jo Vallée", "9 March 1963"),
    }
    assert told(facts.read(lines(tmp_path / "m.jsonl", [record]))) == expected
    ours = [{"question": q, "answer": a} for q, a, _ in STEPS]
    own = shared(evidences=None, decomposition=ours, hops=[k for _, _, k in STEPS])
    assert told(facts.read(lines(tmp_path / "own.jsonl", [own]))) == expected
    # which paragraph is whose is not known
    with pytest.raises(UserError, match="has no facts"):
        facts.read(lines(tmp_path / "lost.jsonl", [own | {"hops": [0, 1]}]))


def test_a_fact_of_several_questions_is_one_and_none_is_of_another_split(tmp_path):
    both = [*TRIPLES, ["Los Locos", "director", "Jo"], ["Los Locos", "place", "Lima"]]
    records = [shared("a", triples=both), shared("b"), shared("c", triples=TRIPLES[1:])]
    tasks = facts.read(lines(tmp_path / "one.jsonl", records))
    assert len(tasks) == 4 and tasks[0].answers == ("Jo Vallée", "Jo")
    records[2] = shared("c", "validation", triples=TRIPLES[1:2])
    path = lines(tmp_path / "two.jsonl", records)
    left = {"Who directed Los Locos?", "What is the motto of Bank of Lima?"}
    assert {t.question for t in facts.read(path)} == left | {"What is the place of Los Locos?"}
    for split in ("validation", "dev"):  # train needs the only one as well
        with pytest.raises(UserError, match=r"two\.jsonl"):
            facts.read(path, split)
    later = [["Filler", "use", "Nothing"]]
    alone = [{"title": "Filler", "text": "Nothing."}]
    records[2] = shared("c", "validation", triples=later, paragraphs=alone, hops=[])
    path = lines(tmp_path / "three.jsonl", records)
    (task,) = facts.read(path, "validation")
    assert task.pool.texts == ["Nothing."]  # no paragraph of the other split
    assert "Nothing." not in facts.read(path)[0].pool.texts


def test_mistakes_are_one_sentence(tmp_path):
    wrong = ("text", [["a", "b"]], [["a", "b", 3]], {"fact": ["a"]})
    records = [shared(triples=triples) for triples in wrong]
    for record in (*records, {"question": "q", "answer": "a", "context": "a"}, ""):
        with pytest.raises(UserError, match=r"own\.jsonl"):
            facts.read(lines(tmp_path / "own.jsonl", [record]))
    write_built(tmp_path / "built.jsonl", read(lines(tmp_path / "s.jsonl", [shared()])))
    with pytest.raises(UserError, match="give the file that it was made of"):
        facts.read(tmp_path / "built.jsonl")


def test_sets_put_the_paragraph_among_others(tmp_path, capsys):
    source = lines(tmp_path / "x.jsonl", [shared()])
    config = BuildConfig(suite="facts", lengths=(1, 2), n=99)
    taskfiles.build_sets([str(source)], tmp_path / "sets", config, suites.from_config(config))
    assert " ".join(capsys.readouterr().out.split()).count("3 questions") == 2
    for n in (1, 2):
        tasks = read(tmp_path / "sets" / f"facts_{n}.jsonl.gz")
        assert {t.question for t in tasks} == {*EXPECTED} and {t.n_documents for t in tasks} == {n}
        for task in tasks:
            own = task.pool.texts[task.order[task.gold[0]]]
            assert own == TEXTS[EXPECTED[task.question][0]] and len(task.notes) == 1
    unit, columns = asked_of(suite="facts", data=(str(source),))
    names = [(column.question, column.length) for column in columns]
    assert unit == "documents" and names == [("made, one fact", 1), ("made, one fact", 4)]
    # the two paragraphs about Jo and the film have no others, of four, without the answer
    with pytest.raises(UserError):
        columns[0].make()
    for wrong in ({}, {"data": ("a", "b")}, {"data": (str(source),), "test_articles": "1/5"}):
        with pytest.raises(UserError):
            asked_of(None, suite="facts", **wrong)


def test_questions_of_one_paragraph_stand_side_by_side(tmp_path):
    more = [*TRIPLES, ["Los Locos", "place", "Lima"], ["Los Locos", "publication date", "1997"]]
    questions = facts.read(lines(tmp_path / "x.jsonl", [shared(triples=more)]))
    tasks = passages.make_tasks(questions, 1, shared=passages.Shared(3))
    orders = [task.order for task in tasks]
    assert len(tasks) == 5 and len({*orders}) == 3
    assert sum(a != b for a, b in pairwise(orders)) == 2
    # none is lost of a paragraph with more questions than may share a document
    assert len(passages.make_tasks(questions, 1, shared=passages.Shared(2))) == 5


@real
@pytest.mark.parametrize(
    ("name", "n", "n_validation"), [("2wikimultihopqa", 1039, 875), ("musique", 104, 90)]
)
def test_real_facts(name, n, n_validation):
    path = SHARED / f"{name}_dev.jsonl.gz"
    train, validation = facts.read(path), facts.read(path, "validation")
    assert (len(train), len(validation)) == (n, n_validation)
    wordings = [{normalize_answer(t.question) for t in tasks} for tasks in (train, validation)]
    assert not wordings[0] & wordings[1]
    assert {t.split for t in train} == {"train"}
    for task in (*train, *validation):
        assert all(answer in task.pool.texts[task.order[0]] for answer in task.answers)
    generic = [t.question for t in train if t.question.startswith("What is the ")]
    # most have the wording of the table, or the source's own
    assert sum("nationality" not in question for question in generic) < 0.1 * n
