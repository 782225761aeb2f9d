import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from conftest import cell_of

import eval
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
from report.reading import EDGE, row_of
from report.rows import Cell
from report.summary import summarise
from rollout import Sampling
from suites import ledger
from tasks import worlds
from tasks.episodes import questions_of
from tokens.codec import Codec

CELL = {"name": "trained", "question": "one_fact", "length": 2}
FULL = tiny.agent("full")
COSTS = ("model_calls", "tokens_read", "tokens_written")


def tasks(n=6, sections=2):
    return worlds.make_tasks(0, n, sections, "one_fact", "test")


def task(id="a", answers=("Lima",), text="x", **other):
    return Task(id, "q?", answers, text=text, **other)


def script(prompt):
    """Remembers the last sentence of the section; right or wrong by a rule of the prompt alone."""
    if not prompt.final:
        return prompt.section.strip().rpartition(". ")[2]
    if not len(prompt.text) % 3:
        return "unknown"
    return f"\\boxed{{ {'Lima' if len(prompt.text) % 2 else 'Oslo'}}}"


class Watched(ScriptedEngine):
    """Counts the questions and what is spent; the next `failures` turns that `fails` hits fail."""

    failures = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.finals, self.spent = 0, Counter()

    def add(self, prompt, *rest):
        self.finals += prompt.final
        return super().add(prompt, *rest)

    def fails(self, turn):
        return True

    def step(self):
        done = super().step()
        for _, turn in done:
            sizes = 1, len(turn.prompt_ids), len(turn.response_ids)
            self.spent.update(dict(zip(COSTS, sizes, strict=True)))
            if self.failures and self.fails(turn):
                self.failures -= 1
                turn.finish, turn.error = Finish.ERROR, "the endpoint is gone"
                turn.response = self.codec.text("")
        return done


def run(codec, path, some=None, engine=None, agent=tiny.agent(), sampling=Sampling(), **other):
    """Fill one cell; `other` are fields of the cell and of the conditions."""
    engine = engine or Watched(codec, script, per_step=2)
    progress = other.pop("progress", lambda row: None)
    name, question, length = (other.pop(name, value) for name, value in CELL.items())
    cell = Cell(name, question, "", length)
    conditions = Conditions(**other)
    return evaluate(engine, agent, some or tasks(), sampling, cell, path, conditions, progress)


def answering(codec, *answers):
    """An engine that gives these answers in turn."""
    left = iter(answers)
    return ScriptedEngine(codec, lambda prompt: next(left))


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def timeless(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def alike(rows, others):
    """Tell whether rows are the same in any order, but for times."""
    one, other = (sorted(map(str, timeless(some))) for some in (rows, others))
    return one == other


# ---------------------------------------------------------------- rows


def test_a_row_says_what_happened(codec, tmp_path):
    text = ("Anna reached Lima. " * 12).strip()
    asked = Task("a", "Where is Anna?", ("Lima", "Oslo"), text=text)
    engine = answering(codec, "Anna reached Lima. " * 5, " ", "It is \\boxed{lima}.")
    (row,) = run(codec, tmp_path / "rows", [asked], engine)
    expected = {
        **{"agent": "trained", "question": "one_fact", "temperature": "1.0", "length": 2},
        **{"id": "a", "sample": 0, "prediction": "lima", "answers": ["Lima", "Oslo"]},
        **{"finish": "stop", "error": "", "reward": 1.0, "em": 1.0, "f1": 1.0, "sub_em": 1.0},
        **{"sub_em_upstream": 1.0, "sections": 2, "memory_cut": 1, "memory_empty": 1},
        **{
            "model_calls": 3,
            "memory": "No previous memory",
            "document_tokens": len(codec.encode(text)),
        },
    }
    assert {k: row[k] for k in expected} == expected
    assert row["tokens_written"] == 13 + 2 + len(codec.encode("It is \\boxed{lima}.")) + 1
    assert row["tokens_read"] > 2 * 24 and row["seconds"] >= 0
    assert row["memory_tokens"] == (13 + len(codec.encode("No previous memory"))) / 2
    assert lines(tmp_path / "rows") == [row]
    # thoughts are no memory
    (row,) = run(codec, tmp_path / "r", [task()], answering(codec, "<think>hm", "\\boxed{Lima}"))
    assert row["memory_empty"] == 1


def test_a_document_that_is_not_read_whole_is_counted(codec, tmp_path):
    cut_short = tiny.agent("full", window=100)
    for k, (agent, cut) in enumerate(
        [(tiny.agent(), 0), (tiny.agent(max_sections=2), 24), (cut_short, None)]
    ):
        rows = run(codec, tmp_path / str(k), [*tasks(2, 3)], agent=agent)
        assert all(row["cut"] == cut if cut is not None else row["cut"] > 0 for row in rows)
        cell = cell_of(summarise(rows), "trained", "one_fact", "1.0", 2)
        assert cell["cut"] == rows[0]["cut"]


def test_failures_and_empty_answers_are_wrong_and_stay_in_n(codec, tmp_path):
    some = [*tasks(8)]
    assert len({task.question for task in some}) == 8

    def respond(prompt):
        asked = next(k for k, task in enumerate(some) if task.question in prompt.text)
        return {1: "\\boxed{}", 2: "nothing"}.get(asked, f"\\boxed{{{some[asked].answers[0]}}}")

    engine = Watched(codec, respond)
    engine.failures, engine.fails = 9, lambda turn: some[0].question in turn.prompt.text
    rows = run(codec, tmp_path / "rows", some, engine)
    assert [row["reward"] for row in rows] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert all(row[m] == 0 for row in rows[:3] for m in ("em", "f1", "sub_em"))
    # the tokenizer writes the empty box with a blank in it, which is right for MemAgent
    assert [row["sub_em_upstream"] for row in rows[:3]] == [0, 1, 0]
    failed = rows[0]["error"], rows[0]["prediction"], rows[0]["finish"]
    assert failed == ("the endpoint is gone", None, "error")
    agent = tiny.agent().on(codec)  # even with the answer in hand
    prompt = agent.prompt("final", 24, final=True, problem="q?", memory="m")
    turn = Turn(prompt, [1, 2], [3], [0.0], Finish.ERROR, codec.text("\\boxed{Lima}"), "gone")
    row = row_of(Trajectory(task(), [turn], error="gone"), Cell("a", "q", "1.0", 2), agent)
    assert [row[k] for k in ("reward", "sub_em", "prediction", "finish")] == [0, 0, None, "error"]
    (row,) = run(codec, tmp_path / "small", [task()], agent=tiny.agent("full", window=20))
    assert row["reward"] == 0 and "does not fit" in row["error"]
    cell = cell_of(summarise(rows), "trained", "one_fact", "1.0", 2)
    assert (cell["mean"], cell["n"], cell["failed"], cell["empty"]) == (5 / 8, 8, 1 / 8, 0)
    assert cell["unformed"] == 2 / 8  # the empty box and the answer without one: both are there


def test_kinds_side_by_side_are_the_cells_that_they_are_apart(codec, tmp_path):
    def ask(name, question, some):
        settings = dict(question=question, record_to=tmp_path / "records", n_records=2)
        rows = run(codec, tmp_path / name, some, ScriptedEngine(codec, script), **settings)
        return [row | {"settings": ""} for row in timeless(rows)]

    kinds = ("two_hop", "one_fact")
    apart = {kind: [*worlds.make_tasks(0, 4, 2, kind)] for kind in kinds}
    mixed = [task for pair in zip(*apart.values(), strict=True) for task in pair]
    together = ask("together", "", mixed)
    assert {record["cell"]["question"] for record in lines(tmp_path / "records")} == {*kinds}
    for kind in kinds:
        assert [r for r in together if r["question"] == kind] == ask(kind, kind, apart[kind])


# ---------------------------------------------------------------- resume


def test_cut_at_any_byte_and_resumed_gives_the_rows_of_an_uninterrupted_run(codec, tmp_path):
    whole = run(codec, tmp_path / "whole", samples=2)
    assert [(r["id"], r["sample"]) for r in whole] == [(t.id, s) for t in tasks() for s in (0, 1)]
    assert len({r["prediction"] for r in whole}) > 1  # there is something to mix up
    content = (tmp_path / "whole").read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    rng, first = random.Random(0), ends[0]
    some = [rng.randrange(len(content)) for _ in range(12)]
    for cut in [0, 1, first - 1, first, first + 1, len(content) - 1, *some]:
        path = tmp_path / "cut"
        path.write_bytes(content[:cut])
        engine = Watched(codec, script, per_step=3)
        assert timeless(run(codec, path, engine=engine, samples=2)) == timeless(whole)
        kept = sum(end <= cut for end in ends)
        assert engine.finals == 12 - kept  # only what was missing was asked
        assert alike(lines(path), whole)
        assert lines(path)[:kept] == lines(tmp_path / "whole")[:kept]


class Seeded(Watched):
    """Edits a store as the careless demonstrator does, by the seed of the turn; answers by rule."""

    def add(self, prompt, sampling=Sampling(), seed=0):
        key = super().add(prompt, sampling, seed)
        self.seeds = {**getattr(self, "seeds", {}), key: seed}
        return key

    def fails(self, turn):
        return not turn.prompt.frozen  # edits

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


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Fill a cell by an agent that keeps stores, at temperature 1, with two samples a question.

    Gives the rows of one call and their file as well.
    """
    codec = Codec(keeper.make_tokenizer())
    ledgers = [ledger.make_ledger(k, 8) for k in range(3)]
    asked = [task for made in ledgers for task in questions_of(made, made.probes)]

    def fill(path, failures=0, **other):
        engine = Seeded(codec, None, per_step=1)
        engine.failures = failures
        rows = run(codec, path, asked, engine, keeper.agent(), samples=2, **other)
        return timeless(rows)

    fill.file = tmp_path_factory.mktemp("stores") / "whole"
    fill.rows = fill(fill.file)
    return fill


def test_rows_from_kept_stores_are_the_same_wherever_an_evaluation_was_killed(stores, tmp_path):
    """At temperature 1, their costs too: what is made of a document depends neither on the rows
    that are there nor on which question is asked first of those that are missing."""
    whole = stores.rows
    assert {row["reward"] for row in whole} == {0.0, 1.0}
    pairs = zip(whole[::2], whole[1::2], strict=True)
    assert any(a["response"] != b["response"] for a, b in pairs)  # samples have their own stores
    content = stores.file.read_bytes().splitlines(keepends=True)
    path, rng = tmp_path / "part", random.Random(0)
    for k in range(5):
        kept = [line for line in content if rng.random() < 0.7] if k else content[:1]
        path.write_bytes(b"".join(kept))
        assert stores(path) == whole
        lines_now = path.read_bytes().splitlines(keepends=True)
        assert lines_now[: len(kept)] == kept and len(lines_now) == len(content)


def test_what_cannot_be_made_fails_all_that_need_it_until_it_is_asked_for_again(stores, tmp_path):
    rows = stores(tmp_path / "rows", failures=1)
    (maker,) = [row for row in rows if row["error"] == "the endpoint is gone"]
    failed = [row for row in rows if row["error"]]
    same = [r for r in rows if (r["document"], r["sample"]) == (maker["document"], maker["sample"])]
    assert failed == same and len(same) > 2
    assert all(maker["id"] in row["error"] for row in failed if row is not maker)
    assert stores(tmp_path / "rows") == rows
    assert stores(tmp_path / "rows", redo_failed=True) == stores.rows


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
    keeping = keeper.agent(budget_entries=0, memory_budget=0.1)
    agents = {"none": find.make("none", {}), "memupdate": keeping}
    config = EvalConfig(
        runs=str(tmp_path), name="e", model=str(keeper.WEIGHTS), data=tuple(paths),
        agents=tuple(agents), temperatures=(0.0,), device="cpu",
    )  # fmt: skip
    with pytest.raises(UserError, match="tokens holds no entry"):
        eval.run_suite(config, agents)
    assert not (tmp_path / "e" / "rows.jsonl").exists()


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
        {"some": [replace(t, gold=(1,)) for t in tasks()]},  # what the oracle reads
        {"some": [replace(t, dataset="ruler", kind="vt") for t in tasks()]},  # how it is graded
        {"templates": "Read {section} for {problem}; you have {memory}"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_setting_never_mixes_with_old_rows(codec, tmp_path, change):
    path, folder = tmp_path / "rows", tmp_path / "templates"
    folder.mkdir()
    (folder / "final.txt").write_text("{problem} {memory}")

    def reads(agent="memagent", **config):
        return tiny.agent(agent, templates=str(folder), **config)

    first, change = run(codec, path, agent=reads()), dict(change)
    if template := change.pop("templates", ""):
        (folder / "update.txt").write_text(template)
    engine = Watched(codec, script)
    agent = reads(change.pop("agent", "memagent"), **change.pop("config", {}))
    second = run(codec, path, engine=engine, agent=agent, **change)
    assert engine.finals == 6 and len(lines(path)) == 12
    names = ("settings", "task")
    assert not {tuple(map(r.get, names)) for r in first} & {
        tuple(map(r.get, names)) for r in second
    }
    assert {record["n"] for record in summarise(second)["cells"]} == {6}
    (folder / "update.txt").unlink(missing_ok=True)
    engine = Watched(codec, script)  # the old rows are still there for the old settings
    assert run(codec, path, engine=engine, agent=reads()) == first and engine.finals == 0


def test_who_reads_at_once_is_cut_to_the_engines_window(codec, tmp_path):
    for agent, again in ((FULL, 6), (tiny.agent(), 0)):
        run(codec, tmp_path / agent.label, agent=agent)
        engine = Watched(codec, script)
        engine.window = 400
        run(codec, tmp_path / agent.label, engine=engine, agent=agent)
        assert engine.finals == again


def test_fewer_or_more_questions_use_what_is_there(codec, tmp_path):
    path, engine = tmp_path / "rows", Watched(codec, script)
    six = run(codec, path, samples=2)
    assert run(codec, path, tasks(3), engine) == [row for row in six[:6] if row["sample"] == 0]
    assert engine.finals == 0
    assert run(codec, path, tasks(8), engine, samples=2)[:12] == six and engine.finals == 4
    # unusual text survives a round trip
    odd = [task("ü\n", ('Zürich\u2028\x85 "x"', "line\nbreak"))]
    first = run(codec, path, odd)
    assert run(codec, path, odd, engine) == first and engine.finals == 4


def test_tasks_are_taken_as_they_are_needed(codec, tmp_path):
    with pytest.raises(UserError, match="have the id"):
        run(codec, tmp_path / "twice", [task(), task(text="y")])
    taken = done = most = 0

    def lazily():
        nonlocal taken, most
        for each in tasks(20):
            taken += 1
            most = max(most, taken - done)
            yield each

    def finished(row):
        nonlocal done
        done += 1

    run(codec, tmp_path / "rows", lazily(), in_flight=3, progress=finished)
    assert done == taken == 20 and most <= 4


def test_every_row_is_written_and_on_the_disk_before_it_is_reported(codec, tmp_path, monkeypatch):
    path, seen, syncs = tmp_path / "rows", [], []
    written = lambda: path.read_bytes().count(b"\n")  # noqa: E731
    monkeypatch.setattr(report_rows.os, "fsync", lambda fd: syncs.append(written()))
    run(codec, path, tasks(30), agent=FULL, progress=lambda row: seen.append(written()))
    assert seen == syncs == [*range(1, 31)]


@pytest.mark.parametrize(("room", "wanted"), [(1 << 20, [0, 1, 2, 3, 5]), (0, [0, 2])])
def test_transcripts_of_the_first_tasks_and_of_what_was_wrong_are_kept_once(
    codec, tmp_path, room, wanted
):
    """Two samples of four tasks: one of the first, both of the second, one of the third wrong."""
    path, asked = tmp_path / "transcripts.jsonl", [task(id=f"q{k}") for k in range(4)]
    engine = answering(
        codec, *(f"\\boxed{{{word}}}" for word in "Lima x x x Lima x Lima Lima".split())
    )
    for _ in range(2):
        how = dict(samples=2, in_flight=1, record_to=path, n_records=2, record_bytes=room)
        rows = run(codec, tmp_path / "rows", asked, engine, FULL, **how)
    names = "id", "sample", "reward", "settings"
    kept = [tuple(map(record.get, names)) for record in lines(path)]
    assert kept == [tuple(map(rows[k].get, names)) for k in wanted]
    cell = {"agent": "trained", "question": "one_fact", "temperature": "1.0", "length": 2}
    assert all(record["cell"] == cell for record in lines(path))


# ---------------------------------------------------------------- what a trajectory leaves


def test_a_failed_trajectory_is_wrong_even_with_the_answer_in_hand(codec):
    agent = tiny.agent().on(codec)
    prompt = agent.prompt("final", 24, final=True, problem="q?", memory="m")
    turn = Turn(prompt, [1, 2], [3], [0.0], Finish.ERROR, codec.text("\\boxed{Lima}"), "gone")
    failed = Trajectory(task(), [turn], error="gone")
    assert failed.answer == "\\boxed{Lima}"
    row = row_of(failed, Cell("trained", "one_fact", "1.0", 2), agent)
    assert [row[k] for k in ("reward", "sub_em", "prediction", "finish")] == [0, 0, None, "error"]


def test_the_form_of_the_answer_decides_and_what_does_not_fit_the_window_fails(codec, tmp_path):
    responses = {"boxed": "\\boxed{Lima}", "sentence": "Therefore, the answer is Lima."}
    for form in responses:
        for written, response in responses.items():
            engine = ScriptedEngine(codec, lambda p, text=response: text if p.final else "x")
            agent = tiny.agent(form=form, final_tokens=99)
            (row,) = run(codec, tmp_path / f"{form} {written}", [task()], engine, agent)
            assert row["reward"] == (form == written)
    rows = run(codec, tmp_path / "rows", agent=tiny.agent("full", window=20))
    assert [row["reward"] for row in rows] == [0] * 6
    assert all("does not fit" in row["error"] for row in rows)


def test_a_trajectory_does_not_hold_its_document_again(codec, tmp_path, monkeypatch):
    """Where transcripts are kept, of a long document the first and last sections alone."""
    kept, n, original = {}, 3 * EDGE, eval.rollout

    def spy(*args):
        for trajectory in original(*args):
            kept[trajectory.task.id] = trajectory
            yield trajectory

    monkeypatch.setattr(eval, "rollout", spy)
    some = [*tasks(2, n)]
    rows = run(codec, tmp_path / "rows", some[:1], record_to=tmp_path / "records")
    rows += run(codec, tmp_path / "rows", some[1:])
    first, other = (kept[task.id] for task in some)
    assert rows[0]["sections"] == rows[1]["sections"] == n
    for turns in (first.turns, other.turns):
        assert not any(any((t.prompt.pieces, t.prompt_ids, t.logprobs)) for t in turns)
    assert other.answer and not any(t.response or t.prompt.section for t in other.turns[:-1])
    whole = [bool(t.prompt.section) for t in first.turns[:-1]]
    assert all(whole[:EDGE]) and all(whole[-EDGE + 1 :]) and not any(whole[EDGE : 2 * EDGE])
    assert all(t.prompt.memory for t in first.turns)  # its memory can be followed all the way
    # a transcript has no token ids, and no document of megabytes
    long, agent = task(text="word " * 20_000), tiny.agent("full", window=0)
    run(codec, tmp_path / "r", [long], agent=agent, record_to=tmp_path / "long")
    ((turn,),) = [record["turns"] for record in lines(tmp_path / "long")]
    assert (tmp_path / "long").stat().st_size < 30_000
    assert not {"prompt_ids", "logprobs"} & {*turn}
    assert turn["section"].strip().startswith("word word")
    assert "characters left out" in turn["section"]


def test_what_means_nothing_to_an_agent_changes_none_of_its_rows(codec, tmp_path):
    path = tmp_path / "rows"
    for name, made in (("memagent", 0), ("rememr1", 1)):
        for settings in ({}, {"recall_k": 2}):
            n = len(lines(path)) if path.exists() else 0
            (row,) = run(codec, path, [task()], agent=tiny.agent(name, **settings), name=name)
        assert len(lines(path)) == n + made
        assert {"updates", "writes"} >= row["counts"].keys() or name == "rememr1"


# ---------------------------------------------------------------- failures


def test_a_second_process_in_a_folder_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(eval, "open_reader", lambda *_: pytest.fail("a model is loaded"))
    config = EvalConfig(name="e", runs=str(tmp_path), agents=("memagent",), device="cpu")
    with writing(tmp_path / "e", "It"), pytest.raises(UserError, match="is being written"):
        eval.run_suite(config, {"memagent": tiny.agent()})
    assert not (tmp_path / "e").exists()


def test_failures_are_written_and_redone_when_asked(codec, tmp_path):
    path, some = tmp_path / "rows", [*tasks(4)]
    engine = Watched(codec, script)
    engine.fails = lambda turn: some[0].question in turn.prompt.text
    engine.failures = 1
    rows = run(codec, path, some, engine)
    # all that was read and written stands in a row
    for cost, spent in engine.spent.items():
        assert sum(row[cost] for row in rows) == spent, cost
    assert rows[0]["error"] == "the endpoint is gone" and rows[0]["sub_em"] == 0
    assert cell_of(summarise(rows), "trained", "one_fact", "1.0", 2)["n"] == 4
    assert run(codec, path, some, engine) == rows  # a failure that is written stays
    again = run(codec, path, some, engine, redo_failed=True)
    assert timeless(again)[1:] == timeless(rows)[1:] and not again[0]["error"]
    # the last one counts
    assert run(codec, path, some, engine) == again and len(lines(path)) == 5


def test_a_mistake_of_an_agent_fails_its_trajectory_alone(codec, tmp_path):
    some = [*tasks(4)]

    class Careless(MemAgent):
        def run(self, task):
            yield self.prompt("final", 24, final=True, problem=task.question, memory="m")
            if task is some[1]:
                raise ZeroDivisionError("by\nzero")

    rows = run(codec, tmp_path / "rows", some, agent=Careless())
    assert [row["error"] for row in rows] == ["", "ZeroDivisionError: by zero", "", ""]
    assert rows[1]["sub_em"] == 0
