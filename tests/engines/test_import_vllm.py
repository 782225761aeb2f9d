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


@pytest.mark.parametrize(
    ("installed", "before", "after"), [(False, None, "0"), (True, None, None), (False, "1", "1")]
)
def test_without_flashinfer_vllm_does_not_import_it(monkeypatch, installed, before, after):
    """vLLM 0.31 would end with an ImportError at the sampler; the user's setting wins."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    ops, stand_in = types.ModuleType("vllm._custom_ops"), types.ModuleType("vllm")
    stand_in._custom_ops = ops
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", ops)
    with patch.dict(os.environ, {NAME: before} if before else {}):
        if not before:
            os.environ.pop(NAME, None)
        assert vllm_colocated.import_vllm() is stand_in
        assert os.environ.get(NAME) == after and ops._supports_onednn is False
