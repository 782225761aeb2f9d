"""One trajectory for a person: in the terminal, and as a part of report.html.

Holds: `render_trajectory`, `transcript`, `is_record`, the word-level difference of two memories that both show. Leaves out: which
trajectories are kept (report/runlog.py, eval.py) and shown (report/page.py). No torch.
Exercise it: `python cli.py show RUN`. Read next: report/page.py.

Questions, documents and answers are somebody else's text: all of it goes through `clean` and is then escaped (HTML) or kept apart from
markup (rich's Text).
"""

from __future__ import annotations

import html
import re
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING

from agents import find
from config.errors import clean, clip
from data import ANSWER_FORMS, extract_answer
from memagent import Agent, Line

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text


def diff(before: str, after: str) -> list[tuple[str, str]]:
    """Word by word, what became of a text: pieces (same | out | in, text) in reading order; white space alone is no difference.

    >>> diff("Anna met Otto.", "Anna met Boris.")
    [('same', 'Anna met '), ('out', 'Otto. '), ('in', 'Boris. ')]
    """
    old, new = (re.findall(r"\S+\s*", text + " ") for text in (before, after))
    pieces = []
    for kind, i, j, k, m in SequenceMatcher(
        None, before.split(), after.split(), autojunk=False
    ).get_opcodes():
        same = kind == "equal"
        pieces += (
            [("same", "".join(new[k:m]))]
            if same
            else [("out", "".join(old[i:j])), ("in", "".join(new[k:m]))]
        )
    return [piece for piece in pieces if piece[1]]


@dataclass(frozen=True, slots=True)
class Shown:
    """One section read: the memory before and after."""

    number: int  # from 1
    section: str
    before: str
    after: str
    remark: str  # on how the turn ended, "" if as usual
    lines: tuple[Line, ...] = ()  # what the agent adds


UNUSUAL = {
    "length": "cut at its limit",
    "full": "did not fit the model's window",
    "error": "failed",
}  # finish reason -> remark
UNMADE = ("full", "error")


def agent_of(record: dict, agent: type[Agent] | None = None) -> Agent:
    """Return the agent by whose `lines` a record is shown: the one given, else the record's if it is known."""
    kind = agent or find.known(record.get("agent", "")) or Agent
    return kind()


def lines_of(agent: Agent, turn: dict) -> list[Line]:
    """Return what an agent adds to a recorded turn; notes that another agent or a damaged file left say so."""
    try:
        return list(agent.lines(turn))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return [Line("notes", "cannot be read")]


def steps_of(record: dict, most: int = 24, agent: type[Agent] | None = None) -> list[Shown | str]:
    """List the sections of a record in reading order; a text in place of those left out says how many and why.

    The first and the last section are always there. Of the others those that left the memory as it was
    are left out, and of more than `most` the middle.
    """
    turns, reader = record["turns"], agent_of(record, agent)
    steps = []
    for number, (turn, following) in enumerate(zip(turns, [*turns[1:], None], strict=False), 1):
        if turn["final"]:
            continue
        if following:
            after = following["memory"]
        else:  # a turn that failed ends the trajectory and leaves the memory as it was
            failed = turn["finish"] in UNMADE
            after = turn["memory"] if failed else reader.memory_after(turn)
        remark = UNUSUAL.get(turn["finish"], "")
        lines = tuple(lines_of(reader, turn))
        steps.append(Shown(number, turn["section"], turn["memory"], after, remark, lines))
    ends = (1, len(steps))
    changed = [
        s.number
        for s in steps
        if s.number in ends or s.before.split() != s.after.split() or s.lines
    ]
    kept = {*changed}
    if len(changed) > most:
        kept = {*changed[: most - most // 2], *changed[len(changed) - most // 2 :]}
    shown: list[Shown | str] = []
    for keep, run in groupby(steps, lambda step: step.number in kept):
        run = list(run)
        why = (
            ": the memory stayed as it was"
            if not any(step.number in changed for step in run)
            else ""
        )
        shown += (
            run
            if keep
            else [f"{len(run):,} {'section' if len(run) == 1 else 'sections'} left out{why}"]
        )
    return shown


def unformed(form: str) -> str:
    """What is said beside an answer that is not in the form asked for; form "": nobody knows which."""
    return f"(not in the form that was asked for{f', {ANSWER_FORMS[form]}' if form in ANSWER_FORMS else ''}: graded as wrong)"


def sampled(record: dict) -> str:
    """How a trajectory was drawn: its training step and the temperature, "" where the record does not say."""
    at = record.get("temperature")
    parts = [f"training step {record['step']}"] if record["step"] is not None else []
    if at is not None:
        hot = (
            " (above 1: words are drawn more at random than the policy has them, memories are rougher than in an evaluation)"
            * (at > 1)
        )
        parts.append(f"sampled at temperature {at:g}{hot}" if at else "greedy")
    return ", ".join(parts)


def _facts(record: dict) -> dict[str, str]:
    """How it ended: answer, whether it has the form asked for, accepted answers, finish reasons of the turns, error, reward."""
    finishes = Counter(turn["finish"] for turn in record["turns"])
    final, formed = extract_answer(record["answer"], form := record.get("form") or "")
    return {
        "answer": record["answer"].strip() or "(none)",
        **({"form": unformed(form)} if final and not formed else {}),
        "gold": " | ".join(record["answers"]),
        "turns": ", ".join(f"{n} {finish}" for finish, n in finishes.items()) or "none",
        **({"error": record["error"]} if record["error"] else {}),
        "reward": f"{record['reward']:g}",
    }


def _read(record: dict) -> str:
    """What the answering turn itself has read: the document of full, the sections of bm25, nothing for memagent."""
    return (
        record["turns"][-1]["section"].strip()
        if record["turns"] and record["turns"][-1]["final"]
        else ""
    )


def _last(record: dict, agent: type[Agent] | None = None) -> list[Line]:
    """Return what the agent adds to the answering turn."""
    turn = record["turns"][-1] if record["turns"] else {"final": False}
    return lines_of(agent_of(record, agent), turn) if turn["final"] else []


def styled(line: Line) -> Text:
    """Return what an agent adds to a turn, for the terminal."""
    from rich.text import Text

    note = (f"  {clean(line.note)}", "dim") if line.note else ""
    return Text.assemble((f"{clean(line.label)} ", "magenta"), clean(line.text), note)


def render_trajectory(
    record: dict, characters: int = 1200, most: int = 24, agent: type[Agent] | None = None
) -> Group:
    """Render a record for the terminal: sections dim, what came into the memory green, what went red.

    agent: by which its turns are shown, where it is not the record's own.
    """
    from rich.console import Group
    from rich.text import Text

    styles = {"same": "", "out": "red strike", "in": "green underline"}
    n_sections = sum(not turn["final"] for turn in record["turns"])
    about = ", ".join(
        filter(None, (f"task {record['id']}, sample {record['sample']}", sampled(record)))
    )
    lines = [Text(clean(record["question"]), "bold"), Text(clean(about), "dim")]
    for step in steps_of(record, most, agent):
        if isinstance(step, str):
            lines.append(Text(f"\n… {step}", "italic"))
            continue
        pieces = diff(clean(step.before), clean(step.after))
        lines.append(
            Text.assemble(
                (f"\nsection {step.number} of {n_sections}  ", "cyan"), (step.remark, "yellow")
            )
        )
        lines.append(Text(clip(clean(step.section.strip()), characters), "dim"))
        for name, kinds in (("before  ", ("same", "out")), ("after   ", ("same", "in"))):
            words = [(text, styles[kind]) for kind, text in pieces if kind in kinds]
            lines.append(Text.assemble((name, "cyan"), *words))
            before = name == "before  "
            lines += [styled(line) for line in step.lines if line.before == before]
    if last := _last(record, agent):
        lines += [Text("\nfor the answer", "cyan"), *map(styled, last)]
    if read := _read(record):
        lines += [Text("\nread at once", "cyan"), Text(clip(clean(read), characters), "dim")]
    facts = {name: (clean(text), "") for name, text in _facts(record).items()}
    facts["reward"] = f"{record['reward']:g}", "bold green" if record["reward"] >= 1 else "bold red"
    return Group(
        *lines,
        Text(),
        *(Text.assemble((f"{name:8}", "cyan"), fact) for name, fact in facts.items()),
    )


# ---------------------------------------------------------------- on the page


def esc(text: object) -> str:
    return html.escape(clean(text))


def _html(line: Line) -> str:
    note = f" <small>{esc(line.note)}</small>" if line.note else ""
    return f'<p class="recall"><b>{esc(line.label)}</b> {esc(line.text)}{note}</p>'


def transcript(record: dict, unfolded: bool) -> str:
    tags = {"same": "{}", "out": "<del>{}</del>", "in": "<ins>{}</ins>"}
    n_sections = sum(not turn["final"] for turn in record["turns"])
    parts = []
    for step in steps_of(record):
        if isinstance(step, str):
            parts.append(f'<p class="gap">… {step} …</p>')
            continue
        memory = (
            "".join(tags[kind].format(esc(text)) for kind, text in diff(step.before, step.after))
            or "(empty)"
        )
        remark = f' <span class="tag">{step.remark}</span>' if step.remark else ""
        parts.append(f"<h3>Section {step.number:,} of {n_sections:,}</h3>")
        parts.append(f'<p class="section">{esc(clip(step.section.strip(), 3000))}</p>')
        parts += [_html(line) for line in step.lines if line.before]
        parts.append(f'<p class="memory"><b>memory</b>{remark} {memory}</p>')
        parts += [_html(line) for line in step.lines if not line.before]
    parts += map(_html, _last(record))
    if read := _read(record):
        parts.append(f'<h3>Read at once</h3><p class="section">{esc(clip(read, 3000))}</p>')
    facts = "".join(f"<dt>{name}</dt><dd>{esc(text)}</dd>" for name, text in _facts(record).items())
    verdict, look = (
        ("right", "good")
        if record["reward"] >= 1
        else ("wrong" if record["reward"] <= 0 else "partly right", "bad")
    )
    cell = record.get("cell")
    name = (
        "{agent}, {question}, length {length:,}, temperature {temperature}".format(**cell)
        if cell
        else record["kind"]
    )
    if not cell and (how := sampled(record)):
        name = f"{name}, {how}"
    final, formed = extract_answer(record["answer"], record.get("form") or "")
    verdict += ", not in the form asked for" * bool(final and not formed and record["reward"] < 1)
    return (
        f'<details class="box"{" open" * unfolded}><summary><span class="tag {look}">{verdict}</span> {esc(record["question"])} '
        f"<small>{esc(name)}</small></summary>{''.join(parts)}<dl>{facts}</dl></details>"
    )
