"""The body of each command that does more than a single call.

The flags of the commands are in `cli.py`, but those of groups (`datasets.py`, `banks.py`,
`stores.py`) and of what `groups.py` adds.
"""
