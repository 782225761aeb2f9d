"""The body of each command that does more than a single call.

The flags of the commands are in `cli.py`, but those of `memory`, which is a group of its own.
"""
