"""Suites of questions about long conversations, one file each, and training on parts of them.

`--data locomo:FILE#RULE/PART/adversarial/START` names conversations for training: the suite that
knows the form of the file, and which of them, with which questions, over which memories.
"""

from __future__ import annotations

import os
import random
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import suites
from config.errors import UserError, clean
from config.terminal import say
from data import Task, seed_of
from suites import Column, Scope, Suite, first_of_each_kind
from tasks.conversations import Conversation, Probe
from tasks.episodes import Episode, Metric, episode_of, questions_of

PARTS = ("train", "validation", "test")
STARTS = ("observations", "memories", "sessions", "summaries", "events", "empty")
ADVERSARIAL = "adversarial"  # the word that asks for questions without an answer too


@dataclass(frozen=True)
class Conversations(Suite):
    """One column of all questions: its cells are the kinds, side by side, so that what an agent
    makes of a conversation serves all of them.

    Of each kind the first `n` are asked. Kinds without a question are said at once.
    """

    source_split: str = ""
    """what a store may begin with, such as observations or empty; empty = observations, where there
    are any, else memories or sessions"""

    unit, metric = "sessions", "reward"
    grading: ClassVar[Metric]
    """how answers are graded"""
    headings: ClassVar[Sequence[str]] = ()
    """kinds of question that every file should have, those without an answer last"""
    rules: ClassVar[Sequence[str]] = ()
    """ways to divide the conversations of a file, see `split`"""

    @staticmethod
    def load(path: Path) -> list[Conversation]:
        """Read the conversations of a file."""
        raise NotImplementedError

    @staticmethod
    def split(
        conversations: Sequence[Conversation], rule: str, adversarial: bool
    ) -> dict[str, list[Conversation]]:
        """Divide conversations by one of `rules`: part -> conversations."""
        raise NotImplementedError

    def columns(self, scope: Scope) -> list[Column]:
        part = f"#{self.source_split}" if self.source_split else ""
        found = conversations_of(f"{self.name}:{self.file_in(scope)}{part}")
        probes = [probe for c in found.conversations for probe in c.probes]
        abstaining = "/" not in part or found.adversarial
        found.say_missing(probes, abstaining, "is in it, none will be asked")

        def make() -> list[Task]:
            return first_of_each_kind(all_questions(found), scope.n)

        return [Column("", max(len(c.sessions) for c in found.conversations), make)]


# ---------------------------------------------------------------- what a --data names


@dataclass(frozen=True)
class Source:
    """What a `--data` of conversations stands for."""

    name: str  # as it was given
    suite: type[Conversations]
    conversations: list[Conversation]
    start: str  # what a store may begin with, of `STARTS`
    adversarial: bool  # whether questions without an answer are asked for

    def episode(self, conversation: Conversation, probes: Sequence[Probe]) -> Episode:
        return episode_of(conversation, probes, self.start, self.suite.grading)

    def paid_for(self, conversation: Conversation, shown: Container[int]) -> list[Probe]:
        """Return the questions that an episode may be paid for.

        Those of a conversation whose evidence is in the sessions shown (numbers). One that names
        none is known to be about something in them only if there are no sessions. What abstains is
        paid for if the source says so.
        """
        whole = not conversation.sessions
        return [
            probe
            for probe in conversation.probes
            if (self.adversarial if probe.abstains else probe.sessions or whole)
            and (whole or all(number in shown for number in probe.sessions))
        ]

    def say_missing(self, probes: Sequence[Probe], abstaining: bool, reason: str) -> None:
        """Say how many questions are left out, and of which kinds there is none; of several
        processes the first does.

        abstaining: whether questions without an answer count. reason: follows their names.
        """
        known = {probe.heading for probe in probes}
        held = [p for c in self.conversations for p in c.probes if abstaining or not p.abstains]
        kinds = [*self.suite.headings, *(probe.heading for probe in held)]
        if not abstaining:
            kinds = [kind for kind in kinds if kind not in self.suite.headings[-1:]]
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in known]
        words = [f"no question of {clean(', '.join(missing))} {reason}"] if missing else []
        if never := len(held) - len({id(probe) for probe in probes}):
            words.append(f"{never} of {len(held)} questions are left out")
        if words and os.environ.get("RANK", "0") == "0":
            say(f"{clean(self.name)}: {'; '.join(words)}.")


def is_conversations(source: str) -> bool:
    """Tell whether a `--data` names conversations."""
    kind, colon, _ = source.partition(":")
    known = suites.known(kind) if colon and kind in suites.names() else None
    return known is not None and issubclass(known, Conversations)


def conversations_of(source: str) -> Source:
    """Read `locomo:FILE#RULE/PART/adversarial/START`, each word of which may be left out.

    RULE/PART: a rule of the suite and train, validation or test, both or neither; without them, all
    conversations. adversarial: keep the questions without an answer in the part, and let training
    pay for them. START: what a store may begin with, `STARTS`; if it is not said observations,
    where there are any, else memories or sessions. UserError: there is no such rule, part or start,
    or the part is empty.
    """
    kind, _, rest = source.partition(":")
    path, _, chosen = rest.partition("#")
    suite = suites.find(kind)
    conversations = suite.load(Path(path))
    words = chosen.split("/") if chosen else []
    held = [name for name in STARTS if any(c.memories.get(name) for c in conversations)]
    start = words.pop() if words and words[-1] in STARTS else (held or ["empty"])[0]
    if adversarial := words[-1:] == [ADVERSARIAL]:
        words.pop()
    if words:
        rule, part = (*words, "")[:2]
        if len(words) > 2 or rule not in suite.rules or part not in PARTS:
            rules = f"{' or '.join(suite.rules)}; " if suite.rules else ""
            form = f"RULE/PART/{ADVERSARIAL}/START, each of which may be left out"
            choices = f"{rules}{', '.join(PARTS)}; {', '.join(STARTS)}"
            raise UserError(f"{source}: after # stands {form}: {choices}.")
        conversations = suite.split(conversations, rule, adversarial)[part]
    if not conversations:
        raise UserError(f"{source}: there is no conversation in this part.")
    return Source(source, suite, conversations, start, adversarial)


def all_questions(source: Source) -> list[Task]:
    """Return a task for each question about each conversation."""
    return [
        task for c in source.conversations for task in questions_of(source.episode(c, ()), c.probes)
    ]


# ---------------------------------------------------------------- training


class ConversationTasks:
    """Serve stretches of conversations, each with hidden questions about what was said there.

    A level has one of the given numbers of sessions, as many in a row at a place drawn anew for
    each task. A conversation without sessions is one stretch. Kinds of question that are never
    asked for are said at once. UserError: none of the conversations has a question about so few
    sessions.
    """

    def __init__(self, source: str, lengths: tuple[int, ...], seed: int, n_probes: int = 8):
        self.source = conversations_of(source)
        self.lengths, self.seed = lengths, seed
        self.n_probes, self.levels = n_probes, len(lengths) - 1
        probes: list[Probe] = []
        for length in lengths:
            stretches = [self._stretches(c, length) for c in self.source.conversations]
            if not any(stretches):
                raise UserError(f"{source}: no question is about {length} sessions in a row.")
            probes += [p for found in stretches for _, part in found for p in part]
        reason = f"is about {max(lengths)} sessions in a row or fewer, none will be paid for"
        self.source.say_missing(probes, self.source.adversarial, reason)

    def _stretches(self, conversation: Conversation, length: int) -> list[tuple[int, list[Probe]]]:
        """Return (first session, its questions) of every stretch with a question."""
        numbers = [session.number for session in conversation.sessions]
        stretches = (
            (k, self.source.paid_for(conversation, numbers[k : k + length]))
            for k in range(max(1, len(numbers) - length + 1))
        )
        return [(k, probes) for k, probes in stretches if probes]

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        rng = random.Random(seed_of(self.seed, "conversations", step, level))
        length, tasks = self.lengths[level], []
        able = [c for c in self.source.conversations if self._stretches(c, length)]
        for i in range(n):
            conversation = rng.choice(able)
            k, probes = rng.choice(self._stretches(conversation, length))
            sessions = conversation.sessions[k : k + length]
            shown = {session.number for session in sessions}
            memories = {
                # one of no session belongs to all of them
                name: tuple(m for m in entries if m.session in (None, *shown) or not shown)
                for name, entries in conversation.memories.items()
            }
            id = f"{conversation.id}-{step}-{i}"
            part = replace(conversation, id=id, sessions=sessions, memories=memories)
            hidden = rng.sample(probes, min(self.n_probes, len(probes)))
            tasks.append(self.source.episode(part, hidden))
        return tasks


def validation_episodes(source: str, n: int) -> list[Episode]:
    """Return an episode of each conversation: all of its sessions, then its questions.

    They are the same ones every time; of all conversations together about n, as many of each.
    UserError: there is no question that could be asked.
    """
    found = conversations_of(source)
    each = -(-n // len(found.conversations))
    tasks, payable = [], list[Probe]()
    for c in found.conversations:
        probes = found.paid_for(c, {session.number for session in c.sessions})
        payable += probes
        probes = random.Random(seed_of("validation", c.id)).sample(probes, min(each, len(probes)))
        if probes:
            tasks.append(found.episode(c, probes))
    if not tasks:
        raise UserError(f"{source}: there is no question that a validation could ask.")
    found.say_missing(payable, found.adversarial, "is in it, none will be validated")
    return tasks
