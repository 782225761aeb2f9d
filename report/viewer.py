"""Put every reading of an evaluation on the page: to filter, to search, to open.

Holds: `viewer_section`, which packs rows and transcripts; `kept`, how many of these there are.
Leaves out: what happens in the browser
(report/viewer.js), the frame (report/viewer.html) and its looks (report/page.css), how a transcript
is shown (report/transcripts.py). No torch.
Exercise it: `python cli.py eval --n 8`. Read next: report/viewer.js.

Rows are text of others. They stand in the page as base64 of compressed JSON, in elements that a
browser does not run, and the script shows them as text alone. It unpacks a block when it is first
needed:

    rows-list            what the list and its filters show of every row
    rows-memories        the final memory of every row
    rows-transcripts-0   the first `TOGETHER` transcripts, and so on

A block of rows has columns: {name: {"values": different ones, "at": an index for every row}}.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from config.errors import clean, clip
from report.markup import Section, fill, joined, node
from report.rows import TRANSCRIPTS_MIB, Cell, fate
from report.transcripts import trace, unformed
from tasks.words import in_words

MOST = 20_000  # rows on a page: the first ones of every cell
TOGETHER = 50  # transcripts in a block
ANSWER_CHARACTERS = 600


def viewer_section(
    rows: Sequence[dict], summary: dict, records: Sequence[dict]
) -> tuple[Section, str]:
    """Return the section of an evaluation's readings, which is empty without any, and its script.

    summary: of `summarise`; records: the transcripts.
    """
    if not rows:
        return Section("Readings", ""), ""
    some = _first_of_cells(rows, MOST)
    note = f"Below is every reading. {kept(rows, records, summary['metric'])}"
    if len(some) < len(rows):
        note += f" Listed are the first {len(some):,} of {len(rows):,}, as many of every cell."
    frame = fill(_beside("html"), summary["unit"], summary["unit"], TOGETHER)
    blocks = _blocks(some, summary["metric"], records)
    return Section("Readings", joined([frame, *blocks]), note), _beside("js")


def kept(rows: Sequence[dict], records: Sequence[dict], metric: str) -> str:
    """Say of how many readings that were not fully right all sections were kept."""
    keys = {_key(record) for record in records}
    wrong = [row for row in rows if row["error"] or row[metric] < 1]
    n = sum(_key(row) in keys for row in wrong)
    return (
        f"All sections were kept of {n:,} of the {len(wrong):,} readings that were not fully right "
        f"(up to {TRANSCRIPTS_MIB} MiB for all), and of the first questions."
    )


def _beside(kind: str) -> str:
    return Path(__file__).with_suffix(f".{kind}").read_text(encoding="utf-8")


def _blocks(rows: Sequence[dict], metric: str, records: Sequence[dict]) -> Iterator[Markup]:
    """Yield the blocks of the page."""
    place = {_key(record): k for k, record in enumerate(records)}
    questions = {record["id"]: record["question"] for record in records}
    shown = [_shown(row, metric, questions, place.get(_key(row))) for row in rows]
    yield block("list", _columns(shown))
    yield block("memories", _columns([{"memory": clean(row.get("memory", ""))} for row in rows]))
    for k in range(0, len(records), TOGETHER):
        trees = [node("div", *trace(record)) for record in records[k : k + TOGETHER]]
        yield block(f"transcripts-{k // TOGETHER}", trees)


def _first_of_cells(rows: Iterable[dict], most: int) -> list[dict]:
    """Return the rows, of too many the same number of every cell."""
    by_cell: dict[Cell, list[dict]] = {}
    for row in rows:
        by_cell.setdefault(Cell.from_row(row), []).append(row)
    each = most // max(1, len(by_cell))
    few = sum(map(len, by_cell.values())) <= most
    return [row for group in by_cell.values() for row in (group if few else group[:each])]


def _key(row: dict) -> tuple:
    """Return what a row and its transcript have in common."""
    return row.get("settings"), row["id"], row["sample"]


def _shown(
    row: dict, metric: str, questions: dict[str, str], record: int | None
) -> dict[str, str | int | None]:
    """Return what the list shows of a row. Rows of earlier versions lack the question's words.

    record: the place of its transcript among all.
    """
    return {
        "agent": clean(row["agent"]),
        "kind": clean(in_words(row["question"])),
        "length": row["length"],
        "sampling": "greedy"
        if row["temperature"] == "0.0"
        else clean(f"temperature {row['temperature']}"),
        "result": _result(row, metric),
        "sections": "kept" if record is not None else "not kept",
        "kept": fate(row) if "needed" in row else "unknown",
        "question": clean(row.get("wording") or questions.get(row["id"], "") or row["id"]),
        "answer": clean(_answer(row)),
        "accepted": clean(" | ".join(row.get("answers", ()))),
        "origin": clean(f"{row['id']}, sample {row['sample']}"),
        "error": clean(row["error"]),
        "record": record,
    }


def _answer(row: dict) -> str:
    """Return a row's answer, marked where it lacks the form that was asked for."""
    if row["prediction"] is not None:
        return clip(row["prediction"], ANSWER_CHARACTERS)
    text = clip(row.get("response", "").strip(), ANSWER_CHARACTERS)
    return f"{text} {unformed()}" if text else ""


def _result(row: dict, metric: str) -> str:
    if row["error"]:
        return "failed"
    return "right" if row[metric] >= 1 else "partly right" if row[metric] > 0 else "wrong"


def _columns(rows: Sequence[dict]) -> dict[str, dict[str, list]]:
    """Return rows by column; equal texts, such as one question at many lengths, come once."""
    columns = {}
    for name in rows[0]:
        place: dict = {}
        at = [place.setdefault(row[name], len(place)) for row in rows]
        columns[name] = {"values": [*place], "at": at}
    return columns


def block(name: str, value: object) -> Markup:
    """Return an element that holds a value for the script, and that a browser does not run."""
    raw = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    text = base64.b64encode(gzip.compress(raw, 5, mtime=0)).decode()
    return fill('<script type="application/gzip" id="rows-{}">{}</script>\n', name, text)
