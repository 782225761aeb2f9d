"""The engine against an obvious one: one pass a text, no cache, no drafts, no neighbours."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import LATENT, obvious_logits, random_policy, worst_mismatch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.options import EMBEDDED
from embedded import tiny
from engines import hf
from engines.hf import TransformersEngine, draw, uniforms
from memagent import Finish, Prompt
from models.load import load_model, longest_context
from rollout import Sampling, follow, rollout
from tasks import worlds
from tokens.attention import additive_mask, sdpa
from tokens.codec import Codec, Text
from tokens.trie import build_trie

GREEDY = Sampling(0.0)


def tasks(n, n_sections=3):
    return list(worlds.make_tasks(0, n, n_sections, "one_fact"))


def of_ids(ids, max_tokens):
    return Prompt(((Text("x", ids), False),), max_tokens)


def run(engine, added, drop=()):
    """Add (prompt, sampling), three each step, and drop some, which wait or are in flight.

    Returns the turns that come back, by place. A place is the seed of its turn.
    """
    places, turns, waiting = {}, {}, list(enumerate(added))
    while waiting or places:
        for place, (prompt, sampling) in waiting[:3]:
            places[engine.add(prompt, sampling, place)] = place
        del waiting[:3]
        turns |= {places.pop(key): turn for key, turn in engine.step()}
        for key in [key for key, place in places.items() if place in drop]:
            engine.drop(key)
            del places[key]
    return turns


def check(engine, added, drop=()):
    """Answer prompts and compare each turn with the obvious one; return the turns in order."""
    before, turns = counted(engine), run(engine, added, drop)
    assert {*range(len(added))} - {*drop} <= {*turns}
    for place, turn in turns.items():
        prompt, sampling = added[place]
        n = len(turn.response_ids)
        ids, logprobs = draw(
            obvious_logits(engine.model, turn),
            torch.full((n,), sampling.temperature),
            torch.full((n,), sampling.top_p),
            torch.from_numpy(uniforms(np.full(n, place, np.uint64), np.arange(n))),
        )
        assert turn.response_ids == ids.tolist()
        assert turn.logprobs == pytest.approx(logprobs.tolist(), abs=1e-5)
        ends = [i for i, token in enumerate(turn.response_ids) if token in engine.codec.eos_ids]
        assert ends == [n - 1] or (not ends and n == prompt.max_tokens)
        assert turn.finish is (Finish.STOP if ends else Finish.LENGTH)
    if not drop:
        prefilled, reused, generated = counted(engine) - before
        assert prefilled + reused == sum(len(turn.prompt_ids) for turn in turns.values())
        assert reused >= sum(turn.reused_tokens for turn in turns.values())
        assert generated == sum(len(turn.response_ids) for turn in turns.values())
    return [turns[place] for place in sorted(turns)]


def counted(engine):
    return np.array([engine.prefilled_tokens, engine.reused_tokens, engine.generated_tokens])


def change_weights(policy):
    with torch.no_grad():
        policy.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


# ---------------------------------------------------------------- any prompts, any room

SAID = [1, 20, 21, 22]  # the end of a response, and three tokens that prompts have


def of_few_words(codec):
    """Make a policy that says little else than its prompts: guesses often hold, and turns end."""
    policy = random_policy(codec)
    less = torch.full((len(codec.tokenizer),), -9.0)
    less[SAID] = 0.0
    policy.lm_head.register_forward_hook(lambda head, _, logits: logits + less)
    return policy


PROMPTS = st.tuples(
    st.builds(
        of_ids, st.lists(st.sampled_from(SAID[1:]), min_size=1, max_size=14), st.integers(1, 8)
    ),
    st.builds(Sampling, st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0.6, 1.0])),
)


@settings(max_examples=12, derandomize=True)
@given(
    added=st.lists(PROMPTS, min_size=1, max_size=9),
    drop=st.sets(st.integers(0, 8), max_size=3),
    rows=st.sampled_from([1, 3, 64]),
    cache=st.sampled_from([30, 100, 10**6]),
    prefill=st.sampled_from([1, 20, 10**6]),
    reuse=st.sampled_from([1, 4]),
    draft=st.sampled_from([0, 4]),
    remember=st.booleans(),
)
def test_whatever_is_shared_copied_guessed_or_thrown_out_the_tokens_are_the_same(
    codec, added, drop, rows, cache, prefill, reuse, draft, remember
):
    """Prompts that overlap in every way, then some that go on from their turns, and new weights."""
    policy = of_few_words(codec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "MIN_REUSE", reuse)
        patch.setattr(hf, "MAX_DRAFT", draft)
        engine = TransformersEngine(policy, codec, rows, cache, prefill, remember=remember)
        turns = check(engine, added, drop)
        more = [(replace(added[0][0], after=turn), Sampling()) for turn in turns]
        check(engine, more)
        change_weights(policy)
        check(engine, added)
        engine.drop(10**6)  # which nobody knows
        assert len(engine._free) == len(engine._requests) and not engine.step()
        used = engine._cache.rows * engine._cache.width
        assert used <= max(cache, *(p.max_tokens + len(p.ids(codec)) for p, _ in added + more))


def test_a_trajectory_does_not_depend_on_what_runs_beside_it(codec, policy, temperature=0.7):
    def read(jobs, max_rows, seed=3, **how):
        engine = TransformersEngine(policy, codec, max_rows=max_rows)
        done = list(rollout(engine, tiny.agent(), jobs, Sampling(temperature), seed=seed, **how))
        assert worst_mismatch(policy, [turn for t in done for turn in t.turns], temperature) < 1e-5
        return {(t.task.id, t.sample): [turn.response_ids for turn in t.turns] for t in done}

    jobs = [(task, sample) for task in tasks(2, 1) for sample in range(2)]
    shuffled = random.Random(0).sample(jobs, len(jobs))
    alone = read(jobs[:1], 1) | read(jobs[1:2], 1) | read(jobs[2:], 1, in_flight=1)
    assert read(jobs, 32) == read(shuffled, 2, in_flight=3) == alone
    assert len({str(v) for v in alone.values()}) == len(alone)  # samples of one task differ
    assert not read(jobs[:1], 1, seed=4).items() <= alone.items()


# ---------------------------------------------------------------- what is computed once


@pytest.mark.parametrize(
    ("layout", "in_flight", "low", "high"),
    [("shared", 64, 0.3, 0.45), ("shared", 3, 0.3, 0.65), ("paper", 64, 0.7, 0.9)],
)
def test_a_group_prefills_what_it_shares_once(codec, policy, layout, in_flight, low, high):
    engine = TransformersEngine(policy, codec)
    jobs = [(t, g) for t in tasks(1 if in_flight < 8 else 3, 4) for g in range(8)]
    done = list(rollout(engine, tiny.agent(layout=layout), jobs, in_flight=in_flight))
    turns = [turn for t in done for turn in t.turns]
    assert worst_mismatch(policy, turns) < 1e-5
    prefilled, reused, _ = counted(engine)
    # the share that is left if no prefix is ever computed twice
    fewest = len(build_trie([t.prompt_ids for t in turns])) / (prefilled + reused)
    assert low < fewest < prefilled / (prefilled + reused) < high


def test_a_growing_chat_is_continued_where_it_ended(codec, policy):
    engine, said, turn = TransformersEngine(policy, codec), 0, None
    for word in ("Anna joined Boris in Lima. " * 4, "Boris", "Clara"):
        (turn,) = check(engine, [(Prompt(((word, False),), 8, after=turn), Sampling())])
        assert turn.reused_tokens == said  # the last sampled token was never read
        said = len(turn.prompt_ids + turn.response_ids) - 1


def test_what_is_finished_is_not_computed_again_until_the_weights_change(codec, policy):
    """Two prompts, one of them twice, and one is a prefix of the other."""
    engine = TransformersEngine(policy, codec)

    def prefilled():
        before = engine.prefilled_tokens
        check(engine, [(of_ids([*range(10, 10 + n)], 1), Sampling()) for n in (40, 30, 30)])
        return engine.prefilled_tokens - before

    assert [prefilled(), prefilled()] == [40, 2]
    change_weights(policy)
    assert [prefilled(), prefilled()] == [40, 2]
    with engine.awake(policy):
        assert prefilled() == 40
        with pytest.raises(UserError):
            engine.awake(torch.nn.Linear(1, 1))


def read_again(codec, policy, questions, n_sections=3, **room):
    """Read one document once per question; return the engine, and turns by question."""
    engine = TransformersEngine(policy, codec, max_rows=4, **room)
    agent, (task,) = tiny.agent(memory_tokens=6, final_tokens=6), tasks(1, n_sections)
    asked = (replace(task, question=f"Where is {name}?") for name in questions)
    return engine, [[*follow(engine, agent, task, GREEDY)] for task in asked]


def test_a_second_question_computes_no_section_again_and_takes_no_more_rows(codec, policy):
    names = ["Anna", "Boris", "Anna"]
    engine, done = read_again(codec, policy, names, remember=True, max_cache_tokens=4096)
    _, fresh = read_again(codec, policy, names)
    assert worst_mismatch(policy, [turn for turns in done for turn in turns]) < 1e-5
    for turns, others in zip(done, fresh, strict=True):
        assert [t.response_ids for t in turns] == [t.response_ids for t in others]
    for turn in (turn for turns in done[1:] for turn in turns[:-1]):
        # template and section at least, which stand before the question
        assert turn.reused_tokens >= len(codec.encode(turn.prompt.section))
    reused, without = (sum(turn.reused_tokens for turn in d[1]) for d in (done, fresh))
    assert reused > 2 * without
    assert sum(map(bool, engine._cached)) <= 4 + 2  # the final prompts differ
    # what is remembered stays within its room
    engine, _ = read_again(codec, policy, names, 8, remember=True, max_cache_tokens=400)
    assert engine._cache.rows * engine._cache.width <= 400 and engine._cache.rows > 4


# ---------------------------------------------------------------- drafts


def test_a_draft_is_what_followed_the_latest_tokens_in_the_prompt():
    def draft(ids, out, most=3, max_tokens=50):
        return hf._Request(1, Prompt((), max_tokens), ids, Sampling(), 0, out=out).draft(most)

    again = [5, 6, 7, 8, 9, 6, 3, 4]
    # after the last occurrence, to the end of the prompt; two tokens are preferred to one
    drafts = {(5,): [6, 7, 8], (6,): [3, 4], (5, 6): [7, 8, 9], (1, 6): [3, 4]}
    drafts |= {(1, 2): [], (4,): []}
    assert {out: draft(again, [*out]) for out in drafts} == drafts
    # of max_tokens one is sampled already, and one is sampled after the draft
    assert [len(draft([5, 6, 7, 8], [5], 3, n)) for n in (1, 2, 3, 4)] == [0, 0, 1, 2]


def test_drafts_save_passes(monkeypatch):
    """The embedded policy has learnt to copy its memory."""
    policy, codec = load_model(EMBEDDED, device="cpu"), Codec.load(EMBEDDED)

    def passes(most):
        monkeypatch.setattr(hf, "MAX_DRAFT", most)
        engine, n = TransformersEngine(policy, codec), []
        monkeypatch.setattr(
            engine, "_run", lambda *asked, run=engine._run: n.append(1) or run(*asked)
        )
        list(rollout(engine, tiny.agent(), [(t, 0) for t in tasks(3, 6)], Sampling(0.3)))
        return len(n)

    assert passes(4) < 0.75 * passes(0)


# ---------------------------------------------------------------- windows and architectures


@pytest.mark.parametrize("window", [None, 5000, 90])
@pytest.mark.parametrize("name", ["full", "bm25"])
def test_the_baselines_fill_the_models_window_and_never_exceed_it(codec, name, window):
    engine = TransformersEngine(random_policy(codec, window=100), codec)
    agent = tiny.agent(name, window=window)
    short, long = (next(follow(engine, agent, tasks(1, n)[0], GREEDY)) for n in (1, 9))
    assert not short.error and not long.error and short.prompt.cut == 0
    assert len(long.prompt_ids) + agent.config.final_tokens == min(window or 100, 100)
    # the tokens that are left out are counted
    if name == "full":
        assert long.prompt.cut == 9 * 24 - len(codec.encode(long.prompt.section))


def test_a_prompt_past_the_window_is_a_turn_that_says_why(codec):
    engine = TransformersEngine(random_policy(codec, window=100), codec)
    turns = run(engine, [(of_ids([20] * n, 9), GREEDY) for n in (91, 92)])
    assert turns[0].finish is not Finish.FULL is turns[1].finish
    assert "window of 100" in turns[1].error and not turns[0].error


SIZES = dict(
    vocab_size=500, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256,
    initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
FULL = {"head_dim": 8, "layer_types": ["full_attention"] * 2}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
GPT2 = {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}


def with_two_tables(original):
    """Return settings of Phi-3.5's kind: one rotary table up to `original` tokens, one beyond."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return {
        "sliding_window": None, "original_max_position_embeddings": original,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    }  # fmt: skip


SINKS = FULL | {"num_local_experts": 4, "num_experts_per_tok": 2}
DYNAMIC_MASK = {"head_dim": 8, "keep_window_size": 8}
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
OTHER = {"GPT2", "XGLM", "OPT", "Bart"}


def build(kind, **other):
    """Build a random model of another architecture."""
    torch.manual_seed(0)
    sizes = {} if kind in OTHER else SIZES
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": 500} | sizes | other)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{kind}{head}")(config)


@pytest.mark.parametrize(
    ("kind", "other", "expected"),
    [
        ("Mistral", {"sliding_window": None}, 256),
        ("Qwen3", {"head_dim": 8}, 256),
        ("Granite", {}, 256),
        ("Llama", DYNAMIC, 256),
        ("Phi3", with_two_tables(128), 128),  # the second is never used
        ("Phi3", with_two_tables(256), 256),
        ("Granite", {"logits_scaling": 8.0}, "lm_head"),
        ("Cohere", {}, "lm_head"),
        ("Mistral", {"sliding_window": 16}, "full attention"),
        ("Gemma2", {"head_dim": 8}, "full attention"),
        ("Gemma2", FULL | {"final_logit_softcapping": 1.0}, "lm_head"),
        ("XGLM", XGLM, "table"),  # has an attention of its own
        ("GPT2", GPT2, "GPT2LMHeadModel"),
        ("DeepseekV3", LATENT | SIZES | {"num_key_value_heads": 4}, 256),
        ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 256),
        ("Llama", {"num_key_value_heads": 3}, "cannot serve"),  # nor by the library itself
        ("GptOss", SINKS, "s_aux"),
        ("Doge", DYNAMIC_MASK, "attention_mask"),  # a few keys a head, which long texts show alone
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "full attention"),
        ("Moshi", {"head_dim": 8, "audio_vocab_size": 50}, "cannot serve"),  # tells no layer
        ("OPT", OPT, "layers"),
        ("Bart", BART, "layers"),
    ],
)
def test_which_models_are_served(codec, kind, other, expected):
    model = build(kind, **other).train()
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            TransformersEngine(model, codec)
        return
    engine = TransformersEngine(model, codec)
    assert model.training and engine.window == expected and not counted(engine).any()
    model.eval()
    head = [random.Random(0).randrange(20, 400) for _ in range(expected - 5)]
    check(engine, [(of_ids(ids, 5), Sampling()) for ids in (head, head[:40], head[:20])])
    TransformersEngine(model.to(torch.bfloat16), codec)  # not refused for its rounding


def test_a_table_that_follows_the_largest_position_of_a_pass_is_refused(codec):
    """As in the code of a hub's model, which says nothing of it in its config."""
    model = build("Llama")
    table = model.model.rotary_emb
    forward = table.forward
    TransformersEngine(model, codec)
    table.forward = lambda x, position_ids: forward(
        x, position_ids / (4 if position_ids.max() >= 128 else 1)
    )
    with pytest.raises(UserError, match="one rotary table"):
        TransformersEngine(model, codec)


ONE_TABLE = ("default", "linear", "yarn", "llama3", "proportional")


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize(
    ("rope_type", "original", "window"),
    [
        *((rope_type, 64, 256) for rope_type in ONE_TABLE),
        ("longrope", 64, 64),
        ("longrope", 512, 256),
        ("dynamic", 64, 256),  # it has a second beyond the window alone
    ],
)
def test_every_type_of_rotary_table_has_a_window(rope_type, original, window, layered, capsys):
    rope = {"rope_type": rope_type, "original_max_position_embeddings": original}
    config = SimpleNamespace(
        model_type=f"{rope_type}{layered}",
        max_position_embeddings=256,
        rope_parameters={"full_attention": rope} if layered else rope,
    )
    assert longest_context(config) == window
    assert ("64 tokens, not 256" in capsys.readouterr().err) == (window == 64)
    assert longest_context(SimpleNamespace()) == 0


# ---------------------------------------------------------------- drawing


@pytest.mark.parametrize(
    ("temperature", "top_p", "shares", "probability"),
    [
        (1.0, 1.0, [0.5, 0.3, 0.15, 0.05], 0.5),
        (1.0, 0.7, [0.625, 0.375, 0, 0], 0.625),
        (1.0, 0.49, [1, 0, 0, 0], 1.0),  # the smallest set that reaches 0.49
        (0.0, 1.0, [1, 0, 0, 0], 0.5),
        (0.5, 1.0, [0.685, 0.247, 0.062, 0.007], 0.685),
    ],
)
def test_draw_follows_the_distribution(temperature, top_p, shares, probability):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)
    ones, seeds = torch.ones(4000), np.arange(4000, dtype=np.uint64)
    uniform = torch.from_numpy(uniforms(seeds, np.zeros(4000, int)))
    ids, logp = draw(logits, ones * temperature, ones * top_p, uniform)
    assert torch.isfinite(logp).all()
    assert (ids.bincount(minlength=4) / 4000).tolist() == pytest.approx(shares, abs=0.03)
    assert logp[ids == 0][0].exp().item() == pytest.approx(probability, abs=1e-3)


def test_uniform_is_uniform_and_a_function_of_its_arguments():
    seeds = np.arange(10000, dtype=np.uint64)
    u, v = (uniforms(seeds, np.full(10000, position)) for position in (0, 1))
    assert (u == uniforms(seeds, np.zeros(10000, int))).all() and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.02
    assert max(abs(np.corrcoef(a, b)[0, 1]) for a, b in ((u[:-1], u[1:]), (u, v))) < 0.05


# ---------------------------------------------------------------- attention on a CPU


@pytest.mark.parametrize(
    ("dtype", "apart"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("n_queries", "depths"), [(4, None), (4, [0, 4, 7]), (20, None), (20, [0, 4, 30])]
)
@pytest.mark.parametrize("at_once", [7, 256])
def test_attention_is_the_librarys(n_queries, depths, kv_heads, at_once, dtype, apart, monkeypatch):
    """Three rows of queries, behind `depths` tokens; None: causal."""
    monkeypatch.setattr("tokens.attention.AT_ONCE", at_once)
    torch.manual_seed(0)
    mask, n_keys = None, n_queries
    if depths:
        last = torch.tensor([n_queries, n_queries, min(n_queries, 9)])[:, None] - 1
        position = torch.tensor(depths)[:, None] + torch.arange(n_queries).minimum(last)
        n_keys = int(position.max()) + 1
        mask = additive_mask(torch.arange(n_keys) <= position[..., None], dtype)[:, None]
    query = torch.randn(3, 4, n_queries, 8).to(dtype).requires_grad_()
    # a part of every row of the cache
    key, value = (
        torch.randn(3, kv_heads, 50, depth).to(dtype)[:, :, :n_keys].requires_grad_()
        for depth in (8, 6)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), None if mask is None else mask.float(),
        is_causal=mask is None, scale=0.3, enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    ours = sdpa(query, key, value, mask, 0.3)
    assert ours.dtype == dtype
    gradients, wanted = (
        torch.autograd.grad(out.float().square().sum(), (query, key, value))
        for out in (ours, expected)
    )
    for a, b in zip((ours, *gradients), (expected, *wanted), strict=True):
        assert (a.float() - b.float()).norm() <= apart * b.float().norm()
