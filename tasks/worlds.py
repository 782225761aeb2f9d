"""Generated English: documents of short facts, and questions about one fact or two linked ones.

A document is a sequence of four-token sentences, "Anna joined Boris. Clara reached Lima. ...": a
person follows a person or comes to a place. The question is always "Where is X?".

  kind             evidence                                                       answer
  one_fact         "Anna reached Lima."                                           Lima
  two_hop          "Anna joined Boris. ... Boris reached Lima."                   Lima
  two_hop_reverse  "Boris reached Lima. ... Anna joined Boris."                   Lima
  changed          "Anna reached Lima. ... Anna toured Oslo."                     Oslo

In two_hop_reverse a one-pass reader with a small memory cannot know, at the first fact, that it
will matter: the case for looking back, reported apart. X, and the person whom X follows, are the
subject of exactly one sentence of their document, in changed of two; anyone else may be the subject
of any number. Between the facts may stand the sentences of a text, whatever these say.

Splits are splits of *facts* (pairs of subject and object): a fact of the test split never occurs in
any training document, neither as evidence nor as filler; nor does one of the dev split, on which
settings are chosen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain

from data import Pool, Task

PEOPLE = (
    "Adam Agnes Alma Anna Anton Basil Bella Boris Carl Celia Clara Cyril Dana David Dora Edgar "
    "Edith Elena Emil Erik Esther Felix Flora Frank Greta Gustav Hanna Hector Hugo Ida Igor "
    "Irene Ivan Jacob Jana Julia Karin Klaus Laura Leon Lydia Marco Marta Max Mina Nadia Nils "
    "Nora Olga Oscar Otto Paula Peter Petra Ralph Rita Rosa Sarah Simon Sonja Tanja Viktor Vera "
    "Walter"
).split()
PLACES = (
    "Accra Athens Baku Basel Bergen Berlin Bogota Boston Cairo Chicago Cork Dakar Delhi Denver "
    "Dublin Essen Geneva Genoa Ghent Graz Hanoi Havana Kyoto Lagos Leeds Lima Linz Lisbon "
    "London Lyon Madrid Malmo Manila Miami Milan Minsk Munich Nairobi Naples Nice Odessa Osaka "
    "Oslo Ottawa Oxford Palermo Paris Perth Prague Quito Riga Rome Seoul Sofia Sydney Tampa "
    "Tirana Tokyo Trieste Tunis Turin Vienna Warsaw Zurich"
).split()
TO_PLACE = ("reached", "entered", "toured")
TO_PERSON = ("joined", "followed", "met")
KINDS = ("one_fact", "two_hop", "two_hop_reverse", "changed")
SPLITS = ("train", "dev", "test")
FACTS_PER_SECTION = 6  # a sentence is 4 tokens of the embedded tokenizer, a section 24

Fact = tuple[str, str, str]  # subject, verb, object


def split_of(subject: str, obj: str) -> str:
    """Return the split of a fact, whatever its verb: 2 of 10 test, 1 of 10 dev, the rest train."""
    i = PEOPLE.index(subject)
    j = PLACES.index(obj) if obj in _PLACE_SET else PEOPLE.index(obj)
    k = (7 * i + 13 * j) % 10
    return "test" if k < 2 else "dev" if k == 2 else "train"


_PLACE_SET = frozenset(PLACES)
# split -> subject -> its possible objects in that split: (places, people)
_OBJECTS = {
    split: {
        subject: (
            [place for place in PLACES if split_of(subject, place) == split],
            [other for other in PEOPLE if other != subject and split_of(subject, other) == split],
        )
        for subject in PEOPLE
    }
    for split in SPLITS
}


def sentence(fact: Fact) -> str:
    return f"{fact[0]} {fact[1]} {fact[2]}."


def _fact(rng: random.Random, subject: str, place: bool, split: str) -> Fact:
    """Draw the object and the verb of a fact: a place if `place`, else a person."""
    obj = rng.choice(_OBJECTS[split][subject][0 if place else 1])
    return subject, rng.choice(TO_PLACE if place else TO_PERSON), obj


def make_facts(
    rng: random.Random, n_facts: int, kind: str, split: str = "train"
) -> tuple[list[Fact], list[int]]:
    """Draw the facts of a document; return them and the positions of the evidence, in hop order.

    Evidence comes from `split`. Filler is drawn from the training facts in every split, so that the
    documents differ in nothing but the evidence; half of it leads to places, half to people, like
    the evidence of two_hop.
    """
    x = rng.choice(PEOPLE)
    if kind == "one_fact":
        evidence = [_fact(rng, x, True, split)]
    elif kind == "changed":
        evidence = [_fact(rng, x, True, split)] * 2
        while evidence[0][2] == evidence[1][2]:
            evidence[1] = _fact(rng, x, True, split)
    else:
        first = _fact(rng, x, False, split)
        evidence = [first, _fact(rng, first[2], True, split)]
    subjects = {fact[0] for fact in evidence}
    others = [p for p in PEOPLE if p not in subjects]
    positions = sorted(rng.sample(range(n_facts), len(evidence)))
    if kind == "two_hop_reverse":
        positions.reverse()
    facts: list[Fact] = [
        _fact(rng, rng.choice(others), rng.random() < 0.5, "train") for _ in range(n_facts)
    ]
    for position, fact in zip(positions, evidence, strict=True):
        facts[position] = fact
    return facts, positions


def make_task(
    seed: int | str, n_sections: int, kind: str, split: str = "train", filler: Sequence[str] = ()
) -> Task:
    """Make one task, a function of its arguments, with `n_sections * FACTS_PER_SECTION` facts.

    filler: sentences; then there are as many facts as sections, each before one of these, which
    follow each other from anywhere on.
    """
    rng = random.Random(f"{seed}/{n_sections}/{kind}/{split}")
    n_facts = max(2, n_sections) if filler else n_sections * FACTS_PER_SECTION
    facts, gold = make_facts(rng, n_facts, kind, split)
    texts = [*map(sentence, facts)]
    if filler:
        first = rng.randrange(len(filler))
        between = (filler[(first + k) % len(filler)] for k in range(n_facts))
        texts = [*chain.from_iterable(zip(texts, between, strict=True))]
    return Task(
        id=f"{kind}-{split}-{n_sections}-{seed}",
        question=f"Where is {facts[gold[0]][0]}?",
        answers=(facts[gold[-1]][2],),
        pool=Pool([], texts, "words"),
        order=range(len(texts)),
        gold=tuple(k * len(texts) // n_facts for k in gold),
        kind=kind,
        dataset="world",
    )


def make_tasks(
    seed: int, n: int, n_sections: int, kind: str, split: str = "train", filler: Sequence[str] = ()
) -> Iterator[Task]:
    """Make n tasks, one after the other."""
    return (make_task(f"{seed}.{i}", n_sections, kind, split, filler) for i in range(n))
