"""What is kept of a turn of an agent that edits a store: its operations, and how they are shown.

Holds: `EditNotes`, `noted`, `counts_of`, `lines_of`, `table_of`, `edited`. Leaves out: the agent
(agents/memupdate.py), what its episodes are paid (agents/pay.py), pages (report/). No torch.
Exercise it: `pytest tests/agents/test_memupdate.py`. Read next: agents/pay.py.

A record of a turn has its notes as JSON values: what is shown of one takes them as a dict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agents.store import Op, number
from memagent import Line

CURVE = 64  # sessions after which the store's size is counted


# of an episode's reward and its store, each a column of metrics.csv: the mean of the episodes that
# have it (see agents/pay.py)
PARTS = (
    "delta", "format", "size", "compression", "retained", "unread", "tokens_before", "tokens_after",
    *(f"delta_{category}" for category in range(1, 6)),
)  # fmt: skip
OPS = ("search_memory", "create", "update", "noop", "delete_memory", "sample_memory",
       "merge_memory", "split_memory")  # fmt: skip


@dataclass(slots=True)
class EditNotes:
    """What is kept of a turn."""

    phase: Literal["edit", "probe", "answer"]
    session: int | None = None
    ops: list[dict] = field(default_factory=list)  # operations, without the entries
    entries: int = 0  # after the turn
    tokens: int = 0  # of them
    stop: str = ""  # why the editing of the session or the episode ended with this turn
    probe: str = ""  # id of the question
    found: list[str] = field(default_factory=list)  # lines of the entries that it is answered from
    recall: float | None = None  # share of its evidence that they were taken from; None: unknown
    search_s: float = 0.0  # to find them
    search_cut: int = 0  # texts of the search that its embedder did not read to their end
    # of the whole episode, in its last turn: parts of the reward, and what each edit turn has won
    parts: dict[str, float] = field(default_factory=dict)
    gains: list[float] = field(default_factory=list)
    answers: list[dict] = field(default_factory=list)  # of the probes: see `MemUpdate._row`
    # in the last turn that edits: the whole store with its journal, as lines of its file
    store: list[str] = field(default_factory=list)


def noted(op: Op) -> dict:
    """Return an operation as notes keep it, with ids and lines of the entries that it wrote, "" of
    one that it deleted."""
    return {
        "tool": op.tool,
        "args": op.args,
        "ok": op.ok,
        "code": op.code,
        "message": op.message,
        "ids": [entry.id for entry in op.after],
        "lines": ["" if entry.deleted else entry.line for entry in op.after],
    }


def counts_of(notes: EditNotes) -> Mapping[str, float]:
    """Count what stands in rows, reports and metrics."""
    if notes.phase == "probe":
        return {}
    if notes.phase == "answer":
        counts = {"store_at_end": notes.tokens, "entries_at_end": notes.entries}
        counts |= {"answers": 1, "search_s": notes.search_s, "search_cut": notes.search_cut}
        return counts | ({} if notes.recall is None else {"recall": notes.recall, "sought": 1})
    counts = Counter(edit_turns=1, store_tokens=notes.tokens, store_entries=notes.entries)
    for op in notes.ops:
        counts["calls"] += 1
        counts["valid_calls"] += op["ok"]
        what = op["args"].get("operation") or op["tool"]  # create and update are one tool
        counts[f"op_{what}" if op["ok"] else f"error_{op['code']}"] += 1
    if notes.stop:
        counts[f"stop_{notes.stop}"] += 1
        if notes.session and notes.session <= CURVE:
            counts[f"tokens_after_{notes.session}"] += notes.tokens
            counts[f"stores_after_{notes.session}"] += 1
    if notes.parts:
        counts["episodes"] += 1
        counts.update(score_before=notes.parts["score_before"])
        counts.update(score_after=notes.parts["score_after"])
        for part in notes.parts.keys() & {*PARTS}:
            counts.update({f"part_{part}": notes.parts[part], f"with_{part}": 1})
    return counts


def lines_of(notes: dict) -> list[Line]:
    """Return what is shown of a turn: what was found for it, its calls, what the episode is worth,
    why editing ended."""
    lines = [Line("found", line, before=True) for line in notes.get("found", ())]
    lines += [
        Line(op["tool"], op["message"], "" if op["ok"] else op["code"])
        for op in notes.get("ops", ())
    ]
    if notes.get("parts"):
        parts = ", ".join(f"{name} {value:.3f}" for name, value in notes["parts"].items())
        lines.append(Line("worth", parts))
    if notes.get("stop"):
        lines.append(Line("stops", notes["stop"].replace("_", " ")))
    return lines


def table_of(notes: dict) -> list[dict[str, str | list[str]]]:
    """Return, of the turn that ends editing, what each probe was answered before and after, with
    the score, and the operations and entries that have changed it."""
    return [
        {
            "question": a["question"],
            "expected": a["expected"],
            "before": f"{a['before'] or 'nothing'} ({a['score_before']:g})",
            "after": f"{a['after'] or 'nothing'} ({a['score_after']:g}, {a['won']:+g})",
            "found before": a["found_before"],
            "found after": a["found_after"],
            "changed by": a["caused"],
            "changed entries": a["entries"],
        }
        for a in notes.get("answers", ())
    ]


def edited(memory: str, notes: dict) -> list[str]:
    """Return the entries of a prompt, a line each, as the turn's operations have left them."""
    lines = {
        line.partition("]")[0][1:]: line
        for line in map(str.strip, memory.splitlines())
        if line.startswith("[")
    }
    for op in notes.get("ops", ()):
        lines |= zip(op["ids"], op.get("lines", ()), strict=False)
    return [lines[id] for id in sorted(lines, key=number) if lines[id]]
