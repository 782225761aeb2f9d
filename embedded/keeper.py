"""The embedded policy that keeps a store: how it reads, and its tokenizer.

Holds: `agent`, `make_tokenizer`. Leaves out: how it was trained (dev/keeper.py).
Exercise it: `python cli.py demo --agent memupdate --short`. Read next: tasks/ledger.py.
"""

from __future__ import annotations

from pathlib import Path

from agents import find
from agents.memupdate import MemUpdate

WEIGHTS = Path(__file__).parent / "keeper_weights"


def agent(**settings: object) -> MemUpdate:
    """Return the agent as the embedded policy was trained to run it."""
    return find.make("memupdate", find.of_model(WEIGHTS) | settings)


def make_tokenizer():
    """Load the policy's tokenizer: as `tiny`'s, and a call of a tool is six to eight tokens."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(WEIGHTS)
