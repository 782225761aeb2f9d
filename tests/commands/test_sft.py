"""Warm starts: what is demonstrated, the update, runs."""

import csv
import gzip
import json
import random
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import obvious_logprobs, random_policy
from safetensors.torch import load_file
from typer.testing import CliRunner

from agents import find
from cli import app
from commands import train
from commands.sft import SFT, chosen_turns, deal, demonstration, kind_of, token_weights
from config.errors import UserError
from config.options import GRPOConfig, RunConfig, SFTConfig
from data import Pool, Task, stands_in
from embedded import tiny
from engines.hf import TransformersEngine
from memagent import NO_MEMORY
from models.load import load_model
from models.logprobs import Row, mask_head
from suites._training import parts_of
from tasks import worlds
from tokens.trie import build_trie

AGENT = tiny.agent()


def shown(codec, task, agent=AGENT, mistake=""):
    return demonstration(agent.on(codec), task, mistake)


def kinds(trajectory):
    return [kind_of(turn.prompt, turn.response) for turn in trajectory.turns]


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("kind", ["one_fact", "two_hop"])
@pytest.mark.parametrize("empty", ["placeholder", "keep"])
def test_a_demonstration_notes_the_evidence_where_it_stands_and_answers(codec, kind, empty):
    agent = tiny.agent(empty=empty)
    for task in worlds.make_tasks(0, 20, 6, kind):
        trajectory = shown(codec, task, agent)
        assert agent.reward(trajectory) == 1
        seen, changes = [], 0
        for turn, following in pairwise(trajectory.turns):
            new = [w for w, p in task.notes if stands_in(w, p, turn.prompt.section)]
            changes += not {*new} <= {*seen}
            seen += [words for words in new if words not in seen]
            # what the next prompt shows is what has been read so far, and nothing else
            expected = [words for words, _ in task.notes if words in seen]
            assert following.prompt.memory.strip() == (" ".join(expected) or NO_MEMORY)
        assert kinds(trajectory).count("changed") == changes > 0
        assert kinds(trajectory)[-1] == "answer" and all(t.trained for t in trajectory.turns)


def test_a_mistake_is_not_learnt_and_is_corrected(codec):
    corrected = 0
    for task in worlds.make_tasks(0, 30, 6, "one_fact"):
        trajectory = shown(codec, task, mistake="Otto reached Oslo.")
        if kinds(shown(codec, task))[0] == "changed":  # evidence in the first section: no mistake
            assert all(turn.trained for turn in trajectory.turns)
            continue
        first, second = trajectory.turns[:2]
        assert not first.trained and second.prompt.memory.strip() == "Otto reached Oslo."
        assert AGENT.reward(trajectory) == 1 and "Otto" not in trajectory.turns[-1].prompt.memory
        corrected += 1
    assert corrected > 15


def passages(texts, titles=(), gold=(0,), answer="Lima", order=None):
    pool = Pool([*titles] or [f"T{k}" for k in range(len(texts))], texts)
    order = range(len(texts)) if order is None else order
    return Task("t", "Where?", (answer,), pool=pool, order=order, gold=gold)


def test_notes_are_the_answer_or_the_name_that_leads_to_it():
    task = passages(
        ["The Ode was written by Nora Berg.", "Nora Berg died in Lima.", "Lima is large."],
        ["The Ode", "Nora Berg", "Lima"],
        gold=(0, 1),
    )
    assert [words for words, _ in task.notes] == ["Nora Berg", "Lima"]
    # nothing to copy: yes and no, or evidence that is not known
    for text, answer in (
        ("It is so: yes. No, he said.", "yes"), ("It is so: yes. No, he said.", "No"),
        ("Eve is known in Lima.", "no"), ("Eve is known in Lima.", "now"),  # whole words
    ):  # fmt: skip
        assert passages([text], answer=answer).notes == ()
    assert replace(task, gold=()).notes == ()


PASSAGE, SHORT = "In 1922 the bridge of Lima was opened by Nora Berg.", "Nora Berg died in Lima."


@pytest.mark.parametrize(("words", "passage", "section", "there"), [
    ("1922", PASSAGE, f"Document 2:\n{PASSAGE}", True),
    ("1922", PASSAGE, "In 1922 the bridge of Lima was", True),  # the section ends here
    ("Nora Berg", PASSAGE, "of Lima was opened by Nora Berg.", True),  # or begins
    ("1922", PASSAGE, "Born in 1922, she wrote.", False),
    ("1922", PASSAGE, "In 1922 she wrote.", False),  # too little of the passage
    ("1922", PASSAGE, "the bridge of Lima was opened by Nora Berg.", False),
    # no words of it have 20 characters on a side: all of it
    ("Lima", SHORT, f"She wrote. {SHORT} Otto", True),
    ("Lima", SHORT, "A man was born in Lima.", False),
    ("Nora Berg", SHORT, "Nora Berg was a singer.", False),
])  # fmt: skip
def test_words_count_only_where_the_passage_has_them(words, passage, section, there):
    assert stands_in(words, passage, section) is there


def test_a_task_that_cannot_be_demonstrated_has_no_demonstration(codec):
    task = next(iter(worlds.make_tasks(0, 1, 2, "one_fact")))
    assert shown(codec, replace(task, gold=())) is None
    assert shown(codec, task, tiny.agent(memory_tokens=2)) is None  # longer than a turn may be
    assert shown(codec, task, tiny.agent(chunk_tokens=3)) is None  # no section has all of it
    assert shown(codec, task, tiny.agent("rememr1")) is None  # shows no update


def test_turns_that_keep_the_memory_are_thinned_out(codec):
    trajectory = shown(codec, worlds.make_task("a", 12, "one_fact"))
    for others in (0, 3, 100):
        turns = chosen_turns(trajectory, others, random.Random(0))
        of = [kind_of(turn.prompt, turn.response) for turn in turns]
        assert of.count("changed") == 1 and of.count("answer") == 1
        assert of.count("kept") == min(others, kinds(trajectory).count("kept"))
        places = [next(k for k, t in enumerate(trajectory.turns) if t is turn) for turn in turns]
        assert places == sorted(places)


# ---------------------------------------------------------------- the update


def module_of(codec, agent=AGENT, tasks=None, **config):
    """Return a training of demonstrations on a random policy."""
    model = random_policy(codec)
    return SFT(model, TransformersEngine(model, codec), agent, tasks, SFTConfig(**config))


def test_the_gradient_is_that_of_the_weighted_log_likelihood(codec, monkeypatch):
    module = module_of(codec, steps=1, tasks_per_step=(4,), others=2, lr=0.0, grad_clip=1e9)
    turns = [
        turn
        for task in worlds.make_tasks(0, 4, 4, "one_fact")
        for turn in chosen_turns(shown(codec, task), 2, random.Random(task.id))
    ]
    rows = [Row(turn.prompt_ids, turn.response_ids, turn.logprobs, 1.0) for turn in turns]
    monkeypatch.setattr(module, "manual_backward", lambda loss: loss.backward())
    monkeypatch.setattr(module, "clip_and_step", lambda: 0.0)
    of = [kind_of(turn.prompt, turn.response) for turn in turns]
    module.update(rows, of)
    ours = {name: p.grad.clone() for name, p in module.model.named_parameters()}
    module.model.zero_grad()
    loss, first = 0.0, {kind: [] for kind in of}
    for row, kind, weights in zip(rows, of, token_weights(rows, 6.0), strict=True):
        logp = obvious_logprobs(module.model, row)
        loss = loss - torch.tensor(weights) @ logp
        first[kind].append(logp[0].exp().item())
    loss.backward()
    assert module.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for kind, sure in first.items():
        assert module.metrics[f"first_{kind}"] == pytest.approx(sum(sure) / len(sure), rel=1e-4)
    for name, p in module.model.named_parameters():
        assert torch.allclose(ours[name], p.grad, atol=1e-6), name


# ---------------------------------------------------------------- runs


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def weak(codec, tmp_path_factory):
    """A model folder with the embedded policy's architecture and random weights."""
    path = tmp_path_factory.mktemp("weak")
    random_policy(codec).save_pretrained(path)
    codec.tokenizer.save_pretrained(path)
    return path


def settings(runs, model, **fields):
    return RunConfig(
        runs=str(runs), model=str(model), kinds=("one_fact",), lengths=(3,), device="cpu",
        save_every=2, **fields,
    )  # fmt: skip


LORA = SFTConfig(steps=2, tasks_per_step=(4,), lr=3e-2, warmup=1, lora_rank=4, decay_from=1.0)


@pytest.fixture(scope="module")
def warm(weak, tmp_path_factory):
    return train.train(settings(tmp_path_factory.mktemp("runs"), weak, name="warm"), LORA, AGENT)


def test_a_warm_start_lowers_the_loss_resumes_and_exports(tmp_path, weak, warm, codec):
    losses = [float(row["loss"]) for row in rows_of(warm)]
    assert losses[-1] < losses[0]
    assert {"first_changed", "first_kept", "first_answer"} <= rows_of(warm)[0].keys()
    assert find.begun(warm)["sft"]["steps"] == 2
    with gzip.open(warm / "trajectories.jsonl.gz", "rt") as file:  # what was shown is right
        assert {json.loads(line)["reward"] for line in file} == {1.0}
    part = settings(tmp_path, weak, name="part")
    train.train(part, replace(LORA, steps=1), AGENT)
    folders = train.train(part, LORA, AGENT, resume=True), warm
    ours, theirs = (load_file(f / "adapter" / "adapter_model.safetensors") for f in folders)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    # the export is base and adapters together
    ids = torch.tensor([codec.encode("Anna joined Boris.")])
    exported, base = (load_model(folder, device="cpu") for folder in (warm / "model", weak))
    assert not torch.allclose(exported(ids).logits, base(ids).logits, atol=1e-3)


def test_reinforcement_learning_goes_on_from_the_adapters(tmp_path, weak, warm, codec):
    run = settings(tmp_path, weak, name="rl", adapter=str(warm / "adapter"))
    grpo = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=2, kl=0.1, lora_rank=4)
    module = train.build(run, grpo, AGENT)
    ids = torch.tensor([codec.encode("Anna joined Boris. Where is Anna?")])
    exported = load_model(warm / "model", device="cpu")
    mask_head(exported, codec)  # a training's policy says nothing that has no text
    exported = exported(ids).logits
    assert torch.allclose(module.model(ids).logits, exported, atol=1e-4)
    assert torch.allclose(module.reference[0](ids).logits, exported, atol=1e-4)
    with module.model.disable_adapter():
        assert not torch.allclose(module.model(ids).logits, exported, atol=1e-3)
    # the rank follows from the adapters, and another one is refused
    assert train.build(run, replace(grpo, lora_rank=0), AGENT).config.lora_rank == 4
    other = tmp_path / "other"
    random_policy(codec, hidden_size=64).save_pretrained(other)
    codec.tokenizer.save_pretrained(other)
    for wrong, rank in (({}, 8), ({"adapter": str(weak)}, 4), ({"model": str(other)}, 4)):
        with pytest.raises(UserError):
            train.build(replace(run, **wrong), replace(grpo, lora_rank=rank), AGENT)


def test_a_warm_start_is_not_resumed_by_train(warm):
    words = f"train --runs {warm.parent} --name warm --resume --steps 3".split()
    assert CliRunner().invoke(app, words).exit_code == 2


@pytest.mark.parametrize("more", [
    ("--agent", "rememr1"),  # shows nothing
    ("--also", "full=2"), ("--mistakes", "2"),
])  # fmt: skip
def test_a_mistake_leaves_no_folder(tmp_path, weak, more):
    usual = f"sft --model {weak} --steps 1 --tasks-per-step 2 --runs {tmp_path} --name b".split()
    done = CliRunner().invoke(app, [*usual, *more])
    assert done.exit_code == 2 and not (tmp_path / "b").exists(), done.output


@pytest.mark.parametrize("end", [1, None])
def test_a_model_that_names_its_end_in_its_config_alone_learns_that_one(tmp_path, weak, end):
    """A base model with no chat template, and with no eos_token in its tokenizer."""
    base = shutil.copytree(weak, tmp_path / "base")
    (base / "chat_template.jinja").unlink(missing_ok=True)
    for path in base.glob("*config.json"):
        kept = json.loads(path.read_text())
        for key in ("eos_token", "eos_token_id", "chat_template"):
            kept.pop(key, None)
        more = {"eos_token_id": end} if end and path.name == "config.json" else {}
        path.write_text(json.dumps(kept | more))
    run = settings(tmp_path, base, name="a")
    if end is None:
        for config in (SFTConfig(), GRPOConfig()):
            with pytest.raises(UserError, match="eos_token_id"):
                train.train(run, config, AGENT)
        assert not (tmp_path / "a").exists()
        return
    agent, task = train.build(run, SFTConfig(), AGENT).agent, worlds.make_task("a", 2, "one_fact")
    assert all(turn.response_ids[-1] == end for turn in demonstration(agent, task).turns)


@pytest.mark.parametrize("text, parts", [
    ("a=3,b.json", [("a", 3.0), ("b.json", 1.0)]), ("x=2", [("x=2", 1)]), ("a=0,b=1", None),
])  # fmt: skip
def test_parts_of_a_mixture(text, parts):
    if parts:
        assert parts_of(text) == parts
    else:
        with pytest.raises(UserError):
            parts_of(text)


def test_rows_are_dealt_by_their_tokens_and_neighbours_stay_together():
    sections = [[k] * 50 for k in range(4)]
    rows = [Row(sections[k % 4] + [9, k], [k], [0.0]) for k in range(40)]  # 10 of each section
    rows += [rows[39], Row([0] * 300, [1], [0.0])]
    parts = deal(rows, 2)
    assert sorted(i for part in parts for i in part) == list(range(42))
    tokens = [len(build_trie([rows[i].prompt_ids + rows[i].response_ids for i in part]))
              for part in parts]  # fmt: skip
    assert max(tokens) < 0.75 * sum(tokens)
    whole = len(build_trie([row.prompt_ids + row.response_ids for row in rows]))
    assert sum(tokens) <= whole + 50  # one section at most is in both
    assert deal(rows[:1], 3) == [[], [0], []]
    assert deal([rows[0]] * 2, 2) == [[], [0, 1]]  # the same row is computed once


class Dull:
    """Tasks of which a step's can be demonstrated in every fourth place only."""

    levels = 2

    def __init__(self, never=False):
        self.never = never

    def batch(self, step, level, n):
        tasks = worlds.make_tasks(step % 1000, n, 2 + level, "one_fact")
        dull = self.never or (step < 10**6 and step % 4)
        return [replace(task, gold=()) if dull else task for task in tasks]


def test_a_step_that_cannot_be_demonstrated_takes_other_tasks(codec):
    module = module_of(codec, tasks=Dull(), tasks_per_step=(2, 3, 4), mistakes=0.0)
    levels, drawn = set(), {}
    for step in range(20):
        level, tasks, (groups, rows, kinds) = module.draw(step)
        assert drawn.setdefault((level, tasks[0].id), step) == step  # no other step trains on them
        assert len(groups) == len(tasks) == level + 2 and len(rows) == len(kinds) > 0
        assert all(len(group.trajectories[0].turns) > level for group in groups)
        assert module.draw(step)[1] == tasks  # so that a resumed run draws the same
        levels.add(level)
    assert levels == {0, 1, 2}  # all lengths
    module.tasks = Dull(never=True)
    with pytest.raises(UserError):
        module.training_step(0, 0)


def test_a_mistake_does_not_hold_what_is_to_be_noted(codec):
    agent = tiny.agent(chunk_tokens=80, memory_tokens=32, final_tokens=40)
    module = module_of(codec, agent, mistakes=1.0)
    for wrong, mistaken in (("New York", False), ("Oslo", True), ("Yorkshire", True)):
        pool = Pool(["a", "b"], ["Nothing is here. " * 6, "Anna was born in York, far."])
        task = Task("t", "Where?", ("York",), pool=pool, order=(0, 1), gold=(1,))
        other = replace(task, answers=(wrong,))
        trajectory = module.demonstrate(task, other, random.Random(0))
        assert trajectory is not None
        assert any(not turn.trained for turn in trajectory.turns) is mistaken, wrong


def test_several_agents_share_the_tasks(codec):
    module = module_of(codec, also=("full=0.25",), mistakes=0.0)
    whole = sum(
        len(module.demonstrate(task, task, random.Random(k)).turns) == 1
        for k, task in enumerate(worlds.make_tasks(0, 200, 2, "one_fact"))
    )
    assert 30 < whole < 72
    for wrong in (("full=0.6", "none=0.5"), ("full=2",), ("full=x",), ("nobody",)):
        with pytest.raises(UserError):
            module_of(codec, also=wrong)


def test_weights_sum_to_one_and_first_tokens_weigh_more():
    rows = [Row([1], [2, 3, 4], [0.0] * 3), Row([1], [5], [0.0])]
    weights = token_weights(rows, 6.0)
    assert weights == [[6 / 14, 1 / 14, 1 / 14], [6 / 14]] and sum(map(sum, weights)) == 1
