"""Show one trajectory to a person: in the terminal, and as a part of report.html.

Holds: `render_trajectory`, `transcript`, and `diff`, the word-level difference of two memories that
both show; `marked`, the same without colours. Leaves out: which trajectories are kept
(report/runlog.py, eval.py) and shown (report/page.py). No torch.
Exercise it: `python cli.py show RUN`. Read next: report/page.py.

Questions, documents and answers are foreign text: all of it goes through `clean` and is then
escaped (by the template) or kept apart from markup (rich's Text).

An agent may have a method `table(turn)` beside `Agent.lines`: what a recorded turn shows as a
table, one mapping a row, column -> text or a list of lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from functools import partial
from itertools import chain, groupby, takewhile
from typing import TYPE_CHECKING

from agents import find
from config.errors import clean, clip
from data import ANSWER_FORMS, extract_answer
from memagent import Agent, Line
from report.markup import Markup, Node, fill, html, joined, node
from report.records import WITHOUT_RESPONSE
from tasks.words import title_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text


MOST_PAIRS = 256  # equal words looked at for each word of two texts, 20 to 170 in plain English


class _Matcher(SequenceMatcher):
    """One that is linear: of what is left by then, it finds the beginning that both have."""

    looked_at = 0

    def find_longest_match(self, alo=0, ahi=None, blo=0, bhi=None) -> Match:
        self.looked_at += sum(1 + len(self.b2j.get(word, ())) for word in self.a[alo:ahi])
        if self.looked_at > MOST_PAIRS * (len(self.a) + len(self.b)):
            pairs = zip(self.a[alo:ahi], self.b[blo:bhi], strict=False)
            return Match(
                alo, blo, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            )
        return super().find_longest_match(alo, ahi, blo, bhi)


def diff(before: str, after: str) -> list[tuple[str, str]]:
    """Return the word-level difference of two texts: pieces (same | out | in, text), in order.

    Differences of white space alone are none. Long texts of few words are compared in part.

    >>> diff("Anna met Otto.", "Anna met Boris.")
    [('same', 'Anna met '), ('out', 'Otto. '), ('in', 'Boris. ')]
    """
    old, new = (re.findall(r"\S+\s*", text + " ") for text in (before, after))
    pieces = []
    matcher = _Matcher(None, before.split(), after.split(), autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        removed, inserted = "".join(old[i:j]), "".join(new[k:m])
        pieces += [("same", inserted)] if kind == "equal" else [("out", removed), ("in", inserted)]
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


TableRow = dict[str, list[str]]  # of an agent's table: column -> lines of the cell


@dataclass(frozen=True, slots=True)
class SectionStep:
    """One section, with the memory before and after it."""

    number: int  # from 1
    section: str
    before: str
    after: str
    remark: str  # on an unusual end of the turn, else ""
    lines: tuple[Line, ...] = ()  # of the agent
    where: str = ""  # the pages that the section stands on, where they are known
    table: tuple[TableRow, ...] = ()  # of the agent


@dataclass(frozen=True, slots=True)
class View:
    """What is shown of a record, in the order of its reading."""

    steps: list[SectionStep | str]  # `steps_of`
    sections: int
    lines: list[Line]  # of the agent on the turn that answers, and on those aside after it
    table: list[TableRow]  # of the agent on the turn that answers
    text: str  # that the turn that answers reads itself, of agents that read in one prompt
    where: str  # the pages that this text stands on


# finish reason -> remark
REMARKS = {
    "length": "cut at its limit",
    "full": "did not fit the model's window",
    "error": "failed",
}


# notes of another agent, or from a damaged file
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def agent_of(record: dict, agent: type[Agent] | None = None) -> Agent:
    """Return the agent whose `lines` show a record: the one given, else the record's, if known."""
    kind = agent or find.known(record.get("agent", "")) or Agent
    return kind()


def lines_of(agent: Agent, turn: dict) -> list[Line]:
    """Return the agent's lines on a recorded turn; notes that cannot be read give one that says
    so."""
    try:
        return list(agent.lines(turn))
    except UNREADABLE:
        return [Line("notes", "cannot be read")]


def table_of(agent: Agent, turn: dict) -> list[TableRow]:
    """Return the agent's table on a recorded turn; [] if it has none, or cannot read the notes."""
    try:
        return [
            {
                str(name): [cell] if isinstance(cell, str) else [*map(str, cell)]
                for name, cell in row.items()
            }
            for row in agent.table(turn)
        ]
    except UNREADABLE:
        return []


def view_of(record: dict, most: int | None, agent: type[Agent] | None = None) -> View:
    """Return what is shown of a record; most: sections, as in `steps_of`."""
    reader, turns = agent_of(record, agent), record["turns"]
    last = next((k for k in reversed(range(len(turns))) if turns[k]["final"]), len(turns))
    final = next(iter(turns[last:]), {"section": ""})
    return View(
        steps_of(record, most, agent),
        n_sections(record),
        [line for turn in turns[last:] for line in lines_of(reader, turn)],
        table_of(reader, final) if turns[last:] else [],
        final["section"].strip(),
        str(final.get("where", "")),
    )


def steps_of(
    record: dict, most: int | None = 24, agent: type[Agent] | None = None
) -> list[SectionStep | str]:
    """List the sections of a record in reading order, with a text for each run of omitted ones.

    The first and the last section are never omitted. The others are if they left the memory as it
    was and have no lines; of more than `most` remaining sections the middle is omitted too. None
    omits nothing. Questions to the policy as it was before training are no sections.
    """
    steps, n_asked = _all_steps(record, agent), sum(map(_is_question, record["turns"]))
    questions = f"{n_asked:,} question{'s' * (n_asked > 1)}"
    end = [f"{questions} to the policy as it was before training left out"] * (n_asked > 0)
    if most is None:
        return [*steps, *end]
    ends = (1, len(steps))
    changed = [
        step.number
        for step in steps
        if step.number in ends
        or step.before.split() != step.after.split()
        or step.lines
        or step.table
    ]
    visible = {*changed}
    if len(changed) > most:
        visible = {*changed[: most - most // 2], *changed[len(changed) - most // 2 :]}
    result: list[SectionStep | str] = []
    for keep, run in groupby(steps, lambda step: step.number in visible):
        run = list(run)
        result += run if keep else [_omission([step.number in changed for step in run])]
    return result + end


def _omission(changed: list[bool]) -> str:
    """Say how many sections are left out, and why if none of them changed the memory."""
    n = len(changed)
    why = "" if any(changed) else ": the memory stayed as it was"
    return f"{n:,} {'section' if n == 1 else 'sections'} left out{why}"


def _all_steps(record: dict, agent: type[Agent] | None = None) -> list[SectionStep]:
    """List all sections of a record. Lines of a turn aside, such as a plan, stand with the next."""
    reader, steps, ahead = agent_of(record, agent), [], ()
    turns = [turn for turn in record["turns"] if not _is_question(turn)]
    for k, turn in enumerate(turns):
        following = next((each for each in turns[k + 1 :] if not each.get("aside")), None)
        if turn.get("aside"):
            ahead = (*ahead, *(replace(line, before=True) for line in lines_of(reader, turn)))
            continue
        if turn["final"]:
            continue
        if following and not following.get("frozen"):  # which is shown what its question needs
            after = following["memory"]
        else:  # a turn that failed ends the trajectory and leaves the memory as it was
            failed = turn["finish"] in WITHOUT_RESPONSE
            after = turn["memory"] if failed else turn.get("memory_after")
            after = reader.memory_after(turn) if after is None else after
        remark = REMARKS.get(turn["finish"], "")
        lines, table = (*ahead, *lines_of(reader, turn)), tuple(table_of(reader, turn))
        where, number, ahead = str(turn.get("where", "")), len(steps) + 1, ()
        step = SectionStep(
            number, turn["section"], turn["memory"], after, remark, lines, where, table
        )
        steps.append(step)
    return steps


def _is_question(turn: dict) -> bool:
    """Whether a turn neither reads nor answers: it asks the policy as it was before training."""
    return bool(turn.get("frozen")) and not turn["final"]


def n_sections(record: dict) -> int:
    """Count the turns of a record that work on a section."""
    others = (turn["final"] or turn.get("aside") or _is_question(turn) for turn in record["turns"])
    return sum(not other for other in others)


def _title(record: dict) -> str:
    """Return the question of a record; its id, where the questions are hidden."""
    return record["question"] or record["id"]


def unformed(form: str, wrong: bool = True) -> str:
    """Return the note on an answer that lacks the required form; form "" = an unknown one.

    wrong: whether that made it worth nothing; a reward of the user's may look at something else.
    """
    name = f", {ANSWER_FORMS[form]}" if form in ANSWER_FORMS else ""
    return f"(not in the form that was asked for{name}{': graded as wrong' if wrong else ''})"


def sampled(record: dict) -> str:
    """Describe how a trajectory was sampled, by training step and temperature as far as known."""
    temperature = record.get("temperature")
    parts = [f"training step {record['step']}"] if record["step"] is not None else []
    if temperature is not None:
        parts.append(f"sampled at temperature {temperature:g}" if temperature else "greedy")
        if temperature > 1:
            parts[-1] += (
                " (above 1: sampling is more random than the policy itself, and memories are "
                "rougher than in an evaluation)"
            )
    return ", ".join(parts)


def _facts(record: dict) -> dict[str, str]:
    """Map labels to the facts about the end of a trajectory: answer, finish reasons, reward, ...

    A question of a user's own has no accepted answers, and nothing that depends on them; an
    episode of training that is paid for otherwise has a reward all the same.
    """
    finishes = Counter(turn["finish"] for turn in record["turns"])
    form = record.get("form") or ""
    final, formed = extract_answer(record["answer"], form)
    graded, reward = bool(record["answers"]), record["reward"]
    paid = "none: left out of its group" if reward is None else f"{reward:g}"
    return {
        **({"answer": record["answer"].strip() or "(none)"} if record["question"] else {}),
        **(
            {"form": unformed(form, not reward or reward <= 0)}
            if graded and final and not formed
            else {}
        ),
        **({"gold": " | ".join(record["answers"])} if graded else {}),
        "turns": ", ".join(f"{n} {finish}" for finish, n in finishes.items()) or "none",
        **({"error": record["error"]} if record["error"] else {}),
        **({"reward": paid} if graded or record["step"] is not None else {}),
    }


# ---------------------------------------------------------------- in the terminal


def styled(line: Line) -> Text:
    """Render an agent's line on a turn for the terminal."""
    from rich.text import Text

    note = (f"  {clean(line.note)}", "dim") if line.note else ""
    return Text.assemble((f"{clean(line.label)} ", "magenta"), clean(line.text), note)


def _plain(table: Iterable[TableRow]) -> Iterator[Text]:
    """Render an agent's table for the terminal: a line per cell, since its texts are long."""
    from rich.text import Text

    for row in table:
        yield Text()
        for name, cell in row.items():
            words = "\n    ".join(map(clean, cell)) or "-"
            yield Text.assemble((f"{clean(name)}  ", "magenta"), words)


def render_trajectory(
    record: dict, characters: int = 1200, most: int = 24, agent: type[Agent] | None = None
) -> Group:
    """Render a record: sections dim, words new in the memory green, words gone from it red.

    characters: of a section. most: sections (`steps_of`). agent: as in `agent_of`.
    """
    from rich.console import Group
    from rich.text import Text

    styles = {"same": "", "out": "red strike", "in": "green underline"}
    view = view_of(record, most, agent)
    origin = f"task {record['id']}, sample {record['sample']}"
    about = ", ".join(filter(None, (origin, sampled(record))))
    lines = [Text(clean(_title(record)), "bold"), Text(clean(about), "dim")]
    for step in view.steps:
        if isinstance(step, str):
            lines.append(Text(f"\n… {step}", "italic"))
            continue
        where = f", {step.where}" * bool(step.where)
        heading = f"\nsection {step.number} of {view.sections}{where}  "
        lines.append(Text.assemble((heading, "cyan"), (step.remark, "yellow")))
        lines.append(Text(clip(clean(step.section.strip()), characters), "dim"))
        pieces = diff(clean(step.before), clean(step.after))
        for name, gone in (("before  ", "in"), ("after   ", "out")):
            words = [(text, styles[kind]) for kind, text in pieces if kind != gone]
            lines.append(Text.assemble((name, "cyan"), *words))
            lines += [styled(line) for line in step.lines if line.before == (gone == "in")]
        lines += _plain(step.table)
    if view.lines:
        lines += [Text("\nfor the answer", "cyan"), *map(styled, view.lines)]
    lines += _plain(view.table)
    if view.text:
        text = Text(clip(clean(view.text), characters), "dim")
        lines += [Text("\nread at once", "cyan"), text]
    lines.append(Text())
    for name, fact in _facts(record).items():
        good = "bold green" if (record["reward"] or 0) >= 1 else "bold red"
        style = good if name == "reward" else ""
        lines.append(Text.assemble((f"{name:8}", "cyan"), (clean(fact), style)))
    return Group(*lines)


# ---------------------------------------------------------------- on the page


def transcript(
    record: dict, unfolded: bool, most: int | None = 24, characters: int = 3000
) -> Markup:
    """Return a record as a <details> element, open if `unfolded`. The rest: see `trace`."""
    verdict, style = _verdict(record)
    tag = html(node("span", verdict, style=f"tag {style}"))
    summary = fill("{} {} <small>{}</small>", tag, _title(record), _origin(record))
    pattern = '<details class="box"{}><summary>{}</summary>{}</details>'
    parts = joined(map(html, trace(record, most, characters)))
    return fill(pattern, Markup(" open" * unfolded), summary, parts)


def trace(record: dict, most: int | None = 24, characters: int = 3000) -> list[Node]:
    """Return what was read of a record, what became of the memory, and how it ended.

    most: sections (`steps_of`). characters: of a section.
    """
    view, parts = view_of(record, most), []
    for step in view.steps:
        if isinstance(step, str):
            parts.append(node("p", f"… {step} …", style="gap"))
            continue
        where = f", {step.where}" * bool(step.where)
        remark = [" ", node("span", step.remark, style="tag")] if step.remark else []
        changes = [MARKS[kind](text) for kind, text in diff(step.before, step.after)]
        memory = [node("b", "memory"), *remark, " ", *(changes or ["(empty)"])]
        parts += [
            node("h3", f"Section {step.number:,} of {view.sections:,}{where}"),
            node("p", clip(step.section.strip(), characters), style="section"),
            *(_line(line) for line in step.lines if line.before),
            node("p", *memory, style="memory"),
            *(_line(line) for line in step.lines if not line.before),
            *_table(step.table),
        ]
    parts += [*map(_line, view.lines), *_table(view.table)]
    if view.text:
        parts.append(node("h3", "Read at once" + f", {view.where}" * bool(view.where)))
        parts.append(node("p", clip(view.text, characters), style="section"))
    facts = ((node("dt", name), node("dd", fact)) for name, fact in _facts(record).items())
    return [*parts, node("dl", *chain.from_iterable(facts))]


MARKS = {"same": str, "in": partial(node, "ins"), "out": partial(node, "del")}


def _line(line: Line) -> Node:
    note = [" ", node("small", line.note)] if line.note else []
    return node("p", node("b", line.label), " ", line.text, *note, style="recall")


def _table(rows: Sequence[TableRow]) -> list[Node]:
    """Return an agent's own table, [] without rows; columns in the order in which rows name
    them."""
    if not rows:
        return []
    names = dict.fromkeys(name for row in rows for name in row)
    head = node("thead", node("tr", *(node("th", name) for name in names)))
    lines = (
        (node("td", *(node("div", text) for text in row.get(name, ()))) for name in names)
        for row in rows
    )
    body = node("tbody", *(node("tr", *line) for line in lines))
    return [node("div", node("table", head, body, style="words"), style="scroll")]


def _verdict(record: dict) -> tuple[str, str]:
    """Return the verdict on a record's answer and the CSS class of its tag."""
    if record["reward"] is None:
        return "no reward", ""
    if not record["answers"]:
        if record["error"]:
            return "failed", "bad"
        if record["step"] is not None:  # an episode that is paid for otherwise
            return f"reward {record['reward']:.3g}", ""
        if record.get("unfinished"):
            return "not answered yet", ""
        return "answered", "good"  # a question of a user's own
    if record["reward"] >= 1:
        return "right", "good"
    verdict = "wrong" if record["reward"] <= 0 else "partly right"
    final, formed = extract_answer(record["answer"], record.get("form") or "")
    if final and not formed:
        verdict += ", not in the form asked for"
    return verdict, "bad"


def _origin(record: dict) -> str:
    """Describe where a record comes from: its cell of an evaluation, or its place in training."""
    if cell := record.get("cell"):
        how = "{agent}, length {length:,}, temperature {temperature}".format(**cell)
        return f"{title_of(cell['question'])}; {how}"
    how = sampled(record)
    return f"{title_of(record['kind'])}; {how}" if how else title_of(record["kind"])
