"""Tasks about dated sessions: what a memory store is made of, and the questions asked of it.

Holds: `Episode`, `Metric`, `episode_of` (of a conversation), `questions_of` (one task a question),
`pool_of`, `conversations_of` (`--data locomo:FILE#RULE/PART`), `ConversationTasks`,
`validation_episodes`. Leaves out: conversations and their files (tasks/conversations.py,
tasks/locomo.py), the generated world (tasks/ledger.py), stores (agents/store.py).
Exercise it: `python cli.py train --data ledger --dry-run`. Read next: tasks/ledger.py.

An episode of training has `probes`, hidden questions about all sessions that the reward comes from.
An episode of an evaluation has one question, `asked`, like any other task.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

from config.errors import UserError, clean
from config.terminal import say
from data import Task, exact_match, f1, same_answer, seed_of
from tasks import locomo, locomo_score, own
from tasks.conversations import Conversation, Memory, Probe, Session


@dataclass(frozen=True, slots=True)
class Metric:
    """Hold a way to grade answers."""

    name: str  # as it stands in tables
    score: Callable[[str, Probe], float]  # of a prediction, in [0, 1]
    # name of a column -> another number that is reported beside the score
    beside: Mapping[str, Callable[[str, Probe], float]] = field(default_factory=dict)


@dataclass(slots=True)
class Episode(Task):
    """Hold sessions in their order, and what is asked about them."""

    sessions: tuple[Session, ...] = ()
    memories: tuple[Memory, ...] = ()  # what a store may begin with
    probes: tuple[Probe, ...] = ()
    probe: Probe | None = None
    metric: Metric | None = None  # None: an accepted answer, ignoring case and blanks
    beginning: str = ""  # fingerprint of `memories`; "": the text holds them

    @property
    def digest(self) -> str:
        """Return a hex fingerprint of a task, with its metric, its evidence and its memories."""
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
        """Compose the utterances that hold the evidence of the question.

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


def word_f1(prediction: str, probe: Probe) -> float:
    """Return the F1 of an answer's words; where nothing is known, whether the answer says so."""
    if probe.abstains:
        unknown = own.says_unknown(probe.chosen(prediction))
        return float(unknown or exact_match(prediction, probe.answers))
    return f1(prediction, probe.answers)


METRICS = {  # kind of file -> how answers about its conversations are graded
    "locomo": Metric(
        "official metric",
        locomo_score.official_score,
        beside={"official_em": locomo_score.official_em},
    ),
    "own": Metric("word F1", word_f1),
}


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
            # the official number too: papers swap the names
            kind=_heading(probe) + (f", {metric.name}" if metric else ""),
            probes=(),
            probe=probe,
        )


def _heading(probe: Probe) -> str:
    return f"{probe.category} {probe.kind}" if probe.category else probe.kind


def pool_of(kind: str) -> str:
    """Return the name of the row in which a kind of LoCoMo's is pooled with others; "" if in none.

    The categories whose questions have an answer are, as in published tables.

    >>> pool_of("4 single-hop, official metric"), pool_of("5 adversarial, official metric")
    ('1 to 4, official metric', '')
    """
    name, comma, metric = kind.partition(", ")
    pooled = name in map(locomo.category_label, ANSWERED)
    return f"{ANSWERED[0]} to {ANSWERED[-1]}{comma}{metric}" if pooled else ""


# ---------------------------------------------------------------- conversations from files

LOADERS = {"locomo": locomo.load_locomo, "own": own.load_own}
ANSWERED = (1, 2, 3, 4)  # LoCoMo's categories whose questions have an answer
PARTS = ("train", "validation", "test")
STARTS = ("observations", "memories", "sessions", "summaries", "events", "empty")
ADVERSARIAL = "adversarial"  # the word that asks for questions without an answer too


class Source(NamedTuple):
    """Hold what a `--data` of conversations stands for."""

    name: str  # as it was given
    kind: str  # of `LOADERS`
    conversations: list[Conversation]
    start: str  # what a store may begin with, of `STARTS`
    adversarial: bool  # whether questions without an answer are asked for

    def say_missing(self, probes: Sequence[Probe], abstaining: bool, reason: str) -> None:
        """Say how many questions are left out, and of which kinds there is none; of several
        processes the first does.

        Of LoCoMo's categories in such a file, and of the kinds in this one; abstaining: whether
        questions without an answer count. reason: follows their names.
        """
        known = {*map(_heading, probes)}
        categories = (*ANSWERED, 5) if abstaining else ANSWERED
        held = [p for c in self.conversations for p in c.probes if abstaining or not p.abstains]
        kinds = [*map(_heading, held)]
        if self.kind == "locomo":
            kinds = [*map(locomo.category_label, categories), *kinds]
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in known]
        words = [f"no question of {clean(', '.join(missing))} {reason}"] if missing else []
        if never := len(held) - len({id(probe) for probe in probes}):
            words.append(f"{never} of {len(held)} questions are left out")
        if words and os.environ.get("RANK", "0") == "0":
            say(f"{clean(self.name)}: {'; '.join(words)}.")


def is_conversations(source: str) -> bool:
    """Tell whether a `--data` names conversations."""
    return source.partition(":")[0] in LOADERS and ":" in source


def conversations_of(source: str) -> Source:
    """Read `locomo:FILE#RULE/PART/adversarial/START`, each word of which may be left out.

    RULE/PART: one of `locomo.SPLITS` and train, validation or test, both or neither; without them,
    all conversations. adversarial: keep the questions of category 5 in the part, and let training
    pay for questions without an answer. START: what a store may begin with, `STARTS`; if it is not
    said observations, where there are any, else memories or sessions. UserError: there is no such
    rule, part or start, or the part is empty.
    """
    kind, _, rest = source.partition(":")
    path, _, chosen = rest.partition("#")
    conversations = LOADERS[kind](path)
    words = chosen.split("/") if chosen else []
    held = [name for name in STARTS if any(c.memories.get(name) for c in conversations)]
    start = words.pop() if words and words[-1] in STARTS else (held or ["empty"])[0]
    if adversarial := words[-1:] == [ADVERSARIAL]:
        words.pop()
    if words:
        rule, part = (*words, "")[:2]
        if kind != "locomo" or len(words) > 2 or rule not in locomo.SPLITS or part not in PARTS:
            rules, starts = " or ".join(locomo.SPLITS), ", ".join(STARTS)
            form = f"RULE/PART/{ADVERSARIAL}/START, each of which may be left out"
            raise UserError(
                f"{source}: after # stands {form}: {rules} (locomo alone); {', '.join(PARTS)}; "
                f"{starts}."
            )
        conversations = locomo.split(conversations, rule, adversarial).get(part, [])
    if not conversations:
        raise UserError(f"{source}: there is no conversation in this part.")
    return Source(source, kind, conversations, start, adversarial)


def all_questions(source: Source) -> list[Task]:
    """Return a task for each question about each conversation."""
    metric = METRICS[source.kind]
    return [
        task
        for c in source.conversations
        for task in questions_of(episode_of(c, (), source.start, metric), c.probes)
    ]


def paid_for(source: Source, conversation: Conversation, shown: Container[int]) -> list[Probe]:
    """Return the questions that an episode may be paid for.

    Those of a conversation whose evidence is in the sessions shown (numbers). One that names none
    is known to be about something in them only if there are no sessions. What abstains is paid for
    if the source says so.
    """
    return [
        probe
        for probe in conversation.probes
        if (source.adversarial if probe.abstains else probe.sessions or not conversation.sessions)
        and (all(number in shown for number in probe.sessions) or not conversation.sessions)
    ]


class ConversationTasks:
    """Serve stretches of conversations, each with hidden questions about what was said there.

    A level has one of the given numbers of sessions, as many in a row at a place drawn anew for
    each task. A conversation without sessions is one stretch. Which questions are paid for:
    `paid_for`. Kinds of question that are never asked for are said at once. UserError: none of
    the conversations has a question about so few sessions.
    """

    def __init__(self, source: str, lengths: tuple[int, ...], seed: int, n_probes: int = 8):
        self.source = conversations_of(source)
        self.metric, self.lengths, self.seed = METRICS[self.source.kind], lengths, seed
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
            (k, paid_for(self.source, conversation, numbers[k : k + length]))
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
            tasks.append(episode_of(part, hidden, self.source.start, self.metric))
        return tasks


def validation_episodes(source: str, n: int) -> list[Episode]:
    """Return an episode of each conversation: all of its sessions, then its questions.

    They are the same ones every time; of all conversations together about n, as many of each.
    Which can be asked: `paid_for`. UserError: none.
    """
    found = conversations_of(source)
    each = -(-n // len(found.conversations))
    tasks, payable = [], list[Probe]()
    for c in found.conversations:
        probes = paid_for(found, c, {session.number for session in c.sessions})
        payable += probes
        probes = random.Random(seed_of("validation", c.id)).sample(probes, min(each, len(probes)))
        if probes:
            tasks.append(episode_of(c, probes, found.start, METRICS[found.kind]))
    if not tasks:
        raise UserError(f"{source}: there is no question that a validation could ask.")
    found.say_missing(payable, found.adversarial, "is in it, none will be validated")
    return tasks
