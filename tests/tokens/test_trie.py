"""The trie against one sequence at a time: shared tokens once, the same states and gradients."""

import random
from itertools import chain
from math import prod

import pytest
import torch
from conftest import latent_policy, random_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from tokens.attention import block_mask, hidden_states
from tokens.trie import Cost, build_trie, make_buckets, split_into_tries

token = st.integers(2, 4)  # few, so that much is shared
sequences = st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=8)


def ancestors(trie):
    """Which places [T, T] every place sees, by the chain of its parents."""
    seen = torch.eye(len(trie), dtype=torch.bool)
    for place, above in enumerate(trie.parent().tolist()):
        if above >= 0:
            seen[place] |= seen[above]
    return seen


@given(sequences)
def test_every_prefix_is_in_the_trie_once_and_every_sequence_finds_its_tokens(rows):
    trie = build_trie(rows)
    assert len(trie) == len({tuple(row[: k + 1]) for row in rows for k in range(len(row))})
    seen, k, end = ancestors(trie), torch.arange(len(trie)), torch.from_numpy(trie.end())
    assert torch.equal(seen, (k <= k[:, None]) & (k[:, None] < end))
    for i, row in enumerate(rows):
        places = trie.places(i)
        assert trie.ids[places].tolist() == row
        assert trie.depth()[places].tolist() == [*range(len(row))]
        assert seen[places[-1]].nonzero().flatten().tolist() == places.tolist()


@given(sequences, st.integers(1, 40))
def test_split_keeps_to_its_budget(rows, budget):
    seen = []
    for index, trie in split_into_tries(rows, budget):
        seen += index
        assert len(trie) <= budget or len(index) == 1
        assert len(trie) == len(build_trie([rows[i] for i in index]))
        assert [trie.ids[trie.places(k)].tolist() for k in range(len(index))] == [
            rows[i] for i in index
        ]
    assert sorted(seen) == [*range(len(rows))]


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [(230, [4] * 5), (300, [8, 8, 4]), (110, [2] * 10)],  # the last: a group does not fit
)
def test_split_cuts_between_groups_and_not_within(budget, sizes):
    rows = [
        [*range(100 * g, 100 * g + 60), 5, k, *range(20)] for g in range(5) for k in range(4)
    ]  # 61 + 4 * 21 tokens a group
    groups = [sorted(index) for index, _ in split_into_tries(rows, budget)]
    assert [*map(len, groups)] == sizes and [*chain(*groups)] == [*range(20)]


def some_rows(n, seed):
    """Rows of a few hundred tokens that branch again and again."""
    rng = random.Random(seed)
    some = lambda most: [rng.randrange(2, 99) for _ in range(rng.randrange(1, most))]  # noqa: E731
    rows = [some(300)]
    for _ in range(n - 1):
        above = rng.choice(rows)
        rows.append(above[: rng.randrange(len(above) + 1)] + some(200))
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_buckets_hold_every_segment_once_and_pad_no_more_than_it_pays(seed):
    segments = build_trie(some_rows(12, seed)).segments
    found = []  # per cost of a call: tokens of padding, buckets
    for call in (0.0, 1e4, 1e9):
        buckets, wasted = make_buckets(segments, Cost(1.0, 1.0, call)), 0
        assert sorted(i for b in buckets for i in b.segments) == [*range(len(segments))]
        for bucket in buckets:
            members = [segments[i] for i in bucket.segments]
            # segments with ancestors and without do not mix: the latter are causal
            assert {s.depth > 0 for s in members} == {bucket.has_ancestors}
            shape = max(map(len, members)), max(s.depth + len(s) for s in members)
            assert (bucket.n_queries, bucket.n_keys) == shape
            padded = sum(prod(shape) - len(s) * (s.depth + len(s)) for s in members)
            assert padded <= call * len(members)
            wasted += padded
        found.append((wasted, len(buckets)))
    (none, most), (some, fewer), (much, few) = found
    assert none == 0 and some <= much and most > fewer >= few <= 2


@pytest.mark.parametrize("seed", range(4))
def test_the_block_mask_of_a_gpu_is_the_tries(seed):
    trie = build_trie(some_rows(8, seed))
    mask, size = block_mask(trie.end(), torch.device("cpu")), len(trie) + -len(trie) % 512
    assert mask.seq_lengths == (size, size)
    dense = torch.eye(size, dtype=torch.bool)  # an appended token sees itself alone
    dense[: len(trie), : len(trie)] = ancestors(trie)
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


# ---------------------------------------------------------------- through a model


def probe(states, width):
    """A number that depends on every state."""
    weights = torch.randn(2048, width, generator=torch.Generator().manual_seed(0))
    return sum((h * weights[: len(h)]).sum() for h in states)


def gradient(policy, value):
    policy.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def compare_with_one_at_a_time(policy, rows, call, checkpointing=False):
    trie, width = build_trie(rows), policy.config.hidden_size
    alone = [policy.model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows]
    expected = gradient(policy, probe(alone, width))
    if checkpointing:
        policy.train().gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    hidden = hidden_states(policy, trie, Cost(1.0, 1.0, call))
    assert hidden.shape == (len(trie), width)
    ours = [hidden[trie.places(i)] for i in range(len(rows))]
    for states, right in zip(ours, alone, strict=True):
        assert torch.allclose(states, right, atol=1e-5)
    assert (gradient(policy, probe(ours, width)) - expected).norm() <= 1e-5 * expected.norm()


@settings(max_examples=15)
@given(
    rows=sequences,
    call=st.sampled_from([0.0, 30.0, 1e9]),  # a bucket each, some, few
    checkpointing=st.booleans(),
    make=st.sampled_from([random_policy, latent_policy]),
)
def test_hidden_states_and_gradients_are_those_of_one_sequence_at_a_time(
    codec, rows, call, checkpointing, make
):
    compare_with_one_at_a_time(make(codec), rows, call, checkpointing)


@pytest.mark.parametrize("call", [0.0, 1e9])
@pytest.mark.parametrize(
    ("make", "n_shared", "n_own"),
    [(random_policy, 0, 300), (latent_policy, 200, 130), (random_policy, 7, 1100)],
)
def test_long_segments(codec, make, n_shared, n_own, call):
    rng = random.Random(0)
    first, *own = (
        [rng.randrange(2, 99) for _ in range(n)] for n in (n_shared, n_own, n_own, n_own + 9)
    )
    compare_with_one_at_a_time(make(codec), [first + rest for rest in own], call)


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
