"""Read a document with an agent and answer questions about it; nothing here prints.

    paths ──> document ──> Reader (engine, agent) ──> steps, one a turn ──> answer ──> RUNS/NAME

RUNS/NAME is written when a reading is finished, whole or not at all:

    config.yaml        what answers, the agent and its settings, all resolved
    transcripts.jsonl  question, sections, memories and answer as one record (`cli.py show`)
    report.html        the same as a page
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from itertools import count
from pathlib import Path

from agents import find
from commands.questions import Answer, How
from commands.screen import Screen, duration
from config import files
from config.errors import UserError, clean
from config.options import CACHE_TOKENS, TINY, AnsweringConfig, AskConfig, EvalConfig
from config.realmodels import PACKAGED
from config.settings import hints_of
from config.terminal import command_line
from data import Task, extract_answer
from engines.local import Answerer, answerer
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
from tokens.codec import Sections

SHORT_OF_A_WINDOW = 8192
"""The window that is assumed where a server does not say: today's are at least as long."""
PATIENCE_S = 30
"""How long a request is tried again that a server fails: somebody waits."""

WORD = re.compile(r"\w+|[^\w ]")
"""What the embedded policy was trained on: each word and sign of it is one token."""


@dataclass(frozen=True, slots=True)
class Step:
    """A turn of a reading, where in the document it reads, and how many sections were begun."""

    turn: Turn
    where: str
    seconds: float
    n_read: int


# ---------------------------------------------------------------- who reads


def with_answerer(config: AnsweringConfig, who: Answerer) -> AnsweringConfig:
    """Return settings with the model and the server of who answers."""
    endpoint = tuple(who.endpoint)
    return replace(config, model=who.model, endpoint=endpoint, served_as=who.served_as)


def policy_of(config: AnsweringConfig) -> str | Path | None:
    return find.model_or_default(config.model, config.endpoint)


def make_agent(name: str, config: AnsweringConfig, how: How) -> Agent:
    """Make an agent with the settings of the model, of the preset and of the user."""
    policy = policy_of(config)
    settings = {"max_sections": None, "not_found": "say"} | how.settings
    known = find.of_model(policy) | find.preset_of(how.preset, name)["agent"] | settings
    if config.endpoint and "empty" not in known and "empty" in hints_of(find.find(name).Config):
        # a server's model that thinks for too long says nothing: what was noted is not lost by it
        settings["empty"] = "keep"
    return find.with_state(find.resolve(how.preset, policy, {}, settings, name)[1], policy)


def open_answerer(
    who: Answerer,
    config: AnsweringConfig,
    agents: Sequence[Agent],
    cache_tokens: int,
    in_flight: int = 1,
    tell: Callable[[str], None] = lambda words: None,
    settle: bool = True,
) -> Engine:
    """Open the engine that answers agents. tell: called with why a server is asked again."""
    names = {field.name for field in fields(EvalConfig)}
    given = {name: value for name, value in asdict(config).items() if name in names}
    evaluation = EvalConfig(**given | {"name": "ask", "in_flight": in_flight})
    terms = Terms(patience_s=PATIENCE_S, memory_is_final=True, keyed=who.keyed, tell=tell)
    use = Use(window=who.window, terms=terms, cache_tokens=cache_tokens, settle=settle)
    return open_reader(evaluation, agents, use=use)


def fit_sections(agent: Agent, window: int | None, settings: dict) -> tuple[Agent, str]:
    """Return an agent whose turns fit a window, and words on it: in shorter sections, unless the
    user has said how long they are."""
    c, needed = agent.config, agent.turn_tokens()
    if not agent.by_section or not window or needed <= window or "chunk_tokens" in settings:
        return agent, ""
    size = min(c.chunk_tokens, max(128, window - (needed - c.chunk_tokens)))
    words = f", in sections of {size:,} tokens for its window of {window:,}"
    return agent.with_settings(chunk_tokens=size), words


def candidates(config: AskConfig, how: How) -> list[Agent]:
    """Return the agents that may read: the one that was said, else those that length decides on."""
    policy = policy_of(config)
    names = [how.agent or find.agent_of(how.preset, policy)]
    if not how.given:
        names += [name for _, name in find.best_by_length(policy)] or ["full"]
    return [make_agent(name, config, how) for name in dict.fromkeys(names)]


def choose(
    agents: Sequence[Agent], document: Document, engine: Engine, config: AskConfig, how: How
) -> tuple[Agent, str]:
    """Return the agent that reads, and how and why in words: the length of the document decides
    where the user has not."""
    agent, policy = agents[0], policy_of(config)
    named = {agent.name: agent for agent in agents}
    tokens, window = len(engine.codec.ids(document.text)), engine.window or SHORT_OF_A_WINDOW
    if how.given:
        why = f"as --{next(iter(how.given))} says"
    elif best := find.best_by_length(policy):
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
    agent, fits = fit_sections(agent, engine.window, how.settings)
    way = "all at once " if agent.name == "full" else "section by section " * agent.by_section
    return agent, f"reading {way}with {agent.label}, {why}{fits}"


# ---------------------------------------------------------------- reading


def prepare(paths: Sequence[str], config: AskConfig) -> tuple[Document, Answerer]:
    """Read the documents, and find who answers. UserError: the reading's name is taken."""
    if config.name and (folder := files.run_path(config.runs, config.name)).exists():
        raise UserError(f"{folder} is there already: give another --name.")
    who = answerer(config)
    if who.endpoint:  # a server that is not there is told of before a long document is read
        open_answerer(who, with_answerer(config, who), (), 0).close()
    return documents.read(paths, config.document_s, config.document_mib), who


class Reader:
    """A document, and what answers questions about it: an engine and the agent that it drives."""

    def __init__(
        self,
        document: Document,
        who: Answerer,
        config: AskConfig,
        how: How,
        screen: Screen,
        paths: Sequence[str] = (),
        again: bool = False,
    ):
        """paths: of the document, as they were given. again: keep what was read for the next
        question."""
        self.document, self.screen, self.paths = document, screen, paths
        config = with_answerer(config, who)
        agents = candidates(config, how)
        self.config = config = settle_dtype(config)
        cache_tokens = CACHE_TOKENS if again else 0
        self.engine = open_answerer(
            who,
            config,
            agents,
            cache_tokens,
            tell=lambda words: screen.say(words, "yellow"),
            settle=not screen.quiet,  # the threads of another program are its own
        )
        self.agent, self.way = choose(agents, document, self.engine, config, how)
        self.by, start = f"{who.said}, {self.way}", document.text[:1000]
        if config.model == TINY and len(self.engine.codec.ids(start)) > len(WORD.findall(start)):
            known = "only English such as 'Anna reached Lima.'"
            screen.say(f"The embedded policy knows {known}: give another --model.", "dim")

    def close(self) -> None:
        self.engine.close()

    def ask(self, question: str) -> Answer:
        """Read, and answer. UserError: the reading has failed; nothing of it is kept."""
        files.make_folder(Path(self.config.runs))  # before a long reading
        agent = self.agent.on(self.engine.codec, self.engine.window)
        task = Task(self.document.title, question, (), self.document.text, kind="asked")
        sections, steps = agent.sections(task), []
        try:
            with self.screen.reading(self.document, agent, sections) as show:
                for step in self.steps(agent, task, sections):
                    steps.append(step)
                    if step.turn.finish not in (Finish.FULL, Finish.ERROR):  # why is said next
                        show(step)
        except UserError as error:
            raise UserError(f"{error}{self._advice(error, agent, steps)}") from error
        answer, words = self.answer(question, agent, steps)
        self.screen.answer(answer, words, steps[-1], agent, self.document.remarks)
        trace = [
            record_turn(step.turn) | {"where": step.where, "seconds": round(step.seconds, 4)}
            for step in steps
        ]
        trajectory = Trajectory(task, [steps[-1].turn], seconds=answer.seconds)
        whole = record(trajectory, agent, None, self.config.temperature) | {"turns": trace}
        return self._keep(answer, words, agent, whole)

    def steps(self, agent: Agent, task: Task, sections: Sections) -> Iterator[Step]:
        """Drive the agent, turn by turn."""
        places = Places(task.document, sections, agent.codec.decode, agent.config.over)
        n_read, section, sampling = 0, None, Sampling(self.config.temperature)
        with self.engine.awake():
            begun = time.perf_counter()
            for turn in follow(self.engine, agent, task, sampling):
                seconds = time.perf_counter() - begun
                if begins(turn, section):
                    n_read, section = n_read + 1, turn.prompt.section
                where = self.document.where(places.locate(turn.prompt.section))
                yield Step(turn, where, seconds, n_read)
                begun = time.perf_counter()

    def _advice(self, error: UserError, agent: Agent, steps: Sequence[Step]) -> str:
        """Say what to do about a reading that has ended."""
        if steps and steps[-1].turn.finish is Finish.FULL:
            less = f"--agent {find.DEFAULT}, which reads section by section"
            if agent.by_section:
                less = f"a smaller --chunk-tokens, such as {max(1, agent.config.chunk_tokens // 2)}"
            return f" Ask anew with {less}."
        if self.config.endpoint and SHORT_OF_MEMORY.search(str(error)):
            return " To ask a smaller model anew, name it by --served-as."
        return ""

    def answer(self, question: str, agent: Agent, steps: Sequence[Step]) -> tuple[Answer, str]:
        """Return the answer at the end of a reading, and in words where the document has it."""
        turns, last = [step.turn for step in steps], steps[-1].turn
        final, _ = extract_answer(clean(last.response).strip(), agent.config.form)
        found, words = self.document.stands(final, question)
        answer = Answer(
            question,
            final,
            **found,
            memory=clean(last.prompt.memory).strip(),
            remarks=[*self.document.remarks, *remarks_on(agent, last)],
            agent=agent.label,
            seconds=round(sum(step.seconds for step in steps), 3),
            prompt_tokens=sum(len(turn.prompt_ids) for turn in turns),
            reused_tokens=sum(turn.reused_tokens for turn in turns),
            written_tokens=sum(len(turn.response_ids) for turn in turns),
        )
        return answer, words

    def _keep(self, answer: Answer, words: str, agent: Agent, whole: dict) -> Answer:
        """Write a reading into RUNS/NAME, or RUNS/NAME-2, -3, ... where that is there already.

        whole: its record, with all turns.
        """
        from report.page import write_reading

        stem = self.config.name or f"ask-{datetime.now():%Y%m%d-%H%M%S}"
        names = (f"{stem}-{number}" if number > 1 else stem for number in count(1))
        folders = (files.run_path(self.config.runs, name) for name in names)
        folder = next(folder for folder in folders if not folder.exists())
        facts = {
            "remarks": " ".join(answer.remarks),
            "read": self.document.title,
            "by": self.by,
            "took": duration(answer.seconds),
            "next question": command_line("ask", *self.paths, "QUESTION"),
        }
        passages, shown = (
            [answer.quote.strip("\u2026 "), answer.answer],
            answer.answer + answer.aside,
        )
        run, asked = {"agent": agent.name}, asdict(replace(self.config, name=folder.name))
        more = agent.extras["files"](agent, whole["turns"]) if "files" in agent.extras else {}
        with files.making_folder(folder) as temporary:
            for name, text in {"transcripts.jsonl": json.dumps(whole) + "\n", **more}.items():
                write_text(temporary / name, text)
            write_reading(temporary, whole, facts, shown, words, passages)
            settings = asdict(self.agent.config)
            files.dump(temporary / "config.yaml", run=run, ask=asked, agent=settings)
        for name in more:
            self.screen.say(f"What was kept: {folder / name}")
        report = folder / "report.html"
        self.screen.say(f"The whole trace: {report}")
        return replace(answer, report=str(report))


def remarks_on(agent: Agent, turn: Turn) -> list[str]:
    """List what an agent remarks on a turn of which more than itself should know."""
    return [line.text for line in agent.lines(record_turn(turn)) if line.label == "remark"]
