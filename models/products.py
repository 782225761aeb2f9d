"""Linear layers on a CPU, by oneDNN, with weights in the layout that its kernels read.

Holds: `use_products`, `linear`, `back`, `packed`, `is_plain`. Leaves out: attention
(tokens/attention.py), GPUs.
Exercise it: `pytest tests/models/test_products.py`. Read next: engines/hf.py.

PyTorch's own path hands a weight [out, in] over as it is stored, to be brought into a kernel's
layout at every call. Packed once, all layers of SmolLM2 take this share of the time (medians, one
thread of an AMD EPYC with AVX512-BF16, 2026-11-25):

    rows                        1     4     16    32    128   2048
    float32, beside MKL         .92   .56   .64   .73   .85   .88
    bfloat16, beside oneDNN     .62   .51   .62   .75   .92   .97

A packed weight is a copy, kept until the weight is written to; all copies together take at most
`MOST_BYTES`, and a weight beyond that is read as it is stored.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch.nn.functional import linear as plain_linear
from torch.utils.weak import WeakTensorKeyDictionary

SMALLEST = 3 << 15
"""Weights of fewer elements are left to PyTorch: the embedded policies compute as they did."""

MOST_BYTES = 2 << 30
"""All packed copies of a process together."""

_ROWS = 16  # the rows that a layout is chosen for; a product of any number of rows takes it

# weight -> what it was packed from (address, version), the packed copy, its bytes
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _Linear(torch.nn.Linear):
    """A linear layer whose product is `linear`; its parameters and their names stay."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def use_products(model) -> None:
    """Let a model's large linear layers on a CPU be computed by `linear`, in place.

    Only layers that are exactly `torch.nn.Linear`: neither 4-bit ones nor adapters. Not for a model
    whose weights are shards: one layer after the other is gathered into the same memory, and an
    address and a version do not tell them apart.
    """
    if model.device.type != "cpu":
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear and _serves(module.weight):
            module.__class__ = _Linear


def is_plain(layer) -> bool:
    """Return whether a layer is nothing but a product with its weight."""
    return type(layer) in (torch.nn.Linear, _Linear) and layer.bias is None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x weight^T + bias: x [..., in], weight [out, in], bias [out] -> [..., out].

    Differentiable. In bfloat16 a pass with gradients is PyTorch's own: at most 4 % slower there.
    """
    if x.dtype != weight.dtype or not x.numel() or not _serves(weight):
        return plain_linear(x, weight, bias)
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in operands)):
        return _product(x, packed(weight), bias)
    if weight.dtype != torch.float32:
        return plain_linear(x, weight, bias)
    return _Differentiable.apply(x, weight, bias)


def back(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute gradient [..., out] times weight [out, in]: the gradient of `linear`'s x."""
    if gradient.dtype == weight.dtype == torch.float32 and gradient.numel() and _serves(weight):
        return _product(gradient, weight.detach().t())
    return gradient @ weight


class _Differentiable(torch.autograd.Function):
    """Compute `linear` and the gradient of x by oneDNN, that of the weight by PyTorch.

    The weight's gradient is a product of two activations, and packing one of them takes as long as
    is gained.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _product(x, packed(weight), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        x_gradient = back(gradient, weight) if ctx.needs_input_grad[0] else None
        weight_gradient = bias_gradient = None
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            weight_gradient = rows.t() @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            bias_gradient = rows.sum(0)
        return x_gradient, weight_gradient, bias_gradient


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in oneDNN's layout, from the copies if it was not written to since.

    The weight itself, which its kernels read too, where the copies would take too much memory.
    """
    state = weight.data_ptr(), weight._version
    known = _copies.get(weight)
    if known is not None and known[0] == state:
        return known[1]
    _copies.pop(weight, None)
    size = weight.numel() * weight.element_size()
    if size + sum(n for _, _, n in _copies.values()) > MOST_BYTES:
        return weight.detach()
    with torch.no_grad():
        copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    _copies[weight] = state, copy, size
    return copy


def _product(x, weight, bias=None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _serves(weight: torch.Tensor) -> bool:
    """Return whether a weight's products are computed here: large, dense, on a CPU that has it."""
    return (
        type(weight) in (torch.nn.Parameter, torch.Tensor)
        and weight.device.type == "cpu"
        and weight.numel() >= SMALLEST
        and _has_kernels(weight.dtype)
    )


@functools.cache
def _has_kernels(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is here with the operators that PyTorch's compiler calls.

    They are no public interface. Asked on x86 alone, where they were measured.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    ):
        return False
    if dtype == torch.bfloat16:
        return operators._is_mkldnn_bf16_supported()
    return dtype == torch.float32
