"""Whole episodes: what an embedder finds, what is trained in every format of calls."""

from statistics import fmean

import pytest
import torch
from conftest import random_policy
from test_memupdate import (
    REFINED,
    call,
    create,
    editor,
    noted,
    once,
    play,
    reads,
    refiner,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import models.embedder as embedders
from agents.calls import Format, format_of
from agents.search import searched
from agents.store import Store
from config.options import GRPOConfig
from dev import keeper
from engines.open import give_embedder
from engines.scripted import ScriptedEngine
from grpo import training_rows
from memagent import Group
from models.embedder import embedder_of
from models.logprobs import logprobs, pack
from report.metrics import describe
from rollout import rollout
from suites import ledger
from tokens.codec import Codec


@pytest.fixture(scope="module")
def codec():
    return Codec(keeper.make_tokenizer())


def states_of(trajectory):
    """The stores at the start and at the end, by the journal that the last edit has kept."""
    lines = next(notes.store for notes in noted(trajectory)[::-1] if notes.store)
    store = Store.from_lines(lines, "the notes")
    return store.at(0), store.snapshot()


# ---------------------------------------------------------------- embedders

EDITS = (
    create("Dora reached Genoa."),
    call("delete_memory", memory_id="m2"),
    call("search_memory", query="Where is Emil?", top_k=2),
)


def searching(how, k=2):
    """A refiner whose answers come from the k best entries, with its embedder opened."""
    embedder = "" if how == "bm25" else "hash:256"
    agent = refiner(search=how, embedder=embedder, answer_k=k, answer_order="best")
    give_embedder([agent])
    return agent


def ranked(snapshot, question):
    """Rank entries by the cosines of their embeddings, in the obvious way."""
    entries, embedder = snapshot.entries, embedder_of("hash:256")
    cosines = embedder.embed([*map(searched, entries)]) @ embedder.embed([question], True)[0]
    order = sorted(range(len(entries)), key=lambda i: (-round(float(cosines[i]), 6), i))
    return [entries[i].line for i in order]


def test_an_embedder_decides_what_is_found_in_the_very_snapshot(codec):
    found = {}
    for how in ("bm25", "dense"):
        (done,) = play(codec, searching(how), REFINED, once(*EDITS))
        found[how] = noted(done)[-1].answers, [op for n in noted(done) for op in n.ops]
    states = states_of(done)
    assert [len(state) for state in states] == [3, 3] and states[0] is not states[1]
    for k, probe in enumerate(REFINED.probes):
        for which, state in zip(("found_before", "found_after"), states, strict=True):
            assert found["dense"][0][k][which] == ranked(state, probe.question)[:2]
    _, dora = found["dense"][0]
    assert any("Genoa" in line for line in dora["found_after"])
    assert not any("Genoa" in line for line in dora["found_before"])
    assert not any("[m2]" in line for line in dora["found_after"])
    # of somebody who is nowhere words find nothing, meanings the nearest; and so do the tools
    assert not found["bm25"][0][1]["found_before"] and len(dora["found_before"]) == 2
    replies = {how: ops[-1]["message"] for how, (_, ops) in found.items()}
    assert replies["bm25"] == "No memory matches. 3 stored."
    nearest = ranked(states[1], "Where is Emil?")[:2]
    assert replies["dense"].splitlines() == ["2 of 3 memories:", *nearest]


def test_texts_that_an_embedder_has_cut_are_counted_with_the_search(codec, monkeypatch):
    monkeypatch.setattr(
        embedders._Hashed, "cut", lambda self, texts, query=False: [True for _ in texts]
    )
    task = next(ledger.make_questions(0, 1, 5))
    for how, embedder in (("bm25", ""), ("dense", "hash:64")):
        agent = editor(search=how, embedder=embedder)
        give_embedder([agent])
        (done,) = play(codec, agent, task, lambda prompt: create("Anna left."))
        (asked,) = noted(done, "answer")
        # all entries, and the question
        assert asked.entries and asked.search_cut == (asked.entries + 1 if embedder else 0)
        counts = agent.count(task, done.turns[-1])
        assert counts["search_cut"] == asked.search_cut
        assert (counts["recall"], counts["sought"]) == (asked.recall, 1)


# ---------------------------------------------------------------- what is trained

CHAT = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_TOOLS = CHAT.partition("{% endfor %}")[2]
# the marks that a model's template has, none of which is ever written
FORMATS = {  # the marks that a model's template has, none of which is ever written, and its format
    "hermes": (CHAT + '{# <tool_call>{"name": NAME, "arguments": {}} #}', Format("hermes", True)),
    "xml": (CHAT + "{# <tool_call>\n<function=NAME>\n<parameter=KEY> #}", Format("xml", True)),
    "bare": (CHAT + '{# {"name": NAME, "parameters": {}} #}', Format("bare", True)),
    "chat": (NO_TOOLS, Format()),  # roles, and calls described in the prompt
    "plain": (None, Format()),  # neither
}


OTHERS = ("delete_memory", "sample_memory", "merge_memory", "split_memory")


def by_bytes():
    """A tokenizer that gives every text back to the last blank and line break, as XML needs it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: k for k, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def codec_of(kind):
    tokenizer = by_bytes() if kind == "xml" else keeper.make_tokenizer()
    tokenizer.chat_template = FORMATS[kind][0]
    return Codec(tokenizer)


@pytest.mark.parametrize("kind", FORMATS)
def test_exactly_the_sampled_ids_are_trained_in_every_format(kind):
    """A scripted model writes calls as the format has them."""
    codec = codec_of(kind)
    form = format_of(codec.tokenizer)
    assert form == FORMATS[kind][1]
    agent = refiner(max_turns=3, call_tokens=400, without=OTHERS).on(codec)
    replies = []

    def write(prompt):
        if prompt.frozen:
            return reads(prompt)
        replies.append(prompt)
        n = len(replies)
        two = form.write("manage_memory", {"operation": "create", "content": f"Dora saw {n}."})
        return ["", "I look. "][n % 2] + two + form.write("search_memory", {"query": "Dora"})

    done = list(rollout(ScriptedEngine(codec, write, 2), agent, [(REFINED, k) for k in range(3)]))
    for k, trajectory in enumerate(done):
        assert not trajectory.error, trajectory.error
        trajectory.reward = float(k)
        ops = [op for notes in noted(trajectory) for op in notes.ops]
        assert [op["tool"] for op in ops] == ["manage_memory", "search_memory"] * 3
        assert all(op["ok"] for op in ops), ops
    rows = training_rows([Group(REFINED, done)], GRPOConfig(without_signal="keep"))
    sampled = [t for d in done for t in d.turns if not t.prompt.frozen]
    assert len(sampled) == 9 and any(t.prompt.frozen for d in done for t in d.turns)
    for row, turn in zip(rows, sampled, strict=True):
        assert row.prompt_ids == turn.prompt_ids and row.response_ids == turn.response_ids
        written = codec.tokenizer.decode(turn.response_ids)
        assert "Created m" not in written and "memories:" not in written  # no reply
        assert turn.response_ids[-1] == codec.tokenizer.eos_token_id
    # the answers of the frozen policy are no part of what the step's metrics describe
    metrics, written = describe([Group(REFINED, done)], {}), [len(t.response_ids) for t in sampled]
    assert metrics["written_tokens"] == sum(written)
    assert metrics["memory_tokens"] == pytest.approx(fmean(written))
    if kind not in ("hermes", "xml"):  # of texts that differ as much as any
        return
    # in the packed batch, too: the log-probs are those of these very tokens, one turn at a time
    policy, rows = random_policy(codec), rows[:3]
    (batch,) = pack(rows, 1 << 20)
    packed = logprobs(policy, batch)
    alone = []
    for row in (rows[i] for i in batch.index):
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        scores = policy(ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        alone.append(scores.gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0])
    assert len(packed) == sum(len(turn.response_ids) for turn in sampled[:3])
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)
