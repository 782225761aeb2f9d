"""Streams: epochs, resume, what is counted, what is never written."""

import contextlib
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import calls_of, forked
from hashes import Hashes
from test_endpoint import Server
from typer.testing import CliRunner

import cli
from agents.bank import Bank, BankConfig
from agents.memrl import SHOWN, SUCCESSES
from commands import stream
from commands.report import report
from commands.stream import Stream, _leaks, outcome_of, run_stream
from config import files
from config.errors import ServerFailed, UserError
from config.options import StreamConfig
from engines.rehearsed import RehearsedEngine
from memagent import Finish
from report.streams import epochs_of, read_summary
from suites import bandit
from suites.bandit import Bandit
from suites.llb_db import Databases
from tasks.environments import Work


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr("report.streams.plot", lambda *_, **__: "")  # most of a stream's time


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def short(tmp_path, name="s", **fields) -> StreamConfig:
    given = dict(name=name, runs=str(tmp_path), epochs=3, n=20, batch=8, engine="rehearsed")
    return StreamConfig(**(given | fields))


def numbers(folder: Path) -> tuple:
    """What a stream has to say, but for seconds, and its rows."""
    summary = read_summary(folder)
    for cell in summary["cells"]:
        del cell["seconds"]
        cell["bank"].pop("bytes")  # the file also holds seconds
    return summary, {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


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
    monkeypatch.setattr(stream, "RehearsedEngine", Acting)


# ---------------------------------------------------------------- what is measured


def test_utilities_tell_experiences_apart_that_are_equally_similar(tmp_path):
    """.97 of choices are followed; seed 0 here, ten seeds in docs/results.md."""
    config = StreamConfig(name="s", runs=str(tmp_path), arms=("rag", "memp", "memrl"))
    folder = run_stream(config, {})
    summary, rows = read_summary(folder), rows_of(folder / "memrl.jsonl")
    last = {cell["arm"]: cell["sr"] for cell in summary["cells"] if cell["epoch"] == 10}
    assert last["memrl"] > 0.9 and 0.3 < last["rag"] < 0.7 and last["rag"] == last["memp"]
    assert len(summary["cells"]) == 30 and all(cell["seconds"] > 0 for cell in summary["cells"])
    assert len(rows) == 600 and all(len(row["shown"]) == 3 for row in rows[60:])
    known = "id experience success task epoch sim sim_z q q_z score by_chance"
    assert {*rows[-1]["shown"][0]} == {*known.split()}
    assert not any(row["experience"] for row in rows)  # a bandit's tries are none
    assert "No model took part" in (folder / "report.html").read_text()


def test_shares_of_a_hand_made_history():
    """Four tasks over four epochs: 1100, 1010, 0111, 0110."""
    rows = [
        {"epoch": epoch, "id": f"t{k}", "success": digit == "1", "steps": 1, "shown": [],
         "read_tokens": 1, "written_tokens": 1, "error": "", "failure": "",
         "confidence": None}
        for epoch, digits in enumerate(["1100", "1010", "0111", "0110"])
        for k, digit in enumerate(digits)
    ]  # fmt: skip
    cells = epochs_of({"arm": "x", "rows": rows, "stats": [], "seconds": []})
    assert [c["sr"] for c in cells] == [0.5, 0.5, 0.75, 0.5]
    assert [c["csr"] for c in cells] == [0.5, 0.75, 1.0, 1.0]
    # lost of the failures: 1 of 2, 1 of 1, and the fourth of 2; the first was lost before
    assert [c["fr"] for c in cells] == [0.0, 0.5, 1.0, 0.5]
    assert [c["fr_p1"] for c in cells] == [0.0, 0.5, 0.5, 1 / 3]  # lost of those solved before


def test_order_is_a_function_of_seed_and_epoch(tmp_path):
    stream = Stream(short(tmp_path), "none", {}, Bandit(20), tmp_path)
    first, other, again = ([task.id for task in stream.order(epoch)] for epoch in (0, 1, 0))
    assert first == again != other and sorted(first) == sorted(other)


def test_rows_hang_on_the_date_where_a_model_is_told_one(tmp_path):
    def settings(codec):
        stream = Stream(short(tmp_path), "none", {}, Bandit(3), tmp_path)
        stream.agent.codec = codec
        return stream.settings

    none, silent, told = map(settings, (None, *(SimpleNamespace(told_date=d) for d in ("", "d"))))
    assert none == silent != told


STORED = "Action: go to desk 1 Result: .. Action: take mug 1 from desk 1 Action: look"
STEPS = "go to desk 1", "take mug 1 from desk 1"
SQL = "I ran\n```SQL\nselect a\n from b_c\n```\nand it was right"


@pytest.mark.parametrize(("solution", "stored", "leaks"), [
    (["left"], "left", False), (["C"], STORED, False), ([], STORED, False),  # too short
    ([*STEPS, "look"], STORED, True), ([*STEPS, "put mug 1 in bin 1"], STORED, False),
    (["Take MUG 1\nfrom desk 1"], STORED, True),
    (["```sql\nSELECT a FROM b_c;\n```", "Answer: done"], SQL, True),
])  # fmt: skip
def test_a_leak_is_the_whole_solution_and_no_common_word(solution, stored, leaks):
    task = Work("t", "q", (), text="", solution=tuple(solution))
    assert _leaks([task], [stored]) == ["t"] * leaks


# ---------------------------------------------------------------- it goes on, or is refused


def test_more_epochs_go_on_to_the_same_numbers_and_other_settings_do_not(tmp_path):
    def done(name, settings=None, **fields):
        given = dict(epochs=2, arms=("memrl",)) | fields
        return run_stream(short(tmp_path, name, **given), settings or {})

    whole = done("whole")
    done("parts", epochs=1)
    parts = done("parts")
    assert numbers(whole) == numbers(parts) != numbers(done("other", seed=1))
    path, rows = parts / "config.yaml", parts / "memrl.jsonl"
    stored = path.read_text()
    for settings, fields, name in (({}, {"batch": 5}, "batch"), ({"lam": 0.9}, {}, "lam")):
        with pytest.raises(UserError, match=name):
            done("parts", settings, **fields)
    for wrong in (stored.replace("agent: {}", "agent: 5"), "eval: {}\nagent: {}\n"):
        path.write_text(wrong)
        with pytest.raises(UserError):
            done("parts")
        assert path.read_text() == wrong
    path.write_text(stored)

    def note(change):
        with contextlib.closing(Bank(parts / "memrl.db", BankConfig())) as bank:
            before = bank.noted(stream.STATE)
            bank.note(stream.STATE, change(before))
            return before

    for change in ({"settings": "x"}, {"bytes": "1"}, {"more": 1}):
        good = note(lambda state, change=change: state | change)
        with pytest.raises(UserError):
            done("parts")
        note(lambda state, good=good: good)
    rows.write_bytes(rows.read_bytes()[:100])
    with pytest.raises(UserError, match=r"memrl\.jsonl"):
        done("parts")


def test_a_stream_whose_templates_or_suite_are_edited_is_refused(tmp_path):
    (folder := tmp_path / "templates").mkdir()
    (folder / "script.txt").write_text("{task} {trajectory}")
    (suite := tmp_path / "doors.py").write_text(Path(bandit.__file__).read_text())
    given = short(tmp_path, epochs=1, arms=("memrl",), suite=str(suite))
    for path in (folder / "script.txt", suite):
        run_stream(given, {"templates": str(folder)})
        before = path.read_text()
        path.write_text(f"{before} ")
        with pytest.raises(UserError, match=str(path)):
            run_stream(given, {"templates": str(folder)})
        path.write_text(before)
    stored = files.read_yaml(tmp_path / "s" / "config.yaml")
    files.dump(tmp_path / "s" / "config.yaml", **{k: stored[k] for k in ("stream", "agent")})
    suite.write_text(f"{before} ")  # of an earlier version nothing is known
    run_stream(given, {"templates": str(folder)})


def test_killed_a_stream_goes_on_to_the_same_numbers(tmp_path):
    words = "stream --arms rag,memrl --epochs 2 --batch 4 --n 12 --hints 4 --max-entries 60".split()
    words += ["--runs", str(tmp_path)]
    CliRunner().invoke(cli.app, [*words, "--name", "whole"])  # all modules are loaded then
    calls = calls_of(lambda: CliRunner().invoke(cli.app, [*words, "--name", "again"]))
    for share in (3, 2):  # in the first way of remembering, and in the second or its page
        process = forked([*words, "--name", "s"], tmp_path / "log", killed_at=calls // share)
        process.join()
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert CliRunner().invoke(cli.app, [*words, "--name", "s"]).exit_code == 0
    assert numbers(tmp_path / "s") == numbers(tmp_path / "whole")


@pytest.mark.parametrize("moment", ["before its end", "after it"])
def test_broken_off_at_every_transaction_in_turn_the_numbers_are_the_same(
    tmp_path, monkeypatch, moment, acting
):
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


# ---------------------------------------------------------------- what fails counts as failed


class Crashing(RehearsedEngine):
    """An engine that fails at the tasks of some ids for the first few times."""

    def __init__(self, tasks, ids, times):
        super().__init__(tasks)
        self.left = dict.fromkeys(ids, times)

    def step(self):
        done = super().step()
        for _, turn in done:
            for task in self._tasks.values():
                if self.left.get(task.id) and task.question in turn.prompt.text:
                    self.left[task.id] -= 1
                    turn.finish, turn.error = Finish.ERROR, "the server is gone"
        return done


@pytest.mark.parametrize(("times", "crashed"), [(1, 0), (9, 2)])
def test_an_engine_that_fails_is_asked_again_then_the_task_has_failed(tmp_path, times, crashed):
    config, world = short(tmp_path, epochs=1, n=0), Bandit(12)
    each = Stream(config, "memrl", {}, world, tmp_path)
    each.run(Crashing(world.tasks(), {"b3", "b7"}, times))
    (cell,) = epochs_of(outcome_of(tmp_path, "memrl", config, each.book))
    assert cell["n"] == 12 and cell["crashed"] == crashed
    learnt = {event[1] for event in each.agent.opened().events()}
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


def with_embedder(folder: Path, arm: str, embedder: Failing) -> tuple[Stream, dict]:
    """A finished stream on our eight database tasks, whose intents are embedded one by one."""
    folder.mkdir()
    world = Databases()
    config = short(folder.parent, folder.name, suite="llb-db", epochs=2, n=0, batch=4)
    settings = {"retrieve": "dense", "embedder": "hash:64", "delta": 0.1}
    each = Stream(config, arm, settings, world, folder)
    each.agent.embed = embedder
    each.run(Acting(world.tasks()))
    return each, outcome_of(folder, arm, config, each.book)


@pytest.mark.parametrize("arm", ["memrl", "reflection", "rag"])
def test_an_embedder_that_fails_once_changes_nothing_and_one_that_stays_away_teaches_nothing(
    tmp_path, arm
):
    texts = [Databases().intent(id) for id in ("own-2", "own-7")]
    whole, outcome = with_embedder(tmp_path / "whole", arm, Failing())
    failing, _ = with_embedder(tmp_path / "failing", arm, embedder := Failing(texts, 1))
    assert embedder.refused == 2
    assert failing.agent.bank.digest == whole.agent.bank.digest
    assert failing.rows_path.read_bytes() == whole.rows_path.read_bytes()
    # intents that are cut are counted in every epoch; in reflection nothing is compared
    cut = 0 if arm == "reflection" else 1
    assert [(cell["n"], cell["cut"]) for cell in epochs_of(outcome)] == [(8, cut)] * 2

    away, outcome = with_embedder(tmp_path / "away", arm, embedder := Failing(texts[:1], 10**6))
    assert [cell["n"] for cell in epochs_of(outcome)] == [8, 8]
    assert embedder.refused == 4  # two epochs, and each time once more
    bank = away.agent.bank
    assert len(bank.entries()) == 14 and not bank.entries(task_id="own-2")
    failed = [row for row in outcome["rows"] if row["error"]]
    assert [row["id"] for row in failed] == ["own-2"] * 2
    assert all(not row["success"] and row["reward"] == -1.0 for row in failed)


def test_a_task_whose_environment_raises_has_failed_and_stays_in_n(tmp_path, monkeypatch):
    world, reset = Databases(), Databases.reset

    def broken(self, id):
        if id == "own-3":
            raise ZeroDivisionError("a defect\nof the environment")
        return reset(self, id)

    monkeypatch.setattr(Databases, "reset", broken)
    config = short(tmp_path, epochs=1, n=0)
    each = Stream(config, "memrl", {}, world, tmp_path)
    each.run(Acting(world.tasks()))
    outcome = outcome_of(tmp_path, "memrl", config, each.book)
    (cell,), (row,) = epochs_of(outcome), [row for row in outcome["rows"] if row["error"]]
    without_action = sum(row["failure"] == "no action" for row in outcome["rows"])
    assert (cell["n"], cell["crashed"], row["id"]) == (8, 1 + without_action, "own-3")
    assert row["error"] == "ZeroDivisionError: a defect of the environment"


# ---------------------------------------------------------------- a bank that is read alone


@pytest.fixture(scope="module")
def at_hand(tmp_path_factory) -> Path:
    """A folder with a bank that was learnt, a damaged one, and one of embeddings."""
    folder = tmp_path_factory.mktemp("banks")
    config = short(folder, suite="llb-db", arms=("memrl",), epochs=2, n=0, batch=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "RehearsedEngine", Acting)
        (run_stream(config, {}) / "memrl.db").rename(folder / "learnt.db")
    (folder / "damaged.db").write_bytes((folder / "learnt.db").read_bytes()[:5000])
    vectors = BankConfig(retrieve="dense", embedder="hash:64")
    Bank(folder / "vectors.db", vectors, Hashes("hash:64", 64)).close()
    return folder


@pytest.fixture
def learnt_bank(tmp_path, at_hand) -> Path:
    return Path(shutil.copy(at_hand / "learnt.db", tmp_path))


def frozen(tmp_path, bank: Path, name="f", **fields) -> StreamConfig:
    given = dict(name=name, runs=str(tmp_path), suite="llb-db", frozen=str(bank), batch=4)
    return StreamConfig(**(given | fields))


def test_a_frozen_bank_is_shown_and_its_file_stays_as_it_is(tmp_path, learnt_bank, capsys, acting):
    learnt_bank.chmod(0o444)
    before, beside = learnt_bank.read_bytes(), {*tmp_path.iterdir()}
    folder = run_stream(frozen(tmp_path, learnt_bank), {})
    assert learnt_bank.read_bytes() == before and {*tmp_path.iterdir()} == {*beside, folder}
    summary = read_summary(folder)
    cells = [(c["arm"], c["epoch"], c["n"], c["bank"]["entries"]) for c in summary["cells"]]
    assert cells == [("none", 1, 8, 0), ("rag", 1, 8, 16), ("memrl", 1, 8, 16)]
    with contextlib.closing(Bank(learnt_bank, BankConfig(), frozen=True)) as bank:
        assert summary["digests"]["memrl"] == bank.digest
    assert summary["frozen"]["path"] == str(learnt_bank)
    assert {*summary["leaks"]} == {"rag", "memrl"} and all(summary["leaks"].values())
    said = " ".join(capsys.readouterr().out.split())
    for text in (said, " ".join((folder / "report.html").read_text().split())):
        assert "memrl: the bank holds solutions of" in text and "none: the bank" not in text
    for arm in ("none", "rag", "memrl"):
        rows = rows_of(folder / f"{arm}.jsonl")
        assert any(row["shown"] for row in rows) is (arm != "none")
        assert not any(row["experience"] for row in rows)
        # a task that has left experiences there is not shown its own
        assert all(row["id"] != shown["task"] for row in rows for shown in row["shown"])


def test_a_frozen_stream_goes_on_to_the_same_rows_and_refuses_a_bank_that_changed(
    tmp_path, learnt_bank, monkeypatch, acting
):
    whole = run_stream(frozen(tmp_path, learnt_bank, "whole"), {})
    real, left = Bank.note, [6]

    def note(self, key, value):
        left[0] -= self.path.parent.name == "parts"
        if left[0] == 0:
            raise KeyboardInterrupt
        real(self, key, value)

    monkeypatch.setattr(Bank, "note", note)
    parts = frozen(tmp_path, learnt_bank, "parts")
    with pytest.raises(KeyboardInterrupt):
        run_stream(parts, {})
    assert (tmp_path / "parts" / "none.jsonl").exists()
    report(tmp_path / "parts")
    assert "Stopped: none" in (tmp_path / "parts" / "report.html").read_text()
    assert numbers(run_stream(parts, {}))[1] == numbers(whole)[1]
    with contextlib.closing(Bank(learnt_bank, BankConfig())) as bank:
        bank.write("x", "y", success=True, task_id="z")
    with pytest.raises(UserError):
        run_stream(parts, {})


def test_a_frozen_bank_lies_in_no_folder_of_the_stream(tmp_path, at_hand):
    (bank := tmp_path / "f" / "memrl.db").parent.mkdir()
    shutil.copy(at_hand / "learnt.db", bank)
    before = bank.read_bytes()
    with pytest.raises(UserError):
        run_stream(frozen(tmp_path, bank), {})
    assert bank.read_bytes() == before


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


# ---------------------------------------------------------------- models, here and behind a server


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


WRONG, LESSONS = "own-3", ("Steps:", "Reflection:")  # the task that is never solved; cues


def reply(body: dict) -> dict:
    """Act as the known solution of the task that the conversation began with."""
    messages = body["messages"]
    said = messages[0]["content"]
    if said.endswith(LESSONS):
        text = "Look at the table first."
    else:
        (task,) = [t for t in Databases().tasks() if said.endswith(f"Task:\n{t.question}\n")]
        step = sum(message["role"] == "assistant" for message in messages)
        text = "Answer: []" if task.id == WRONG else task.solution[step]
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


def test_a_server_of_messages_works_on_tasks_turn_by_turn(tmp_path, codec):
    words = "--suite llb-db --arms none,memrl --epochs 2 --batch 8 --chat --delta 0"
    server = Server(codec, ids=False)
    server.always = reply
    command = ["stream", "--runs", str(tmp_path), "--endpoint", server.url, *words.split()]
    result = CliRunner().invoke(cli.app, command)
    server.stop()
    sent = [body["messages"] for body in server.bodies]
    assert result.exit_code == 0 and "No model" not in result.output, result.output
    acts = [m for m in sent if not m[0]["content"].endswith(LESSONS)]
    for messages in acts:
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    lessons = [m for m in sent if m not in acts]
    assert len(lessons) == 16 and all(len(messages) == 1 for messages in lessons)
    assert not any(SHOWN in m[0]["content"] for m in lessons)  # what was shown is not kept again
    with_memory = [m[0]["content"] for m in acts if SHOWN in m[0]["content"]]
    assert any("Look at the table first." in text.split(SUCCESSES)[-1] for text in with_memory)
    for arm in ("none", "memrl"):
        rows = rows_of(tmp_path / "stream" / f"{arm}.jsonl")
        assert len(rows) == 16 and not any(row["error"] for row in rows)
        assert {row["id"] for row in rows if not row["success"]} == {WRONG}
        assert all(row["read_tokens"] > 0 and row["written_tokens"] > 0 for row in rows)
        assert max(row["steps"] for row in rows) == 2
