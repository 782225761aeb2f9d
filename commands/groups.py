"""Commands that bring their own flags: `data`, `stream`, `serve`, `report`.

Holds: `add_groups`. Leaves out: all other commands (cli.py).
Exercise it: `python cli.py stream --help`. Read next: commands/stream.py.
"""

from __future__ import annotations

from typing import Annotated

import typer

import suites
from agents import find
from config.files import run_path
from config.flags import AgentName, Panels, command, lazy
from config.options import ServeConfig, StreamConfig
from memagent import ReadConfig


def _print_version(asked: bool) -> None:
    if asked:
        from commands.doctor import version

        typer.echo(version())
        raise typer.Exit


Version = typer.Option("--version", is_eager=True, callback=_print_version, help="print the commit")


def _flags(version: Annotated[bool, Version] = False):
    """Have the flags of no command."""


def add_groups(app: typer.Typer) -> None:
    """Add the commands to an app, and its own flags."""
    app.callback()(_flags)
    about = "Look at and build tasks."
    lazy(app, "data", about, "commands.datasets:data_app")
    stream_command(app)
    about = "Write the page of any run, RUN/report.html, or put several evaluations side by side."
    lazy(app, "report", about, "commands.report:report_command")
    serve_command(app)


def stream_command(app: typer.Typer) -> None:
    """Register the command with its flags: those of a stream, of its suite, and of the agent that
    learns, which is looked up among all agents and so only when the command is called."""

    def more(arguments: list[str]) -> Panels:
        panels = suites.flags(StreamConfig().suite)(arguments)
        return [*panels, (None, find.learner().Config, -1)]

    @command(app, StreamConfig, ReadConfig, name="stream", more=more)
    def stream(given: dict = {}, agent: dict = {}):
        """Work on a suite's tasks again and again, and compare ways of remembering them."""
        from config.machine import check_here

        config, suite = suites.chosen(StreamConfig, given)
        by = config.served_as or config.model or config.engine
        where = run_path(config.runs, config.name)
        typer.echo(f"Working on {suite.label} by {by}; results go to {where}.")
        check_here(config)
        from commands.stream import run_stream

        run_stream(config, agent, suite)


def serve_command(app: typer.Typer) -> None:
    """Register the command with its flags."""

    @command(app, ServeConfig, ReadConfig, more=find.own_flags, in_force=find.in_reading)
    def serve(agent_name: AgentName = "", given: dict = {}, agent: dict = {}):
        """Answer chats of any length, as a server of OpenAI's protocol."""
        config = ServeConfig(**given)
        typer.echo(f"Beginning a server at http://{config.host}:{config.port}.")
        from commands.questions import How
        from commands.serve import run
        from config.machine import check_here

        check_here(config)
        run(config, How(agent_name, settings=agent))
