import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.options import EMBEDDED
from embedded import tiny
from engines import hf
from engines.hf import TransformersEngine, draw, uniforms
from memagent import Agent, Finish, Prompt
from models.load import load_model, longest_context, window_for_vllm
from rollout import Sampling, follow, rollout
from tasks import worlds
from tokens import attention
from tokens.attention import additive_mask, sdpa
from tokens.codec import Codec, Text
from tokens.trie import build_trie

MEMAGENT, FULL, BM25 = map(tiny.agent, ("memagent", "full", "bm25"))


def tasks(n, n_sections=3, kind="one_fact"):
    return list(worlds.make_tasks(0, n, n_sections, kind))


def worst_mismatch(policy, turns, temperature=1.0):
    """The largest distance of log-probs from those of one sequence at a time, with full logits."""
    worst = 0.0
    for turn in turns:
        n, ids = len(turn.prompt_ids), torch.tensor([turn.prompt_ids + turn.response_ids])
        with torch.no_grad():
            logp = (policy(input_ids=ids).logits[0, n - 1 : -1] / temperature).log_softmax(-1)
        obvious = logp.gather(1, ids[0, n:, None])[:, 0]
        worst = max(worst, (obvious - torch.tensor(turn.logprobs)).abs().max().item())
    return worst


def finished(engine, n):
    """Step until n turns are there; returns them by key."""
    done = {}
    while len(done) < n:
        done |= dict(engine.step())
    return done


def answered(engine, *added):
    """Add (prompt, sampling) with their places as seeds; return the turns in this order."""
    keys = [engine.add(prompt, sampling, seed) for seed, (prompt, sampling) in enumerate(added)]
    turns = finished(engine, len(keys))
    return [turns[key] for key in keys]


def of_ids(ids, max_tokens):
    return Prompt(((Text("x", ids), False),), max_tokens)


def counted(engine):
    return np.array([engine.prefilled_tokens, engine.reused_tokens, engine.generated_tokens])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_logprobs_are_the_trainers(codec, policy, temperature):
    # fewer rows than trajectories: rows are reused at other lengths
    engine = TransformersEngine(policy, codec, max_rows=5)
    jobs = [(t, 0) for t in tasks(9, 2)]
    done = list(rollout(engine, MEMAGENT, jobs, Sampling(temperature), in_flight=8))
    turns = [turn for t in done for turn in t.turns]
    assert len(done) == 9 and worst_mismatch(policy, turns, temperature) < 1e-5
    stopped = [turn for turn in turns if turn.finish is Finish.STOP]
    assert all(turn.response_ids[-1] in codec.eos_ids for turn in stopped)


def test_greedy_equals_transformers_generate(codec, policy):
    engine, jobs = TransformersEngine(policy, codec, max_rows=2), [(t, 0) for t in tasks(3, 2)]
    done = list(rollout(engine, MEMAGENT, jobs, Sampling(0.0)))
    for turn in (turn for t in done for turn in t.turns):
        ids = torch.tensor([turn.prompt_ids])
        out = policy.generate(
            ids,
            max_new_tokens=turn.prompt.max_tokens,
            do_sample=False,
            attention_mask=torch.ones_like(ids),
        )
        assert out[0, len(turn.prompt_ids) :].tolist() == turn.response_ids


def test_a_trajectory_does_not_depend_on_what_runs_beside_it(codec, policy):
    def run(jobs, max_rows, seed=3, **kwargs):
        engine = TransformersEngine(policy, codec, max_rows=max_rows)
        return {
            (t.task.id, t.sample): [turn.response_ids for turn in t.turns]
            for t in rollout(engine, MEMAGENT, jobs, seed=seed, **kwargs)
        }

    jobs = [(t, s) for t in tasks(2, 1) for s in range(2)]
    shuffled = random.Random(0).sample(jobs, len(jobs))
    alone = {}
    for job in jobs:
        alone |= run([job], max_rows=1)
    assert run(jobs, max_rows=32) == run(shuffled, max_rows=2, in_flight=3) == alone
    assert len({str(v) for v in alone.values()}) == len(alone)  # samples of one task differ
    assert run(jobs[:1], max_rows=1, seed=4) != run(jobs[:1], max_rows=1)


def test_long_and_short_prompts_side_by_side(codec, policy):
    engine = TransformersEngine(
        policy, codec, max_rows=8, max_cache_tokens=1500, max_prefill_tokens=300
    )
    long = list(worlds.make_tasks(1, 2, 40, "one_fact"))
    jobs = [(t, 0) for t in tasks(3, 1) + long + tasks(2, 2)]
    done = list(rollout(engine, FULL, jobs, in_flight=7))
    assert len(done) == 7 and not any(t.error for t in done)
    assert worst_mismatch(policy, [t.turns[0] for t in done]) < 1e-5
    assert len(list(rollout(engine, BM25, jobs))) == 7


@pytest.mark.parametrize(
    ("layout", "in_flight", "low", "high"),
    [("shared", 64, 0.3, 0.45), ("shared", 3, 0.3, 0.65), ("paper", 64, 0.7, 0.9)],
)
def test_a_group_prefills_what_it_shares_once(codec, policy, layout, in_flight, low, high):
    engine = TransformersEngine(policy, codec)
    jobs = [(t, g) for t in tasks(1 if in_flight < 8 else 3, 4) for g in range(8)]
    agent = tiny.agent(layout=layout)
    done = list(rollout(engine, agent, jobs, in_flight=in_flight))
    turns = [turn for t in done for turn in t.turns]
    assert worst_mismatch(policy, turns) < 1e-5
    prefilled, reused, generated = counted(engine)
    assert prefilled + reused == sum(len(t.prompt_ids) for t in turns)
    assert generated == sum(len(t.response_ids) for t in turns)
    # the share that is left if no prefix is ever computed twice
    fewest = len(build_trie([t.prompt_ids for t in turns])) / (prefilled + reused)
    assert low < fewest < prefilled / (prefilled + reused) < high


def test_the_last_layer_is_computed_where_something_is_sampled(codec, policy, monkeypatch):
    monkeypatch.setattr(hf, "MAX_DRAFT", 0)
    engine = TransformersEngine(policy, codec)
    seen = {name: [] for name in ("first", "last")}
    for name, layer in zip(seen, policy.model.layers, strict=True):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].shape[1])
        )
    done = list(rollout(engine, MEMAGENT, [(t, 0) for t in tasks(5)]))
    prefilled, _, generated = counted(engine)
    # a turn's last token is never read again
    assert sum(seen["first"]) == prefilled + generated - sum(len(t.turns) for t in done)
    # where most of a prompt was copied few tokens are left, and the whole row goes through
    assert generated <= sum(seen["last"]) < 1.1 * generated
    assert not policy.model.layers[-1]._forward_pre_hooks


def test_prompts_of_which_one_token_is_new(codec, policy):
    """Two prompts, each of them twice, and one is a prefix of the other."""
    engine = TransformersEngine(policy, codec)
    turns = []
    for _ in range(2):
        for n in (40, 30, 30):
            engine.add(of_ids([*range(10, 10 + n)], 1))
        turns += [turn for _, turn in engine.step()]
    assert len(turns) == 6 and worst_mismatch(policy, turns) < 1e-5
    assert counted(engine).tolist() == [42, 158, 6]


class Chat(Agent):
    """Hold a conversation that grows: everything so far, then something new."""

    def run(self, task):
        codec = self.codec
        so_far = codec.text(task.document)
        for word in ("Anna", "Boris", "Clara"):
            turn = yield Prompt(((so_far, False), (word, False)), 8, word == "Clara")
            ids = (*codec.encode(so_far), *codec.encode(word), *turn.response.ids)
            so_far = Text(so_far + word + turn.response, ids)


def test_a_growing_chat_is_continued_where_it_ended(codec, policy):
    engine = TransformersEngine(policy, codec)
    (done,) = rollout(engine, Chat(), [(tasks(1)[0], 0)])
    assert worst_mismatch(policy, done.turns) < 1e-5
    first, second, third = done.turns
    for before, after in ((first, second), (second, third)):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
    # the last sampled token was never read, an end-of-sequence id does not stay in the chat
    n_reused = sum(min(len(t.response_ids) - 1, len(t.response.ids)) for t in (first, second))
    assert engine.reused_tokens == len(first.prompt_ids) + len(second.prompt_ids) + n_reused


def test_nothing_of_other_weights_is_reused(codec, policy):
    engine = TransformersEngine(policy, codec)
    jobs = [(t, 0) for t in tasks(4)]

    def reused():
        before = engine.reused_tokens
        turns = [turn for t in rollout(engine, FULL, jobs) for turn in t.turns]
        assert worst_mismatch(policy, turns) < 1e-5
        return engine.reused_tokens - before

    first, again = reused(), reused()  # the second time all four are cached
    assert again > first
    with torch.no_grad():
        policy.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    changed = reused()
    assert changed == first and reused() == again
    with engine.awake(policy):
        assert reused() == first


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(2, 4), min_size=1, max_size=14), st.integers(1, 5)),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([30, 100, 10**6]),
    st.sampled_from([1, 20, 10**6]),
    st.sampled_from([1, 4]),
)
def test_whatever_is_shared_copied_or_thrown_out_the_numbers_are_the_same(
    codec, prompts, rows, cache, prefill, reuse
):
    """Prompts of few tokens that overlap in every way; a third of them arrive later, and again."""
    policy = random_policy(codec)
    engine = TransformersEngine(
        policy, codec, max_rows=rows, max_cache_tokens=cache, max_prefill_tokens=prefill
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.hf.MIN_REUSE", reuse)
        waiting = [*prompts, *prompts[::2]]
        turns, in_flight = [], 0
        while waiting or in_flight:
            for ids, n in waiting[: max(1, len(prompts) * 2 // 3)]:
                engine.add(of_ids(ids, n), Sampling(), seed=len(turns))
                in_flight += 1
            del waiting[: max(1, len(prompts) * 2 // 3)]
            for _ in range(3):
                if in_flight:
                    done = engine.step()
                    in_flight -= len(done)
                    turns += [turn for _, turn in done]
    assert len(turns) == len(prompts) + len(prompts[::2])
    assert worst_mismatch(policy, turns) < 1e-5


def test_a_prompt_past_the_window_ends_its_trajectory_with_a_reason(codec):
    policy, agent = random_policy(codec, window=100), tiny.agent(chunk_tokens=200)
    jobs = [(t, 0) for t in tasks(2, 1) + tasks(2, 9)]
    done = list(rollout(TransformersEngine(policy, codec), agent, jobs))
    failed = [t for t in done if t.error]
    assert len(done) == 4 and len(failed) == 2
    assert all("window of 100" in t.error for t in failed)
    assert all(t.turns[-1].finish is Finish.FULL for t in failed)


def test_the_baselines_never_exceed_the_models_window(codec):
    engine = TransformersEngine(random_policy(codec, window=100), codec)
    for window in (None, 5000, 90):
        for agent in (
            tiny.agent("full", window=window),
            tiny.agent("bm25", window=window, top_k=9),
        ):
            done = list(rollout(engine, agent, [(t, 0) for t in tasks(1, 1) + tasks(1, 9)]))
            assert not any(t.error for t in done)
            sizes = {len(t.turns[0].prompt_ids) + agent.config.final_tokens for t in done}
            assert max(sizes) == min(window or 100, 100)
    short, long = (next(follow(engine, FULL, tasks(1, n)[0], Sampling(0.0))) for n in (1, 9))
    # the tokens that are left out are counted
    assert short.prompt.cut == 0
    assert long.prompt.cut == 9 * 24 - len(codec.encode(long.prompt.section)) > 0


def build(kind: str, **other):
    """Build a random model of another architecture."""
    import transformers

    torch.manual_seed(0)
    config = dict(
        vocab_size=500, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256,
        initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    if kind == "GPT2":
        gpt2 = dict(vocab_size=500, n_positions=256, n_embd=32, n_layer=2, n_head=4)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2))
    made = getattr(transformers, f"{kind}Config")(**config | other)
    return getattr(transformers, f"{kind}ForCausalLM")(made)


GEMMA2_CAPPED = {
    "head_dim": 8, "layer_types": ["full_attention"] * 2, "final_logit_softcapping": 1.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}


@pytest.mark.parametrize(
    ("kind", "other", "reason"),
    [
        ("Granite", {"logits_scaling": 8.0}, "lm_head"),
        ("Cohere", {}, "lm_head"),
        ("Mistral", {"sliding_window": 16}, "full attention"),
        ("Gemma2", {"head_dim": 8}, "full attention"),
        ("Gemma2", GEMMA2_CAPPED, "lm_head"),
        ("XGLM", XGLM, "table"),  # has an attention of its own
        ("GPT2", {}, "GPT2LMHeadModel"),
    ],
)
def test_a_model_that_the_engine_would_compute_wrongly_is_refused(codec, kind, other, reason):
    with pytest.raises(UserError, match=reason):
        TransformersEngine(build(kind, **other), codec)


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("Mistral", {"sliding_window": None}),
        ("Qwen3", {"head_dim": 8}),
        ("Granite", {}),
        ("Llama", {"rope_parameters": DYNAMIC}),
    ],
)
def test_models_that_it_computes_rightly(codec, kind, other):
    policy = build(kind, **other).train()
    engine = TransformersEngine(policy, codec)
    assert policy.training and engine.generated_tokens == 0
    (done,) = rollout(engine, MEMAGENT, [(tasks(1)[0], 0)])
    assert worst_mismatch(policy.eval(), done.turns) < 1e-4
    engine = TransformersEngine(policy.to(torch.bfloat16), codec)  # not refused for its rounding
    assert engine.window == 256


TWO_TABLES = {
    "rope_type": "longrope", "rope_theta": 10000.0,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip


def with_two_tables(original: int = 128):
    """A model of Phi-3.5's kind: one rotary table up to `original` tokens, one beyond."""
    more = {"rope_parameters": dict(TWO_TABLES), "original_max_position_embeddings": original}
    return build("Phi3", sliding_window=None, **more).eval()


def test_one_rotary_table_whatever_is_in_flight(codec, capsys):
    """The window ends where the second table of longrope begins, and all of it is the library's."""
    model = with_two_tables()
    short, long = (
        (Prompt(((words, False),), 12), Sampling(0.0))
        for words in ("Who is Anna?", "Anna is in Lima. " * 20)
    )
    n = len(long[0].ids(codec))
    assert 128 < n + 12 <= 256
    engine = TransformersEngine(model, codec)
    assert engine.window == 128 and "128 tokens, not 256" in capsys.readouterr().err
    (alone,) = answered(engine, short)
    beside, refused = answered(TransformersEngine(model, codec), short, long)
    assert f"a prompt of {n} tokens" in refused.error and not refused.response_ids
    assert beside.response_ids == alone.response_ids
    assert beside.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert worst_mismatch(model, [alone]) < 1e-4
    # a text that ends with the window, and one beyond the first table of a model with a wider one
    last = Prompt(long[0].pieces, 256 - n), Sampling(0.0)
    wide = TransformersEngine(with_two_tables(256), codec)
    assert wide.window == 256
    assert worst_mismatch(wide.model, answered(wide, last, short)) < 1e-4


def test_a_table_that_follows_the_largest_position_of_a_pass_is_refused(codec):
    """As in the code of a hub's model, which says nothing of it in its config."""
    model = build("Llama")
    table = model.model.rotary_emb
    forward = table.forward

    def by_the_pass(x, position_ids):
        return forward(x, position_ids / (4 if position_ids.max() >= 128 else 1))

    TransformersEngine(model, codec)
    table.forward = by_the_pass
    with pytest.raises(UserError, match="one rotary table"):
        TransformersEngine(model, codec)


@pytest.mark.parametrize("layered", [False, True])
def test_every_type_of_rotary_table_has_a_window(layered):
    """Most have one table; dynamic has a second beyond the window alone, and vLLM has another."""

    def config(rope_type, **more):
        rope = {"rope_type": rope_type, "rope_theta": 1e4, **more}
        ropes = {"full_attention": rope} if layered else rope
        return SimpleNamespace(
            model_type=f"{rope_type}{layered}", max_position_embeddings=256, rope_parameters=ropes
        )

    for kind in ("default", "linear", "yarn", "llama3", "proportional"):
        one = config(kind, original_max_position_embeddings=64)
        assert longest_context(one) == window_for_vllm(one) == 256
    assert longest_context(config("longrope", original_max_position_embeddings=64)) == 64
    assert longest_context(config("longrope", original_max_position_embeddings=512)) == 256
    assert longest_context(config("dynamic", factor=4.0)) == 256
    with pytest.raises(UserError, match="--engine transformers"):
        window_for_vllm(config("dynamic", factor=4.0))
    assert longest_context(SimpleNamespace()) == 0


def test_draw_follows_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)
    ones = torch.ones(4000)
    uniform = torch.from_numpy(uniforms(np.arange(4000, dtype=np.uint64), np.zeros(4000, int)))

    def shares(temperature=1.0, top_p=1.0):
        ids, logp = draw(logits, ones * temperature, ones * top_p, uniform)
        assert torch.isfinite(logp).all()
        p = {i: logp[ids == i][0].exp().item() for i in ids.unique().tolist()}
        return (ids.bincount(minlength=4) / 4000).tolist(), p

    share, p = shares()
    assert share == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert p[3] == pytest.approx(0.05, abs=1e-5)
    share, p = shares(top_p=0.7)
    assert share == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert p[0] == pytest.approx(0.625, abs=1e-5)
    assert shares(top_p=0.49)[0] == [1, 0, 0, 0]  # the smallest set that reaches 0.49
    share, p = shares(temperature=0)
    assert share == [1, 0, 0, 0] and p[0] == pytest.approx(0.5, abs=1e-5)
    assert shares(temperature=0.5)[0] == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)


def test_uniform_is_uniform_and_a_function_of_its_arguments():
    seeds, position = np.arange(10000, dtype=np.uint64), np.zeros(10000, int)
    u = uniforms(seeds, position)
    assert (u == uniforms(seeds, position)).all() and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.02 and abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(u, uniforms(seeds, position + 1))[0, 1]) < 0.05


def test_the_engine_refuses_weights_that_are_not_its_own(codec, policy):
    engine = TransformersEngine(policy, codec)
    with engine.awake(policy), pytest.raises(UserError):
        engine.awake(torch.nn.Linear(1, 1))


# ---------------------------------------------------------------- drafts


def test_a_draft_is_what_followed_the_latest_tokens_in_the_prompt():
    def draft(ids, out, most, max_tokens=50):
        return hf._Request(1, Prompt((), max_tokens), ids, Sampling(), 0, out=out).draft(most)

    again = [5, 6, 7, 8, 9, 6, 3, 4]
    assert draft(again, [5], 3) == [6, 7, 8]
    assert draft(again, [6], 3) == [3, 4]  # after its last occurrence, to the end of the prompt
    assert draft(again, [5, 6], 3) == [7, 8, 9]  # two tokens are preferred to one
    assert draft(again, [1, 6], 3) == [3, 4]
    assert draft(again, [1, 2], 3) == [] == draft(again, [4], 3) == draft(again, [5], 0)
    # of max_tokens one is sampled already, and one is sampled after the draft
    assert [len(draft([5, 6, 7, 8], [5], 3, n)) for n in (1, 2, 3, 4)] == [0, 0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_drafts_change_the_number_of_passes_and_not_what_is_said(monkeypatch, temperature):
    """The embedded policy has learnt to copy its memory."""
    policy, codec = load_model(EMBEDDED, device="cpu"), Codec.load(EMBEDDED)
    jobs = [(t, 0) for t in tasks(3, 6)]

    def read(max_draft):
        monkeypatch.setattr(hf, "MAX_DRAFT", max_draft)
        engine, passes = TransformersEngine(policy, codec), []
        run = engine._run
        monkeypatch.setattr(engine, "_run", lambda parts: passes.append(1) or run(parts))
        done = rollout(engine, MEMAGENT, jobs, Sampling(temperature))
        turns = [turn for t in sorted(done, key=lambda t: t.task.id) for turn in t.turns]
        assert engine.generated_tokens == sum(len(turn.response_ids) for turn in turns)
        return turns, len(passes)

    (plain, slow), (drafted, fast) = read(0), read(4)
    for one, other in zip(plain, drafted, strict=True):
        assert (one.response_ids, one.finish) == (other.response_ids, other.finish)
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-4)
    assert fast < 0.75 * slow, (fast, slow)


def test_a_response_ends_where_its_draft_would_go_on(codec, policy, monkeypatch):
    """The end-of-sequence id is drawn, or the limit reached, before the end of the draft.

    The guesses behind it leave nothing.
    """
    engine = TransformersEngine(policy, codec)
    eos = next(iter(codec.eos_ids))

    def draft(self, most):
        return [7, eos, 9, 9][: self.prompt.max_tokens - len(self.out) - 1]

    def draw(logits, *_):
        drawn = [8] if len(logits) == 1 else [7, eos, 9, 9, 9]
        return torch.tensor(drawn[: len(logits)]), torch.zeros(len(logits))

    def respond(max_tokens):
        return answered(engine, (of_ids(range(10, 20), max_tokens), Sampling()))[0]

    monkeypatch.setattr(hf._Request, "draft", draft)
    monkeypatch.setattr(hf, "draw", draw)
    turn = respond(12)
    assert turn.response_ids == [8, 7, eos] and turn.finish == "stop"
    assert engine._cached[0] == [*range(10, 20), 8, 7]
    turn = respond(2)
    assert turn.response_ids == [8, 8] and turn.finish == "length"


@pytest.mark.parametrize(
    ("dtype", "apart"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
@pytest.mark.parametrize(
    ("kv_heads", "in_cache"), [(1, 1 << 20), (2, 1 << 20), (4, 500), (2, 1)], ids=str
)  # rows of the cache at a time: all, two, one
@pytest.mark.parametrize("causal", [False, True])
def test_few_queries_see_what_the_librarys_attention_sees(
    kv_heads, causal, in_cache, dtype, apart, monkeypatch
):
    monkeypatch.setattr(attention, "IN_CACHE", in_cache)
    torch.manual_seed(0)
    n_keys = 5 if causal else 11
    query = torch.randn(3, 4, 5, 8).to(dtype).requires_grad_()
    # a part of every row of the cache
    key, value = torch.randn(2, 3, kv_heads, 20, 8).to(dtype)[:, :, :, :n_keys].requires_grad_()
    mask = None
    if not causal:
        mask = additive_mask(torch.rand(3, 1, 5, n_keys) > 0.3, dtype)
        mask[..., 0] = 0
    exact = None if mask is None else mask.float()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), exact, is_causal=causal, scale=0.3,
        enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    ours = sdpa(query, key, value, mask, 0.3)
    assert ours.dtype == dtype
    gradients = [
        torch.autograd.grad(out.float().square().sum(), (query, key, value))
        for out in (ours, expected)
    ]
    for a, b in zip((ours, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (a.float() - b.float()).norm() <= apart * b.float().norm()


@pytest.mark.parametrize("most", [0, 1024], ids=["library", "products"])
@pytest.mark.parametrize("depths", [None, [0, 4, 30]])
def test_blocks_of_queries_leave_out_what_they_do_not_see(depths, most, monkeypatch):
    """Three rows of 20, 17 and 9 queries behind `depths` tokens; None: 20 each, causal."""
    monkeypatch.setattr(attention, "AT_ONCE", 4)
    monkeypatch.setattr(attention, "BY_PRODUCTS", {torch.float32: most})
    seen = []
    for name in ("_by_products", "_by_library"):
        attend = getattr(attention, name)
        monkeypatch.setattr(
            attention, name,
            lambda *args, attend=attend: seen.append((args[0], args[1])) or attend(*args),
        )  # fmt: skip
    torch.manual_seed(0)
    sizes = [20, 17, 9] if depths else [20] * 3
    n_keys = max(d + n for d, n in zip(depths or [0] * 3, sizes, strict=True))
    query = torch.randn(3, 4, 20, 8).requires_grad_()
    key, value = torch.randn(2, 3, 2, n_keys, 8).requires_grad_()
    mask = None
    if depths:
        position = torch.tensor(depths)[:, None] + torch.arange(20).minimum(
            torch.tensor(sizes)[:, None] - 1
        )
        mask = additive_mask(torch.arange(n_keys) <= position[..., None], torch.float32)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    ours = sdpa(query, key, value, mask, 0.3)
    assert torch.allclose(ours, expected, atol=1e-6)
    found, wanted = (
        torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (ours, expected)
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
    shapes = [(q.shape[2], k.shape[2]) for q, k in seen]
    if most and depths:  # the third row's last query is its ninth
        assert shapes == [(4, 34), (4, 38), (4, 39), (4, 39), (4, 39)]
    elif most:
        assert shapes == [(4, 4), (4, 8), (4, 12), (4, 16), (4, 20)]
    elif depths:
        assert shapes == [(8, 38), (8, 39), (4, 39)]
    else:  # the library's causal kernel leaves them out by itself
        assert shapes == [(20, 20)]


# ---------------------------------------------------------------- texts that are read again


SHORT = tiny.agent(memory_tokens=6, final_tokens=6)


def read_again(codec, policy, questions, n_sections=3, **room):
    """Read one document once per question; return the engine, and turns by question."""
    engine, reader = TransformersEngine(policy, codec, max_rows=4, **room), SHORT
    (task,) = tasks(1, n_sections)
    done = []
    for question in questions:
        asked = replace(task, question=question)
        done.append([*follow(engine, reader, asked, Sampling(0.0))])
    return engine, done


def responses(done):
    return [[turn.response_ids for turn in turns] for turns in done]


def test_a_second_question_computes_no_section_again(codec, policy):
    questions = ["Where is Anna?", "Where is Boris?", "Where is Anna?"]
    room = {"remember": True, "max_cache_tokens": 4096}
    engine, done = read_again(codec, policy, questions, **room)
    _, fresh = read_again(codec, policy, questions)
    assert responses(done) == responses(fresh)
    assert worst_mismatch(policy, [turn for turns in done for turn in turns]) < 1e-5
    for turns in done[1:]:
        for turn in turns[:-1]:  # template and section at least, which stand before the question
            assert turn.reused_tokens >= len(codec.encode(turn.prompt.section))
    counts = [sum(turn.reused_tokens for turn in turns) for turns in fresh]
    assert sum(turn.reused_tokens for turn in done[1]) > 2 * counts[1]
    assert engine.reused_tokens == sum(t.reused_tokens for turns in done for t in turns)


def test_questions_about_one_text_take_no_more_rows_than_one_does(codec, policy):
    used = []
    for n in (1, 3):
        questions = [f"Where is {name}?" for name in ("Anna", "Boris", "Clara")]
        engine, _ = read_again(
            codec, policy, questions[:n], remember=True, max_cache_tokens=1 << 16
        )
        used.append(sum(bool(ids) for ids in engine._cached))
    assert used[0] == 4 and used[1] <= used[0] + 3  # the final prompts differ
    room = {"remember": True, "max_cache_tokens": 400}  # what is remembered stays within it
    engine, done = read_again(codec, policy, ["Where is Anna?"] * 2, 8, **room)
    _, fresh = read_again(codec, policy, ["Where is Anna?"], 8)
    assert responses(done) == responses(fresh) * 2
    assert engine._cache.rows * engine._cache.width <= 400 and engine._cache.rows > 4


@pytest.mark.parametrize("remember", [False, True])
def test_a_prompt_that_is_dropped_frees_its_row_and_changes_no_other(codec, policy, remember):
    engine = TransformersEngine(policy, codec, max_rows=2, remember=remember)
    prompts = [next(tiny.agent("full").on(codec).run(task)) for task in tasks(5)]
    keys = [engine.add(prompt, Sampling(1.0), k) for k, prompt in enumerate(prompts)]
    wanted, alone = {}, TransformersEngine(policy, codec)
    for k, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        alone.add(prompt, Sampling(1.0), k)
        ((_, turn),) = finished(alone, 1).items()
        wanted[key] = turn.response_ids
    done = dict(engine.step())
    in_flight = next(r.key for r in engine._requests if r is not None)
    engine.drop(in_flight)
    engine.drop(keys[-1])  # which waits
    engine.drop(10**6)  # which nobody knows
    done |= finished(engine, 3 - len(done))
    assert {*done} == {*keys} - {in_flight, keys[-1]}
    assert all(turn.response_ids == wanted[key] for key, turn in done.items())
    assert len(engine._free) == len(engine._requests) and not engine.step()
