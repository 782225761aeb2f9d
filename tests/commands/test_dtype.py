"""What `--dtype auto` takes, why, where that is said, and that what goes on keeps it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import random_policy, streamed

import eval
from commands import stream, train
from config.errors import UserError
from config.options import EMBEDDED, EvalConfig, GRPOConfig, RunConfig, StreamConfig
from embedded import tiny
from memagent import ask
from models import dtypes
from models.dtypes import auto_dtype, choose_by_time
from report.machine import AUTO, NAME

FAST, SLOW = (2.0, 1.0), (1.0, 1.9)  # seconds in float32, and in bfloat16
AGENT = tiny.agent(memory_tokens=6, final_tokens=6)


@pytest.fixture(autouse=True)
def processor(monkeypatch, tmp_path, codec):
    """One with instructions for bfloat16, and a model `m` that is stored in it. Gives a function
    that says how long products take."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dtypes, "bfloat16_instructions", lambda: ["avx512_bf16"])
    monkeypatch.setattr(dtypes, "taken", {})
    monkeypatch.setattr("report.machine.taken", dtypes.taken)
    random_policy(codec).to(torch.bfloat16).save_pretrained("m")
    codec.tokenizer.save_pretrained("m")
    return lambda times: monkeypatch.setattr(dtypes, "product_seconds", lambda *_: times)


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize(("float32_s", "bfloat16_s", "dtype"), [
    (2.0, 1.0, "bfloat16"), (1.3, 1.0, "bfloat16"), (1.29, 1.0, "float32"),
    (1.0, 1.0, "float32"), (1.0, 1.9, "float32"),
])  # fmt: skip
def test_bfloat16_is_taken_where_it_is_a_third_faster(float32_s, bfloat16_s, dtype):
    found, why = choose_by_time(float32_s, bfloat16_s)
    assert found == dtype and f"{float32_s / bfloat16_s:.1f} times" in why


@pytest.mark.parametrize(("config", "sizes"), [
    ({"hidden_size": 576, "intermediate_size": 1536}, (576, 1536)),
    ({"hidden_size": 5120, "intermediate_size": 13824}, (1024, 2048)),
    ({"text_config": {"hidden_size": 64, "intermediate_size": 96}}, (64, 96)),
    ({"hidden_size": -1, "intermediate_size": "many"}, (1024, 2048)),
    ({}, (1024, 2048)),
])  # fmt: skip
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_products_of_the_models_own_sizes_are_timed_where_that_decides(
    monkeypatch, config, sizes, key
):
    timed = []
    monkeypatch.setattr(dtypes, "product_seconds", lambda *sizes: timed.append(sizes) or FAST)
    Path("config.json").write_text(json.dumps(config | {key: "bfloat16"}))
    assert auto_dtype(".", "cpu") == "bfloat16" and timed == [sizes]
    assert auto_dtype(".", "cpu", GRPOConfig(lora_rank=4)) == "bfloat16" and len(timed) == 2


@pytest.mark.parametrize(("model", "device", "training", "instructions", "dtype"), [
    ("m", "cpu", GRPOConfig(), True, "float32"),  # all weights are trained
    ("m", "cuda", None, True, "bfloat16"), ("m", "mps", None, True, "float32"),
    ("m", "cuda", GRPOConfig(), True, "mixed"),
    ("org/name", "cpu", None, True, "float32"),  # on the hub: nothing is fetched to see
    (EMBEDDED, "cpu", None, True, "float32"), ("m", "cpu", None, False, "float32"),
    ("smollm2", "cpu", None, False, "float32"),
])  # fmt: skip
def test_all_else_hangs_on_no_clock(monkeypatch, model, device, training, instructions, dtype):
    found = ["amx_bf16"] * instructions
    monkeypatch.setattr(dtypes, "bfloat16_instructions", lambda: found)
    monkeypatch.setattr(dtypes, "product_seconds", lambda *_: pytest.fail("it is timed"))
    assert auto_dtype(model, device, *filter(None, [training])) == dtype


def test_the_shortest_of_several_times_counts(monkeypatch, no_clock_chooses_a_dtype):
    measure = no_clock_chooses_a_dtype.__wrapped__.__wrapped__  # neither locked nor remembered
    assert all(seconds > 0 for seconds in measure(16, 32))
    times = iter([[9, 4, 5], [8, 6, 7]])
    monkeypatch.setattr(dtypes.timeit, "repeat", lambda *_, **__: next(times))
    assert measure(16, 32) == (4, 6)


# ---------------------------------------------------------------- where it stands


def stored(folder: Path, section: str) -> str:
    return yaml.safe_load((folder / "config.yaml").read_text())[section]["dtype"]


def edit(folder: Path, section: str, dtype: str) -> None:
    """Let config.yaml say another dtype: `auto` as an earlier version did."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings[section]["dtype"] = dtype
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))


def evaluated(length: int, **more) -> Path:
    config = dict(model="m", agents=("none",), lengths=(length,), n=1, temperatures=(0.0,))
    return eval.run_suite(EvalConfig(**config, device="cpu", **more), {"none": tiny.agent("none")})


@pytest.mark.parametrize(("first", "then", "dtype", "other"), [
    (FAST, SLOW, "bfloat16", "float32"), (SLOW, FAST, "float32", "bfloat16"),
])  # fmt: skip
def test_an_evaluation_that_goes_on_keeps_the_dtype(processor, first, then, dtype, other):
    processor(first)
    folder = evaluated(1)
    why = json.loads((folder / NAME).read_text())[AUTO]
    assert why.startswith(f"m in {dtype}, ")
    dtypes.taken.clear()  # as another process begins
    processor(then)
    assert evaluated(2) == folder and stored(folder, "eval") == dtype
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert {row["length"]: row["dtype"] for row in rows} == {1: dtype, 2: dtype}
    assert json.loads((folder / NAME).read_text())[AUTO] == why
    with pytest.raises(UserError, match="dtype"):
        evaluated(4, dtype=other)
    # what an earlier version has begun: the fingerprint of the weights knows
    edit(folder, "eval", "auto")
    with pytest.raises(UserError, match="changed since"):
        evaluated(4)
    evaluated(4, dtype=dtype)
    assert stored(folder, "eval") == dtype


def trained(steps: int, name: str = "a", resume: bool = False, **more) -> Path:
    run = RunConfig(name=name, model="m", lengths=(1,), device="cpu", save_every=1, **more)
    config = GRPOConfig(lora_rank=2, steps=steps, tasks_per_step=(1,), group_size=2)
    return train.train(run, config, AGENT, resume, reward=lambda trajectory: trajectory.sample)


def test_a_training_that_goes_on_keeps_the_dtype(processor):
    processor(FAST)
    folder = trained(1)
    assert stored(folder, "run") == "bfloat16"
    processor(SLOW)
    trained(2, resume=True)
    assert stored(folder, "run") == "bfloat16"
    edit(folder, "run", "auto")  # its checkpoints know
    with pytest.raises(UserError, match=r"run\.dtype 'bfloat16', not 'float32'"):
        trained(3, resume=True, dtype="float32")
    trained(3, resume=True)
    state = json.loads((folder / "checkpoints/step-3/state.json").read_text())
    assert stored(folder, "run") == state["dtype"] == "bfloat16"


def test_rank_0_decides_for_all(processor, monkeypatch):
    processor(SLOW)
    gather = train.ranks.all_gather_object

    def by_first(value):
        return ["bfloat16", value] if value == "float32" else gather(value)

    monkeypatch.setattr(train.ranks, "all_gather_object", by_first)
    folder = trained(1)
    state = json.loads((folder / "checkpoints/step-1/state.json").read_text())
    assert stored(folder, "run") == state["dtype"] == "bfloat16"


def test_a_stream_that_goes_on_keeps_the_dtype(processor):
    how = dict(suite="bandit", model="m", engine="transformers", n=1, arms=("none",), device="cpu")
    processor(FAST)
    brief = {"act_tokens": 4, "max_steps": 1}
    folder = streamed(brief, name="s", epochs=1, **how)
    processor(SLOW)
    assert (
        streamed(brief, name="s", epochs=2, **how) == folder
        and stored(folder, "stream") == "bfloat16"
    )
    rows = [json.loads(line) for line in (folder / "none.jsonl").read_text().splitlines()]
    assert [row["dtype"] for row in rows] == ["bfloat16"] * 2
    config = StreamConfig(name="s", **{k: v for k, v in how.items() if k != "suite"})
    for before, now in (("auto", "auto"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        assert stream._complete(config, {}, {"stream": {"dtype": before}}).dtype == now
    assert stream._complete(config, {}, {}).dtype == "float32"  # a new one, which is SLOW
    rehearsed = replace(config, engine="rehearsed", model="")
    assert stream._complete(rehearsed, {}, {}).dtype == "auto"


def test_a_reading_says_its_dtype(processor):
    processor(FAST)
    Path("a.txt").write_text("Anna toured Oslo.")
    ask("a.txt", "Where is Anna?", model="m", agent="none", name="r", runs="runs")
    assert stored(Path("runs/r"), "ask") == "bfloat16"
