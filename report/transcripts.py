"""Show one reading to a person: in the terminal, and as a part of report.html.

Holds: `trace`, what is shown of a record as a tree of nodes (report/markup.py); `transcript` and
`render_trajectory`, which write that tree as HTML and for the terminal; `examples`, the two that a
page begins with; `diff`, the word-level difference of two memories; `marked`, the same without
colours. Leaves out: which readings are kept (report/runlog.py, eval.py). No torch.
Exercise it: `python cli.py show RUN`. Read next: report/page.py.

Questions, documents and answers are foreign text: `node` cleans all of it, and it is then escaped
or kept apart from markup (rich's Text).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from functools import partial
from itertools import chain, groupby, pairwise, takewhile
from typing import TYPE_CHECKING

from agents import find
from config.errors import clean, clip
from data import ANSWER_FORMS, extract_answer
from memagent import NO_MEMORY, Agent, Line
from report.markup import Markup, Node, fill, html, joined, node
from report.records import WITHOUT_RESPONSE
from tasks.words import title_of

if TYPE_CHECKING:
    from rich.text import Text

# ---------------------------------------------------------------- differences of memories

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

    Differences of white space alone are none, and the first memory says nothing. Long texts of few
    words are compared in part.

    >>> diff("Anna met Otto.", "Anna met Boris.")
    [('same', 'Anna met '), ('out', 'Otto. '), ('in', 'Boris. ')]
    """
    before, after = ("" if text.strip() == NO_MEMORY else text for text in (before, after))
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


# ---------------------------------------------------------------- the sections of a record


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
    table: tuple[dict[str, list[str]], ...] = ()  # of the agent: column -> lines of the cell

    @property
    def changed(self) -> bool:
        """Whether there is anything to show but the section itself."""
        return self.before.split() != self.after.split() or bool(self.lines or self.table)


# finish reason -> remark
REMARKS = {
    "length": "cut at its limit",
    "full": "did not fit the model's window",
    "error": "failed",
}


# notes of another agent, or from a damaged file
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def _agent_of(record: dict, agent: type[Agent] | None) -> Agent:
    """Return the agent whose `lines` show a record: the one given, else the record's, if known."""
    return (agent or find.known(record.get("agent", "")) or Agent)()


def _shown(agent: Agent, turn: dict) -> tuple[tuple[Line, ...], tuple[dict[str, list[str]], ...]]:
    """Return the agent's lines and its table on a recorded turn. Notes that cannot be read give a
    line that says so, and no table."""
    try:
        lines = tuple(agent.lines(turn))
    except UNREADABLE:
        lines = (Line("notes", "cannot be read"),)
    try:
        given = agent.extras["table"](agent, turn) if "table" in agent.extras else ()
        rows = [
            {name: [cell] if isinstance(cell, str) else [*map(str, cell)] for name, cell in items}
            for items in (row.items() for row in given)
        ]
    except UNREADABLE:
        rows = []
    return lines, tuple(rows)


def steps_of(
    record: dict, most: int | None = 24, agent: type[Agent] | None = None
) -> list[SectionStep | str]:
    """List the sections of a record in reading order, with a text for each run of omitted ones.

    The first and the last section are never omitted. The others are if they left the memory as it
    was and have no lines; of more than `most` remaining sections the middle is omitted too. None
    omits nothing. Questions to the policy as it was before training are no sections.
    """
    steps, n_asked = [*_all_steps(record, agent)], sum(map(_is_question, record["turns"]))
    questions = f"{n_asked:,} question{'s' * (n_asked > 1)}"
    end = [f"{questions} to the policy as it was before training left out"] * (n_asked > 0)
    if most is None:
        return [*steps, *end]
    changed = [step.number for step in steps if step.number in (1, len(steps)) or step.changed]
    half = most // 2
    many = len(changed) > most
    visible = {*changed[: most - half], *changed[len(changed) - half :]} if many else {*changed}
    result: list[SectionStep | str] = []
    for keep, run in groupby(steps, lambda step: step.number in visible):
        run = list(run)
        if keep:
            result += run
            continue
        why = "" if {step.number for step in run} & {*changed} else ": the memory stayed as it was"
        result.append(f"{len(run):,} section{'s' * (len(run) > 1)} left out{why}")
    return result + end


def _all_steps(record: dict, agent: type[Agent] | None) -> Iterator[SectionStep]:
    """Yield all sections of a record. Lines of a turn aside stand with the next one."""
    reader, number, ahead = _agent_of(record, agent), 0, ()
    turns = [turn for turn in record["turns"] if not _is_question(turn)]
    for k, turn in enumerate(turns):
        lines, table = _shown(reader, turn)
        if turn.get("aside"):
            ahead += tuple(replace(line, before=True) for line in lines)
            continue
        if turn["final"]:
            continue
        following = next((each for each in turns[k + 1 :] if not each.get("aside")), None)
        if following and not following.get("frozen"):  # which is shown what its question needs
            after = following["memory"]
        elif turn["finish"] in WITHOUT_RESPONSE:  # it ends the trajectory
            after = turn["memory"]
        else:
            after = turn.get("memory_after")
            after = reader.memory_after(turn) if after is None else after
        number += 1
        remark, where = REMARKS.get(turn["finish"], ""), str(turn.get("where", ""))
        yield SectionStep(
            number, turn["section"], turn["memory"], after, remark, ahead + lines, where, table
        )
        ahead = ()


def _is_question(turn: dict) -> bool:
    """Whether a turn neither reads nor answers: it asks the policy as it was before training."""
    return bool(turn.get("frozen")) and not turn["final"]


def n_sections(record: dict) -> int:
    """Count the turns of a record that work on a section."""
    others = (turn["final"] or turn.get("aside") or _is_question(turn) for turn in record["turns"])
    return sum(not other for other in others)


# ---------------------------------------------------------------- what is shown, as a tree


def trace(
    record: dict,
    most: int | None = 24,
    characters: int = 3000,
    agent: type[Agent] | None = None,
) -> list[Node]:
    """Return what was read of a record, what became of the memory, and how it ended.

    most: sections (`steps_of`); None folds those that changed nothing. characters: of a section.
    agent: that made it, where the record does not tell.
    """
    n, parts, turns = n_sections(record), [], record["turns"]
    steps = steps_of(record, most, agent)
    for folded, run in groupby(steps, lambda s: most is None and not getattr(s, "changed", True)):
        shown = [*run]
        nodes = [*chain.from_iterable(_section(step, n, characters) for step in shown)]
        if folded:
            many = f"s {shown[0].number:,} to {shown[-1].number:,}"
            numbers = many if len(shown) > 1 else f" {shown[0].number:,}"
            summary = f"Section{numbers} of {n:,}: the memory stayed as it was"
            nodes = [node("details", node("summary", summary), *nodes)]
        parts += nodes
    # the turn that answers, and those aside after it
    last = next((k for k in reversed(range(len(turns))) if turns[k]["final"]), len(turns))
    for k, turn in enumerate(turns[last:]):
        lines, table = _shown(_agent_of(record, agent), turn)
        parts += [*map(_line, lines), *(_table(table) if k == 0 else ())]
    if turns[last:] and (text := turns[last]["section"].strip()):
        where = f", {turns[last].get('where', '')}".removesuffix(", ")
        parts.append(node("h3", f"read at once{where}"))
        parts.append(node("p", clip(text, characters), style="section"))
    facts = [(node("dt", name), node("dd", fact)) for name, fact in _facts(record).items()]
    return [*parts, node("dl", *chain.from_iterable(facts))]


def _section(step: SectionStep | str, n: int, characters: int) -> list[Node]:
    """Return a section of `n`, and what became of the memory; or the note on those left out."""
    if isinstance(step, str):
        return [node("p", f"… {step} …", style="gap")]
    where = f", {step.where}" * bool(step.where)
    remark = [" ", node("span", step.remark, style="tag")] if step.remark else []
    changes = []
    for kind, text in diff(step.before, step.after):
        words = text.rstrip()  # the blank behind them is not marked
        changes += [MARKS[kind](words), text[len(words) :]]
    return [
        node("h3", f"section {step.number:,} of {n:,}{where}"),
        node("p", clip(step.section.strip(), characters), style="section"),
        *(_line(line) for line in step.lines if line.before),
        node("p", node("b", "memory"), *remark, " ", *(changes or ["(empty)"]), style="memory"),
        *(_line(line) for line in step.lines if not line.before),
        *_table(step.table),
    ]


MARKS = {"same": str, "in": partial(node, "ins"), "out": partial(node, "del")}


def _line(line: Line) -> Node:
    note = [" ", node("small", line.note)] if line.note else []
    return node("p", node("b", line.label), " ", line.text, *note, style="recall")


def _table(rows: Sequence[dict[str, list[str]]]) -> list[Node]:
    """Return an agent's own table, [] without rows; columns in the order in which rows name
    them."""
    if not rows:
        return []
    names = dict.fromkeys(name for row in rows for name in row)
    head = node("thead", node("tr", *(node("th", str(name)) for name in names)))
    lines = (
        (node("td", *(node("div", text) for text in row.get(name, ()))) for name in names)
        for row in rows
    )
    body = node("tbody", *(node("tr", *line) for line in lines))
    return [node("div", node("table", head, body, style="words"), style="scroll")]


def unformed(form: str = "") -> str:
    """Return the note on an answer that lacks the required form; form "" = an unknown one."""
    name = f", {ANSWER_FORMS[form]}" if form in ANSWER_FORMS else ""
    return f"(not in the form that was asked for{name})"


def _facts(record: dict) -> dict[str, str]:
    """Map labels to the facts about the end of a trajectory: answer, finish reasons, reward, ...

    A question of a user's own has no accepted answers, and nothing that depends on them; an
    episode of training that is paid for otherwise has a reward all the same.
    """
    finishes = Counter(turn["finish"] for turn in record["turns"])
    form, reward = record.get("form") or "", record["reward"]
    final, formed = extract_answer(record["answer"], form)
    graded, facts = bool(record["answers"]), {}
    if record["question"]:
        facts["answer"] = record["answer"].strip() or "(none)"
    if graded and final and not formed:
        facts["form"] = unformed(form)
    if graded:
        facts["right answer"] = " | ".join(record["answers"])
    facts["turns"] = ", ".join(f"{n} {finish}" for finish, n in finishes.items()) or "none"
    if record["error"]:
        facts["error"] = record["error"]
    if graded or record["step"] is not None:
        facts["reward"] = "none: left out of its group" if reward is None else f"{reward:g}"
    return facts


def _verdict(record: dict) -> tuple[str, str]:
    """Return the verdict on a record's answer and the CSS class of its tag."""
    reward = record["reward"]
    if reward is None:
        return "no reward", ""
    if not record["answers"] and "cell" not in record:
        if record["error"]:
            return "failed", "bad"
        if record["step"] is not None:  # an episode that is paid for otherwise
            return f"reward {reward:.3g}", ""
        return "answered", "good"  # a question of a user's own
    if reward >= 1:
        return "right", "good"
    verdict = "wrong" if reward <= 0 else "partly right"
    final, formed = extract_answer(record["answer"], record.get("form") or "")
    return verdict + ", not in the form asked for" * bool(final and not formed), "bad"


def _origin(record: dict) -> str:
    """Describe where a record comes from: its cell of an evaluation, or its place in training."""
    if cell := record.get("cell"):
        how = "{agent}, length {length:,}, temperature {temperature}".format(**cell)
        return f"{title_of(cell['question'])}; {how}"
    temperature, parts = record.get("temperature"), [title_of(record["kind"])]
    if record["step"] is not None:
        parts.append(f"training step {record['step']}")
    if temperature is not None:
        parts.append(f"sampled at temperature {temperature:g}" if temperature else "greedy")
    return "; ".join(parts)


# ---------------------------------------------------------------- examples


def examples(records: Sequence[dict], lead: str) -> list[dict]:
    """Return the records that show how the leading agent reads: one that was right and one that was
    not, each the newest, of these the longest, of these the one whose memory changes most.

    A right one whose memories are words of what was read goes before all others, and the fewer
    other words there are, the better.
    """
    ours = [r for r in records if r.get("cell", {}).get("agent", lead) == lead]
    graded = [r for r in ours if r["reward"] is not None]
    right = [r for r in graded if r["reward"] > 0]
    wrong = [r for r in graded if r["reward"] <= 0]

    def fitness(record: dict) -> tuple:
        memories = [turn["memory"] for turn in record["turns"]]
        changes = sum(before != after for before, after in pairwise(memories))
        return record["step"] or 0, n_sections(record), changes

    def best_right(record: dict) -> tuple:
        step, length, changes = fitness(record)
        n = _other_words(record)
        return n == 0 and changes > 0, step, length, -n, changes

    return [max(some, key=key) for some, key in ((right, best_right), (wrong, fitness)) if some]


def _other_words(record: dict) -> int:
    """Count the words of the memories that no section holds, nor the first memory, which is none;
    TeX's commands, such as that of an answer's box, are no words."""
    turns = record["turns"]
    known = {*_words(turns[0]["memory"])} if turns else set()
    known.update(word for turn in turns for word in _words(turn["section"]))
    return len({word for turn in turns for word in _words(turn["memory"])} - known)


def _words(text: str) -> list[str]:
    return re.findall(r"(?<!\\)\b\w+", text.casefold())


# ---------------------------------------------------------------- on the page and in the terminal


def transcript(
    record: dict, unfolded: bool, most: int | None = 24, characters: int = 3000
) -> Markup:
    """Return a record as a <details> element, open if `unfolded`. The rest: see `trace`."""
    verdict, style = _verdict(record)
    tag = html(node("span", verdict, style=f"tag {style}"))
    title = record["question"] or record["id"]  # some questions are hidden
    summary = fill("{} {} <small>{}</small>", tag, title, _origin(record))
    pattern = '<details class="box"{}><summary>{}</summary>{}</details>'
    parts = joined(map(html, trace(record, most, characters)))
    return fill(pattern, Markup(" open" * unfolded), summary, parts)


# class or tag of a node -> its look in a terminal
LOOKS = {
    "ins": "green underline", "del": "red strike", "h3": "cyan", "section": "dim", "small": "dim",
    "gap": "italic", "recall": "", "b": "magenta", "dt": "cyan", "tag": "yellow",
}  # fmt: skip
SIGNS = {"ins": "in", "del": "out"}  # kinds of pieces, as `marked` has them


def render_trajectory(
    record: dict, characters: int = 1200, most: int = 24, agent: type[Agent] | None = None
) -> Text:
    """Render a record for the terminal: sections dim, words new in the memory {+green+}, words gone
    from it [-red-].

    most, characters, agent: as in `trace`.
    """
    from rich.text import Text

    verdict, _ = _verdict(record)
    origin = f"{verdict}; task {record['id']}, sample {record['sample']}; {_origin(record)}"
    text = Text.assemble((clean(record["question"] or record["id"]), "bold"), "\n")
    text.append(f"{clean(origin)}\n", "dim")
    for tree in trace(record, most, characters, agent):
        text.append_text(_in_terminal(tree))
    return text


def _in_terminal(tree: Node) -> Text:
    """Write a node for the terminal: a block ends its line, of a table each cell has its own."""
    from rich.text import Text

    tag, style, *children = tree
    text = Text(style=LOOKS.get(style, LOOKS.get(tag, "")))
    if tag == "table":
        (_, _, (_, _, *names)), (_, _, *rows) = children
        for row in rows:
            text.append("\n")
            for name, (_, _, *lines) in zip(names, row[2:], strict=True):
                words = "\n    ".join(_in_terminal(line).plain for line in lines) or "-"
                text.append(f"{_in_terminal(name).plain}  ", "magenta").append(f"{words}\n")
        return text
    text.append("\n" * (tag == "h3"))
    for child in children:
        if not isinstance(child, str):
            text.append_text(_in_terminal(child))
        else:
            text.append(marked([(SIGNS[tag], child)]) if tag in SIGNS else child)
    return text.append({"h3": "\n", "p": "\n", "dd": "\n", "dt": "  "}.get(tag, ""))


def styled(line: Line) -> Text:
    """Render an agent's line on a turn for the terminal."""
    text = _in_terminal(_line(line))
    text.rstrip()
    return text
