"""Agents, one file each: everything about an agent is in its file.

Settings, prompts, the generator, parsers, rewards, counts, how a turn is shown, presets and the
demo; and what several agents share. `find.py` looks an agent up by name or path. Knows no engine.
"""
