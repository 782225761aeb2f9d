"""A chat as a document and a question."""

import base64
import json
from urllib.parse import quote

import pytest
from test_documents import pdf

from tasks.chat_requests import ChatRequest, Inquiry, Refused, taken


def said(content, role="user"):
    return {"role": role, "content": content}


def text(words):
    return {"type": "text", "text": words}


def file(content: bytes, name="notes.txt", head="data:text/plain;base64,"):
    data = head + base64.b64encode(content).decode()
    return {"type": "file", "file": {"filename": name, "file_data": data}}


def asked(*messages, **fields) -> Inquiry:
    body = json.dumps({"model": "m", "messages": list(messages)} | fields)
    return Inquiry.from_chat(ChatRequest.parse(body.encode()))


def refusal(*messages, **fields) -> Refused:
    with pytest.raises(Refused) as caught:
        asked(*messages, **fields)
    assert str(caught.value).endswith(".") and len(str(caught.value)) < 500
    return caught.value


def test_all_before_the_last_message_is_the_document():
    chat = asked(said("Anna joined Boris."), said("Boris toured Oslo."), said(" Where is Anna? "))
    assert chat.question == "Where is Anna?"
    assert chat.document.text == "Anna joined Boris.\n\nBoris toured Oslo."
    start = chat.document.text.index("Oslo")
    assert chat.document.where([(start, start + 4)]) == "message 2"


def test_a_message_says_who_speaks_where_several_do():
    chat = asked(
        said("Be brief.", "system"), said("Hi."), said("Hello.", "assistant"), said("Who am I?")
    )
    assert chat.document.text == "System: Be brief.\n\nUser: Hi.\n\nAssistant: Hello."
    assert asked(said("Be brief.", "system"), said("Q?")).document.text == "Be brief."
    assert asked(said(None, "assistant"), said("Q?")).document.text == ""
    written = [{"type": "output_text", "text": "In Oslo."}, {"type": "refusal", "refusal": "No."}]
    chat = asked(said(written, "assistant"), said("x", "function"), said("Q?"))
    assert chat.document.text == "Assistant: In Oslo.\n\nAssistant: No.\n\nFunction: x"


def test_files_and_all_but_the_last_text_belong_to_the_document():
    parts = [text("About this:"), file(b"Anna joined Boris."), text("Where is Anna?")]
    chat = asked(said("Read it.", "developer"), said(parts))
    assert chat.question == "Where is Anna?"
    assert chat.document.text == "Read it.\n\nAbout this:\n\nAnna joined Boris."
    start = chat.document.text.index("joined")
    assert chat.document.where([(start, start + 6)]) == "notes.txt"
    # a file may also stand behind the question
    again = asked(said([text("Where is Anna?"), file(b"Anna joined Boris.", head="")]))
    assert (again.document.text, again.question) == ("Anna joined Boris.", "Where is Anna?")
    chat = asked(said([file(pdf("Anna joined Boris.", "Boris toured Oslo."), "a.pdf"), text("?")]))
    start = chat.document.text.index("Oslo")
    assert chat.document.where([(start, start + 4)]) == "page 2"


LONG = "Anna joined Boris. Boris toured Oslo.\n\n" * 60
LINES = "Anna joined Boris. Boris toured Oslo.\n" * 60
WHERE, TELL = "Where is Anna?", "Tell me where Anna is."
LAST = "the last paragraph"


@pytest.mark.parametrize(
    ("messages", "question", "source"),
    [
        ([said(WHERE)], WHERE, ""),
        ([said(f"{LONG}\n\n{WHERE}\n")], WHERE, "the last paragraph"),
        ([said(f"{WHERE}\n\n{LONG}")], WHERE, "the first paragraph"),
        ([said(f"{WHERE}\r\n\r\n{LONG}")], WHERE, "the first paragraph"),
        ([said(f"{WHERE}\n{LINES}")], WHERE, "the first paragraph"),
        ([said(f"{LINES}{WHERE} Briefly.")], f"{WHERE} Briefly.", "the last paragraph"),
        ([said(f"{TELL}\n<document>\n{LINES}</document>")], TELL, "the first paragraph"),
        ([said(f"{TELL}\n```\n{LINES}```")], TELL, "the first paragraph"),
        ([said(f"<d>\n{LONG}</d>\n\n{TELL}")], TELL, LAST),
        ([said(f"Summarise:\n\n{LONG}")], "Summarise:", "the first paragraph"),
        ([said(f"安娜在哪里？\n\n{LONG}")], "安娜在哪里？", "the first paragraph"),
        ([said([text(WHERE), text(LONG)])], WHERE, "the first paragraph"),
        ([said([text(LONG), text(f"{LONG}{WHERE}")])], WHERE, "the last paragraph"),
        ([said(WHERE, "system"), said(LONG)], WHERE, "the message before"),
        ([said(f"{TELL}\n\n{'a ' * 1100}\n\n{'b ' * 500}")], TELL, "the first paragraph"),
        ([said(f"Who?\n\n{LONG}{WHERE}")], WHERE, LAST),
        ([said(f"Report\n\n{LONG}{TELL}")], TELL, LAST),
    ],
)  # fmt: skip
def test_the_question_of_a_long_message_is_found_first_or_last(messages, question, source):
    chat = asked(*messages)
    assert (chat.question, chat.source) == (question, source)
    assert question not in chat.document.text
    sent = "".join(str(message["content"]) for message in messages)
    assert chat.document.text.count("Oslo") == sent.count("Oslo")  # nothing of it is lost


REST = f"Report of {WHERE}\n\n  - {LONG}\n\n\t{TELL} Now.\n```\ncode\n```"


@pytest.mark.parametrize(
    "message", [f"{WHERE}\n\n{REST}", f"{REST}\n\n{WHERE}\n", f"{REST}\r\n \n {WHERE}"]
)
def test_the_rest_of_a_long_message_is_kept_as_it_is(message):
    chat = asked(said(message))
    assert (chat.question, chat.document.text) == (WHERE, REST)


def test_a_long_message_without_a_short_paragraph_is_refused():
    assert "no short paragraph" in str(refusal(said("Anna joined Boris. " * 200)))


DATA = "Grüße aus Oslo? ÿþ. " * 9


@pytest.mark.parametrize(
    "data",
    [
        base64.encodebytes(DATA.encode()).decode(),
        base64.b64encode(DATA.encode()).decode().rstrip("="),
        base64.urlsafe_b64encode(DATA.encode()).decode(),
        base64.encodebytes(DATA.encode()).decode().replace("\n", "\r\n "),
        "data:text/plain;charset=utf-8;base64," + base64.encodebytes(DATA.encode()).decode(),
        "DATA:text/plain;Base64," + base64.b64encode(DATA.encode()).decode(),
        "data:;base64," + quote(base64.b64encode(DATA.encode()).decode()),
        "data:text/plain," + quote(DATA),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [True, False])
def test_a_file_comes_in_any_base64_and_in_either_form(data, nested):
    given = {"filename": "a.txt", "file_data": data}
    part = {"type": "file", "file": given} if nested else {"type": "input_file"} | given
    chat = asked(said([part, {"type": "input_text", "text": WHERE}]))
    assert (chat.document.text.strip(), chat.question) == (DATA.strip(), WHERE)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([said("Q?", "robot")], "messages.0.role"),
        ([said(5)], "messages.0.content"),
        ([said("")], "messages.0"),
        ([said(None)], "messages.0"),
        ([said([])], "messages.0"),
        ([said("Hi."), said("Hello.", "assistant")], "messages.1"),
        ([said([{"type": "image_url", "image_url": {"url": "x"}}])], "messages.0.content.0"),
        ([said([{"type": "text"}])], "messages.0.content.0"),
        ([said([{"type": "file", "file": {"file_id": "f"}}])], "messages.0.content.0.file"),
        *(
            ([said([bad, text("Q?")])], "messages.0.content.0.file.file_data")
            for bad in (
                file(b"\x7fELF\0\0"),
                file(b"\x1f\x8bxx"),
                file(b""),
                file(b"\xff", head="data:text/plain;charset=utf-8;base64,"),
                *({"type": "file", "file": {"file_data": data}} for data in ("%%%", "A", "ü", "=")),
            )
        ),
        ([said([{"type": "input_file", "file_url": "http://a/b"}])], "messages.0.content.0"),
    ],
)
def test_what_is_no_chat_is_refused_with_its_place(messages, param):
    assert refusal(*messages).param.startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": 5}, {"stream": "yes"}, {"temperature": "warm"}, {"temperature": -1},
        {"temperature": float("nan")}, {"temperature": 1e400}, {"top_p": 0}, {"seed": 10**40},
        {"seed": 1.5}, {"max_tokens": 0}, {"max_tokens": 10**9}, {"max_completion_tokens": True},
        {"n": 2}, {"n": 0}, {"logprobs": True}, {"top_logprobs": 2}, {"tools": [{}]},
        {"tools": [{}], "tool_choice": "auto"}, {"functions": [{}]}, {"stop": 5},
        {"response_format": {"type": "json_object"}}, {"stream_options": 1},
        {"presence_penalty": 0.5}, {"frequency_penalty": -1}, {"logit_bias": {"5": 1}},
        {"modalities": ["text", "audio"]},
    ],
)  # fmt: skip
def test_fields_that_are_no_good_are_refused_by_name(fields):
    assert refusal(said("Q?"), **fields).param == next(iter(fields))


@pytest.mark.parametrize("fields", [
    {"user": "me", "n": 1, "tools": [], "logprobs": False, "top_logprobs": 0, "logit_bias": {}},
    {"tools": [{}], "tool_choice": "none", "functions": []},
    {"tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "store": False},
    {"response_format": {"type": "text"}, "modalities": ["text"], "presence_penalty": 0},
    {"response_format": None, "audio": None, "stream_options": {"include_usage": None}},
    {"model": None}, {"model": ""},
])  # fmt: skip
def test_fields_that_change_nothing_are_taken(fields):
    body = json.dumps({"messages": [said("Q?")]} | fields).encode()
    for mark in (b"", b"\xef\xbb\xbf"):
        assert taken(mark + body, "m").opened()[1].question == "Q?"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 10**5, b'{"a":"\\ud800"}', b"1e999999999"]
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(Refused):
        ChatRequest.parse(body)


def test_an_answer_ends_at_the_first_stop():
    body = {"model": "m", "messages": [said("Q?")]}
    for stop, cut in ((None, "one two three"), (" three", "one two"), (["three", "two"], "one ")):
        request = ChatRequest.parse(json.dumps(body | {"stop": stop}).encode())
        assert request.cut("one two three") == cut
