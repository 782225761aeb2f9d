"""The real vLLM, in process: `make test-vllm` installs it and runs this.

Elsewhere these tests are skipped.
"""

import csv
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import random_policy, until

from agents.find import resolve
from commands.train import train
from config.errors import UserError
from config.options import EMBEDDED, GRPOConfig, RunConfig
from dev import keeper
from embedded import tiny
from engines import endpoint
from engines.hf import TransformersEngine
from memagent import Finish, Prompt
from models.load import inner, load_model, with_lora
from models.logprobs import mask_head
from rollout import Sampling, rollout
from suites import ledger
from tasks import worlds
from tokens.codec import Codec

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from bench import colocated
from engines.vllm_colocated import ColocatedEngine

AGENT = tiny.agent()
SMALL_STEPS = {"steps": 2, "tasks_per_step": (4,), "group_size": 6}
CHANGES = (
    {},
    {"lora_rank": 4},
    {"lora_rank": 4, "quantise": True},
)


def tasks(n, n_sections=3, kind="one_fact"):
    return list(worlds.make_tasks(0, n, n_sections, kind))


def small(codec):
    policy = random_policy(codec, head_dim=32)  # vLLM's attention on a CPU has no smaller heads
    mask_head(policy, codec)  # as a trainer's
    return policy


@torch.no_grad()
def disturb(policy):
    """Move the half of the adapters that begins at 0."""
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            p.add_(0.3 * torch.randn_like(p))


@pytest.fixture(scope="module")
def folder(codec, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    small(codec).save_pretrained(path)
    codec.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def opened(codec, folder):
    """Open engines of the tiny policy, closed at the end of the test."""
    made = []

    def open_one(**settings):
        made.append(ColocatedEngine(folder, codec, window=512, kv_gib=0.03, **settings))
        return made[-1]

    yield open_one
    for engine in made:
        engine.close()


def mismatch(policy, turns, temperature=1.0):
    """The largest distance of log-probs from those of one sequence at a time, with full logits."""
    worst = 0.0
    for turn in turns:
        n, ids = len(turn.prompt_ids), torch.tensor([turn.prompt_ids + turn.response_ids])
        with torch.no_grad():
            logp = (policy(input_ids=ids).logits[0, n - 1 : -1] / temperature).log_softmax(-1)
        obvious = logp.gather(1, ids[0, n:, None])[:, 0]
        worst = max(worst, (obvious - torch.tensor(turn.logprobs)).abs().max().item())
    return worst


def turns_of(engine, n=6, temperature=1.0, seed=0):
    jobs = [(t, g) for t in tasks(n) for g in range(2)]
    done = list(rollout(engine, AGENT, jobs, Sampling(temperature), seed))
    assert len(done) == 2 * n and not any(t.error for t in done)
    return [turn for t in done for turn in t.turns]


def test_packed_weights_give_the_same_and_are_never_replaced(codec, opened):
    """vLLM's copies of the weights do not follow new ones: nothing must bring any."""
    policy = small(codec)
    engine = opened(packed=True)
    with engine.awake():
        turns = turns_of(engine)
    assert mismatch(policy, turns) < 1e-4
    layers = [*engine._engine.apply_model(lambda model: [*map(_product_of, model.modules())])[0]]
    assert any("handler" in names for names in layers)
    with pytest.raises(RuntimeError, match="cannot be replaced"), engine.awake(policy):
        pass


def _product_of(layer) -> tuple[str, ...]:
    """Return the names that the product of one of vLLM's layers refers to."""
    product = getattr(layer, "cpu_linear", None)
    return product.__code__.co_freevars if product else ()


@pytest.mark.parametrize("sleep", ["never", "1", "2"])
def test_after_every_step_and_sleep_it_samples_from_the_trainers_weights(codec, opened, sleep):
    policy = small(codec)
    engine = opened(sleep=sleep)
    for step in range(3):
        with engine.awake(policy):
            turns = turns_of(engine, temperature=1.3, seed=step)
        assert mismatch(policy, turns, 1.3) < 1e-5
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.05 * torch.randn_like(p))
        # the step was large enough for stale weights to show
        assert mismatch(policy, turns, 1.3) > 1e-2
    assert engine.reused_tokens > 0 and engine.prefilled_tokens > 0


def test_prompts_that_do_not_fit_one_batch_have_seeds_of_their_own(codec, opened):
    """On a CPU vLLM cannot go on with a seeded prompt of which a batch held a part."""
    engine, rng = opened(), random.Random(0)
    words = ["Anna", "Boris", "Oslo", "joined", "toured"]
    with engine.awake():
        for seed in range(16):
            text = " ".join(rng.choices(words, k=470))
            engine.add(Prompt(((text, False),), 8, final=True), Sampling(1.0), seed)
        turns = []
        while len(turns) < 16:
            turns += [turn for _, turn in engine.step()]
    assert sum(len(turn.prompt_ids) for turn in turns) > 4096
    assert not any(turn.error for turn in turns) and all(turn.response_ids for turn in turns)


def test_what_vllm_changes_for_the_process_is_restored(opened):
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    engine = opened()
    with engine.awake():
        turns_of(engine)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected
    assert torch.get_num_threads() == threads and torch.set_num_threads is set_threads


def test_the_same_policy_greedily_writes_the_same_as_the_transformers_engine(codec, opened):
    engine = opened()
    with engine.awake():
        theirs = turns_of(engine, temperature=0.0)
    ours = turns_of(TransformersEngine(small(codec), codec), temperature=0.0)
    key = lambda turn: (turn.prompt_ids, turn.response_ids)  # noqa: E731
    assert sorted(map(key, theirs)) == sorted(map(key, ours))


def test_a_turn_that_is_given_up_never_comes_back_and_changes_no_other(codec, opened):
    engine = opened(rows=2)
    prompts = [next(tiny.agent("full").on(codec).run(task)) for task in tasks(6)]
    with engine.awake():
        keys = [engine.add(prompt, Sampling(0.0), 0) for prompt in prompts]
        whole = {}
        while len(whole) < 6:
            whole |= dict(engine.step())
        again = [engine.add(prompt, Sampling(0.0), 0) for prompt in prompts]
        done = dict(engine.step())
        left = [key for key in again if key not in done]
        dropped = left[0], left[-1]  # of two rows one in flight, and one that waits
        for key in (*dropped, 10**6):
            engine.drop(key)
        while len(done) < 4:
            done |= dict(engine.step())
        assert not engine._prompts and engine.step() == []
    assert {*done} == {*again} - {*dropped}
    for key, turn in done.items():
        assert turn.response_ids == whole[keys[again.index(key)]].response_ids
        assert 0 <= turn.reused_tokens <= len(turn.prompt_ids)


def test_an_adapter_is_swapped_in_and_nothing_else_changes(codec, opened):
    policy = with_lora(small(codec), GRPOConfig(lora_rank=4))
    engine = opened(lora_rank=4, sleep="1")
    base = {name: p.clone() for name, p in inner(policy).named_parameters() if "lora" not in name}
    written = []
    for _ in range(3):
        with engine.awake(policy):
            turns = turns_of(engine, seed=0)
        assert mismatch(policy, turns) < 1e-5
        written.append([turn.response_ids for turn in turns])
        disturb(policy)
        assert mismatch(policy, turns) > 1e-2
    assert written[0] != written[1] != written[2]
    parameters = dict(inner(policy).named_parameters())
    assert all(torch.equal(parameters[name], p) for name, p in base.items() if name in parameters)


def test_frozen_prompts_are_answered_by_the_base_weights_under_an_adapter(codec, opened):
    """The same prompts go in with and without the adapter, twice: no cached prefix is shared."""
    policy = with_lora(small(codec), GRPOConfig(lora_rank=4))
    disturb(policy)
    engine = opened(lora_rank=4, sleep="1")
    prompts = [next(AGENT.on(codec).run(task)) for task in tasks(3)]
    trained, frozen = [], []
    with engine.awake(policy):
        for _ in range(2):
            keys = {
                engine.add(replace(prompt, frozen=is_frozen), seed=k): into
                for k, prompt in enumerate(prompts)
                for is_frozen, into in ((False, trained), (True, frozen))
            }
            while keys:
                for key, turn in engine.step():
                    keys.pop(key).append(turn)
    assert len(trained) == len(frozen) == 6 and engine.reused_tokens > 0
    assert mismatch(policy, trained) < 1e-5
    with policy.disable_adapter():
        assert mismatch(policy, frozen) < 1e-5
        assert mismatch(policy, trained) > 1e-2  # the adapter is large enough to show
    assert mismatch(policy, frozen) > 1e-2


def answered(engine, *prompts, temperature=1.0):
    """The turns of some prompts, in this order; their places are their seeds."""
    sampling, turns = Sampling(temperature), {}
    keys = [engine.add(p, sampling.for_prompt(p), seed) for seed, p in enumerate(prompts)]
    while len(turns) < len(keys):
        turns |= engine.step()
    return [turns[key] for key in keys]


# ---------------------------------------------------------------- the agent with a store


def episodes(engine, after_first=lambda: None):
    """Run three greedy episodes of the agent that keeps a store; return them as plain data.

    Each holds what its turns read and wrote and why they ended, the store with its journal, and
    the probes' answers.
    """
    agent = keeper.agent()
    jobs = [(ledger.make_ledger(seed, 6, n_people=4), 0) for seed in (12, 14, 25)]
    done = []
    with engine.awake():
        for trajectory in rollout(engine, agent, jobs, Sampling(0.0)):
            done.append(trajectory)
            if len(done) == 1:
                after_first()
    assert not any(t.error for t in done)
    for trajectory in sorted(done, key=lambda t: t.task.id):
        phases = [turn.notes.phase for turn in trajectory.turns]
        assert phases.count("edit") >= 6 and phases.count("probe") >= 4
        (last,) = (turn.notes for turn in trajectory.turns if turn.notes.store)
        assert sum(op["ok"] for t in trajectory.turns for op in t.notes.ops) >= 2
        yield (
            [(t.prompt_ids, t.response_ids, t.finish, t.prompt.frozen) for t in trajectory.turns],
            last.store,
            last.answers,
        )


@pytest.fixture(scope="module")
def expected():
    """The episodes through our own engine."""
    codec, policy = Codec.load(keeper.WEIGHTS), load_model(keeper.WEIGHTS, "float32", "cpu")
    return [*episodes(TransformersEngine(policy, codec))]


def test_a_store_is_edited_alike_by_the_engine_in_this_process(expected):
    engine = ColocatedEngine(keeper.WEIGHTS, Codec.load(keeper.WEIGHTS), 2048, kv_gib=0.1)
    try:
        assert [*episodes(engine)] == expected
    finally:
        engine.close()


@contextmanager
def vllm_server(log):
    """Serve the policy with a store by `vllm serve`; gives its URL and how to start it anew."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(keeper.WEIGHTS),
        "--served-model-name", "m", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port),
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    running = []

    def start():
        if running:
            os.killpg(running[-1].pid, signal.SIGKILL)  # its group: it has children
            running.pop().wait()
        running.append(subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ))  # fmt: skip

    def answers() -> bool:  # one that is not there yet is refused at once
        assert running[-1].poll() is None, "the server has ended before it answered"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    start()
    try:
        until(answers, 0.5)
        yield f"http://127.0.0.1:{port}/v1", start
    finally:
        os.killpg(running[-1].pid, signal.SIGKILL)
        running[-1].wait()


def test_a_store_is_edited_alike_by_a_server_of_vllm_that_is_killed(
    expected, tmp_path, monkeypatch
):
    """The real server returns the tokens that it read and wrote, and names its own limits."""
    pytest.importorskip("uvicorn", reason="vLLM's server is not installed here: make test-vllm")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with (tmp_path / "vllm.log").open("wb") as log, vllm_server(log) as (url, start_anew):
        engine = endpoint.EndpointEngine(url, "", Codec.load(keeper.WEIGHTS))
        assert engine.model == "m" and engine.window == 2048
        written = [*episodes(engine, start_anew)]
        for _ in range(2):  # read again from its cache
            answered(engine, Prompt((("Anna joined Boris. " * 200, False),), 8))
        long = Prompt((("Anna joined Boris. " * 600, False),), 8)
        (full,) = answered(engine, long)
        engine.window = None  # as with a server that does not report it
        (refused,) = answered(engine, long)
        engine.close()
    assert written == expected
    assert full.finish is refused.finish is Finish.FULL
    assert "maximum context length" in refused.error and engine.reused_tokens > 0


def rows_of(folder):
    with (folder / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_two_ranks_with_an_engine_each_learn_the_same_as_one(tmp_path, lora_rank):
    grpo, agent = resolve("demo", EMBEDDED, SMALL_STEPS | {"lora_rank": lora_rank}, {})
    runs, settings = {}, {"runs": str(tmp_path), "engine": "vllm", "kv_gib": 0.1, "device": "cpu"}
    for n in (1, 2):
        run = RunConfig(name=str(n), devices=n, save_every=1, **settings)
        runs[n] = train(run, grpo, agent)
    for one, two in zip(rows_of(runs[1]), rows_of(runs[2]), strict=True):
        assert one["mismatch_mean"] < 1e-5 and two["mismatch_mean"] < 1e-5
        for key in ("reward", "written_tokens", "trained_rows", "trained_tokens"):
            assert one[key] == two[key]
        assert one["grad_norm"] > 1e-3
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    # one rank reads the shards of two
    more = train(replace(run, devices=1), replace(grpo, steps=3), agent, resume=True)
    assert len(rows_of(more)) == 3 and rows_of(more)[2]["mismatch_mean"] < 1e-5


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_in_bfloat16_sampler_and_trainer_stay_close(tmp_path, change):
    """The bar is .02 on average; here it is .002 to .004.

    Weights that learn do so in float32; those in 4 bits stay as they are.
    """
    grpo, agent = resolve("demo", EMBEDDED, SMALL_STEPS | {"steps": 3} | change, {})
    dtype = "bfloat16" if change else "mixed"
    run = RunConfig(name="a", runs=str(tmp_path), engine="vllm", kv_gib=0.1, dtype=dtype)
    rows = rows_of(train(run, grpo, agent))
    assert all(0 < row["mismatch_mean"] < 0.02 for row in rows)


def test_phases_that_would_hang_or_lie_are_refused(codec, folder, opened):
    with pytest.raises(UserError, match="level 2"):
        opened(lora_rank=4, sleep="2")
    engine = opened(sleep="2")
    with pytest.raises(RuntimeError, match="asleep"):
        engine.add(Prompt((("Anna", False),), 3))
    with pytest.raises(RuntimeError, match="needs the policy"), engine.awake():
        pass
    with pytest.raises(RuntimeError, match="one vLLM engine"):
        opened()
    with engine.awake(small(codec)):
        engine.add(Prompt((("Anna", False),), 300))
        engine.step()
        engine.add(Prompt((("Anna", False),), 3))
    with engine.awake(small(codec)):  # what was in flight is gone, and the cache could be reset
        key = engine.add(Prompt((("Boris", False),), 3))
        while not (done := engine.step()):
            pass
        assert [k for k, _ in done] == [key]
        refused = engine.add(Prompt((("Anna " * 600, False),), 3))
        ((key, turn),) = engine.step()
        assert key == refused and turn.finish is Finish.FULL


def test_the_gpu_benchmark_runs_here_in_small(capfd):
    for number in colocated.level("lora", "1")["rounds"]:
        assert number["mean"] < 1e-5 and number["stale"] > 0.05
        assert set(number["seconds"]) == {"wake", "sync", "sleep"}
    kept = []
    result = colocated.step("lora", True, lambda so_far: kept.append(len(so_far["steps"])))
    assert kept == [0, 1, 2]  # when vLLM has begun, and as each step ends
    assert all(x["mismatch_mean"] < 1e-5 and x["computed_tokens"] > 0 for x in result["steps"])
    assert {"rollout_s", "update_s", "peak_gib", "start_gib"} < result["plan"].keys()
    assert result["start_s"] > 0 and {*result["phases_s"]} == {"wake", "sync", "sleep"}
    colocated.show("step", result)
    assert "planned" in capfd.readouterr().out


def test_nothing_without_a_token_is_said(codec, tmp_path):
    """A model of more rows than the tokenizer has tokens: its log-probs are the trainer's."""
    policy = random_policy(codec, head_dim=32, vocab_size=1000)
    policy.save_pretrained(tmp_path)
    codec.tokenizer.save_pretrained(tmp_path)
    with torch.no_grad():
        raw = policy(torch.tensor([[5, 6, 7]])).logits.softmax(-1)
    assert raw[..., 426:].sum(-1).min() > 0.3
    mask_head(policy, codec)
    engine = ColocatedEngine(tmp_path, codec, window=512, kv_gib=0.03, lora_rank=4)
    trained = with_lora(policy, GRPOConfig(lora_rank=4))
    try:
        with engine.awake(trained):
            turns = turns_of(engine)
            greedy = turns_of(engine, temperature=0.0)
    finally:
        engine.close()
    assert all(0 < i < 426 for turn in turns + greedy for i in turn.response_ids)
    with trained.disable_adapter():
        assert mismatch(policy, turns) < 1e-4
