"""Exported chats as dated sessions: WhatsApp's text, Telegram's JSON, and plain JSON messages.

Holds: `Chat`, `read_chat`. Leaves out: what a session is (tasks/conversations.py), a chat among
other documents (tasks/forms.py, tasks/documents.py). No torch.
Exercise it: `python cli.py ask chat.txt "question"`. Read next: tasks/documents.py.

    31.12.23, 21:41 - Ann: Hi        [12/31/23, 9:41:05 PM] Ann: Hi        WhatsApp, two styles
    {"name": ..., "messages": [{"type": "message", "date": ..., "from": ..., "text": ...}]}
    [{"date" or "timestamp": ..., "speaker", "author" or "from": ..., "text": ...}]  or line by line

What a file is follows from its beginning, and plain messages have to be messages to the last;
whatever is no chat stays the text that it is. Messages are put in order of the instants at which
they were sent, whatever clock they name. A session ends before a pause of more than six hours, and
with the day on the clock of its first message, which is the clock that its date is shown by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from config.errors import UserError, clip
from tasks.conversations import Session, Utterance
from tasks.notebooks import LeftOut

PAUSE = timedelta(hours=6)
UNKNOWN = "unknown"  # the speaker of a message that names none
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True, slots=True)
class Chat:
    """Hold a chat as dated sessions, none for a file that is no chat."""

    sessions: tuple[Session, ...] = ()  # numbered from 1, in order of time
    title: str = ""  # as the file names it
    remark: str = ""  # what was read and what was left out, or why it is no chat; one sentence


class Message(NamedTuple):
    """One message; of those without words the text is empty."""

    when: datetime  # by the clock of its own time zone, if it names one
    speaker: str
    text: str


class Export(NamedTuple):
    """What a file holds."""

    messages: list[Message]
    title: str = ""
    without: int = 0  # lines of the system, beside messages without words
    doubt: str = ""  # about the dates, or about fields that are not read


def read_chat(text: str, name: str) -> Chat:
    """Read the text of a file as a chat, as far as it is one.

    name: the file's, for errors. UserError in one sentence, with the line or message and the field:
    an export of WhatsApp's or Telegram's that is damaged.
    """
    try:
        export = _whatsapp(text, name) or _json(text, name)
    except Misfit as misfit:
        return Chat(remark=f"{name} looks like a chat but is read as text: {misfit}.")
    if export is None:
        return Chat()
    left_out = LeftOut()
    messages = [m._replace(text=left_out.without(m.text)) for m in export.messages if m.text]
    if not messages:
        raise UserError(f"{name} is a chat in which nobody says a word.")
    zone = next((m.when.tzinfo for m in messages if m.when.tzinfo), None)
    doubt = zone and not all(m.when.tzinfo for m in messages)
    for k, message in enumerate(messages):
        zone = message.when.tzinfo or zone or UTC
        messages[k] = message._replace(when=message.when.replace(tzinfo=zone))
    messages.sort(key=lambda m: m.when)
    sessions = (*_sessions(messages),)
    speakers = [*dict.fromkeys(m.speaker for m in messages)]
    more = f" and {len(speakers) - 3:,} more" if len(speakers) > 3 else ""
    without = export.without + len(export.messages) - len(messages)
    parts = [
        f"{name} is a chat of {', '.join(speakers[:3])}{more}: {_n(len(messages), 'message')} in "
        f"{_n(len(sessions), 'session')}",
        f"{_n(without, 'entry', 'entries')} without words left out" if without else "",
        f"left out: {left_out}" if left_out.sizes else "",
        "a time without a zone is taken in that of the message before it" if doubt else "",
        export.doubt,
    ]
    return Chat(sessions, export.title, "; ".join(filter(None, parts)) + ".")


def _n(n: int, singular: str, plural: str = "") -> str:
    return f"{n:,} {singular if n == 1 else plural or f'{singular}s'}"


# ---------------------------------------------------------------- sessions


def _sessions(messages: Sequence[Message]) -> Iterator[Session]:
    """Yield the sessions of messages in order of time, at least one."""
    parts: list[list[Message]] = []
    for message in messages:
        first, last = (parts[-1][0].when, parts[-1][-1].when) if parts else (message.when,) * 2
        same_day = message.when.astimezone(first.tzinfo).date() == first.date()
        if not parts or not same_day or message.when - last > PAUSE:
            parts.append([])
        parts[-1].append(message)
    for number, part in enumerate(parts, 1):
        utterances = tuple(
            Utterance(f"D{number}:{k}", m.speaker, m.text) for k, m in enumerate(part, 1)
        )
        first = part[0].when
        yield Session(number, first.date().isoformat(), _shown(first), utterances)


def _shown(when: datetime) -> str:
    """Write a time with the weekday, which helps to resolve "last Friday"; midnight is no time.

    >>> _shown(datetime(2023, 12, 31, 21, 41)), _shown(datetime(2023, 12, 31))
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
MARK = "\u200e"
MARKS = f"{MARK}\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff"
DIRECTIONS = re.compile(f"[{MARKS}]+")
# a name ends at its colon; quotes are those of a new subject, in a line of the system
SPEAKER = re.compile(r"""~?\s?([^:"“”„«»]{1,100}):(?:\s(.*))?$""")
# instead of a picture, or of a message that was deleted, in whatever language: <...>, a file's name
# before words in brackets, or one of these
PLACEHOLDER = re.compile(
    r"<[^<>]*>|\S+\.\w{2,5} \([^()]*\)|null|You deleted this message\.?"
    r"|This message was deleted\.?"
)
EDITED = re.compile(rf"{MARK}?<This message was edited>$")


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
    speakers = [SPEAKER.match(entry.lines[0]) for entry in entries]
    without = speakers.count(None)
    if 2 * without > len(entries):  # dated lines of another kind
        return None
    times, doubt = _times([entry.head for entry in entries])
    messages = []
    for entry, when, speaker in zip(entries, times, speakers, strict=True):
        if speaker and when is None:
            problem = f"'{entry.head['when']}' is no date and time"
            raise UserError(f"{name}, line {entry.number}: {problem}.")
        if speaker:
            words = _words([speaker[2] or "", *entry.lines[1:]])
            messages.append(Message(when, _plain(speaker[1]), words))
    return Export(messages, without=without, doubt=doubt)


def _plain(text: str) -> str:
    """Join a text to one line, without marks of direction."""
    return " ".join(DIRECTIONS.sub("", text).split())


def _words(lines: Sequence[str]) -> str:
    """Return what a message says; "" for one without words of its own."""
    first, *more = lines
    if first.startswith(MARK) or PLACEHOLDER.fullmatch(_plain(first)):
        first = ""  # a caption may follow
    return _plain(EDITED.sub("", "\n".join([first, *more]).rstrip()))


def _times(heads: Sequence[re.Match]) -> tuple[list[datetime | None], str]:
    """Return the times that lines begin with (None = there is no such time), and any doubt.

    Four digits at the front are a year. Else the order of day and month is found out for the whole
    file: that in which more of the dates exist, then that in which what is written later is not
    earlier. Where both are as good, it is said which is taken.
    """
    order, other = "dmy", "mdy"
    if heads[0]["mark"] == "/" and heads[0]["half"]:
        order, other = other, order
    if len(heads[0]["a"]) == 4:
        return [_time("ymd", head) for head in heads], ""
    times, others = ([_time(each, head) for head in heads] for each in (order, other))
    if (faults := _faults(times)) > _faults(others):
        return others, ""
    taken = "month" if order == "mdy" else "day"
    doubt = f"whether its dates begin with day or month cannot be told, the {taken} is taken"
    return times, doubt if faults == _faults(others) and times != others else ""


def _faults(times: Sequence[datetime | None]) -> tuple[int, int]:
    steps = pairwise(time for time in times if time)
    return times.count(None), sum(later < earlier for earlier, later in steps)


def _time(order: str, head: re.Match) -> datetime | None:
    day = dict(zip(order, map(int, head.group("a", "b", "c")), strict=True))
    hour, minute, second = (int(head[part] or 0) for part in ("hour", "minute", "second"))
    if head["half"]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + 12 * (head["half"].lower() == "p")
    year = day["y"] + 2000 * (day["y"] < 100)
    try:
        return datetime(year, day["m"], day["d"], hour, minute, second)
    except ValueError:
        return None


# ---------------------------------------------------------------- JSON

TELEGRAM = re.compile(r'"(?:date_unixtime|from_id)"')
HEAD = 1 << 14  # characters in which an export shows what it is
WHEN, WHO = {"date", "timestamp"}, {"speaker", "author", "from"}
LONGEST = 40  # characters of a field of messages that is not read, such as an id


class Misfit(Exception):
    """What looks like messages is none, in words that follow a colon."""


def _sent(when: datetime) -> datetime:
    """Refuse what no message has: a place in a recording, or a day of digits alone, is in 1970."""
    if when.year in (1, 1970, 9999):
        raise ValueError("no message is of that year")
    return when


When = Annotated[datetime, AfterValidator(_sent)]
"""ISO dates with or without time and zone, and seconds or milliseconds since 1970, as UTC."""
Text = Annotated[str, AfterValidator(lambda text: text.encode().decode())]  # no half of a letter


class Plain(BaseModel):
    """A message of its own; `extra` are fields that are not read."""

    model_config = ConfigDict(extra="allow")

    when: When = Field(validation_alias=AliasChoices("date", "timestamp"))
    speaker: Text | None = Field(validation_alias=AliasChoices("speaker", "author", "from"))
    text: Text | None


class Piece(BaseModel):
    """A link or a word in bold within a message of Telegram's."""

    text: Text


class Telegram(BaseModel):
    """A message of Telegram's, whose date is local and has its instant beside it."""

    type: str
    date: When
    date_unixtime: datetime | None = None
    speaker: Text | None = Field(None, alias="from")
    from_id: Text | int | None = None
    text: Text | list[Text | Piece] = ""

    @property
    def when(self) -> datetime:
        instant = self.date_unixtime
        ahead = self.date.replace(tzinfo=UTC) - instant if instant else timedelta.max
        if self.date.tzinfo or abs(ahead) >= timedelta(days=1):
            return self.date
        return self.date.replace(tzinfo=timezone(ahead))

    @property
    def words(self) -> str:
        pieces = [self.text] if isinstance(self.text, str) else self.text
        return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def _json(text: str, name: str) -> Export | None:
    """Read Telegram's export or plain messages; None for other JSON, and for what is none."""
    start = re.match(r"\s*(\[\s*)?(?=\{)", text)
    if start is None:
        return None
    sure = TELEGRAM.search(text, 0, HEAD)
    try:
        first, end = json.JSONDecoder().raw_decode(text, start.end())
    except (ValueError, RecursionError) as error:
        if sure and not start[1]:
            raise UserError(f"{name}, {_not_json(error)}.") from None
        return None
    try:
        if WHEN & first.keys() and WHO & first.keys() and "text" in first:
            if start[1] or "\n" not in text[start.end() : end]:
                return _spoken(_plain_messages(text, listed=bool(start[1])))
        if not start[1]:
            return _spoken(_telegram(first))
    except Misfit as misfit:
        if sure and not start[1]:
            raise UserError(f"{name}, {misfit}.") from None
        raise
    return None


def _spoken(export: Export | None) -> Export | None:
    if export and not any(message.text for message in export.messages):
        raise Misfit("no message in it has words")
    return export


def _not_json(error: Exception) -> str:
    reason = getattr(error, "msg", "") or type(error).__name__
    return f"line {getattr(error, 'lineno', 1)}: this is not JSON ({reason})"


def _checked(model: type[BaseModel], fields: object, place: str) -> BaseModel:
    """Return a record. Misfit: what of it is no message."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    field = f"'{fault['loc'][0]}'" if fault["loc"] else "it"
    value = "missing" if fault["type"] == "missing" else clip(repr(fault["input"]), 60)
    raise Misfit(f"{place}: {field} is {value}")


def _telegram(fields: dict) -> Export | None:
    """Read an export of Telegram's; None for another object. Misfit: a message that is none."""
    if isinstance(chats := fields.get("chats"), dict) and "list" in chats:
        raise Misfit("it holds all chats of an account: export one of them by itself")
    records, title = fields.get("messages"), fields.get("name")
    if not (isinstance(records, list) and records and isinstance(records[0], dict)):
        return None
    if not {"type", "date"} <= records[0].keys():
        return None
    read = [_checked(Telegram, each, f"message {n}") for n, each in enumerate(records, 1)]
    messages = [
        Message(m.when, _plain(m.speaker or str(m.from_id or "")) or UNKNOWN, _plain(m.words))
        for m in read
        if m.type == "message"  # and nobody came or left, no call, ...
    ]
    title = title if isinstance(title, str) else ""
    return Export(messages, title, without=len(read) - len(messages))


def _plain_messages(text: str, listed: bool) -> Export:
    """Read a list of messages, or one on each line. Misfit: one of them is none, or is more."""
    messages, left_out = [], {}
    for place, fields in _records(text, listed):
        m = _checked(Plain, fields, place)
        for field, value in m.model_extra.items():
            more = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            if " " in more or len(more) > LONGEST:
                raise Misfit(f"{place}: there are words in {clip(field, 60)!r} too")
        left_out |= m.model_extra
        messages.append(Message(m.when, _plain(m.speaker or "") or UNKNOWN, _plain(m.text or "")))
    names = clip(_plain(", ".join(left_out)), 300)
    return Export(messages, doubt=f"left out of each: {names}" if names else "")


def _records(text: str, listed: bool) -> Iterator[tuple[str, object]]:
    lines = [text] if listed else text.split("\n")
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            where = _not_json(error) if listed else f"line {n}: this is not JSON"
            raise Misfit(where) from None
        if listed:
            yield from ((f"item {k}", item) for k, item in enumerate(value, 1))
        else:
            yield f"line {n}", value
