"""One reading as a person sees it: its sections, the memory after each, and what changed in it.

The page's template (report/page.html.j2) and the terminal (`render`) show the same parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING

from agents import find
from config.errors import clean, clip
from data import ANSWER_FORMS, extract_answer, grade
from memagent import NO_MEMORY, Agent, Line
from report.records import WITHOUT_RESPONSE
from tasks.words import title_of

if TYPE_CHECKING:
    from rich.text import Text

# ---------------------------------------------------------------- differences of memories


def diff(before: str, after: str) -> list[tuple[str, str]]:
    """Return the word-level difference of two texts: pieces (same | out | in, text), in order.

    Differences of white space alone are none, and the first memory says nothing. In texts of
    200 words and more frequent words are not looked for, so that it takes no time to speak of.

    >>> diff("Anna met Otto.", "Anna met Boris.")
    [('same', 'Anna met '), ('out', 'Otto. '), ('in', 'Boris. ')]
    """
    before, after = ("" if text.strip() == NO_MEMORY else text for text in (before, after))
    old, new = (re.findall(r"\S+\s*", text + " ") for text in (before, after))
    if before.split() == after.split():
        return [("same", after)] if new else []
    pieces = []
    for kind, i, j, k, m in SequenceMatcher(None, before.split(), after.split()).get_opcodes():
        removed, added = "".join(old[i:j]), "".join(new[k:m])
        pieces += [("same", added)] if kind == "equal" else [("out", removed), ("in", added)]
    return [(kind, text) for kind, text in pieces if text]


def marked(pieces: Sequence[tuple[str, str]]) -> str:
    """Write a difference where there are no colours, as git's word diff does.

    >>> marked(diff("Anna met Otto.", "Anna met Boris."))
    'Anna met [-Otto.-] {+Boris.+}'
    """
    marks, text = {"same": "{}{}", "out": "[-{}-]{}", "in": "{{+{}+}}{}"}, ""
    for kind, piece in pieces:
        words = piece.rstrip()
        text += marks[kind].format(words, piece[len(words) :])
    return text.rstrip()


# ---------------------------------------------------------------- the sections of a reading

REMARKS = {  # finish reason -> remark
    "length": "cut at its limit",
    "full": "did not fit the model's window",
    "error": "failed",
}
# what notes raise that are another agent's, or come from a damaged file
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)

Cells = tuple[dict[str, list[str]], ...]  # an agent's table: rows of column -> lines of the cell


@dataclass(frozen=True, slots=True)
class Step:
    """One section, and what became of the memory in it."""

    number: int  # from 1
    section: str
    where: str  # the pages that the section stands on, "" where they are not known
    changes: list[tuple[str, str]]  # `diff` of the memory before and after it
    remark: str  # on an unusual end of the turn, else ""
    lines: tuple[Line, ...]  # of the agent
    table: Cells

    @property
    def changed(self) -> bool:
        """Whether there is anything to show but the section itself."""
        moved = any(kind != "same" for kind, _ in self.changes)
        return moved or bool(self.lines or self.table)


def steps_of(record: dict, agent: type[Agent] | None = None) -> list[Step]:
    """List the sections of a record. agent: that made it, where the record does not name it.

    Questions to the policy as it was before training are no sections. What an agent shows of a turn
    aside stands with the next section.
    """
    reader, steps, ahead = _reader(record, agent), [], ()
    turns = [turn for turn in record["turns"] if turn["final"] or not turn.get("frozen")]
    for k, turn in enumerate(turns):
        lines, table = _notes(reader, turn)
        if turn.get("aside"):
            ahead += tuple(replace(line, before=True) for line in lines)
        elif not turn["final"]:
            where, remark = str(turn.get("where", "")), REMARKS.get(turn["finish"], "")
            changes = diff(turn["memory"], _memory_after(reader, turn, turns[k + 1 :]))
            shown = (where, changes, remark, ahead + lines, table)
            steps.append(Step(len(steps) + 1, turn["section"], *shown))
            ahead = ()
    return steps


def _memory_after(reader: Agent, turn: dict, later: Sequence[dict]) -> str:
    """Return the memory that a turn leaves: the one that the next prompt shows, if there is one."""
    following = next((each for each in later if not each.get("aside")), None)
    if following and not following.get("frozen"):  # which is shown what its question needs
        return following["memory"]
    if turn["finish"] in WITHOUT_RESPONSE:  # it ends the trajectory
        return turn["memory"]
    stored = turn.get("memory_after")
    return reader.memory_after(turn) if stored is None else stored


def _reader(record: dict, agent: type[Agent] | None) -> Agent:
    return (agent or find.known(record.get("agent", "")) or Agent)()


def _notes(reader: Agent, turn: dict) -> tuple[tuple[Line, ...], Cells]:
    """Return what an agent shows of a recorded turn: lines and a table. Notes that cannot be read
    give a line that says so, and no table."""
    try:
        lines = tuple(reader.lines(turn))
        given = reader.extras["table"](reader, turn) if "table" in reader.extras else ()
        table = tuple(
            {name: [cell] if isinstance(cell, str) else [*map(str, cell)] for name, cell in row}
            for row in (row.items() for row in given)
        )
    except UNREADABLE:
        return (Line("notes", "cannot be read"),), ()
    return lines, table


MOST = 24  # sections of a reading that are shown, where not all are


def runs_of(steps: Sequence[Step], most: int | None = MOST) -> Iterator[tuple[str, list[Step]]]:
    """Yield (note, sections) in order: without a note what is shown, with one what is not.

    The first and the last section are always shown, the others if something changed in them; of
    more than `most` of all these the middle is not.
    """
    shown = [step.number for step in steps if step.changed or step.number in (1, len(steps))]
    changed = {*shown}
    if most and len(shown) > most:
        shown = shown[: most - most // 2] + shown[-(most // 2) :]
    visible = {*shown}
    for is_shown, run in groupby(steps, lambda step: step.number in visible):
        run = [*run]
        first, last = run[0].number, run[-1].number
        which = f"Section {first:,}" if first == last else f"Sections {first:,} to {last:,}"
        why = "not shown" if {step.number for step in run} & changed else "the memory stayed"
        yield "" if is_shown else f"{which}: {why}", run


def end_of(record: dict, agent: type[Agent] | None = None) -> Step:
    """Return the turns that answer as one step: what they were shown, as all of a document at once,
    and the agent's lines."""
    reader, turns = _reader(record, agent), record["turns"]
    last = next((k for k in reversed(range(len(turns))) if turns[k]["final"]), len(turns))
    notes = [_notes(reader, turn) for turn in turns[last:]]
    lines = tuple(line for lines, _ in notes for line in lines)
    final, table = (turns[last], notes[0][1]) if notes else ({}, ())
    where = str(final.get("where", ""))
    return Step(0, final.get("section", "").strip(), where, [], "", lines, table)


def facts_of(record: dict) -> dict[str, str]:
    """Map labels to the facts about the end of a trajectory.

    A question of a user's own has no accepted answers, and nothing that depends on them; an
    episode of training that is paid for otherwise has a reward all the same.
    """
    form, reward, facts = record.get("form") or "", record["reward"], {}
    final, formed = extract_answer(record["answer"], form)
    if record["question"]:
        facts["answer"] = record["answer"].strip() or "(none)"
    if record["answers"]:
        if final and not formed:
            facts["form"] = unformed(form)
        facts["right answer"] = " | ".join(record["answers"])
    if record["error"]:
        facts["error"] = record["error"]
    if record["answers"] or record["step"] is not None:
        facts["reward"] = "none: left out of its group" if reward is None else f"{reward:g}"
    return facts


def unformed(form: str = "") -> str:
    """Return the note on an answer that lacks the required form; form "" = an unknown one."""
    asked = f", {ANSWER_FORMS[form]}" if form in ANSWER_FORMS else ""
    return f"(not in the form that was asked for{asked})"


def verdict(record: dict) -> str:
    """Return right, partly right, wrong, failed, or answered where nobody knows the right answer.

    A record may have the score of its row of an evaluation. Without one the answer is graded by
    containment: a reward may hold more than the answer, such as a part for the memory.
    """
    if record["error"]:
        return "failed"
    score = record.get("score")
    if score is None and record["answers"]:
        score = grade(record["answer"], record["answers"], record.get("form") or "boxed").sub_em
    if score is not None:
        return "right" if score >= 1 else "partly right" if score > 0 else "wrong"
    if record["step"] is None:
        return "answered"
    # an episode that is paid for otherwise
    return "no reward" if record["reward"] is None else f"reward {record['reward']:.3g}"


def origin(record: dict) -> str:
    """Describe where a record comes from: its cell of an evaluation, or its place in training."""
    if cell := record.get("cell"):
        how = "{agent}, length {length:,}, temperature {temperature}".format(**cell)
        return f"{title_of(cell['question'])}; {how}"
    temperature, parts = record.get("temperature"), [title_of(record["kind"])]
    if record["step"] is not None:
        parts.append(f"training step {record['step']}")
    if temperature is not None:
        parts.append(f"sampled at temperature {temperature:g}" if temperature else "greedy")
    return "; ".join(filter(None, parts))


# ---------------------------------------------------------------- in the terminal

LOOKS = {"same": "", "in": "green underline", "out": "red strike"}


def styled(line: Line) -> Text:
    """Write an agent's line on a turn."""
    from rich.text import Text

    note = (f" {clean(line.note)}", "dim") if line.note else ""
    return Text.assemble((clean(line.label), "magenta"), " ", clean(line.text), note)


def render(record: dict, characters: int = 1200, agent: type[Agent] | None = None) -> Text:
    """Render a record: sections dim, words new in the memory {+green+}, words gone [-red-].

    characters: of a section. agent: as in `steps_of`.
    """
    from rich.text import Text

    out: list[Text] = []

    def add(*parts: tuple[str, str]) -> None:
        out.append(Text.assemble(*((clean(text), style) for text, style in parts)))

    def add_section(heading: str, where: str, section: str) -> None:
        add((f"\n{heading}{where and ', '}{where}", "cyan"))
        add((clip(section.strip(), characters), "dim"))

    def add_table(rows: Cells) -> None:
        for name, lines in (column for row in rows for column in row.items()):
            add((f"{name}  ", "magenta"), ("\n    ".join(lines) or "-", ""))

    steps, end = steps_of(record, agent), end_of(record, agent)
    add((record["question"] or record["id"], "bold"))
    origins = f"{verdict(record)}; task {record['id']}, sample {record['sample']}; {origin(record)}"
    add((origins, "dim"))
    for note, run in runs_of(steps, MOST):
        if note:
            add((f"… {note} …", "italic"))
            continue
        for step in run:
            add_section(f"section {step.number:,} of {len(steps):,}", step.where, step.section)
            out += (styled(line) for line in step.lines if line.before)
            memory = [(f"{marked([piece])} ", LOOKS[piece[0]]) for piece in step.changes]
            remark = (f"{step.remark} " * bool(step.remark), "yellow")
            add(("memory ", "magenta"), remark, *(memory or [("(empty)", "")]))
            out += (styled(line) for line in step.lines if not line.before)
            add_table(step.table)
    out += map(styled, end.lines)
    add_table(end.table)
    if end.section:
        add_section("read at once", end.where, end.section)
    for name, fact in facts_of(record).items():
        add((f"{name}  ", "cyan"), (fact, ""))
    return Text("\n").join(out)
