"""SmolLM2 sampled by vLLM on a CPU: `make test-real` runs this in the environment of vLLM.

`make test` and `make test-vllm` do not. The cache is the user's own unless MEMAGENT_CACHE says
otherwise; the model is fetched if it is not there.
"""

import pytest
import torch
from conftest import worst_mismatch

from agents import find
from models.load import load_model
from models.logprobs import mask_head
from models.packaged import ready
from rollout import Sampling, rollout
from tasks import worlds
from tokens.codec import Codec

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-real")

from engines.vllm_colocated import ColocatedEngine


def test_vllm_samples_from_what_the_trainer_computes_before_and_after_a_step():
    folder = ready("smollm2")
    codec, policy = Codec.load(folder), load_model(folder, "float32", "cpu")
    mask_head(policy, codec)  # as a trainer's
    small = {"chunk_tokens": 64, "memory_tokens": 12, "final_tokens": 12, "max_sections": 2}
    agent = find.resolve("default", "smollm2", {}, small)[1]
    jobs = [(task, g) for task in worlds.make_tasks(0, 1, 12, "one_fact") for g in range(2)]
    engine = ColocatedEngine(folder, codec, window=512, rows=4, kv_gib=0.25)
    try:
        for step in range(2):
            with engine.awake(policy):
                done = list(rollout(engine, agent, jobs, Sampling(1.0), seed=step))
            turns = [turn for trajectory in done for turn in trajectory.turns]
            assert len(turns) == 6 and not any(trajectory.error for trajectory in done)
            assert worst_mismatch(policy, turns) < 1e-4
            with torch.no_grad():  # a step that is large enough for stale weights to show
                for p in policy.parameters():
                    p.mul_(1.02)
            assert worst_mismatch(policy, turns) > 1e-2
        assert engine.reused_tokens > 0
    finally:
        engine.close()
