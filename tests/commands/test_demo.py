"""The demos: what is trained and asked, whose folder is replaced, how processes end."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import HANG_S, Inline, cell_of, parts_of

from agents import find
from bench.common import ROOT
from commands import demo
from config.errors import UserError
from memagent import ReadConfig

FEW = ({2: 2, 4: 2}, {2: 2, 4: 1})


@pytest.fixture(autouse=True)
def inline(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one rank: no processes for the training either


def test_the_usual_demo_replaces_an_earlier_one_and_asks_all_policies(monkeypatch):
    monkeypatch.setitem(demo.STEPS, "short", 1)
    monkeypatch.setitem(demo.AMOUNTS, "short", dict.fromkeys(demo.AMOUNTS["short"], FEW))
    folder = Path("runs/d")
    (folder / "old").mkdir(parents=True)
    (folder / demo.MARK).touch()
    demo.run_demo("short", 0, "d", "runs")
    assert not (folder / "old").exists() and not (folder / "rows").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["training_seconds"] < summary["seconds"]
    for agent in ("trained", "untrained", "full"):
        for question in ("one_fact", "two_hop"):
            for temperature, length, n in (("1.0", 4, 2), ("0.0", 2, 2), ("0.0", 4, 1)):
                assert cell_of(summary, agent, question, temperature, length)["n"] == n
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 2 * 7
    assert all((folder / name).stat().st_size for name in ("report.html", "transcripts.jsonl"))


def test_a_run_is_no_demo_and_is_never_replaced():
    Path("runs/other").mkdir(parents=True)
    Path("runs/other/config.yaml").touch()
    with pytest.raises(UserError):
        demo.run_demo("short", 0, "other", "runs")
    assert Path("runs/other/config.yaml").exists()


def test_looking_back_is_compared_with_not_looking_back(monkeypatch):
    for training in find.find("rememr1").extras["demo"].sizes["short"].training.values():
        monkeypatch.setitem(training, "steps", 1)
    folder = demo.run_demo("short", 0, "back", "runs", "rememr1")
    summary = json.loads((folder / "summary.json").read_text())
    untrained, off = ["untrained rememr1", "untrained memagent"], "rememr1, not looking back"
    assert parts_of(summary, "agent")[:2] == ["rememr1", "memagent"]
    assert {*parts_of(summary, "agent")} == {"rememr1", "memagent", *untrained, "full", off}
    assert parts_of(summary, "n") == parts_of(summary, "length") == [4]
    assert cell_of(summary, off, "two_hop_reverse", "1.0", 4)["rates"]["recall_queries"] == 0
    for name in ("rememr1-0", "memagent-0"):
        assert (folder / name / "model" / "model.safetensors").exists()
    pairs = {(pair["a"], pair["b"]) for pair in summary["paired"]}
    assert ("rememr1", "memagent") in pairs


def test_a_demo_of_its_own_trains_all_arms_alike_with_every_seed(tmp_path):
    about = find.find("rememr1").extras["demo"]
    plan = demo.compared("rememr1", about, "default", 3, tmp_path)
    assert [(t.run.agent, t.grpo.seed) for t in plan.trainings] == [
        (arm, seed) for seed in (3, 4, 5) for arm in ("rememr1", "memagent")
    ]

    def shared(training):
        alike = ("steps", "tasks_per_step", "group_size", "lr")
        settings = [training.settings[field.name] for field in fields(ReadConfig)]
        return [getattr(training.grpo, name) for name in alike], settings

    own = [q for q in plan.questions if q.label in ("rememr1", "memagent")]
    asked = {
        training.run.name: [(q.label, q.trained, q.sections, q.asks, q.kinds, q.seed) for q in own
                            if Path(q.model).parent.name == training.run.name]
        for training in plan.trainings
    }  # fmt: skip
    for training in plan.trainings:
        assert shared(training) == shared(plan.trainings[0])
        agent, seed = training.run.agent, training.grpo.seed
        first = [(agent, seed, *rest) for _, _, *rest in asked["rememr1-3"]]
        assert asked[training.run.name] == first and first
    others = {q.label: q.settings["callback"] for q in plan.questions if "callback" in q.settings}
    assert others["rememr1, not looking back"] == "off"


def test_the_demo_of_memrl_is_a_stream_of_every_arm():
    folder = demo.run_demo("short", 0, "m", "runs", "memrl")
    assert {p.stem for p in folder.glob("*.jsonl")} == {*find.find("memrl").extras["arms"]}


SCRIPT = """
import multiprocessing, time
from pathlib import Path

from commands import demo


class Part:
    def __init__(self, fails):
        self.fails = fails

    def __call__(self):
        from tqdm.auto import tqdm

        tqdm.get_lock()  # shared by processes: one that is killed would leave it behind
        if not self.fails:
            Path("at-work").touch()
        while not self.fails or not Path("at-work").exists():
            time.sleep(0.01)
        raise KeyError("a part has failed")

if __name__ == "__main__":
    demo.os.cpu_count = lambda: 2
    try:
        demo._in_processes([Part(fails=False), Part(fails=True)], "parts")
    except KeyError:
        print(len(multiprocessing.active_children()))
"""


def test_processes_end_when_a_part_fails_and_leave_nothing_behind(tmp_path):
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.split()[-1] == "0"
    assert done.stderr == ""  # no leaked semaphore is reported
