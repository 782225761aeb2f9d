"""Exported chats: three forms, written here, as dated sessions; and what is no chat."""

import gzip
import json
import random
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.chats import Chat, read_chat
from tasks.documents import read
from tasks.forms import contents

NARROW = "\u202f"  # the blank before AM and PM in today's exports
OWN = "\u200e"  # the mark before WhatsApp's own words


def android(when: datetime, rest: str, form: str = "%d.%m.%y, %H:%M") -> str:
    return f"{when.strftime(form)} - {rest}"


def ios(when: datetime, rest: str, form: str = "%d.%m.%y, %H:%M:%S") -> str:
    return f"[{when.strftime(form)}] {rest}"


def read_lines(*lines: str, name: str = "chat.txt"):
    return read_chat("\n".join(lines), name)


def flat(chat) -> list[tuple[str, str, str]]:
    """(day, speaker, text) of all that was said."""
    return [(s.date, u.speaker, u.text) for s in chat.sessions for u in s.utterances]


NEW_YEAR = datetime(2023, 12, 31, 21, 41, 5)

# ---------------------------------------------------------------- WhatsApp


@pytest.mark.parametrize("style", [android, ios])
def test_a_whatsapp_chat_is_what_people_said_on_each_day(style):
    def at(**later):
        return NEW_YEAR + timedelta(**later)

    picture = f"{OWN}image omitted" if style is ios else "<Media omitted>"
    e2e = f"{OWN}Messages and calls are end-to-end encrypted."
    chat = read_lines(
        style(at(), f"Ann & Bo: {e2e}" if style is ios else e2e),
        style(at(), "Ann: Happy new year: almost!"),
        style(at(minutes=1), "Bo Li: I am"),
        "late,",
        "",
        "  sorry",
        style(at(minutes=2), f"Ann: {picture}"),
        style(at(hours=3), "Bo Li: It is 2024"),
        "",
    )  # fmt: skip
    assert flat(chat) == [
        ("2023-12-31", "Ann", "Happy new year: almost!"),
        ("2023-12-31", "Bo Li", "I am late, sorry"),
        ("2024-01-01", "Bo Li", "It is 2024"),
    ]
    assert [(s.number, s.when) for s in chat.sessions] == [
        (1, "2023-12-31 (Sun) 21:41"),
        (2, "2024-01-01 (Mon) 00:41"),
    ]
    assert [u.id for s in chat.sessions for u in s.utterances] == ["D1:1", "D1:2", "D2:1"]
    for words in ("chat.txt", "Ann, Bo Li", "messages: 3; sessions: 2", "without words: 2"):
        assert words in chat.remark


FORMS = [
    (android, "%m/%d/%y, %-I:%M %p"),
    (android, f"%m/%d/%y, %-I:%M{NARROW}%p"),
    (android, "%d/%m/%Y, %H:%M"),
    (android, "%d/%m/%Y %H:%M"),
    (android, "%d/%m/%Y, %-I:%M p. m."),
    (android, "%d/%m/%Y à %H:%M"),
    (android, "%d.%m.%y, %H:%M"),
    (android, "%-d.%-m.%Y, %H.%M"),
    (android, "%d-%m-%Y %H:%M"),
    (android, "%Y-%m-%d %H:%M"),
    (ios, f"%m/%d/%y, %-I:%M:%S{NARROW}%p"),
    (ios, "%d.%m.%y, %H:%M:%S"),
    (ios, "%Y-%m-%d, %H:%M:%S"),
    (ios, "%d/%m/%Y, %-I:%M:%S pm"),
]


@pytest.mark.parametrize(("style", "form"), FORMS)
def test_dates_of_every_spelling(style, form):
    whens = [NEW_YEAR, NEW_YEAR + timedelta(days=1), NEW_YEAR + timedelta(days=34, minutes=1)]
    lines = [style(w, f"Ann: Number {k}", form) for k, w in enumerate(whens)]
    lines[1] = OWN + lines[1]  # as before a line with a picture
    chat = read_lines(*lines)
    assert [s.when[-5:] for s in chat.sessions] == ["21:41", "21:41", "21:42"]
    assert [d for d, *_ in flat(chat)] == ["2023-12-31", "2024-01-01", "2024-02-03"]


def test_of_twelve_hours_midnight_is_the_first_and_the_month_is_taken():
    chat = read_lines("12/31/23, 12:05 AM - Ann: a", "12/31/23, 12:05 PM - Ann: b")
    assert [s.when for s in chat.sessions] == ["2023-12-31 (Sun) 00:05", "2023-12-31 (Sun) 12:05"]
    chat = read_lines("3/2/24, 9:00 AM - Ann: Hello")
    assert flat(chat)[0][0] == "2024-03-02" and "taken first: month." in chat.remark


@pytest.mark.parametrize(
    ("dates", "days", "doubt"),
    [
        # one number above 12 decides for all lines, wherever it stands
        (["01/02/24", "03/02/24", "13/02/24"], ["2024-02-01", "2024-02-03", "2024-02-13"], ""),
        (["01/02/24", "01/03/24", "01/13/24"], ["2024-01-02", "2024-01-03", "2024-01-13"], ""),
        # else what is written later is not earlier
        (["01/02/24", "02/02/24", "01/03/24"], ["2024-02-01", "2024-02-02", "2024-03-01"], ""),
        (["02/01/24", "02/02/24", "03/01/24"], ["2024-02-01", "2024-02-02", "2024-03-01"], ""),
        (["03.02.24"], ["2024-02-03"], "taken first: day."),
        (["03/02/24"], ["2024-02-03"], "taken first: day."),
        (["02/02/24"], ["2024-02-02"], ""),  # the same day either way
    ],
)
def test_whether_day_or_month_comes_first_is_found_out_over_the_whole_file(dates, days, doubt):
    chat = read_lines(*(f"{day}, 10:00 - Ann: Hello" for day in dates))
    assert [day for day, *_ in flat(chat)] == days
    assert doubt in chat.remark and ("taken first" in chat.remark) == bool(doubt)


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ("Ann: IMG-20240102-WA0001.jpg (file attached)", ""),
        ("Ann: IMG-20240102-WA0001.jpg (Datei angehängt)\nOur house", "Our house"),
        (f"Ann: {OWN}<attached: 00000012-PHOTO.jpg>\nOur house", "Our house"),
        ("Ann: <Medien ausgeschlossen>", ""),
        ("Ann: This message was deleted", ""),
        ("Ann: null", ""),
        ("Ann: I <3 this > that", "I <3 this > that"),
        ("Ann: see https://example.org/a: it says (so)", "see https://example.org/a: it says (so)"),
        ("Ann:", ""),
        ("~ Ann: hello \u2068@Bo\u2069", "hello @Bo"),
        ('Ann changed the subject from "Trip: 1" to "Trip: 2"', ""),
        ("Ann added Bo", ""),
    ],
)
def test_what_is_left_of_a_message(rest, text):
    chat = read_lines("31.12.23, 21:40 - Ann: Hi", f"31.12.23, 21:41 - {rest}",
                      "31.12.23, 21:42 - Ann: Bye")  # fmt: skip
    said = [each for *_, each in flat(chat)]
    assert said == ["Hi", *([text] if text else []), "Bye"]
    assert {speaker for _, speaker, _ in flat(chat)} == {"Ann"}
    assert ("left out without words: 1" in chat.remark) == (not text)


def test_sessions_end_with_the_day_or_before_a_pause_of_more_than_six_hours():
    noon = datetime(2024, 3, 9, 12)
    hours = [0, 6, 12 + 1 / 60, 12.5, 13]
    chat = read_lines(*(android(noon + timedelta(hours=h), f"Ann: {h:.1f}") for h in hours))
    texts = [[u.text for u in s.utterances] for s in chat.sessions]
    assert texts == [["0.0", "6.0"], ["12.0", "12.5", "13.0"]]  # at 0:01 there is another day
    late = [6.02 if h == 6 else h for h in hours]
    chat = read_lines(*(android(noon + timedelta(hours=h), f"Ann: {h:.1f}") for h in late))
    assert [len(s.utterances) for s in chat.sessions] == [1, 1, 3]


def test_messages_are_put_in_order_of_time():
    chat = read_lines(*(f"{day}.12.23, 10:00 - Ann: {day}" for day in (13, 15, 14, 14)))
    assert [text for *_, text in flat(chat)] == ["13", "14", "14", "15"]
    assert [s.number for s in chat.sessions] == [1, 2, 3]


@pytest.mark.parametrize(
    "when", ["31/02/24, 10:00", "13/13/24, 10:00", "13/01/24, 25:00", "13/01/24, 13:00 PM"]
)
def test_a_chat_with_a_date_that_there_is_not_is_read_as_text(when):
    text = f"13/01/24, 10:00 - Ann: Hi\nthere\n{when} - Ann: x"
    read = contents(text.encode(), "chat.txt")
    assert read.pieces[0][0] == text and not read.sessions
    assert read.remark == (
        f"chat.txt looks like a chat but is read as text: '{when}' is no date and time."
    )


@pytest.mark.parametrize(
    "text",
    [
        "Ann went home on 31.12.23, 21:41 - Ann: so she said.",
        "Dear Bo,\n31.12.23, 21:41 - Ann: quoted\n",
        "31.12.23, 21:41 - it rained\n31.12.23, 22:41 - it snowed\n1.1.24, 9:00 - Ann: fine\n",
        "2023-12-31 21:41:05,123 - root - INFO - started\n",
        "[2023-12-31T21:41:05] ERROR: it broke\n",
        "[1] A. Author: A title.\n",
        "[]", "{}", "[1, 2]", '{"a": 1}', '[{"question": "Who?", "text": "x"}]', '{"messages": []}',
        '{"messages": [{"role": "user", "content": "Hi"}]}', "[{", '{"date": 1, "text": ',
        '{\n"date": "2024-01-01",\n"author": "Ann",\n"text": "A report of one piece."\n}',
        "[" * 100_000, '{"a":' * 100_000,
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_is_no_chat_stays_a_text(text):
    assert read_chat(text, "x.txt") == Chat()
    assert contents(text.encode(), "x.txt").kind == "file"


WORDS = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp"]), min_size=1)


@settings(derandomize=True)
@given(st.lists(WORDS.filter(str.strip), min_size=1, max_size=6), st.randoms())
def test_any_words_come_back(texts, rng):
    """Whatever is written, on one line or several: every word is there, in its order."""
    when, lines = NEW_YEAR, []
    for text in texts:
        when += timedelta(minutes=rng.randrange(900))
        first, *rest = text.split(" ")
        lines.append(android(when, f"Ann: so {first}") + "".join(f"\n so {word}" for word in rest))
    said = " ".join(text for *_, text in flat(read_lines(*lines)))
    assert said.split() == " ".join(f"so {w}" for t in texts for w in t.split(" ")).split()


# ---------------------------------------------------------------- JSON


def telegram(*messages: dict, **more) -> str:
    return json.dumps(
        {"name": "Trip", "type": "private_chat", "id": 1, "messages": [*messages]} | more
    )


def sent(text, when: str = "2023-12-31T21:41:05", **more) -> dict:
    return {"id": 1, "type": "message", "date": when, "date_unixtime": "0", "from": "Ann",
            "from_id": "user1", "text": text} | more  # fmt: skip


def test_telegrams_export():
    link = {"type": "link", "text": "https://example.org"}
    chat = read_chat(
        telegram(
            {"id": 0, "type": "service", "date": "2023-12-31T21:40:00", "action": "phone_call"},
            sent("Hello\nthere"),
            sent(["See ", link, " now"], "2023-12-31T21:42:00", **{"from": "Bo"}),
            sent("", photo="x.jpg"),
            sent("Gone", "2024-01-01T10:00:00", **{"from": None}),
            sent("Unnamed", "2024-01-01T10:01:00", **{"from": None, "from_id": ""}),
        ),
        "result.json",
    )
    assert flat(chat) == [
        ("2023-12-31", "Ann", "Hello there"),
        ("2023-12-31", "Bo", "See https://example.org now"),
        ("2024-01-01", "user1", "Gone"),
        ("2024-01-01", "unknown", "Unnamed"),
    ]
    assert (
        chat.title == "Trip" and "Ann, Bo, user1, unknown; messages: 4; sessions: 2;" in chat.remark
    )
    assert "left out without words: 2; fields left out: action, photo." in chat.remark


@pytest.mark.parametrize(
    ("text", "more", "shown"),
    [
        ("", {"file": "files/plan.pdf"}, "[file: files/plan.pdf]"),
        ("Look", {"file": "(not included)", "file_name": "plan.pdf"}, "Look [file: plan.pdf]"),
        ("Hi", {"forwarded_from": "Cy"}, "Hi [forwarded from: Cy]"),
        ("Hi", {"forwarded_from": None}, "Hi"),
        ("", {"poll": {"question": "Where?", "answers": [{"text": "Oslo", "voters": 2}]}},
         "[poll: {'question': 'Where?', 'answers': [{'text': 'Oslo', 'voters': 2}]}]"),
    ],
)  # fmt: skip
def test_what_stands_beside_the_text_in_telegrams_export(text, more, shown):
    chat = read_chat(telegram(sent(text, **more), sent("Bye", reply_to_message_id=1)), "x")
    assert [each for *_, each in flat(chat)] == [shown, "Bye"]
    assert chat.remark.endswith("; fields left out: reply_to_message_id.")


PLAIN = [
    {"date": "2024-03-09T12:00", "speaker": "Ann", "text": "Hi"},
    {"date": "2024-03-09 13:01:30+01:00", "speaker": "Bo", "text": " Hi\nyourself ", "id": 7},
    {"date": "2024-03-08", "speaker": "", "text": "Earlier"},
    {"date": "2024-03-09T23:00Z", "speaker": "Ann", "text": ""},
]


@pytest.mark.parametrize("form", ["list", "lines"])
def test_plain_messages_as_a_list_and_line_by_line(form):
    text = json.dumps(PLAIN, indent=1) if form == "list" else "\n".join(map(json.dumps, PLAIN))
    chat = read_chat(f"\n{text}\n", "m.json")
    assert flat(chat) == [
        ("2024-03-08", "unknown", "Earlier"),
        ("2024-03-09", "Ann", "Hi"),
        ("2024-03-09", "Bo", "Hi yourself"),
    ]
    assert [s.when for s in chat.sessions] == ["2024-03-08 (Fri)", "2024-03-09 (Sat) 12:00"]
    assert "left out without words: 1;" in chat.remark


@pytest.mark.parametrize("speaker", ["speaker", "author", "from"])
@pytest.mark.parametrize("stamp", [1704058865, 1704058865.0, 1704058865000, "1704058865"])
def test_seconds_and_milliseconds_since_1970(speaker, stamp):
    chat = read_chat(json.dumps([{"timestamp": stamp, speaker: "Ann", "text": "Hi"}]), "m.json")
    assert [s.when for s in chat.sessions] == ["2023-12-31 (Sun) 21:41"]


@pytest.mark.parametrize(
    ("times", "order", "sessions"),
    [
        # an answer from another zone, the day before by its own clock
        (["2024-03-02T06:50:00+00:00", "2024-03-01T23:05:00-08:00", "2024-03-02T07:10:00Z"],
         "012", ["2024-03-02 (Sat) 06:50"]),
        # the day of a session is its first message's, the pause is real time
        (["2024-03-01T23:50:00-08:00", "2024-03-02T00:10:00-08:00", "2024-03-02T09:20:00+01:00"],
         "012", ["2024-03-01 (Fri) 23:50", "2024-03-02 (Sat) 00:10"]),
        (["2024-03-02T12:00+02:00", "2024-03-02T11:00+01:00", "2024-03-02T18:01+02:00"],
         "012", ["2024-03-02 (Sat) 12:00", "2024-03-02 (Sat) 18:01"]),
        # seconds and milliseconds are UTC
        ([1704058865, "2023-12-31T22:00:00+01:00", 1704058866000], "102",
         ["2023-12-31 (Sun) 22:00"]),
        # without zones as they are
        (["2024-03-02T12:00", "2024-03-02 11:00", "2024-03-02T11:30:00.5"], "120",
         ["2024-03-02 (Sat) 11:00"]),
    ],
)  # fmt: skip
def test_messages_are_put_in_order_of_instants_and_shown_by_their_clocks(times, order, sessions):
    messages = [{"date": t, "author": "Ann", "text": str(k)} for k, t in enumerate(times)]
    chat = read_chat(json.dumps(messages), "m.json")
    assert "".join(text for *_, text in flat(chat)) == order
    assert [s.when for s in chat.sessions] == sessions and "zone" not in chat.remark


def test_a_time_without_a_zone_beside_others_is_utc():
    times = ["2024-03-02T05:06", "2024-03-02T09:10+05:00", "2024-03-02T05:05Z", "2024-03-02T04:09"]
    chat = read_chat(
        json.dumps([{"date": t, "from": "Ann", "text": str(k)} for k, t in enumerate(times)]), "m"
    )
    assert "".join(text for *_, text in flat(chat)) == "3120"
    assert chat.remark.endswith("; times without a zone, taken as UTC: 2.")


NO_MESSAGES = [  # what stands beside a message, and how it is named
    ({"speaker": "Ann", "text": "x"}, "'date' is missing"),
    ({"date": "2024-01-01", "text": "x"}, "'speaker' is missing"),
    ({"date": "2024-01-01", "speaker": "A"}, "'text' is missing"),
    ({"date": "2024-01-01", "speaker": "A", "text": 3}, "'text' is 3"),
    ({"date": "2024-01-01", "speaker": "A", "text": "\ud800"}, "'text' is '"),
    ({"date": "2024-01-01", "author": {"name": "A"}, "text": "x"}, "'author' is {"),
    *(
        (PLAIN[0] | {"date": bad}, f"'date' is {bad!r}")
        for bad in ("May 3, 2024", "3 March", "2024-02-30", "", "10:00", True, None, 1e300, 12.5,
                    2024, 20240301, 1704058865000000, "20240301")
    ),
    *(
        (PLAIN[0] | {field: words}, f"there are words in {field!r} too")
        for field, words in {
            "title": "Bridge closed", "url": "https://example.org/news/2024/bridge-closed-again",
            "reply": {"text": "See you"}, "tags": ["the bridge"],
            "a\nb": "See you",
        }.items()
    ),
    (3, "it is 3"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), NO_MESSAGES, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("form", ["list", "lines", "all"])
def test_a_file_is_a_chat_only_if_all_its_records_are_messages(record, reason, form):
    records = [record] if form == "all" else [*PLAIN, record]
    text = "\n".join(map(json.dumps, records)) if form == "lines" else json.dumps(records)
    read = contents(text.encode(), "m.json")
    assert read.kind == "file" and not read.sessions
    (shown, *_), *_ = read.pieces
    if form != "lines":
        assert json.loads(shown, strict=False) == records
    if form != "all":
        beginning = "m.json looks like a chat but is read as text: message 5: "
        assert read.remark.startswith(beginning + reason)
        assert read.remark.endswith(".") and "\n" not in read.remark


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (json.dumps(PLAIN)[:-9], "it is not JSON to its end"),
        ("\n".join([json.dumps(PLAIN[0]), "", '{"date": ']), "it is not JSON to its end"),
        (telegram(sent("x"))[:-20], "it is not JSON to its end"),
        (json.dumps({"messages": [{"type": "email", "date": "2024-05-03"}]}), "no message in it"),
        (json.dumps({"messages": [{"type": "email", "date": "May 3"}]}), "message 1: 'date'"),
        (telegram(sent("")), "no message in it has words"),
        ("31.12.23, 21:41 - Ann: <Media omitted>", "no message in it has words"),
        (telegram(sent("x"), sent("y", "soon")), "message 2: 'date' is 'soon'"),
        (telegram(sent("x"), sent(3)), "message 2: 'text' is 3"),
        (telegram(sent("x"), sent("x", **{"from": 3})), "message 2: 'from' is 3"),
        (telegram(sent("x"), "y"), "message 2: it is 'y'"),
        (json.dumps({"chats": {"list": [{"messages": [sent("x")]}]}}), "it holds all chats of an"),
    ],
)
def test_a_chat_that_is_damaged_or_none_is_read_as_text(text, place):
    read = contents(text.encode(), "m.json")
    assert read.pieces[0][0].split() == text.split() and not read.sessions
    assert f"m.json looks like a chat but is read as text: {place}" in read.remark
    assert read.remark.endswith(".") and "\n" not in read.remark


def test_what_is_not_read_of_messages_is_named():
    messages = [m | {"id": 7, "tags": ["a"], "a\nb": 1} for m in PLAIN]
    assert "; fields left out: id, tags, a b;" in read_chat(json.dumps(messages), "m.json").remark


def test_a_picture_in_a_message_is_left_out_and_counted():
    words = f"Look: data:image/png;base64,{'iVBOR' * 400}"
    read = contents(json.dumps([PLAIN[0], PLAIN[0] | {"text": words}]).encode(), "m.json")
    assert read.pieces[0][0].endswith("Ann: Hi\nAnn: Look: picture left out")
    assert "; left out: 1 picture (1.5 KB)" in read.remark


def test_a_chat_cut_anywhere_is_read():
    rng, whole = random.Random(0), telegram(*(sent(f"Word {k}") for k in range(9)))
    for text in (whole, json.dumps(PLAIN), "\n".join(map(json.dumps, PLAIN))):
        for _ in range(60):
            chat = read_chat(text[: rng.randrange(1, len(text))], "m.json")
            assert chat.sessions or chat == Chat() or "read as text" in chat.remark


# ---------------------------------------------------------------- among other documents

CHAT = "\n".join(
    android(NEW_YEAR + timedelta(hours=12 * k), f"{'Ann Bo'.split()[k % 2]}: I am in {place}.")
    for k, place in enumerate(["Oslo", "Lima", "Rome"])
)


def test_a_chat_is_a_document_with_a_part_for_each_session(tmp_path):
    path = tmp_path / "chat.txt.gz"
    path.write_bytes(gzip.compress(CHAT.encode()))
    document = read([path])
    assert document.text == (
        "2023-12-31 (Sun) 21:41\nAnn: I am in Oslo.\n\n"
        "2024-01-01 (Mon) 09:41\nBo: I am in Lima.\n\n"
        "2024-01-01 (Mon) 21:41\nAnn: I am in Rome."
    )
    assert document.size() == "3 sessions" and document.title == "chat.txt.gz"
    at = document.text.index("Lima")
    assert document.where([(at, at + 4)]) == "session 2 (2024-01-01)"
    assert [s.dated for s in document.sessions] == document.text.split("\n\n")
    assert "is a chat of Ann, Bo; messages: 3; sessions: 3." in document.remarks[0]


def test_beside_a_chat_other_files_are_sessions_without_a_date(tmp_path, read_here):
    (tmp_path / "a.txt").write_text(CHAT)
    (tmp_path / "b.md").write_text("Cy is in Nice.")
    (tmp_path / "c.json").write_text(json.dumps(PLAIN))
    document = read([tmp_path])
    assert [(s.number, s.date, s.when) for s in document.sessions] == [
        (1, "2023-12-31", "2023-12-31 (Sun) 21:41"),
        (2, "2024-01-01", "2024-01-01 (Mon) 09:41"),
        (3, "2024-01-01", "2024-01-01 (Mon) 21:41"),
        (4, "", "b.md"),
        (5, "2024-03-08", "2024-03-08 (Fri)"),
        (6, "2024-03-09", "2024-03-09 (Sat) 12:00"),
    ]
    assert document.sessions[3].text == "Cy is in Nice." and document.text.count("Cy is") == 1
    assert [s.utterances[0].id for s in document.sessions] == [f"D{k}:1" for k in range(1, 7)]
    for name in ("a.txt", "c.json"):
        (tmp_path / name).unlink()
    assert read([tmp_path]).sessions == ()
