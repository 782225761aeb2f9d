"""Fused parts of a policy: the same log-probs and gradients, with fewer passes over memory."""

from functools import cache
from types import FunctionType

import pytest
import torch

from config.errors import UserError
from config.options import EMBEDDED, TrainConfig
from models import fused
from models.fused import fuse
from models.load import inner, load_model, merge_adapters, with_lora
from tokens import attention
from tokens.trie import build_trie

PARTS = ["lora", "norms", "compiled"]


def policy_of(dtype="float32"):
    """The embedded policy under adapters that do something."""
    policy = with_lora(load_model(EMBEDDED, dtype, "cpu"), TrainConfig(lora_rank=4))
    torch.manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
        elif "norm" in name:  # of ones alone it would not show which way they are taken
            weight.data.uniform_(0.5, 1.5)
    return policy


IDS = torch.randint(5, 200, (2, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model):
    return inner(model)(IDS).logits


def computed(policy):
    """Log-probs of forty random tokens, and the gradient of all adapters."""
    logp = inner(policy)(IDS).logits.float().log_softmax(-1).gather(2, IDS[..., None])
    policy.zero_grad()
    logp.mean().backward()
    trained = [p.grad.flatten() for p in policy.parameters() if p.requires_grad]
    return logp.detach(), torch.cat(trained)


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def traced(monkeypatch):
    """Trace and differentiate what is compiled, but make no C++ of it, which takes half a minute.
    Return the functions that are compiled, but for the modules'."""
    compiled, functions = torch.compile, []

    def keep(function, **how):
        if isinstance(function, FunctionType):
            functions.append(function)
        return compiled(function, **how, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", keep)
    # a cache of its own: later tests compile for real
    monkeypatch.setattr(fused, "_compiled_function", cache(fused._compiled_function.__wrapped__))
    return functions


@pytest.mark.parametrize("parts", [*([part] for part in PARTS), PARTS])
def test_log_probs_and_gradients_are_the_same(parts, monkeypatch):
    traced(monkeypatch)
    exact, exact_gradient = computed(policy_of())
    policy = policy_of()
    fuse(policy, parts)
    logp, gradient = computed(policy)
    assert distance(logp, exact) < 1e-5 and distance(gradient, exact_gradient) < 1e-5


def test_rotations_are_compiled_once_and_for_this_policy_alone(monkeypatch):
    functions = traced(monkeypatch)
    policy, other = policy_of(), policy_of()
    fuse(policy, ["compiled"])
    (plain,) = functions

    def rotations(policy):
        layers = [layer.self_attn.forward.__func__ for layer in inner(policy).model.layers]
        assert all(fused.ROTATION in forward.__code__.co_names for forward in layers)
        return [forward.__globals__[fused.ROTATION] for forward in layers]

    compiled = fused._compiled_function(plain)
    assert functions == [plain] and compiled is not plain
    assert all(rotation is compiled for rotation in rotations(policy))
    assert all(rotation is plain for rotation in rotations(other))


@pytest.mark.parametrize("parts", [["lora"], ["norms"], ["lora", "norms"]])
def test_in_bfloat16_they_are_no_further_from_exact_arithmetic(parts):
    exact, exact_gradient = computed(policy_of())
    plain, plain_gradient = computed(policy_of("bfloat16"))
    policy = policy_of("bfloat16")
    fuse(policy, parts)
    logp, gradient = computed(policy)
    assert distance(logp, exact) < 1.05 * distance(plain, exact)
    assert distance(gradient, exact_gradient) < 1.05 * distance(plain_gradient, exact_gradient)


def test_adapters_can_be_switched_off_and_merged():
    policy = policy_of()
    with policy.disable_adapter():
        plain = logits(policy)
    fuse(policy, ["lora"])
    with policy.disable_adapter():
        assert torch.equal(logits(policy), plain)
    assert distance(logits(policy), plain) > 1e-3
    merged, expected = (merge_adapters(p).state_dict() for p in (policy, policy_of()))
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


def test_what_is_another_norm_stays():
    class Gemma(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.rand(8)), 1e-6

        def forward(self, x):
            return torch.nn.functional.rms_norm(x, (8,), 1 + self.weight, self.eps)

    model = torch.nn.Sequential(Gemma(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    with pytest.raises(UserError, match="--fused norms finds nothing"):
        fuse(model, ["norms"])
    with pytest.raises(UserError, match="--fused lora finds nothing"):
        fuse(model, ["lora"])
    assert not fused._is_rms_norm(torch.nn.LayerNorm(8))


def test_flash_is_an_option_of_the_kernel_where_it_is_installed(monkeypatch):
    """On a CPU there is none: the device is made up, and what FlexAttention gets is looked at."""
    policy = load_model(EMBEDDED, "float32", "cpu")
    with pytest.raises(UserError, match="--fused flash finds nothing"):
        fuse(policy, ["flash"])
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install flash-attn-4"):
        fuse(policy, ["flash"])
    monkeypatch.setattr(fused, "find_spec", lambda name: name)
    fuse(policy, ["flash"])
    monkeypatch.undo()
    given = []

    def flex(query, key, value, **how):
        given.append(how["kernel_options"])
        return query

    monkeypatch.setattr(attention, "takes_flex", lambda device: True)
    monkeypatch.setattr(attention, "_flex", lambda: flex)
    attention.hidden_states(policy, build_trie([[7, 8, 9]]))
    assert given == [{"BACKEND": "FLASH"}] * len(policy.model.layers)
