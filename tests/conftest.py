"""What the tests share: a tiny random policy, the embedded tokenizer, and one thread per process."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from embedded import tiny
from tokens.codec import Codec

torch.set_num_threads(1)
# A suite that a script has put in the background ignores Ctrl-C, and so would its processes: tests of it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def cell_of(summary: dict, agent: str, question: str, temperature: str, length: int) -> dict:
    """The record of one cell of a summary."""
    names = ("agent", "question", "temperature", "length")
    (found,) = [
        cell
        for cell in summary["cells"]
        if tuple(map(cell.get, names)) == (agent, question, temperature, length)
    ]
    return found


def parts_of(summary: dict, name: str, **given) -> list:
    """The different values of a field of a summary's cells, in their order; of those that have the `given` ones."""
    return list(
        dict.fromkeys(cell[name] for cell in summary["cells"] if given.items() <= cell.items())
    )


def random_policy(codec: Codec, window: int = 4096, **other):
    """A two-layer Llama with grouped heads and plain random weights, the same in every test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = dict(
        vocab_size=len(codec.tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=window,
        initializer_range=0.15,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(LlamaConfig(**config | other))


@pytest.fixture(scope="session")
def codec() -> Codec:
    return Codec(tiny.make_tokenizer())


@pytest.fixture
def policy(codec):
    return random_policy(codec)
