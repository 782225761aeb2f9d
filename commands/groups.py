"""Commands that bring their own flags: `memory`, `bank`, `stream` and `data few-shot`.

Holds: `add_groups`. Leaves out: all other commands (cli.py).
Exercise it: `python cli.py bank --help`. Read next: commands/stream.py.
"""

from __future__ import annotations

import typer

from commands.banks import bank_app
from commands.fewshot import few_shot_command
from commands.stores import memory_app
from commands.stream import stream_command


def add_groups(app: typer.Typer, data_app: typer.Typer) -> None:
    """Add the commands to an app, and to that of its command `data`."""
    app.add_typer(memory_app, name="memory")
    app.add_typer(bank_app, name="bank")
    stream_command(app)
    few_shot_command(data_app)
