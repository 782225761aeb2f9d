"""Ask a question about documents and show the memory as it changes, with its pages.

A reading is a folder, RUNS/NAME, which is written when it is finished:

    config.yaml        what answers, the agent and its settings, all resolved
    transcripts.jsonl  question, sections, memories and answer as one record (`cli.py show`)
    report.html        the same as a page
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.text import Text as Styled

from agents import find
from commands.questions import Answer, How
from config import files
from config.errors import UserError, clean
from config.locks import writing
from config.options import CACHE_TOKENS, TINY, AnsweringConfig, AskConfig, EvalConfig
from config.realmodels import PACKAGED
from config.settings import hints_of
from config.terminal import bar, command_line, console, say
from data import ANSWER_FORMS, NOT_FOUND, Task, extract_answer
from engines.local import answerer
from engines.open import Use, open_reader
from memagent import Agent, Finish, Trajectory, Turn
from models.dtypes import settle_dtype
from report.reading import begins
from report.records import record, record_turn
from report.summary import write_text
from rollout import Engine, Sampling, follow
from tasks import documents
from tasks.documents import Document
from tasks.pages import Places
from tasks.served import SHORT_OF_MEMORY, Terms

SHORT_OF_A_WINDOW = 8192
"""The window that is assumed where a server does not say: today's are at least as long."""
PATIENCE_S = 30
"""How long a request is tried again that a server fails: somebody waits."""
KNOWN, WORD = "'Anna reached Lima.'", re.compile(r"\w+|[^\w ]")
"""What the embedded policy was trained on: each word and sign of it is one token."""


@dataclass(slots=True)
class Inquiry:
    """One reading: what is read and asked, by whom, and where it is kept."""

    config: AskConfig
    document: Document
    question: str
    by: str  # who answers, in words
    window: int | None  # of a server that does not say
    keyed: bool = False  # whether the server may have the API key
    to: Console = console  # where it is told
    paths: tuple[str, ...] = ()  # of the document, as they were given
    agent: Agent | None = None
    folder: Path | None = None

    def say(self, text: str | Styled, style: str = "") -> None:
        say(text, style, self.to)

    @property
    def task(self) -> Task:
        """The question about the text."""
        return Task(self.document.title, self.question, (), self.document.text, kind="asked")


def answered(first: Inquiry, how: How, further: Callable[[], str] | None = None) -> list[Answer]:
    """Open what answers, choose the agent by the length of the document, and read.

    further: asked for another question after each answer, until it returns ""; each is a reading of
    its own.
    """
    agents = _candidates(first.config, how)
    for remark in first.document.remarks:
        first.say(remark, "dim")
    terms = Terms(
        patience_s=PATIENCE_S,
        memory_is_final=True,
        keyed=first.keyed,
        tell=lambda words: first.say(words, "yellow"),
    )
    first.say(f"Opening {first.by} ...")
    first.config = settle_dtype(first.config)
    evaluation = evaluation_of(first.config, name="ask", in_flight=1)
    keep = CACHE_TOKENS if further else 0
    # a reading that is told to nobody is another program's: its threads are its own
    use = Use(window=first.window, terms=terms, cache_tokens=keep, settle=not first.to.quiet)
    engine = open_reader(evaluation, agents, use=use)
    with contextlib.closing(engine):
        way = _choose(first, how, engine, agents)
        first.say(f"{way[0].upper()}{way[1:]}.")
        _say_notes(first, engine)
        answers = [_kept(first, engine)]
        while further and (question := further()):
            config = replace(first.config, name=_free_name(first.config))
            reading = replace(first, question=question, config=config, folder=None)
            answers.append(answer := _kept(reading, engine))
            new = answer.prompt_tokens - answer.reused_tokens
            first.say(
                f"{answer.seconds:.1f} s, {new:,} of {answer.prompt_tokens:,} tokens computed"
            )
    return answers


def _free_name(config: AskConfig) -> str:
    """Return the first of NAME-2, NAME-3, ... that no run has."""
    names = (f"{config.name}-{number}" for number in count(2))
    return next(name for name in names if not files.run_path(config.runs, name).exists())


def _kept(reading: Inquiry, engine: Engine) -> Answer:
    """Claim the folder of a reading, and read; one that ends early leaves none."""
    reading.folder = folder = _folder(reading)
    with writing(folder, f"The reading {folder}"):
        _free(folder)  # another process may have begun, and ended, since its name was looked at
        try:
            return _read(reading, engine)
        finally:
            with contextlib.suppress(OSError):  # what was read is in it
                folder.rmdir()


# ---------------------------------------------------------------- what is read


def begun(paths: Sequence[str], question: str, config: AskConfig, to: Console = console) -> Inquiry:
    """Read the documents, and find who answers. to: where the reading is told."""
    if config.name:
        _free(files.run_path(config.runs, config.name))
    document = documents.read(paths, config.document_s, config.document_mib)
    who = answerer(config)
    config = replace(config, model=who.model, endpoint=tuple(who.endpoint), served_as=who.served_as)
    asked = config, document, question, who.said, who.window, who.keyed, to
    return Inquiry(*asked, tuple(map(str, paths)))


def _free(folder: Path) -> None:
    """Raise a UserError if a folder holds a run."""
    if (folder / "config.yaml").exists():
        raise UserError(f"{folder} holds a run: give another --name.")


def _folder(reading: Inquiry) -> Path:
    """Make the folder of a reading: of its name, or a new one that no other process has made."""
    runs, name = reading.config.runs, reading.config.name
    if name:
        folder = files.run_path(runs, name)
        files.make_folder(folder)
        return folder
    stem = f"ask-{datetime.now():%Y%m%d-%H%M%S}"
    files.make_folder(Path(runs))
    for number in count(1):
        name = f"{stem}-{number}" if number > 1 else stem
        folder = files.run_path(runs, name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    reading.config = replace(reading.config, name=name)
    return folder


# ---------------------------------------------------------------- who reads


def evaluation_of(config: AnsweringConfig, **fixed: object) -> EvalConfig:
    """Return what `open_reader` wants to know: what answers, and further fields."""
    names = {f.name for f in fields(EvalConfig)}
    given = {name: value for name, value in asdict(config).items() if name in names}
    return EvalConfig(**given | fixed)


def made(name: str, config: AnsweringConfig, how: How) -> Agent:
    """Make an agent with the settings of the model, of the preset and of the user."""
    policy = find.model_or_default(config.model, config.endpoint)
    settings = {"max_sections": None, "not_found": "say"} | how.settings
    known = find.of_model(policy) | find.preset_of(how.preset, name)["agent"] | settings
    if config.endpoint and "empty" not in known and "empty" in hints_of(find.find(name).Config):
        # a server's model that thinks for too long says nothing: what was noted is not lost by it
        settings["empty"] = "keep"
    return find.with_state(find.resolve(how.preset, policy, {}, settings, name)[1], policy)


def _candidates(config: AskConfig, how: How) -> list[Agent]:
    """Return the agents that may read: the one that was said, else those that length decides on."""
    policy = find.model_or_default(config.model, config.endpoint)
    names = [how.agent or find.agent_of(how.preset, policy)]
    if not how.given:
        names += [name for _, name in find.best_by_length(policy)] or ["full"]
    return [made(name, config, how) for name in dict.fromkeys(names)]


def _choose(reading: Inquiry, how: How, engine: Engine, agents: Sequence[Agent]) -> str:
    """Choose the agent by the length of the document; return how it reads, and why."""
    named = {agent.name: agent for agent in agents}
    policy = find.model_or_default(reading.config.model, reading.config.endpoint)
    tokens = len(engine.codec.ids(reading.document.text))
    best, window = find.best_by_length(policy), engine.window or SHORT_OF_A_WINDOW
    agent = agents[0]
    if how.given:
        why = f"as --{next(iter(how.given))} says"
    elif best:
        longest, name = best[-1]
        name = next((name for most, name in best if tokens <= most), name)
        agent, why = named[find.find(name).name], "best at this length where it was measured"
        if tokens > longest:
            why = f"best at {longest:,} tokens, the longest that was measured"
    elif str(policy) not in PACKAGED and find.trained_agent(policy):  # those are as they came
        why = "the agent that the model was trained with"
    elif tokens <= window // 2:
        agent, why = named["full"], f"since it fits half the window of {window:,} tokens"
    else:
        why = f"since it is longer than half the window of {window:,} tokens"
    reading.agent, fits = fitted(agent, engine.window, how.settings)
    way = "all at once " if agent.name == "full" else "section by section " * agent.by_section
    chosen = f"reading {way}with {agent.label}, {why}{fits}"
    reading.by += f", {chosen}"
    return chosen


def fitted(agent: Agent, window: int | None, settings: dict) -> tuple[Agent, str]:
    """Return an agent whose turns fit a window, and words on it: in shorter sections, unless the
    user has said how long they are."""
    c, needed = agent.config, agent.turn_tokens()
    if not agent.by_section or not window or needed <= window or "chunk_tokens" in settings:
        return agent, ""
    size = min(c.chunk_tokens, max(128, window - (needed - c.chunk_tokens)))
    words = f", in sections of {size:,} tokens for its window of {window:,}"
    return agent.with_settings(chunk_tokens=size), words


def _say_notes(reading: Inquiry, engine: Engine) -> None:
    config, text = reading.config, f"{reading.question} {reading.document.text[:1000]}"
    if config.endpoint and not config.model:
        reading.say(
            "Lengths are estimated at four bytes a token: --model NAME counts tokens.", "dim"
        )
    elif config.model == TINY and len(engine.codec.ids(text)) > len(WORD.findall(text)):
        reading.say(
            f"The embedded policy knows only English such as {KNOWN}: give another --model.", "dim"
        )


# ---------------------------------------------------------------- reading


def _read(reading: Inquiry, engine: Engine) -> Answer:
    """Drive the agent, turn by turn; return the answer and what it cost."""
    trace: list[dict] = []
    agent, task = reading.agent.on(engine.codec, engine.window), reading.task
    sections, document = agent.sections(task), reading.document
    places = Places(task.document, sections, engine.codec.decode, agent.config.over)
    n_sections = len(sections)
    size = document, agent, len(sections.ids) + sections.left_out, n_sections
    sampling, turn, section = Sampling(reading.config.temperature), None, None
    n_read, cost = 0, Counter()
    n_steps = n_sections if agent.by_section else 1
    with engine.awake(), bar("sections", reading.to) as progress:
        shown = reading.to.is_terminal or n_steps > 10  # elsewhere a turn has lines of its own
        every = -(-n_steps // 10)
        steps = progress.add_task("reading", total=n_steps, note="", every=every, visible=shown)
        try:
            if not agent.by_section:
                say(estimate(*size), to=progress.console)
            begun = time.perf_counter()
            for number, turn in enumerate(follow(engine, agent, task, sampling), 1):
                seconds, where = time.perf_counter() - begun, places.locate(turn.prompt.section)
                named = document.where(where)
                begun = time.perf_counter()
                if turn.finish in (Finish.FULL, Finish.ERROR):
                    continue  # why is said next
                cost["prompt_tokens"] += len(turn.prompt_ids)
                cost["reused_tokens"] += turn.reused_tokens
                cost["written_tokens"] += len(turn.response_ids)
                if begins(turn, section):
                    n_read, section = n_read + 1, turn.prompt.section
                trace.append(record_turn(turn) | {"where": named, "seconds": round(seconds, 4)})
                if number == 1 and agent.by_section:
                    say(estimate(*size, seconds * (n_sections + 1)), to=progress.console)
                for line in _lines(turn, agent, n_read, named, reading.to):
                    say(line, to=progress.console)
                note = named and f"read: {named}"
                finished = n_read if agent.by_section else number
                progress.update(steps, completed=min(finished, n_steps), note=note)
        except UserError as error:
            raise UserError(f"{error}{_advice(error, reading, agent, turn)}") from error
    return replace(_end(reading, agent, turn, trace), **cost)


def _advice(error: UserError, reading: Inquiry, agent: Agent, turn: Turn | None) -> str:
    """Say what to do about a reading that has ended."""
    if turn and turn.finish is Finish.FULL:
        less = f"--agent {find.DEFAULT}, which reads section by section"
        if agent.by_section:
            less = f"a smaller --chunk-tokens, such as {max(1, agent.config.chunk_tokens // 2)}"
        return f" Ask anew with {less}."
    if reading.config.endpoint and SHORT_OF_MEMORY.search(str(error)):
        return " To ask a smaller model anew, name it by --served-as."
    return ""


def _sections(n: int) -> str:
    return f"{n:,} section{'s' if n != 1 else ''}"


def estimate(
    document: Document, agent: Agent, tokens: int, n_sections: int, seconds: float | None = None
) -> str:
    """Return "212 pages, 131,000 tokens, 65 sections, about 14 minutes"."""
    about, n = "" if agent.codec.exact else "about ", tokens
    n = round(n, 3 - len(str(n))) if n >= 10_000 else n  # three digits count
    part = "" if "whole" in agent.extras else "a part of them "
    parts = [
        document.size(),
        f"{about}{n:,} token{'s' if n != 1 else ''}",
        _sections(n_sections) if agent.by_section else f"{part}read in one prompt",
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


# ---------------------------------------------------------------- what is shown


def _lines(
    turn: Turn, agent: Agent, number: int, where: str, to: Console = console
) -> Iterator[Styled]:
    """Yield what became of the memory in a turn, and what the agent shows of it."""
    from report.transcripts import diff, marked, styled

    described = record_turn(turn)
    lines = agent.lines(described)
    yield from (styled(line) for line in lines if line.before)
    before, after = turn.prompt.memory.strip(), agent.memory_after(described).strip()
    if not (turn.prompt.final or turn.prompt.aside) and after != before:
        style = {"same": "", "out": "red strike", "in": "green underline"}
        pieces = [(kind, clean(text)) for kind, text in diff(before, after)]
        changed = [(text, style[kind]) for kind, text in pieces]
        if to.color_system is None:  # neither colours nor lines through the words
            changed = [marked(pieces)]
        pages = f", {clean(where)}" if where else ""
        yield Styled.assemble((f"section {number}{pages}: ", "cyan"), *changed)
    yield from (styled(line) for line in lines if not line.before)


def remarks_on(agent: Agent, turn: Turn) -> list[str]:
    """List what an agent remarks on a turn of which more than itself should know."""
    return [line.text for line in agent.lines(record_turn(turn)) if line.label == "remark"]


def _end(reading: Inquiry, agent: Agent, turn: Turn, trace: list[dict]) -> Answer:
    """Show the answer and its pages, and write the page with the whole trace; return them."""
    from report.page import write_reading

    answer, folder = clean(turn.response).strip(), reading.folder
    final, formed = extract_answer(answer, agent.config.form)
    alone = turn.prompt.given is not None  # answered by the agent, from an empty memory
    if (formed or not final) and answer != final and not alone:  # else it is shown below
        reading.say(answer)
    if turn.prompt.cut:
        reading.say(
            f"{turn.prompt.cut:,} tokens of the text were not read: "
            "--max-sections or the window cut them off."
        )
    if not agent.by_section and trace[-1]["where"]:
        rest = "" if "whole" in agent.extras else f"; --agent {find.DEFAULT} reads all of it"
        reading.say(f"read: {trace[-1]['where']}{rest}", "dim")
    stands, words = reading.document.stands(final, reading.question)
    aside = " (not found in the document)" if stands["found"] is False else ""
    nothing = "No answer: the model wrote none. Try another --agent or --model."
    reading.say(f"answer: {final}{aside}" if final else nothing, "bold")
    if final and not formed:
        form = ANSWER_FORMS.get(agent.config.form, "")
        reading.say(f"(not in the form that was asked for{form and ', '}{form})", "dim")
    if alone and final == NOT_FOUND:
        reading.say(
            "Nothing was noted; --not-found guess lets the model answer all the same.", "dim"
        )
    if words:
        reading.say(words)
    if remarks := reading.document.remarks:
        reading.say(f"Remarks: {' '.join(remarks)}", "yellow")
    remarks = [*remarks, *remarks_on(agent, turn)]
    trajectory = Trajectory(reading.task, [turn], seconds=sum(row["seconds"] for row in trace))
    whole = record(trajectory, agent, None, reading.config.temperature) | {"turns": trace}
    write_text(folder / "transcripts.jsonl", json.dumps(whole) + "\n")
    written = agent.extras["files"](agent, trace) if "files" in agent.extras else {}
    for name, text in written.items():
        write_text(folder / name, text)
        reading.say(f"What was kept: {folder / name}")
    facts = {
        "remarks": " ".join(remarks),
        "read": reading.document.title,
        "by": reading.by,
        "took": duration(trajectory.seconds),
        "next question": command_line("ask", *reading.paths, "QUESTION"),
    }
    passages = [stands["quote"].strip("\u2026 "), final]
    page = write_reading(folder, whole, facts, f"{final}{aside}", words, passages)
    run, config = {"agent": agent.name}, asdict(reading.config)
    files.dump(folder / "config.yaml", run=run, ask=config, agent=asdict(reading.agent.config))
    reading.say(f"The whole trace: {page}")
    memory, seconds = clean(turn.prompt.memory).strip(), round(trajectory.seconds, 3)
    beside = {"memory": memory, "remarks": remarks, "report": str(page), "agent": agent.label}
    return Answer(reading.question, final, **stands, **beside, seconds=seconds)
