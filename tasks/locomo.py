"""LoCoMo (arXiv 2402.17753): ten conversations over months, with questions in five categories.

Holds: `load_locomo`, `split`, `CATEGORIES`, `PRINT_ORDER`, `category_label`, `SPLITS`, `day_of`.
Leaves out: what a conversation is (tasks/conversations.py), grading (tasks/locomo_score.py). No
torch.
Exercise it: `pytest tests/tasks/test_locomo.py`. Read next: tasks/locomo_score.py.

The file is read from the user's path and never shipped: its licence is CC BY-NC 4.0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from config.errors import UserError
from tasks.conversations import (
    NOT_MENTIONED,
    Conversation,
    Memory,
    Probe,
    Session,
    Utterance,
    read_samples,
    text_or_number,
    turns_as_memories,
)
from tasks.readers import Record

# the official names; papers that swap them are why the number is always printed too
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
PRINT_ORDER = (4, 1, 2, 3, 5)  # the columns of the paper's tables

# rule -> what it does; no official split exists, and both keep each conversation whole
SPLITS = {
    "seven-three": "seven conversations train, three test, shuffled by Python's random.Random(42)",
    "memory-r1": "conv-26 trains, conv-30 validates, the others test",
}
# the name under which this rule was published: that of the project, which is an agent's here
SPLITS["memupdate"] = SPLITS["seven-three"]

MONTHS = (
    "January February March April May June July August September October November December"
).split()
WHEN = re.compile(rf"\d{{1,2}}:\d{{2}} [ap]m on (\d{{1,2}}) ({'|'.join(MONTHS)}), (\d{{4}})")


def category_label(category: int) -> str:
    """Return number and official name, as in every table: "4 single-hop"."""
    return f"{category} {CATEGORIES[category]}"


def day_of(when: str) -> str:
    """Return the ISO day of a session's date and time; ValueError if it has another form.

    >>> day_of("4:05 pm on 3 June, 2024")
    '2024-06-03'
    """
    if not (match := WHEN.fullmatch(when)):
        raise ValueError(f"no date: {when!r}")
    day, month, year = match.groups()
    return date(int(year), MONTHS.index(month) + 1, int(day)).isoformat()


# ---------------------------------------------------------------- the file


def load_locomo(path: str | Path) -> list[Conversation]:
    """Read LoCoMo's published file, .json or .json.gz.

    A caption of a picture becomes part of the turn's text. Dates without a session are passed over.
    Evidence is every D<number>:<number> of the field, whatever stands around it; ids that no turn
    has are kept, for the official recall counts them (`Conversation.dangling` names them). A
    question of category 5 abstains, and its adversarial answer is the distractor: two of the 446
    have an answer, which is not graded.

    UserError: the file, a field or a category is not as published; it names file, sample and field.
    """
    return [_conversation(sample) for sample in read_samples(path, "sample_id")]


def _conversation(sample: Record) -> Conversation:
    talk = sample.inside("conversation")
    keys = (re.fullmatch(r"session_(\d+)", key) for key in talk.fields)
    numbers = sorted(int(key[1]) for key in keys if key)
    if not numbers:
        raise talk.error("'conversation' has no field session_1, session_2, ...")
    sessions = tuple(_session(talk, number) for number in numbers)
    questions = enumerate(sample.get("qa", list), 1)
    return Conversation(
        sample.place,
        (talk.text("speaker_a"), talk.text("speaker_b")),
        sessions,
        tuple(_probe(sample, number, fields) for number, fields in questions),
        {
            "empty": (),
            "sessions": turns_as_memories(sessions),
            "observations": tuple(m for s in sessions for m in _observations(sample, s)),
            "summaries": tuple(m for s in sessions for m in _summary(sample, s)),
            "events": tuple(m for s in sessions for m in _events(sample, s)),
        },
    )


def _session(talk: Record, number: int) -> Session:
    key = f"session_{number}"
    when = talk.text(f"{key}_date_time")
    try:
        day = day_of(when)
    except ValueError:
        form = f"must look like '4:05 pm on 3 June, 2024', this is {when!r}"
        raise talk.error(f"'{key}_date_time' {form}") from None
    turns = enumerate(talk.get(key, list), 1)
    return Session(number, day, when, tuple(_utterance(talk, key, n, turn) for n, turn in turns))


def _utterance(talk: Record, key: str, number: int, fields: object) -> Utterance:
    turn = replace(talk.inside(key, fields), place=f"{talk.place}, {key}, turn {number}")
    ids = _turn_ids(turn, "dia_id", turn.text("dia_id"))
    if len(ids) != 1:
        raise turn.error("'dia_id' must be one id such as D1:3")
    caption = turn.maybe("blip_caption", str)
    picture = f" (shares a picture: {caption})" if caption else ""
    return Utterance(ids[0], turn.text("speaker"), turn.text("text") + picture)


def _turn_ids(record: Record, name: str, value: object) -> tuple[str, ...]:
    """Return all ids in a text or a list of texts, numbers without leading zeros."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise record.error(f"'{name}' must be ids of turns such as D1:3")
    found = (match for text in texts for match in re.findall(r"D(\d+):(\d+)", text))
    return tuple(f"D{int(session)}:{int(turn)}" for session, turn in found)


def _probe(sample: Record, number: int, fields: object) -> Probe:
    r = replace(sample.inside("qa", fields), place=f"{sample.place}, question {number}")
    category = r.get("category", int)
    if category not in CATEGORIES:
        raise r.error(f"'category' must be 1 to 5, this is {category}")
    abstains = category == 5
    return Probe(
        id=f"{sample.place}-q{number}",
        question=r.text("question"),
        answers=(NOT_MENTIONED if abstains else text_or_number(r, "answer"),),
        category=category,
        evidence=_turn_ids(r, "evidence", r.fields.get("evidence") or []),
        abstains=abstains,
        kind=CATEGORIES[category],
        distractor=text_or_number(r, "adversarial_answer") if abstains else "",
    )


# ---------------------------------------------------------------- memories that come with it


def _of_session(sample: Record, section: str, key: str) -> Record:
    """Return what `section` says of one session, by speaker; nothing if it lacks the key."""
    r = sample.inside(section)
    return replace(r, place=f"{r.place}, {key}", fields=r.maybe(key, dict))


def _observations(sample: Record, session: Session) -> Iterator[Memory]:
    r = _of_session(sample, "observation", f"session_{session.number}_observation")
    for speaker in r.fields:
        for pair in r.maybe(speaker, list):
            if not (isinstance(pair, list) and len(pair) == 2):
                raise r.error(f"'{speaker}' must be a list of pairs [fact, id of a turn]")
            fact, evidence = r.text(speaker, pair[0]), _turn_ids(r, speaker, pair[1])
            yield Memory(fact, speaker, session.date, session.number, evidence)


def _summary(sample: Record, session: Session) -> Iterator[Memory]:
    r = sample.inside("session_summary")
    if summary := r.maybe(f"session_{session.number}_summary", str):
        yield Memory(summary, None, session.date, session.number, (f"S{session.number}",))


def _events(sample: Record, session: Session) -> Iterator[Memory]:
    r = _of_session(sample, "event_summary", f"events_session_{session.number}")
    for speaker in r.fields:
        if speaker == "date":  # the session's own, once more
            continue
        for event in r.maybe(speaker, list):
            if event != "":  # one of the published 669
                text, evidence = r.text(speaker, event), (f"S{session.number}",)
                yield Memory(text, speaker, session.date, session.number, evidence)


# ---------------------------------------------------------------- splits


def split(
    conversations: Sequence[Conversation], rule: str, adversarial: bool = False
) -> dict[str, list[Conversation]]:
    """Divide conversations by one of `SPLITS` into "train", "validation" and "test".

    adversarial: False leaves out the questions of category 5, as both published splits do.
    seven-three, of other than ten conversations: seven tenths of them train, rounded down.

    UserError: no such rule, or the conversations that it needs are not there.
    """
    if rule not in SPLITS:
        raise UserError(f"The split must be one of {', '.join(SPLITS)}, not {rule!r}.")
    if not adversarial:
        conversations = [
            replace(c, probes=tuple(probe for probe in c.probes if probe.category != 5))
            for c in conversations
        ]
    return (_memory_r1 if rule == "memory-r1" else _seven_three)(conversations)


def _seven_three(conversations: Sequence[Conversation]) -> dict[str, list[Conversation]]:
    if len(conversations) < 2:
        raise UserError("The split seven-three needs at least two conversations.")
    order = [*range(len(conversations))]
    random.Random(42).shuffle(order)
    shuffled = [conversations[k] for k in order]
    n_train = 7 * len(shuffled) // 10
    return {"train": shuffled[:n_train], "validation": [], "test": shuffled[n_train:]}


def _memory_r1(conversations: Sequence[Conversation]) -> dict[str, list[Conversation]]:
    part_of = {"conv-26": "train", "conv-30": "validation"}
    if missing := part_of.keys() - {c.id for c in conversations}:
        name = min(missing)
        raise UserError(f"The split memory-r1 needs {name}, which is not among the conversations.")
    parts: dict[str, list[Conversation]] = {"train": [], "validation": [], "test": []}
    for conversation in conversations:
        parts[part_of.get(conversation.id, "test")].append(conversation)
    return parts
