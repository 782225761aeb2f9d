"""What `ask` shows, in a terminal or on a pipe: how long reading takes, how the memory changes, the
answers and where they stand."""

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
    from commands.ask import Reading, Step
    from commands.questions import Answer


class Screen:
    """Where a reading is shown; what is quiet shows a bar at a terminal, and says nothing."""

    def __init__(self, to: Console, quiet: bool = False):
        self.to, self.quiet = to, quiet

    def say(self, text: str | Styled, style: str = "") -> None:
        if not self.quiet:
            say(text, style, self.to)

    @contextmanager
    def reading(
        self, document: Document, agent: Agent, sections: Sections, sized: bool = True
    ) -> Iterator[Callable[[Step], None]]:
        """Show a reading from its beginning to its end; yield what shows a step of it.

        sized: say how long the document is.
        """
        n = len(sections) if agent.by_section else 1
        with bar("sections", self.to) as progress:
            # elsewhere a step has lines of its own
            visible = self.to.is_terminal or (n > 10 and not self.quiet)
            every = -(-n // 10)
            task = progress.add_task("reading", total=n, note="", every=every, visible=visible)
            estimated = False

            def show(step: Step) -> None:
                nonlocal estimated
                if sized and agent.by_section and not estimated:
                    estimated = True
                    self.say(estimate(document, agent, sections, step.seconds * (n + 1)))
                for line in changes(step, agent, self.to.color_system is not None):
                    self.say(line)
                note = step.where and f"read: {step.where}"
                done = step.n_read if agent.by_section else 1
                progress.update(task, completed=min(done, n), note=note)

            if sized and not agent.by_section:
                self.say(estimate(document, agent, sections))
            yield show

    def answer(self, reading: Reading, remarks: Sequence[str]) -> None:
        """Show the answer of the one reading that was done."""
        answer, last, agent = reading.answer, reading.steps[-1], reading.agent
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
        self._end(answer, answer.line, reading.words)
        if final and not formed:
            self.say(unformed(agent.config.form), "dim")
        if unasked and final == NOT_FOUND:
            how = "--not-found guess lets the model answer all the same."
            self.say(f"Nothing was noted; {how}", "dim")
        if remarks:
            self.say(f"Remarks: {' '.join(remarks)}", "yellow")

    def first(self, reading: Reading, alone: bool) -> None:
        """Show the first answer and what it comes from. alone: no second reading follows."""
        answer, name = reading.answer, "answer" if alone else "first answer"
        self._end(
            answer, f"{name}, from {reading.part}: {answer.answer}{answer.aside}", reading.words
        )
        if not alone:
            self.say("Reading all of it; Ctrl-C keeps the first answer.", "dim")

    def both(self, answer: Answer, words: str, why: str) -> None:
        """Show the answer of two readings, and why: what the second says of the first."""
        if answer.nothing and answer.first != answer.answer:
            crossed = self.to.color_system is not None
            gone = answer.first if crossed else marked([("out", answer.first)])
            self.say(Styled.assemble("first answer: ", (gone, "strike")))
        self._end(answer, answer.line, words)
        if why:
            self.say(why)
        if answer.remarks:
            self.say(f"Remarks: {' '.join(answer.remarks)}", "yellow")

    def _end(self, answer: Answer, line: str, words: str) -> None:
        """Show an answer's line, in bold where nothing speaks against it, and where it stands."""
        nothing = "No answer: the model wrote none. Try another --agent or --model."
        self.say(line if answer.answer else nothing, "" if answer.doubtful else "bold")
        if words:
            self.say(words)


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
