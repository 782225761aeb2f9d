"""A chat as a document and a question."""

import base64
import json

import pytest
from test_documents import pdf

from tasks.chat_requests import Asked, ChatRequest, Refused


def said(content, role="user"):
    return {"role": role, "content": content}


def text(words):
    return {"type": "text", "text": words}


def file(content: bytes, name="notes.txt", head="data:text/plain;base64,"):
    data = head + base64.b64encode(content).decode()
    return {"type": "file", "file": {"filename": name, "file_data": data}}


def asked(*messages, **fields) -> Asked:
    body = json.dumps({"model": "m", "messages": list(messages)} | fields)
    return Asked.of(ChatRequest.parse(body.encode()))


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


def test_a_question_alone_is_a_message_or_the_last_paragraph_of_a_long_one():
    chat = asked(said("Who are you?"))
    assert (chat.document.text, chat.question) == ("", "Who are you?")
    long = "Anna joined Boris. " * 200
    chat = asked(said(f"{long}\n\nWhere is Anna?\n"))
    assert (chat.document.text, chat.question) == (long, "Where is Anna?")
    refusal(said(long))
    refusal(said(f"Where is Anna?\n\n{long}"))


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
                {"type": "file", "file": {"file_data": "%%%"}},
            )
        ),
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
        {"n": 2}, {"logprobs": True}, {"tools": [{}]}, {"functions": [{}]}, {"stop": 5},
        {"response_format": {"type": "json_object"}}, {"stream_options": 1},
    ],
)  # fmt: skip
def test_fields_that_are_no_good_are_refused_by_name(fields):
    assert refusal(said("Q?"), **fields).param == next(iter(fields))


def test_fields_that_change_nothing_are_taken():
    given = {"user": "me", "n": 1, "tools": [], "logprobs": False, "frequency_penalty": 0}
    assert asked(said("Q?"), response_format={"type": "text"}, **given).question == "Q?"


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
