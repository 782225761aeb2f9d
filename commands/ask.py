"""Read a document and answer questions about it, in two steps; nothing here prints.

    paths ──> document ──> Reader ──> the sections that match best, read at once ──> first answer
                                  ──> all of it ──> agrees? another? nothing? ──> RUNS/NAME

A search by words answers at once, and always answers. Whoever reads all notes nothing where there
is nothing. Where the two agree, each confirms the other.

RUNS/NAME is written when a reading is finished, whole or not at all:

    config.yaml        what answers, the agent and its settings, all resolved
    transcripts.jsonl  question, sections, memories and answer as one record (`cli.py show`)
    report.html        the same as a page
"""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from itertools import count
from pathlib import Path

from agents import find
from agents.baselines import UNMATCHED, best_sections
from commands.questions import COUNTS, Answer, How
from commands.screen import Screen, duration
from config import files
from config.errors import UserError, clean, clip
from config.options import CACHE_TOKENS, TINY, AnsweringConfig, AskConfig, EvalConfig
from config.realmodels import PACKAGED
from config.settings import hints_of
from config.terminal import command_line
from data import NOT_FOUND, Task, exact_match, extract_answer
from engines.local import Answerer, answerer
from engines.open import Use, open_reader
from memagent import Agent, Finish, Trajectory, Turn
from models.dtypes import settle_dtype
from report.reading import begins
from report.records import record, record_turn
from report.summary import write_text
from rollout import Engine, Sampling, follow
from tasks import documents, quotes
from tasks.documents import Document
from tasks.pages import Places
from tasks.served import SHORT_OF_MEMORY, Terms
from tokens.codec import Sections

SHORT_OF_A_WINDOW = 8192
"""The window that is assumed where a server does not say: today's are at least as long."""
PATIENCE_S = 30
"""How long a request is tried again that a server fails: somebody waits."""
FIRST_TOKENS = 512
"""Longest section of those that the first answer comes from: a slow server gives it soon too."""
LONGEST_S = 120
"""All of a document is not read where that would take longer,"""
BEST = 4
"""but so many sections that match the question best."""
ALL = "all of it"

WORD = re.compile(r"\w+|[^\w ]")
"""What the embedded policy was trained on: each word and sign of it is one token."""


@dataclass(frozen=True, slots=True)
class Step:
    """A turn of a reading, where in the document it reads, and how many sections were begun."""

    turn: Turn
    where: str
    seconds: float
    n_read: int


class TooLong(Exception):
    """Reading all of a document would take so many seconds."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an agent has read to its end, what it answers, and in words where that stands."""

    task: Task
    agent: Agent
    steps: Sequence[Step]
    answer: Answer
    words: str
    part: str  # of the document, in words

    def noted(self) -> str:
        """Return the last memory, and where the section stands that it was written after."""
        memory, places = self.answer.memory, [""]
        for step in self.steps:
            prompt, after = step.turn.prompt, self.agent.memory_after(record_turn(step.turn))
            before, after = (clean(text).strip() for text in (prompt.memory, after))
            places += [step.where] if not prompt.final and before != after == memory else []
        return repr(clip(memory, 100)) + f" ({places[-1]})" * bool(places[-1])

    def record(self, temperature: float) -> dict:
        """Return it as `report.records` has readings, with all its turns."""
        trace = [
            record_turn(step.turn) | {"where": step.where, "seconds": round(step.seconds, 4)}
            for step in self.steps
        ]
        trajectory = Trajectory(self.task, [self.steps[-1].turn], seconds=self.answer.seconds)
        return record(trajectory, self.agent, None, temperature) | {"turns": trace}


def part_of(n: int, of: int) -> str:
    """Say which part of a document n of its sections are, those that match the question best.

    >>> part_of(2, 68), part_of(1, 3), part_of(4, 4)
    ('the 2 sections that match best, of 68', 'the section that matches best, of 3', 'all of it')
    """
    some = f"the {n} sections that match" if n > 1 else "the section that matches"
    return ALL if n >= of else f"{some} best, of {of:,}"


def not_found(part: str) -> str:
    return NOT_FOUND if part == ALL else f"not found in {part}"


def agree(one: str, other: str) -> bool:
    """Tell whether two answers are the same, or one holds the words of the other.

    >>> agree("in 1946", "1946"), agree("105", "1,050"), agree("the Yes", "yes"), agree("", "")
    (True, False, True, False)
    """
    same = exact_match(one, [other]) or quotes.places(one, other) or quotes.places(other, one)
    return bool(one and other and same)


def only_best(agent: Agent, task: Task) -> Agent:
    """Return an agent that reads of a task only the sections that match its question best."""
    whole = agent.sections(task)
    best, _ = best_sections(whole, task.question, BEST)
    ids = [i for k in sorted(best) for i in whole[k].ids]
    narrow = copy.copy(agent)
    narrow.sections = lambda task: Sections(ids, whole.n_tokens, 0, agent.codec.decode)
    return narrow


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
    """Return the agents that may read: the one that was said, else whoever reads all of it, before
    those who read at once."""
    names = [how.agent or find.agent_of(how.preset, policy_of(config))]
    if how.given and config.quick:
        raise UserError(f"--quick and --{next(iter(how.given))} choose an agent: leave one out.")
    names += [] if how.given else ["full", find.FIRST]
    return [make_agent(name, config, how) for name in dict.fromkeys(names)]


def choose(
    agents: Sequence[Agent], document: Document, engine: Engine, config: AskConfig, how: How
) -> tuple[Agent | None, Agent, str]:
    """Return the agent that answers first, if there are two steps, the one that reads all, and how
    and why in words."""
    agent, policy, named = agents[0], policy_of(config), {each.name: each for each in agents}
    tokens, window = len(engine.codec.ids(document.text)), engine.window or SHORT_OF_A_WINDOW
    if how.given:
        why = f"as --{next(iter(how.given))} says"
    elif str(policy) not in PACKAGED and find.trained_agent(policy):  # those are as they came
        why = "the agent that the model was trained with"
    elif tokens <= window // 2:
        agent, why = named["full"], f"since it fits half the window of {window:,} tokens"
    else:
        why = f"since it is longer than half the window of {window:,} tokens"
    agent, fits = fit_sections(agent, engine.window, how.settings)
    way = "all at once " if agent.name == "full" else "section by section " * agent.by_section
    first = None if how.given else named[find.FIRST]
    if first and "chunk_tokens" not in how.settings:
        size = min(first.config.chunk_tokens, FIRST_TOKENS)
        first = first.with_settings(chunk_tokens=size)
    if first and not agent.by_section:
        at_once = first.config.top_k * first.config.chunk_tokens
        first = None if agent.name == first.name or tokens <= at_once else first  # it reads all
    begins_with = "first the sections that match best, then " if first else ""
    return first, agent, f"reading {begins_with}{way}with {agent.label}, {why}{fits}"


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
        self.first, self.agent, self.way = choose(agents, document, self.engine, config, how)
        self.by, start = f"{who.said}, {self.way}", document.text[:1000]
        if config.model == TINY and len(self.engine.codec.ids(start)) > len(WORD.findall(start)):
            known = "only English such as 'Anna reached Lima.'"
            screen.say(f"The embedded policy knows {known}: give another --model.", "dim")

    def close(self) -> None:
        self.engine.close()

    def ask(self, question: str) -> Answer:
        """Read, and answer. UserError: the reading has failed; nothing of it is kept."""
        files.make_folder(Path(self.config.runs))  # before a long reading
        task = Task(self.document.title, question, (), self.document.text, kind="asked")
        agent = self.agent.on(self.engine.codec, self.engine.window)
        if self.first is None:
            alone = self._read(agent, task)
            self.screen.answer(alone, self.document.remarks)
            return self._keep([alone], alone.answer, alone.words)
        at_once = self.first.on(self.engine.codec, self.engine.window)
        n = len(at_once.sections(task))
        first = self._read(at_once, task, part_of(min(n, at_once.config.top_k), n))
        wrote_none = not first.answer.answer and first.steps[-1].turn.finish is Finish.STOP
        if wrote_none or UNMATCHED in first.answer.remarks:  # it was shown any sections
            first = replace(first, answer=first.answer.without(not_found(first.part)), words="")
        self.screen.first(first, self.config.quick)
        if self.config.quick:
            return self._keep([first], first.answer, first.words)
        return self._together(first, *self._second(agent, task))

    def _second(self, agent: Agent, task: Task) -> tuple[Reading | None, list[str]]:
        """Read all of a document, or where that takes too long the sections that match best, one by
        one; and what is to be remarked. None: it was stopped or has failed."""
        try:
            try:
                return self._read(agent, task, longest_s=LONGEST_S), []
            except TooLong as error:
                n, (seconds,) = len(agent.sections(task)), error.args
                took = f"Reading all {n:,} sections would take about {duration(seconds)}"
                narrow = only_best(agent, task)
                part = part_of(len(narrow.sections(task)), n)
                second = self._read(narrow, task, part, of=agent)
                return second, [f"{took}: --agent {agent.label} does."]
        except KeyboardInterrupt:
            if self.screen.quiet:
                raise
            return None, ["The second reading was stopped."]
        except UserError as error:  # the first answer is not lost by it
            return None, [f"The second reading has failed: {error}"]

    def _read(
        self,
        agent: Agent,
        task: Task,
        part: str = ALL,
        longest_s: float = math.inf,
        of: Agent | None = None,
    ) -> Reading:
        """Read to the end. of: the agent whose sections are all of the document's, if not this one.

        UserError: the reading has failed. TooLong: it would take longer, as its first section says.
        """
        sections, steps = agent.sections(task), []
        try:
            with self.screen.reading(self.document, agent, sections, part == ALL) as show:
                for step in self.steps(agent, task, (of or agent).sections(task)):
                    steps.append(step)
                    # a first step may take longer than others: the second one decides
                    expected_s = min(each.seconds for each in steps) * (len(sections) + 1)
                    if agent.by_section and len(steps) == 2 and expected_s > longest_s:
                        raise TooLong(expected_s)
                    if step.turn.finish not in (Finish.FULL, Finish.ERROR):  # why is said next
                        show(step)
        except UserError as error:
            raise UserError(f"{error}{self._advice(error, agent, steps)}") from error
        answer, words = self.answer(task.question, agent, steps)
        if answer.answer == NOT_FOUND:
            answer = replace(answer, answer=not_found(part))
        return Reading(task, agent, steps, answer, words, part)

    def _together(self, first: Reading, second: Reading | None, remarks: Sequence[str]) -> Answer:
        """Judge the first answer by the second reading, show both and keep them."""
        one, readings, words, why = first.answer, [first], first.words, ""
        answer = replace(one, first=one.answer)
        if second:
            readings, two, part = [first, second], second.answer, second.part
            answer = replace(
                answer,
                memory=two.memory,
                agent=f"{one.agent}, {two.agent}",
                seconds=round(one.seconds + two.seconds, 3),
                remarks=[*dict.fromkeys((*one.remarks, *two.remarks))],
                **{name: getattr(one, name) + getattr(two, name) for name in COUNTS},
            )
            if two.nothing:
                answer = answer.without(two.answer)
                answer, words = replace(answer, agrees=one.nothing), ""
                why = f"Reading {part} noted nothing"
                why += ": it is likely not in the document." if part == ALL else "."
            elif agree(one.answer, two.answer):
                answer = replace(answer, agrees=one.grounded)
                why = f"Reading {part} agrees"
                why += f": it noted {second.noted()}." if two.memory else "."
                why += " But the sentence shares no word with the question." * (not one.shared)
            else:
                answer = replace(answer, agrees=False, other=two.answer)
                why = f"Reading {part} found another answer: {two.answer or 'none'}."
                why += f" {second.words}" * bool(second.words)
        answer = replace(answer, remarks=[*answer.remarks, *remarks])
        self.screen.both(answer, words, why)
        return self._keep(readings, answer, words, why)

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

    def _keep(
        self, readings: Sequence[Reading], answer: Answer, words: str, why: str = ""
    ) -> Answer:
        """Write readings into RUNS/NAME, or RUNS/NAME-2, -3, ... where that is there already; its
        page is of the last one. why: what the second one says of the first answer."""
        from report.page import write_reading

        stem = self.config.name or f"ask-{datetime.now():%Y%m%d-%H%M%S}"
        names = (f"{stem}-{number}" if number > 1 else stem for number in count(1))
        folders = (files.run_path(self.config.runs, name) for name in names)
        folder = next(folder for folder in folders if not folder.exists())
        first = f"{answer.first}, from {readings[0].part}" if answer.first else ""
        facts = {
            "first answer": first,
            "then": why,
            "remarks": " ".join(answer.remarks),
            "read": self.document.title,
            "by": self.by,
            "took": duration(answer.seconds),
            "next question": command_line("ask", *self.paths, "QUESTION"),
        }
        passages = [answer.quote.strip("\u2026 "), answer.answer]
        records = [reading.record(self.config.temperature) for reading in readings]
        agent, whole = readings[-1].agent, records[-1]
        run, asked = {"agent": agent.name}, asdict(replace(self.config, name=folder.name))
        more = agent.extras["files"](agent, whole["turns"]) if "files" in agent.extras else {}
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        with files.making_folder(folder) as temporary:
            for name, text in {"transcripts.jsonl": lines, **more}.items():
                write_text(temporary / name, text)
            shown = answer.line if answer.answer else ""
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
