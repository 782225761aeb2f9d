"""Ask a question about a text and show the memory as it changes.

Holds: `ask`. Leaves out: the agents, the engines.
Exercise it: `python cli.py ask FILE "question"`. Read next: rollout.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text as Styled

from config.errors import clean
from config.options import EvalConfig
from config.terminal import bar, console
from data import Task
from engines.open import open_reader
from memagent import Agent, Turn
from report.records import record_turn
from tasks import readers


def ask(
    file: Path, question: str, agent: Agent, config: EvalConfig, temperature: float = 0.0
) -> None:
    """Read a text, showing the memory whenever it changes; end with the answer.

    config: which model answers, and where (`engines.open.open_reader`).
    """
    from data import extract_answer
    from report.transcripts import unformed
    from rollout import Sampling, follow

    task = readers.from_text(file, question)
    engine = open_reader(config, [agent])
    _say_what_is_read(file, task, agent.on(engine.codec), config)
    turn = None
    with contextlib.closing(engine), engine.awake(), bar("turns") as progress:
        n_sections = len(agent.on(engine.codec).sections(task))
        total = n_sections + 1 if agent.by_section else 1
        shown = progress.add_task("reading", total=total, note="")
        for number, turn in enumerate(follow(engine, agent, task, Sampling(temperature)), 1):
            for line in _lines(turn, agent, number):
                progress.console.print(line)
            progress.update(shown, completed=number)
    answer = clean(turn.response).strip()
    final, formed = extract_answer(answer, agent.config.form)
    if formed or not final:  # else it is shown below, as the answer
        console.print(Styled(answer))
    if turn.prompt.cut:
        console.print(
            f"{turn.prompt.cut:,} tokens of the text were not read: "
            "--max-sections or the window cut them off."
        )
    console.print(Styled(f"answer: {final}" if final else "The response is empty.", style="bold"))
    if final and not formed:
        console.print(Styled(unformed(agent.config.form), style="dim"))


def _say_what_is_read(file: Path, task: Task, agent: Agent, config: EvalConfig) -> None:
    cut, about = agent.sections(task), "" if agent.codec.exact else "about "
    sections = f"{len(cut):,} section{'s' if len(cut) != 1 else ''}"
    tokens = f"{about}{len(cut.ids) + cut.left_out:,} tokens"
    size = f"{about}{agent.config.chunk_tokens:,}"
    console.print(Styled(clean(f"{file}: {tokens} in {sections} of {size}")))
    if config.endpoint and not config.model:
        console.print(
            "[dim]Lengths are estimated at four bytes a token; "
            "--model NAME counts and sends the model's own tokens.[/dim]"
        )
    elif not config.model:
        console.print(
            "[dim]The embedded policy knows generated English only "
            "(python cli.py data look world); for real text give --model.[/dim]"
        )


def _lines(turn: Turn, agent: Agent, number: int) -> Iterator[Styled]:
    """Yield what became of the memory in a turn, and what the agent shows of it."""
    from report.transcripts import diff, styled

    described = record_turn(turn)
    lines = agent.lines(described)
    yield from (styled(line) for line in lines if line.before)
    before, after = turn.prompt.memory.strip(), agent.memory_after(described).strip()
    if not turn.prompt.final and after != before:
        style = {"same": "", "out": "red strike", "in": "green underline"}
        changed = [(clean(text), style[kind]) for kind, text in diff(before, after)]
        yield Styled.assemble(f"section {number}: ", *changed)
    yield from (styled(line) for line in lines if not line.before)
