"""One step of GRPO on conversations, from the file to the journal, with a tiny random policy.

Its tokenizer reads any text, byte by byte, and has some whole calls as single tokens, so that a
policy that knows nothing calls tools all the same.
"""

import csv
import gzip
import json
import math

import pytest
from conftest import random_policy
from test_locomo import question, sample, write
from test_memupdate import by_bytes, call, create, delete
from test_store import read_store
from typer.testing import CliRunner

import cli
from agents import memupdate
from tokens.codec import Codec

PARTS = {"delta", "format", "size", "compression"}  # of a reward


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Leave the page out: its plots take longer than the step."""
    monkeypatch.setattr("report.page.write_report", lambda *_, **__: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random policy, a chat template with roles and tools, and Hermes calls."""
    tokenizer = by_bytes()
    creates = [create(f"Fact {k}.") for k in range(40)]
    deletes = [delete(f"m{k}") for k in range(1, 9)]
    tokenizer.add_tokens([*creates, *deletes, call("search_memory", query="pears")])
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
        '{# <tool_call>{"name": "n", "arguments": {}}</tool_call> #}'
    )
    folder = tmp_path_factory.mktemp("model")
    random_policy(Codec(tokenizer), window=16384).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def step(model, source, tmp_path, *more):
    """Do one step of `train`; return its metrics and recorded trajectories."""
    small = (
        "--agent memupdate --steps 1 --tasks-per-step 1 --group-size 4 --lengths 1 --kl 0 "
        "--keep-checkpoints 0 --device cpu --max-turns 2 --call-tokens 12 --final-tokens 4 "
        "--chunk-tokens 4096 --name a"
    )
    words = ["train", "--model", str(model), "--data", source, "--runs", str(tmp_path)]
    done = CliRunner().invoke(cli.app, [*words, *small.split(), *more])
    assert done.exit_code == 0, done.output
    with (tmp_path / "a" / "metrics.csv").open(newline="") as file:
        (metrics,) = csv.DictReader(file)
    with gzip.open(tmp_path / "a" / "trajectories.jsonl.gz", "rt") as file:
        return metrics, [json.loads(line) for line in file]


def made(tmp_path):
    """Write conversations of LoCoMo's form, of which conv-26 trains."""
    samples = [sample("conv-26"), sample("conv-30")]
    for each in samples:
        each["qa"] = [
            question(k % 4 + 1, answer="pears", evidence=[f"D{k // 4 + 1}:1"]) for k in range(8)
        ]
    return f"locomo:{write(tmp_path / 'made.json', samples)}#memory-r1"


def own(tmp_path):
    """Write conversations of one's own: no times, and memories that name their session."""
    talks = [
        {"id": name, "sessions": [{"date": "2024-01-03", "turns": [{"text": "It rained."}]}],
         "memories": [{"text": "It rained on pears.", "evidence": ["D1:1"]}],
         "qa": [{"question": "What of pears?", "answer": "rained", "evidence": ["D1:1"]}]}
        for name in "ab"
    ]  # fmt: skip
    (path := tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    return f"own:{path}"


BUILD = "--memory-budget 2"


@pytest.mark.parametrize(("source", "rule", "how", "start"), [
    (made, "/train/observations", BUILD, 0),
    # over a store of what was said
    (made, "/train/observations", "--mode refine --budget none --seed 9", 2),
    (own, "", BUILD, 0),
])  # fmt: skip
def test_a_step_gives_finite_parts_of_rewards_and_journals_that_give_the_store_again(
    model, tmp_path, source, rule, how, start
):
    metrics, records = step(model, source(tmp_path) + rule, tmp_path, *how.split())
    assert math.isfinite(float(metrics["loss"])) and float(metrics["grad_norm"]) > 0
    assert float(metrics["failed"]) == 0 and int(metrics["trained_rows"]) > 0
    assert len(records) == 4 and len({record["reward"] for record in records}) > 1
    for record in records:
        edits = [turn["notes"] for turn in record["turns"] if turn["notes"]["phase"] == "edit"]
        parts = edits[-1]["parts"]
        assert all(map(math.isfinite, parts.values())) and parts["reward"] == record["reward"]
        assert parts["reward"] == pytest.approx(sum(parts[name] for name in PARTS))
        done = [op for notes in edits for op in notes["ops"]]
        store = read_store(edits[-1]["store"])
        assert [(op.tool, op.ok) for op in store.journal] == [(op["tool"], op["ok"]) for op in done]
        assert json.loads(edits[-1]["store"][0])["entries"] == start
        assert len(store.snapshot()) == edits[-1]["entries"]
    assert any(op["ok"] for record in records for turn in record["turns"]
               for op in turn["notes"]["ops"])  # fmt: skip


def test_a_part_validates_a_training_on_another(model, tmp_path, monkeypatch):
    """The score is the mean reward of greedy episodes, each of which reads a whole conversation."""
    seen, reward = [], memupdate.MemUpdate.reward

    def noted(self, trajectory, outcome="exact"):
        worth = reward(self, trajectory, outcome)
        seen.append((trajectory, worth))
        return worth

    monkeypatch.setattr(memupdate.MemUpdate, "reward", noted)
    source = made(tmp_path)
    (tmp_path / "six.yaml").write_text("run: {validation_n: 6}\n")
    more = f"--validation {source}/validation --keep-checkpoints 1 --config {tmp_path}/six.yaml"
    step(model, f"{source}/train", tmp_path, *BUILD.split(), *more.split())
    asked = [(t, worth) for t, worth in seen if t.task.id == "conv-30"]
    assert asked and all(len(t.task.sessions) == 3 and len(t.task.probes) == 6 for t, _ in asked)
    turns = asked[-1][0].turns
    assert {t.notes.session for t in turns if t.notes.phase == "edit"} == {1, 2, 10}
    rows = list(csv.DictReader((tmp_path / "a" / "validation.csv").open(newline="")))
    assert float(rows[-1]["score"]) == pytest.approx(asked[-1][1]) and int(rows[-1]["n"]) == 1
