"""The commands on banks of experiences: `bank show`, `stats`, `export`, `merge`, `forget`,
`calibrate` and `check`.

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
from config.settings import NOT_NEGATIVE, Settings
from config.terminal import next_step

if TYPE_CHECKING:
    from agents.bank import Bank, Entry

bank_app = typer.Typer(
    no_args_is_help=True, help="Show, count, export, merge, forget and check experiences."
)

File = Annotated[Path, typer.Argument(help="a bank, such as RUNS/NAME/ARM.db of a stream")]
Namespace = Annotated[str, typer.Option(help="part of the bank")]
EmbedderName = Annotated[
    str, typer.Option("--embedder", help="that of the bank: hf:FOLDER, openai:URL#MODEL, hash:256")
]


@dataclass(frozen=True, slots=True)
class Which(Settings):
    """Entries of a bank: all conditions that are given must hold."""

    q_below: float | None = None
    """only those with a lower utility"""
    q_above: float | None = None
    """only those with a higher utility"""
    visits: Annotated[int, NOT_NEGATIVE] = 0
    """only those that were shown so often, or more"""
    before: int | None = None
    """only those of epochs before this"""
    task: str = ""
    """only those that this task has left"""
    kind: Literal["any", "script", "reflection", "trajectory"] = "any"
    """only script, reflection or trajectory; any = all"""
    outcome: Literal["any", "solved", "failed"] = "any"
    """only those of solved or of failed tasks; any = all"""

    @property
    def conditions(self) -> dict[str, object]:
        """Return those that are given, as `Bank.entries` takes them."""
        given = {
            "q_below": self.q_below,
            "q_above": self.q_above,
            "visits": self.visits or None,
            # shown and given from 1 on, kept from 0 on
            "epoch_before": None if self.before is None else self.before - 1,
            "task_id": self.task or None,
            "kind": None if self.kind == "any" else self.kind,
            "success": None if self.outcome == "any" else self.outcome == "solved",
        }
        return {name: value for name, value in given.items() if value is not None}


def _opened(path: Path, namespace: str = "default", embedder: str = "", **how: bool) -> Bank:
    """Open a bank that is there; without an embedder it can be looked at."""
    from agents.bank import Bank, BankConfig
    from models.embedder import embedder_of

    path = found_run(path)
    if not is_file(path):
        known = ", ".join(sorted(map(str, path.glob("*.db"))))
        raise UserError(f"There is no bank at {path}{known and f'; there are {known}'}.")
    config = BankConfig(retrieve="dense", embedder=embedder) if embedder else BankConfig()
    embed = embedder_of(embedder) if embedder else None
    return Bank(path, config, embed, namespace=namespace, **how)


def _say(text: str) -> None:
    typer.echo(clean(text))


def _where(namespace: str) -> tuple[str, ...]:
    """Return the flag for a namespace that is not the usual one."""
    return () if namespace == "default" else ("--namespace", namespace)


@command(bank_app, Which)
def show(
    file: File,
    n: Annotated[int, typer.Option("--n", help="how many, the most useful first; 0 = all")] = 20,
    whole: Annotated[bool, typer.Option("--whole", help="the experiences uncut")] = False,
    namespace: Namespace = "default",
    which: dict = {},
):
    """Print experiences with their utility and where they came from."""
    bank = _opened(file, namespace, frozen=True)
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
def stats(file: File, namespace: Namespace = "default"):
    """Print counts and the distribution of utilities, as JSON."""
    typer.echo(json.dumps(_opened(file, namespace, frozen=True).stats(), indent=2))
    next_step("read the most useful ones", "bank", "show", file, *_where(namespace))


@command(bank_app, Which)
def export(
    file: File,
    out: Annotated[Path, typer.Argument(help="file of JSON lines, one an entry")],
    namespace: Namespace = "default",
    which: dict = {},
):
    """Write entries as JSON lines."""
    entries = _opened(file, namespace, frozen=True).entries(**Which(**which).conditions)
    lines = (json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in entries)
    with replacing_output(out) as temporary:
        temporary.write_bytes("".join(lines).encode(errors="backslashreplace"))
    _say(f"{len(entries)} entries are in {out}.")
    next_step("look for damage in what they are from", "bank", "check", file)


@command(bank_app)
def merge(
    file: File,
    other: Annotated[Path, typer.Argument(help="the bank whose entries are taken over")],
    embedder: EmbedderName = "",
    namespace: Namespace = "default",
):
    """Take over the entries of another bank, with their utilities."""
    if found_run(file).absolute() == found_run(other).absolute():
        raise UserError("A bank cannot be merged with itself: name another one.")
    source = _opened(other, namespace, frozen=True)
    bank = _opened(file, namespace, embedder)
    n = bank.merge(source)
    bank.close()
    _say(f"{n} entries of {other} are in {file} too.")
    next_step("read the most useful ones", "bank", "show", file, *_where(namespace))


@command(bank_app, Which)
def forget(file: File, namespace: Namespace = "default", which: dict = {}):
    """Delete the entries that all given conditions hold for."""
    if not (where := Which(**which).conditions):
        raise UserError("Say which entries: --q-below, --outcome or another condition.")
    bank = _opened(file, namespace, upkeep=True)
    n = bank.forget(**where)
    bank.close()
    _say(f"{n} entries are forgotten.")
    next_step("count what is left", "bank", "stats", file, *_where(namespace))


@command(bank_app)
def calibrate(
    file: File,
    embedder: EmbedderName = "",
    quantile: Annotated[float, typer.Option(help="of the similarities of all pairs")] = 0.8,
    namespace: Namespace = "default",
):
    """Suggest how alike two tasks must be for `stream --delta`, by the tasks of the bank."""
    if not 0 <= quantile <= 1:
        raise UserError("--quantile must lie between 0 and 1.")
    bank = _opened(file, namespace, embedder, frozen=True)
    if (n := bank.stats()["intents"]) < 2:
        raise UserError(f"{file} has {n} intents: a pair of them needs two.")
    typer.echo(f"{bank.quantile(quantile):.4f}")
    next_step("read what they are of", "bank", "show", file, *_where(namespace))


@command(bank_app)
def check(file: File):
    """Look for damage: SQLite's own check, references, utilities, embeddings. With any: exit 1."""
    wrong = _opened(file, frozen=True).check()
    for line in wrong or [f"{file} is sound."]:
        _say(line)
    if wrong:
        raise typer.Exit(1)
    next_step("read the most useful ones", "bank", "show", file)
