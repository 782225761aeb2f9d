"""Parts of a policy that compute the same numbers with fewer passes over memory.

Holds: `fuse`. Leaves out: attention (tokens/attention.py), which layers are recomputed
(`models.load.recompute`), a CPU's products (models/products.py).
Exercise it: `pytest tests/models/test_fused.py`. Read next: models/load.py.

Between the products of a layer stand operations that read and write all hidden states, one after
the other; on a GPU these take as long as the products themselves (dev/LOG.md). Each part can be
switched on alone, by `--fused`:

    lora      s B(A(x)) is added to W x by the product with B itself, in both directions; peft
              writes it, scales it and adds it
    norms     torch's own RMSNorm, one kernel; transformers' takes six
    compiled  norms, feed-forward layers and rotations by torch.compile, for any length
    liger     the kernels of the package liger-kernel, where it is installed
    flash     FlexAttention by FlashAttention 4 on a GPU, where flash-attn-4 is installed; its
              gradients are not the same at every call
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from types import FunctionType, MethodType

import torch
import torch.nn.functional as F

from config.errors import UserError
from models.products import back, linear


def fuse(policy, parts: Collection[str]) -> None:
    """Let the named parts of a policy compute otherwise, in place. UserError: one cannot."""
    for part in parts:
        changed = _PARTS[part](policy)
        if not changed:
            raise UserError(f"--fused {part} finds nothing in this model that it could replace.")


# ---------------------------------------------------------------- adapters


class _Sum(torch.autograd.Function):
    """Compute x W^T + bias + s (x A^T) B^T: x [..., in], W [out, in], A [r, in], B [out, r].

    W and its bias are frozen. The adapters are float32 and compute in the type of x.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale: float) -> torch.Tensor:
        rows = x.flatten(0, -2)
        low = rows @ a.to(x.dtype).t()  # [N, r]
        out = linear(rows, weight, bias).addmm_(low, b.to(x.dtype).t(), alpha=scale)
        ctx.save_for_backward(rows, low, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        rows, low, weight, a, b = ctx.saved_tensors
        gradient = gradient.flatten(0, -2)
        of_low = (gradient @ b.to(gradient.dtype)).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:  # not of the first layer: the embeddings are frozen
            of_x = back(gradient, weight).addmm_(of_low, a.to(gradient.dtype)).view(ctx.shape)
        of_a = (of_low.t() @ rows).to(a.dtype)
        of_b = (gradient.t() @ low).mul_(ctx.scale).to(b.dtype)
        return of_x, None, None, of_a, of_b, None


@cache
def _adapted() -> type:
    from peft.tuners.lora.layer import Linear

    class Adapted(Linear):
        """A frozen linear layer with one adapter, whose sum is `_Sum`."""

        def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            if args or kwargs or self.disable_adapters or self.merged:
                return super().forward(x, *args, **kwargs)
            base, (name,) = self.base_layer, self.active_adapters
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            return _Sum.apply(x, base.weight, base.bias, a, b, self.scaling[name])

    return Adapted


def _lora(policy) -> int:
    """Replace adapters of plain linear layers: neither those of 4-bit weights nor of trained ones.
    Return how many."""
    from peft.tuners.lora.layer import Linear

    found = [
        module
        for module in policy.modules()
        if type(module) is Linear
        and isinstance(module.base_layer, torch.nn.Linear)
        and type(module.base_layer.weight) is torch.nn.Parameter
        and not any(p.requires_grad for p in module.base_layer.parameters())
    ]
    for module in found:
        module.__class__ = _adapted()
    return len(found)


# ---------------------------------------------------------------- norms


class _Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, _epsilon(self))


def _epsilon(module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _norms(policy) -> int:
    """Replace the norms that are RMSNorm; return how many."""
    found = [module for module in policy.modules() if _is_rms_norm(module)]
    for module in found:
        module.__class__ = _fused_norm(type(module))
    return len(found)


@cache  # torch.compile compiles for each class anew
def _fused_norm(norm: type) -> type:
    return type(f"Fused{norm.__name__}", (_Norm, norm), {})


@torch.no_grad()
def _is_rms_norm(module) -> bool:
    """Return whether a module is RMSNorm, by what it computes: Gemma's adds 1 to its weights, and
    LayerNorm has a bias."""
    names, epsilon = [name for name, _ in module.named_parameters()], _epsilon(module)
    if names != ["weight"] or module.weight.dim() != 1 or not isinstance(epsilon, float):
        return False
    n, device = len(module.weight), module.weight.device  # whose values may not be there yet
    x = torch.linspace(-1, 2, 2 * n, device=device).view(1, 2, n)
    weight = torch.linspace(0.5, 1.5, n, device=device)
    theirs = torch.func.functional_call(module, {"weight": weight}, (x,))
    return torch.allclose(theirs, F.rms_norm(x, (n,), weight, epsilon), 1e-5)


# ---------------------------------------------------------------- compiled, or by a library


ROTATION = "apply_rotary_pos_emb"  # the name in most models of transformers; others stay plain


def _compiled(policy) -> int:
    """Compile the small parts between products, for any number of tokens; return how many."""
    norms = [module for module in policy.modules() if _is_rms_norm(module)]
    forward = [module for module in policy.modules() if hasattr(module, "down_proj")]
    for module in norms + forward:
        module.compile(dynamic=True)
    for module in policy.modules():
        plain = getattr(module.forward, "__func__", None)
        if ROTATION in getattr(plain, "__globals__", ()) and ROTATION in plain.__code__.co_names:
            _compile_rotation(module)
    return len(norms) * len(forward)


def _compile_rotation(attention: torch.nn.Module) -> None:
    """Let an attention layer rotate queries and keys by a compiled function.

    It is a global name of the model's source, where other policies find it too: so the layer gets a
    copy of its forward function, with globals of its own.
    """
    plain = attention.forward.__func__
    names = plain.__globals__ | {ROTATION: _compiled_function(plain.__globals__[ROTATION])}
    copy = FunctionType(plain.__code__, names, None, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    attention.forward = MethodType(copy, attention)


@cache  # one for all layers
def _compiled_function(function):
    return torch.compile(function, dynamic=True)


def _liger(policy) -> int:
    """Put in the kernels of liger-kernel by transformers, which warns where it has none for the
    architecture; return 1.

    Its fused loss is left out: log-probs are read by models/logprobs.py.
    """
    from transformers.integrations.liger import apply_liger_kernel

    try:
        apply_liger_kernel(policy, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    except ImportError as error:
        raise UserError("--fused liger wants the package: pip install liger-kernel.") from error
    return 1


def _flash(policy) -> int:
    """Let the attention of packed rows be computed by FlashAttention 4; return 1, on a CPU 0."""
    if policy.device.type != "cuda":
        return 0
    try:
        found = find_spec("flash_attn.cute")
    except ImportError:
        found = None
    if found is None:
        raise UserError("--fused flash wants the package: pip install flash-attn-4.")
    model = policy.get_base_model() if hasattr(policy, "peft_config") else policy
    model.kernel_options = {"BACKEND": "FLASH"}
    return 1


_PARTS = {
    "lora": _lora, "norms": _norms, "compiled": _compiled, "liger": _liger, "flash": _flash
}  # fmt: skip
