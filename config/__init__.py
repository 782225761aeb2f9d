"""What a user can set, and how the program talks back.

Dataclasses of settings whose field docstrings are the help of the flags, YAML in and out, presets that
belong to no agent, the one exception that a user sees, and the terminal. Imports no other room.
"""
