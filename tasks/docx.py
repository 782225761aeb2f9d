"""A docx as text: body, headers, footers, notes, comments, list numbers, tables a row a line.

Holds: `of_docx`. Leaves out: pictures (named in a remark), pages, which the program that shows a
document makes. Exercise it: `python cli.py ask letter.docx "question"`. Read next: tasks/forms.py.
"""

from __future__ import annotations

from tasks.forms import Contents, Members


def of_docx(members: Members, main: str, name: str) -> Contents:
    """Read a Word document; main: the member that holds its body, as its package names it."""
    raise NotImplementedError
