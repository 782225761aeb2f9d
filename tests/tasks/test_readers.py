"""Every form in every container, broken files, and what is written. All text here is made up."""

from __future__ import annotations

import dataclasses
import gzip
import json
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_locomo import GONE, changed

from config.errors import UserError
from data import FRAMES, Pool, Task
from tasks.readers import read, read_passages, read_texts
from tasks.writers import write_built, write_eval_json

SHARED = Path(__file__).parents[3] / "shared" / "data"
FIELDS = ("id", "question", "answers", "document", "kind", "dataset", "split")
real = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real data is not at {SHARED}")


def lines(path: Path, records: list) -> Path:
    """Write lines of JSON, packed where the name says so; a text is a line as it is."""
    raw = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    raw = raw.encode(errors="surrogateescape")
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def parquet(path: Path, records: list) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def written(path: Path, *records) -> Path:
    """Write records in the container that the name asks for."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1), encoding="utf-8")
        return path
    return (parquet if path.suffix == ".parquet" else lines)(path, [*records])


def fails(path: Path, place: str = "", **kwargs) -> None:
    """Reading is refused in one sentence that names the file and the place."""
    with pytest.raises(UserError) as error:
        read(path, **kwargs)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    assert path.name in message and place in message, message


OWN = {"question": "Who keeps bees?", "answers": ["Ada", "Ada L."], "context": "Ada keeps bees."}
ASKED = {"question": "Who?", "answer": "Ada"}
MEMAGENT = {
    "data_source": "hotpotqa", "prompt": [{"role": "user", "content": "Who keeps bees?"}],
    "context": "Document 1:\nAda\nAda keeps bees.",
    "reward_model": {"style": "rule", "ground_truth": ["Ada"]},
    "extra_info": {"index": 7, "question": "Who keeps bees?", "num_docs": 30},
}  # fmt: skip
EVAL = {
    "context": "Ada keeps bees.", "input": "Who keeps bees?", "answers": ["Ada"], "num_docs": 40,
    "index": 3,
}  # fmt: skip
RULER = {
    "index": 0, "input": "Which?", "context": "One is 12. Two is 34.", "outputs": ["12", "34"],
    "answer_prefix": "", "length": 9,
}  # fmt: skip


def hotpot(i: int) -> dict:
    context = [
        ["Common", ["A common text."]],
        [f"Town {i}", [f"Town {i} lies in Land {i}.", " It is old."]],
        [f"Land {i}", [f"Land {i} is ruled by Queen {i}."]],
    ]
    facts = [[f"Land {i}", 0], [f"Town {i}", 0], [f"Land {i}", 1]]
    asked = {"question": f"Who rules the land of Town {i}?", "answer": f"Queen {i}"}
    labels = {"_id": f"q{i}", "type": "bridge", "level": "hard"}
    return labels | asked | {"supporting_facts": facts, "context": context}


def paragraphs(i: int, n_own: int = 10) -> dict:
    own = [
        {"title": f"T{i}-{k}", "text": f"Text {k} of {i}.", "is_supporting": k in (2, 7)}
        for k in range(n_own)
    ]
    labels = {"id": f"q{i}", "dataset": "made", "orig_split": "train", "type": "bridge"}
    asked = {"question": f"Question {i}?", "answers": [f"A{i}", "B"]}
    return labels | asked | {"hops": [7, 2], "paragraphs": own}


HUB = {
    "id": "h1", "question": "Who?", "answer": "Ada", "type": "bridge", "level": "hard",
    "supporting_facts": {"title": ["B", "A", "B"], "sent_id": [0, 1, 2]},
    "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]},
}  # fmt: skip
FLASHRAG = {
    "id": "dev_0", "question": "Who?", "golden_answers": ["Ada", "A. L."],
    "metadata": {
        "type": "inference", "supporting_facts": HUB["supporting_facts"],
        "context": {"title": ["A", "B"], "content": [["One.", "Two."], ["Three."]]},
    },
}  # fmt: skip
WIKI = {
    "_id": "w", "question": "Who?", "answer": "Ada", "evidences": [], "type": "inference",
    "supporting_facts": [["B", 0]], "context": [["A", ["One.", "Two."]], ["B", ["Three."]]],
}  # fmt: skip
MUSIQUE = {
    "id": "2hop__1", "question": "Who?", "answer": "Ada", "answer_aliases": ["A. L."],
    "answerable": True,
    "paragraphs": [{"idx": k, "title": f"T{k}", "paragraph_text": f"Text {k}."} for k in range(3)],
    "question_decomposition": [
        {"id": 1, "paragraph_support_idx": 2}, {"id": 2, "paragraph_support_idx": 0},
    ],
}  # fmt: skip
SQUAD = {
    "id": "s", "title": "Bees", "question": "Who?", "context": "Ada.", "answers": [{"text": "Ada"}],
}  # fmt: skip
TREE = {"version": "1.1", "data": [{"title": "Bees", "paragraphs": [
    {"context": "Ada keeps bees.", "qas": [
        {"id": "s1", "question": "Who keeps bees?", "answers": [
            {"text": "Ada", "answer_start": 0}, {"text": "Ada", "answer_start": 0},
        ]},
        {"id": "s2", "question": "Who keeps ants?", "answers": [], "is_impossible": True},
    ]},
    {"context": "Bo keeps ants.", "qas": [
        {"id": "s3", "question": "What does Bo keep?", "answers": [{"text": "ants"}]},
    ]},
]}]}  # fmt: skip
BUILT = [
    {"form": "memagent-set", "passages": 2, "tasks": 1},
    {"title": "A", "text": "One."},
    {"title": "B", "text": "Two."},
    {"id": "a", "question": "Who?", "answers": ["One"], "order": [1, 0], "gold": [0]},
]
EXTRA = Pool([f"E{k}" for k in range(300)], [f"Extra text {k}." for k in range(300)])
PLACED = EVAL | {
    "context": EXTRA.document(range(3)), "evidence_idx": [2, 0, 2], "type": "bridge",
    "level": "hard", "num_docs": 3,
}  # fmt: skip
TWO = "Document 1:\nA\nOne. Two.\n\nDocument 2:\nB\nThree."
THE_DATA = {"text": ["Ada"], "answer_start": [0]}


def questions(tmp_path: Path, n: int = 8) -> list[Task]:
    return read(lines(tmp_path / "questions.jsonl", [paragraphs(i) for i in range(n)]))


def gold_titles(task: Task) -> list[str]:
    return [task.pool.titles[task.order[g]] for g in task.gold]


def labels(id: str, kind: str = "", dataset: str = "", **more) -> dict:
    return dict(id=id, kind=kind, dataset=dataset, tokens=0) | more


@pytest.mark.parametrize(("name", "record", "expected"), [
    *(
        (name, OWN, labels("0", answers=("Ada", "Ada L."), document=OWN["context"], pool=None))
        for name in ("own.jsonl", "own.jsonl.gz", "own.json", "own.parquet")
    ),
    ("own.jsonl", OWN | {"id": 17, "answers": "1994-05-01", "kind": "date", "split": "train"},
     labels("17", "date", split="train", answers=("1994-05-01",))),  # a date stays a text
    ("a.parquet", MEMAGENT | {"score_x": 0.5},
     labels("0", "", "hotpotqa", answers=("Ada",), n_documents=30)),
    ("a.jsonl", MEMAGENT | {"prompt": "Q?", "extra_info": {"id": "p"}},
     labels("p", "", "hotpotqa", question="Q?")),
    ("eval_50.json", EVAL, labels("0", text=EVAL["context"], n_documents=40)),
    ("x.json", EVAL | {"num_docs": None, "context": EXTRA.document(range(3))},
     labels("0", n_documents=3)),
    # a passage that serves twice stands once; the data set stands in the name
    ("eval_2wikimultihopqa_40_min_distance_10.json", PLACED,
     labels("0", "bridge", "2wikimultihopqa", level="hard", gold=(2, 0), n_documents=3)),
    ("eval_40.json", PLACED, labels("0", "bridge", gold=(2, 0))),
    # another frame, or none: the text as it stands, without evidence
    ("eval_41.json", PLACED | {"context": "So:\n" + PLACED["context"]},
     labels("0", "bridge", gold=(), pool=None, text="So:\n" + PLACED["context"])),
    ("eval_niah_single_1_8192.json", RULER,
     labels("0", "niah_single_1", "ruler", answers=("12", "34"), tokens=8192, n_documents=1)),
    ("mine.json", RULER, labels("0", "mine", "ruler", asks_for_all=True)),
    ("eval_qa_1_9.json", RULER, labels("0", "qa_1", "ruler", tokens=9, asks_for_all=False)),
    ("a.jsonl", paragraphs(1),
     labels("q1", "bridge", "made", split="train", gold=(7, 2), n_documents=10)),
    ("h.parquet", HUB, labels("h1", "bridge", "hotpotqa", level="hard", gold=(1, 0),
                              answers=("Ada",), document=TWO)),
    # evidence that is no part of the document
    ("h.jsonl", HUB | {"supporting_facts": {"title": ["B", "gone"]}},
     labels("h1", "bridge", "hotpotqa", gold=(), document=TWO)),
    ("h.json", hotpot(1) | {"context": [["Empty", []], ["Land 1", ["A.", ""]]]},
     labels("q1", "bridge", "hotpotqa", gold=(), level="hard", n_documents=2)),
    # HotpotQA's sentences bring their own blanks, 2WikiMultiHopQA's do not
    ("2wiki/dev.jsonl", FLASHRAG, labels("dev_0", "inference", "2wikimultihopqa", gold=(1, 0),
                                         answers=("Ada", "A. L."), document=TWO)),
    ("dev.json", WIKI, labels("w", "inference", "2wikimultihopqa", gold=(1,), document=TWO)),
    ("a.jsonl", MUSIQUE, labels("2hop__1", "2hop", "musique", gold=(2, 0), n_documents=3,
                                answers=("Ada", "A. L."), clues=("T2", "T0"))),
    ("s.parquet", SQUAD | {"answers": THE_DATA},
     labels("s", "squad", "squad", answers=("Ada",), document="Document 1:\nBees\nAda.")),
    ("s.parquet", {"_id": "5a", "question": "Who?", "context": "Ada.", "answers": THE_DATA},
     labels("5a", answers=("Ada",), text="Ada.")),
    # documents of the user's own
    ("x.jsonl", ASKED | {"context": ["One.", "Two."]},
     labels("0", document="Document 1:\nOne.\n\nDocument 2:\nTwo.", n_documents=2)),
    ("x.jsonl", ASKED | {"context": [{"title": "A", "text": "One.", "score": "9"}]},
     labels("0", document="Document 1:\nA\nOne.", n_documents=1)),
    ("x.jsonl", ASKED | {"context": [["A", ["One.", " Two."]]]},
     labels("0", document="Document 1:\nA\nOne. Two.", n_documents=1)),
    *(("x.jsonl", ASKED | {"context": "One."} | more, labels("0", document="One."))
      for more in ({"options": None, "choice_A": ""}, {"optional": 1})),
])  # fmt: skip
def test_what_is_read_of_each_form(tmp_path, name, record, expected):
    (task,) = read(written(tmp_path / name, record))
    assert {field: getattr(task, field) for field in expected} == expected
    write_eval_json(tmp_path / "x.json", [task])
    (back,) = read(tmp_path / "x.json")
    assert [getattr(back, f) for f in FIELDS] == [getattr(task, f) for f in FIELDS]
    assert back.n_documents == task.n_documents
    if task.pool and task.kind != "squad" and task.gold:  # evidence is written with its places
        assert (back.gold, back.evidence) == (task.gold, task.evidence)


def test_paragraphs_share_one_pool_and_the_evidence_stands_once_in_its_order(tmp_path):
    _, task = tasks = read(written(tmp_path / "hotpot.json", hotpot(1), hotpot(2)))
    assert tasks[0].pool is task.pool and len(task.pool.titles) == 5  # Common once
    assert gold_titles(task) == ["Land 2", "Town 2"] == [*task.clues]
    assert task.document.startswith("Document 1:\nCommon\nA common text.\n\nDocument 2:\nTown 2\n")
    assert [t.id for t in read(tmp_path / "hotpot.json", n=1)] == ["q1"]
    more = Pool(["Z", *task.pool.titles], ["z", *task.pool.texts])  # what else is there is no part
    moved = dataclasses.replace(task, pool=more, order=[k + 1 for k in task.order])
    assert moved.digest == task.digest != tasks[0].digest


@pytest.mark.parametrize("nested", [False, True])
def test_eval_json_of_passage_numbers(tmp_path, nested):
    source = written(tmp_path / "hotpotqa_dev.json", hotpot(1), hotpot(2))
    numbers = [4, 0, 2]  # in the sorted passages: Common, Land 1, Land 2, Town 1, Town 2
    path = written(tmp_path / "e.json", EVAL | {"context": [numbers] if nested else numbers})
    (task,) = read(path, pool=source)
    assert [task.pool.titles[k] for k in task.order] == ["Town 2", "Common", "Land 2"]
    fails(path, "item 1")
    fails(written(path, EVAL | {"context": [0, 5]}), "item 1", pool=source)


@pytest.mark.parametrize("indent", [None, 1])
def test_squads_tree(tmp_path, capsys, indent):
    path = tmp_path / "squad.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TREE, indent=indent).encode()))
    one, two = read(path)
    assert (one.id, one.answers, one.gold, one.dataset) == ("s1", ("Ada",), (0,), "squad")
    assert two.document == "Document 1:\nBees\nBo keeps ants." and two.pool is one.pool
    assert capsys.readouterr().out.endswith("1.\n")  # a question that cannot be answered
    bad = changed(TREE, ("data", 0, "paragraphs", 1, "context"), GONE)
    path.write_bytes(gzip.compress(json.dumps(bad).encode()))
    fails(path)


@pytest.mark.parametrize(
    ("answer", "answers"),
    [
        (["Ada", "A. L."], ("Ada", "A. L.")), (1931, ("1931",)), (2.5, ("2.5",)), (3.0, ("3",)),
        ({"value": "Ada", "aliases": ["A. L."], "type": "x"}, ("Ada", "A. L.")),
        (THE_DATA, ("Ada",)), ([{"text": "Ada"}, 7], ("Ada", "7")),
    ],
)  # fmt: skip
def test_answers_of_common_forms(tmp_path, answer, answers):
    chat = {"prompt": "Who?", "reward_model": {"ground_truth": answer}, "context": "Ada."}
    own = OWN | {"answers": None}
    for record in (own | {"answer": answer}, own | {"answers": answer}, chat):
        assert read(written(tmp_path / "x.jsonl", record))[0].answers == answers


def test_what_is_left_out_is_counted(tmp_path, capsys):
    """Questions without an answer, as musique_full has each id twice, and messages before one."""
    no = MUSIQUE | {"answerable": False}
    path = written(tmp_path / "m.jsonl", no, MUSIQUE, no | {"id": "2hop__2"})
    assert [task.id for task in read(path)] == ["2hop__1"]
    assert " ".join(capsys.readouterr().out.split()).endswith(": 2.")
    fails(written(path, no))
    nothing = SQUAD | {"id": "s2", "answers": {"text": [], "answer_start": []}}
    for more in (nothing, SQUAD | {"unanswerable": True}, SQUAD | {"is_impossible": True}):
        assert [task.id for task in read(written(path, SQUAD, more))] == ["s"]
    capsys.readouterr()
    chat = [{"role": "system", "content": "Be brief."}, *MEMAGENT["prompt"]]
    path = parquet(tmp_path / "v.parquet", [MEMAGENT | {"prompt": chat}] * 3)
    assert {task.question for task in read(path)} == {"Who keeps bees?"}
    assert " ".join(capsys.readouterr().out.split()).endswith(": 3.")


@pytest.mark.parametrize(("tree", "ids"), [
    (OWN, ["0"]), ({"data": [OWN, OWN]}, ["0", "1"]), ({"train": [OWN], "test": [OWN]}, ["0", "1"]),
    ({"version": 2, "questions": [OWN | {"id": "a"}]}, ["a"]),
    ({"q1": OWN, "q2": OWN | {"id": "own"}}, ["q1", "own"]),
])  # fmt: skip
@pytest.mark.parametrize("indent", [None, 1])
def test_json_of_one_value(tmp_path, tree, ids, indent):
    path = tmp_path / "x.json"
    path.write_text("\ufeff\n" + json.dumps(tree, indent=indent), encoding="utf-8")
    assert [task.id for task in read(path)] == ids


def test_running_text_and_passages(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("Über Bienen\r\n".encode()))
    lines(tmp_path / "c.jsonl", [{"title": "T", "text": "Third."}, {"text": "Fourth."}])
    assert read_texts(tmp_path / "a.txt.gz") == ["Über Bienen\r\n"]
    assert read_texts(tmp_path / "c.jsonl") == ["Third.", "Fourth."]
    with pytest.raises(UserError, match=r"c.jsonl, line 2"):
        read_passages(tmp_path / "c.jsonl")
    records = [{"title": "T", "text": "X", "source": "s"}, {"title": "U", "text": "Y"}]
    path = lines(tmp_path / "extra.jsonl.gz", records)
    assert read_passages(path) == Pool(["T", "U"], ["X", "Y"])
    for name, raw in (("x.txt", b"ok\n\xff\xfe"), ("x.txt", b" \n"), ("x.gz", b"no"), ("y", None)):
        if raw is not None:
            (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=name):
            read_texts(tmp_path / name)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("bad", [
    '{"question": "Q"', "[1, 2]", "nonsense", '{"a": 1} {"a": 2}', "[" * 20000, "9" * 5000,
    '{"question": "\udcff"}',
])  # fmt: skip
def test_broken_line_is_named(tmp_path, k, bad):
    records = [OWN, OWN, OWN]
    records[k - 1] = bad
    # A file that starts so is taken for a JSON array
    place = "own.jsonl" if k == 1 and bad.startswith("[") else f", line {k}: "
    fails(lines(tmp_path / "own.jsonl", records), place)


@pytest.mark.parametrize(("good", "change"), [
    *((OWN, change) for change in (
        {"id": " "}, {"answers": [""]}, {"answers": True}, {"answers": []}, {"context": []},
        {"answers": ["Ada", float("nan")]}, {"context": ["Ada.", ""]}, {"question": "\ud800"},
        {"choices": ["Ada", None]}, {"option1": "Ada"}, {"choice_A": "Ada"}, {"opa": "Ada"},
        {"answer_choices": {"label": ["A"], "text": ["Ada"]}}, {"A": "Ada"},
    )),
    *((EVAL, {"context": bad}) for bad in ([[]], [1, -1], [1, "a"])),
    (PLACED, {"evidence_idx": [1, 3]}), (MEMAGENT, {"reward_model": {}}),
    (MEMAGENT, {"prompt": [{"role": "assistant", "content": "Q?"}]}),
    *((hotpot(1), {"context": bad}) for bad in ([["T", "text"]], [["T"]], [[None, ["text"]]])),
    (SQUAD, {"title": ""}), (MUSIQUE, {"question_decomposition": [{"paragraph_support_idx": 3}]}),
    *((paragraphs(1), {"hops": bad}) for bad in ([10], [-1], [True], "1")),
])  # fmt: skip
def test_a_bad_record_is_named_with_its_place(tmp_path, good, change):
    records = good | {"id": "a", "_id": "a"}, good | change
    fails(written(tmp_path / "x.jsonl", *records), "line 2")
    fails(written(tmp_path / "x.json", *records), "item 2")


@pytest.mark.parametrize("record", [
    OWN | {"answers": [""] * 1000}, EVAL | {"context": [0] + [-1] * 1000},
    OWN | {"context": [""] * 1000}, paragraphs(1) | {"hops": [-1] * 1000},
    hotpot(1) | {"context": [["T"]] * 1000}, hotpot(1) | {"context": [["T", [1] * 1000]]},
    hotpot(1) | {"context": [["", ["x"]]] * 1000},
])  # fmt: skip
def test_of_many_mistakes_the_first_is_told(tmp_path, record):
    """A million of them take a gigabyte."""
    with pytest.raises(UserError) as error:
        read(written(tmp_path / "x.jsonl", record))
    assert error.value.__cause__.error_count() == 1


VALUES = (None, 2**70, True, " ", "\ud800", [], [None], [[5, "x"]], [{}], {"title": 5})


def places(value, at=()):
    """Yield every place of a tree of JSON."""
    yield at
    keys = range(len(value)) if isinstance(value, list) else value
    for key in keys if isinstance(value, list | dict) else ():
        yield from places(value[key], (*at, key))


@pytest.mark.parametrize("good", [
    *([record] for record in (MEMAGENT, RULER, HUB, hotpot(1), MUSIQUE, OWN, SQUAD, FLASHRAG)),
    [EVAL | {"evidence_idx": [0], "context": "Document 1:\nA\nAda."}],
    [paragraphs(1, 3) | {"hops": [2, 0]}], BUILT, TREE,
])  # fmt: skip
def test_whatever_stands_at_any_place_is_read_or_refused(tmp_path, good):
    """Remove every field of every form, and every part of it, or replace it by a value of each
    type, after a good record, so that the form is known. Any task that is read can be used."""
    path, refused = tmp_path / "2wiki.jsonl", 0
    first = {"id": "first", "_id": "first", "extra_info": {"id": "first"}}
    for at, value in product((at for at in places(good) if len(at) > 1), (*VALUES, GONE)):
        bad = changed(good, at, value)
        if good is TREE:
            path.write_text(json.dumps(bad))
        else:
            lines(path, bad if good is BUILT else [good[0] | first, *bad])
        try:
            for task in read(path):
                assert task.document.strip() and task.question.strip()
                assert task.question_digest and task.digest
                assert task.answers and all(answer.strip() for answer in task.answers)
                ",".join((task.id, task.kind, task.dataset, task.split, task.level)).encode()
        except UserError as error:
            assert path.name in str(error) and "\n" not in str(error)
            assert good in (BUILT, TREE) or ", line 2: " in str(error)
            refused += 1
    assert refused > 20


def test_files_that_hold_no_tasks_are_named(tmp_path):
    for name in ("x.jsonl", "x.json", "x.jsonl.gz", "x.txt", "x.parquet"):
        (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
        fails(tmp_path / name)
    fails(tmp_path / "none.jsonl", "data get")
    fails(tmp_path)
    (tmp_path / "x.csv").write_text("question,context,answer\nWho?,Ada,Ada\n")
    fails(tmp_path / "x.csv")
    (tmp_path / "x.json").write_text(json.dumps(OWN, indent=1).replace('"context": ', '"context" '))
    fails(tmp_path / "x.json", "line 7 ")
    fails(written(tmp_path / "i.jsonl", *[OWN | {"id": "a"}] * 2), "line 2:")
    rows = [OWN] * 100 + [OWN | {"question": ""}]
    fails(written(tmp_path / "x.parquet", *rows), "row 101:")
    verifiers = {"prompt": "Who?", "answer": "Ada", "info": {"context": "Ada."}}
    for other in ({"query": "Q?", "passage": "P"}, verifiers, ASKED | {"ctxs": ["Ada."]}):
        fails(written(tmp_path / "o.jsonl", other), "line 1:")
    fails(written(tmp_path / "hotpotqa.jsonl", FLASHRAG), "2wiki")


def test_a_users_function_returns_tasks_or_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from data import Task\n\ndef good():\n    yield Task('a', 'Q?', ('A',), 'T')\n"
                    "    yield Task('b', 'Q?', ('A',), 'T')\n\ndef bad():\n    return ['Q?']\n\n"
                    "def none():\n    return []\n\ndef no():\n    pass\n")  # fmt: skip
    assert [task.id for task in read(f"{file}:good", n=1)] == ["a"]
    for name in ("bad", "none", "no"):
        with pytest.raises(UserError, match=f"mine.py:{name}"):
            read(f"{file}:{name}")


@settings(max_examples=80)
@given(st.floats(0, 1), st.binary(max_size=6), st.booleans(),
       st.sampled_from(["x.jsonl", "x.json", "x.jsonl.gz", "x.parquet"]))  # fmt: skip
def test_damage_is_a_user_error_or_nothing(tmp_path, cut, junk, breaks_off, name):
    """Whatever bytes are written over a file, reading it gives tasks or one sentence."""
    path = written(tmp_path / name, OWN, OWN | {"question": "Q?"})
    raw = path.read_bytes()
    at = int(cut * len(raw))
    path.write_bytes(raw[:at] + junk + (b"" if breaks_off else raw[at + len(junk) :]))
    try:
        assert all(isinstance(task, Task) for task in read(path))
        assert not (breaks_off and at < len(raw) - 8 and path.suffix in (".gz", ".parquet"))
    except UserError as error:
        assert name in str(error)


text = st.text(min_size=1, max_size=20).filter(str.strip)  # line separators, NUL, emoji, quotes
row = st.tuples(text, st.lists(text, min_size=1, max_size=3), text, st.text(max_size=5))


@settings(max_examples=15)
@given(st.lists(row, min_size=1, max_size=4), st.sampled_from([*FRAMES]))
def test_any_text_comes_back(tmp_path, rows, frame):
    tasks = [Task(str(i), q, tuple(a), text=c, kind=k) for i, (q, a, c, k) in enumerate(rows)]
    write_eval_json(tmp_path / "x.json", tasks)
    assert read(tmp_path / "x.json") == tasks
    titles = [task.question for task in tasks] if frame == "documents" else []
    place = dict(pool=Pool(titles, [task.text for task in tasks], frame), gold=(1,), tokens=4096)
    tasks = [
        dataclasses.replace(task, text=None, order=(0, i), dataset="ruler", **place)
        for i, task in enumerate(tasks)
    ]
    write_built(tmp_path / "set.jsonl.gz", tasks, tokenizer="t")
    back = read(tmp_path / "set.jsonl.gz")
    assert back == tasks and {task.tokens for task in back} == {4096}
    assert [t.document for t in back] == [t.document for t in tasks]


@pytest.mark.parametrize(("write", "name"), [(write_eval_json, "x.json"), (write_built, "s.jsonl")])
def test_nothing_is_half_written(tmp_path, write, name):
    path = tmp_path / name
    path.write_bytes(b"what was there before")
    good = questions(tmp_path, 3)
    there = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises((IndexError, TypeError)):
        write(path, [*good, dataclasses.replace(good[0], id=b"no JSON", order=(10**6,))])
    with pytest.raises(UserError):
        write(tmp_path / "none" / name, good)
    assert path.read_bytes() == b"what was there before"
    assert sorted(p.name for p in tmp_path.iterdir()) == there


def test_a_damaged_set_is_named(tmp_path):
    path = tmp_path / "set.jsonl"
    write_built(path, questions(tmp_path, 2), seed=5)
    whole = path.read_text("utf-8").splitlines()
    head, *rest, last = whole
    assert json.loads(head) == {"form": "memagent-set", "passages": 20, "tasks": 2, "seed": 5}
    for cut in (whole[:-1], whole[:1]):
        fails(lines(path, cut), "line 1:")
    for change in ({"order": [20], "gold": []}, {"gold": [20]}, {"order": []}, {"gold": True},
                   {"order": [[]], "gold": []}):  # fmt: skip
        fails(lines(path, [head, *rest, json.loads(last) | change]), "line 23:")
    for change in ({"frame": "odd"}, {"frame": []}, {"passages": "20"}, {"tasks": -1}):
        fails(lines(path, [json.loads(head) | change, *rest, last]), "line 1")
    fails(lines(path, [head, '{"title": "T"}', *rest[1:], last]), "line 2")


@real
@pytest.mark.parametrize("name", ["hotpotqa_dev", "2wikimultihopqa_dev", "musique_dev"])
def test_real_questions_have_their_own_evidence(name):
    tasks = read(SHARED / f"{name}.jsonl.gz")
    assert len({id(task.pool) for task in tasks}) == 1
    with gzip.open(SHARED / f"{name}.jsonl.gz") as stream:
        for task, line in zip(tasks, stream, strict=True):
            record = json.loads(line)
            evidence = [record["paragraphs"][k] for k in record["hops"]]
            assert gold_titles(task) == [paragraph["title"] for paragraph in evidence]
            assert len(task.order) == len(record["paragraphs"]) and task.kind == record["type"]
    assert {task.split for task in tasks} <= {"train", "validation"}
