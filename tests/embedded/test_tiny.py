"""The embedded base policy: its settings and tokenizer, and that it can be trained again."""

import random
from dataclasses import replace

import pytest
import torch

from agents import find
from agents.rememr1 import NOT_RECALLED
from config import machine
from config.options import EMBEDDED, TINY
from config.realmodels import titled
from dev import base
from embedded import tiny
from memagent import NO_MEMORY
from models import plan
from models.load import load_model
from models.policy import Policy, fingerprint
from tasks import worlds
from tokens.codec import Codec

SMALL = base.BaseConfig(
    steps=8, careless_steps=4, dense_steps=2, updates=6, answers=3, full=1, full_sections=2,
    hidden=64, intermediate=64, recalls=6, recall_answers=3,
)  # fmt: skip


def test_the_embedded_policy_says_how_it_reads_and_in_which_form_it_answers():
    stored = find.of_model(EMBEDDED)
    assert (stored["chunk_tokens"], stored["memory_tokens"], stored["form"]) == (24, 13, "boxed")
    assert find.make("memagent", stored).config == tiny.agent().config
    made, shipped = Codec(base.make_tokenizer()), Codec(tiny.make_tokenizer())
    assert made.fingerprint == shipped.fingerprint == Codec.load(EMBEDDED).fingerprint
    assert len(shipped.encode("Anna joined Boris.")) == 4


def test_tiny_is_the_embedded_policy_wherever_a_model_is_named(monkeypatch):
    monkeypatch.setattr(machine, "_answers", None)  # the hub is not asked
    machine.check_hub(TINY)
    assert find.starting_point({"model": TINY}) == find.model_or_default(TINY) == TINY
    assert find.of_model(TINY) == find.of_model(EMBEDDED)
    policy = Policy(TINY)
    assert policy.folder == policy.base_folder == EMBEDDED
    assert plan.geometry(TINY) == plan.geometry("") and fingerprint(TINY) == fingerprint("")
    assert titled(TINY) == titled("") == "the embedded policy"


def test_the_demonstrators_write_what_the_question_needs(codec):
    question, other = "Where is Anna?", "Otto reached Lima. Ida met Emil. Olga toured Oslo."
    reader, looks_back = (tiny.agent(name).on(codec) for name in ("memagent", "rememr1"))

    def demonstrate(section, memory=NO_MEMORY, careful=1.0):
        prompt = reader.prompt("update", 13, problem=question, section=section, memory=memory)
        return base.demonstrate(random.Random(0), prompt, question, careful)

    def recalling(section, memory):
        slots = dict(problem=question, memory=memory, recalled_memory=NOT_RECALLED)
        prompt = looks_back.prompt("recall_update", 20, section=section, **slots)
        return base.demonstrate_recall(random.Random(1), prompt, question, 1.0)

    assert demonstrate("Ida met Emil. Anna met Otto.") == "Anna met Otto."
    assert demonstrate(other, "Anna met Otto.") == "Anna met Otto. Otto reached Lima."
    assert demonstrate(other) == NO_MEMORY
    assert demonstrate(other, "Anna met Otto.", careful=0.0) == "Olga toured Oslo."
    written = recalling("Anna met Otto. Ida met Emil.", "Olga toured Oslo.")
    assert written == "<update> Anna met Otto.</update><recall> Otto</recall>"
    # asked for once, where it was read
    assert recalling("Ida met Emil.", "Anna met Otto.") == "<update> Anna met Otto.</update>"


def test_the_loss_is_that_of_each_completions_own_tokens():
    model = load_model(EMBEDDED, device="cpu")
    items = [([5, 6, 7], [8, 9], [1.0, 0.5]), ([4], [7, 3, 2], [0.0, 1.0, 2.0])]
    expected = 0.0
    for prompt, completion, weights in items:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
        logp = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        expected -= sum(
            w * logp[k, t] for k, (t, w) in enumerate(zip(completion, weights, strict=True))
        )
    found = sum(base.step_loss(model, *batch) for batch in base.batches(items, 1, max_tokens=7))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_training_sees_short_documents_of_training_facts_only(codec):
    config, longest = replace(base.BaseConfig(), updates=40, answers=10, full=8), 0
    for prompt, completion, weights in base.examples(random.Random(0), config, codec, careful=0.5):
        assert len(completion) == len(weights) and completion[-1] == codec.tokenizer.eos_token_id
        text = codec.tokenizer.decode(prompt + completion)
        facts = base.parse_facts(text.partition("<section>\n")[2].partition("\n</section>")[0])
        longest = max(longest, len(facts))
        assert {worlds.split_of(fact[0], fact[2]) for fact in facts} <= {"train"}
    assert longest <= config.full_sections * worlds.FACTS_PER_SECTION


def test_training_is_reproducible_and_writes_a_model_that_loads(tmp_path):
    losses = []
    for name in ("a", "b"):
        base.train_base(SMALL, tmp_path / name, log=lambda step, loss: losses.append(loss), every=4)
    assert losses[:3] == losses[3:] and losses[2] < losses[0]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    codec = Codec.load(tmp_path / "a")
    assert load_model(tmp_path / "a").config.vocab_size == len(codec.tokenizer)
    assert codec.fingerprint == Codec.load(EMBEDDED).fingerprint
    assert find.of_model(tmp_path / "a") == find.of_model(EMBEDDED)
