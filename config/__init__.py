"""Settings of the user, and what the program prints.

Dataclasses of settings whose field docstrings are the help of the flags, YAML files, presets that
belong to no agent, loading of the user's own files, the one exception that a user sees, the lock
of one writer, signals, and the terminal. Imports no other room.
"""
