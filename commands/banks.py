"""The commands on banks of experiences: `bank show`, `stats`, `export` and `forget`.

Holds: `bank_app`, with the flags of its commands; `Which`. Leaves out: banks (agents/bank.py),
streams (commands/stream.py).
Exercise it: `python cli.py bank stats runs/stream/rag.db`. Read next: agents/bank.py.

Looking at a bank never writes to it, also while a stream goes on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from config.errors import UserError, clean, clip
from config.files import found_run, is_file, replacing_output
from config.flags import command
from config.settings import Settings
from config.terminal import next_step

if TYPE_CHECKING:
    from agents.bank import Bank, Entry

bank_app = typer.Typer(no_args_is_help=True, help="Show, count, export and forget experiences.")

File = Annotated[Path, typer.Argument(help="a bank, such as RUNS/NAME/ARM.db of a stream")]


@dataclass(frozen=True, slots=True)
class Which(Settings):
    """Entries of a bank: all conditions that are given must hold."""

    q_below: float | None = None
    """only those with a lower utility"""
    task: str = ""
    """only those that this task has left"""
    outcome: Literal["any", "solved", "failed"] = "any"
    """only those of solved or of failed tasks; any = all"""

    @property
    def conditions(self) -> dict[str, object]:
        """Return those that are given, as `Bank.entries` takes them."""
        given = {
            "q_below": self.q_below,
            "task_id": self.task or None,
            "success": None if self.outcome == "any" else self.outcome == "solved",
        }
        return {name: value for name, value in given.items() if value is not None}


def _opened(path: Path, **how: bool) -> Bank:
    """Open a bank that is there; it can be looked at, whatever its embedder."""
    from agents.bank import Bank, BankConfig

    path = found_run(path)
    if not is_file(path):
        known = ", ".join(sorted(map(str, path.glob("*.db"))))
        raise UserError(f"There is no bank at {path}{known and f'; there are {known}'}.")
    return Bank(path, BankConfig(), **how)


def _say(text: str) -> None:
    typer.echo(clean(text))


@command(bank_app, Which)
def show(
    file: File,
    n: Annotated[int, typer.Option("--n", help="how many, the most useful first; 0 = all")] = 20,
    whole: Annotated[bool, typer.Option("--whole", help="the experiences uncut")] = False,
    which: dict = {},
):
    """Print experiences with their utility and where they came from."""
    bank = _opened(file, frozen=True)
    entries = bank.entries(**Which(**which).conditions)
    entries.sort(key=lambda entry: (-entry.q, -entry.visits, entry.id))
    for entry in entries[:n] if n else entries:
        _print_entry(entry, whole)
    _say(f"{len(entries)} of {len(bank.entries())} entries")


def _print_entry(entry: Entry, whole: bool) -> None:
    made = f" from {', '.join(map(str, entry.parents))}" if entry.parents else ""
    wins = f"{entry.wins} of {entry.visits} solved" if entry.visits else "never shown"
    outcome = "solved" if entry.success else "failed"
    _say(
        f"[{entry.id}] Q {entry.q:+.3f}, {wins}; {entry.kind} of {entry.task_id} ({outcome}), "
        f"epoch {entry.epoch + 1}{made}"
    )
    _say(f"    {clip(' '.join(entry.intent.split()), 160)}")
    text = entry.experience if whole else clip(" ".join(entry.experience.split()), 240)
    _say("\n".join(f"    {line}" for line in text.splitlines()))


@command(bank_app)
def stats(file: File):
    """Print counts and the distribution of utilities, as JSON."""
    typer.echo(json.dumps(_opened(file, frozen=True).stats(), indent=2))
    next_step("read the most useful ones", "bank", "show", file)


@command(bank_app, Which)
def export(
    file: File,
    out: Annotated[Path, typer.Argument(help="file of JSON lines, one an entry")],
    which: dict = {},
):
    """Write entries as JSON lines."""
    entries = _opened(file, frozen=True).entries(**Which(**which).conditions)
    lines = (json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in entries)
    with replacing_output(out) as temporary:
        temporary.write_bytes("".join(lines).encode(errors="backslashreplace"))
    _say(f"{len(entries)} entries are in {out}.")
    next_step("read the most useful ones", "bank", "show", file)


@command(bank_app, Which)
def forget(file: File, which: dict = {}):
    """Delete the entries that all given conditions hold for."""
    if not (where := Which(**which).conditions):
        raise UserError("Say which entries: --q-below, --outcome or another condition.")
    bank = _opened(file, upkeep=True)
    n = bank.forget(**where)
    bank.close()
    _say(f"{n} entries are forgotten.")
    next_step("count what is left", "bank", "stats", file)
