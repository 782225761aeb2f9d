"""The trie against one sequence at a time: the same states and gradients.

Every shared token is computed once.
"""

import random
from math import prod

import numpy as np
import pytest
import torch
from conftest import latent_policy, random_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from tokens.attention import TrieAttention, block_mask, dense_mask, hidden_states
from tokens.trie import (
    AT_ONCE,
    Cost,
    build_trie,
    cheapest_trie,
    common_prefix,
    make_buckets,
    split_into_tries,
)

token = st.integers(2, 4)  # few, so that much is shared
sequences = st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=8)


def prefixes(rows):
    """All prefixes of all sequences: the tokens of their trie."""
    return {tuple(row[: k + 1]) for row in rows for k in range(len(row))}


@given(sequences)
def test_every_prefix_is_in_the_trie_once_and_every_sequence_finds_its_tokens(rows):
    trie = build_trie(rows)
    assert len(trie) == len(prefixes(rows))
    depth, end = trie.depth(), trie.end()
    for i, row in enumerate(rows):
        places = trie.places(i)
        assert trie.ids[places].tolist() == row and depth[places].tolist() == list(range(len(row)))
        last = places[-1]
        ancestors = [k for k in range(len(trie)) if k <= last < end[k]]
        assert ancestors == places.tolist()


@given(sequences, st.integers(1, 30))
def test_a_run_is_shared_where_it_pays_and_nothing_is_lost(rows, min_saved):
    trie = build_trie(rows, min_saved)
    assert len(prefixes(rows)) <= len(trie) <= sum(map(len, rows))
    for i, row in enumerate(rows):
        assert trie.ids[trie.places(i)].tolist() == row
    assert len(build_trie(rows, 10**9)) == sum(map(len, rows))


@given(sequences, st.integers(1, 40))
def test_split_keeps_to_its_budget(rows, budget):
    seen = []
    for index, trie in split_into_tries(rows, budget):
        seen += index
        assert len(trie) <= budget or len(index) == 1
        for k, i in enumerate(index):
            assert trie.ids[trie.places(k)].tolist() == rows[i]
    assert sorted(seen) == list(range(len(rows)))


def test_split_cuts_between_groups_and_not_within():
    groups = [
        [[*range(100 * g, 100 * g + 60), 5, k, *range(20)] for k in range(4)] for g in range(5)
    ]  # 61 + 4 * 21 tokens each
    rows = [row for group in groups for row in group]
    tries = list(split_into_tries(rows, 230))
    assert [len(trie) for _, trie in tries] == [145] * 5
    members = [[4 * g + k for k in range(4)] for g in range(5)]
    assert [sorted(index) for index, _ in tries] == members
    assert [len(trie) for _, trie in split_into_tries(rows, 300)] == [290, 290, 145]
    # a group that does not fit is cut after all
    assert [len(index) for index, _ in split_into_tries(rows, 110)] == [2] * 10


@given(st.lists(token, max_size=9), st.lists(token, max_size=9))
def test_common_prefix(a, b):
    assert common_prefix(a, b) == next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_the_cost_of_a_trie_decides_how_much_is_shared():
    rows = [[*range(2, 60), 100 + k] for k in range(8)]
    assert len(cheapest_trie(rows, Cost(1.0, 0.0, 1.0))) == 58 + 8
    # sharing two tokens costs a call of its own: not worth it where calls are expensive
    rows = [[2, 3, *range(100 * k, 100 * k + 60)] for k in range(1, 9)]
    assert len(cheapest_trie(rows, Cost(1.0, 0.01, 100.0))) == 8 * 62
    assert len(cheapest_trie(rows, Cost(10.0, 0.01, 100.0))) == 2 + 8 * 60


def test_pairs_that_no_query_sees_are_not_paid_for():
    cost = Cost(0.0, 1.0, 0.0)
    for n_shared, n_own in ((0, 100), (0, 1000), (50, 700)):
        rows = [[*range(n_shared), *range(5000, 5000 + n_own)]]
        rows += [[*range(n_shared), *range(9000, 9000 + n_own)]] if n_shared else []
        trie = build_trie(rows)
        seen = int(dense_mask(trie).sum())
        assert seen <= cost.by_buckets(trie) <= seen + len(trie) * AT_ONCE


def some_rows(n, seed):
    """Rows of a few hundred tokens that branch again and again."""
    rng = random.Random(seed)
    rows = [[rng.randrange(2, 99) for _ in range(rng.randrange(1, 300))]]
    for _ in range(n - 1):
        above = rng.choice(rows)
        rows.append(
            above[: rng.randrange(len(above) + 1)]
            + [rng.randrange(2, 99) for _ in range(rng.randrange(1, 200))]
        )
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_buckets_hold_every_segment_once_and_pad_no_more_than_it_pays(seed):
    segments = build_trie(some_rows(12, seed)).segments
    pads = []
    for call in (0.0, 1e4, 1e9):
        buckets = make_buckets(segments, Cost(1.0, 1.0, call))
        assert sorted(i for b in buckets for i in b.segments) == list(range(len(segments)))
        pads.append(0)
        for bucket in buckets:
            members = [segments[i] for i in bucket.segments]
            # segments with ancestors and without do not mix: the latter are causal
            assert {s.depth > 0 for s in members} == {bucket.has_ancestors}
            shape = max(map(len, members)), max(s.depth + len(s) for s in members)
            assert (bucket.n_queries, bucket.n_keys) == shape
            pads[-1] += sum(prod(shape) - len(s) * (s.depth + len(s)) for s in members)
    assert pads[0] <= pads[1] <= pads[2] and pads[0] < pads[2]


@pytest.mark.parametrize("seed", range(4))
def test_the_block_mask_of_a_gpu_is_the_dense_mask(seed):
    trie = build_trie(some_rows(8, seed))
    mask, size = block_mask(trie.end(), torch.device("cpu")), len(trie) + -len(trie) % 512
    assert mask.seq_lengths == (size, size)
    dense = torch.eye(size, dtype=torch.bool)  # an appended token sees itself alone
    dense[: len(trie), : len(trie)] = dense_mask(trie)[0, 0]
    at = torch.arange(size)
    assert torch.equal(mask.mask_mod(0, 0, at[:, None], at), dense)
    by_block = dense.view(size // 128, 128, size // 128, 128)
    n_partial, partial = mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0]
    n_full, full = mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0]
    for q in range(size // 128):
        unmasked, masked = set(full[q, : n_full[q]].tolist()), partial[q, : n_partial[q]].tolist()
        # the kernel applies no mask to full blocks
        assert unmasked == {k for k in range(q) if by_block[q, :, k].all()}
        visible = {k for k in range(size // 128) if by_block[q, :, k].any()}
        assert visible <= {*unmasked, *masked} and not unmasked & {*masked}


COSTS = {
    "one bucket each": Cost(1.0, 1.0, 0.0),
    "few buckets": Cost(1.0, 1e-9, 1.0),
    "a dense mask": Cost(1.0, 0.0, 1e9),
}


def probe(states, width):
    """A number that depends on every state."""
    weights = torch.randn(2048, width, generator=torch.Generator().manual_seed(0))
    return sum((h * weights[: len(h)]).sum() for h in states)


def gradient(policy, value):
    policy.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@settings(max_examples=15)
@given(
    rows=sequences,
    min_saved=st.sampled_from([1, 5, 10**9]),
    cost=st.sampled_from(sorted(COSTS)),
    checkpointing=st.booleans(),
    at_once=st.sampled_from([2, 5, AT_ONCE]),
    most=st.sampled_from([0, 4, 1024]),
    make=st.sampled_from([random_policy, latent_policy]),
)
def test_hidden_states_and_gradients_are_those_of_one_sequence_at_a_time(
    codec, rows, min_saved, cost, checkpointing, at_once, most, make
):
    with pytest.MonkeyPatch.context() as patch:  # blocks so small that short rows have several
        patch.setattr("tokens.attention.AT_ONCE", at_once)
        for name in ("BY_PRODUCTS", "ONE_BY_ONE"):
            patch.setattr(f"tokens.attention.{name}", {torch.float32: most})
        compare_with_one_at_a_time(make(codec), rows, min_saved, cost, checkpointing)


def compare_with_one_at_a_time(policy, rows, min_saved, cost, checkpointing):
    trie = build_trie(rows, min_saved)
    alone = [policy.model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows]
    expected = gradient(policy, probe(alone, policy.config.hidden_size))
    if checkpointing:
        policy.train().gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    hidden = hidden_states(policy, trie, COSTS[cost])
    assert hidden.shape == (len(trie), policy.config.hidden_size)
    for i, states in enumerate(alone):
        assert torch.allclose(hidden[trie.places(i)], states, atol=1e-5)
    ours = [hidden[trie.places(i)] for i in range(len(rows))]
    ours = gradient(policy, probe(ours, policy.config.hidden_size))
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("cost", sorted(COSTS))
@pytest.mark.parametrize(("n_shared", "n_own"), [(0, 300), (200, 130), (7, 1100)])
def test_segments_of_several_blocks(codec, cost, n_shared, n_own):
    rng = random.Random(0)

    def some(n):
        return [rng.randrange(2, 99) for _ in range(n)]

    first = some(n_shared)
    rows = [first + some(n_own + k) for k in (0, 0, 9)]
    make = latent_policy if n_shared == 200 else random_policy
    compare_with_one_at_a_time(make(codec), rows, 1, cost, False)


def test_a_segment_alone_sees_all_its_ancestors_side_by_side_or_apart(codec):
    """A chain of first children, whose ancestors lie side by side, and later children."""
    rows = [[2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 8], [2, 3, 9, 9, 7], [2, 3, 9, 5, 5, 5], [2, 6]]
    policy, trie = random_policy(codec), build_trie(rows)
    attend = TrieAttention(trie, COSTS["one bucket each"], torch.device("cpu"))
    widths = [[part.stop - part.start for part in path] for path in attend.paths]
    assert [4, 2] in widths and [2, 1, 3] in widths
    hidden = hidden_states(policy, trie, COSTS["one bucket each"])
    for i, row in enumerate(rows):
        alone = policy.model(input_ids=torch.tensor([row])).last_hidden_state[0]
        assert torch.allclose(hidden[trie.places(i)], alone, atol=1e-5)


@pytest.mark.parametrize(("make", "depth"), [(random_policy, 8), (latent_policy, 16)])
@torch.no_grad()
def test_the_row_of_a_gpu_gives_the_same_states(codec, monkeypatch, make, depth):
    """FlexAttention uncompiled, on the CPU.

    That is all of the GPU's path but the compiled kernel and its backward pass.
    """
    from torch.nn.attention.flex_attention import flex_attention

    policy, trie = make(codec), build_trie(rows := some_rows(5, 0))
    shapes = []
    monkeypatch.setattr("tokens.attention.takes_flex", lambda device: True)
    monkeypatch.setattr(
        "tokens.attention._flex",
        lambda: lambda *args, **kw: shapes.append(args[0].shape) or flex_attention(*args, **kw),
    )
    hidden = hidden_states(policy, trie)
    assert shapes == [(1, 4, len(trie) + -len(trie) % 512, depth)] * 2  # one call a layer
    assert hidden.shape == (len(trie), 32)
    for i, row in enumerate(rows):
        alone = policy.model(input_ids=torch.tensor([row])).last_hidden_state[0]
        assert torch.allclose(hidden[trie.places(i)], alone, atol=1e-5)


@given(sequences)
def test_the_mask_of_a_token_is_its_ancestors_and_itself(rows):
    trie = build_trie(rows)
    mask = dense_mask(trie)[0, 0]
    parent = trie.parent()
    for q in range(len(trie)):
        path, k = set(), q
        while k >= 0:
            path.add(k)
            k = parent[k]
        assert set(np.flatnonzero(mask[q].numpy())) == path
