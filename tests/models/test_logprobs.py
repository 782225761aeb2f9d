"""The tensors of a packed batch belong to its tokens, row after row."""

import torch

from models.logprobs import Row, pack

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
