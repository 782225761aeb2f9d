"""What vLLM is told before it is imported. A module stands in for it: none is needed."""

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
def told(monkeypatch):
    """Import a stand-in; returns what the environment said of FlashInfer's sampler."""
    real = importlib.util.find_spec

    def run(there: bool, before: str = ""):
        spec = types.SimpleNamespace() if there else None
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
            assert vllm_colocated.import_vllm() is stand_in
            return os.environ.get(NAME)

    return run


def test_without_flashinfer_vllm_is_told_not_to_import_it(told, monkeypatch):
    """vLLM 0.31 would end with an ImportError when the sampler is built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert told(there=False) == "0"
    assert told(there=True) is None
    assert told(there=False, before="1") == "1"  # who sets it knows better
