import io
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import calls_of, cell_of, killed_in_child
from rich.console import Console

import eval
import rollout
from agents import find
from config.errors import UserError
from config.locks import writing
from config.options import EvalConfig
from data import Task
from dev import keeper
from embedded import tiny
from engines.scripted import ScriptedEngine
from eval import Conditions, evaluate
from memagent import Finish, MemAgent, Trajectory, Turn
from report import rows as report_rows
from report.evaluation import dealt
from report.folder import read_run
from report.reading import EDGE, row_of
from report.rows import Cell, fate
from report.summary import cells, summarise, table
from rollout import Sampling
from tasks import ledger, worlds
from tasks.episodes import questions_of
from tokens.codec import Codec

CELL = {"name": "trained", "question": "one_fact", "length": 2}
FULL = tiny.agent("full")


def tasks(n=6, sections=2):
    return worlds.make_tasks(0, n, sections, "one_fact", "test")


def script(prompt):
    """Remembers the last sentence of the section; right or wrong by a rule of the prompt alone."""
    if not prompt.final:
        return prompt.section.strip().rpartition(". ")[2]
    return (
        "\\boxed{ " + ("Lima" if len(prompt.text) % 2 else "Oslo") + "}"
        if len(prompt.text) % 3
        else "unknown"
    )


class Failing(ScriptedEngine):
    """Turns whose prompt holds `word` fail."""

    word = ""

    def step(self):
        done = super().step()
        for _, turn in done:
            if self.word and self.word in turn.prompt.text:
                turn.finish, turn.error, turn.response = (
                    Finish.ERROR,
                    "the endpoint is gone",
                    self.codec.text(""),
                )
        return done


class Counting(ScriptedEngine):
    finals = 0

    def add(self, prompt, *rest):
        self.finals += prompt.final
        return super().add(prompt, *rest)


def run(
    codec,
    path,
    some=None,
    engine=None,
    agent=tiny.agent(),
    sampling=Sampling(),
    progress=lambda row: None,
    **other,
):
    """Fill one cell; `other` are fields of the cell and of the conditions."""
    engine = engine or Counting(codec, script, per_step=2)
    name, question, length = (other.pop(name, value) for name, value in CELL.items())
    cell = Cell(name, question, "", length)
    return evaluate(
        engine, agent, some or tasks(), sampling, cell, path, Conditions(**other), progress
    )


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def timeless(rows):
    return [{k: v for k, v in row.items() if k not in ("seconds", "mib")} for row in rows]


# ---------------------------------------------------------------- rows


def test_a_row_says_what_happened(codec, tmp_path):
    task = Task(
        "a",
        "Where is Anna?",
        ("Lima", "Oslo"),
        text=("Anna reached Lima. " * 12).strip(),
        gold=(0, 11),
    )
    answers = iter(["Anna reached Lima. " * 5, " ", "It is \\boxed{lima}."])
    (row,) = run(
        codec, tmp_path / "rows", [task], ScriptedEngine(codec, lambda prompt: next(answers))
    )
    expected = {
        "agent": "trained",
        "question": "one_fact",
        "temperature": "1.0",
        "length": 2,
        "id": "a",
        "sample": 0,
        "prediction": "lima",
        "answers": ["Lima", "Oslo"],
        "finish": "stop",
        "error": "",
        "reward": 1.0,
        "em": 1.0,
        "f1": 1.0,
        "sub_em": 1.0,
        "sub_em_upstream": 1.0,
        "sections": 2,
        "memory_cut": 1,
        "memory_empty": 1,
        "gold": [0, 11],
    }
    assert {k: row[k] for k in expected} == expected
    assert row["tokens_written"] == 13 + 2 + len(codec.encode("It is \\boxed{lima}.")) + 1
    assert row["tokens_read"] > 2 * 24 and row["seconds"] >= 0
    assert lines(tmp_path / "rows") == [row]


def test_rulers_own_tasks_are_graded_by_the_share_of_their_answers(codec, tmp_path):
    engine = ScriptedEngine(codec, lambda prompt: "\\boxed{12, 56}")
    some = [
        Task(kind, "q?", ("12", "34"), text="x", kind=kind, dataset="ruler")
        for kind in ("vt", "qa_1")
    ]
    rows = run(codec, tmp_path / "rows", some, engine)
    assert [row["reward"] for row in rows] == [0.5, 0.0]
    assert (
        cell_of(summarise(rows), "trained", "one_fact", "1.0", 2)["mean"] == 0.75
    )  # by sub_em, "12" is in it


def test_a_document_that_is_not_read_whole_is_counted(codec, tmp_path):
    some = list(tasks(2, 3))
    for name, agent, cut in (
        ("a", tiny.agent(), 0),
        ("b", tiny.agent(max_sections=2), 24),
        ("c", tiny.agent("full", window=100), None),
    ):
        rows = run(codec, tmp_path / name, some, agent=agent)
        assert all(row["cut"] == cut if cut is not None else row["cut"] > 0 for row in rows)
        summary = summarise(rows)
        assert cell_of(summary, "trained", "one_fact", "1.0", 2)["cut"] == rows[0]["cut"]
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(table(summary))
        assert (
            "documents not read whole, by a cap or a window, in 1 of 1 cells"
            in " ".join(console.export_text().split())
        ) == (cut != 0)


def test_thoughts_are_no_memory(codec, tmp_path):
    answers = iter(["<think>hm", "\\boxed{Lima}"])
    (found,) = run(
        codec,
        tmp_path / "rows",
        [Task("a", "q?", ("Lima",), text="x")],
        ScriptedEngine(codec, lambda prompt: next(answers)),
    )
    assert found["memory_empty"] == 1


def test_failures_and_empty_answers_are_wrong_and_stay_in_n(codec, tmp_path):
    some = list(tasks(8))
    engine = Failing(
        codec,
        lambda p: (
            "\\boxed{}"
            if some[1].question in p.text
            else "nothing"
            if some[2].question in p.text
            else f"\\boxed{{{gold(p)}}}"
        ),
    )

    def gold(prompt):
        return next(task.answers[0] for task in some if task.question in prompt.text)

    assert len({task.question for task in some}) == 8
    engine.word = some[0].question
    rows = run(codec, tmp_path / "rows", some, engine)
    assert [row["tries"] for row in rows] == [2, *[1] * 7]  # a failure is begun anew once
    assert [row["reward"] for row in rows] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert all(row[m] == 0 for row in rows[:3] for m in ("em", "f1", "sub_em"))
    # the tokenizer writes the empty box with a blank in it, which is right for MemAgent
    assert [row["sub_em_upstream"] for row in rows[:3]] == [0, 1, 0] and rows[1][
        "response"
    ] == "\\boxed{ }"
    assert (
        rows[0]["error"] == "the endpoint is gone"
        and rows[0]["prediction"] is None
        and rows[0]["finish"] == "error"
    )
    summary = summarise(rows)
    cell = cell_of(summary, "trained", "one_fact", "1.0", 2)
    assert (cell["mean"], cell["n"], cell["failed"], cell["empty"]) == (5 / 8, 8, 1 / 8, 0)
    assert cell["unformed"] == 2 / 8  # the empty box and the answer without one: both are there


def test_a_failed_trajectory_is_wrong_even_with_the_answer_in_hand(codec):
    agent = tiny.agent().on(codec)
    prompt = agent.prompt("final", 24, final=True, problem="q?", memory="m")
    turn = Turn(prompt, [1, 2], [3], [0.0], Finish.ERROR, codec.text("\\boxed{Lima}"), "gone")
    failed = Trajectory(Task("a", "q?", ("Lima",), text="x"), [turn], error="gone")
    assert failed.answer == "\\boxed{Lima}"
    found = row_of(failed, Cell("trained", "one_fact", "1.0", 2), agent)
    assert (found["reward"], found["sub_em"], found["prediction"], found["finish"]) == (
        0.0,
        0.0,
        None,
        "error",
    )


def test_kinds_side_by_side_are_the_cells_that_they_are_apart(codec, tmp_path):
    def all_rows(name, question, tasks):
        found = run(
            codec,
            tmp_path / name,
            tasks,
            ScriptedEngine(codec, script),
            name="a",
            question=question,
            record_to=tmp_path / "records",
            n_records=2,
        )
        return [
            {k: v for k, v in row.items() if k not in ("seconds", "mib", "settings")}
            for row in found
        ]

    kinds = ("two_hop", "one_fact")
    mixed = [
        task
        for pair in zip(*(worlds.make_tasks(0, 4, 2, kind) for kind in kinds), strict=True)
        for task in pair
    ]
    together = all_rows("together", "", mixed)
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert {record["cell"]["question"] for record in records} == set(kinds)
    for kind in kinds:
        assert [row for row in together if row["question"] == kind] == all_rows(
            kind, kind, worlds.make_tasks(0, 4, 2, kind)
        )


def test_a_question_that_does_not_fit_the_window_is_a_failed_row(codec, tmp_path):
    rows = run(codec, tmp_path / "rows", agent=tiny.agent("full", window=20))
    assert [row["reward"] for row in rows] == [0] * 6 and all(
        "does not fit" in row["error"] for row in rows
    )


@pytest.mark.parametrize("form", ["boxed", "sentence"])
def test_the_form_of_the_answer_decides(codec, tmp_path, form):
    task = Task("a", "q?", ("Lima",), text="x")
    say = {"boxed": "\\boxed{Lima}", "sentence": "Therefore, the answer is Lima."}
    for said, right in ((form, 1.0), ("sentence" if form == "boxed" else "boxed", 0.0)):
        engine = ScriptedEngine(codec, lambda p, said=said: say[said] if p.final else "x")
        agent = tiny.agent(form=form, final_tokens=99)
        assert run(codec, tmp_path / said, [task], engine, agent)[0]["reward"] == right


# ---------------------------------------------------------------- resume


def test_cut_at_any_byte_and_resumed_gives_the_rows_of_an_uninterrupted_run(codec, tmp_path):
    whole = run(codec, tmp_path / "whole", samples=2)
    assert len(whole) == 12 and [(r["id"], r["sample"]) for r in whole] == [
        (t.id, s) for t in tasks() for s in (0, 1)
    ]
    assert {r["reward"] for r in whole} == {0.0, 1.0} or {r["prediction"] for r in whole} > {
        None
    }  # there is something to mix up
    content = (tmp_path / "whole").read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    rng = random.Random(0)
    for cut in [
        0,
        1,
        ends[0] - 1,
        ends[0],
        ends[0] + 1,
        len(content) - 1,
        *(rng.randrange(len(content)) for _ in range(40)),
    ]:
        path = tmp_path / "cut"
        path.write_bytes(content[:cut])
        engine = Counting(codec, script, per_step=3)
        again = run(codec, path, engine=engine, samples=2)
        assert timeless(again) == timeless(whole)
        kept = sum(end <= cut for end in ends)
        assert engine.finals == 12 - kept  # only what was missing was asked
        on_disk = lines(path)
        assert sorted(map(str, timeless(on_disk))) == sorted(map(str, timeless(whole)))
        assert on_disk[:kept] == lines(tmp_path / "whole")[:kept]


def test_killed_with_sigkill_at_random_moments(codec, tmp_path):
    whole = run(codec, tmp_path / "whole", tasks(60))
    path, rng, seen = tmp_path / "rows", random.Random(1), []
    calls = calls_of(lambda: run(codec, tmp_path / "again", tasks(60), in_flight=4))
    for _ in range(10):
        at = int(calls * rng.uniform(0.05, 0.12))
        assert killed_in_child(lambda: run(codec, path, tasks(60), in_flight=4), at)
        seen.append(path.read_bytes().count(b"\n"))
    assert 0 < seen[0] < seen[-1] < 60  # it was killed underway, and went on
    assert timeless(run(codec, path, tasks(60))) == timeless(whole)
    assert sorted(map(str, timeless(lines(path)))) == sorted(map(str, timeless(whole)))


class Seeded(ScriptedEngine):
    """Edits a store as the careless demonstrator does, by the seed of the turn; answers by rule."""

    def add(self, prompt, sampling=Sampling(), seed=0):
        key = super().add(prompt, sampling, seed)
        self.seeds = {**getattr(self, "seeds", {}), key: seed}
        return key

    def step(self):
        key, prompt = self._queue[-1]  # the one that is answered next
        rng = random.Random(self.seeds[key])
        question = next(piece for piece, constant in prompt.pieces[::-1] if not constant)
        self.script = lambda prompt: (
            keeper.answer(question, prompt.memory)
            if prompt.frozen
            else keeper.demonstrate(rng, prompt, 0.5)
        )
        return super().step()


COSTS = ("model_calls", "tokens_read", "tokens_written")


def costless(rows):
    return [row | dict.fromkeys(COSTS) for row in rows]


@pytest.fixture(scope="module")
def stores():
    """Fill a cell by an agent that keeps stores, at temperature 1, with two samples a question."""
    codec = Codec(keeper.make_tokenizer())
    ledgers = [ledger.make_ledger(k, 8) for k in range(4)]
    asked = [task for made in ledgers for task in questions_of(made, made.probes)]

    def fill(path, some=None, engine=None, **other):
        engine = engine or Seeded(codec, None, per_step=1)
        rows = run(codec, path, some or asked, engine, keeper.agent(), samples=2, **other)
        return [
            row | {"counts": {k: v for k, v in row["counts"].items() if k != "search_s"}}
            for row in timeless(rows)
        ]

    fill.tasks, fill.engine = asked, lambda kind=Seeded: kind(codec, None, per_step=1)
    return fill


def test_rows_from_kept_stores_are_the_same_wherever_an_evaluation_was_killed(stores, tmp_path):
    """At temperature 1: what is made of a document depends neither on the rows that are there nor
    on which question is asked first of those that are missing."""
    whole = stores(tmp_path / "whole")
    assert {row["reward"] for row in whole} == {0.0, 1.0}
    assert any(  # samples have stores of their own
        one["response"] != other["response"]
        for one, other in zip(whole[::2], whole[1::2], strict=True)
    )
    content = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    path, rng = tmp_path / "part", random.Random(0)
    for k in range(12):
        kept = [line for line in content if rng.random() < 0.7] if k else content[:1]
        path.write_bytes(b"".join(kept))
        assert costless(stores(path)) == costless(whole)
        lines_now = path.read_bytes().splitlines(keepends=True)
        assert lines_now[: len(kept)] == kept and len(lines_now) == len(content)


def test_killed_with_sigkill_an_agent_that_keeps_stores_goes_on_to_the_same_rows(stores, tmp_path):
    whole, path, rng = stores(tmp_path / "whole"), tmp_path / "rows", random.Random(1)
    seen, calls = [], calls_of(lambda: stores(tmp_path / "again"))
    for _ in range(6):
        assert killed_in_child(lambda: stores(path), int(calls * rng.uniform(0.6, 0.7)))
        seen.append(path.read_bytes().count(b"\n"))
    assert 0 < seen[0] < seen[-1] < len(whole)  # it was killed underway, and went on
    assert costless(stores(path)) == costless(whole)


def test_a_failed_turn_is_made_again_before_others_need_what_it_makes(stores, tmp_path):
    whole = stores(tmp_path / "whole")

    class Once(Seeded):
        failed = 0

        def step(self):
            done = super().step()
            for _, turn in done:
                if self.failed < 3 and not turn.prompt.frozen:
                    self.failed += 1
                    turn.finish, turn.error = Finish.ERROR, "the endpoint is gone"
            return done

    engine = stores.engine(Once)
    rows = stores(tmp_path / "rows", engine=engine, retries=3)
    assert engine.failed == 3 and {row["tries"] for row in rows} != {1}
    assert all(
        row == once if row["tries"] == 1 else all(row[cost] > once[cost] for cost in COSTS)
        for row, once in zip(rows, whole, strict=True)
    )
    assert [row | {"tries": 1} for row in costless(rows)] == costless(whole)


def spending(spent, done):
    """Add the costs of turns."""
    for _, turn in done:
        spent["model_calls"] += 1
        spent["tokens_read"] += len(turn.prompt_ids)
        spent["tokens_written"] += len(turn.response_ids)


class FailingOnce(Seeded):
    """Fails one turn, the third that edits, and counts what it spends."""

    edits = 0

    def step(self):
        done = super().step()
        for _, turn in done:
            self.edits += not turn.prompt.frozen
            if self.edits == 3 and not turn.prompt.frozen:
                turn.finish, turn.error = Finish.ERROR, "the endpoint is gone"
        self.spent = getattr(self, "spent", Counter())
        spending(self.spent, done)
        return done


def test_what_is_made_again_is_in_the_costs_of_the_first_row_that_is_made_then(stores, tmp_path):
    """After a failure, and wherever the evaluation is taken up again."""
    first = stores.tasks[:5]  # all about one document
    whole = stores(tmp_path / "whole", some=first)
    engine, path = stores.engine(FailingOnce), tmp_path / "rows"
    rows = stores(path, some=first, engine=engine, retries=0)
    (failed,) = [row for row in rows if row["error"]]
    k = failed["sample"]
    bearer, whole_bearer = (each[2 + k] for each in (rows, whole))  # the next row of this sample
    assert failed["id"] == first[0].id and bearer["tries"] == 1
    assert all(bearer[cost] > whole_bearer[cost] for cost in COSTS)
    assert costless([bearer]) == costless([whole_bearer])
    for cost, spent in engine.spent.items():  # all of it stands in a row, once
        assert sum(row[cost] for row in rows) == spent, cost
    assert [r for r in rows if r not in (failed, bearer)] == [
        r for n, r in enumerate(whole) if n not in (k, 2 + k)
    ]
    # taken up after the failed row, or a little later: there are the same answers
    content = path.read_bytes().splitlines(keepends=True)
    for kept in (
        [line for line in content if json.loads(line)["error"]],
        [line for line in content if json.loads(line)["id"] in (first[0].id, first[1].id)],
    ):
        path.write_bytes(b"".join(kept))
        engine = stores.engine(FailingOnce)
        engine.edits = 3  # it fails no more
        again = stores(path, some=first, engine=engine)
        assert costless(again) == costless(rows)
        before = Counter()
        for line in kept:
            before.update({cost: json.loads(line)[cost] for cost in COSTS})
        for cost, spent in engine.spent.items():
            assert sum(row[cost] for row in again) == before[cost] + spent, cost


def test_what_an_agent_refuses_is_refused_before_any_row_is_made(tmp_path):
    """A budget below one entry, in the third file, by the agent that is asked last."""
    own = tmp_path / "own.py"
    own.write_text(
        "from data import Task\n"
        "def made(name, n):\n"
        "    return [Task(name, 'Where is Anna?', ('Lima',), text='Anna reached Lima. ' * n)]\n"
        "def first(): return made('first', 30)\n"
        "def second(): return made('second', 30)\n"
        "def short(): return made('short', 1)\n"
    )
    paths = [f"{own}:{name}" for name in ("first", "second", "short")]
    agents = {
        "none": find.make("none", {}),
        "memupdate": keeper.agent(budget_entries=0, memory_budget=0.1),
    }
    config = EvalConfig(
        runs=str(tmp_path), name="e", model=str(keeper.WEIGHTS), data=tuple(paths),
        agents=tuple(agents), temperatures=(0.0,), device="cpu",
    )  # fmt: skip
    with pytest.raises(UserError, match="tokens holds no entry"):
        eval.run_suite(config, agents)
    assert not (tmp_path / "e" / "rows.jsonl").exists()
    eval.run_suite(replace(config, data=tuple(paths[:2])), agents)  # without it there is no fault
    assert len(lines(tmp_path / "e" / "rows.jsonl")) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"memory_tokens": 12}},
        {"config": {"layout": "paper"}},
        {"sampling": Sampling(1.0, 0.9)},
        {"sampling": Sampling(0.5)},
        {"seed": 1},
        {"model": "step 20"},
        {"name": "other"},
        {"question": "two_hop"},
        {"length": 3},
        {"agent": "full"},
        {"some": [replace(t, text=t.document + " Anna met Otto.", pool=None) for t in tasks()]},
        {"some": [replace(t, answers=("Quito",)) for t in tasks()]},
        {"templates": "Read {section} for {problem}; you have {memory}"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_setting_never_mixes_with_old_rows(codec, tmp_path, change):
    path = tmp_path / "rows"
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "final.txt").write_text("{problem} {memory}")

    def reads(agent="memagent", **config):
        return tiny.agent(agent, templates=str(folder), **config)

    first = run(codec, path, agent=reads())
    if template := change.pop("templates", ""):
        (folder / "update.txt").write_text(template)
    engine = Counting(codec, script)
    second = run(
        codec,
        path,
        engine=engine,
        agent=reads(change.pop("agent", "memagent"), **change.pop("config", {})),
        **change,
    )
    assert engine.finals == 6 and len(lines(path)) == 12
    assert not {(r["settings"], r["task"]) for r in first} & {
        (r["settings"], r["task"]) for r in second
    }
    assert {leaf["n"] for _, leaf in cells(summarise(second))} == {6}
    if template:
        (folder / "update.txt").unlink()
    engine = Counting(codec, script)
    assert (
        run(codec, path, engine=engine, agent=reads()) == first
    )  # the old rows are still there for the old settings
    assert engine.finals == 0


def test_fewer_or_more_questions_use_what_is_there(codec, tmp_path):
    path = tmp_path / "rows"
    six = run(codec, path, samples=2)
    engine = Counting(codec, script)
    assert (
        run(codec, path, tasks(3), engine, samples=1)
        == [row for row in six[:6] if row["sample"] == 0]
        and engine.finals == 0
    )
    assert run(codec, path, tasks(8), engine, samples=2)[:12] == six and engine.finals == 4


def test_unusual_text_survives_a_round_trip(codec, tmp_path):
    answers = ('Zürich\u2028\x85 "x"', "line\nbreak")
    first = run(codec, tmp_path / "rows", [Task("ü\n", "q?", answers, text="x")])
    engine = Counting(codec, script)
    assert (
        run(codec, tmp_path / "rows", [Task("ü\n", "q?", answers, text="x")], engine) == first
        and engine.finals == 0
    )


def test_a_damaged_line_is_named(codec, tmp_path):
    path = tmp_path / "rows"
    run(codec, path)
    content = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*content[:2], content[2].replace(b'"id"', b'id"'), *content[3:]]))
    with pytest.raises(UserError, match="line 3 is damaged"):
        run(codec, path)
    path.write_bytes(b"\n".join(content))
    assert len(run(codec, path)) == 6
    with pytest.raises(UserError, match="cannot be written"):
        run(codec, tmp_path / "no folder" / "rows")


def test_ids_must_be_unique(codec, tmp_path):
    with pytest.raises(UserError, match="have the id"):
        run(
            codec,
            tmp_path / "rows",
            [Task("a", "q?", ("b",), text="x"), Task("a", "r?", ("b",), text="x")],
        )


def test_tasks_are_taken_as_they_are_needed(codec, tmp_path):
    taken = done = most = 0

    def lazily():
        nonlocal taken, most
        for task in tasks(20):
            taken += 1
            most = max(most, taken - done)
            yield task

    def finished(row):
        nonlocal done
        done += 1

    run(codec, tmp_path / "rows", lazily(), in_flight=3, progress=finished)
    assert done == taken == 20 and most <= 4


def test_every_row_is_written_and_on_the_disk_before_it_is_reported(codec, tmp_path, monkeypatch):
    path, seen, syncs = tmp_path / "rows", [], []
    monkeypatch.setattr(
        report_rows.os, "fsync", lambda fd: syncs.append(path.read_bytes().count(b"\n"))
    )
    run(
        codec,
        path,
        tasks(30),
        agent=FULL,
        progress=lambda row: seen.append(path.read_bytes().count(b"\n")),
    )
    assert seen == syncs == list(range(1, 31))


def test_transcripts_of_the_first_tasks_are_kept_once(codec, tmp_path):
    path = tmp_path / "transcripts.jsonl"
    rows = run(codec, tmp_path / "rows", samples=2, record_to=path, n_records=2)
    run(codec, tmp_path / "rows", samples=2, record_to=path, n_records=2)
    kept = lines(path)
    assert {(r["id"], r["sample"]) for r in kept} == {
        (rows[0]["id"], 0),
        (rows[2]["id"], 0),
    } and len(kept) == 2
    assert all(
        r["cell"] == {"agent": "trained", "question": "one_fact", "temperature": "1.0", "length": 2}
        for r in kept
    )
    assert {r["settings"] for r in kept} == {rows[0]["settings"]}
    assert {r["id"]: r["reward"] for r in kept} == {
        r["id"]: r["reward"]
        for r in rows
        if r["sample"] == 0 and r["id"] in {k["id"] for k in kept}
    }


def test_importing_it_brings_no_torch():
    code = (
        "import sys, eval; from report import page; "
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(eval.__file__).parent)


# ---------------------------------------------------------------- what a trajectory leaves


def reading_of(codec, sections, memories, answers=("Lima",), **labels):
    """The row of a trajectory that reads these sections and writes these memories."""
    said, reads = iter([*memories, "\\boxed{x}"]), iter(sections)

    class Scripted(MemAgent):
        def run(self, task):
            memory = "No previous memory"
            for section in reads:
                turn = yield self.prompt("update", 24, problem="q?", section=section, memory=memory)
                memory = turn.response
            yield self.prompt("final", 24, final=True, problem="q?", memory=memory)

    engine, agent = ScriptedEngine(codec, lambda prompt: next(said)), Scripted()
    task = Task("a", "q?", answers, text="x", **labels)
    (trajectory,) = rollout.rollout(engine, agent, [(task, 0)])
    return row_of(trajectory, Cell("a", "q", "1.0", 2), agent)


@pytest.mark.parametrize(
    ("memories", "answers", "seen", "held", "ends"),
    [
        (
            ["Anna reached Lima.", "Anna reached Lima.", "Otto met Anna."],
            ("Lima",),
            [1, 3],
            [[1, 1], [3, 0]],
            "lost",
        ),
        (["-", "-", "In LIMA, he said!"], ("Lima",), [1, 3], [[3, 1]], "kept"),
        (["-", "Limassol", "-"], ("Lima",), [1, 3], [], "never kept"),  # whole words alone
        (["Oslo", "-", "-"], ("Oslo",), [], [[1, 1], [2, 0]], "lost"),
        (["-", "-", "-"], ("Oslo",), [], [], "not shown"),
        (
            ["<update>Lima</update>", "so \\boxed{Lima}", "<update>Limassol</update>"],
            ("Lima",),
            [1, 3],
            [[1, 1], [3, 0]],
            "lost",
        ),
        (
            ["-", "-", "<update>in Lima</upd"],
            ("Lima",),
            [1, 3],
            [[3, 1]],
            "kept",
        ),  # cut inside a tag
        (["yes", "yes", "yes"], ("yes",), [], [], "unknown"),
        (
            ["Lima", "Quito", "Rome"],
            ("Rome", "Lima"),
            [1, 3],
            [[1, 1], [2, 0], [3, 1]],
            "kept",
        ),  # any accepted answer will do
    ],
)
def test_where_an_answer_came_into_the_memory_and_left_it(
    codec, memories, answers, seen, held, ends
):
    row = reading_of(codec, ["Anna reached Lima.", "Nothing.", "Lima is far."], memories, answers)
    assert (row["seen"], row["held"], fate(row), row["sections"]) == (seen, held, ends, 3)
    lengths = [len(codec.encode(memory)) for memory in memories]
    assert row["occupancy"] == lengths and row["memory_most"] == max(lengths)
    assert row["memory_tokens"] == pytest.approx(sum(lengths) / 3, abs=0.01)
    assert row["document_tokens"] == sum(
        len(codec.encode(s)) for s in ("Anna reached Lima.", "Nothing.", "Lima is far.")
    )
    assert row["mib"] > 50


def test_the_fate_of_an_answer_in_the_memories_of_remembers_code(codec, tmp_path):
    """`--compat upstream` keeps a memory with its tags: rows, counts, transcripts see the answer.

    That is D2 of the check against the originals.
    """
    fields = find.compat_of("upstream", ["rememr1"], training=False)["agent"]
    small = dict(memory_tokens=24, query_tokens=8, step_tokens=48, retriever="word_recall")
    agent = tiny.agent("rememr1", **fields | small)
    sections = ["Anna met Otto there." + " And so on." * 5] * 3
    task = Task("a", "Where?", ("Lima",), text=" ".join(sections))
    said = [
        "<update>Otto: Lima</update>",
        "<update>Max left.</update><recall>otto</recall>",
        "<update>See \\boxed{Lima}</update>",
    ]
    answers = iter(said + ["<update>Limassol</update>"] * 9)

    def script(prompt):
        return "\\boxed{x}" if prompt.final else next(answers)

    (row,) = run(
        codec,
        tmp_path / "rows",
        [task],
        ScriptedEngine(codec, script),
        agent,
        record_to=tmp_path / "records",
        n_records=1,
    )
    assert (
        row["sections"] > 3
        and row["held"] == [[1, 1], [2, 0], [3, 1], [4, 0]]
        and fate(row) == "lost"
    )
    assert (
        row["counts"]["queries"],
        row["counts"]["sought"],
        row["counts"]["holds"],
        row["counts"]["evidence"],
    ) == (
        1,
        1,
        1,
        1,
    )
    (record,) = lines(tmp_path / "records")
    assert (
        record["turns"][1]["memory"]
        == record["turns"][2]["notes"]["recalled"]["text"]
        == "<update> Otto: Lima</update>"
    )
    assert record["turns"][2]["notes"]["evidence"] == "answer"


def test_where_all_answers_are_asked_for_each_is_looked_for_in_the_memories(codec):
    ruler = dict(dataset="ruler", kind="vt")
    row = reading_of(codec, ["one 11", "two 22"], ["11", "11 22"], ("11", "22"), **ruler)
    assert row["held"] == [[1, 1], [2, 2]] and row["needed"] == 2 and fate(row) == "kept"
    assert (
        fate(reading_of(codec, ["one 11", "two 22"], ["11", "11"], ("11", "22"), **ruler))
        == "kept in part"
    )
    assert (
        fate(reading_of(codec, ["one 11", "two 22"], ["11", "0"], ("11", "22"), **ruler)) == "lost"
    )


def test_occupancy_is_by_sixteenths(codec):
    row = reading_of(
        codec, [f"x{k}" for k in range(40)], [" ".join(["Anna"] * (k % 5 + 1)) for k in range(40)]
    )
    assert len(row["occupancy"]) == 16 and row["occupancy"][:4] == [1.5, 4.0, 1.5, 4.0]


def test_a_trajectory_does_not_hold_its_document_again(codec, tmp_path, monkeypatch):
    """Only sample 0 of the first tasks keeps its prompts.

    Of a long document it keeps the first and last sections alone.
    """
    kept = []
    n = 3 * EDGE
    some = list(tasks(2, n))
    real = eval.rollout

    def spy(*args):
        for trajectory in real(*args):
            kept.append(trajectory)
            yield trajectory

    monkeypatch.setattr(eval, "rollout", spy)
    rows = run(codec, tmp_path / "rows", some, record_to=tmp_path / "records", n_records=1)
    by_id = {t.task.id: t for t in kept}
    first, other = by_id[some[0].id], by_id[some[1].id]
    assert rows[0]["sections"] == rows[1]["sections"] == n and rows[1]["document_tokens"] == n * 24
    assert all(
        not (t.prompt.pieces or t.prompt.section or t.prompt_ids or t.logprobs) for t in other.turns
    )
    assert other.answer and not any(t.response for t in other.turns[:-1])
    whole = [bool(t.prompt.section) for t in first.turns[:-1]]
    assert (
        whole[:EDGE] == [True] * EDGE
        and whole[-EDGE + 1 :] == [True] * (EDGE - 1)
        and not any(whole[EDGE : 2 * EDGE])
    )
    assert all(t.prompt.memory for t in first.turns)  # its memory can be followed all the way


# ---------------------------------------------------------------- parts, failures


@pytest.fixture
def evaluation(tmp_path):
    """Return a function that asks a part, "" = all, and gives what the folder then has."""
    agents = {
        name: tiny.agent(name, memory_tokens=4, final_tokens=4) for name in ("memagent", "full")
    }

    def ask(name, part, **other):
        fields = dict(
            name=name, runs=str(tmp_path), agents=tuple(agents), lengths=(1, 2), n=7, samples=2,
            temperatures=(1.0, 0.0), device="cpu", part=part,
            transcripts=3,
        ) | other  # fmt: skip
        folder = eval.run_suite(EvalConfig(**fields), agents)
        return read_run(folder)

    return ask


def numbers(run):
    """What a run has but for times: summary, rows, transcripts, each in a fixed order."""
    summary = {k: v for k, v in run.summary.items() if k != "missing"}
    summary["cells"] = [
        {k: v for k, v in cell.items() if not k.startswith(("seconds", "mib"))}
        for cell in summary["cells"]
    ]
    records = [{k: v for k, v in each.items() if k != "seconds"} for each in run.records]
    rows = sorted(json.dumps(row) for row in timeless(run.rows))
    return json.dumps(summary), rows, sorted(map(json.dumps, records))


def test_parts_have_the_rows_summary_and_transcripts_of_one_call(evaluation, tmp_path, capsys):
    whole = evaluation("whole", "")
    assert not whole.status and "missing" not in whole.summary
    half = evaluation("parts", "2/2")
    assert half.summary["missing"] == ["1/2"] and "1/2" in half.status
    assert "--part 1/2" in capsys.readouterr().out
    assert 0 < len(half.rows) < len(whole.rows)
    assert {row["id"] for row in half.rows} < {row["id"] for row in whole.rows}
    both = evaluation("parts", "1/2")
    assert not both.status and numbers(both) == numbers(whole)
    files = ("rows-1-of-2.jsonl", "rows-2-of-2.jsonl")
    made = [lines(tmp_path / "parts" / name) for name in files]
    assert sum(map(len, made)) == len(whole.rows) and not (tmp_path / "parts/rows.jsonl").exists()
    # other parts, or none, find all that is there; a file that is lost is made again without parts
    evaluation("parts", "3/3")
    assert lines(tmp_path / "parts" / "rows-3-of-3.jsonl") == []
    (tmp_path / "parts" / files[0]).unlink()
    again = evaluation("parts", "")
    assert numbers(again)[:2] == numbers(whole)[:2] and not again.status
    assert len(lines(tmp_path / "parts" / "rows.jsonl")) == len(made[0])


def test_a_part_that_is_killed_goes_on_to_the_same_rows(evaluation, tmp_path):
    small = dict(agents=("memagent",), lengths=(2,))
    whole = evaluation("whole", "", **small)
    evaluation("parts", "1/3", **small), evaluation("parts", "3/3", **small)
    calls = calls_of(lambda: evaluation("other", "2/3", **small))
    path = tmp_path / "parts" / "rows-2-of-3.jsonl"
    for share in (0.6, 0.75, 0.9):
        assert killed_in_child(lambda: evaluation("parts", "2/3", **small), int(calls * share))
        if path.exists() and path.stat().st_size:
            break
    assert numbers(evaluation("parts", "2/3", **small)) == numbers(whole)


def test_a_second_process_in_a_file_is_told_of_parts_before_anything_is_loaded(
    evaluation, tmp_path, monkeypatch
):
    monkeypatch.setattr(eval, "open_reader", lambda *_: pytest.fail("a model is loaded"))
    for part, name in (("", "rows.jsonl"), ("2/8", "rows-2-of-8.jsonl")):
        with writing(tmp_path / "e" / name, "It"), pytest.raises(UserError, match="--part"):
            evaluation("e", part)
    assert not (tmp_path / "e").exists()


def test_all_questions_about_a_document_are_in_one_part():
    ledgers = [ledger.make_ledger(k, 8) for k in range(5)]
    asked = [task for made in ledgers for task in questions_of(made, made.probes)]
    parts, ours = dealt(asked, "2/3")
    documents = {task.document_digest: part for task, part in zip(asked, parts, strict=True)}
    assert [*documents.values()] == ["1/3", "2/3", "3/3", "1/3", "2/3"]
    assert all(documents[t.document_digest] == part for t, part in zip(asked, parts, strict=True))
    assert ours == [t for t, part in zip(asked, parts, strict=True) if part == "2/3"]
    assert dealt(asked, "") == ([""] * len(asked), asked)


def test_failures_are_tried_again_then_written_and_redone_when_asked(codec, tmp_path):
    path, some = tmp_path / "rows", list(tasks(4))

    class Shaky(Failing):
        left, spent = 0, Counter()

        def step(self):
            done = super().step()
            spending(self.spent, done)
            for _, turn in done:
                if some[0].question in turn.prompt.text and self.left:
                    self.left -= 1
                    turn.finish, turn.error = Finish.ERROR, "HTTP 500"
            return done

    engine = Shaky(codec, script)
    engine.left = 1
    rows = run(codec, path, some, engine)
    assert [row["tries"] for row in rows] == [2, 1, 1, 1] and not any(row["error"] for row in rows)
    # all that was read and written stands in a row, also that of the try that failed
    for cost, spent in engine.spent.items():
        assert sum(row[cost] for row in rows) == spent, cost
    assert rows[0]["model_calls"] > rows[1]["model_calls"] and rows[0]["sections"] == 2
    engine.left = 3
    rows = run(codec, tmp_path / "failed", some, engine, retries=2)
    assert (
        rows[0]["error"] == "HTTP 500"
        and rows[0]["tries"] == 3
        and rows[0]["sub_em"] == 0
        and engine.left == 0
    )
    assert cell_of(summarise(rows), "trained", "one_fact", "1.0", 2)["n"] == 4
    assert run(codec, tmp_path / "failed", some, engine) == rows  # a failure that is written stays
    again = run(codec, tmp_path / "failed", some, engine, redo_failed=True)
    assert timeless(again)[1:] == timeless(rows)[1:] and not again[0]["error"]
    assert (
        run(codec, tmp_path / "failed", some, engine) == again
        and len(lines(tmp_path / "failed")) == 5
    )  # the last one counts


def test_a_mistake_of_an_agent_fails_its_trajectory_alone(codec, tmp_path):
    some = list(tasks(4))

    class Careless(MemAgent):
        def run(self, task):
            yield self.prompt("final", 24, final=True, problem=task.question, memory="m")
            if task is some[1]:
                raise ZeroDivisionError("by\nzero")

    rows = run(codec, tmp_path / "rows", some, agent=Careless())
    assert [row["error"] for row in rows] == ["", "ZeroDivisionError: by zero", "", ""] and rows[1][
        "sub_em"
    ] == 0
    assert rows[1]["tries"] == 1  # it would make it again


def test_what_decides_an_answer_decides_which_rows_are_found(codec, tmp_path):
    path, some = tmp_path / "rows", list(tasks(2))
    run(codec, path, some, agent=FULL)
    for change in ({"gold": (1,)}, {"dataset": "ruler", "kind": "vt"}):
        engine = Counting(codec, script)
        run(codec, path, [replace(task, **change) for task in some], engine, agent=FULL)
        assert engine.finals == 2, change  # what the oracle reads, and how it is graded
    for agent, again in (
        (FULL, 2),
        (tiny.agent(), 0),
    ):  # who reads at once is cut to the engine's window
        run(codec, tmp_path / agent.label, some, agent=agent)
        engine = Counting(codec, script)
        engine.window = 400
        run(codec, tmp_path / agent.label, some, engine, agent=agent)
        assert engine.finals == again


def test_transcripts_hold_no_token_ids_and_no_document_of_megabytes(codec, tmp_path):
    task = Task("a", "q?", ("b",), text="word " * 20_000)
    run(
        codec,
        tmp_path / "rows",
        [task],
        agent=tiny.agent("full", window=0),
        record_to=tmp_path / "records",
    )
    (record,) = lines(tmp_path / "records")
    assert (tmp_path / "records").stat().st_size < 30_000 and not {"prompt_ids", "logprobs"} & {
        *record["turns"][0]
    }
    assert (
        record["turns"][0]["section"].strip().startswith("word word")
        and "characters left out" in record["turns"][0]["section"]
    )


def test_a_row_and_a_transcript_say_how_the_agent_looked_back(codec, tmp_path):
    def script(prompt):
        if prompt.final:
            return "\\boxed{Lima}"
        return (
            f"<update>{prompt.section.split('.')[0]}.</update><recall>Anna</recall>"
            if "Otto" in prompt.section
            else "<update>Nothing.</update>"
        )

    text = " ".join(
        [
            *["Anna reached Lima."] * 6,
            *["Ida reached Oslo."] * 6,
            *["Otto met Anna."] * 6,
            *["Nils reached Rome."] * 6,
        ]
    )
    task = Task("t", "Where is Otto?", ("Lima",), text)
    said = {"Anna reached Lima": "<update>Anna reached Lima.</update>"}
    engine = ScriptedEngine(
        codec,
        lambda p: (
            next((answer for key, answer in said.items() if key in p.section), None) or script(p)
        ),
    )

    def ask(name, **settings):
        cell = Cell("a" if name == "rememr1" else "b", "", "", 4)
        agent = tiny.agent(name, step_tokens=60, **settings)
        conditions = Conditions(record_to=tmp_path / "records" if name == "rememr1" else None)
        return evaluate(engine, agent, [task], Sampling(), cell, tmp_path / "rows", conditions)

    (row,) = ask("rememr1")
    assert {k: v for k, v in row["counts"].items() if v} == {
        "updates": 4,
        "queries": 1,
        "hits": 1,
        "ages": 2,
        "sought": 1,
        "holds": 1,
        "evidence_sought": 1,
        "evidence": 1,
        "memory_length": len(codec.encode("Anna reached Lima. Otto met Anna."))
        + 2 * len(codec.encode("Nothing.")),
    }
    (turns,) = [record["turns"] for record in lines(tmp_path / "records")]
    notes = turns[3]["notes"]
    assert notes["recalled"] == {
        "steps": [1],
        "text": "Anna reached Lima.",
        "query": "Anna",
        "score": 1.0,
        "age": 2,
        "current": False,
    }
    assert notes["evidence"] == "answer" and turns[2]["notes"]["asked"] == "Anna"
    (other,) = ask("memagent")
    assert other["counts"].keys() == {"updates", "writes"}
    n = len(lines(tmp_path / "rows"))
    for name, made in (("memagent", 0), ("rememr1", 1)):
        ask(name, recall_k=2)  # what means nothing to an agent changes none of its rows
        n += made
        assert len(lines(tmp_path / "rows")) == n
