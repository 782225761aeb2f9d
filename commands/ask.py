"""Ask a question about documents and show the memory as it changes, with its pages.

Holds: `begun`, `resumed`, `answered`. Leaves out: the command and its prompt
(commands/questions.py), the forms of files (tasks/forms.py), who answers (engines/local.py), the
agents, the engines, the page (report/page.py).
Exercise it: `python cli.py ask report.pdf notes/ "question"`. Read next: tasks/documents.py.

A reading is a folder, RUNS/NAME, from which it can be gone on with at any time:

    config.yaml        what answers, the agent and its settings, all resolved
    document.json      the text with its pages or sessions, and the question
    turns.jsonl        one line a turn, on the disk before the next turn begins
    transcripts.jsonl  the whole of it as one record, when it is finished (`cli.py show`)
    report.html        the same as a page
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from itertools import count
from pathlib import Path

from rich.text import Text as Styled

from agents import find
from commands.questions import Answer, How
from config import files
from config.errors import UserError, clean
from config.foreign import from_json
from config.locks import writing
from config.options import TINY, AnsweringConfig, AskConfig, EvalConfig, without_url
from config.realmodels import PACKAGED
from config.settings import hints_of
from config.terminal import bar, console, say
from data import ANSWER_FORMS, NOT_FOUND, Task, extract_answer
from engines.local import answerer, keyed_here
from engines.open import open_reader
from engines.replay import Replay
from memagent import Agent, Finish, Prompt, Trajectory, Turn
from report.reading import begins
from report.records import record, record_turn
from report.rows import Rows, lines_in
from report.status import hold, release
from report.summary import write_text
from rollout import Engine, Sampling, advance, follow, start
from tasks import documents
from tasks.conversations import turns_as_memories
from tasks.documents import Document
from tasks.episodes import Episode
from tasks.pages import Places
from tasks.served import SHORT_OF_MEMORY, Terms

SHORT_OF_A_WINDOW = 8192
"""The window that is assumed where a server does not say: today's are at least as long."""
PATIENCE_S = 30
"""How long a request is tried again that a server fails: somebody waits."""
KNOWN, WORD = "'Anna reached Lima.'", re.compile(r"\w+|[^\w ]")
"""What the embedded policy was trained on: each word and sign of it is one token."""
TRIALS = (16, 16, 32, 64, 128, 256, 512)
"""Tokens that are read on trial before the time of a reading is said; the first warm up."""
TRIAL_S = 0.2
"""A trial that takes so many seconds is the last: the next would take twice as long."""

AGAIN = {"endpoint", "agent", "embedder", "trust_remote_code"}
"""Flags that `--resume` takes: a config.yaml decides on no address and, of agents, on no file."""

ROW = {"final", "section", "memory", "response", "finish", "prompt_ids", "response_ids", "logprobs"}
ROW |= {"where", "seconds"}  # fields of a line of turns.jsonl


@dataclass(slots=True)
class Inquiry:
    """One reading: what is read and asked, by whom, and where it is kept."""

    config: AskConfig
    document: Document
    question: str
    by: str  # who answers, in words
    window: int | None  # of a server that does not say
    keyed: bool = False  # whether the server may have the API key
    agent: Agent | None = None
    folder: Path | None = None
    done: str = ""  # how far it has come, in words

    @property
    def task(self) -> Task:
        """The question about the text; about a chat, also as dated sessions and messages."""
        sessions = self.document.sessions
        given = self.document.title, self.question, (), self.document.text
        if not sessions:
            return Task(*given, kind="asked")
        memories = turns_as_memories(sessions)
        return Episode(*given, kind="asked", sessions=sessions, memories=memories)

    @property
    def again(self) -> str:
        """Return the words that go on with it."""
        c, agent = self.config, self.agent
        given = {"runs": c.runs if c.runs != AskConfig().runs else ""}
        if c.endpoint and keyed_here(c.endpoint) != self.keyed:
            given["endpoint"] = ",".join(c.endpoint)
        if agent and agent.name != agent.label:
            given["agent"] = agent.name
        if agent and "://" in agent.embedder:
            given["embedder"] = agent.embedder
        flags = [f" --{name} {shlex.quote(value)}" for name, value in given.items() if value]
        trust = " --trust-remote-code" if c.trust_remote_code else ""
        return f"go on with: python cli.py ask --resume --name {c.name}{''.join(flags)}{trust}"


def answered(
    readings: list[Inquiry], how: How, further: Callable[[], str] | None = None
) -> list[Answer]:
    """Open what answers, choose the agent by the first reading, and do all of them.

    further: asked for a question when all have been answered, until it returns ""; each of these is
    a reading that is added to the list.
    """
    first, several = readings[0], len(readings) > 1
    agents = [first.agent] if first.agent else _candidates(first.config, how)
    for remark in first.document.remarks:
        say(remark, "dim")
    terms = Terms(
        patience_s=PATIENCE_S,
        memory_is_final=True,
        keyed=first.keyed,
        tell=lambda words: say(words, "yellow"),
    )
    evaluation = evaluation_of(first.config, name="ask", in_flight=1)
    keep = first.config.cache_tokens if several or further else 0  # sections, for the next question
    say(f"Opening {first.by} ...")
    engine = open_reader(evaluation, agents, window=first.window, terms=terms, cache_tokens=keep)
    with contextlib.closing(engine):
        if first.agent is None:
            way = _choose(first, how, engine, agents)
            say(f"{way[0].upper()}{way[1:]}.")
        _say_notes(first, engine)
        answers = []
        for number, reading in enumerate(readings, 1):
            reading.agent, reading.by = first.agent, first.by
            if several:
                say(f"question {number} of {len(readings)}: {reading.question}", "bold")
            answers.append(answer := _kept(reading, engine, warm=number > 1))
            if len(readings) > 1:
                new = answer.prompt_tokens - answer.reused_tokens
                say(f"{answer.seconds:.1f} s, {new:,} of {answer.prompt_tokens:,} tokens computed")
            if further and number == len(readings) and (question := further()):
                several, config = False, replace(first.config, name=_free_name(first.config))
                more = replace(first, question=question, config=config, folder=None, done="")
                readings.append(more)
    return answers


def _free_name(config: AskConfig) -> str:
    """Return the first of NAME-2, NAME-3, ... that no run has."""
    names = (f"{config.name}-{number}" for number in count(2))
    return next(name for name in names if not files.run_path(config.runs, name).exists())


def _kept(reading: Inquiry, engine: Engine, warm: bool) -> Answer:
    """Make the folder of a reading, unless it is there, and read."""
    new = reading.folder is None
    if new:
        reading.folder = _folder(reading)
    with writing(reading.folder, f"The reading {reading.folder}"):
        hold(reading.folder)
        try:
            with Rows(reading.folder / "turns.jsonl") as rows:
                if new:
                    _begin(reading)
                return _read(reading, engine, rows, warm)
        finally:
            release(reading.folder)


# ---------------------------------------------------------------- what is read


def begun(paths: Sequence[str], questions: Sequence[str], config: AskConfig) -> list[Inquiry]:
    """Read the documents; return a reading for each question, of which the second of a NAME is
    NAME-2."""
    numbers = ["", *(f"-{k}" for k in range(2, len(questions) + 1))]
    names = [f"{config.name}{number}" if config.name else "" for number in numbers]
    for name in filter(None, names):
        _free(files.run_path(config.runs, name))
    document = documents.read(paths, config.document_s, config.document_mib)
    who = answerer(config)
    config = replace(config, model=who.model, endpoint=tuple(who.endpoint), served_as=who.served_as)
    return [
        Inquiry(replace(config, name=name), document, each, who.said, who.window, who.keyed)
        for name, each in zip(names, questions, strict=True)
    ]


def _free(folder: Path) -> None:
    """Raise a UserError if a folder holds a run."""
    if any((folder / name).exists() for name in ("document.json", "config.yaml")):
        raise UserError(f"{folder} holds a run: go on with it by --resume, or give another --name.")


def resumed(words: Sequence[str], config: AskConfig, how: How, also: Sequence[str]) -> Inquiry:
    """Return the reading of this name as it was begun."""
    if not config.name:
        raise UserError("--resume goes on with a reading: say which by --name.")
    folder = files.run_path(config.runs, config.name)

    def refuse(flag: str) -> None:
        raise UserError(f"--resume goes on with what {folder} began with: leave {clean(flag)} out.")

    kept = {"name": config.name, "runs": config.runs, "json": config.json}
    given = {f.name: v for f in fields(config) if (v := getattr(config, f.name)) != f.default}
    given |= how.settings | how.given | ({"also": also} if also else {})
    again = {*kept, *AGAIN} - ({"agent"} if how.agent in find.names() else set())
    other = [f"--{name.replace('_', '-')}" for name in given if name not in again]
    for flag in (*other, *words):
        refuse(flag)
    path = folder / "document.json"
    try:
        plain = from_json(path.read_text(encoding="utf-8"))
        document, question = Document.of(plain["document"]), plain["question"]
        by, window = plain["said"], plain["window"]
    except OSError as error:
        raise UserError(f"No reading to go on with: {path} is not there.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: ask anew under another --name.") from error
    reader = find.find(how.agent) if how.agent else None
    path = folder / "config.yaml"
    stored = find.stored_settings(path, {"endpoint": ""} | given)
    before = AskConfig(**stored.get("ask", {}) | kept)
    keyed = True if config.endpoint else keyed_here(before.endpoint)
    if keyed is None:
        find.check_reach(path, {"endpoint": before.endpoint}, given)
    config = replace(before, endpoint=config.endpoint or before.endpoint)
    name, settings = stored.get("run", {}).get("agent"), stored.get("agent", {})
    if not name:
        raise UserError(f"{path} names no agent: ask anew under another --name.")
    if reader and reader.name != name:
        refuse("--agent")
    if embedder := how.settings.get("embedder"):
        if without_url(embedder) != without_url(settings.get("embedder")):
            refuse("--embedder")
    policy = find.model_or_default(config.model, config.endpoint)
    agent = find.with_state(find.make(name, settings | how.settings), policy)
    return Inquiry(config, document, question, by, window, bool(keyed), agent, folder)


def _folder(reading: Inquiry) -> Path:
    """Make the folder of a reading: of its name, or a new one that no other process has made."""
    runs, name = reading.config.runs, reading.config.name
    if name:
        folder = files.run_path(runs, name)
        _free(folder)
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


def _begin(reading: Inquiry) -> None:
    """Write down a reading whose folder is claimed, so that it can be gone on with."""
    folder, agent = reading.folder, reading.agent
    _free(folder)  # another process may have begun, and ended, since its name was looked at
    plain = {
        "question": reading.question,
        "said": reading.by,
        "window": reading.window,
        "document": reading.document.plain(),
    }
    run, config = {"agent": agent.name}, asdict(reading.config)
    files.dump(folder / "config.yaml", run=run, ask=config, agent=asdict(agent.config))
    write_text(folder / "document.json", json.dumps(plain))  # last: with it the reading is there


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
        say("Lengths are estimated at four bytes a token: --model NAME counts tokens.", "dim")
    elif config.model == TINY and len(engine.codec.ids(text)) > len(WORD.findall(text)):
        say(f"The embedded policy knows only English such as {KNOWN}: give another --model.", "dim")


# ---------------------------------------------------------------- reading


def _read(reading: Inquiry, engine: Engine, rows: Rows, warm: bool) -> Answer:
    """Drive the agent, turn by turn; each is on the disk before the next one.

    Return the answer and what it cost. warm: the engine has answered before: nothing is tried.
    """
    trace = list(lines_in(rows.path))
    recorded = len(trace)
    if damaged := [k for k, row in enumerate(trace, 1) if not ROW <= row.keys()]:
        raise UserError(
            f"{rows.path}, line {damaged[0]} is no turn: ask anew under another --name."
        )
    agent, task = reading.agent.on(engine.codec, engine.window), reading.task
    sections, document = agent.sections(task), reading.document
    decode, in_sessions = engine.codec.decode, bool(document.sessions)
    places = Places(task.document, sections, decode, agent.config.over, verbatim=in_sessions)
    n_sections = _n_sections(document, agent, sections)
    size = document, agent, len(sections.ids) + sections.left_out, n_sections
    sampling, turn, section = Sampling(reading.config.temperature), None, None
    n_read, cost = 0, Counter()
    n_steps = n_sections if agent.by_section else 1
    with engine.awake(), bar("sections") as progress:
        shown = console.is_terminal or n_steps > 10  # elsewhere a turn has lines of its own
        every = -(-n_steps // 10)
        steps = progress.add_task("reading", total=n_steps, note="", every=every, visible=shown)
        try:
            trial = None
            if not (recorded or warm or (reading.config.endpoint and reading.keyed)):
                trial = _trial(engine, agent, task, sections.ids)  # a server may bill for it
            if not recorded and not agent.by_section:
                say(estimate(*size, trial), to=progress.console)
            begun = time.perf_counter()
            turns = follow(Replay(engine, trace[:]), agent, task, sampling)
            for number, turn in enumerate(turns, 1):
                seconds, where = time.perf_counter() - begun, places.locate(turn.prompt.section)
                named = document.where(where)
                begun = time.perf_counter()
                if turn.finish in (Finish.FULL, Finish.ERROR):
                    continue  # it is tried again by --resume
                cost["prompt_tokens"] += len(turn.prompt_ids)
                cost["reused_tokens"] += turn.reused_tokens
                cost["written_tokens"] += len(turn.response_ids)
                if begins(turn, section):
                    n_read, section = n_read + 1, turn.prompt.section
                reading.done = f", read {min(n_read, n_sections):,} of {_sections(n_sections)}"
                if number == recorded:
                    before = f"Read before: {n_read:,} of {_sections(n_sections)}."
                    say(before, to=progress.console)
                if number > recorded:
                    row = record_turn(turn) | {"where": named, "seconds": round(seconds, 4)}
                    rows.append(row)
                    trace.append(row)
                    if number == 1 and agent.by_section:
                        say(estimate(*size, seconds * (n_sections + 1)), to=progress.console)
                    for line in _lines(turn, agent, n_read, named):
                        say(line, to=progress.console)
                note = named and f"read: {named}"
                finished = n_read if agent.by_section else number
                progress.update(steps, completed=min(finished, n_steps), note=note)
        except UserError as error:
            raise UserError(f"{error}{_advice(error, reading, agent, turn)}") from error
    return replace(_end(reading, agent, turn, trace), **cost)


def _n_sections(document: Document, agent: Agent, sections: Sequence[str]) -> int:
    """Count the sections that an agent reads; one that keeps what it notes of a document reads the
    sessions of a chat one by one."""
    if not (document.sessions and agent.keeps):
        return len(sections)
    cut, most = agent.codec.cut, agent.config.chunk_tokens
    return sum(len(cut(session.dated, most)) for session in document.sessions)


def _advice(error: UserError, reading: Inquiry, agent: Agent, turn: Turn | None) -> str:
    """Say what to do about a reading that has ended."""
    if turn and turn.finish is Finish.FULL:  # as it would be again by --resume
        less = f"--agent {find.DEFAULT}, which reads section by section"
        if agent.by_section:
            less = f"a smaller --chunk-tokens, such as {max(1, agent.config.chunk_tokens // 2)}"
        return f" Ask anew with {less}, and under another --name."
    advice = f" What was read is kept; {reading.again}." if reading.done else ""
    if reading.config.endpoint and SHORT_OF_MEMORY.search(str(error)):
        advice += " To ask a smaller model anew, name it by --served-as."
    return advice


def _sections(n: int) -> str:
    return f"{n:,} section{'s' if n != 1 else ''}"


def estimate(
    document: Document, agent: Agent, tokens: int, n_sections: int, seconds: float | None = None
) -> str:
    """Return "212 pages, 131,000 tokens, 65 sections, about 14 minutes"."""
    about, n = "" if agent.codec.exact else "about ", tokens
    n = round(n, 3 - len(str(n))) if n >= 10_000 else n  # three digits count
    part = "" if agent.whole else "a part of them "
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


def _trial(engine: Engine, agent: Agent, task: Task, ids: Sequence[int]) -> float | None:
    """Warm the model up and return the seconds that an agent's only prompt will take to be read,
    by the time of its document's last tokens, `ids`; None if it reads by section.

    Attention grows faster than the prompt, so that a long one takes longer than this says.
    """
    n = 0 if agent.by_section else len(advance(agent, start(agent, task)).ids(engine.codec))
    for number, most in enumerate(TRIALS):
        prompt = Prompt(((engine.codec.decode(ids[-most:]), False),), 1)
        read, begun = len(prompt.ids(engine.codec)), time.perf_counter()
        engine.add(prompt, Sampling(0.0), 0)
        while not (done := engine.step()):
            pass
        seconds = time.perf_counter() - begun
        if done[0][1].finish is Finish.ERROR:  # one wait for a server that is gone is enough
            raise UserError(f"The prompt on trial could not be answered: {done[0][1].error}.")
        if not n:
            return None
        if number and (seconds > TRIAL_S or most >= min(n, len(ids))):
            break
    return seconds * n / read


# ---------------------------------------------------------------- what is shown


def _lines(turn: Turn, agent: Agent, number: int, where: str) -> Iterator[Styled]:
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
        if console.color_system is None:  # neither colours nor lines through the words
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
        say(answer)
    if turn.prompt.cut:
        say(
            f"{turn.prompt.cut:,} tokens of the text were not read: "
            "--max-sections or the window cut them off."
        )
    if not agent.by_section and trace[-1]["where"]:
        rest = "" if agent.whole else f"; --agent {find.DEFAULT} reads all of it"
        say(f"read: {trace[-1]['where']}{rest}", "dim")
    stands, words = reading.document.stands(final, reading.question)
    aside = " (not found in the document)" if stands["found"] is False else ""
    nothing = "No answer: the model wrote none. Try another --agent or --model."
    say(f"answer: {final}{aside}" if final else nothing, "bold")
    if final and not formed:
        form = ANSWER_FORMS.get(agent.config.form, "")
        say(f"(not in the form that was asked for{form and ', '}{form})", "dim")
    if alone and final == NOT_FOUND:
        say("Nothing was noted; --not-found guess lets the model answer all the same.", "dim")
    if words:
        say(words)
    if remarks := reading.document.remarks:
        say(f"Remarks: {' '.join(remarks)}", "yellow")
    remarks = [*remarks, *remarks_on(agent, turn)]
    trajectory = Trajectory(reading.task, [turn], seconds=sum(row["seconds"] for row in trace))
    whole = record(trajectory, agent, None, reading.config.temperature) | {"turns": trace}
    write_text(folder / "transcripts.jsonl", json.dumps(whole) + "\n")
    for name, text in agent.files(trace).items():
        write_text(folder / name, text)
        say(f"What was kept: {folder / name}")
    facts = {"remarks": " ".join(remarks), "read": reading.document.title, "by": reading.by}
    page = write_reading(folder, whole, facts, answer=f"{final}{aside}", found=words)
    say(f"The whole trace: {page}")
    memory, seconds = clean(turn.prompt.memory).strip(), round(trajectory.seconds, 3)
    beside = {"memory": memory, "remarks": remarks, "report": str(page), "agent": agent.label}
    return Answer(reading.question, final, **stands, **beside, seconds=seconds)
