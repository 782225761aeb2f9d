"""Exported chats as dated sessions: WhatsApp's text, Telegram's JSON, and plain JSON messages.

Holds: `Chat`, `read_chat`. Leaves out: what a session is (tasks/conversations.py), a chat among
other documents (tasks/forms.py, tasks/documents.py). No torch.
Exercise it: `python cli.py ask chat.txt "question"`. Read next: tasks/documents.py.

    31.12.23, 21:41 - Ann: Hi        [12/31/23, 9:41:05 PM] Ann: Hi        WhatsApp, two styles
    {"name": ..., "messages": [{"type": "message", "date": ..., "from": ..., "text": ...}]}
    [{"date" or "timestamp": ..., "speaker", "author" or "from": ..., "text": ...}]  or line by line

What a file is follows from its beginning; whatever is no chat stays the text that it is. Messages
are put in order of time. A session ends with the day, or before a pause of more than six hours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError, clip
from tasks.conversations import Session, Utterance
from tasks.readers import Record

PAUSE = timedelta(hours=6)
UNKNOWN = "unknown"  # the speaker of a message that names none
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True, slots=True)
class Chat:
    """Hold a chat as dated sessions."""

    sessions: tuple[Session, ...]  # numbered from 1, in order of time
    title: str  # as the file names it, or ""
    remark: str  # what was read and what was left out, in one sentence


class Message(NamedTuple):
    """One message; of those without words the text is empty."""

    when: datetime
    speaker: str
    text: str


class Export(NamedTuple):
    """What a file holds."""

    messages: list[Message]
    title: str = ""
    without: int = 0  # lines of the system, beside messages without words
    doubt: str = ""  # about the dates


def read_chat(text: str, name: str) -> Chat | None:
    """Read the text of a file as a chat; return None if it is none.

    name: the file's, for errors. UserError in one sentence, with the line or message and the field.
    """
    export = _whatsapp(text, name) or _json(text, name)
    if export is None:
        return None
    messages = sorted((m for m in export.messages if m.text), key=lambda m: m.when)
    if not messages:
        raise UserError(f"{name} is a chat in which nobody says a word.")
    sessions = (*_sessions(messages),)
    speakers = [*dict.fromkeys(m.speaker for m in messages)]
    more = f" and {len(speakers) - 3:,} more" if len(speakers) > 3 else ""
    without = export.without + len(export.messages) - len(messages)
    said = [
        f"{name} is a chat of {', '.join(speakers[:3])}{more}: {_n(len(messages), 'message')} in "
        f"{_n(len(sessions), 'session')}",
        f"{_n(without, 'entry', 'entries')} without words left out" if without else "",
        export.doubt,
    ]
    return Chat(sessions, export.title, "; ".join(filter(None, said)) + ".")


def _n(n: int, one: str, several: str = "") -> str:
    return f"{n:,} {one if n == 1 else several or f'{one}s'}"


# ---------------------------------------------------------------- sessions


def _sessions(messages: Sequence[Message]) -> Iterator[Session]:
    """Yield the sessions of messages in order of time, at least one."""
    ends = [
        k
        for k, (before, m) in enumerate(pairwise(messages), 1)
        if m.when.date() != before.when.date() or m.when - before.when > PAUSE
    ]
    parts = (messages[a:b] for a, b in pairwise([0, *ends, len(messages)]))
    for number, part in enumerate(parts, 1):
        utterances = tuple(
            Utterance(f"D{number}:{k}", m.speaker, m.text) for k, m in enumerate(part, 1)
        )
        first = part[0].when
        yield Session(number, first.date().isoformat(), _said(first), utterances)


def _said(when: datetime) -> str:
    """Write a time with the weekday, which helps to resolve "last Friday"; midnight is no time.

    >>> _said(datetime(2023, 12, 31, 21, 41)), _said(datetime(2023, 12, 31))
    ('2023-12-31 (Sun) 21:41', '2023-12-31 (Sun)')
    """
    time = f" {when:%H:%M}" if when.hour or when.minute else ""
    return f"{when.date().isoformat()} ({DAYS[when.weekday()]}){time}"


# ---------------------------------------------------------------- WhatsApp

DAY = r"(?P<a>\d{1,4})(?P<mark>[./-])(?P<b>\d{1,2})(?P=mark)(?P<c>\d{1,4})"
TIME = (
    r"(?P<hour>\d{1,2})[:.](?P<minute>\d\d)(?:[:.](?P<second>\d\d))?"
    r"(?:\s?(?P<half>[ap])\.?\s?m\.?)?"
)
WHEN = rf"(?P<when>{DAY},?\s(?:à\s)?{TIME})"  # blanks may be narrow ones
STYLES = tuple(
    re.compile(form, re.IGNORECASE) for form in (rf"{WHEN}\s-\s(.*)", rf"\[{WHEN}\]\s(.*)")
)
# marks of direction; WhatsApp puts one before words of its own
OWN = "\u200e"
MARKS = f"{OWN}\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff"
DIRECTIONS = re.compile(f"[{MARKS}]+")
# a name ends at its colon; quotes are those of a new subject, in a line of the system
SPEAKER = re.compile(r"""~?\s?([^:"“”„«»]{1,100}):(?:\s(.*))?$""")
# instead of a picture, or of a message that was deleted, in whatever language: <...>, a file's name
# before words in brackets, or one of these
PLACEHOLDER = re.compile(
    r"<[^<>]*>|\S+\.\w{2,5} \([^()]*\)|null|You deleted this message\.?"
    r"|This message was deleted\.?"
)
EDITED = re.compile(rf"{OWN}?<This message was edited>$")


class Line(NamedTuple):
    """A line that begins with a time, and those after it that do not."""

    number: int
    head: re.Match
    lines: list[str]  # without the time


def _whatsapp(text: str, name: str) -> Export | None:
    first = DIRECTIONS.sub("", text.lstrip().partition("\n")[0])
    style = next((style for style in STYLES if style.match(first)), None)
    if style is None:
        return None
    entries: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        if head := style.match(line.lstrip(MARKS)):
            entries.append(Line(number, head, [head[head.lastindex]]))
        elif entries:
            entries[-1].lines.append(line)
    said = [(entry, SPEAKER.match(entry.lines[0])) for entry in entries]
    spoken = [(entry, speaker) for entry, speaker in said if speaker]
    if 2 * len(spoken) < len(said):  # dated lines of another kind
        return None
    date_of, doubt = _order(entries)
    messages = []
    for entry, speaker in spoken:
        try:
            when = datetime(*date_of(entry.head), *_time(entry.head))
        except ValueError as error:
            problem = f"'{entry.head['when']}' is no date and time ({error})"
            raise UserError(f"{name}, line {entry.number}: {problem}.") from None
        words = _words([speaker[2] or "", *entry.lines[1:]])
        messages.append(Message(when, _plain(speaker[1]), words))
    return Export(messages, without=len(said) - len(spoken), doubt=doubt)


def _plain(text: str) -> str:
    """Join a text to one line, without marks of direction."""
    return " ".join(DIRECTIONS.sub("", text).split())


def _words(lines: Sequence[str]) -> str:
    """Return what a message says; "" for one without words of its own."""
    first, *more = lines
    if first.startswith(OWN) or PLACEHOLDER.fullmatch(_plain(first)):
        first = ""  # a caption may follow
    return _plain(EDITED.sub("", "\n".join([first, *more]).rstrip()))


def _time(head: re.Match) -> tuple[int, int, int]:
    hour, minute, second = (int(head[part] or 0) for part in ("hour", "minute", "second"))
    if not head["half"]:
        return hour, minute, second
    if not 1 <= hour <= 12:
        raise ValueError("hour must be in 1..12")
    return hour % 12 + 12 * (head["half"].lower() == "p"), minute, second


DateOf = Callable[[re.Match], tuple[int, int, int]]


def _order(entries: Sequence[Line]) -> tuple[DateOf, str]:
    """Find out how dates are written, for the whole file; return how one is read, and any doubt.

    Four digits at the front are a year. Else a number above 12 tells the day. Else time does: what
    is written later is not earlier. Where both readings are as good, it is said which is taken.
    """
    heads = [entry.head for entry in entries]

    def date_of(order: str, head: re.Match) -> tuple[int, int, int]:
        parts = dict(zip(order, (int(head[part]) for part in "abc"), strict=True))
        year = parts["y"] + 2000 * (parts["y"] < 100)
        return year, parts["m"], parts["d"]

    def steps_back(order: str) -> int:
        dates = [date_of(order, head) for head in heads]
        return sum(later < earlier for earlier, later in pairwise(dates))

    doubt = ""
    if len(heads[0]["a"]) == 4:
        order = "ymd"
    elif any(int(head["a"]) > 12 for head in heads):
        order = "dmy"
    elif any(int(head["b"]) > 12 for head in heads):
        order = "mdy"
    elif (day_first := steps_back("dmy")) != (month_first := steps_back("mdy")):
        order = "dmy" if day_first < month_first else "mdy"
    else:
        order = "mdy" if heads[0]["mark"] == "/" and heads[0]["half"] else "dmy"
        taken = "month" if order == "mdy" else "day"
        if any(head["a"] != head["b"] for head in heads):
            doubt = (
                f"whether its dates begin with day or month cannot be told, the {taken} is taken"
            )
    return lambda head: date_of(order, head), doubt


# ---------------------------------------------------------------- JSON

TIMES = ("date", "timestamp")
SPEAKERS = ("speaker", "author", "from")
TELEGRAM = re.compile(r'"(?:date_unixtime|from_id)"')
HEAD = 1 << 14  # characters in which an export shows what it is
MILLISECONDS = 1e11  # seconds since 1970 are fewer for three thousand years


def _json(text: str, name: str) -> Export | None:
    """Read Telegram's export or plain messages; None for other JSON, and for what is none."""
    start = re.match(r"\s*(\[\s*)?(?=\{)", text)
    if start is None:
        return None
    try:
        first, end = json.JSONDecoder().raw_decode(text, start.end())
    except (ValueError, RecursionError) as error:
        if TELEGRAM.search(text, 0, HEAD):
            raise _no_json(name, error) from None
        return None
    if _is_message(first) and (start[1] or "\n" not in text[start.end() : end]):
        return _plain_messages(text, name, of_lines=not start[1])
    if start[1]:
        return None
    if isinstance(chats := first.get("chats"), dict) and "list" in chats:
        raise UserError(f"{name} holds all chats of an account: export one of them by itself.")
    messages = first.get("messages")
    if not (isinstance(messages, list) and messages and _is_telegram(messages[0])):
        return None
    return _telegram(first, name)


def _no_json(name: str, error: Exception, line: int = 0) -> UserError:
    at = line or getattr(error, "lineno", 1)
    reason = getattr(error, "msg", "") or type(error).__name__
    return UserError(f"{name}, line {at}: this is not JSON ({reason}).")


def _is_message(fields: object) -> bool:
    return (
        isinstance(fields, dict)
        and "text" in fields
        and any(name in fields for name in TIMES)
        and any(name in fields for name in SPEAKERS)
    )


def _is_telegram(fields: object) -> bool:
    return isinstance(fields, dict) and {"type", "date"} <= fields.keys()


def _telegram(fields: dict, name: str) -> Export:
    messages, without = [], 0
    for n, each in enumerate(fields["messages"], 1):
        r = Record(Path(name), f"message {n}", n - 1, each)
        if not isinstance(each, dict):
            raise r.error("it must be an object with the fields 'date' and 'text'")
        if r.text("type") != "message":  # somebody came or left, a call, ...
            without += 1
            continue
        speaker = r.maybe("from", str) or r.maybe("from_id", str) or UNKNOWN
        messages.append(Message(_moment(r, "date"), _plain(speaker), _text_of(r)))
    title = fields.get("name")
    return Export(messages, title if isinstance(title, str) else "", without)


def _text_of(r: Record) -> str:
    """Return the text of a message of Telegram's: one piece, or several, some of them links."""
    pieces = r.fields.get("text", "")
    pieces = pieces if isinstance(pieces, list) else [pieces]
    texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in pieces]
    if not all(isinstance(text, str) for text in texts):
        raise r.error("'text' must be a text, or a list of texts and of objects with a 'text'")
    return _checked(r, "".join(texts))


def _checked(r: Record, text: str) -> str:
    """Return a text on one line; "" if it is blank. UserError: half of a surrogate pair."""
    return _plain(r.text("text", text)) if text.strip() else ""


def _plain_messages(text: str, name: str, of_lines: bool) -> Export:
    messages, names = [], []
    for r in _records(text, name, of_lines):
        # the fields of the first message are those of all
        names = names or [next(n for n in known if n in r.fields) for known in (TIMES, SPEAKERS)]
        when = _moment(r, names[0])
        speaker = _plain(r.text(names[1])) if r.fields.get(names[1]) != "" else UNKNOWN
        said = "" if r.fields.get("text") == "" else r.get("text", str)
        messages.append(Message(when, speaker, _checked(r, said)))
    return Export(messages)


def _records(text: str, name: str, of_lines: bool) -> Iterator[Record]:
    """Yield the messages of a list, or of a file with one on each line."""
    if of_lines:
        lines = enumerate(text.split("\n"), 1)
        values = ((f"line {n}", _value(line, name, n)) for n, line in lines if line.strip())
    else:
        values = ((f"item {n}", item) for n, item in enumerate(_value(text, name), 1))
    for position, (place, fields) in enumerate(values):
        r = Record(Path(name), place, position, fields)
        if not isinstance(fields, dict):
            raise r.error("a message must be an object with named fields")
        yield r


def _value(text: str, name: str, line: int = 0) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_json(name, error, line) from None


def _moment(r: Record, name: str) -> datetime:
    """Return a field as a time: an ISO date with or without a time, or seconds since 1970.

    A time keeps its own time zone; seconds and milliseconds are read as UTC.
    """
    value = r.fields.get(name)
    if value is None:
        raise r.error(f"the field '{name}' is missing")
    try:
        if isinstance(value, str) and not value.strip().isdecimal():
            return datetime.fromisoformat(value.strip()).replace(tzinfo=None)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        seconds = float(value)
        seconds /= 1000 if abs(seconds) > MILLISECONDS else 1
        return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    except (ValueError, OverflowError, OSError):
        form = "an ISO date such as 2023-12-31T21:41, or seconds since 1970"
        raise r.error(f"'{name}' must be {form}, this is {clip(repr(value), 60)}") from None
