"""The body of each command.

What a command does beyond a single call; the flags are in `cli.py`.
"""
