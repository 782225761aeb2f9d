"""The body of each command that does more than a single call; `cli.py` has the flags."""
