"""The environment in which vLLM is imported; a stand-in module takes its place."""

import importlib.util
import os
import sys
import types
from unittest.mock import patch

import pytest
import torch

from engines import vllm_colocated

NAME = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.fixture
def flashinfer_setting(monkeypatch):
    """Import a stand-in; return the environment's setting for FlashInfer's sampler."""
    real = importlib.util.find_spec

    def run(installed: bool, before: str = "", packed: bool = False):
        spec = types.SimpleNamespace() if installed else None
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: spec if name == "flashinfer" else real(name, *rest),
        )
        ops, stand_in = types.ModuleType("vllm._custom_ops"), types.ModuleType("vllm")
        stand_in._custom_ops = ops
        monkeypatch.setitem(sys.modules, "vllm", stand_in)
        monkeypatch.setitem(sys.modules, "vllm._custom_ops", ops)
        with patch.dict(os.environ, {NAME: before} if before else {}):
            if not before:
                os.environ.pop(NAME, None)
            assert vllm_colocated.import_vllm(packed) is stand_in
            return os.environ.get(NAME)

    return run


def test_without_flashinfer_vllm_does_not_import_it(flashinfer_setting, monkeypatch):
    """vLLM 0.31 would end with an ImportError when the sampler is built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flashinfer_setting(installed=False) == "0"
    assert flashinfer_setting(installed=True) is None
    assert flashinfer_setting(installed=False, before="1") == "1"  # the user's own setting wins
