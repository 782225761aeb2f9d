"""JSON, notebooks and data: URLs as text that a person would read.

Holds: `readable`. Leaves out: JSON that is a chat (tasks/chats.py). No torch.
Exercise it: `python cli.py ask study.ipynb "question"`. Read next: tasks/forms.py.
"""

from __future__ import annotations


def readable(text: str, name: str) -> tuple[str, str]:
    """Return the text of a file as it is read, and a remark on what was left out ("" = nothing).

    name: the file's, as it begins the remark.
    """
    return text, ""
