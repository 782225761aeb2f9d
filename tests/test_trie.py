"""The trie against one sequence at a time: the same hidden states and gradients, every shared token computed once."""

import numpy as np
import torch
from conftest import random_policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trie import Cost, build, cheapest, common, dense_mask, hidden_states, split

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


@given(st.lists(token, max_size=9), st.lists(token, max_size=9))
def test_common_prefix(a, b):
    assert common(a, b) == next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_cost_of_a_trie_decides_how_much_is_shared():
    rows = [[*range(2, 60), 100 + k] for k in range(8)]
    dear_call, cheap_call = Cost(1.0, 0.0, 1e9), Cost(1.0, 0.0, 1.0)
    assert len(cheapest(rows, dear_call)) == sum(map(len, rows)) and len(cheapest(rows, cheap_call)) == 58 + 8


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=sequences, least=st.sampled_from([1, 5, 10**9]), max_tokens=st.sampled_from([1, 20, 10**6]))
def test_hidden_states_and_gradients_are_those_of_one_sequence_at_a_time(codec, rows, least, max_tokens):
    policy = random_policy(codec)
    trie = build(rows, least)
    hidden = hidden_states(policy, trie, max_tokens)
    assert hidden.shape == (len(trie), policy.config.hidden_size)
    alone = [policy.model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows]
    for i, expected in enumerate(alone):
        assert torch.allclose(hidden[trie.places(i)], expected, atol=1e-5)
    probe = torch.randn(12, policy.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def gradient(states):
        policy.zero_grad()
        sum((h * probe[: len(h)]).sum() for h in states).backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])

    ours, expected = gradient(hidden[trie.places(i)] for i in range(len(rows))), gradient(alone)
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


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
