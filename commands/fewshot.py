"""The body of `data few-shot`: dialogues of solved games, for ALFWorld's `--few-shot`.

Holds: `few_shot_command`, with its flags. Leaves out: games (tasks/alf.py), the planner's dialogues
(tasks/alf_examples.py).
Exercise it: `python cli.py data few-shot --help`. Read next: tasks/alf_examples.py.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from config.errors import UserError
from config.files import replacing_output
from config.flags import command
from config.terminal import next_step


def few_shot_command(app: typer.Typer) -> None:
    """Register the command."""

    @command(app, name="few-shot")
    def few_shot(
        games: Annotated[
            Path,
            typer.Argument(help="a folder of ALFWorld's training games, such as json_2.1.1/train"),
        ],
        out: Annotated[Path, typer.Argument(help="JSON file of dialogues for stream --few-shot")],
        per_kind: Annotated[int, typer.Option(min=1, help="dialogues of each kind of task")] = 1,
        seed: Annotated[int, typer.Option(help="which games are chosen")] = 0,
    ):
        """Have ALFWorld's own planner solve games of each kind, and keep the dialogues."""
        from tasks.alf import ALFWorld
        from tasks.alf_examples import KINDS, make_examples

        with replacing_output(out) as temporary:
            environment = ALFWorld(games)
            try:
                examples = make_examples(environment, per_kind, seed)
            finally:
                environment.close()
            if not examples:
                raise UserError(f"The planner has won no game of {games}.")
            temporary.write_text(json.dumps(examples, indent=1) + "\n", encoding="utf-8")
        counts = Counter(example["kind"] for example in examples)
        typer.echo(f"{len(examples)} dialogues of {len(counts)} kinds are in {out}.")
        for kind in KINDS.values():
            if counts[kind] < per_kind:
                typer.echo(
                    f"{kind}: {counts[kind]} of {per_kind}; there are no more games to take."
                )
        words = "--suite", "alfworld", "--path", games, "--few-shot", out
        next_step("work on games with them", "stream", *words)
