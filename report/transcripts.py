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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from agents import find
from config.errors import clean, clip
from data import ANSWER_FORMS, extract_answer
from memagent import Agent, Line
from report.markup import Markup, fill, macro
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
    marks, said = {"same": "{}{}", "out": "[-{}-]{}", "in": "{{+{}+}}{}"}, ""
    for kind, text in pieces:
        words = text.rstrip()
        said += marks[kind].format(words, text[len(words) :])
    return said.rstrip()


Row = dict[str, list[str]]  # of an agent's table: column -> lines of the cell


@dataclass(frozen=True, slots=True)
class Step:
    """One section, with the memory before and after it."""

    number: int  # from 1
    section: str
    before: str
    after: str
    remark: str  # on an unusual end of the turn, else ""
    lines: tuple[Line, ...] = ()  # of the agent
    where: str = ""  # the pages that the section stands on, where they are known
    table: tuple[Row, ...] = ()  # of the agent


# finish reason -> remark
REMARKS = {
    "length": "cut at its limit",
    "full": "did not fit the model's window",
    "error": "failed",
}


def agent_of(record: dict, agent: type[Agent] | None = None) -> Agent:
    """Return the agent whose `lines` show a record: the one given, else the record's, if known."""
    kind = agent or find.known(record.get("agent", "")) or Agent
    return kind()


def lines_of(agent: Agent, turn: dict) -> list[Line]:
    """Return the agent's lines on a recorded turn.

    Notes of another agent or from a damaged file give one line that says so.
    """
    try:
        return list(agent.lines(turn))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return [Line("notes", "cannot be read")]


def table_of(agent: Agent, turn: dict) -> list[Row]:
    """Return the agent's table on a recorded turn; [] if it has none, or cannot read the notes."""
    make = getattr(agent, "table", None)
    try:
        return [
            {
                str(name): [cell] if isinstance(cell, str) else [str(line) for line in cell]
                for name, cell in row.items()
            }
            for row in (make(turn) if make else ())
        ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return []


def steps_of(
    record: dict, most: int | None = 24, agent: type[Agent] | None = None
) -> list[Step | str]:
    """List the sections of a record in reading order, with a text for each run of omitted ones.

    The first and the last section are never omitted. The others are if they left the memory as it
    was and have no lines; of more than `most` remaining sections the middle is omitted too. None
    omits nothing. Questions to the policy as it was before training are no sections.
    """
    steps, asked = _all_steps(record, agent), sum(map(_is_question, record["turns"]))
    questions = f"{asked:,} question{'s' * (asked > 1)}"
    end = [f"{questions} to the policy as it was before training left out"] * (asked > 0)
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
    result: list[Step | str] = []
    for keep, run in groupby(steps, lambda step: step.number in visible):
        run = list(run)
        result += run if keep else [_omission([step.number in changed for step in run])]
    return result + end


def _omission(changed: list[bool]) -> str:
    """Say how many sections are left out, and why if none of them changed the memory."""
    n = len(changed)
    why = "" if any(changed) else ": the memory stayed as it was"
    return f"{n:,} {'section' if n == 1 else 'sections'} left out{why}"


def _all_steps(record: dict, agent: type[Agent] | None = None) -> list[Step]:
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
        step = Step(number, turn["section"], turn["memory"], after, remark, lines, where, table)
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


def _comma(text: str) -> str:
    return f", {text}" if text else ""


def _text_read(record: dict) -> str:
    """Return the text that the final turn itself read, for agents that read in one prompt."""
    turn = _final_turn(record)
    return turn["section"].strip() if turn else ""


def _final_lines(record: dict, agent: type[Agent] | None = None) -> list[Line]:
    """Return the agent's lines on the turn that answers, and on those aside after it."""
    turns = record["turns"]
    k = next((k for k in reversed(range(len(turns))) if turns[k]["final"]), len(turns))
    return [line for turn in turns[k:] for line in lines_of(agent_of(record, agent), turn)]


def _final_table(record: dict, agent: type[Agent] | None = None) -> list[Row]:
    turn = _final_turn(record)
    return table_of(agent_of(record, agent), turn) if turn else []


def _final_turn(record: dict) -> dict | None:
    return next((turn for turn in reversed(record["turns"]) if turn["final"]), None)


# ---------------------------------------------------------------- in the terminal


def styled(line: Line) -> Text:
    """Render an agent's line on a turn for the terminal."""
    from rich.text import Text

    note = (f"  {clean(line.note)}", "dim") if line.note else ""
    return Text.assemble((f"{clean(line.label)} ", "magenta"), clean(line.text), note)


def _plain(table: Sequence[Row]) -> list[Text]:
    """Render an agent's table for the terminal: a line per cell, since its texts are long."""
    from rich.text import Text

    lines = []
    for row in table:
        lines.append(Text())
        for name, cell in row.items():
            words = "\n    ".join(map(clean, cell)) or "-"
            lines.append(Text.assemble((f"{clean(name)}  ", "magenta"), words))
    return lines


def render_trajectory(
    record: dict, characters: int = 1200, most: int = 24, agent: type[Agent] | None = None
) -> Group:
    """Render a record: sections dim, words new in the memory green, words gone from it red.

    characters: of a section. most: sections (`steps_of`). agent: as in `agent_of`.
    """
    from rich.console import Group
    from rich.text import Text

    styles = {"same": "", "out": "red strike", "in": "green underline"}
    n = n_sections(record)
    origin = f"task {record['id']}, sample {record['sample']}"
    about = ", ".join(filter(None, (origin, sampled(record))))
    lines = [Text(clean(_title(record)), "bold"), Text(clean(about), "dim")]
    for step in steps_of(record, most, agent):
        if isinstance(step, str):
            lines.append(Text(f"\n… {step}", "italic"))
            continue
        pieces = diff(clean(step.before), clean(step.after))
        heading = f"\nsection {step.number} of {n}{_comma(step.where)}  "
        lines.append(Text.assemble((heading, "cyan"), (step.remark, "yellow")))
        lines.append(Text(clip(clean(step.section.strip()), characters), "dim"))
        for name, kinds in (("before  ", ("same", "out")), ("after   ", ("same", "in"))):
            words = [(text, styles[kind]) for kind, text in pieces if kind in kinds]
            lines.append(Text.assemble((name, "cyan"), *words))
            before = name == "before  "
            lines += [styled(line) for line in step.lines if line.before == before]
        lines += _plain(step.table)
    if final_lines := _final_lines(record, agent):
        lines += [Text("\nfor the answer", "cyan"), *map(styled, final_lines)]
    lines += _plain(_final_table(record, agent))
    if text := _text_read(record):
        lines += [Text("\nread at once", "cyan"), Text(clip(clean(text), characters), "dim")]
    facts = {name: (clean(text), "") for name, text in _facts(record).items()}
    if "reward" in facts:
        colour = "bold green" if (record["reward"] or 0) >= 1 else "bold red"
        facts["reward"] = facts["reward"][0], colour
    return Group(
        *lines,
        Text(),
        *(Text.assemble((f"{name:8}", "cyan"), fact) for name, fact in facts.items()),
    )


# ---------------------------------------------------------------- on the page


def transcript(
    record: dict, unfolded: bool, most: int | None = 24, characters: int = 3000
) -> Markup:
    """Return a record as a <details> element, open if `unfolded`. The rest: see `trace`."""
    verdict, style = _verdict(record)
    return macro(
        "transcript",
        _title(record),
        _origin(record),
        {"verdict": verdict, "style": style},
        trace(record, most, characters),
        _facts(record),
        unfolded,
    )


def trace(record: dict, most: int | None, characters: int) -> list[Markup]:
    """Return what was read of a record and what became of the memory, part by part.

    most: sections (`steps_of`). characters: of a section.
    """
    n, parts = n_sections(record), []
    for step in steps_of(record, most):
        if isinstance(step, str):
            parts.append(fill('<p class="gap">… {} …</p>', step))
            continue
        section = clip(step.section.strip(), characters)
        parts.append(macro("step", step, n, section, diff(step.before, step.after)))
    parts += (macro("line", line) for line in _final_lines(record))
    parts.append(macro("words", _final_table(record)))
    if text := _text_read(record):
        where = str(_final_turn(record).get("where", ""))
        parts.append(macro("read_at_once", where, clip(text, characters)))
    return parts


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
