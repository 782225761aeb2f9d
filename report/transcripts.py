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

from config.errors import clean, clip
from data import ANSWER_FORMS, extract_answer

if TYPE_CHECKING:
    from rich.console import Group


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
    recalled: str = ""  # an earlier memory that stood in the prompt
    whence: str = ""  # and where that came from
    query: str = ""  # what it looks back for


UNUSUAL = {
    "length": "cut at its limit",
    "full": "did not fit the model's window",
    "error": "failed",
}  # finish reason -> remark
UNMADE = ("full", "error")


HELD = {  # `rememr1.Sought.held` -> what is said of it
    "answer": "holds the answer",
    "evidence": "holds evidence",
    "neither": "without evidence",
    "unknown": "evidence not known",
}


def _whence(turn: dict) -> str:
    """Where what was recalled for a turn comes from, and whether it holds evidence; "" if nothing was."""
    recalled = turn.get("recalled") or {"from": []}
    if not recalled["from"]:
        return f"nothing found for {recalled['query']!r}" if recalled.get("query") else ""
    sections = ", ".join(f"{n:,}" for n in sorted(recalled["from"]))
    held = HELD[recalled.get("held", "unknown")]
    return f"written after section {sections}, found for {recalled['query']!r} (score {recalled['score']:.2f}), {held}"


def steps_of(record: dict, most: int = 24) -> list[Shown | str]:
    """The sections of a record (`rollout.record`) in reading order; a text in place of those left out says how many and why.

    The first and the last section are always there. Between them are left out those that left the memory as it was, and of more than
    `most` others the middle.
    """
    turns = record["turns"]
    steps = []
    for number, (turn, following) in enumerate(zip(turns, [*turns[1:], None], strict=False), 1):
        if not turn[
            "final"
        ]:  # a turn that failed ends the trajectory and leaves the memory as it was
            after = (
                following["memory"]
                if following
                else turn["memory"]
                if turn["finish"] in UNMADE
                else turn.get("update", turn["response"])
            )
            remarks = [
                UNUSUAL.get(turn["finish"], ""),
                *(
                    error.replace("_", " ")
                    for error in turn.get("errors", ())
                    if error != "truncated"
                ),
            ]
            recalled = turn.get("recalled") or {"text": ""}
            steps.append(
                Shown(
                    number,
                    turn["section"],
                    turn["memory"],
                    after,
                    ", ".join(filter(None, remarks)),
                    recalled["text"],
                    _whence(turn),
                    (following or {}).get("recalled", {}).get("query", ""),
                )
            )
    ends = (1, len(steps))
    changed = [
        s.number
        for s in steps
        if s.number in ends or s.before.split() != s.after.split() or s.query or s.whence
    ]
    kept = (
        {*changed[: most - most // 2], *changed[len(changed) - most // 2 :]}
        if len(changed) > most
        else {*changed}
    )
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


def _last(record: dict) -> tuple[str, str] | None:
    """What was recalled for the answering turn, and where that came from."""
    turn = record["turns"][-1] if record["turns"] else {"final": False}
    whence = _whence(turn) if turn["final"] else ""
    return (turn["recalled"]["text"], whence) if whence else None


def render_trajectory(record: dict, characters: int = 1200, most: int = 24) -> Group:
    """A record (`rollout.record`) for the terminal: sections dim, what came into the memory green and underlined, what went red and struck."""
    from rich.console import Group
    from rich.text import Text

    styles = {"same": "", "out": "red strike", "in": "green underline"}
    n_sections = sum(not turn["final"] for turn in record["turns"])
    about = ", ".join(
        filter(None, (f"task {record['id']}, sample {record['sample']}", sampled(record)))
    )
    lines = [Text(clean(record["question"]), "bold"), Text(clean(about), "dim")]
    for step in steps_of(record, most):
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
            if name == "before  " and step.whence:
                lines.append(
                    Text.assemble(
                        ("recalled", "magenta"),
                        f" {clean(step.recalled.strip())}",
                        (f"  {clean(step.whence)}", "dim"),
                    )
                )
        if step.query:
            lines.append(Text.assemble(("looks for ", "magenta"), clean(step.query)))
    if whence := _last(record):
        lines.append(
            Text.assemble(
                ("\nrecalled for the answer ", "magenta"),
                clean(whence[0].strip()),
                (f"  {clean(whence[1])}", "dim"),
            )
        )
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


def _recalled(text: str, whence: str) -> str:
    return f'<p class="recall"><b>recalled</b> {esc(text.strip())} <small>{esc(whence)}</small></p>'


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
        if step.whence:
            parts.append(_recalled(step.recalled, step.whence))
        parts.append(f'<p class="memory"><b>memory</b>{remark} {memory}</p>')
        if step.query:
            parts.append(f'<p class="recall"><b>looks for</b> {esc(step.query)}</p>')
    if last := _last(record):
        parts.append(_recalled(*last))
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
