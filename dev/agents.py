"""Train every agent in the demo's world, ask all of them alike, and print one table by length.

    python -m dev.agents [--runs runs/agents] [--short] [--agents NAMES] [--kinds KINDS] [--n N]

Holds: the settings, the commands, the table. Leaves out: the demos (commands/demo.py), in which one
agent is compared with itself before training.
Exercise it: `python -m dev.agents --short`. Read next: docs/results.md.

What is done already in the folder is not done again. Agents that know no demonstrations start from
the embedded policy that knows their protocol; the others from demonstrations (`sft`), then all are
trained with GRPO for as many steps. Agents that edit a store read generated sessions instead.
Seconds are measured with an agent alone on the machine: run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agents.memupdate import BRIEF, LENGTHS, TRAINING

PROCESS = [sys.executable, "cli.py"]
KEEPER = "embedded/keeper_weights"
# That policy's settings are MemUpdate's; Memory-R1 pays for right answers alone, and has no budget
UNBOUNDED = ("--budget", "none", "--budget-entries", "0", "--format-weight", "0")
GATES = ("--memory-tokens", "16")  # the policy's 13 hold no two facts with the gates around them
# The demo's settings suit a policy that fails often. One that starts from demonstrations fails
# rarely and, sampled hot and with that rate, unlearnt to search and to stop (dev/LOG.md)
CALM = ("--lr", "1e-4", "--temperature", "1.0")
ALONE = 8  # documents that are timed, one after the other
# what is saved of a cell
KEPT = "agent question length n mean low high tokens_read tokens_written seconds rates alone metric"


@dataclass(frozen=True, slots=True)
class World:
    """What a group of agents is trained on and asked."""

    trained: dict[str, bool]  # agent -> whether it starts from demonstrations
    settings: dict[str, tuple[str, ...]]  # agent -> its flags, where the model's are another's
    untrained: str  # agents that answer with the policy from which training starts
    model: str
    data: str
    grpo: tuple[str, ...]  # flags of train
    lengths: dict[int, int]  # in sections or sessions -> questions a kind
    costs_at: int  # the length of which the table shows the costs
    kinds: str = ""


def flags(settings: dict) -> tuple[str, ...]:
    """Return settings as flags of the command line."""
    words: list[str] = []
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    return tuple(words)


def worlds(short: bool) -> list[World]:
    english = {4: 64, 16: 64, 64: 64, 256: 32}
    sessions, edits = {12: 64, 24: 32}, flags(TRAINING | {"lengths": LENGTHS["memupdate"]})
    steps = "110"
    if short:
        english, sessions, steps = {2: 4}, {6: 4}, "2"
        edits = flags(BRIEF | {"lengths": (6,)})
    return [
        World(
            {"memagent": False, "rememr1": False, "infmem": True, "mem1": True, "grumem": True},
            {"grumem": GATES},
            *("full,bm25,oracle,newest,none", "", "world"),
            ("--preset", "demo", "--steps", steps),
            *(english, 2 if short else 64),
            "one_fact,two_hop,two_hop_reverse",
        ),
        World(
            {"memupdate": False, "memoryr1": False},
            {"memoryr1": UNBOUNDED},
            *("newest,idle,facts", KEEPER, "ledger", edits, sessions, 6 if short else 12),
        ),
    ]


def some(every: list[World], agents: str | None, kinds: str | None, n: int | None) -> list[World]:
    """Return the worlds with what was asked for alone."""
    if agents:
        names = agents.split(",")
        every = [replace(w, trained={x: w.trained[x] for x in names if x in w.trained},
                         untrained="") for w in every]  # fmt: skip
    if n:
        every = [replace(w, lengths=dict.fromkeys(w.lengths, n)) for w in every]
    return [replace(w, kinds=kinds or w.kinds) if w.kinds else w for w in every if w.trained]


def call(*words: str) -> None:
    print("python cli.py", *words, flush=True)
    subprocess.run([*PROCESS, *words], check=True, stdout=subprocess.DEVNULL)


def model(path: str) -> list[str]:
    return ["--model", path] if path else []


def train(world: World, agent: str, runs: Path, short: bool) -> tuple[str, str]:
    """Return the folders of the policies from which an agent's training starts and at its end."""
    common = ("--agent", agent, "--runs", str(runs), "--data", world.data)
    common += world.settings.get(agent, ())
    first, last = world.model, runs / f"{agent}-trained" / "model"
    if world.trained[agent]:
        first = str(runs / f"{agent}-warm" / "model")
        steps = ("--steps", "2" if short else "300")
        if not Path(first).exists():
            call("sft", *common, "--name", f"{agent}-warm", *steps)
    if not last.exists():
        calm = CALM if world.trained[agent] else ()
        call("train", *common, "--name", f"{agent}-trained", *model(first), *world.grpo, *calm)
    return first, str(last)


def evaluations(world: World, name: str) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Return the runs of a policy and its agents: folder, length, flags. The last is for seconds:
    a few documents, one after the other."""
    for length, n in world.lengths.items():
        yield f"{name}-{length}", length, ("--n", str(n))
    yield f"{name}-alone", world.costs_at, ("--n", str(ALONE), "--in-flight", "1")


def ask(world: World, agents: str, name: str, policy: str, runs: Path) -> None:
    """Evaluate agents at every length with one policy, sampled; a length each, for its n."""
    for folder, length, flags_of_run in evaluations(world, name):
        if not (runs / folder / "summary.json").exists():
            kinds = ["--kinds", world.kinds, "--split", "test"] if world.kinds else []
            call(
                *("eval", "--agents", agents, *model(policy), "--data", world.data, *kinds),
                *("--lengths", str(length), *flags_of_run, "--temperatures", "1.0"),
                *("--runs", str(runs), "--name", folder, *world.settings.get(agents, ())),
            )


def cells(world: World, label: str, name: str, runs: Path) -> Iterator[dict]:
    """Return the cells of an agent's evaluations as they stand in their summaries."""
    for folder, _, flags_of_run in evaluations(world, name):
        summary = json.loads((runs / folder / "summary.json").read_bytes())
        more = {"metric": summary["metric"], "alone": "--in-flight" in flags_of_run}
        for cell in summary["cells"]:
            yield cell | more | {"agent": f"{cell['agent']}{label}"}


def saved(cell: dict) -> str:
    """Return what stopping early saved: the share of sections unread, and tokens a document."""
    rates = cell.get("rates", {})
    if "tokens_saved" not in rates:
        return ""
    return f"{100 * rates['sections_unread']:.0f} %, {rates['tokens_saved']:,.0f}"


def share(cell: dict) -> str:
    """Return a mean with its interval as in the documents: .98 (.95-1.00)."""
    mean, low, high = (f"{cell[name]:.2f}".removeprefix("0") for name in ("mean", "low", "high"))
    return f"{mean} ({low}-{high})"


def tables(found: Sequence[dict], costs_at: int) -> Iterator[str]:
    """Return a table in Markdown for every kind of question: what is right by length, and what a
    document of one length costs."""
    for kind in sorted({cell["question"] for cell in found}):
        of_kind, alone = (
            {(c["agent"], c["length"]): c for c in found if (c["question"], c["alone"]) == which}
            for which in ((kind, False), (kind, True))
        )
        lengths = sorted({length for _, length in of_kind})
        n = ", ".join(str(max(c["n"] for k, c in of_kind.items() if k[1] == x)) for x in lengths)
        costs = ("read", "written", *["seconds"] * bool(alone), "left unread")
        head = (*(f"{x:,}" for x in lengths), *costs)
        lines = [
            f"{kind}: right at ... sections (n = {n}); of one with {costs_at:,}, tokens read and "
            f"written, seconds (alone, {ALONE} documents), what was left unread in % and tokens",
            "",
            f"| agent | {' | '.join(head)} |",
            "|---" * (1 + len(lengths)) + "|---:" * len(costs) + "|",
        ]
        for agent in dict.fromkeys(agent for agent, _ in of_kind):
            rights = (share(of_kind[agent, x]) if (agent, x) in of_kind else "" for x in lengths)
            cell = of_kind[agent, costs_at]
            tokens = (f"{cell[name]:,.0f}" for name in ("tokens_read", "tokens_written"))
            seconds = (f"{alone[agent, costs_at]['seconds']:.2f}",) if alone else ()
            row = (agent, *rights, *tokens, *seconds, saved(cell))
            lines.append(f"| {' | '.join(row)} |")
        yield "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.agents", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=Path, default=Path("runs/agents"), help="folder of all runs")
    parser.add_argument("--save", type=Path, help="file for all cells, as JSON")
    parser.add_argument("--short", action="store_true", help="does everything run?")
    parser.add_argument("--agents", help="these alone, and none that is not trained")
    parser.add_argument("--kinds", help="of question, of generated English")
    parser.add_argument("--n", type=int, help="questions of each kind at each length")
    given = parser.parse_args(arguments)
    everything = []
    for world in some(worlds(given.short), given.agents, given.kinds, given.n):
        found: list[dict] = []
        for agent in world.trained:
            first, last = train(world, agent, given.runs, given.short)
            for label, policy in ((", before GRPO", first), ("", last)):
                name = f"{agent}{'-first' if label else ''}"
                ask(world, agent, name, policy, given.runs)
                found += cells(world, label, name, given.runs)
        if world.untrained:
            ask(world, world.untrained, f"others-{world.data}", world.model, given.runs)
            found += cells(world, "", f"others-{world.data}", given.runs)
        print(*tables(found, world.costs_at), sep="\n\n", flush=True)
        everything += found
    if given.save:
        kept = [{name: cell[name] for name in KEPT.split() if name in cell} for cell in everything]
        given.save.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")


if __name__ == "__main__":
    main()
