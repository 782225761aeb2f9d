"""Commands that bring their own flags: `memory`, `bank`, `stream`, `serve`, `report`, `compare`,
`data few-shot`.

Holds: `add_groups`. Leaves out: all other commands (cli.py).
Exercise it: `python cli.py bank --help`. Read next: commands/stream.py.
"""

from __future__ import annotations

import typer

from agents import find
from commands.banks import bank_app
from commands.compare import compare_command
from commands.fewshot import few_shot_command
from commands.report import report_command
from commands.stores import memory_app
from commands.stream import stream_command
from config.flags import AgentName, command
from config.options import EVERYDAY, ServeConfig
from memagent import ReadConfig


def add_groups(app: typer.Typer, data_app: typer.Typer) -> None:
    """Add the commands to an app, and to that of its command `data`."""
    app.add_typer(memory_app, name="memory")
    app.add_typer(bank_app, name="bank")
    stream_command(app)
    report_command(app)
    few_shot_command(data_app)
    serve_command(app)
    compare_command(app)


def serve_command(app: typer.Typer) -> None:
    """Register the command with its flags."""

    @command(app, ServeConfig, ReadConfig, everyday=EVERYDAY["serve"], more=find.own_flags)
    def serve(agent_name: AgentName = "", given: dict = {}, agent: dict = {}):
        """Answer chats of any length, as a server of OpenAI's protocol."""
        from commands.ask import How
        from commands.serve import run

        run(ServeConfig(**given), How(agent_name, settings=agent))
