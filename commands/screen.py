"""What `ask` shows of a reading, in a terminal or on a pipe: how long it takes, how the memory
changes, the answer and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text as Styled

from agents import find
from config.errors import clean
from config.terminal import bar, say
from data import NOT_FOUND, extract_answer
from memagent import Agent
from report.records import record_turn
from report.transcripts import LOOKS, diff, marked, styled, unformed
from tasks.documents import Document
from tokens.codec import Sections

if TYPE_CHECKING:
    from commands.ask import Step
    from commands.questions import Answer


class Screen:
    """Where a reading is shown; a quiet console shows nothing."""

    def __init__(self, to: Console):
        self.to, self.quiet = to, to.quiet

    def say(self, text: str | Styled, style: str = "") -> None:
        say(text, style, self.to)

    @contextmanager
    def reading(
        self, document: Document, agent: Agent, sections: Sections
    ) -> Iterator[Callable[[Step], None]]:
        """Show a reading from its beginning to its end; yield what shows a step of it."""
        n = len(sections) if agent.by_section else 1
        with bar("sections", self.to) as progress:
            visible = self.to.is_terminal or n > 10  # elsewhere a step has lines of its own
            every = -(-n // 10)
            task = progress.add_task("reading", total=n, note="", every=every, visible=visible)
            estimated = False

            def show(step: Step) -> None:
                nonlocal estimated
                if agent.by_section and not estimated:
                    estimated = True
                    self.say(estimate(document, agent, sections, step.seconds * (n + 1)))
                for line in changes(step, agent, self.to.color_system is not None):
                    self.say(line)
                note = step.where and f"read: {step.where}"
                done = step.n_read if agent.by_section else 1
                progress.update(task, completed=min(done, n), note=note)

            if not agent.by_section:
                self.say(estimate(document, agent, sections))
            yield show

    def answer(
        self, answer: Answer, words: str, last: Step, agent: Agent, remarks: Sequence[str]
    ) -> None:
        """Show an answer. words: where it stands in the document. last: the step that gave it."""
        prompt, response = last.turn.prompt, clean(last.turn.response).strip()
        final, formed = answer.answer, extract_answer(response, agent.config.form)[1]
        unasked = prompt.given is not None  # answered by the agent, from an empty memory
        if (formed or not final) and response != final and not unasked:  # else it is shown below
            self.say(response)
        if prompt.cut:
            self.say(
                f"{prompt.cut:,} tokens of the text were not read: --max-sections or the window "
                "cut them off."
            )
        if not agent.by_section and last.where:
            rest = "" if "whole" in agent.extras else f"; --agent {find.DEFAULT} reads all of it"
            self.say(f"read: {last.where}{rest}", "dim")
        nothing = "No answer: the model wrote none. Try another --agent or --model."
        self.say(f"answer: {final}{answer.aside}" if final else nothing, "bold")
        if final and not formed:
            self.say(unformed(agent.config.form), "dim")
        if unasked and final == NOT_FOUND:
            how = "--not-found guess lets the model answer all the same."
            self.say(f"Nothing was noted; {how}", "dim")
        if words:
            self.say(words)
        if remarks:
            self.say(f"Remarks: {' '.join(remarks)}", "yellow")


def changes(step: Step, agent: Agent, colours: bool) -> Iterator[Styled]:
    """Yield what became of the memory in a step, and what the agent shows of it."""
    turn, described = step.turn, record_turn(step.turn)
    lines = agent.lines(described)
    yield from (styled(line) for line in lines if line.before)
    before, after = turn.prompt.memory.strip(), agent.memory_after(described).strip()
    if not (turn.prompt.final or turn.prompt.aside) and after != before:
        pieces = [(kind, clean(text)) for kind, text in diff(before, after)]
        changed = [(text, LOOKS[kind]) for kind, text in pieces] if colours else [marked(pieces)]
        pages = f", {clean(step.where)}" if step.where else ""
        yield Styled.assemble((f"section {step.n_read}{pages}: ", "cyan"), *changed)
    yield from (styled(line) for line in lines if not line.before)


def estimate(
    document: Document, agent: Agent, sections: Sections, seconds: float | None = None
) -> str:
    """Return "212 pages, 131,000 tokens, 65 sections, about 14 minutes"."""
    n, n_sections = len(sections.ids) + sections.left_out, len(sections)
    n = round(n, 3 - len(str(n))) if n >= 10_000 else n  # three digits count
    about = "" if agent.codec.exact else "about "
    part = "" if "whole" in agent.extras else "a part of them "
    counted = f"{n_sections:,} section{'s' if n_sections != 1 else ''}"
    parts = [
        document.size(),
        f"{about}{n:,} token{'s' if n != 1 else ''}",
        counted if agent.by_section else f"{part}read in one prompt",
        f"about {duration(seconds)}" if seconds is not None else "",
    ]
    return ", ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """Return a time as a person says it.

    >>> [duration(s) for s in (0.2, 44, 100, 840, 9000)]
    ['1 second', '44 seconds', '2 minutes', '14 minutes', '2.5 hours']
    """
    n, unit = max(1, round(seconds)), "second"
    if seconds >= 90:
        n, unit = round(seconds / 60), "minute"
    if seconds >= 90 * 60:
        n, unit = round(seconds / 3600, 1), "hour"
    return f"{n:g} {unit}{'s' if n != 1 else ''}"
