"""The trie against one sequence at a time: the same hidden states and gradients, every shared token computed once."""

import random

import numpy as np
import pytest
import torch
from conftest import random_policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokens.attention import block_mask, buckets, dense_mask, hidden_states
from tokens.trie import Cost, build, cheapest, common, split

token = st.integers(2, 4)  # few, so that much is shared
sequences = st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=8)


def prefixes(rows):
    """All prefixes of all sequences: the tokens of their trie."""
    return {tuple(row[: k + 1]) for row in rows for k in range(len(row))}


@given(sequences)
def test_every_prefix_stands_in_the_trie_once_and_every_sequence_finds_its_tokens(rows):
    trie = build(rows)
    assert len(trie) == len(prefixes(rows))
    depth, end = trie.depth(), trie.end()
    for i, row in enumerate(rows):
        places = trie.places(i)
        assert trie.ids[places].tolist() == row and depth[places].tolist() == list(range(len(row)))
        last = places[-1]
        ancestors = [k for k in range(len(trie)) if k <= last < end[k]]
        assert ancestors == places.tolist()


@given(sequences, st.integers(1, 30))
def test_a_run_is_shared_where_it_pays_and_nothing_is_lost(rows, least):
    trie = build(rows, least)
    assert len(prefixes(rows)) <= len(trie) <= sum(map(len, rows))
    for i, row in enumerate(rows):
        assert trie.ids[trie.places(i)].tolist() == row
    assert len(build(rows, 10**9)) == sum(map(len, rows))


@given(sequences, st.integers(1, 40))
def test_split_keeps_to_its_budget(rows, budget):
    seen = []
    for chosen, trie in split(rows, budget):
        seen += chosen
        assert len(trie) <= budget or len(chosen) == 1
        for k, i in enumerate(chosen):
            assert trie.ids[trie.places(k)].tolist() == rows[i]
    assert sorted(seen) == list(range(len(rows)))


def test_split_cuts_between_groups_and_not_within():
    groups = [
        [[*range(100 * g, 100 * g + 60), 5, k, *range(20)] for k in range(4)] for g in range(5)
    ]  # 61 + 4 * 21 tokens each
    rows = [row for group in groups for row in group]
    found = list(split(rows, 230))
    assert [len(trie) for _, trie in found] == [145] * 5
    assert [sorted(chosen) for chosen, _ in found] == [
        [4 * g + k for k in range(4)] for g in range(5)
    ]
    assert [len(trie) for _, trie in split(rows, 300)] == [290, 290, 145]
    assert [len(chosen) for chosen, _ in split(rows, 110)] == [
        2
    ] * 10  # a group that does not fit is cut after all


@given(st.lists(token, max_size=9), st.lists(token, max_size=9))
def test_common_prefix(a, b):
    assert common(a, b) == next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_the_cost_of_a_trie_decides_how_much_is_shared():
    rows = [[*range(2, 60), 100 + k] for k in range(8)]
    assert len(cheapest(rows, Cost(1.0, 0.0, 1.0))) == 58 + 8
    # two tokens shared cost all others the causal kernel: not worth it where pairs are dear
    rows = [[2, 3, *range(100 * k, 100 * k + 60)] for k in range(1, 9)]
    assert (
        len(cheapest(rows, Cost(1.0, 1.0, 1.0))) == 8 * 62
        and len(cheapest(rows, Cost(10000.0, 1.0, 1.0))) == 2 + 8 * 60
    )


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
    segments = build(some_rows(12, seed)).segments
    pads = []
    for call in (0.0, 1e4, 1e9):
        found = buckets(segments, Cost(1.0, 1.0, call))
        assert sorted(i for bucket in found for i in bucket) == list(range(len(segments)))
        pads.append(0)
        for bucket in found:
            some = [segments[i] for i in bucket]
            assert (
                len({s.depth > 0 for s in some}) == 1
            )  # with something above and without do not mix: one of them is causal
            length, wide = max(map(len, some)), max(s.depth + len(s) for s in some)
            pads[-1] += sum(length * wide - len(s) * (s.depth + len(s)) for s in some)
    assert pads[0] <= pads[1] <= pads[2] and pads[0] < pads[2]


@pytest.mark.parametrize("seed", range(4))
def test_the_block_mask_of_a_gpu_is_the_same_mask(seed):
    trie = build(some_rows(8, seed))
    mask, size = block_mask(trie.end(), torch.device("cpu")), len(trie) + -len(trie) % 512
    assert mask.seq_lengths == (size, size)
    dense = torch.eye(size, dtype=torch.bool)  # what is appended sees itself alone
    dense[: len(trie), : len(trie)] = dense_mask(trie)[0, 0]
    at = torch.arange(size)
    assert torch.equal(mask.mask_mod(0, 0, at[:, None], at), dense)
    by_block = dense.view(size // 128, 128, size // 128, 128)
    n_some, some, n_full, full = (
        x[0, 0]
        for x in (
            mask.kv_num_blocks,
            mask.kv_indices,
            mask.full_kv_num_blocks,
            mask.full_kv_indices,
        )
    )
    for q in range(size // 128):
        whole, part = full[q, : n_full[q]].tolist(), some[q, : n_some[q]].tolist()
        assert set(whole) == {
            k for k in range(q) if by_block[q, :, k].all()
        }  # the kernel asks no mask there
        assert {k for k in range(size // 128) if by_block[q, :, k].any()} <= {
            *whole,
            *part,
        } and not {*whole} & {*part}


COSTS = {
    "one bucket each": Cost(1.0, 1.0, 0.0),
    "few buckets": Cost(1.0, 1e-9, 1.0),
    "a dense mask": Cost(1.0, 0.0, 1e9),
}


def probe(states, width):
    """A number that depends on every state."""
    weights = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    return sum((h * weights[: len(h)]).sum() for h in states)


def gradient(policy, value):
    policy.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=sequences,
    least=st.sampled_from([1, 5, 10**9]),
    cost=st.sampled_from(sorted(COSTS)),
    checkpointing=st.booleans(),
)
def test_hidden_states_and_gradients_are_those_of_one_sequence_at_a_time(
    codec, rows, least, cost, checkpointing
):
    policy = random_policy(codec)
    trie = build(rows, least)
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
    ours = gradient(
        policy, probe([hidden[trie.places(i)] for i in range(len(rows))], policy.config.hidden_size)
    )
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_the_row_of_a_gpu_gives_the_same_states(codec, monkeypatch, seed):
    """FlexAttention uncompiled, on the CPU: everything of that path but the kernel itself and its backward pass, which needs a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    policy, trie = random_policy(codec), build(rows := some_rows(5, seed))
    asked = []
    monkeypatch.setattr("tokens.attention.takes_flex", lambda device: True)
    monkeypatch.setattr(
        "tokens.attention._flex",
        lambda: (
            lambda *args, **kwargs: asked.append(args[0].shape) or flex_attention(*args, **kwargs)
        ),
    )
    hidden = hidden_states(policy, trie)
    assert asked == [(1, 4, len(trie) + -len(trie) % 512, 8)] * 2 and hidden.shape == (
        len(trie),
        32,
    )
    for i, row in enumerate(rows):
        assert torch.allclose(
            hidden[trie.places(i)],
            policy.model(input_ids=torch.tensor([row])).last_hidden_state[0],
            atol=1e-5,
        )


@given(sequences)
def test_the_mask_is_the_line_of_ancestors(rows):
    trie = build(rows)
    mask = dense_mask(trie)[0, 0]
    parent = trie.parent()
    for q in range(len(trie)):
        line, k = set(), q
        while k >= 0:
            line.add(k)
            k = parent[k]
        assert set(np.flatnonzero(mask[q].numpy())) == line
