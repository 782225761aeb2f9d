"""The embedded default: how it reads, and its tokenizer."""

from __future__ import annotations

from agents import find
from config.options import EMBEDDED
from memagent import Agent

READING = find.of_model(EMBEDDED)


def agent(name: str = find.DEFAULT, **settings: object) -> Agent:
    """Return an agent that reads as the embedded policy was trained to."""
    return find.make(name, READING | settings)


def make_tokenizer():
    """Load the policy's tokenizer: one token a word of the generated English, else bytes."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(EMBEDDED)
