"""One file per agent, and everything of it.

Settings, wording, the generator, parsers, rewards, counts, how a turn is shown, presets and the
demo; plus what several agents share. `find.py` looks an agent up by name or by path. Knows no
engine.
"""
