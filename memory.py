"""Memories as plain state with an update rule: what an agent carries from one turn to the next.

Holds: the overwritten memory of MemAgent. Leaves out: prompts, models, torch.
Exercise it: `pytest tests/test_memagent.py`. Read next: memagent.py.
"""

from __future__ import annotations


def overwrite(old: str, new: str, first: str, empty: str = "placeholder") -> str:
    """MemAgent's rule: the response is the memory (spec memagent.md 3.3).

    empty: what becomes of a response without text: "placeholder" = the first-memory literal (MemAgent's asynchronous path),
    "keep" = the old memory (vime), "empty" = stays empty.

    >>> overwrite("old", "new", "none yet"), overwrite("old", " ", "none yet"), overwrite("old", "", "none yet", "keep")
    ('new', 'none yet', 'old')
    """
    if new.strip():
        return new
    return {"placeholder": first, "keep": old, "empty": new}[empty]
