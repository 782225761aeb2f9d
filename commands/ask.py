"""Ask a question about a text and show the memory as it changes.

Holds: `ask`. Leaves out: the agents, the engines.
Exercise it: `python cli.py ask FILE "question"`. Read next: rollout.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text as Styled

from agents.baselines import SECTIONWISE
from agents.find import pick
from config.errors import clean
from config.terminal import bar, console
from engines.open import open_endpoint, open_engine, reserved
from memagent import AgentConfig
from tasks import readers


def ask(
    file: Path,
    question: str,
    model: str,
    agent: str,
    temperature: float,
    device: str,
    trust_remote_code: bool,
    config: AgentConfig,
    endpoint: str = "",
    served_as: str = "",
    chat: bool = False,
    engine_name: str = "transformers",
) -> None:
    """Read a text, showing the memory whenever it changes; end with the answer."""
    from data import extract_answer, strip_thinking
    from report.transcripts import diff, unformed
    from rollout import Sampling, follow

    task = readers.from_text(file, question)
    run = pick(agent)
    if endpoint:
        engine = open_endpoint(
            endpoint.split(","), served_as, chat, model, 1, config.thinking, trust_remote_code
        )
    else:
        engine = open_engine(
            model,
            device,
            "auto",
            trust_remote_code,
            1,
            config.thinking,
            engine_name,
            reserved([agent], config),
        )
    cut = engine.codec.cut(task.document, config.chunk_tokens, config.max_sections, config.over)
    sections, about = len(cut), "" if engine.codec.exact else "about "
    many = f"{sections:,} section{'s' * (sections != 1)} of {about}{config.chunk_tokens:,}"
    console.print(Styled(clean(f"{file}: {about}{len(cut.ids) + cut.left_out:,} tokens in {many}")))
    if endpoint and not model:
        console.print(
            "[dim]Lengths are estimated at four bytes a token; --model NAME counts and sends the model's own tokens.[/dim]"
        )
    elif not model:
        console.print(
            "[dim]The embedded policy knows generated English only (python cli.py data look world); for real text give --model.[/dim]"
        )
    turn = None
    with contextlib.closing(engine), engine.awake(), bar("turns") as progress:
        total = sections + 1 if agent in SECTIONWISE else 1
        shown = progress.add_task("reading", total=total, note="")
        for number, turn in enumerate(follow(engine, run, task, config, Sampling(temperature)), 1):
            before, after = turn.prompt.memory.strip(), strip_thinking(turn.response).strip()
            for line in _recalls(turn, config):
                progress.console.print(line)
            if turn.step is not None:
                after = before if turn.step.memory is None else turn.step.memory.strip()
            if not turn.prompt.final and after != before:
                style = {"same": "", "out": "red strike", "in": "green underline"}
                changed = [(clean(text), style[kind]) for kind, text in diff(before, after)]
                progress.console.print(Styled.assemble(f"section {number}: ", *changed))
            progress.update(shown, completed=number)
    answer = clean(turn.response).strip()
    final, formed = extract_answer(answer, config.form)
    if formed or not final:  # else it is shown below, as the answer
        console.print(Styled(answer))
    if turn.prompt.cut:
        console.print(
            f"{turn.prompt.cut:,} tokens of the text were not read: --max-sections or the window cut them off."
        )
    console.print(Styled(f"answer: {final}" if final else "The response is empty.", style="bold"))
    if final and not formed:
        console.print(Styled(unformed(config.form), style="dim"))


def _recalls(turn, config: AgentConfig) -> Iterator[Styled]:
    """What was recalled for a turn, and what it looks for."""
    recalled = turn.prompt.recalled
    if recalled is not None and recalled.steps:
        sections = ", ".join(map(str, sorted(recalled.steps)))
        yield Styled.assemble(
            ("recalled: ", "magenta"),
            clean(recalled.text.strip()),
            (f"  written after section {sections}", "dim"),
        )
    elif recalled is not None and recalled.query:
        yield Styled("nothing was found", "magenta")
    if turn.step is not None and turn.step.query and config.callback == "learned":
        yield Styled.assemble(("looks for: ", "magenta"), clean(turn.step.query))
