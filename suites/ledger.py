"""Generated sessions: people arrive and move, and it is asked at the end where each of them is.

A session is a date and two sentences. A sentence says that a tracked person came to a place, for
the first time or another one, says that again, or is chatter: a person who is not tracked met
somebody. "Where is X?" asks for the place that X came to last. Nobody says while the sessions are
read who will be asked for, but chatter is never asked. Splits are splits of facts: the places to
which a tracked person comes are those of the split, in every session.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import partial

from config.errors import UserError
from data import Task
from suites import Column, Scope, Suite
from tasks import worlds
from tasks.conversations import Memory, Probe, Session, Utterance
from tasks.episodes import Episode, questions_of

KIND = "ledger"
SENTENCES = 2  # of a session
FIRST_DAY = date(2024, 1, 1)
MOST_SESSIONS = 48
# what a sentence is about once everybody has arrived: a move, the same again, chatter
SHARES = (0.42, 0.28, 0.30)


def day(session: int) -> str:
    """Return the ISO date of a session, from 1."""
    return (FIRST_DAY + timedelta(days=session - 1)).isoformat()


def _places(person: str, split: str) -> list[str]:
    return [p for p in worlds.PLACES if worlds.split_of(person, p) == split]


def _facts(rng: random.Random, n: int, people: list[str], split: str) -> list[worlds.Fact]:
    """Draw n facts in their order: everybody in `people` arrives among the first two thirds."""
    others = [p for p in worlds.PEOPLE if p not in people]
    first = sorted(rng.sample(range(max(len(people), 2 * n // 3)), len(people)))
    arrivals = dict(zip(first, rng.sample(people, len(people)), strict=True))
    latest: dict[str, worlds.Fact] = {}
    facts = []
    for k in range(n):
        person = arrivals.get(k) or (rng.choice([*latest]) if latest else None)
        what = rng.choices(("move", "again", "chatter"), SHARES)[0]
        if k not in arrivals and (what == "chatter" or person is None):
            subject, other = rng.sample(others, 2)
            facts.append((subject, "met", other))
            continue
        if k in arrivals or what == "move":
            now = latest[person][2] if person in latest else ""
            place = rng.choice([p for p in _places(person, split) if p != now])
            latest[person] = (person, rng.choice(worlds.TO_PLACE), place)
        facts.append(latest[person])
    return facts


def make_ledger(
    seed: int | str, n_sessions: int, split: str = "train", n_people: int = 5
) -> Episode:
    """Make an episode, a function of its arguments, with a probe for every tracked person.

    UserError: there are more sessions than dates, or too few for everybody to arrive.
    """
    if not n_people <= n_sessions <= MOST_SESSIONS:
        least = f"{n_people} (one for each person) and {MOST_SESSIONS}"
        raise UserError(f"A ledger has between {least} sessions, not {n_sessions}.")
    rng = random.Random(f"ledger/{seed}/{n_sessions}/{split}/{n_people}")
    people = rng.sample(worlds.PEOPLE, n_people)
    facts = _facts(rng, SENTENCES * n_sessions, people, split)
    sessions, memories, last = [], [], {}  # last: person -> place, and the session that tells it
    for number in range(1, n_sessions + 1):
        told = facts[SENTENCES * (number - 1) : SENTENCES * number]
        here, when, texts = f"S{number}", day(number), [worlds.sentence(fact) for fact in told]
        memories += [Memory(text, None, when, number, (here,)) for text in texts]
        last |= {fact[0]: (fact[2], here) for fact in told}
        sessions.append(Session(number, when, when, (Utterance(here, "", " ".join(texts)),)))
    name = f"{KIND}-{split}-{n_sessions}-{n_people}-{seed}"
    probes = []
    for person in people:
        place, here = last[person]
        fields = f"{name}-{person}", f"Where is {person}?", (place,), 0, (here,)
        probes.append(Probe(*fields, kind=KIND))
    return Episode(
        id=name,
        question="",
        answers=(),
        text=" ".join(f"{s.date} {turn.text}" for s in sessions for turn in s.utterances),
        dataset=KIND,
        kind=KIND,
        sessions=tuple(sessions),
        memories=tuple(memories),
        probes=tuple(probes),
    )


def make_questions(seed: int, n: int, n_sessions: int, split: str = "test") -> Iterator[Task]:
    """Make n tasks, each one question about sessions of its own; more than 12 are about 8 people,
    fewer about 5."""
    for i in range(n):
        episode = make_ledger(f"{seed}.{i}", n_sessions, split, 5 if n_sessions <= 12 else 8)
        (task,) = questions_of(episode, random.Random(f"{seed}.{i}").sample(episode.probes, 1))
        yield replace(task, id=f"{task.id}-{i}")


class LedgerTasks:
    """Episodes that are generated anew for every step, with as many sessions as the level says."""

    def __init__(self, lengths: tuple[int, ...], seed: int):
        self.lengths, self.seed, self.levels = lengths, seed, len(lengths) - 1

    def batch(self, step: int, level: int, n: int) -> list[Task]:
        return [make_ledger(f"{self.seed}.{step}.{i}", self.lengths[level]) for i in range(n)]


@dataclass(frozen=True)
class Ledger(Suite):
    """Generated sessions."""

    split: str = "dev"
    """split of the facts: dev to choose settings, test to report"""

    unit, lengths, metric, generated = "sessions", (4, 16, 64), "reward", True

    def columns(self, scope: Scope) -> list[Column]:
        def make(length: int) -> list[Task]:
            return [*make_questions(scope.seed, scope.n, length, self.split)]

        return [Column(KIND, length, partial(make, length)) for length in scope.lengths]
