"""The benchmark of a real model: its counts, its text, and small runs that need no peer."""

import pytest
import torch

import bench.real as real
from config.errors import UserError
from config.options import EMBEDDED
from models.load import load_model


@pytest.fixture(scope="module")
def model():
    return load_model(EMBEDDED, "float32", "cpu")


def test_work_is_counted_as_by_hand(model):
    rows = real.group_of_turns(True, "shared", model)
    work = real.work_of(model, rows, 16_384)
    common, own = 48, 12
    written = [len(row.response_ids) for row in rows]
    assert work["tokens"] == common + sum(own + n for n in written)
    assert work["places"] == sum(written)  # one parent each: no two members begin alike
    pairs = sum(range(1, common + 1))
    pairs += sum(sum(range(common + 1, common + own + n + 1)) for n in written)
    assert work["pairs"] == pairs
    layers = sum(p.numel() for p in model.model.layers.parameters())
    c = model.config
    expected = 6 * layers * work["tokens"] + 6 * c.hidden_size * c.vocab_size * work["places"]
    heads = c.hidden_size * c.num_hidden_layers
    assert work["gflop"] == pytest.approx(1e-9 * (expected + 12 * heads * pairs), abs=0.06)
    # in the other order nothing is shared
    paper = real.group_of_turns(True, "paper", model)
    assert real.work_of(model, paper, 16_384)["tokens"] == sum(map(len, paper))


def test_the_products_are_all_of_the_models_and_their_rate_is_a_weighted_one(model):
    found = real.shapes(model)
    weights = sum(n_in * n_out * n for n_in, n_out, n in found.values())
    matrices = [p.numel() for p in model.model.layers.parameters() if p.dim() == 2]
    assert weights == sum(matrices) + model.lm_head.weight.numel()
    by_shape = {"a": {"gflop": 30.0, "gflop_per_s": 10.0}, "b": {"gflop": 10.0, "gflop_per_s": 10}}
    assert real.of_all(by_shape) == 10
    by_shape["b"]["gflop_per_s"] = 1.0  # 40 in 3 + 10 seconds
    assert real.of_all(by_shape) == pytest.approx(40 / 13)


def test_parts_without_a_peer_run_small():
    threads = torch.get_num_threads()
    products = real.matmul(True)["by_dtype"]
    assert {*products} == {"float32", "bfloat16"}
    assert all(found["gflop_per_s"] > 0 for found in products.values())
    cell = real.profile(True, "bfloat16", "shared")
    assert cell["ms"]["products"] > 0 and cell["ms"]["attention"] > 0
    assert len(cell["longest"]) == 10 and torch.get_num_threads() == threads
    parts = {"matmul": {"by_dtype": products}, "profile-bfloat16-shared": cell}
    for part, result in parts.items():
        real.print_part(part, result)
        assert real.lines_of(part, result) == []


def test_a_page_has_so_many_words_and_the_pages_are_not_one_text_again():
    lines = real.pages(8).splitlines()
    assert len(lines) == 8 * real.LINES and {len(line.split()) for line in lines} == {12}
    assert lines[: real.LINES] != lines[real.LINES : 2 * real.LINES]


def test_a_missing_peer_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "VLLM", tmp_path / "none")
    monkeypatch.setattr(real, "BENCH", tmp_path / "none")
    with pytest.raises(UserError, match="no vLLM"), real.vllm_rounds(True, "float32", False):
        pass
    with pytest.raises(UserError, match="no llama"), real.llama_server(tmp_path):
        pass
    monkeypatch.setitem(__import__("sys").modules, "trl", None)
    with pytest.raises(UserError, match=r"needs TRL.*\.venv-bench"):
        real.update(True, "float32", "shared")
