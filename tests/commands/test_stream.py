"""Streams: epochs, resume, what is counted, what is never written."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import forked
from typer.testing import CliRunner

import cli
from agents import find
from commands.stream import State, Stream, run_stream
from config.errors import UserError
from config.options import StreamConfig
from engines.rehearsed import RehearsedEngine
from report.streams import epochs_of, read_summary
from tasks.bandit import Bandit

ROOT = Path(__file__).parents[2]


def banks(folder: Path) -> dict[str, str]:
    return {arm: digest for arm, digest in read_summary(folder)["digests"].items()}


def short(tmp_path, name="s", **fields) -> StreamConfig:
    given = dict(name=name, runs=str(tmp_path), epochs=3, n=20, batch=8, engine="rehearsed")
    return StreamConfig(**(given | fields))


def test_utilities_tell_experiences_apart_that_are_equally_similar(tmp_path):
    """.97 of choices are followed; mean of seeds 0 and 1 here, ten seeds in docs/results.md."""
    last = {}
    for seed in (0, 1):
        config = StreamConfig(
            name=str(seed), runs=str(tmp_path), seed=seed, arms=("rag", "memp", "memrl")
        )
        for cell in read_summary(run_stream(config, {}))["cells"]:
            last.setdefault(cell["arm"], []).append(cell["sr"] if cell["epoch"] == 10 else 0)
    mean = {arm: sum(values) / 2 for arm, values in last.items()}
    assert mean["memrl"] > 0.9 and 0.3 < mean["rag"] < 0.7 and mean["rag"] == mean["memp"]


def test_the_same_stream_gives_the_same_bank_and_another_seed_another(tmp_path):
    one, two, other = (
        banks(run_stream(short(tmp_path, name, seed=seed), {}))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert one == two and one["memrl"] != other["memrl"]


def test_more_epochs_go_on_to_the_same_numbers(tmp_path):
    whole = run_stream(short(tmp_path, "whole", epochs=4), {})
    run_stream(short(tmp_path, "parts", epochs=1), {})
    parts = run_stream(short(tmp_path, "parts", epochs=4), {})
    assert banks(whole) == banks(parts)
    assert (whole / "memrl.jsonl").read_bytes() == (parts / "memrl.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"other settings \(batch\)"):
        run_stream(short(tmp_path, "parts", epochs=4, batch=5), {})
    with pytest.raises(UserError, match=r"other settings \(lam\)"):
        run_stream(short(tmp_path, "parts", epochs=4), {"lam": 0.9})


def test_rows_of_a_batch_that_was_not_kept_are_cut_off(tmp_path):
    folder = run_stream(short(tmp_path, epochs=2), {})
    path, before = folder / "memrl.jsonl", (folder / "memrl.jsonl").read_bytes()
    with path.open("ab") as file:
        file.write(b'{"epoch": 2, "id": "b1", "succ')
    run_stream(short(tmp_path, epochs=2), {})
    assert path.read_bytes() == before
    path.write_bytes(before[:100])
    with pytest.raises(UserError, match="shorter than its bank says"):
        run_stream(short(tmp_path, epochs=2), {})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes")
def test_killed_at_any_time_a_stream_goes_on_to_the_same_bank(tmp_path):
    words = "stream --engine rehearsed --arms rag,memrl --epochs 5 --batch 4 --runs"
    command = [*words.split(), str(tmp_path), "--name"]
    # an interpreter of its own: what comes out may not depend on its hashes either
    fresh = [sys.executable, str(ROOT / "cli.py"), *command, "whole"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(fresh, env=environ, check=True, capture_output=True)
    kills = 0
    for k in range(12):
        process = forked([*command, "killed"])
        path = tmp_path / "killed" / "rag.jsonl"
        begun = time.monotonic()
        while process.exitcode is None and not path.exists() and time.monotonic() - begun < 60:
            time.sleep(0.01)
        time.sleep(0.05 + 0.13 * (k % 4))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        kills += 1
    last = forked([*command, "killed"])
    last.join()
    assert kills and last.exitcode == 0
    assert banks(tmp_path / "whole") == banks(tmp_path / "killed")
    for arm in ("rag", "memrl"):
        one, two = ((tmp_path / n / f"{arm}.jsonl").read_bytes() for n in ("whole", "killed"))
        assert one == two


def test_shares_of_a_hand_made_history():
    """Four tasks over four epochs: 1100, 1010, 0111, 0110."""
    history = ["1100", "1010", "0111", "0110"]
    rows = [
        {"epoch": epoch, "id": f"t{k}", "success": digit == "1", "steps": 1, "shown": [],
         "read_tokens": 1, "written_tokens": 1, "error": "", "failure": ""}
        for epoch, digits in enumerate(history) for k, digit in enumerate(digits)
    ]  # fmt: skip
    cells = epochs_of({"arm": "x", "rows": rows, "stats": []})
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


def test_held_out_tasks_teach_nothing_and_leaks_are_named(tmp_path):
    world = Bandit(10)
    config = short(tmp_path, epochs=1, n=0)
    (tmp_path / "s").mkdir()
    stream = Stream(config, "memrl", {}, world, tmp_path / "s")
    engine = RehearsedEngine(world.tasks())
    stream.run(engine)
    before = stream.agent.opened().digest
    stream.transfer(engine, Bandit(6))
    outcome = stream.outcome()
    assert len(outcome["held_out"]) == 6 and stream.agent.opened().digest == before
    assert outcome["leaks"] == []  # "left" is too short to be looked for
    for task in (leaky := Bandit(2)).tasks():
        leaky_task = task
    leaky_task.solution = ("SELECT name FROM dogs",)
    leaky.tasks = lambda: [leaky_task]
    stream.agent.opened().write("x", "Action: SELECT name\nFROM dogs", success=True, task_id="q")
    stream.transfer(engine, leaky)
    assert stream.outcome()["leaks"] == [leaky_task.id]


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--arms none,ghost", "Unknown arm 'ghost'"),
        ("--arms none,none", "arms has 'none' twice"),
        ("--environment moon", "Unknown environment 'moon'"),
        ("--path x.json", "leave --path out"),
        ("--epochs 0", "epochs must be at least 1"),
        ("--model smollm2", "rehearsed asks no model"),
        ("--constants paper", "no paper constants for bandit"),
        ("--retrieve dense", "name an embedder"),
        ("--alpha 2", "alpha must be between 0 and 1"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, words, said):
    result = CliRunner().invoke(cli.app, ["stream", "--runs", str(tmp_path), *words.split()])
    assert result.exit_code == 2 and said in " ".join(result.output.split())
    assert not (tmp_path / "stream").exists()


def test_the_page_and_the_summary_say_what_was_done(tmp_path):
    folder = run_stream(short(tmp_path, arms=("none", "rag", "memrl")), {})
    page = (folder / "report.html").read_text()
    for words in ("No model took part", "Success by epoch", "never shown", "Helped", "Hurt",
                  "One task, epoch by epoch", "memrl - rag"):  # fmt: skip
        assert words in page, words
    summary = read_summary(folder)
    assert {cell["arm"] for cell in summary["cells"]} == {"none", "rag", "memrl"}
    assert len(summary["cells"]) == 9 and summary["cells"][0]["n"] == 20
    rows = [json.loads(line) for line in (folder / "memrl.jsonl").read_text().splitlines()]
    assert len(rows) == 60 and all(len(row["shown"]) == 3 for row in rows)


def test_a_stream_of_the_agent_of_this_folder_keeps_its_place():
    assert find.learner().arms and State(1, 2, 3, "x").epoch == 1


def test_a_model_works_on_tasks_and_its_bank_is_looked_at(tmp_path):
    words = "--environment llb-db --engine transformers --device cpu --arms memrl --epochs 2 --n 2"
    words += " --act-tokens 16 --lesson-tokens 8 --max-steps 2 --delta 0"
    result = CliRunner().invoke(cli.app, ["stream", "--runs", str(tmp_path), *words.split()])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "stream/memrl.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 0, 1, 1] and not any(row["error"] for row in rows)
    assert all(row["shown"] for row in rows[2:]) and rows[0]["read_tokens"] > 0
    shown = CliRunner().invoke(cli.app, ["bank", "show", str(tmp_path / "stream" / "memrl.db")])
    assert "4 of 4 entries" in shown.output
