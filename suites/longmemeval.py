"""LongMemEval's questions, by the published file.

Exercise it: `python cli.py eval --suite longmemeval --data FILE`. Read next: tasks/longmemeval.py.
"""

from suites._conversations import Conversations


class LongMemEval(Conversations):
    """LongMemEval."""
