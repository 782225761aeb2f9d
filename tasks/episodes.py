"""Tasks about dated sessions: what a memory store is made of, and the questions asked of it.

Holds: `Episode`, `Metric`, `episode_of` (of a conversation), `questions_of` (one task a question),
`ConversationTasks` and `conversations_of` (`--data locomo:FILE#RULE/PART`). Leaves out:
conversations and their files (tasks/conversations.py, tasks/locomo.py), the generated world
(tasks/ledger.py), stores (agents/store.py).
Exercise it: `python cli.py train --data ledger --dry-run`. Read next: tasks/ledger.py.

An episode of training has `probes`, hidden questions about all sessions that the reward comes from.
An episode of an evaluation has one question, `asked`, like any other task.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from config.errors import UserError, clean
from config.terminal import console
from data import Task, f1, normalize_answer, same_answer, seed_of
from tasks import locomo, locomo_score, longmemeval
from tasks.conversations import Conversation, Memory, Probe, Session


@dataclass(frozen=True, slots=True)
class Metric:
    """Hold a way to grade answers."""

    name: str  # as it stands in tables
    score: Callable[[str, Probe], float]  # of a prediction, in [0, 1]
    leaves_out: tuple[int, ...] = ()  # categories that are not asked
    # name of a column -> another number that is reported beside the score
    beside: Mapping[str, Callable[[str, Probe], float]] = field(default_factory=dict)


@dataclass(slots=True)
class Episode(Task):
    """Hold sessions in their order, and what is asked about them."""

    sessions: tuple[Session, ...] = ()
    memories: tuple[Memory, ...] = ()  # what a store may begin with
    probes: tuple[Probe, ...] = ()
    asked: Probe | None = None
    metric: Metric | None = None  # None: an accepted answer, ignoring case and blanks
    beginning: str = ""  # fingerprint of `memories`; "": the text holds them

    @property
    def digest(self) -> str:
        """Return a hex fingerprint of a task, with its metric, its evidence and its memories."""
        # slots make another class, which super() without arguments does not find
        digest = super(Episode, self).digest
        if self.metric is None:
            return digest
        return _hash(digest, self.metric.name, self.asked, self.beginning)

    def score(self, prediction: str | None, probe: Probe | None = None) -> float:
        """Return the score of an answer to a probe, in [0, 1]; None: to the question itself."""
        probe = probe or self.asked
        if prediction is None or probe is None:
            return 0.0
        if self.metric is not None:
            return self.metric.score(prediction, probe)
        return same_answer(prediction, probe.answers)

    def beside(self, prediction: str | None) -> dict[str, float]:
        """Return what a metric reports beside the score of an answer to the question; often {}."""
        if self.metric is None or self.asked is None:
            return {}
        return {
            name: 0.0 if prediction is None else score(prediction, self.asked)
            for name, score in self.metric.beside.items()
        }

    @property
    def evidence(self) -> str | None:
        """Compose the utterances that hold the evidence of the question; None if unknown."""
        wanted = {*self.asked.evidence} if self.asked else set()
        lines = [
            f"{session.when}\n{said.line}"
            for session in self.sessions
            for said in session.utterances
            if said.id in wanted or f"S{session.number}" in wanted
        ]
        return "\n".join(lines) or None


def _hash(*parts: object) -> str:
    return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def word_f1(prediction: str, probe: Probe) -> float:
    """Return the F1 of an answer's words; of one that says that nothing is known, 1 or 0."""
    if probe.abstains:
        said = normalize_answer(prediction)
        return float(any(words in said for words in ("no information", "not mentioned", "unknown")))
    return f1(prediction, probe.answers)


METRICS = {
    "official": Metric("official metric", locomo_score.official_score),
    "mem0": Metric(
        "mem0 F1", locomo_score.mem0_f1, leaves_out=(5,), beside={"bleu1": locomo_score.mem0_bleu1}
    ),
    "words": Metric("word F1", word_f1),
}


def metric_of(kind: str, name: str = "official") -> Metric:
    """Return how answers about a kind of file are graded; `name` chooses for LoCoMo's."""
    return METRICS[name if kind == "locomo" else "words"]


def episode_of(
    conversation: Conversation, probes: Sequence[Probe], start: str, metric: Metric
) -> Episode:
    """Make a task of a conversation: one to be paid for by the probes.

    start: what a store may begin with, a key of `Conversation.memories`.
    """
    memories = tuple(conversation.memories.get(start, ()))
    return Episode(
        id=conversation.id,
        question="",
        answers=(),
        text=conversation.text,
        dataset="conversations",
        kind="episode",
        sessions=conversation.sessions,
        memories=memories,
        probes=tuple(probes),
        metric=metric,
        beginning=_hash(memories),
    )


def questions_of(episode: Episode, probes: Sequence[Probe]) -> Iterator[Episode]:
    """Yield a task for each question about the sessions of an episode.

    Their kind, and so the heading in every table, names the metric.
    """
    metric = episode.metric
    for probe in probes:
        if metric is not None and probe.category in metric.leaves_out:
            continue
        yield replace(
            episode,
            id=probe.id,
            question=probe.question,
            answers=probe.answers,
            # the official number too: papers swap the names
            kind=_heading(probe) + (f", {metric.name}" if metric else ""),
            probes=(),
            asked=probe,
        )


def _heading(probe: Probe) -> str:
    return f"{probe.category} {probe.kind}" if probe.category else probe.kind


# ---------------------------------------------------------------- conversations from files

LOADERS = {"locomo": locomo.load_locomo, "longmemeval": longmemeval.load_longmemeval}
ANSWERED = (1, 2, 3, 4)  # LoCoMo's categories whose questions have an answer
PARTS = ("train", "validation", "test")
STARTS = ("observations", "sessions", "summaries", "events", "empty")


def is_conversations(source: str) -> bool:
    """Tell whether a `--data` names conversations."""
    return source.partition(":")[0] in LOADERS and ":" in source


def conversations_of(source: str) -> tuple[str, list[Conversation], str]:
    """Read `locomo:FILE#RULE/PART/START`; return the kind of file, its conversations and START.

    RULE/PART: one of `locomo.SPLITS` and train, validation or test; without it, all conversations.
    START: what a store may begin with, `STARTS`; if it is not said observations, where there are
    any, else sessions. UserError: there is no such rule, part or start, or the part is empty.
    """
    kind, _, rest = source.partition(":")
    path, _, chosen = rest.partition("#")
    conversations = LOADERS[kind](path)
    words = chosen.split("/") if chosen else []
    there = [name for name in STARTS if any(c.memories.get(name) for c in conversations)]
    start = words.pop() if words and words[-1] in STARTS else (there or ["empty"])[0]
    if words:
        rule, part = (*words, "")[:2]
        if kind != "locomo" or len(words) > 2 or rule not in locomo.SPLITS or part not in PARTS:
            rules, starts = " or ".join(locomo.SPLITS), ", ".join(STARTS)
            raise UserError(
                f"{source}: after # stands RULE/PART/START: {rules}; {', '.join(PARTS)}; {starts}."
            )
        conversations = locomo.split(conversations, rule).get(part, [])
    if not conversations:
        raise UserError(f"{source}: there is no conversation in this part.")
    return kind, conversations, start


class ConversationTasks:
    """Serve stretches of conversations, each with hidden questions about what was said there.

    A level has one of the given numbers of sessions, as many in a row at a place drawn anew for
    each task. Questions that abstain and those without evidence are not paid for. LoCoMo's
    categories that are never asked for are said at once. UserError: none of the conversations has a
    question about so few sessions.
    """

    def __init__(self, source: str, lengths: tuple[int, ...], seed: int, n_probes: int = 8):
        kind, self.conversations, self.start = conversations_of(source)
        self.metric, self.lengths, self.seed = metric_of(kind), lengths, seed
        self.n_probes, self.levels = n_probes, len(lengths) - 1
        asked = set()
        for length in lengths:
            found = [part for c in self.conversations for part in self._stretches(c, length)]
            if not found:
                raise UserError(f"{source}: no question is about {length} sessions in a row.")
            asked |= {probe.category for _, probes in found for probe in probes}
        missing = [c for c in ANSWERED if c not in asked] if kind == "locomo" else []
        if missing and os.environ.get("RANK", "0") == "0":  # of several processes the first tells
            kinds = ", ".join(map(locomo.category_label, missing))
            console.print(
                f"{clean(source)}: no question of {kinds} is about {max(lengths)} sessions in a "
                "row or fewer, none will be paid for.",
                markup=False,
                soft_wrap=True,
            )

    @staticmethod
    def _stretches(conversation: Conversation, length: int) -> list[tuple[int, list[Probe]]]:
        """Return (first session, its questions) of every stretch with a question."""
        numbers = [session.number for session in conversation.sessions]
        found = []
        for k in range(max(1, len(numbers) - length + 1)):
            shown = {*numbers[k : k + length]}
            probes = [
                probe
                for probe in conversation.probes
                if not probe.abstains and probe.sessions and {*probe.sessions} <= shown
            ]
            found += [(k, probes)] if probes else []
        return found

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        rng = random.Random(seed_of(self.seed, "conversations", step, level))
        length, tasks = self.lengths[level], []
        able = [c for c in self.conversations if self._stretches(c, length)]
        for i in range(n):
            conversation = rng.choice(able)
            k, probes = rng.choice(self._stretches(conversation, length))
            sessions = conversation.sessions[k : k + length]
            shown = {session.number for session in sessions}
            part = replace(
                conversation,
                id=f"{conversation.id}-{step}-{i}",
                sessions=sessions,
                memories={
                    name: tuple(m for m in of if m.session in shown)
                    for name, of in conversation.memories.items()
                },
            )
            asked = rng.sample(probes, min(self.n_probes, len(probes)))
            tasks.append(episode_of(part, asked, self.start, self.metric))
        return tasks
