"""Streams: epochs, resume, what is counted, what is never written."""

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from conftest import calls_of, forked
from hashes import Hashes
from typer.testing import CliRunner

import cli
from agents import find
from agents.bank import Bank, BankConfig
from commands.report import report
from commands.stream import Stream, _leaks, run_stream
from config import files
from config.errors import ServerFailed, UserError
from config.locks import writing
from config.options import StreamConfig
from engines.rehearsed import RehearsedEngine
from report.streams import epochs_of, read_summary
from suites import bandit
from suites.bandit import Bandit
from suites.llb_db import Databases
from tasks.environments import Work


def banks(folder: Path) -> dict[str, str]:
    return read_summary(folder)["digests"]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def short(tmp_path, name="s", **fields) -> StreamConfig:
    given = dict(name=name, runs=str(tmp_path), epochs=3, n=20, batch=8, engine="rehearsed")
    return StreamConfig(**(given | fields))


class Acting(RehearsedEngine):
    """Acts as the known solution of any task does, in half of the tries, and writes lessons."""

    def __init__(self, tasks):
        super().__init__(())
        self._tasks = {task.question: task for task in tasks}

    def respond(self, prompt):
        half, first, before = self._seeds.pop(id(prompt)) % 2, prompt, []
        while first.after is not None:
            before.insert(0, str(first.after.response))
            first = first.after.prompt
        texts = [str(piece) for piece, constant in first.pieces if not constant]
        task = next((self._tasks[t] for t in reversed(texts) if t in self._tasks), None)
        if task is None:
            return "Do as it was done there."
        goes_on = before == [*task.solution[: len(before)]] if before else half
        return task.solution[len(before)] if goes_on else "I do not know."


@pytest.fixture
def acting(monkeypatch):
    """Streams are worked on by `Acting`."""
    monkeypatch.setattr("commands.stream.RehearsedEngine", Acting)


def test_utilities_tell_experiences_apart_that_are_equally_similar(tmp_path):
    """.97 of choices are followed; seed 0 here, ten seeds in docs/results.md."""
    config = StreamConfig(name="s", runs=str(tmp_path), arms=("rag", "memp", "memrl"))
    cells = read_summary(run_stream(config, {}))["cells"]
    last = {cell["arm"]: cell["sr"] for cell in cells if cell["epoch"] == 10}
    assert last["memrl"] > 0.9 and 0.3 < last["rag"] < 0.7 and last["rag"] == last["memp"]


def test_more_epochs_go_on_to_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("report.streams.plot", lambda *_, **__: "")  # most of a stream's time

    def done(name, settings=None, **fields):
        return run_stream(
            short(tmp_path, name, **dict(epochs=2, arms=("memrl",)) | fields), settings or {}
        )

    whole = done("whole")
    done("parts", epochs=1)
    parts = done("parts")
    assert banks(whole) == banks(parts) != banks(done("other", seed=1))
    path, rows = parts / "config.yaml", parts / "memrl.jsonl"
    assert (whole / "memrl.jsonl").read_bytes() == rows.read_bytes()
    with pytest.raises(UserError, match=r"other settings \(batch\)"):
        done("parts", batch=5)
    with pytest.raises(UserError, match=r"other settings \(lam\)"):
        done("parts", {"lam": 0.9})
    stored = path.read_text()
    for wrong, sentence in (
        (stored.replace("agent: {}", "agent: 5"), "holds a run that is no stream"),
        ("eval: {}\nagent: {}\n", "holds a run that is no stream"),
    ):
        path.write_text(wrong)
        with pytest.raises(UserError, match=sentence):
            done("parts")
        assert path.read_text() == wrong
    path.write_text(stored)
    rows.write_bytes(rows.read_bytes()[:100])
    with pytest.raises(UserError, match="shorter than its bank says"):
        done("parts")


def test_a_stream_whose_templates_or_suite_are_edited_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("report.streams.plot", lambda *_, **__: "")
    (folder := tmp_path / "templates").mkdir()
    (folder / "script.txt").write_text("{task} {trajectory}")
    (suite := tmp_path / "doors.py").write_text(Path(bandit.__file__).read_text())
    given = short(tmp_path, epochs=1, arms=("memrl",), suite=str(suite))
    for path in (folder / "script.txt", suite):
        run_stream(given, {"templates": str(folder)})
        before = path.read_text()
        path.write_text(f"{before} ")
        with pytest.raises(UserError, match=rf"other settings \(the content of {path}\)"):
            run_stream(given, {"templates": str(folder)})
        path.write_text(before)
    stored = files.read_yaml(tmp_path / "s" / "config.yaml")
    files.dump(tmp_path / "s" / "config.yaml", **{k: stored[k] for k in ("stream", "agent")})
    suite.write_text(f"{before} ")  # of an earlier version nothing is known
    run_stream(given, {"templates": str(folder)})


KILLS = 12
WORDS = "stream --arms rag,memrl --epochs 3 --batch 4 --n 16 --hints 4 --max-entries 60".split()


def numbers(folder: Path) -> tuple:
    """What a stream has to say, but for seconds, and its rows."""
    summary = read_summary(folder)
    for cell in summary["cells"]:
        del cell["seconds"]
        cell["bank"].pop("bytes")  # the file also holds seconds
    return summary, [(folder / f"{arm}.jsonl").read_bytes() for arm in ("rag", "memrl")]


@pytest.fixture
def in_memory(tmp_path):
    """A folder where waiting for the disk takes no time: a kill loses nothing of it either."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=shared if os.access(shared, os.W_OK) else tmp_path
    ) as name:
        yield Path(name)


def test_killed_at_random_instants_a_stream_goes_on_to_the_same_numbers(in_memory, monkeypatch):
    """The processes are forked from this one, so that each begins at once; a stream that ends
    before all kills are done is followed by another."""
    monkeypatch.setattr("report.streams.plot", lambda *_, **__: "")  # most of a stream's time
    words = [*WORDS, "--runs", str(in_memory)]
    assert CliRunner().invoke(cli.app, [*words, "--name", "whole"]).exit_code == 0
    calls = calls_of(lambda: CliRunner().invoke(cli.app, [*words, "--name", "again"]))
    expected = numbers(in_memory / "whole")
    assert numbers(in_memory / "again") == expected
    rng, kills, streams, moments = random.Random(0), 0, 0, set()
    enough = False  # kills, at places enough: those before the first batch are all one
    while not enough or (in_memory / f"s{streams}").exists():
        folder = in_memory / f"s{streams}"
        at = None if enough else rng.randrange(calls // 6, calls // 2)
        process = forked([*words, "--name", folder.name], in_memory / "log", killed_at=at)
        process.join()
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            assert kills < 3 * KILLS, f"only {len(moments)} places"
            moments.add((streams, *(p.stat().st_size for p in sorted(folder.glob("*.jsonl")))))
            for path in folder.glob("*.db"):
                try:
                    assert (
                        Bank(path, BankConfig(), frozen=True)._value("PRAGMA integrity_check")
                        == "ok"
                    )
                except UserError as error:  # killed before it was one
                    assert "holds no bank" in str(error)
        else:
            assert process.exitcode == 0, (in_memory / "log").read_text()
            assert numbers(folder) == expected
            streams += 1
        enough = kills >= KILLS and len(moments) >= 6
    assert streams and len(moments) >= 6


@pytest.mark.parametrize("moment", ["before its end", "after it"])
def test_broken_off_at_every_transaction_in_turn_the_numbers_are_the_same(
    tmp_path, monkeypatch, moment, acting
):
    monkeypatch.setattr("report.streams.plot", lambda *_, **__: "")
    settings = dict(arms=("rag", "memrl"), suite="llb-db", batch=4, epochs=2, n=0)
    run_stream(short(tmp_path, "whole", **settings), {"max_entries": 6})
    real, done, crashes = Bank.batch, set(), 0

    @contextlib.contextmanager
    def batch(self):
        outer, place = not self._writing, (self.path, self.batches)
        crash = outer and place not in done and self.path.parent.name == "broken"
        done.update({place} if outer else ())
        with real(self):
            yield
            if crash and moment == "before its end":
                raise KeyboardInterrupt
        if crash and moment == "after it":
            raise KeyboardInterrupt

    monkeypatch.setattr(Bank, "batch", batch)
    while True:
        try:
            run_stream(short(tmp_path, "broken", **settings), {"max_entries": 6})
            break
        except KeyboardInterrupt:
            crashes += 1
    assert crashes == 10  # of each arm the beginning, and two batches in each of two epochs
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole")


def test_two_streams_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("report.streams.plot", lambda *_, **__: "")
    folder = run_stream(short(tmp_path, epochs=1), {})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = rf"The stream .*/s is being written by process {os.getpid()} .*: wait"
    with writing(folder, "It"), pytest.raises(UserError, match=words):
        run_stream(short(tmp_path, epochs=2), {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    run_stream(short(tmp_path, epochs=2), {})


def test_shares_of_a_hand_made_history():
    """Four tasks over four epochs: 1100, 1010, 0111, 0110."""
    history = ["1100", "1010", "0111", "0110"]
    rows = [
        {"epoch": epoch, "id": f"t{k}", "success": digit == "1", "steps": 1, "shown": [],
         "read_tokens": 1, "written_tokens": 1, "error": "", "failure": "",
         "confidence": None}
        for epoch, digits in enumerate(history) for k, digit in enumerate(digits)
    ]  # fmt: skip
    cells = epochs_of({"arm": "x", "rows": rows, "stats": [], "seconds": []})
    assert [c["sr"] for c in cells] == [0.5, 0.5, 0.75, 0.5]
    assert [c["csr"] for c in cells] == [0.5, 0.75, 1.0, 1.0]
    # lost of the failures: 1 of 2, 1 of 1, and the fourth of 2; the first was lost before
    assert [c["fr"] for c in cells] == [0.0, 0.5, 1.0, 0.5]
    assert [c["fr_p1"] for c in cells] == [0.0, 0.5, 0.5, 1 / 3]  # lost of those solved before


class Crashing(RehearsedEngine):
    """An engine that fails at the tasks of some ids for the first few times."""

    def __init__(self, tasks, ids, times):
        super().__init__(tasks)
        self.ids, self.left = ids, {id: times for id in ids}

    def step(self):
        from memagent import Finish

        done = super().step()
        for _, turn in done:
            for task in self._tasks.values():
                if task.id in self.ids and task.question in turn.prompt.text and self.left[task.id]:
                    self.left[task.id] -= 1
                    turn.finish, turn.error = Finish.ERROR, "the server is gone"
        return done


@pytest.mark.parametrize(("times", "crashed"), [(1, 0), (9, 2)])
def test_an_engine_that_fails_is_asked_again_then_the_item_has_failed(tmp_path, times, crashed):
    config, world = short(tmp_path, epochs=1, n=0), Bandit(12)
    (tmp_path / "s").mkdir()
    stream = Stream(config, "memrl", {}, world, tmp_path / "s")
    engine = Crashing(world.tasks(), {"b3", "b7"}, times)
    stream.run(engine)
    (cell,) = epochs_of(stream.outcome())
    assert cell["n"] == 12 and cell["crashed"] == crashed
    learnt = {event[1] for event in stream.agent.opened().events()}
    assert len(learnt) == 12 - crashed  # utilities have learnt nothing from what crashed
    assert ("b3" in learnt) is (not crashed)


class Failing:
    """hash:64, which is out of reach when it is asked for some texts, the first few times."""

    name, dim = "hash:64", 64

    def __init__(self, texts=(), times=0):
        self.inner, self.left = Hashes("hash:64", 64), dict.fromkeys(texts, times)
        self.refused = 0

    def cut(self, texts, query=False):
        return [text == Databases().intent("own-5") for text in texts]

    def embed(self, texts, query=False):
        for text in texts:
            if self.left.get(text):
                self.left[text] -= 1
                self.refused += 1
                raise ServerFailed("The embedder gives no embeddings after 3 tries: HTTP 503.")
        return self.inner.embed(texts, query)


def with_embedder(folder: Path, arm: str, embedder: Failing) -> Stream:
    """A finished stream on our eight database tasks, whose intents are embedded one by one."""
    folder.mkdir()
    world = Databases()
    config = short(folder.parent, folder.name, suite="llb-db", epochs=2, n=0, batch=4)
    settings = {"retrieve": "dense", "embedder": "hash:64", "delta": 0.1}
    stream = Stream(config, arm, settings, world, folder)
    stream.agent.embed = embedder
    stream.run(Acting(world.tasks()))
    return stream


@pytest.mark.parametrize("arm", ["memrl", "reflection", "rag"])
def test_an_embedder_that_fails_once_changes_nothing(tmp_path, arm):
    texts = [Databases().intent(id) for id in ("own-2", "own-7")]
    whole = with_embedder(tmp_path / "whole", arm, Failing())
    failing = with_embedder(tmp_path / "failing", arm, embedder := Failing(texts, 1))
    assert embedder.refused == 2
    assert failing.agent.bank.digest == whole.agent.bank.digest
    assert failing.rows_path.read_bytes() == whole.rows_path.read_bytes()


def test_intents_that_are_cut_are_counted_in_every_epoch_beside_what_it_costs(tmp_path):
    stream = with_embedder(tmp_path / "s", "memrl", Failing())
    outcome = stream.outcome()
    assert {row["id"] for row in outcome["rows"] if row["cut"]} == {"own-5"}
    assert [(cell["n"], cell["cut"]) for cell in epochs_of(outcome)] == [(8, 1)] * 2
    assert stream.agent.bank.stats()["cut"] == 2  # of two entries
    reflection = with_embedder(tmp_path / "r", "reflection", Failing())
    assert not any(row["cut"] for row in reflection.outcome()["rows"])  # nothing is compared


@pytest.mark.parametrize("arm", ["memrl", "reflection", "rag"])
def test_an_embedder_that_stays_away_fails_the_item_and_teaches_nothing(tmp_path, arm):
    embedder = Failing([Databases().intent("own-2")], 10**6)
    stream = with_embedder(tmp_path / "s", arm, embedder)
    assert [cell["n"] for cell in epochs_of(stream.outcome())] == [8, 8]
    assert embedder.refused == 4  # two epochs, and each time once more
    bank = stream.agent.bank
    assert len(bank.entries()) == 14 and not bank.entries(task_id="own-2")
    assert (
        "own-2" not in {event[1] for event in bank.events()}
        and bank._value("PRAGMA integrity_check") == "ok"
    )
    rows = rows_of(stream.rows_path)
    failed = [row for row in rows if row["error"]]
    assert [row["id"] for row in failed] == ["own-2"] * 2
    assert all(not row["success"] and "gives no embeddings" in row["error"] for row in failed)


class Breaking:
    """An environment in which one task raises when it is worked on."""

    def __init__(self, world, id):
        self.world, self.id = world, id

    def __getattr__(self, name):
        return getattr(self.world, name)

    def tasks(self):
        tasks = [*self.world.tasks()]
        for task in tasks:
            task.environment = self
        return tasks

    def reset(self, id):
        if id == self.id:
            raise ZeroDivisionError("a defect\nof the environment")
        return self.world.reset(id)


def test_a_task_whose_environment_raises_has_failed_and_stays_in_n(tmp_path):
    (tmp_path / "s").mkdir()
    world = Breaking(Databases(), "own-3")
    stream = Stream(short(tmp_path, epochs=1, n=0), "memrl", {}, world, tmp_path / "s")
    stream.run(Acting(world.tasks()))
    (cell,) = epochs_of(stream.outcome())
    rows = stream.outcome()["rows"]
    (row,) = [row for row in rows if row["error"]]
    without_action = sum(row["failure"] == "no action" for row in rows)
    assert (cell["n"], cell["crashed"], row["id"]) == (8, 1 + without_action, "own-3")
    assert row["error"] == "ZeroDivisionError: a defect of the environment"


def test_a_leak_is_the_whole_solution_and_no_common_word():
    def task(*solution):
        return Work("t", "q", (), text="", solution=solution)

    stored = ["Action: go to desk 1 Result: .. Action: take mug 1 from desk 1 Action: look", "left"]
    assert not _leaks([task("left"), task("C"), task()], stored)  # too short to be looked for
    steps = "go to desk 1", "take mug 1 from desk 1"
    assert _leaks([task(*steps, "look")], stored) == ["t"]
    assert not _leaks([task(*steps, "put mug 1 in bin 1")], stored)
    assert _leaks([task("Take MUG 1\nfrom desk 1")], stored) == ["t"]
    sql = "I ran\n```SQL\nselect a\n from b_c\n```\nand it was right"
    assert _leaks([task("```sql\nSELECT a FROM b_c;\n```", "Answer: done")], [sql]) == ["t"]


def test_order_is_a_function_of_seed_and_epoch(tmp_path):
    stream = Stream(short(tmp_path), "none", {}, Bandit(20), tmp_path)
    orders = [[task.id for task in stream.order(epoch)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    fixed = Stream(short(tmp_path, fixed_order=True), "none", {}, Bandit(20), tmp_path)
    assert (
        [t.id for t in fixed.order(0)]
        == [t.id for t in fixed.order(5)]
        == [t.id for t in fixed.tasks]
    )


def test_the_page_and_the_summary_say_what_was_done(tmp_path):
    folder = run_stream(short(tmp_path, arms=("none", "rag", "memrl")), {})
    page = (folder / "report.html").read_text()
    for words in ("No model took part", "Tasks solved", ">forgotten</th>", "memrl, task"):
        assert words in page, words
    summary = read_summary(folder)
    assert {cell["arm"] for cell in summary["cells"]} == {"none", "rag", "memrl"}
    assert len(summary["cells"]) == 9 and summary["cells"][0]["n"] == 20
    assert all(cell["seconds"] > 0 for cell in summary["cells"])
    assert all(cell["calibration_error"] is None for cell in summary["cells"])
    rows = rows_of(folder / "memrl.jsonl")
    assert len(rows) == 60 and all(len(row["shown"]) == 3 for row in rows)
    known = {"id", "experience", "success", "task", "epoch", "sim", "sim_z", "q", "q_z", "score",
             "by_chance"}  # fmt: skip
    assert {*rows[0]["shown"][0]} == known
    assert all(row["interaction"] == [[row["action"], seen]] for row in rows
               for seen in [row["interaction"][0][1]])  # fmt: skip


def test_the_demo_is_made(tmp_path):
    words = ["demo", "--agent", find.learner().name, "--short", "--name", "d"]
    result = CliRunner().invoke(cli.app, [*words, "--runs", str(tmp_path)])
    assert result.exit_code == 0, result.output
    summary = read_summary(tmp_path / "d")
    assert {cell["arm"] for cell in summary["cells"]} == {*find.learner().extras["arms"]}
    assert {cell["n"] for cell in summary["cells"]} == {60} and summary["rule"]
    page = (tmp_path / "d" / "report.html").read_text()
    assert "solved with memrl" in page and "<svg" in page


def test_a_model_works_on_tasks(tmp_path):
    words = "--suite llb-db --engine transformers --device cpu --arms memrl --epochs 2 --n 2"
    words += " --act-tokens 16 --lesson-tokens 8 --max-steps 2 --delta 0"
    result = CliRunner().invoke(cli.app, ["stream", "--runs", str(tmp_path), *words.split()])
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "stream/memrl.jsonl")
    assert [row["epoch"] for row in rows] == [0, 0, 1, 1] and not any(row["error"] for row in rows)
    assert all(row["shown"] for row in rows[2:]) and rows[0]["read_tokens"] > 0
    with contextlib.closing(Bank(tmp_path / "stream/memrl.db", BankConfig(), frozen=True)) as bank:
        assert len(bank.entries()) == 4


def frozen(tmp_path, bank: Path, name="f", **fields) -> StreamConfig:
    given = dict(name=name, runs=str(tmp_path), suite="llb-db", frozen=str(bank), batch=4)
    return StreamConfig(**(given | fields))


@pytest.fixture
def learnt_bank(tmp_path, at_hand) -> Path:
    """The bank of a stream over our eight database tasks, moved away from it."""
    return Path(shutil.copy(at_hand / "learnt.db", tmp_path))


def test_a_frozen_bank_is_shown_and_its_file_stays_as_it_is(tmp_path, learnt_bank, capsys, acting):
    learnt_bank.chmod(0o444)
    before, beside = learnt_bank.read_bytes(), {*tmp_path.iterdir()}
    folder = run_stream(frozen(tmp_path, learnt_bank), {})
    assert learnt_bank.read_bytes() == before and {*tmp_path.iterdir()} == {*beside, folder}
    said = " ".join(capsys.readouterr().out.split())
    summary, page = read_summary(folder), (folder / "report.html").read_text()
    assert [(c["arm"], c["epoch"], c["n"]) for c in summary["cells"]] == [
        ("none", 1, 8), ("rag", 1, 8), ("memrl", 1, 8)
    ]  # fmt: skip
    with contextlib.closing(Bank(learnt_bank, BankConfig(), frozen=True)) as bank:
        assert summary["digests"]["memrl"] == bank.digest
        kinds, entries = {task.id: task.kind for task in Databases().tasks()}, len(bank.entries())
        assert all(entry.meta["kind"] == kinds[entry.task_id] for entry in bank.entries())
    of_arms = {c["arm"]: c["bank"]["entries"] for c in summary["cells"]}
    assert of_arms == {"none": 0, "rag": entries, "memrl": entries} and entries == 16
    for text in (said, " ".join(page.split())):
        assert f"Frozen: 16 entries of {learnt_bank}; nothing was learnt." in text
        assert "memrl: the bank holds solutions of" in text and "none: the bank" not in text
    assert "by similarity alone" in page
    for arm in ("rag", "memrl"):
        rows = rows_of(folder / f"{arm}.jsonl")
        assert any(row["shown"] for row in rows) and not any(row["experience"] for row in rows)
        # a task that has left experiences there is not shown its own
        assert all(row["id"] != shown["task"] for row in rows for shown in row["shown"])
    assert not any(json.loads(line)["shown"] for line in (folder / "none.jsonl").open())
    assert "memrl, task" in page and "<svg" not in page  # one epoch: no curve


def test_a_frozen_stream_goes_on_to_the_same_rows_and_refuses_a_bank_that_changed(
    tmp_path, learnt_bank, monkeypatch, acting
):
    whole = run_stream(frozen(tmp_path, learnt_bank, "whole"), {})
    real, left = Bank.batch, [3]

    @contextlib.contextmanager
    def batch(self):
        outer = not self._writing
        with real(self):
            yield
            if outer and self.path.parent.name == "parts":
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt

    monkeypatch.setattr(Bank, "batch", batch)
    parts = frozen(tmp_path, learnt_bank, "parts")
    with pytest.raises(KeyboardInterrupt):
        run_stream(parts, {})
    assert (tmp_path / "parts" / "none.jsonl").exists()
    report(tmp_path / "parts")
    assert (
        "Stopped: none, method 1 of 3, epoch 1 of 1"
        in (tmp_path / "parts" / "report.html").read_text()
    )
    folder = run_stream(parts, {})
    for arm in ("none", "rag", "memrl"):
        name = f"{arm}.jsonl"
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    with contextlib.closing(Bank(learnt_bank, BankConfig())) as bank:
        bank.write("x", "y", success=True, task_id="z")
    with pytest.raises(UserError, match="with other tasks or settings"):
        run_stream(parts, {})


@pytest.mark.parametrize("words", [
    "--arms none,ghost", "--arms none,none", "--suite moon", "--suite bandit --path x.json",
    "--epochs 0", "--model smollm2", "--suite bandit --constants paper", "--retrieve dense",
    "--alpha 2", "--bank learnt.db", "--frozen none.db", "--frozen damaged.db",
    "--frozen vectors.db --retrieve dense --embedder hash:128",
    "--frozen learnt.db --retrieve dense --embedder hash:64",
    "--frozen learnt.db --arms reflection", "--suite llb-db",
])  # fmt: skip
def test_a_mistake_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, words, at_hand):
    monkeypatch.chdir(at_hand)
    words = ["stream", "--runs", str(tmp_path), *words.split()]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2 and "memagent: " in result.output, result.output
    assert "Traceback" not in result.output and not [*tmp_path.iterdir()]


def test_a_frozen_bank_lies_in_no_folder_of_the_stream(tmp_path, at_hand):
    bank = tmp_path / "f" / "memrl.db"
    bank.parent.mkdir()
    shutil.copy(at_hand / "learnt.db", bank)
    before = bank.read_bytes()
    with pytest.raises(UserError, match="lies in"):
        run_stream(frozen(tmp_path, bank), {})
    assert bank.read_bytes() == before


@pytest.fixture(scope="module")
def at_hand(tmp_path_factory) -> Path:
    """A folder with a bank that was learnt, a damaged one, and one of embeddings."""
    folder = tmp_path_factory.mktemp("banks")
    config = short(folder, suite="llb-db", arms=("memrl",), epochs=2, n=0, batch=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commands.stream.RehearsedEngine", Acting)
        (run_stream(config, {}) / "memrl.db").rename(folder / "learnt.db")
    (folder / "damaged.db").write_bytes((folder / "learnt.db").read_bytes()[:5000])
    vectors = BankConfig(retrieve="dense", embedder="hash:64")
    Bank(folder / "vectors.db", vectors, Hashes("hash:64", 64)).close()
    return folder


def test_the_page_of_a_stream_by_embeddings_is_written_anew_without_the_embedder(tmp_path):
    settings = {"retrieve": "dense", "embedder": "hash:64"}
    folder = run_stream(short(tmp_path, epochs=1), settings)
    (folder / "report.html").unlink()
    assert report(folder).exists()
