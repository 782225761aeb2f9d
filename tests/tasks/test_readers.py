"""Every reader against good and broken files, round trips, sets. All text here is made up."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from data import Pool, Task
from tasks import readers, writers
from tasks.hqa import make_tasks
from tasks.readers import from_text, read, read_passages
from tasks.writers import write_built

SHARED = Path(__file__).parents[3] / "shared" / "data"
FIELDS = ("id", "question", "answers", "document", "kind", "dataset", "split")


def same(a: list[Task], b: list[Task]) -> bool:
    return [[getattr(t, f) for f in FIELDS] for t in a] == [
        [getattr(t, f) for f in FIELDS] for t in b
    ]


def lines(path: Path, records: list) -> Path:
    raw = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def array(path: Path, records: list) -> Path:
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return path


def parquet(path: Path, records: list) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def fails(path: Path, *words: str, **kwargs) -> None:
    """Reading is refused in one line that names the file and has all the words."""
    with pytest.raises(UserError) as error:
        read(path, **kwargs)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    for word in (path.name, *words):
        assert word in message, message


# ---- good records, one of each form ----

OWN = {"question": "Who keeps bees?", "answers": ["Ada", "Ada L."], "context": "Ada keeps bees."}
MEMAGENT = {
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "Who keeps bees?"}],
    "context": "Document 1:\nAda\nAda keeps bees.",
    "ability": "memory",
    "reward_model": {"style": "rule", "ground_truth": ["Ada"]},
    "extra_info": {"index": 7, "question": "Who keeps bees?", "num_docs": 1},
}
VIME = {
    "prompt": "Who keeps bees?",
    "label": "Ada",
    "metadata": {
        "context": "Ada keeps bees.", "ground_truth": ["Ada", "Ada L."], "num_docs": 1,
        "data_source": "hotpotqa",
    },
}  # fmt: skip
EVAL = {
    "context": "Ada keeps bees.", "input": "Who keeps bees?", "answers": ["Ada"], "num_docs": 1,
    "index": 3,
}  # fmt: skip
RULER = {
    "index": 0, "input": "Which?", "context": "One is 12. Two is 34.", "outputs": ["12", "34"],
    "answer_prefix": "", "length": 9,
}  # fmt: skip


def hotpot(i: int, context: list | None = None) -> dict:
    own = [
        [f"Town {i}", [f"Town {i} lies in Land {i}.", " It is old."]],
        [f"Land {i}", [f"Land {i} is ruled by Queen {i}."]],
    ]
    return {
        "_id": f"q{i}",
        "question": f"Who rules the land of Town {i}?",
        "answer": f"Queen {i}",
        "supporting_facts": [[f"Land {i}", 0], [f"Town {i}", 0], [f"Land {i}", 1]],
        "context": context or [["Common", ["A common text."]], *own],
        "type": "bridge",
        "level": "hard",
    }


def paragraphs(i: int, n_own: int = 10) -> dict:
    own = [
        {"title": f"T{i}-{k}", "text": f"Text {k} of {i}.", "is_supporting": k in (2, 7)}
        for k in range(n_own)
    ]
    labels = {"id": f"q{i}", "dataset": "made", "orig_split": "train", "type": "bridge"}
    return labels | {
        "question": f"Question {i}?",
        "answers": [f"A{i}", "B"],
        "hops": [7, 2],
        "paragraphs": own,
    }


EXTRA = Pool([f"E{k}" for k in range(300)], [f"Extra text {k}." for k in range(300)])


def questions(tmp_path: Path, n: int = 8) -> list[Task]:
    return read(lines(tmp_path / "questions.jsonl", [paragraphs(i) for i in range(n)]))


# ---- readers, good files ----


@pytest.mark.parametrize("container", [lines, array, parquet])
def test_own_in_every_container(tmp_path, container):
    name = {lines: "own.jsonl", array: "own.json", parquet: "own.parquet"}[container]
    (task,) = read(container(tmp_path / name, [OWN]))
    assert task == Task("0", OWN["question"], ("Ada", "Ada L."), text="Ada keeps bees.")


def test_own_with_one_answer_labels_blank_lines_and_gz(tmp_path):
    one = {
        "id": 17, "question": "When?", "answer": "1994-05-01", "context": "On 1994-05-01.",
        "kind": "date", "split": "train",
    }  # fmt: skip
    path = lines(tmp_path / "own.jsonl.gz", ["", one, "  ", OWN])
    first, second = read(path)
    # A date stays a text
    expected = ("17", ("1994-05-01",), "date", "train")
    assert (first.id, first.answers, first.kind, first.split) == expected
    assert second.id == "1"


def test_own_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(OWN).encode() + b"\r\n")
    assert read(path)[0].question == OWN["question"]


def test_memagent_parquet(tmp_path):
    (task,) = read(parquet(tmp_path / "train.parquet", [MEMAGENT | {"score_boxed_x": 0.5}]))
    assert task == Task(
        "0", "Who keeps bees?", ("Ada",), text=MEMAGENT["context"], dataset="hotpotqa"
    )


def test_vime(tmp_path):
    short = {"prompt": "Q?", "label": "A", "metadata": {"context": "C"}}
    first, second = read(lines(tmp_path / "vime.jsonl", [VIME, short]))
    assert first == Task(
        "0", "Who keeps bees?", ("Ada", "Ada L."), text="Ada keeps bees.", dataset="hotpotqa"
    )
    assert second == Task("1", "Q?", ("A",), text="C")


def test_eval_json(tmp_path):
    assert read(array(tmp_path / "eval_50.json", [EVAL])) == [
        Task("0", "Who keeps bees?", ("Ada",), text="Ada keeps bees.")
    ]


def test_ruler_json_names_its_task(tmp_path):
    (task,) = read(array(tmp_path / "eval_niah_single_1_8192.json", [RULER]))
    assert (task.kind, task.dataset, task.answers) == ("niah_single_1", "ruler", ("12", "34"))


def test_tasks_know_how_long_they_are(tmp_path):
    sources = {
        50: lines(
            tmp_path / "vime.jsonl", [VIME | {"metadata": VIME["metadata"] | {"num_docs": 50}}]
        ),
        40: array(tmp_path / "eval_40.json", [EVAL | {"num_docs": 40}]),
        30: parquet(
            tmp_path / "a.parquet", [MEMAGENT | {"extra_info": {"index": 7, "num_docs": 30}}]
        ),
        3: array(
            tmp_path / "b.json", [EVAL | {"num_docs": None, "context": EXTRA.document(range(3))}]
        ),
        1: lines(tmp_path / "own.jsonl", [OWN]),
        10: lines(tmp_path / "shared.jsonl", [paragraphs(1)]),
    }
    for n, path in sources.items():
        (task,) = read(path)
        assert (task.n_documents, task.tokens) == (n, 0)
        for form, name in FILES.items():
            writers.write(tmp_path / name, [task], form)
            assert read(tmp_path / name)[0].n_documents == n
    for name, kind, tokens in (
        ("eval_vt_16384.json", "vt", 16384),
        ("eval_qa_1_8192.json", "qa_1", 8192),
        ("mine.json", "mine", 0),
    ):
        (task,) = read(array(tmp_path / name, [RULER]))
        assert (task.kind, task.tokens, task.dataset) == (kind, tokens, "ruler")
        assert task.asks_for_all == (kind != "qa_1")
    assert not read(sources[1])[0].asks_for_all


def test_hotpotqa_shares_one_pool(tmp_path):
    tasks = read(array(tmp_path / "hotpot.json", [hotpot(1), hotpot(2)]))
    assert tasks[0].pool is tasks[1].pool and len(tasks[0].pool.titles) == 5  # Common once
    task = tasks[1]
    expected = ("q2", "bridge", "hotpotqa", ("Queen 2",))
    assert (task.id, task.kind, task.dataset, task.answers) == expected
    # Each once, in order
    assert [task.pool.titles[task.order[g]] for g in task.gold] == ["Land 2", "Town 2"]
    assert (
        task.clues == ("Land 2", "Town 2")
        and read(array(tmp_path / "w.json", [OWN]))[0].clues == ()
    )
    assert task.document.startswith(
        "Document 1:\nCommon\nA common text.\n\n"
        "Document 2:\nTown 2\nTown 2 lies in Land 2. It is old.\n\n"
    )


@pytest.mark.parametrize("nested", [False, True])
def test_eval_json_of_passage_numbers(tmp_path, nested):
    source = array(tmp_path / "hotpotqa_dev.json", [hotpot(1), hotpot(2)])
    numbers = [4, 0, 2]  # in the sorted passages: Common, Land 1, Land 2, Town 1, Town 2
    path = array(
        tmp_path / "eval_12800.json", [EVAL | {"context": [numbers] if nested else numbers}]
    )
    (task,) = read(path, pool=source)
    assert [task.pool.titles[k] for k in task.order] == ["Town 2", "Common", "Land 2"]
    fails(path, "item 1", "passage numbers", "HotpotQA")
    path = array(tmp_path / "eval_12800.json", [EVAL | {"context": [0, 5]}])
    fails(path, "item 1", "from 0 to 4", pool=source)


def test_shared_paragraphs(tmp_path):
    tasks = questions(tmp_path, 2)
    assert tasks[0].pool is tasks[1].pool and len(tasks[0].pool.titles) == 20
    expected = ("q1", "bridge", "train", "made")
    assert (tasks[1].id, tasks[1].kind, tasks[1].split, tasks[1].dataset) == expected
    assert [tasks[1].pool.titles[tasks[1].order[g]] for g in tasks[1].gold] == ["T1-7", "T1-2"]


HUB = {
    "id": "h1",
    "question": "Who?",
    "answer": "Ada",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": {"title": ["B", "A", "B"], "sent_id": [0, 1, 2]},
    "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]},
}
FLASHRAG = {
    "id": "dev_0",
    "question": "Who?",
    "golden_answers": ["Ada", "A. L."],
    "metadata": {
        "type": "inference",
        "supporting_facts": HUB["supporting_facts"],
        "context": {"title": ["A", "B"], "content": [["One.", "Two."], ["Three."]]},
    },
}
MUSIQUE = {
    "id": "2hop__1",
    "question": "Who?",
    "answer": "Ada",
    "answer_aliases": ["A. L."],
    "answerable": True,
    "paragraphs": [
        {"idx": k, "title": f"T{k}", "paragraph_text": f"Text {k}.", "is_supporting": k in (0, 2)}
        for k in range(3)
    ],
    "question_decomposition": [
        {"id": 1, "paragraph_support_idx": 2},
        {"id": 2, "paragraph_support_idx": 0},
    ],
}
SQUAD = {"version": "1.1", "data": [{"title": "Bees", "paragraphs": [
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


def test_hotpotqa_of_the_hub(tmp_path):
    (task,) = read(parquet(tmp_path / "validation.parquet", [HUB]))
    expected = ("h1", ("Ada",), "bridge", "hotpotqa", (1, 0))
    assert (task.id, task.answers, task.kind, task.dataset, task.gold) == expected
    assert task.level == "hard"
    lacking = HUB | {"supporting_facts": {"title": ["B", "gone"], "sent_id": [0, 1]}}
    assert read(lines(tmp_path / "fullwiki.jsonl", [lacking]))[0].gold == ()  # not a part of it
    assert task.document == "Document 1:\nA\nOne. Two.\n\nDocument 2:\nB\nThree."
    fails(
        lines(
            tmp_path / "x.jsonl", [HUB | {"context": {"title": ["A"], "sentences": [["x"], ["y"]]}}]
        ),
        "1 titles and 2 sentences",
    )


def test_flashrag_joins_the_sentences_of_2wiki_by_a_blank(tmp_path):
    (tmp_path / "2wiki").mkdir()
    (task,) = read(lines(tmp_path / "2wiki" / "dev.jsonl", [FLASHRAG]))
    expected = ("dev_0", ("Ada", "A. L."), "inference", "2wikimultihopqa")
    assert (task.id, task.answers, task.kind, task.dataset) == expected
    assert task.gold == (1, 0) and task.pool.texts == ["One. Two.", "Three."]
    (task,) = read(lines(tmp_path / "dev.jsonl", [FLASHRAG]))
    # HotpotQA's sentences bring their own blanks
    assert task.dataset == "hotpotqa" and task.pool.texts[0] == "One.Two."
    official = {
        "_id": "w", "question": "Who?", "answer": "Ada", "evidences": [], "type": "inference",
        "supporting_facts": [["B", 0]], "context": [["A", ["One.", "Two."]], ["B", ["Three."]]],
    }  # fmt: skip
    (task,) = read(array(tmp_path / "dev.json", [official]))
    assert (
        task.dataset == "2wikimultihopqa"
        and task.pool.texts[0] == "One. Two."
        and task.gold == (1,)
    )


def test_musique(tmp_path):
    (task,) = read(lines(tmp_path / "m.jsonl", [MUSIQUE]))
    expected = ("2hop__1", ("Ada", "A. L."), "2hop", "musique", (2, 0))
    assert (task.id, task.answers, task.kind, task.dataset, task.gold) == expected
    assert task.pool.texts == ["Text 0.", "Text 1.", "Text 2."]


@pytest.mark.parametrize("indent", [None, 1])
def test_squads_tree(tmp_path, indent):
    path = tmp_path / "squad.json.gz"
    path.write_bytes(gzip.compress(json.dumps(SQUAD, indent=indent).encode()))
    one, two = read(path)  # a question that cannot be answered is none
    assert (one.id, one.answers, one.gold, one.dataset) == ("s1", ("Ada",), (0,), "squad")
    assert two.document == "Document 1:\nBees\nBo keeps ants." and two.pool is one.pool
    (flat,) = read(
        parquet(
            tmp_path / "s.parquet",
            [
                {
                    "id": "s1",
                    "title": "Bees",
                    "question": "Who?",
                    "context": "Ada.",
                    "answers": {"text": ["Ada"], "answer_start": [0]},
                }
            ],
        )
    )
    assert (flat.id, flat.answers, flat.document) == ("s1", ("Ada",), "Document 1:\nBees\nAda.")
    bad = json.loads(json.dumps(SQUAD))
    del bad["data"][0]["paragraphs"][1]["context"]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(bad))
    fails(path, "article 1, paragraph 2", "'context' is missing")


# ---- forms that people have, read rightly or named ----


@pytest.mark.parametrize(
    ("answer", "answers"),
    [
        (["Ada", "A. L."], ("Ada", "A. L.")), (1931, ("1931",)), (2.5, ("2.5",)), (3.0, ("3",)),
        ({"value": "Ada", "aliases": ["A. L."], "type": "x"}, ("Ada", "A. L.")),
        ({"text": ["Ada"], "answer_start": [0]}, ("Ada",)), ([{"text": "Ada"}, 7], ("Ada", "7")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["answer", "answers"])
def test_answers_of_common_forms(tmp_path, name, answer, answers):
    record = {"question": "Who?", "context": "Ada keeps bees.", name: answer}
    assert read(lines(tmp_path / "x.jsonl", [record]))[0].answers == answers
    record = {"prompt": "Who?", "reward_model": {"ground_truth": answer}, "context": "Ada."}
    assert read(lines(tmp_path / "x.jsonl", [record]))[0].answers == answers


@pytest.mark.parametrize(
    ("name", "passages", "document", "n"),
    [
        ("context", ["One.", "Two."], "Document 1:\nOne.\n\nDocument 2:\nTwo.", 2),
        ("ctxs", [{"title": "A", "text": "One.", "score": "9"}], "Document 1:\nA\nOne.", 1),
        ("passages", [{"content": "One."}], "Document 1:\nOne.", 1),
        ("context", [["A", ["One.", " Two."]]], "Document 1:\nA\nOne. Two.", 1),
        ("article", "One.", "One.", 1),
    ],
)
def test_documents_of_common_forms(tmp_path, name, passages, document, n):
    record = {"question": "Who?", "answer": "Ada", name: passages}
    (task,) = read(lines(tmp_path / "x.jsonl", [record]))
    assert (task.document, task.n_documents) == (document, n)


def test_squad_without_titles_and_ids_with_an_underline(tmp_path):
    record = {
        "_id": "5a", "question": "Who?", "context": "Ada.",
        "answers": {"text": ["Ada"], "answer_start": [0]},
    }  # fmt: skip
    (task,) = read(parquet(tmp_path / "x.parquet", [record]))
    assert (task.id, task.answers, task.text) == ("5a", ("Ada",), "Ada.")


def test_questions_without_an_answer_are_left_out_and_counted(tmp_path, capsys):
    unanswered = MUSIQUE | {"answerable": False}  # musique_full has each id twice
    path = lines(tmp_path / "m.jsonl", [unanswered, MUSIQUE, unanswered | {"id": "2hop__2"}])
    assert [task.id for task in read(path)] == ["2hop__1"]
    said = "left out, questions that their document does not answer: 2."
    assert f"m.jsonl: {said}" in " ".join(capsys.readouterr().out.split())
    assert len([*readers.parsed(path)]) == 1
    assert said in " ".join(capsys.readouterr().out.split())
    fails(lines(path, [unanswered]), "holds no question that its document answers")
    nothing = {"id": "s1", "answers": {"text": [], "answer_start": []}}
    hub = {"id": "s2", "title": "B", "question": "Who?", "context": "Ada.",
           "answers": {"text": ["Ada"], "answer_start": [0]}}  # fmt: skip
    assert [task.id for task in read(lines(path, [hub | nothing, hub]))] == ["s2"]
    capsys.readouterr()
    tree = tmp_path / "squad.json"
    tree.write_text(json.dumps(SQUAD))
    assert len(read(tree)) == 2 and "answer: 1." in " ".join(capsys.readouterr().out.split())


def test_messages_before_the_question_are_counted(tmp_path, capsys):
    chat = [{"role": "system", "content": "Be brief."}, *MEMAGENT["prompt"]]
    path = parquet(tmp_path / "v.parquet", [MEMAGENT | {"prompt": chat}] * 3)
    assert {task.question for task in read(path)} == {"Who keeps bees?"}
    said = " ".join(capsys.readouterr().out.split())
    assert "left out, messages of 'prompt' before the question (role system): 3." in said
    prime = {"prompt": chat[1:], "answer": "Ada", "info": {"context": "Ada.", "id": "p"}}
    (task,) = read(lines(tmp_path / "p.jsonl", [prime]))
    assert (task.id, task.question, task.answers) == ("p", "Who keeps bees?", ("Ada",))
    assert task.text == "Ada." and capsys.readouterr().out == ""
    fails(lines(tmp_path / "p.jsonl", [prime | {"info": {"n": 1}}]), "'context' is missing")


@pytest.mark.parametrize(
    ("tree", "ids"),
    [
        (OWN, ["0"]),
        ({"data": [OWN, OWN]}, ["0", "1"]),
        ({"version": 2, "questions": [OWN | {"id": "a"}]}, ["a"]),
        ({"train": [OWN], "test": [OWN]}, ["0", "1"]),
        ({"q1": OWN, "q2": OWN | {"id": "own"}}, ["q1", "own"]),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_json_of_one_value(tmp_path, tree, ids, indent):
    path = tmp_path / "x.json"
    path.write_text("\n" + json.dumps(tree, indent=indent))
    assert [task.id for task in read(path)] == ids
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(tree, indent=indent).encode())
    assert [task.document for task in read(path)] == [OWN["context"]] * len(ids)


def test_what_is_no_json_is_named_where_it_breaks(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(OWN, indent=1).replace('"context": ', '"context" '))
    fails(path, "line 7: this is not JSON")
    path = tmp_path / "x.csv"
    path.write_text("question,context,answer\nWho?,Ada,Ada\n")
    fails(path, "is a table of text", "JSON lines")
    fails(lines(tmp_path / "m.jsonl", [{k: v for k, v in MUSIQUE.items() if k != "answer"}]),
          "line 1: the field 'answer' is missing")  # fmt: skip
    bare = {k: v for k, v in hotpot(1).items() if k not in ("answer", "supporting_facts")}
    fails(lines(tmp_path / "h.jsonl", [bare]), "line 1: the field 'answer' is missing")


# ---- tasks and their passages ----


def test_frames_evidence_and_depths():
    pool = Pool(["A", "B", "C"], ["a.", "b.", "c."])
    task = Task("x", "Q?", ("y",), pool=pool, order=(2, 0, 1, 2), gold=(3, 1))
    assert task.evidence == "Document 1:\nA\na.\n\nDocument 2:\nC\nc."  # in reading order
    assert task.depths == (0.875, 0.375) and task.n_documents == 4
    texts = {"lines": "c.\na.", "words": "c. a.", "numbered": "1. c. 2. a."}
    for frame, text in texts.items():
        task = Task("x", "Q?", ("y",), pool=Pool([], ["a.", "b.", "c."], frame), order=(2, 0))
        assert (
            task.document == text
            and task.n_documents == 1
            and task.evidence is None
            and task.depths == ()
        )
        assert abs(task.characters - len(text)) < 20
    assert Task("x", "Q?", ("y",), text="t", gold=(0,)).evidence is None
    assert Task("x", "Q?", ("y",), text="t", dataset="ruler", kind="cwe").evidence == "t"


def test_a_digest_tells_tasks_apart_and_needs_no_document():
    def digest(
        question="Q?",
        answers=("y",),
        order=(0, 1),
        frame="documents",
        texts=("a.", "b."),
        titles=("A", "B"),
    ):
        return Task("x", question, answers, pool=Pool(titles, texts, frame), order=order).digest

    same = digest()
    others = [
        digest("R?"),
        digest(answers=("y", "z")),
        digest(order=(1, 0)),
        digest(order=(0,)),
        digest(frame="words"),
        digest(texts=("a.", "c.")),
        digest(titles=("A", "C")),
        digest(texts=("a.B", ".")),
        Task("x", "Q?", ("y",), text="a").digest,
    ]
    assert digest() == same and len({same, *others}) == 10
    more = Task("x", "Q?", ("y",), pool=Pool(("Z", "A", "B"), ("z", "a.", "b.")), order=(1, 2))
    assert more.digest == same  # what else is in the pool plays no part


@pytest.mark.parametrize("frame", ["lines", "words", "numbered"])
def test_sets_of_other_frames_come_back(tmp_path, frame):
    pool = Pool([], ["one", "two", "three"], frame)
    tasks = [
        Task(
            f"t{k}",
            "Q?",
            ("a", "b"),
            pool=pool,
            order=(k, 2, 2),
            gold=(1,),
            kind="vt",
            dataset="ruler",
            tokens=4096,
        )
        for k in (0, 1)
    ]
    write_built(tmp_path / "set.jsonl.gz", tasks, tokenizer="t")
    back = read(tmp_path / "set.jsonl.gz")
    assert (
        back == tasks
        and [t.document for t in back] == [t.document for t in tasks]
        and back[0].tokens == 4096
    )
    whole = gzip.decompress((tmp_path / "set.jsonl.gz").read_bytes()).decode().splitlines()
    fails(
        lines(tmp_path / "bad.jsonl", [whole[0].replace(frame, "odd"), *whole[1:]]),
        "'frame' must be one of",
    )


def test_running_text_of_files_and_folders(tmp_path):
    essays = tmp_path / "essays"
    essays.mkdir()
    (essays / "b.txt").write_text("Second.")
    (essays / "a.txt").write_text("First.")
    lines(essays / "c.jsonl", [{"title": "T", "text": "Third."}, {"text": "Fourth."}])
    (essays / ".hidden").write_text("no")
    assert readers.read_texts(essays) == ["First.", "Second.", "Third.", "Fourth."]
    with pytest.raises(UserError, match="No file at"):
        readers.read_texts(tmp_path / "none.txt")


def test_passages(tmp_path):
    path = lines(
        tmp_path / "extra.jsonl.gz",
        [{"title": "T", "text": "X", "source": "s"}, {"title": "U", "text": "Y"}],
    )
    assert read_passages(path) == Pool(["T", "U"], ["X", "Y"])
    with pytest.raises(UserError, match=r"line 2: the field 'text' is missing"):
        read_passages(lines(path, [{"title": "T", "text": "X"}, {"title": "T"}]))


def test_from_text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("Über Bienen\r\n".encode())
    assert from_text(path, "Q?") == Task("book", "Q?", (), text="Über Bienen\r\n")
    for raw, words in ((b"ok\n\xff\xfe", "UTF-8"), (b" \n", "empty")):
        path.write_bytes(raw)
        with pytest.raises(UserError, match=words):
            from_text(path, "Q?")
    with pytest.raises(UserError, match="No file"):
        from_text(tmp_path / "none.txt", "Q?")


# ---- readers, broken files ----


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "bad", ['{"question": "Q"', "[1, 2]", "nonsense", '{"a": 1} {"a": 2}', "[" * 20000, "9" * 5000]
)
def test_broken_line_is_named(tmp_path, k, bad):
    records = [OWN, OWN, OWN]
    records[k - 1] = bad
    path = lines(tmp_path / "own.jsonl", records)
    # A file that starts so is taken for a JSON array: the place is that of its end
    array_at_once = k == 1 and bad.startswith("[")
    fails(path, ", line " if array_at_once else f", line {k}: ")


def test_bytes_that_are_no_utf8_are_named(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_bytes(json.dumps(OWN).encode() + b'\n{"question": "\xff"}\n')
    fails(path, "line 2:", "UTF-8", "0xff")
    path = tmp_path / "array.json"
    path.write_bytes(b'[{"question":\n"\xff"}]\n')
    fails(path, "line 2:", "UTF-8")


BAD_FIELDS = [
    (OWN, {"question": None}, "'question' is missing"),
    (OWN, {"question": " "}, "'question' is empty"),
    (OWN, {"question": 3}, "'question' must be a text, this is a whole number"),
    (OWN, {"answers": []}, "'answers' is empty"),
    (OWN, {"answers": [""]}, "'answers' is empty"),
    (OWN, {"answers": [None]}, "'answers' is empty"),
    (OWN, {"answers": True}, "'answers' must be a text, this is true or false"),
    (OWN, {"answers": ["Ada", float("nan")]}, "'answers' must be a text, this is a number"),
    (OWN, {"answers": {"value": ""}}, "'answers' is empty"),
    (OWN, {"context": ["Ada.", ""]}, "'context' is empty"),
    (OWN, {"story": "Ada."}, "both 'context' and 'story' look like the document"),
    (OWN, {"context": [{"title": "T"}]}, "'text' is missing"),
    (OWN, {"options": "Ada or Bo"}, "'options' looks like choices"),
    (OWN, {"choices": ["Ada", None]}, "'choices' looks like choices"),
    (OWN, {"choices": ["Bo", "Cy"]}, "the answer 'Ada' names none of the choices (A) Bo | (B) Cy"),
    (OWN, {"answers": None}, "'answer' is missing"),
    (OWN, {"context": ""}, "'context' is empty"),
    (OWN, {"context": True}, "'context' must be a text, this is true or false"),
    (OWN, {"context": "\ud800"}, "surrogate"),
    (VIME, {"metadata": {}}, "'metadata' is empty"),
    (VIME, {"metadata": []}, "'metadata' must be an object"),
    (VIME, {"metadata": {"ground_truth": ["a"]}}, "'context' is missing"),
    (EVAL, {"context": []}, "'context' must be a text"),
    (EVAL, {"context": {"a": 1}}, "'context' must be a text"),
    (EVAL, {"context": [[]]}, "'context' must be a text"),
    (EVAL, {"context": [1, -1]}, "'context' must be a list of whole numbers"),
    (EVAL, {"context": [1, "a"]}, "'context' must be a list of whole numbers"),
    (EVAL, {"context": ["a", 1]}, "'context' must be a text"),
    (RULER, {"outputs": {}}, "'outputs' is empty"),
    (MEMAGENT, {"prompt": []}, "'prompt' is empty"),
    (MEMAGENT, {"prompt": ["Q?"]}, "'prompt' must be an object"),
    (MEMAGENT, {"reward_model": {"ground_truth": {}}}, "'ground_truth' is empty"),
    (MEMAGENT, {"context": None}, "'context' is missing"),
    (MEMAGENT, {"prompt": [{"role": "assistant", "content": "Ada."}]}, "not 'assistant'"),
    (MEMAGENT, {"extra_info": 3}, "'extra_info' must be an object"),
    (hotpot(1), {"context": [["T", "text"]]}, "'context' must hold pairs"),
    (hotpot(1), {"context": {"a": ["T"]}}, "'context' must be a list"),
    (hotpot(1), {"context": {"title": ["T"]}}, "'sentences' is missing"),
    (hotpot(1), {"context": [[None, ["text"]]]}, "'context' must be a text"),
    (hotpot(1), {"supporting_facts": [1]}, "'supporting_facts' must hold pairs"),
    (hotpot(1), {"answer": None}, "'answer' is missing"),
    (paragraphs(1), {"hops": [10]}, "'hops' must be a list of whole numbers from 0 to 9"),
    (paragraphs(1), {"hops": "1"}, "'hops' must be a list"),
    (paragraphs(1), {"paragraphs": [{"title": "T"}], "hops": []}, "'text' is missing"),
    (paragraphs(1), {"paragraphs": ["T"]}, "'paragraphs' must be an object"),
]


@pytest.mark.parametrize(("good", "change", "reason"), BAD_FIELDS)
def test_bad_field_is_named(tmp_path, good, change, reason):
    fails(
        lines(tmp_path / "x.jsonl", [good | {"id": "a", "_id": "a"}, good | change]),
        "line 2:",
        reason,
    )
    fails(
        array(tmp_path / "x.json", [good | {"id": "a", "_id": "a"}, good | change]),
        "item 2:",
        reason,
    )


VALUES = (
    None, 5, 2**70, -1, 2.5, True, "", "x", "\ud800", [], [5], [None], ["x"], [[]], [[5, "x"]],
    [{}], {}, {"a": 1}, {"title": 5}, {"text": 5},
)  # fmt: skip
GONE = object()


def changes(value, at=()):
    """Every place of a tree of JSON."""
    yield at
    for key in (
        range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
    ):
        yield from changes(value[key], (*at, key))


def changed(value, at, new):
    """A copy with another value, or none, at a place."""
    if not at:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[at[0]] = changed(value[at[0]], at[1:], new)
    if copy[at[0]] is GONE:
        del copy[at[0]]
    return copy


BUILT = [
    {"form": "memagent-set", "passages": 2, "tasks": 1},
    {"title": "A", "text": "One."},
    {"title": "B", "text": "Two."},
    {"id": "a", "question": "Who?", "answers": ["One"], "order": [1, 0], "gold": [0]},
]
PUBLISHED = {
    "memagent": MEMAGENT,
    "vime": VIME,
    "eval": EVAL | {"evidence_idx": [0], "context": "Document 1:\nA\nAda."},
    "ruler": RULER,
    "flashrag": FLASHRAG,
    "hotpotqa": hotpot(1),
    "hub": HUB,
    "musique": MUSIQUE,
    "shared": paragraphs(1, 3),
    "own": OWN,
    "squad": {
        "id": "s",
        "title": "Bees",
        "question": "Who?",
        "context": "Ada.",
        "answers": [{"text": "Ada"}],
    },
}


@pytest.mark.parametrize("form", [*PUBLISHED, "built", "squad tree"])
def test_whatever_stands_at_any_place_is_read_or_named(tmp_path, form):
    """Remove every field of every form, and every part of it, or replace it by a value of each
    type, after a good record, so that the form is known. Any task that is read can be used."""
    good = {"built": BUILT, "squad tree": [SQUAD]}.get(form) or [PUBLISHED[form]]
    path, refused = tmp_path / "x.jsonl", 0
    for at in changes(good):
        for value in (*VALUES, GONE) if len(at) > 1 else ():
            bad = changed(good, at, value)
            if form in PUBLISHED:
                first = (
                    good[0]
                    | {"id": "first", "_id": "first"}
                    | ({"extra_info": {"id": "first"}} if form == "memagent" else {})
                )
                first |= (
                    {"metadata": good[0]["metadata"] | {"id": "first"}} if form == "vime" else {}
                )
                bad = [first, *bad]
            if form == "squad tree":
                path.write_text(json.dumps(bad[0]))
            else:
                lines(path, bad)
            try:
                for task in read(path):
                    assert (
                        task.document and task.question_digest and task.digest and all(task.answers)
                    )
                    ",".join((task.id, task.kind, task.dataset, task.split, task.level)).encode()
            except UserError as error:
                assert path.name in str(error) and "\n" not in str(error)
                refused += 1
    assert refused > 20


@pytest.mark.parametrize("path", ["x" * 300 + ".jsonl", "x/" * 3000, "a\0b.jsonl", "loop.jsonl"])
def test_a_path_that_the_system_does_not_take_is_named(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("loop.jsonl").symlink_to("loop.jsonl")
    for reader in (read, read_passages, readers.read_texts, lambda path: from_text(path, "Q?")):
        with pytest.raises(UserError, match="cannot be read: ") as error:
            reader(path)
        assert len(str(error.value)) < 400


def test_bad_row_of_parquet_is_named(tmp_path):
    fails(
        parquet(tmp_path / "x.parquet", [OWN] * 100 + [OWN | {"question": ""}]),
        "row 101:",
        "'question' is empty",
    )


def test_an_id_twice_is_named(tmp_path):
    fails(lines(tmp_path / "x.jsonl", [OWN | {"id": "a"}, OWN | {"id": "a"}]), "line 2:", "'a'")


def test_unknown_forms_name_the_known(tmp_path):
    path = lines(tmp_path / "x.jsonl", [{"query": "Q?", "passage": "P"}])
    fails(path, "line 1:", "query, passage", *readers.FORMS)
    fails(lines(path, [OWN]), "own (question, context)", form="csv")
    fails(lines(path, [OWN]), "line 1:", "'input' is missing", form="eval")


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.txt"])
def test_empty_file(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    fails(path, "empty")


def test_missing_file_and_folder(tmp_path):
    fails(tmp_path / "none.jsonl", "No file")
    fails(tmp_path, "No file")


def test_truncated_and_false_gz(tmp_path):
    rng = random.Random(0)  # text that does not compress well, so that the cut falls between lines
    records = [OWN | {"context": "".join(rng.choices("abcdefghij ", k=200))} for _ in range(2000)]
    path = lines(tmp_path / "x.jsonl.gz", records)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    fails(path, ", line ", "cannot be read from here on")
    path.write_bytes(raw[:2000] + b"\0\0\0" + raw[2003:])
    with pytest.raises(UserError, match=r"x\.jsonl\.gz"):
        read(path)
    path.write_bytes(b"plain text")
    fails(path, "cannot be read")


def test_false_and_truncated_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"this is no parquet file at all")
    fails(path, "cannot be read")
    parquet(path, [OWN] * 10)
    raw = path.read_bytes()
    path.write_bytes(raw[:-20])
    fails(path, "cannot be read")
    path.write_bytes(b"")
    fails(path, "cannot be read")


@settings(max_examples=150)
@given(
    cut=st.floats(0, 1),
    junk=st.binary(max_size=6),
    name=st.sampled_from(["x.jsonl", "x.json", "x.jsonl.gz", "x.parquet"]),
)
def test_damage_is_a_user_error_or_nothing(tmp_path, cut, junk, name):
    """Whatever bytes are written over a file, reading it gives tasks or one sentence."""
    path = tmp_path / name
    {"x.json": array, "x.parquet": parquet}.get(name, lines)(path, [OWN, OWN | {"question": "Q?"}])
    raw = path.read_bytes()
    at = int(cut * len(raw))
    path.write_bytes(raw[:at] + junk + raw[at + len(junk) :])
    try:
        assert all(isinstance(task, Task) for task in read(path))
    except UserError as error:
        assert name in str(error)


# ---- writers ----

FILES = {"eval": "x.json", "memagent": "x.parquet", "vime": "x.jsonl.gz"}


@pytest.mark.parametrize("form", FILES)
def test_round_trip(tmp_path, form):
    tasks = make_tasks(questions(tmp_path), 40, seed=1)
    writers.write(tmp_path / FILES[form], tasks, form)
    back = read(tmp_path / FILES[form])
    assert same(tasks, back)
    for other in FILES:  # and from any form to any other
        writers.write(tmp_path / ("2" + FILES[other]), back, other)
        again = read(tmp_path / ("2" + FILES[other]))
        # The eval form alone says where the evidence stands
        assert same(back, again) and (form == "eval" or again == back)


def test_eval_files_say_where_the_evidence_stands(tmp_path):
    tasks = make_tasks(questions(tmp_path), 40, seed=1)
    tasks[0] = dataclasses.replace(tasks[0], gold=tasks[0].gold[:1])
    writers.write_eval_json(tmp_path / "eval_hotpotqa_40.json", tasks)
    back = read(tmp_path / "eval_hotpotqa_40.json")
    assert [(t.gold, t.depths, t.evidence, t.kind) for t in back] == [
        (t.gold, t.depths, t.evidence, t.kind) for t in tasks
    ]
    assert [t.document for t in back] == [t.document for t in tasks]
    items = json.loads((tmp_path / "eval_hotpotqa_40.json").read_text("utf-8"))
    assert items[0]["min_distance"] is None and (
        items[0]["is_ordered"],
        items[0]["is_reverse_ordered"],
    ) == (True, True)
    for item, task in zip(items[1:], tasks[1:], strict=True):
        a, b = task.gold
        expected = (abs(a - b), a < b, a > b)
        assert (item["min_distance"], item["is_ordered"], item["is_reverse_ordered"]) == expected
    # another frame, or none: the text as it stands, without evidence
    items[1]["context"] = "So:\n" + items[1]["context"]
    other = read(
        array(
            tmp_path / "eval_41.json",
            [{k: v for k, v in item.items() if k != "kind"} for item in items],
        )
    )
    assert (other[1].gold, other[1].pool, other[1].text) == (
        (),
        None,
        items[1]["context"],
    ) and other[2].gold == tasks[2].gold
    assert other[2].kind == items[2]["type"] == tasks[2].kind
    theirs = {k: v for k, v in items[2].items() if k != "dataset"} | {
        "level": "hard",
        "evidence_idx": items[2]["evidence_idx"] * 2,
    }
    (again,) = read(array(tmp_path / "eval_2wikimultihopqa_40_min_distance_10.json", [theirs]))
    # a passage that serves twice stands once
    assert (again.dataset, again.level, again.gold) == ("2wikimultihopqa", "hard", tasks[2].gold)
    assert read(array(tmp_path / "eval_40.json", [theirs]))[0].dataset == ""
    writers.write(tmp_path / "eval_hotpotqa_40.json", [again], "eval")
    assert {
        k: json.loads((tmp_path / "eval_hotpotqa_40.json").read_text())[0][k]
        for k in ("level", "dataset")
    } == {"level": "hard", "dataset": "2wikimultihopqa"}
    with pytest.raises(
        UserError, match="'evidence_idx' must be a list of whole numbers from 0 to 39"
    ):
        read(array(tmp_path / "eval_42.json", [items[2] | {"evidence_idx": [3, 40]}]))


def test_round_trip_from_the_published_forms(tmp_path):
    sources = [
        read(parquet(tmp_path / "a.parquet", [MEMAGENT])),
        read(lines(tmp_path / "b.jsonl", [VIME])),
        read(array(tmp_path / "eval_vt_9.json", [RULER])),
        read(array(tmp_path / "d.json", [hotpot(1), hotpot(2)])),
        read(lines(tmp_path / "e.jsonl", [OWN])),
    ]
    for tasks in sources:
        for form, name in FILES.items():
            writers.write(tmp_path / name, tasks, form)
            assert same(tasks, read(tmp_path / name))


text = st.text(min_size=1, max_size=20).filter(str.strip)  # line separators, NUL, emoji, quotes


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(text, st.lists(text, min_size=1, max_size=3), text, st.text(max_size=5)),
        min_size=1,
        max_size=4,
    )
)
def test_any_text_comes_back(tmp_path, rows):
    tasks = [Task(str(i), q, tuple(a), text=c, kind=k) for i, (q, a, c, k) in enumerate(rows)]
    for form, name in FILES.items():
        writers.write(tmp_path / name, tasks, form)
        assert read(tmp_path / name) == tasks
    pool = Pool([task.question for task in tasks], [task.text for task in tasks])
    tasks = [
        Task(t.id, t.question, t.answers, pool=pool, order=(0, i), gold=(1,))
        for i, t in enumerate(tasks)
    ]
    write_built(tmp_path / "set.jsonl.gz", tasks)
    assert read(tmp_path / "set.jsonl.gz") == tasks


@pytest.mark.parametrize("name", FILES.values())
def test_a_blank_label_comes_back_and_a_blank_id_does_not(tmp_path, name):
    form = next(form for form, file in FILES.items() if file == name)
    writers.write(tmp_path / name, [Task("1", "q?", ("a",), text="c", kind=" ")], form)
    assert read(tmp_path / name)[0].kind == " "
    writers.write(tmp_path / name, [Task(" ", "q?", ("a",), text="c")], form)
    with pytest.raises(UserError, match="'id' is empty"):
        read(tmp_path / name)


def test_the_published_forms_are_kept(tmp_path):
    tasks = make_tasks(questions(tmp_path), 40, n_items=2)
    writers.write_eval_json(tmp_path / "x.json", tasks)
    (item, _) = json.loads((tmp_path / "x.json").read_text("utf-8"))
    assert {"context", "input", "answers", "num_docs", "index"} <= set(item) and (
        item["num_docs"],
        item["index"],
    ) == (40, 0)
    writers.write_vime_jsonl(tmp_path / "x.jsonl", tasks)
    line = json.loads((tmp_path / "x.jsonl").read_text("utf-8").splitlines()[1])
    assert line["label"] == tasks[1].answers[0] and line["metadata"]["ground_truth"] == list(
        tasks[1].answers
    )
    writers.write_parquet(tmp_path / "x.parquet", tasks)
    row = pq.read_table(tmp_path / "x.parquet").to_pylist()[1]
    assert list(row) == list(MEMAGENT) and row["prompt"] == [
        {"role": "user", "content": tasks[1].question}
    ]
    expected = (40, 1, "memory")
    assert (row["extra_info"]["num_docs"], row["extra_info"]["index"], row["ability"]) == expected


def test_parquet_is_written_in_parts(tmp_path):
    tasks = [Task(str(i), "Q?", ("A",), text="C") for i in range(70)]
    writers.write_parquet(tmp_path / "x.parquet", tasks)
    assert (
        pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 3
        and read(tmp_path / "x.parquet") == tasks
    )


@pytest.mark.parametrize("form", [*FILES, "built"])
def test_nothing_is_half_written(tmp_path, form):
    path = tmp_path / FILES.get(form, "set.jsonl.gz")
    path.write_bytes(b"what was there before")
    good = make_tasks(questions(tmp_path, 3), 20)
    there = sorted(p.name for p in tmp_path.iterdir())
    # Fails while its document is composed
    broken = [*good, Task("x", "Q?", ("A",), pool=good[0].pool, order=(10**6,))]
    if form == "built":
        broken = [*good, Task("x", "Q?", ({"a"},), pool=good[0].pool, order=(0,))]  # a set: no JSON
    for tasks, error in (
        (broken, (IndexError, AttributeError)),
        ([], UserError),
        ([Task("x", "Q?", (), text="C")], UserError),
    ):
        with pytest.raises(error):
            writers.write(path, tasks, form)
        assert path.read_bytes() == b"what was there before"
        assert sorted(p.name for p in tmp_path.iterdir()) == there


def test_json_is_not_written_into_a_parquet_name(tmp_path):
    for form in ("vime", "eval", "built"):
        with pytest.raises(UserError, match=r"must not end in \.parquet"):
            writers.write(tmp_path / "x.parquet", make_tasks(questions(tmp_path), 40), form)
    assert [p.name for p in tmp_path.iterdir()] == ["questions.jsonl"]


def test_places_that_cannot_be_written(tmp_path):
    tasks = [Task("x", "Q?", ("A",), text="C")]
    with pytest.raises(UserError, match="no folder"):
        writers.write_eval_json(tmp_path / "none" / "x.json", tasks)
    with pytest.raises(UserError, match=r"\.parquet"):
        writers.write_parquet(tmp_path / "x.json", tasks)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        writers.write_eval_json(tmp_path / "folder.json", tasks)
    with pytest.raises(UserError, match="built"):
        writers.write(tmp_path / "x.csv", tasks, "csv")
    with pytest.raises(UserError, match="one pool"):
        write_built(tmp_path / "x.jsonl", tasks)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.json"]


# ---- sets ----


def gold_titles(task: Task) -> list[str]:
    return [task.pool.titles[task.order[g]] for g in task.gold]


def test_a_damaged_set_is_named(tmp_path):
    path = tmp_path / "set.jsonl"
    write_built(path, make_tasks(questions(tmp_path, 2), 20), seed=5)
    whole = path.read_text("utf-8").splitlines()
    assert json.loads(whole[0]) == {"form": "memagent-set", "passages": 20, "tasks": 2, "seed": 5}
    fails(
        lines(path, whole[:-1]),
        "line 1:",
        "20 passages and 2 tasks are announced and 21 lines follow",
    )
    fails(lines(path, whole[:1]), "line 1:")
    task = json.loads(whole[-1])
    fails(
        lines(path, [*whole[:-1], task | {"order": [20], "gold": []}]), "line 23:", "from 0 to 19"
    )
    fails(lines(path, [*whole[:-1], task | {"gold": [20]}]), "line 23:", "'gold'")
    fails(lines(path, [*whole[:-1], task | {"order": []}]), "line 23:", "'order' is empty")
    fails(lines(path, [*whole[:-1], task | {"order": ["a"]}]), "line 23:")
    fails(lines(path, [whole[0], '{"title": "T"}', *whole[2:]]), "line 2:", "'text' is missing")


# ---- the real data beside the checkout ----

real = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real data is not at {SHARED}")


@real
@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("hotpotqa_tiny", 24), ("hotpotqa_dev", 684), ("2wikimultihopqa_dev", 907),
        ("musique_dev", 200),
    ],
)  # fmt: skip
def test_real_questions_have_their_own_evidence(name, n):
    tasks = read(SHARED / f"{name}.jsonl.gz")
    assert len(tasks) == n and len({id(task.pool) for task in tasks}) == 1
    with gzip.open(SHARED / f"{name}.jsonl.gz") as stream:
        for task, line in zip(tasks, stream, strict=True):
            record = json.loads(line)
            evidence = [record["paragraphs"][k] for k in record["hops"]]
            assert gold_titles(task) == [paragraph["title"] for paragraph in evidence]
            assert all(p["is_supporting"] for p in evidence)
            assert len(task.order) == len(record["paragraphs"]) and task.kind == record["type"]
    assert {task.split for task in tasks} <= {"train", "validation"}
