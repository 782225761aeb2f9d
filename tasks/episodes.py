"""Tasks about dated sessions: what a memory store is made of, and the questions asked of it.

An episode of training has `probes`, hidden questions about all sessions that the reward comes from.
An episode of an evaluation has one question, `probe`, like any other task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from data import Task, same_answer
from tasks.conversations import ANSWERED, CATEGORIES, Conversation, Memory, Probe, Session


@dataclass(frozen=True, slots=True)
class Metric:
    """A way to grade answers."""

    name: str  # as it stands in tables
    score: Callable[[str, Probe], float]  # of a prediction, in [0, 1]
    # name of a column -> another number that is reported beside the score
    beside: Mapping[str, Callable[[str, Probe], float]] = field(default_factory=dict)


@dataclass(slots=True)
class Episode(Task):
    """Sessions in their order, and what is asked about them."""

    sessions: tuple[Session, ...] = ()
    memories: tuple[Memory, ...] = ()  # what a store may begin with
    probes: tuple[Probe, ...] = ()
    probe: Probe | None = None
    metric: Metric | None = None  # None: an accepted answer, ignoring case and blanks
    beginning: str = ""  # fingerprint of `memories`; "": the text holds them

    @property
    def digest(self) -> str:
        """A hex fingerprint of a task, with its metric, its evidence and its memories."""
        # slots make another class, which super() without arguments does not find
        digest = super(Episode, self).digest
        if self.metric is None:
            return digest
        return _hash(digest, self.metric.name, self.probe, self.beginning)

    def score(self, prediction: str | None, probe: Probe | None = None) -> float:
        """Return the score of an answer to a probe, in [0, 1]; None: to the question itself."""
        probe = probe or self.probe
        if prediction is None or probe is None:
            return 0.0
        if self.metric is not None:
            return self.metric.score(prediction, probe)
        return same_answer(prediction, probe.answers)

    def beside(self, prediction: str | None) -> dict[str, float]:
        """Return what a metric reports beside the score of an answer to the question; often {}."""
        if self.metric is None or self.probe is None:
            return {}
        return {
            name: 0.0 if prediction is None else score(prediction, self.probe)
            for name, score in self.metric.beside.items()
        }

    @property
    def evidence(self) -> str | None:
        """The utterances that hold the evidence of the question.

        "" if it names none, or none that was said; None if no question is asked.
        """
        if self.probe is None:
            return None
        wanted = {*self.probe.evidence}
        lines = [
            f"{session.when}\n{utterance.line}"
            for session in self.sessions
            for utterance in session.utterances
            if utterance.id in wanted or f"S{session.number}" in wanted
        ]
        return "\n".join(lines)


def _hash(*parts: object) -> str:
    return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=8).hexdigest()


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
        # nothing else tells documents without sessions apart
        text=conversation.text or "\n".join(m.text for m in memories),
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
        yield replace(
            episode,
            id=probe.id,
            question=probe.problem,
            answers=probe.answers,
            kind=probe.heading + (f", {metric.name}" if metric else ""),
            probes=(),
            probe=probe,
        )


def pool_of(kind: str) -> str:
    """Return the name of the row in which a kind of LoCoMo's is pooled with others; "" if in none.

    The categories whose questions have an answer are, as in published tables.

    >>> pool_of("4 single-hop, official metric"), pool_of("5 adversarial, official metric")
    ('1 to 4, official metric', '')
    """
    name, comma, metric = kind.partition(", ")
    pooled = name in [f"{category} {CATEGORIES[category]}" for category in ANSWERED]
    return f"{ANSWERED[0]} to {ANSWERED[-1]}{comma}{metric}" if pooled else ""
