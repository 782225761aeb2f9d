"""Products of large layers on a CPU: oneDNN's results, and copies that follow their weights."""

import copy

import pytest
import torch
from torch.nn.functional import linear as plain_linear

from config.options import EMBEDDED, TrainConfig
from dev import keeper
from models import products
from models.load import load_model, optimizer_of, with_lora
from models.products import back, is_plain, linear, packed, use_products

N_IN, N_OUT = 400, 256
TYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}  # relative: a few units of the last place
needs_kernels = pytest.mark.skipif(
    not products._has_kernels(torch.float32), reason="oneDNN's kernels are asked on x86 alone"
)
pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def no_copies():
    """Begin and end without packed copies."""
    products._copies.clear()
    yield
    products._copies.clear()


def weight_of(dtype=torch.float32, trained: bool = False) -> torch.nn.Parameter:
    torch.manual_seed(0)
    return torch.nn.Parameter((torch.randn(N_OUT, N_IN) / 16).to(dtype), requires_grad=trained)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (300,), (2, 5), (1, 40)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_exact_arithmetic(dtype, shape, biased):
    weight, x = weight_of(dtype), torch.randn(*shape, N_IN).to(dtype)
    bias = torch.randn(N_OUT).to(dtype) if biased else None
    out = linear(x, weight, bias)
    exact = plain_linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.dtype == dtype and out.shape == (*shape, N_OUT)
    # it went the new way, where the processor has one
    assert (weight in products._copies) == products._has_kernels(dtype)
    assert distance(out, exact) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("shape", [(37,), (2, 19)])
def test_gradients_are_those_of_exact_arithmetic(dtype, trained, shape):
    weight = weight_of(dtype, trained)
    x = torch.randn(*shape, N_IN).to(dtype).requires_grad_()
    bias = torch.randn(N_OUT).to(dtype).requires_grad_()
    sent = torch.randn(*shape, N_OUT).to(dtype)
    linear(x, weight, bias).backward(sent)
    tensors = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    plain_linear(*tensors).backward(sent.double())
    for ours, exact in zip((x, weight, bias), tensors, strict=True):
        if ours.requires_grad:
            assert ours.grad.dtype == dtype
            assert distance(ours.grad, exact.grad) < CLOSE[dtype]
    assert trained or weight.grad is None
    assert distance(back(sent, weight), sent.double() @ weight.double()) < CLOSE[dtype]


@pytest.mark.parametrize("write", ["in place", "data", "adamw", "adamw8bit", "load"])
def test_a_weight_that_was_written_to_is_packed_again(write):
    """bitsandbytes writes through pointers, of which PyTorch's count of versions knows nothing."""
    layer = torch.nn.Linear(N_IN, N_OUT, bias=False)
    weight, x = layer.weight, torch.randn(4, N_IN)
    with torch.no_grad():
        before = linear(x, weight)
    if write == "in place":
        with torch.no_grad():
            weight.mul_(-1)
    elif write == "data":
        weight.data = -weight.data
    elif write == "load":
        layer.load_state_dict({"weight": torch.randn(N_OUT, N_IN)})
    else:
        optimizer = optimizer_of([weight], TrainConfig(optimizer=write, lr=0.1))
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    with torch.no_grad():
        after = linear(x, weight)
    assert distance(after, before) > 0.1
    assert distance(after, plain_linear(x.double(), weight.detach().double())) < 1e-6


def test_a_weight_is_packed_once():
    weight = weight_of()
    assert packed(weight) is packed(weight)
    assert packed(weight).layout == torch._mkldnn


def test_copies_end_with_their_weights_and_take_no_more_than_they_may(monkeypatch):
    first, second = weight_of(), weight_of()
    monkeypatch.setattr(products, "MOST_BYTES", first.numel() * 4)
    packed(first)
    assert packed(second).data_ptr() == second.data_ptr()  # as it is stored
    x = torch.randn(3, N_IN)
    assert distance(linear(x, second), plain_linear(x.double(), second.double())) < 1e-6
    del first
    assert len(products._copies) == 0
    assert packed(second).layout == torch._mkldnn


def test_small_layers_adapters_and_other_layers_are_left_alone():
    class Other(torch.nn.Linear):
        pass

    model = torch.nn.ModuleDict(
        {
            "large": torch.nn.Linear(N_IN, N_OUT),
            "small": torch.nn.Linear(16, 16),
            "other": Other(N_IN, N_OUT),
            "of_64_bits": torch.nn.Linear(N_IN, N_OUT).double(),
        }
    )
    model.device = torch.device("cpu")
    use_products(model)
    changed = {name for name, m in model.items() if type(m) is products._Linear}
    assert changed == {"large"}
    for folder in (EMBEDDED, keeper.WEIGHTS):
        own = load_model(folder, "float32", "cpu")
        use_products(own)
        assert not any(isinstance(m, products._Linear) for m in own.modules())


def test_a_plain_head_stays_one():
    head = torch.nn.Linear(N_IN, N_OUT, bias=False)
    assert is_plain(head)
    head.__class__ = products._Linear
    assert is_plain(head)
    assert not is_plain(torch.nn.Linear(N_IN, N_OUT))


def tiny_llama(hidden: int = 320):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def test_a_model_computes_the_same_saves_the_same_and_can_be_copied():
    model = tiny_llama().requires_grad_(False)
    ids = torch.arange(40)[None]
    before, names = model(ids).logits, [*model.state_dict()]
    use_products(model)
    assert len([m for m in model.modules() if type(m) is products._Linear]) == 15
    assert distance(model(ids).logits, before) < 1e-5
    assert [*model.state_dict()] == names
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.zero_()
    assert distance(model(ids).logits, before) < 1e-5
    assert distance(twin(ids).logits, before) > 1e-3


def test_adapters_on_such_layers_learn_the_same():
    gradients = []
    for on in (False, True):
        policy = with_lora(tiny_llama(), TrainConfig(lora_rank=4))
        if on:
            use_products(policy)
        torch.manual_seed(1)
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
        policy(torch.arange(40)[None]).logits.logsumexp(-1).sum().backward()
        found = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        gradients.append(torch.cat(found))
    assert len(products._copies) == 15
    assert distance(*gradients) < 1e-5
