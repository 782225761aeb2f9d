"""LongMemEval (arXiv 2410.10813): chats with an assistant, and one question for each history.

Holds: `load_longmemeval`, `time_of`, `says_unknown`, `TYPES`, `ABSTENTION`. Leaves out: what a
conversation is (tasks/conversations.py), the score of an answer (tasks/episodes.py). No torch.
Exercise it: `pytest tests/tasks/test_longmemeval.py`. Read next: tasks/episodes.py.

The original (xiaowu0162/LongMemEval at 9e0b455) grades every answer by a language model. We grade
by the F1 of words and, where the history has no answer, by `says_unknown`, a rule of our own: our
figures are not those of the paper.

The files longmemeval_s.json, _m.json and _oracle.json, "cleaned" or not, are read from the user's
path.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tasks.conversations import (
    Conversation,
    Probe,
    Session,
    Utterance,
    read_samples,
    text_or_number,
    turns_as_memories,
)
from tasks.readers import Record

TYPES = (
    "single-session-user", "single-session-assistant", "single-session-preference",
    "multi-session", "temporal-reasoning", "knowledge-update",
)  # fmt: skip
ABSTENTION = "abstention"  # after the type of a question to which the history has no answer
WHEN = re.compile(r"(\d{4}/\d{2}/\d{2}) \(\w+\) (\d{2}:\d{2})")

# What an answer says that tells of no answer (`says_unknown`): a negation and, at most four words
# on, what is not told or known; information that is not enough; something that is unknown
NOT = "not|no|none|nobody|never|nothing|unable|impossible|lacks?|lacking|insufficient"
END = r"[.,;!?)]|$"
TOLD = (
    r"mention\w*|specif(?:y|ied|ies)|stated|state(?= (?:the|this|that|it|your|any|wh|how)\w*)|"
    r"indicat\w+|disclos\w+|discuss\w*|says?|said|tell|told|know\w*|answer\w*|determin\w+|"
    r"infer(?:red)?|identif\w+|confirm\w*|provided?|shared?|recall|remember|clear|recorded|"
    r"(?:talk|talked|spoken) about|references?|information|info|details?|evidence|"
    rf"(?:sure|certain|aware|records?|memory|given)(?= (?:of|about|in|if|how|wh\w+)\b|{END})|"
    rf"(?:enough|sufficient)(?= (?:information|info|details?|data|context|to)\b|{END})|"
    r"in (?:the|our|your|this|any)(?: \w+)? (?:conversations?|chats?|history|sessions?)"
)
SCARCE = "not|insufficient|incomplete|missing|unavailable|lacking"
UNKNOWN = "unknown|unclear|unspecified|undetermined|undisclosed|uncertain|unanswerable"
UNTOLD = re.compile(
    rf"(?<!called )(?<!named )(?<!titled )\b(?:(?:{NOT}) (?:[\w'-]+ ){{0,4}}?(?:{TOLD})|"
    rf"(?:information|info|details?|context|data) (?:[\w'-]+ ){{0,6}}?(?:{SCARCE})|"
    r"nothing (?:[\w'-]+ ){0,4}?about|no idea|unaware|only mentioned|mentioned [^.]*\bbut not|"
    rf"(?:is|are|was|were|be|it's|remains?|left)(?: still)? (?:{UNKNOWN})"
    rf"(?= (?:from|in|here)\b|{END}))\b"
)
ALONE = re.compile(rf"(?:answer: )?(?:{UNKNOWN}|not available|no data available|n/?a)\W*")


def load_longmemeval(path: str | Path) -> list[Conversation]:
    """Read LongMemEval's published file, .json or .json.gz: one conversation for each question.

    Sessions are put in order of time, which the oracle file is not in, and numbered from 1.
    Evidence are the turns that are marked to have the answer; of an answer session without such a
    mark, the session; of one that is not in the history, its own id. The kind is the question's
    type; for an id that ends in _abs, "TYPE, abstention".

    UserError: the file or a field is not as published; it names file, question and field.
    """
    return [_conversation(question) for question in read_samples(path, "question_id")]


def time_of(when: str) -> datetime:
    """Return date and time of a session; ValueError if they have another form.

    >>> time_of("2024/06/03 (Mon) 16:05").isoformat()
    '2024-06-03T16:05:00'
    """
    if not (match := WHEN.fullmatch(when)):
        raise ValueError(f"no date: {when!r}")
    return datetime.strptime(f"{match[1]} {match[2]}", "%Y/%m/%d %H:%M")


def says_unknown(answer: str) -> bool:
    """Tell whether an answer says that the history does not answer the question: our own rule.

    Words in capitals, in quotes or after "called" are a name, unless they are the whole answer.

    >>> says_unknown("You did not mention your hamster."), says_unknown("Unknown")
    (True, True)
    >>> says_unknown("Your hamster is called Unknown."), says_unknown("You have no hamster.")
    (False, False)
    """
    text = " ".join(answer.replace("’", "'").replace("*", "").split()).strip("\"'")
    text = text.lower() if text.isupper() or text.istitle() else text
    text = re.sub(r"^[A-Z]|(?<=[.!?:;] )[A-Z]", lambda first: first[0].lower(), text)
    text = re.sub('"[^"]*"', '""', text.replace("cannot", "can not").replace("can't", "can not"))
    text = text.replace("n't", " not")
    return bool(ALONE.fullmatch(text) or UNTOLD.search(text))


def _conversation(r: Record) -> Conversation:
    sessions, marked = _sessions(r)
    abstains, kind = r.place.endswith("_abs"), r.text("question_type")
    names = r.texts("answer_session_ids") if r.fields.get("answer_session_ids") else ()
    probe = Probe(
        id=r.place,
        question=r.text("question"),
        answers=(text_or_number(r, "answer"),),
        category=0,
        # in the order in which the answer sessions are named
        evidence=tuple(place for name in names for place in marked.get(name, [name])),
        abstains=abstains,
        kind=f"{kind}, {ABSTENTION}" if abstains else kind,
        when=r.text("question_date"),
    )
    memories = {"empty": (), "sessions": turns_as_memories(sessions)}
    return Conversation(r.place, ("user", "assistant"), sessions, (probe,), memories)


def _sessions(r: Record) -> tuple[tuple[Session, ...], dict[str, list[str]]]:
    """Return the sessions in order of time, and the ids of evidence by their ids in the file."""
    names, dates = r.texts("haystack_session_ids"), r.texts("haystack_dates")
    histories = r.get("haystack_sessions", list)
    if not len(names) == len(dates) == len(histories):
        counts = f"{len(names)} ids, {len(dates)} dates and {len(histories)} sessions"
        raise r.error(f"'haystack_sessions' must have an id and a date each, there are {counts}")
    try:
        times = [time_of(when) for when in dates]
    except ValueError as error:
        form = "dates such as '2024/06/03 (Mon) 16:05'"
        raise r.error(f"'haystack_dates' must be {form} ({error})") from None
    sessions, marked = [], dict[str, list[str]]()
    for number, k in enumerate(sorted(range(len(times)), key=times.__getitem__), 1):
        turns = replace(r, place=f"{r.place}, session D{number}", fields={"turns": histories[k]})
        if histories[k] is None:  # which may be empty, but not missing
            raise turns.error("'haystack_sessions' must be a list of lists of turns")
        utterances, answering = [], []
        for n, turn in enumerate(turns.parts("turns", 0), 1):
            utterances.append(_utterance(turn, f"D{number}:{n}"))
            answering += [utterances[-1].id] if turn.fields.get("has_answer") is True else []
        day = times[k].date().isoformat()
        sessions.append(Session(number, day, dates[k], tuple(utterances)))
        marked.setdefault(names[k], []).extend(answering or [f"S{number}"])
    return tuple(sessions), marked


def _utterance(turn: Record, name: str) -> Utterance:
    content = turn.fields.get("content")
    blank = isinstance(content, str) and not content.strip()  # as some of the published are
    return Utterance(name, turn.text("role"), "" if blank else turn.text("content"))
