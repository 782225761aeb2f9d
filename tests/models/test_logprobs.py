"""The tensors of a packed batch belong to its tokens, row after row."""

from types import SimpleNamespace

import pytest
import torch
from conftest import random_policy

import models.logprobs as module
from models.logprobs import Row, logits_of, logprobs, pack

ROWS = [
    Row([5, 6, 7], [8, 9], [-0.1, -0.2], advantage=1.0),
    Row([5, 6], [3], [-0.3], advantage=-2.0),
    Row([1], [2, 2, 2], [-0.4, -0.5, -0.6], advantage=0.5),
]
WEIGHTS = [0.1, 0.2, 0.3]


def expected(batch):
    """Build the same by lists: one (row, sampler, advantage, weight, token id) a response token."""
    return [
        (i, logp, ROWS[i].advantage, WEIGHTS[i], token)
        for i in batch.index
        for logp, token in zip(ROWS[i].sampler, ROWS[i].response_ids, strict=True)
    ]


def test_tensors_of_a_batch_follow_its_rows():
    batches = list(pack(ROWS, 8))
    assert len(batches) > 1 and sorted(i for batch in batches for i in batch.index) == [0, 1, 2]
    for batch in batches:
        index, sampler, advantage, weight, ids = zip(*expected(batch), strict=True)
        assert batch.row.tolist() == list(index)
        assert torch.equal(batch.sampler, torch.tensor(sampler))
        assert torch.equal(batch.advantage, torch.tensor(advantage))
        assert torch.equal(batch.per_token(WEIGHTS), torch.tensor(weight))
        assert torch.equal(batch.flat([row.sampler for row in ROWS]), batch.sampler)
        assert batch.trie.ids[batch.places].tolist() == list(ids)
        assert batch.to(torch.device("cpu")).places is batch.places


def test_rows_without_log_probs_of_a_sampler_can_be_packed():
    (batch,) = pack([Row([0], [0], [])], 2)
    assert len(batch.sampler) == 0 and batch.row.tolist() == [0]


# ---------------------------------------------------------------- the head


def obvious_head(model, hidden, row, targets, temperature):
    return torch.log_softmax(logits_of(model, hidden) / temperature, -1)[row, targets]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("keep", [False, True])
def test_the_head_by_hand_has_the_values_and_gradients_of_the_obvious_one(dtype, temperature, keep):
    torch.manual_seed(0)
    head = torch.nn.Linear(24, 91, bias=False).to(dtype)
    head.weight.data.mul_(20)  # logits of some size
    model = SimpleNamespace(lm_head=head)
    hidden = torch.randn(13, 24).to(dtype).requires_grad_()
    row = torch.tensor([0, 0, 0, 3, 5, 5, 12])  # one place is read thrice, the same target twice
    targets = torch.tensor([7, 8, 7, 0, 90, 1, 44])
    into = torch.randn(len(row))
    found = []
    for compute in (
        lambda: obvious_head(model, hidden, row, targets, temperature),
        lambda: module._HeadLogProbs.apply(hidden, row, targets, head.weight, temperature, keep),
    ):
        hidden.grad = head.weight.grad = None
        logp = compute()
        logp.backward(into)
        found.append((logp.detach(), hidden.grad, head.weight.grad))
    close = 1e-5 if dtype == torch.float32 else 1e-2  # gradients of 8 bits of precision
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype and a.float().norm() > 0.1
        assert (a.float() - b.float()).norm() < close * a.float().norm()
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)  # float32 in either type


@pytest.mark.parametrize("frozen", [False, True])
def test_a_large_batch_has_the_gradients_of_a_checkpointed_head(codec, monkeypatch, frozen):
    """Trained or frozen, as under LoRA; in chunks with a remainder."""
    model = random_policy(codec)
    monkeypatch.setattr(model.config, "vocab_size", 1 << 24)  # taken for a large one
    model.lm_head.weight.requires_grad_(not frozen)
    rows = [Row([5, 6, 7], list(range(10, 80)), [0.0] * 70), Row([5, 6], [9] * 40, [0.0] * 40)]
    (batch,) = pack(rows, 4096)
    grads = []
    for by_hand in (False, True):
        monkeypatch.setattr(module, "is_plain", lambda head, on=by_hand: on)
        model.zero_grad()
        logp = logprobs(model, batch, temperature=0.8, chunk=48)
        (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
        grads.append([logp.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert len(grads[0]) == len(grads[1]) > 10
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
