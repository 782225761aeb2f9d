"""Whole episodes: what an embedder finds, likelihoods, what is trained in every format of calls,
losses of growing chats.
"""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from conftest import random_policy
from test_grpo import CONFIG, check_exact
from test_memupdate import (
    MEMORIES,
    REFINED,
    TASK,
    call,
    create,
    editor,
    noted,
    once,
    parts,
    play,
    reads,
    refiner,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import models.embedder as embedders
from agents import memupdate
from agents.calls import Format, format_of
from agents.search import searched
from agents.store import Store
from config.options import GRPOConfig
from data import formed
from dev import keeper
from engines.frozen import WithFrozen
from engines.hf import TransformersEngine
from engines.open import give_embedder
from engines.scripted import ScriptedEngine
from grpo import training_rows
from memagent import Group
from models.embedder import embedder_of
from models.logprobs import logprobs, pack
from report.metrics import describe
from rollout import rollout
from tasks import ledger
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


def ranked(snapshot, question, words):
    """Rank entries by the cosines of their embeddings or, given the order by words, by both; in the
    obvious way."""
    entries, embedder = snapshot.entries, embedder_of("hash:256")
    cosines = embedder.embed([*map(searched, entries)]) @ embedder.embed([question], True)[0]
    order = sorted(range(len(entries)), key=lambda i: (-round(float(cosines[i]), 6), i))
    if words is None:
        return [entries[i].line for i in order]
    scores = dict.fromkeys(range(len(entries)), 0.0)
    for rank, i in enumerate(order, 1):
        scores[i] += 1 / (60 + rank)
    for rank, line in enumerate(words, 1):
        (i,) = (i for i, entry in enumerate(entries) if entry.line == line)
        scores[i] += 1 / (60 + rank)
    return [entries[i].line for i in sorted(scores, key=lambda i: (-scores[i], i))]


def test_an_embedder_decides_what_is_found_in_the_very_snapshot(codec):
    found = {}
    for how in ("bm25", "dense", "hybrid"):
        (done,) = play(codec, searching(how), REFINED, once(*EDITS))
        found[how] = noted(done)[-1].answers, [op for n in noted(done) for op in n.ops]
    states = states_of(done)
    assert [len(state) for state in states] == [3, 3] and states[0] is not states[1]
    (whole,) = play(codec, searching("bm25", k=9), REFINED, once(*EDITS))  # the order by words
    for k, probe in enumerate(REFINED.probes):
        for which, state in zip(("found_before", "found_after"), states, strict=True):
            words = noted(whole)[-1].answers[k][which]
            assert found["dense"][0][k][which] == ranked(state, probe.question, None)[:2]
            assert found["hybrid"][0][k][which] == ranked(state, probe.question, words)[:2]
            assert found["bm25"][0][k][which] == words[:2]
    _, dora = found["dense"][0]
    assert any("Genoa" in line for line in dora["found_after"])
    assert not any("Genoa" in line for line in dora["found_before"])
    assert not any("[m2]" in line for line in dora["found_after"])
    # of somebody who is nowhere words find nothing, meanings the nearest; and so do the tools
    assert not found["bm25"][0][1]["found_before"] and len(dora["found_before"]) == 2
    replies = {how: ops[-1]["message"] for how, (_, ops) in found.items()}
    assert replies["bm25"] == "No memory matches. 3 stored."
    nearest = ranked(states[1], "Where is Emil?", None)[:2]
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


# ---------------------------------------------------------------- likelihood


@pytest.mark.parametrize("turn_credit", [False, True])
def test_likelihood_is_the_mean_log_prob_of_the_accepted_answer_before_and_after(
    codec, turn_credit
):
    """Edits are scripted; a real model says how probable answers are, which a naive pass checks."""
    policy = random_policy(codec)
    said = iter([create("Dora reached Genoa."), call("delete_memory", memory_id="m1"), ""])
    engine = WithFrozen(
        ScriptedEngine(codec, lambda p: next(said)), TransformersEngine(policy, codec)
    )
    agent = refiner(pay="likelihood", turn_credit=turn_credit).on(codec)
    (done,) = rollout(engine, agent, [(REFINED, 0)])
    assert not done.error, done.error

    def naive(entries, probe):
        """The mean log-prob of the answer after a prompt with these entries, by one pass."""
        memory = "\n".join(entry.shown for entry in entries) or memupdate.NO_ENTRIES
        ids = agent.prompt("answer", 9, memory=memory, problem=probe.question).ids(codec)
        target = [*codec.encode(formed(probe.answers[0], agent.config.form))]
        with torch.no_grad():
            scores = policy(torch.tensor([[*ids, *target]])).logits[0].log_softmax(-1)
        return fmean(scores[len(ids) - 1 + k, token].item() for k, token in enumerate(target))

    (boris, carl), anna = MEMORIES[1:], MEMORIES[0]
    start = Store(memupdate.entries_of([anna, boris, carl])).snapshot().entries
    # what shares a word with each question: nobody is said to be anywhere but by name
    before = [naive(start[:1], REFINED.probes[0]), naive([], REFINED.probes[1])]
    (dora,) = [e for e in states_of(done)[1].entries if "Dora" in e.text]
    after = [naive([], REFINED.probes[0]), naive([dora], REFINED.probes[1])]
    won = parts(done)
    assert won["score_before"] == pytest.approx(fmean(before), abs=1e-5)
    assert won["score_after"] == pytest.approx(fmean(after), abs=1e-5)
    assert won["delta"] == pytest.approx(fmean(after) - fmean(before), abs=1e-5)
    assert abs(won["delta"]) > 0.01
    others = sum(won[name] for name in ("format", "size", "compression"))
    assert agent.reward(done) == pytest.approx(won["delta"] + others)
    # a response of the target's own tokens, none of them trained or drawn
    for turn in done.turns:
        if turn.prompt.frozen:
            probe = next(p for p in REFINED.probes if p.id == turn.notes.probe)
            assert str(turn.response) == formed(probe.answers[0], agent.config.form)
            assert not turn.trained and fmean(turn.logprobs) < 0
    if turn_credit:
        middle = [naive(start[:1], REFINED.probes[0]), after[1]]
        means = [fmean(each) for each in (before, middle, after)]
        gains = [r["gain"] for r in agent.turn_rewards(done) if r]
        assert gains == pytest.approx([means[1] - means[0], means[2] - means[1], 0], abs=1e-5)


# ---------------------------------------------------------------- what is trained

CHAT = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_TOOLS = CHAT.partition("{% endfor %}")[2]
# the marks that a model's template has, none of which is ever written
MARKED = {
    "hermes": CHAT + '{# <tool_call>{"name": NAME, "arguments": {}} #}',
    "lines": CHAT + '{# <tool_call>\n{"name": NAME, "arguments": {}} #}',
    "list": CHAT + '{# <tool_call>[{"name": NAME, "arguments": {}}] #}',
    "smollm": NO_TOOLS + "{# named SmolLM #}",
    "xml": CHAT + "{# <tool_call>\n<function=NAME>\n<parameter=KEY> #}",
    "bare": CHAT + '{# {"name": NAME, "parameters": {}} #}',
    "chat": NO_TOOLS,  # roles, and calls described in the prompt
    "plain": None,  # neither
}
FORMATS = {
    "hermes": Format("hermes", True), "lines": Format("hermes", True, "\n"),
    "list": Format("list", True), "smollm": Format("list", False), "xml": Format("xml", True, "\n"),
    "bare": Format("bare", True), "chat": Format("hermes", False), "plain": Format(),
}  # fmt: skip


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
    tokenizer.chat_template = MARKED[kind]
    return Codec(tokenizer)


@pytest.mark.parametrize("history", ["bounded", "append"])
@pytest.mark.parametrize("kind", MARKED)
def test_exactly_the_sampled_ids_are_trained_in_every_format(kind, history):
    """A scripted model writes calls as the format has them; replies and headings are templated."""
    codec = codec_of(kind)
    form = format_of(codec.tokenizer)
    assert form == FORMATS[kind]
    agent = refiner(history=history, max_turns=3, call_tokens=400, without=OTHERS).on(codec)
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
    if history == "append":
        heading = "" if kind == "plain" else "<|assistant|>"
        role = "" if kind == "plain" else f"<|{'tool' if form.by_template else 'user'}|>"
        for trajectory in done:
            edits = [t for t in trajectory.turns if not t.prompt.frozen]
            for before, turn in pairwise(edits):
                whole = before.prompt_ids + before.response_ids
                assert turn.prompt_ids[: len(whole)] == whole
                told = codec.tokenizer.decode(turn.prompt_ids[len(whole) :])
                said = "".join(f"{role}{before_said}{heading}" for before_said in [
                    "\n".join(op["message"] for op in before.notes.ops)])  # fmt: skip
                assert "".join(told.replace("<eos>", "").split()) == "".join(said.split())
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
    tokens = sum(map(len, rows))
    assert history == "bounded" or len(batch.trie) < 0.6 * tokens


@pytest.mark.parametrize("micro_tokens", [400, 10**6])
@pytest.mark.parametrize("mode", ["build", "refine"])
def test_loss_and_gradients_of_a_growing_chat_are_those_of_one_turn_at_a_time(mode, micro_tokens):
    """By GRPO's own update, with rewards of single turns, so that advantages differ in a chat."""
    codec, draw = codec_of("hermes"), random.Random(0)
    own = dict(history="append", max_turns=3, without=OTHERS[1:])
    if mode == "build":
        agent = editor(templates="", call_tokens=60, **own).on(codec)
        task = replace(TASK, sessions=TASK.sessions[:2])
    else:
        agent, task = refiner(**own).on(codec), REFINED
    bad = call("delete_memory", memory_id="m50")

    def script(prompt):
        if prompt.frozen:
            return reads(prompt)
        return draw.choice([bad, create("Dora reached Genoa."), create("Emil met Anna.")])

    engine = ScriptedEngine(codec, script)
    done = list(rollout(engine, agent, [(task, k) for k in range(3)]))
    for trajectory in done:
        assert not trajectory.error, trajectory.error
        trajectory.reward = float(trajectory.sample)
        edits = [t for t in trajectory.turns if not t.prompt.frozen]
        assert len(edits) >= 3 and all(t.prompt.after for t in edits[1:])
        for turn in edits:
            turn.rewards = {"ok": float(all(op["ok"] for op in turn.notes.ops))}
    rows = training_rows([Group(task, done)], CONFIG)
    assert len({row.advantage for row in rows}) > 3
    policy = random_policy(codec)
    share = check_exact(policy, codec, rows, micro_tokens=micro_tokens)
    longest = {row.trajectory: len(row) for row in rows}
    whole = sum(longest.values()) / sum(map(len, rows))
    assert micro_tokens == 400 or share <= whole < 0.7  # a chat is computed once
