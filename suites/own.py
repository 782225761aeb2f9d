"""Questions about conversations of the user's own, in one file (docs/evaluation.md).

Exercise it: `python cli.py eval --suite own --data FILE`. Read next: tasks/own.py.
"""

from suites._conversations import Conversations


class Own(Conversations):
    """Conversations of one's own."""
