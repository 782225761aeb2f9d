"""The body of `stream`: a suite's tasks, epoch by epoch, and a bank that learns of them.

    epoch -> batch: retrieve for all, act, judge -> feedback, experiences: one transaction -> batch

What a stream has done stands in the bank's own file, written with what the batch has taught: a
stream that was killed goes on from its last whole batch, to the same numbers. Rows of a batch are
appended before that, and cut off again if the batch was not kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import suites
from agents import find
from agents.bank import Bank, BankConfig
from commands import contents
from config import files
from config.errors import UserError, clip, kept
from config.gone import as_before, check_gone
from config.locks import writing
from config.options import EvalConfig, StreamConfig
from config.plugins import failure
from config.settings import hints_of
from config.terminal import bar
from data import seed_of
from engines.open import give_embedder, open_reader
from engines.rehearsed import RehearsedEngine
from memagent import Agent, Prompt, Trajectory, Turn
from models.dtypes import settle_dtype
from report.rows import lines_in
from rollout import Engine, Sampling, rollout, start
from suites import Scope, Suite
from tasks.environments import Environment, Work

STATE, FROZEN = "stream", "frozen"  # what a bank keeps of a stream: `State`; of a frozen bank
MAY_CHANGE = {"runs", "name", "in_flight", "device", "endpoint", "arms", "path", "epochs"}


def run_stream(config: StreamConfig, settings: dict, suite: Suite | None = None) -> Path:
    """Do all streams, one for each of `arms`; return the folder with rows, banks and report.

    settings: the fields of the agent that the user gave. suite: None: the one that is named, as it
    is by default. UserError: an arm is unknown, the environment or what it needs is missing, the
    folder is of another stream.
    """
    from report.streams import write_stream_report

    suite, folder = suite or suites.from_config(config), files.run_path(config.runs, config.name)
    if config.frozen and Path(config.frozen).absolute().parent == folder.absolute():
        raise UserError(f"The frozen bank lies in {folder} itself: give another --name.")
    if config.path and suite.generated:
        raise UserError(f"{suite.label}'s tasks are generated: leave --path out.")
    stored = files.read_yaml(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    config = _complete(config, settings, stored)
    safe = f"All batches before are whole in {folder}; make room and call the same command again."
    with kept(lambda: safe), contextlib.ExitStack() as open_ones:
        path = (config.path,) if config.path else ()
        environment = suite.opened(Scope(path, (), config.n, config.seed))
        open_ones.callback(environment.close)
        streams = [Stream(config, arm, settings, environment, folder) for arm in config.arms]
        given = {"stream": asdict(config) | asdict(suite), "agent": settings}
        read = contents.of_stream(suite, streams[0].agent)
        if stored:
            _check_same(folder, stored, given, suite, read)
        engine = _open(config, [stream.agent for stream in streams], environment)
        if config.frozen:  # what cannot be read leaves no folder behind
            for stream in streams:
                open_ones.callback(stream.agent.opened().close)
        files.make_folder(folder)
        open_ones.enter_context(writing(folder, f"The stream {folder}"))
        for stream in streams:  # what cannot be used is refused before anything is written
            open_ones.callback(stream.book.close)
        files.dump(folder / "config.yaml", **given, **contents.section(read))
        with contextlib.closing(engine), engine.awake(), bar("tasks") as progress:
            for stream in streams:
                n, each = len(stream.tasks) * config.epochs, len(stream.tasks)
                shown = progress.add_task(stream.arm, total=n, note="", every=each)
                stream.run(engine, lambda done, shown=shown: progress.update(shown, completed=done))
        outcomes = [outcome_of(folder, s.arm, config, s.book) for s in streams]
        rule = engine.rule if isinstance(engine, RehearsedEngine) else ""
        write_stream_report(folder, config, outcomes, rule)
    return folder


def _complete(config: StreamConfig, settings: dict, stored: dict) -> StreamConfig:
    """Return the settings with all that was left open; the dtype is that of a stream that goes on,
    and `auto` of one that an earlier version began stays so. UserError: an arm is unknown, or a
    bank is named where a stream has its own."""
    kind = find.learner()
    if settings.get("bank"):
        raise UserError("A stream has banks of its own: give --frozen instead of --bank.")
    known = kind.extras["frozen_arms" if config.frozen else "arms"]
    arms = config.arms or (tuple(known) if config.frozen else kind.extras["usual_arms"])
    if unknown := [arm for arm in arms if arm not in known]:
        raise UserError(f"There is no method {unknown[0]!r} here: choose of {', '.join(known)}.")
    config = replace(config, arms=arms, epochs=config.epochs or (1 if config.frozen else 10))
    if not isinstance(before := stored.get("stream"), dict):
        return settle_dtype(config)
    dtype = str(before.get("dtype", "auto"))
    return config if dtype == "auto" else settle_dtype(config, dtype)


def _check_same(
    folder: Path, stored: dict, given: dict[str, dict], suite: Suite, read: contents.Contents
) -> None:
    """Refuse to go on with a stream that began with other settings, code or templates; more epochs
    are none."""
    if not all(isinstance(stored.get(section), dict) for section in given):
        raise UserError(f"{folder} holds a run that is no stream: give this one another --name.")
    # settings that an earlier version did not have were as they are by default
    usual = asdict(StreamConfig()) | asdict(type(suite)())
    before = stored | {"stream": usual | suites.stored(stored["stream"])}
    for section in given:
        check_gone(before[section], given[section], f"{folder / 'config.yaml'}: {section}")
    now, before = (json.loads(json.dumps(each, default=str)) for each in (given, before))
    wrong = [
        name
        for section in given
        for name, value in (before[section] | now[section]).items()
        if before[section].get(name) != value and name not in MAY_CHANGE
    ]
    wrong += [f"the content of {file}" for file in contents.compare(folder, read)[0]]
    if wrong:
        raise UserError(
            f"{folder} began with other settings ({', '.join(wrong[:3])}): leave these as they "
            "were, or give another --name."
        )


def _open(config: StreamConfig, agents: Sequence[Agent], environment: Environment) -> Engine:
    """Open what answers, and the agents' embedder."""
    if config.engine == "rehearsed" and not config.endpoint:
        give_embedder(agents)
        return RehearsedEngine(environment.tasks())
    engine = "transformers" if config.engine == "rehearsed" else config.engine
    names = ("model", "endpoint", "served_as", "chat", "in_flight", "device", "dtype")
    given = {name: getattr(config, name) for name in names}
    return open_reader(EvalConfig(engine=engine, **given), agents)


@dataclass(slots=True)
class State:
    """What a bank keeps of its stream."""

    epoch: int = 0  # from 0; that of the next batch
    cursor: int = 0  # tasks of the epoch that are done
    bytes: int = 0  # of the rows
    settings: str = ""


class Stream:
    """One way of remembering: its bank, its rows, where it stands."""

    def __init__(
        self,
        config: StreamConfig,
        arm: str,
        settings: dict,
        environment: Environment,
        folder: Path,
    ):
        self.config, self.arm, self.environment = config, arm, environment
        kind = find.learner()
        by_suite = kind.extras["constants"][config.constants]
        if by_suite and config.suite not in by_suite:
            raise UserError(f"There are no {config.constants} constants for {config.suite}.")
        self.rows_path, self.book_path = folder / f"{arm}.jsonl", folder / f"{arm}.db"
        given = by_suite.get(config.suite, {}) | settings | kind.extras["arms"][arm]
        given |= {"bank": config.frozen or str(self.book_path)}
        if config.frozen or environment.leaves_nothing:
            given["update"] = "none"
        self.agent = kind(kind.Config(**given))
        self.agent.seed, self.agent.frozen = config.seed, bool(config.frozen)
        tasks = [*environment.tasks()]
        self.tasks = tasks[: config.n] if config.n else tasks

    @cached_property
    def book(self) -> Bank:
        """Return the bank that keeps where the stream stands: its own or, where that is frozen, one
        without entries."""
        return Bank(self.book_path, BankConfig()) if self.config.frozen else self.agent.opened()

    @cached_property
    def settings(self) -> str:
        """Return a fingerprint of what the rows depend on."""
        c, agent = self.config, asdict(self.agent.config) | {"bank": ""}
        told = self.agent.codec.told_date if self.agent.codec else ""
        agent = as_before(self.agent.had, agent)
        parts = (
            agent | ({"template_date": told} if told else {}),
            [task.digest for task in self.tasks],
            c.batch, c.seed, c.temperature, False, c.model, c.engine,  # False: as rows began
            *([c.dtype] if c.dtype != "auto" else ()),
            *([self.agent.opened().digest] if c.frozen else ()),
        )  # fmt: skip
        return blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def order(self, epoch: int) -> list[Work]:
        """Return the tasks in the order of an epoch."""
        tasks = [*self.tasks]
        random.Random(seed_of(self.config.seed, "order", epoch)).shuffle(tasks)
        return tasks

    def run(self, engine: Engine, progress=lambda done: None) -> None:
        """Do what is left to do."""
        self.agent = self.agent.on(engine.codec, engine.window)
        state, n = self._begin(), len(self.tasks)
        _cut(self.rows_path, state.bytes)
        while state.epoch < self.config.epochs:
            state = self._work(engine, state)
            progress(state.epoch * n + state.cursor)
        progress(self.config.epochs * n)

    def _work(self, engine: Engine, state: State) -> State:
        """Work on the next batch and learn of it; return where the stream stands then."""
        agent, book, start_s = self.agent, self.book, time.perf_counter()
        agent.epoch = state.epoch
        done = state.cursor + self.config.batch
        batch = self.order(state.epoch)[state.cursor : done]
        tried = self._try(engine, batch)
        lessons = [] if agent.frozen else [agent.lesson([tried[task.id]]) for task in batch]
        end = _append(
            self.rows_path, [_row(agent, tried[task.id], self.config.dtype) for task in batch]
        )
        whole, clock = done >= len(self.tasks), f"seconds {agent.epoch + 1}"
        state = State(state.epoch + whole, 0 if whole else done, end, self.settings)
        seconds = (book.noted(clock, float) or 0.0) + time.perf_counter() - start_s
        with book.batch():
            if lessons := [lesson for lesson in lessons if lesson]:
                agent.learn(lessons)
            book.note(STATE, asdict(state))
            book.note(clock, seconds)
            if whole:
                book.evict()
                shown = book if agent.config.recall == "none" else agent.opened()
                book.note(f"epoch {agent.epoch + 1}", shown.stats())
        return state

    def _begin(self) -> State:
        """Return where the stream stands. A new one notes what it knows first: delta and
        experiences or, of a frozen bank, what it is and whose solutions it holds."""
        book, bank = self.book, self.agent.opened()
        if (noted := book.noted(STATE, dict)) is not None:
            kinds = {name: type(value).__name__ for name, value in noted.items()}
            if kinds != State.__annotations__:
                raise UserError(f"{book.path} is damaged: it does not say where its stream stands.")
            state = State(**noted)
            if state.settings != self.settings:
                raise UserError(
                    f"{book.path} is the bank of a stream with other tasks or settings: give "
                    "another --name."
                )
            return state
        with book.batch():
            recalls = self.agent.config.recall == "bank"
            if recalls and bank.frozen:
                entries = bank.entries()
                leaks = _leaks(self.tasks, [entry.experience for entry in entries])
                about = {"path": str(bank.path), "entries": len(entries), "digest": bank.digest}
                book.note(FROZEN, about | {"leaks": leaks})
            elif recalls:
                if self.agent.config.delta is None:
                    bank.calibrate([task.intent for task in self.tasks])
                for task_id, intent, experience in self.environment.experiences():
                    bank.write(intent, experience, success=True, task_id=task_id, epoch=-1)
            state = State(settings=self.settings)
            book.note(STATE, asdict(state))
        return state

    def _try(self, engine: Engine, batch: Sequence[Work]) -> dict[str, Trajectory]:
        """Let the agent work on a batch; a task whose engine, embedder or judge failed is begun
        anew.

        All that a server is needed for happens here, before anything is learnt: what stays away
        fails its task, and a batch is never half learnt.
        """
        c, seed = self.config, seed_of(self.config.seed, self.agent.epoch)
        found: dict[str, Trajectory] = {}
        todo = [*batch]
        for _ in range(2):  # once anew
            jobs = [(task, 0) for task in todo]
            given = (engine, self.agent, jobs, Sampling(c.temperature), seed, c.in_flight)
            for trajectory in rollout(*given, steps_of=_guard) if jobs else ():
                found[trajectory.task.id] = trajectory
            todo = [task for task in todo if found[task.id].fault]
        return found


def settings_of_stream(section: dict) -> StreamConfig:
    """Return the settings of a stream in its folder.

    No suite is loaded for it from a file that was not loaded before.
    """
    stored, known = suites.stored(section), hints_of(StreamConfig)
    return StreamConfig(**{name: value for name, value in stored.items() if name in known})


def outcome_of(folder: Path, arm: str, config: StreamConfig, bank: Bank) -> dict:
    """Return what the report needs to know of an arm, from its rows and its bank."""
    kind, numbers = find.learner(), range(1, config.epochs + 1)
    frozen, known = bank.noted(FROZEN, dict) or {}, bank.stats()
    stats = [bank.noted(f"epoch {epoch}", dict) for epoch in numbers]
    for epoch, stat in zip(numbers, stats, strict=True):
        if stat and not all(type(stat.get(name)) in (int, float) for name in known):
            raise UserError(f"{bank.path} is damaged: its note on epoch {epoch} lacks a number.")
    return {
        "arm": arm,
        "about": kind.extras["frozen_arms" if config.frozen else "about_arms"][arm],
        "frozen": frozen,
        "rows": [*lines_in(folder / f"{arm}.jsonl")],
        "leaks": frozen.get("leaks", []),
        "stats": stats,
        "seconds": [bank.noted(f"seconds {epoch}", float) for epoch in numbers],
        "digest": frozen.get("digest") or bank.digest,
    }


LEAK = 12  # characters of a solution that are worth looking for
BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


def _leaks(tasks: Sequence[Work], experiences: Sequence[str]) -> list[str]:
    """Return the ids of tasks whose known solution stands in an experience.

    That is its first action or, of more than two, all of them; blanks and case do not count.
    """

    def plain(text: str) -> str:
        return " ".join(text.casefold().split())

    def statement(action: str) -> str:
        block = BLOCK.search(action)
        return plain(block[1] if block else action).rstrip("; ")

    stored, found = [plain(text) for text in experiences], []
    for task in tasks:
        gold = [statement(action) for action in (task.solution or ())]
        gold = gold if len(gold) > 2 else gold[:1]
        if sum(map(len, gold)) >= LEAK and any(all(g in text for g in gold) for text in stored):
            found.append(task.id)
    return found


NOTED = 1000  # characters of an action, and of what it has brought, in a row
UNTRIED = {  # what a row says of a task that could not be tried
    "success": False, "reward": -1.0, "steps": 0, "failure": "", "confidence": None, "shown": [],
    "pool": 0, "best_sim": 0.0, "cut": False, "action": "", "experience": "",
}  # fmt: skip


def _row(agent: Agent, trajectory: Trajectory, dtype: str) -> dict:
    """Return the row of a task in the agent's epoch."""
    task, turns, tried = trajectory.task, trajectory.turns, agent.tried(trajectory)
    known = asdict(tried) if tried else UNTRIED
    acts = [turn.notes for turn in turns if turn.prompt.trained and turn.notes is not None]
    return {
        "epoch": agent.epoch,
        "id": task.id,
        "kind": task.kind,
        "skills": [*task.skills],
        "error": trajectory.error,
        **{name: known[name] for name in UNTRIED},
        "interaction": [[clip(act.action, NOTED), clip(act.observation, NOTED)] for act in acts],
        "read_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "written_tokens": sum(len(turn.response_ids) for turn in turns),
        "calls": len(turns),
        "dtype": dtype,
    }


def _guard(agent: Agent, task: Work, sample: int) -> Generator[Prompt, Turn, None]:
    """Start an agent, whose own exceptions fail the task and not the stream."""
    try:
        yield from start(agent, task)
    except UserError:
        raise
    except Exception as error:
        raise failure(error) from error


def _cut(path: Path, size: int) -> None:
    """Cut off what was appended after a file had so many bytes."""
    with path.open("ab") as file:
        if file.tell() < size:
            raise UserError(f"{path} is shorter than its bank says: remove it and its bank.")
        file.truncate(size)


def _append(path: Path, rows: Sequence[dict]) -> int:
    """Append rows and wait until they are on the disk; return the file's size."""
    with path.open("ab") as file:
        for row in rows:
            text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
            file.write(text.encode(errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()
