"""Settings of the user, and what the program prints.

Dataclasses of settings whose field docstrings are the help of the flags, YAML files, presets that
belong to no agent, loading of the user's own files, X Imports no other room.
"""
