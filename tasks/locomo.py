"""LoCoMo (arXiv 2402.17753): ten conversations over months, with questions in five categories.

Holds: `load_locomo`, `split`, `CATEGORIES`, `category_label`, `SPLITS`, `day_of`.
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
from tasks._record import Record
from tasks.conversations import (
    NOT_MENTIONED,
    Conversation,
    Memory,
    Probe,
    Session,
    Utterance,
    text_or_number,
    turns_as_memories,
)
from tasks.readers import read_json

# the official names; papers that swap them are why the number is always printed too
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}

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
    has are kept, for the official recall counts them. A question of category 5 abstains, and its
    adversarial answer is the distractor: two of the 446 have an answer, which is not graded.

    UserError: the file, a field or a category is not as published; it names file, sample and field.
    """
    return [_conversation(sample) for sample in _samples(Path(path))]


def _samples(path: Path) -> list[Record]:
    """Return the objects of the file, each with its id as its place."""
    samples = read_json(path)
    if not (isinstance(samples, list) and samples):
        raise UserError(f"{path} must hold a list of objects, each with the field 'sample_id'.")
    records: dict[str, Record] = {}
    for n, fields in enumerate(samples, 1):
        record = Record(path, f"item {n}", n - 1, fields)
        if not isinstance(fields, dict):
            raise record.error("it must be an object with the field 'sample_id'")
        record.place = record.text("sample_id")
        if record.place in records:
            raise record.error("'sample_id' was there before; results are kept by it")
        records[record.place] = record
    return [*records.values()]


def _conversation(sample: Record) -> Conversation:
    talk = sample.inside("conversation")
    keys = (re.fullmatch(r"session_(\d+)", key) for key in talk.fields)
    numbers = sorted(int(key[1]) for key in keys if key)
    if not numbers:
        raise talk.error("'conversation' has no field session_1, session_2, ...")
    sessions = tuple(_session(talk, number) for number in numbers)
    makers = {"observations": _observations, "summaries": _summary, "events": _events}
    memories = {"empty": (), "sessions": turns_as_memories(sessions)}
    for start, make in makers.items():
        memories[start] = tuple(m for session in sessions for m in make(sample, session))
    speakers = talk.text("speaker_a"), talk.text("speaker_b")
    probes = (_probe(r, f"{sample.place}-q{n}") for n, r in enumerate(sample.parts("qa"), 1))
    return Conversation(sample.place, speakers, sessions, tuple(probes), memories)


def _session(talk: Record, number: int) -> Session:
    name = f"session_{number}_date_time"
    when = talk.text(name)
    try:
        day = day_of(when)
    except ValueError:
        form = f"must look like '4:05 pm on 3 June, 2024', this is {when!r}"
        raise talk.error(f"'{name}' {form}") from None
    return Session(number, day, when, tuple(map(_utterance, talk.parts(f"session_{number}"))))


def _utterance(turn: Record) -> Utterance:
    names = _turn_ids(turn, "dia_id", turn.text("dia_id"))
    if len(names) != 1:
        raise turn.error("'dia_id' must be one id such as D1:3")
    caption = turn.maybe("blip_caption", str)
    picture = f" (shares a picture: {caption})" if caption else ""
    return Utterance(names[0], turn.text("speaker"), turn.text("text") + picture)


def _turn_ids(record: Record, name: str, value: object) -> tuple[str, ...]:
    """Return all ids in a text or a list of texts, numbers without leading zeros."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise record.error(f"'{name}' must be ids of turns such as D1:3")
    found = (match for text in texts for match in re.findall(r"D(\d+):(\d+)", text))
    return tuple(f"D{int(session)}:{int(turn)}" for session, turn in found)


def _probe(r: Record, name: str) -> Probe:
    category = r.get("category", int)
    if category not in CATEGORIES:
        raise r.error(f"'category' must be 1 to 5, this is {category}")
    abstains = category == 5
    return Probe(
        id=name,
        question=r.text("question"),
        answers=(NOT_MENTIONED if abstains else text_or_number(r, "answer"),),
        category=category,
        evidence=_turn_ids(r, "evidence", r.fields.get("evidence") or []),
        abstains=abstains,
        kind=CATEGORIES[category],
        distractor=text_or_number(r, "adversarial_answer") if abstains else "",
    )


# ---------------------------------------------------------------- memories that come with it


def _told(sample: Record, section: str, key: str) -> Iterator[tuple[Record, str, list]]:
    """Yield what `section` says of one session: its record, a speaker, and a list of facts."""
    r = sample.inside(section)
    r = replace(r, place=f"{r.place}, {key}", fields=r.maybe(key, dict))
    for speaker in r.fields:
        if (section, speaker) != ("event_summary", "date"):  # the session's own, once more
            yield r, speaker, r.maybe(speaker, list)


def _observations(sample: Record, session: Session) -> Iterator[Memory]:
    key = f"session_{session.number}_observation"
    for r, speaker, facts in _told(sample, "observation", key):
        for pair in facts:
            if not (isinstance(pair, list) and len(pair) == 2):
                raise r.error(f"'{speaker}' must be a list of pairs [fact, id of a turn]")
            fact, evidence = r.text(speaker, pair[0]), _turn_ids(r, speaker, pair[1])
            yield Memory(fact, speaker, session.date, session.number, evidence)


def _summary(sample: Record, session: Session) -> Iterator[Memory]:
    r = sample.inside("session_summary")
    if summary := r.maybe(f"session_{session.number}_summary", str):
        yield Memory(summary, None, session.date, session.number, (f"S{session.number}",))


def _events(sample: Record, session: Session) -> Iterator[Memory]:
    key, evidence = f"events_session_{session.number}", (f"S{session.number}",)
    for r, speaker, events in _told(sample, "event_summary", key):
        for event in events:
            if event != "":  # one of the published 669
                text = r.text(speaker, event)
                yield Memory(text, speaker, session.date, session.number, evidence)


# ---------------------------------------------------------------- splits


def split(
    conversations: Sequence[Conversation], rule: str, adversarial: bool = False
) -> dict[str, list[Conversation]]:
    """Divide conversations by one of `SPLITS` into "train", "validation" and "test".

    adversarial: False leaves out the questions of category 5, as both published splits do.
    seven-three, of other than ten conversations: seven tenths of them train, rounded down.

    UserError: the conversations that it needs are not there.
    """
    order, parts = [*conversations], {"train": [], "validation": [], "test": []}
    if rule == "memory-r1":
        names = {"conv-26": "train", "conv-30": "validation"}
        if missing := names.keys() - {c.id for c in conversations}:
            raise UserError(f"The split memory-r1 needs {min(missing)}, which is not there.")
    else:
        if len(order) < 2:
            raise UserError("The split seven-three needs at least two conversations.")
        random.Random(42).shuffle(order)
        names = {c.id: "train" for c in order[: 7 * len(order) // 10]}
    for c in order:
        probes = tuple(probe for probe in c.probes if adversarial or probe.category != 5)
        parts[names.get(c.id, "test")].append(replace(c, probes=probes))
    return parts
