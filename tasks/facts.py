"""One-fact questions out of multi-hop files: what a hop asks, and the paragraph that tells it.

Holds: `read`, `WORDINGS`, `wording`. Leaves out: the paragraph among others (tasks/passages.py),
the forms of files (tasks/readers.py). No torch.
Exercise it: `python cli.py data build FILE OUT --suite facts --lengths 1,4`.
Read next: tasks/passages.py.

2WikiMultiHopQA gives the evidence of a question as triples, MuSiQue as sub-questions:

    (Los Locos, director, Jean-Marc Vallée)   ->  Who directed Los Locos?
    Los Locos >> director                     ->  Who directed Los Locos?
    In what city was Steven Blankaart born?   ->  as it stands

A model that cannot answer these will not answer two of them in a row. Each becomes a question with
one paragraph: the subject's, or the one that the sub-question names. It is kept only if the answer
stands there, as whole words, and not in the question; a sub-question that refers to another one's
answer (#1) is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from config.errors import UserError
from data import Task, normalize_answer, places
from tasks.readers import Passage, Record, parsed, pool_of

# relation -> its question about a subject; any other is "What is the RELATION of SUBJECT?"
WORDINGS = {
    "author": "Who wrote {}?",
    "award received": "Which award did {} receive?",
    "cast member": "Who acted in {}?",
    "cause of death": "What did {} die of?",
    "child": "Who was a child of {}?",
    "composer": "Who composed {}?",
    "country": "Which country is {} in?",
    "country of citizenship": "What is the nationality of {}?",
    "country of origin": "Which country is {} from?",
    "date of birth": "When was {} born?",
    "date of death": "When did {} die?",
    "director": "Who directed {}?",
    "educated at": "Where did {} study?",
    "employer": "Who did {} work for?",
    "father": "Who was the father of {}?",
    "founded by": "Who founded {}?",
    "inception": "When was {} founded?",
    "located in the administrative territorial entity": "Which region is {} in?",
    "manufacturer": "Who makes {}?",
    "member of sports team": "Which team did {} play for?",
    "mother": "Who was the mother of {}?",
    "named after": "What is {} named after?",
    "owned by": "Who owns {}?",
    "part of": "What is {} a part of?",
    "performer": "Who performed {}?",
    "place of birth": "Where was {} born?",
    "place of burial": "Where is {} buried?",
    "place of death": "Where did {} die?",
    "producer": "Who produced {}?",
    "publication date": "When was {} released?",
    "publisher": "Who published {}?",
    "screenwriter": "Who wrote {}?",
    "sibling": "Who was a brother or sister of {}?",
    "spouse": "Who was married to {}?",
}
TRIPLE = ("fact", "relation", "entity")  # the names of its parts on the hub


def wording(subject: str, relation: str) -> str:
    """Return the question for a relation of a subject.

    >>> wording("Los Locos", "director"), wording("Los Locos", "narrator")
    ('Who directed Los Locos?', 'What is the narrator of Los Locos?')
    """
    if relation in WORDINGS:
        return WORDINGS[relation].format(subject)
    return f"What is the {relation} of {subject}?"


def read(path: str | Path, split: str = "") -> list[Task]:
    """Read a file's facts as tasks, each with its one paragraph; all share one pool.

    The pool has the paragraphs of the questions of that split, whether or not a fact stands in
    them: they are filler. A fact that several questions need is one task; of a subject with several
    paragraphs the first one counts. A fact that a question of another split needs as well is left
    out.
    split: as the source names it; "" = train where it names splits, else all.
    UserError: no such split, or no facts.
    """
    facts: dict[str, dict[str, Task]] = {}  # split -> wording -> fact
    passages: dict[str, dict[Passage, int]] = {}
    datasets = set()
    for record, task, document in parsed(path):
        if not isinstance(document, list):
            continue
        known = facts.setdefault(task.split, {})
        index = passages.setdefault(task.split, {})
        for passage in document:
            index.setdefault(passage, len(index))
        datasets.add(task.dataset)
        for n, (question, answer, passage) in enumerate(_stated(record, task, document)):
            order, labels = (index[passage],), {"kind": "one_fact", "split": task.split}
            fact = Task(f"{task.id}.{n}", question, (answer,), order=order, gold=(0,), **labels)
            first = known.setdefault(normalize_answer(question), fact)
            if first.order == order and answer not in first.answers:
                first.answers += (answer,)
    name = split or ("train" if facts.keys() - {""} else "")
    if facts and name not in facts:
        splits = ", ".join(sorted(facts.keys() - {""})) or "none"
        raise UserError(f"There is no split {name!r} in {path}; there are {splits}.")
    elsewhere = {key for other, found in facts.items() if other != name for key in found}
    chosen = [fact for key, fact in facts.get(name, {}).items() if key not in elsewhere]
    if not chosen:
        needed = "2WikiMultiHopQA's evidence triples or MuSiQue's sub-questions"
        raise UserError(f"{path} has no facts: they come of {needed}, with their paragraphs.")
    dataset = datasets.pop() if len(datasets) == 1 else ""
    pool = pool_of(passages[name])
    return [replace(fact, pool=pool, dataset=dataset) for fact in chosen]


def _stated(
    record: Record, task: Task, document: list[Passage]
) -> Iterator[tuple[str, str, Passage]]:
    """Yield (question, answer, passage) of a record's facts that their passage states."""
    by_title: dict[str, Passage] = {}
    for passage in document:
        by_title.setdefault(passage[0], passage)
    found = [
        (wording(subject, relation), answer, by_title[subject])
        for subject, relation, answer in _triples(record)
        if subject in by_title
    ]
    found += [(q, answer, document[k]) for q, answer, k in _steps(record, task, len(document))]
    for question, answer, passage in found:
        told = any(places(answer, passage[1]))
        given = f" {normalize_answer(answer)} " in f" {normalize_answer(question)} "
        if told and not given:
            yield question, answer, passage


def _triples(record: Record) -> list[tuple[str, str, str]]:
    """Return the evidence triples (subject, relation, object) of 2WikiMultiHopQA: a list of lists,
    of objects, or columns of a table."""
    fields = record.fields
    if "evidences" not in fields and isinstance(fields.get("metadata"), dict):
        fields = fields["metadata"]
    triples = fields.get("evidences") or []
    if isinstance(triples, dict) and {*TRIPLE} <= triples.keys():
        triples = [*zip(*(triples[part] or [] for part in TRIPLE), strict=False)]
    triples = triples if isinstance(triples, list) else [None]
    parts = [[t.get(part) for part in TRIPLE] if isinstance(t, dict) else t for t in triples]
    for part in parts:
        texts = isinstance(part, list | tuple) and [isinstance(text, str) for text in part]
        if texts != [True, True, True]:
            raise record.error("'evidences' must hold triples [subject, relation, object]")
    stripped = (tuple(text.strip() for text in part) for part in parts)
    return [triple for triple in stripped if all(triple)]


def _steps(record: Record, task: Task, n: int) -> Iterator[tuple[str, str, int]]:
    """Yield (question, answer, index of the passage) of MuSiQue's sub-questions, in any form.

    n: passages of the document.
    """
    if "decomposition" in record.fields:  # one of `hops` for each, unless a paragraph serves two
        steps = record.parts("decomposition", 0)
        places = [*task.gold] if len(task.gold) == len(steps) else [None] * len(steps)
    else:
        steps = record.parts("question_decomposition", 0)
        places = [step.fields.get("paragraph_support_idx") for step in steps]
    for step, place in zip(steps, places, strict=True):
        if place is None or not {"question", "answer"} <= step.fields.keys():
            continue
        question, answer = step.text("question").strip(), step.text("answer").strip()
        record.indices("paragraph_support_idx", [place], n)
        if not re.search(r"#\d", question):
            subject, found, relation = question.partition(" >> ")
            yield (wording(subject, relation) if found else question), answer, place
