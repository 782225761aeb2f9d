"""Exported chats as dated sessions: WhatsApp's text, Telegram's JSON, and plain JSON messages.

Holds: `Chat`, `read_chat`. Leaves out: what a session is (tasks/conversations.py), a chat among
other documents (tasks/forms.py, tasks/documents.py). No torch.
Exercise it: `python cli.py ask chat.txt "question"`. Read next: tasks/documents.py.

    31.12.23, 21:41 - Ann: Hi        [12/31/23, 9:41:05 PM] Ann: Hi        WhatsApp, two styles
    {"name": ..., "messages": [{"type": "message", "date": ..., "from": ..., "text": ...}]}
    [{"date" or "timestamp": ..., "speaker", "author" or "from": ..., "text": ...}]  or line by line

What a file is follows from its beginning; one that is no chat to its end is read as text, with a
remark. Messages are put in order of the instants at which they were sent, whatever clock they name.
A session ends before a pause of more than six hours, and with the day on the clock of its first
message, which is the clock that its date is shown by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from config.errors import clip
from tasks.conversations import Session, Utterance
from tasks.notebooks import LeftOut

PAUSE = timedelta(hours=6)
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
    doubt: str = ""  # about its dates
    unread: Iterable[str] = ()  # fields of messages


class Misfit(Exception):
    """What looks like a chat is none, in words that follow a colon."""


def read_chat(text: str, name: str) -> Chat:
    """Read the text of a file as a chat, as far as it is one; name: the file's, for the remark."""
    left_out = LeftOut()
    text = left_out.without(text)
    try:
        export = _whatsapp(text) or _json(text)
        if export is None:
            return Chat()
        messages = [message for message in export.messages if message.text]
        if not messages:
            raise Misfit("no message in it has words")
    except Misfit as misfit:
        return Chat(remark=f"{name} looks like a chat but is read as text: {misfit}.")
    local = sum(message.when.tzinfo is None for message in messages)
    messages = [m._replace(when=m.when.replace(tzinfo=m.when.tzinfo or UTC)) for m in messages]
    messages.sort(key=lambda message: message.when)
    sessions = tuple(_sessions(messages))
    speakers = dict.fromkeys(message.speaker for message in messages)
    facts = {
        f"{name} is a chat of {clip(', '.join(speakers), 100)}; messages": f"{len(messages):,}",
        "sessions": f"{len(sessions):,}",
        "left out without words": len(export.messages) - len(messages),
        "left out": str(left_out),
        "fields left out": clip(_plain(", ".join(export.unread)), 300),
        "times without a zone, taken as UTC": local if local < len(messages) else 0,
        "order of day and month unknown, taken first": export.doubt,
    }
    remark = "; ".join(f"{what}: {fact}" for what, fact in facts.items() if fact)
    return Chat(sessions, export.title, f"{remark}.")


def _sessions(messages: Sequence[Message]) -> Iterator[Session]:
    """Yield the sessions of messages in order of time, at least one."""
    parts = [[messages[0]]]
    for before, message in pairwise(messages):
        first = parts[-1][0].when
        same_day = message.when.astimezone(first.tzinfo).date() == first.date()
        if same_day and message.when - before.when <= PAUSE:
            parts[-1].append(message)
        else:
            parts.append([message])
    for number, part in enumerate(parts, 1):
        first = part[0].when
        day = first.date().isoformat()
        time = f" {first:%H:%M}" if first.hour or first.minute else ""  # midnight is no time
        utterances = [Utterance(f"D{number}:{k}", m.speaker, m.text) for k, m in enumerate(part, 1)]
        # the weekday helps to resolve "last Friday"
        yield Session(number, day, f"{day} ({DAYS[first.weekday()]}){time}", tuple(utterances))


# ---------------------------------------------------------------- WhatsApp

DAY = r"(?P<a>\d{1,4})(?P<mark>[./-])(?P<b>\d{1,2})(?P=mark)(?P<c>\d{1,4})"
TIME = (
    r"(?P<hour>\d{1,2})[:.](?P<minute>\d\d)(?:[:.](?P<second>\d\d))?"
    r"(?:\s?(?P<half>[ap])\.?\s?m\.?)?"
)
ENTRY = re.compile(  # blanks may be narrow ones
    rf"\[?(?P<when>{DAY},?\s(?:à\s)?{TIME})(?:\]|\s-)\s(?P<rest>.*)", re.IGNORECASE
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


def _whatsapp(text: str) -> Export | None:
    """Read an export of WhatsApp's; None for another text. Misfit: there is no such date."""
    entries: list[tuple[re.Match, list[str]]] = []  # a date, and its lines without it
    for line in text.lstrip().split("\n"):
        if head := ENTRY.match(line.lstrip(MARKS)):
            entries.append((head, [head["rest"]]))
        elif not entries:
            return None
        else:
            entries[-1][1].append(line)
    speakers = [SPEAKER.match(lines[0]) for _, lines in entries]
    if 2 * speakers.count(None) > len(entries):  # dated lines of another kind
        return None
    times, doubt = _times([head for head, _ in entries])
    messages = []
    for (head, lines), when, speaker in zip(entries, times, speakers, strict=True):
        if when is None:
            raise Misfit(f"'{head['when']}' is no date and time")
        if speaker is None:  # a line of the system
            messages.append(Message(when, "", ""))
            continue
        words = speaker[2] or ""
        if words.startswith(MARK) or PLACEHOLDER.fullmatch(_plain(words)):
            words = ""  # a caption may follow
        messages.append(Message(when, _plain(speaker[1]), _plain("\n".join([words, *lines[1:]]))))
    return Export(messages, doubt=doubt)


def _plain(text: str) -> str:
    """Join a text to one line, without marks of direction."""
    return " ".join(DIRECTIONS.sub("", text).split())


def _times(heads: Sequence[re.Match]) -> tuple[list[datetime | None], str]:
    """Return the times that lines begin with (None = there is no such time), and what is guessed.

    Four digits at the front are a year. Else the order of day and month is found out for the whole
    file: that in which more of the dates exist, then that in which what is written later is not
    earlier. Where both are as good, one is taken by the style, and returned as "day" or "month".
    """
    if len(heads[0]["a"]) == 4:
        return [_time("ymd", head) for head in heads], ""
    day_first = [_time("dmy", head) for head in heads]
    month_first = [_time("mdy", head) for head in heads]
    if _faults(day_first) != _faults(month_first) or day_first == month_first:
        return min(day_first, month_first, key=_faults), ""
    american = heads[0]["mark"] == "/" and heads[0]["half"]
    return (month_first, "month") if american else (day_first, "day")


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

WHEN, WHO = {"date", "timestamp"}, {"speaker", "author", "from"}
# of Telegram's: shown beside the text, and those that are read or say the same again
BESIDE = {"forwarded_from": "forwarded from", "file_name": "file", "poll": "poll"}
READ = {"id", "type", "date", "date_unixtime", "from", "from_id", "text", "text_entities", "file"}
LONGEST = 40  # characters of a field of messages that is not read, such as an id


def _sent(when: datetime) -> datetime:
    """Refuse what no message has: a place in a recording, or a day of digits alone, is in 1970."""
    if when.year in (1, 1970, 9999):
        raise ValueError("no message is of that year")
    return when


When = Annotated[datetime, AfterValidator(_sent)]
"""ISO dates with or without time and zone, and seconds or milliseconds since 1970, as UTC."""
Text = Annotated[str, AfterValidator(lambda text: text.encode().decode())]  # no half of a letter


class Record(BaseModel):
    """A message; `extra` are fields that are not read."""

    model_config = ConfigDict(extra="allow")

    when: When = Field(validation_alias=AliasChoices("date", "timestamp"))
    speaker: Text | None = Field(validation_alias=AliasChoices("speaker", "author", "from"))
    text: Text | None


def _json(text: str) -> Export | None:
    """Read Telegram's export or plain messages; None for other JSON, and for what is none."""
    start = re.match(r"\s*(\[\s*)?(?=\{)", text)
    if start is None:
        return None
    try:
        first, end = json.JSONDecoder().raw_decode(text, start.end())
    except (ValueError, RecursionError):
        if '"date_unixtime"' in text:
            raise Misfit("it is not JSON to its end") from None
        return None
    if not (WHEN & first.keys() and WHO & first.keys() and "text" in first):
        return None if start[1] else _telegram(first)
    if not start[1] and "\n" in text[start.end() : end]:  # a record by itself
        return None
    try:
        if start[1]:
            return _export(json.loads(text))
        return _export([json.loads(line) for line in text.split("\n") if line.strip()])
    except (ValueError, RecursionError):
        raise Misfit("it is not JSON to its end") from None


def _export(records: list) -> Export:
    """Return the messages. Misfit: a record is none, or has words in fields that are not read."""
    messages, unread = [], {}
    for n, fields in enumerate(records, 1):
        try:
            record = Record.model_validate(fields)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]
            field = f"'{fault['loc'][0]}'" if fault["loc"] else "it"
            value = "missing" if fault["type"] == "missing" else clip(repr(fault["input"]), 60)
            raise Misfit(f"message {n}: {field} is {value}") from None
        unread |= record.model_extra
        for field, value in record.model_extra.items():
            words = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            if " " in words or len(words) > LONGEST:
                raise Misfit(f"message {n}: there are words in {clip(field, 60)!r} too")
        speaker = _plain(record.speaker or "") or "unknown"
        messages.append(Message(record.when, speaker, _plain(record.text or "")))
    return Export(messages, unread=unread)


def _telegram(chat: dict) -> Export | None:
    """Read an export of Telegram's; None for another object."""
    match chat:
        case {"chats": {"list": _}}:
            raise Misfit("it holds all chats of an account: export one of them by itself")
        case {"messages": [{"type": _, "date": _}, *_] as entries}:
            messages = _export([_telegram_record(entry) for entry in entries]).messages
            unread = {field for entry in entries for field in entry} - READ - BESIDE.keys()
            title = chat.get("name")
            return Export(messages, title if isinstance(title, str) else "", unread=sorted(unread))
    return None


def _telegram_record(entry: object) -> object:
    """Return an entry of Telegram's as a plain message."""
    match entry:
        case {"type": "message", "date": when, "text": text}:
            if isinstance(text, list):  # links and words in bold are objects
                text = "".join(str(p.get("text", p) if isinstance(p, dict) else p) for p in text)
            entry = {"file_name": entry.get("file")} | entry  # which older exports do not have
            for field, name in BESIDE.items():
                if value := entry.get(field):
                    text = f"{text} [{name}: {value}]"
            speaker = entry.get("from") or str(entry.get("from_id") or "")
            return {"date": when, "from": speaker, "text": text}
        case {"type": _, "date": when}:  # somebody came or left, a call, ...
            return {"date": when, "from": "", "text": ""}
    return entry
