"""Generated English: documents of short facts, and questions about one fact or about two that hang together.

Holds: the vocabulary, `make_task`, `make_tasks`, the split of facts. Leaves out: training (embedded/tiny.py, grpo.py), other data (data.py).
Exercise it: `python cli.py data look world --kind two_hop`. Read next: embedded/tiny.py.

A document is a row of sentences of four words, "Anna joined Boris. Clara reached Lima. ...": a person follows a person or comes to a
place. The question is always "Where is X?".
  one_fact     X came to a place:                       "Anna reached Lima."                     -> Lima
  two_hop      X followed Y, and later Y came to a place: "Anna joined Boris. ... Boris reached Lima." -> Lima
  two_hop_reverse  the same two facts in the other order: a one-pass reader with a small memory cannot know, at the
               first fact, that it will matter; it is the case for looking back, and is reported apart.
X and Y are the subject of exactly one sentence of their document. Everybody else may turn up any number of times.

Splits are splits of *facts* (pairs of subject and object): a fact of the test split never stands in any training document, neither
as evidence nor as filler; nor does one of the dev split, on which settings are chosen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from data import Pool, Task

PEOPLE = (
    "Adam Agnes Alma Anna Anton Basil Bella Boris Carl Celia Clara Cyril Dana David Dora Edgar Edith Elena Emil Erik Esther Felix "
    "Flora Frank Greta Gustav Hanna Hector Hugo Ida Igor Irene Ivan Jacob Jana Julia Karin Klaus Laura Leon Lydia Marco Marta Max "
    "Mina Nadia Nils Nora Olga Oscar Otto Paula Peter Petra Ralph Rita Rosa Sarah Simon Sonja Tanja Viktor Vera Walter"
).split()
PLACES = (
    "Accra Athens Baku Basel Bergen Berlin Bogota Boston Cairo Chicago Cork Dakar Delhi Denver Dublin Essen Geneva Genoa Ghent Graz "
    "Hanoi Havana Kyoto Lagos Leeds Lima Linz Lisbon London Lyon Madrid Malmo Manila Miami Milan Minsk Munich Nairobi Naples Nice "
    "Odessa Osaka Oslo Ottawa Oxford Palermo Paris Perth Prague Quito Riga Rome Seoul Sofia Sydney Tampa Tirana Tokyo Trieste Tunis "
    "Turin Vienna Warsaw Zurich"
).split()
TO_PLACE = ("reached", "entered", "toured")
TO_PERSON = ("joined", "followed", "met")
KINDS = ("one_fact", "two_hop", "two_hop_reverse")
SPLITS = ("train", "dev", "test")
FACTS_PER_SECTION = 6  # a sentence is 4 tokens of the embedded tokenizer, a section 24

Fact = tuple[str, str, str]  # subject, verb, object


def split_of(subject: str, obj: str) -> str:
    """The split a fact belongs to: 2 of 10 test, 1 of 10 dev, the rest train. The verb plays no part."""
    i = PEOPLE.index(subject)
    j = PLACES.index(obj) if obj in _PLACE_SET else PEOPLE.index(obj)
    k = (7 * i + 13 * j) % 10
    return "test" if k < 2 else "dev" if k == 2 else "train"


_PLACE_SET = frozenset(PLACES)
# objects[split][subject] = (places, people) that the subject may have in that split
_OBJECTS = {
    split: {
        s: (
            [p for p in PLACES if split_of(s, p) == split],
            [q for q in PEOPLE if q != s and split_of(s, q) == split],
        )
        for s in PEOPLE
    }
    for split in SPLITS
}


def sentence(fact: Fact) -> str:
    return f"{fact[0]} {fact[1]} {fact[2]}."


def _fact(
    rng: random.Random,
    subject: str,
    place: bool,
    split: str,
    avoid: frozenset[str] | set[str] = frozenset(),
) -> Fact:
    objects = _OBJECTS[split][subject][0 if place else 1]
    obj = rng.choice(objects)
    while obj in avoid:
        obj = rng.choice(objects)
    return subject, rng.choice(TO_PLACE if place else TO_PERSON), obj


def make_facts(
    rng: random.Random, n_facts: int, kind: str, split: str = "train"
) -> tuple[list[Fact], list[int]]:
    """A document's facts and the positions of the evidence, in hop order.

    Evidence comes from `split`. Filler comes from the training facts in every split, so that the documents differ in nothing but
    the evidence. Half of the filler goes to places, half to people, like the evidence of two_hop.
    """
    x = rng.choice(PEOPLE)
    if kind == "one_fact":
        evidence = [_fact(rng, x, True, split)]
    else:
        first = _fact(rng, x, False, split)
        evidence = [first, _fact(rng, first[2], True, split)]
    subjects = {fact[0] for fact in evidence}
    others = [p for p in PEOPLE if p not in subjects]
    at = sorted(rng.sample(range(n_facts), len(evidence)))
    if kind == "two_hop_reverse":
        at.reverse()
    facts: list[Fact] = [
        _fact(rng, rng.choice(others), rng.random() < 0.5, "train") for _ in range(n_facts)
    ]
    for where, fact in zip(at, evidence, strict=True):
        facts[where] = fact
    return facts, at


def make_task(seed: int | str, n_sections: int, kind: str, split: str = "train") -> Task:
    """One task; the same seed gives the same task. Documents have `n_sections * FACTS_PER_SECTION` facts."""
    rng = random.Random(f"{seed}/{n_sections}/{kind}/{split}")
    facts, at = make_facts(rng, n_sections * FACTS_PER_SECTION, kind, split)
    return Task(
        id=f"{kind}-{split}-{n_sections}-{seed}",
        question=f"Where is {facts[at[0]][0]}?",
        answers=(facts[at[-1]][2],),
        pool=Pool([], [*map(sentence, facts)], "words"),
        order=range(len(facts)),
        gold=tuple(at),
        kind=kind,
        dataset="world",
    )


def make_tasks(
    seed: int, n: int, n_sections: int, kind: str, split: str = "train"
) -> Iterator[Task]:
    return (make_task(f"{seed}.{i}", n_sections, kind, split) for i in range(n))
