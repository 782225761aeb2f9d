"""A chat as a document and a question: tables of (messages, document, question, source)."""

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
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


ANNA, WHERE, TELL = "Anna joined Boris. Boris toured Oslo.", "Where is Anna?", "Tell me of Anna."
LONG, LINES = f"{ANNA}\n\n" * 60, f"{ANNA}\n" * 60
LAST, FIRST = "the last paragraph", "the first paragraph"
CHATS = [  # messages, the document, the question, where it stood if that was chosen
    ([said(ANNA), said("Hm."), said(f" {WHERE} ")], f"{ANNA}\n\nHm.", WHERE, ""),
    ([said("Be brief.", "system"), said("Hi."), said("Ho.", "assistant"), said(WHERE)],
     "System: Be brief.\n\nUser: Hi.\n\nAssistant: Ho.", WHERE, ""),
    ([said(ANNA, "system"), said(WHERE)], ANNA, WHERE, ""),
    ([said([{"type": "output_text", "text": "Oslo."}], "assistant"), said("x", "function"),
      said(None, "tool"), said(WHERE)], "Assistant: Oslo.\n\nFunction: x", WHERE, ""),
    ([said("Read.", "developer"), said([text("This:"), file(ANNA.encode()), text(WHERE)])],
     f"Read.\n\nThis:\n\n{ANNA}", WHERE, ""),
    ([said([text(WHERE), file(ANNA.encode(), head="")])], ANNA, WHERE, ""),
    # a text and its question in one short message
    ([said(f"{ANNA}\n\n{WHERE}")], ANNA, WHERE, LAST),
    ([said(f"{WHERE}\n\n{ANNA}")], ANNA, WHERE, FIRST),
    ([said(f"{ANNA}\n{WHERE}")], ANNA, WHERE, LAST),
    ([said(f"<context>\n{ANNA}\n</context>\n\nQuestion: {WHERE}")],
     f"<context>\n{ANNA}\n</context>", f"Question: {WHERE}", LAST),
    ([said("Be brief.", "system"), said(f"{ANNA}\n\n{WHERE}")],
     f"Be brief.\n\n{ANNA}", WHERE, LAST),
    ([said(ANNA), said(f"{WHERE}\n\nBriefly.")], ANNA, f"{WHERE}\n\nBriefly.", ""),
    # a long message
    ([said(f"{LONG}\n\n{WHERE}\n")], LONG.strip(), WHERE, LAST),
    ([said(f"{WHERE}\r\n\r\n{LONG}")], LONG.strip(), WHERE, FIRST),
    ([said(f"{WHERE}\n{LINES}")], LINES.strip(), WHERE, FIRST),
    ([said(f"{TELL}\n<d>\n{LINES}</d>")], f"<d>\n{LINES}</d>", TELL, FIRST),
    ([said(f"{TELL}\n```\n{LINES}```")], f"```\n{LINES}```", TELL, FIRST),
    ([said(f"<d>\n{LONG}</d>\n\n{TELL}")], f"<d>\n{LONG}</d>", TELL, LAST),
    ([said(f"Sum up:\n\n{LONG}")], LONG.strip(), "Sum up:", FIRST),
    ([said(f"安娜在哪里？\n\n{LONG}")], LONG.strip(), "安娜在哪里？", FIRST),
    ([said([text(WHERE), text(LONG)])], LONG, WHERE, FIRST),
    ([said([text(LONG), text(f"{LONG}{WHERE}")])], f"{LONG}\n\n{LONG.strip()}", WHERE, LAST),
    ([said(f"{TELL}\n\n{'a ' * 1100}\n\n{'b ' * 500}")],
     f"{'a ' * 1100}\n\n{'b ' * 500}".strip(), TELL, FIRST),
    ([said(f"Who?\n\n{LONG}{WHERE}")], f"Who?\n\n{LONG}".strip(), WHERE, LAST),
    ([said(f"Report\n\n{LONG}{TELL}")], f"Report\n\n{LONG}".strip(), TELL, LAST),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "document", "question", "source"), CHATS)
def test_a_chat_is_taken_apart(messages, document, question, source):
    chat = asked(*messages)
    assert (chat.question, chat.source, chat.document.text) == (question, source, document)


@pytest.mark.parametrize(("messages", "word", "place"), [
    ([said("Anna joined Boris."), said("Boris toured Oslo."), said(WHERE)], "Oslo", "message 2"),
    ([said([text("About this:"), file(ANNA.encode()), text(WHERE)])], "joined", "notes.txt"),
    ([said([file(pdf("Anna joined.", "Boris toured Oslo."), "a.pdf"), text("?")])], "Oslo",
     "page 2"),
])  # fmt: skip
def test_a_document_knows_its_messages_files_and_pages(messages, word, place):
    document = asked(*messages).document
    start = document.text.index(word)
    assert document.where([(start, start + len(word))]) == place
    assert ("2 files" in document.title) == (place == "notes.txt")


WORDS = st.sampled_from(["  - a list", "\tcode", "```", "<d>", f"of {WHERE}", "", "\r"])


@given(st.lists(WORDS), st.booleans())
def test_the_rest_of_a_long_message_is_kept_as_it_is(lines, first):
    rest = "\n".join([ANNA, *lines, LONG, *lines, "", TELL]).strip()
    chat = asked(said(f"{WHERE}\n\n{rest}" if first else f"{rest}\n\n{WHERE}"))
    assert (chat.question, chat.document.text) == (WHERE, rest)


DATA = "Grüße aus Oslo? ÿþ. " * 9
PLAIN = base64.b64encode(DATA.encode()).decode()
IN_LINES = base64.encodebytes(DATA.encode()).decode()


@pytest.mark.parametrize("data", [
    IN_LINES, IN_LINES.replace("\n", "\r\n "), PLAIN.rstrip("="),
    base64.urlsafe_b64encode(DATA.encode()).decode(), f"DATA:text/plain;Base64,{PLAIN}",
    f"data:text/plain;charset=utf-8;base64,{IN_LINES}", f"data:;base64,{quote(PLAIN)}",
    f"data:text/plain,{quote(DATA)}",
])  # fmt: skip
@pytest.mark.parametrize("nested", [True, False])
def test_a_file_comes_in_any_base64_and_in_either_form(data, nested):
    sent = {"filename": "a.txt", "file_data": data}
    part = {"type": "file", "file": sent} if nested else {"type": "input_file"} | sent
    chat = asked(said([part, {"type": "input_text", "text": WHERE}]))
    assert (chat.document.text.strip(), chat.question) == (DATA.strip(), WHERE)


BAD = [file(b"\x7fELF\0\0"), file(b"\x1f\x8bxx"), file(b"")]
BAD += [{"type": "file", "file": {"file_data": d}} for d in ("%%%", "A", "ü", "=", "QW5u????YQ==")]


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"), ([said("Q?", "robot")], "messages.0.role"), ([said(5)], "messages.0.content"),
    *(([said(empty)], "messages.0") for empty in ("", None, [])),
    ([said("Hi."), said("Hello.", "assistant")], "messages.1"),
    ([said([{"type": "image_url", "image_url": {"url": "x"}}])], "messages.0.content.0"),
    ([said([{"type": "text"}])], "messages.0.content.0"),
    ([said([{"type": "file", "file": {"file_id": "f"}}])], "messages.0.content.0"),
    ([said([{"type": "input_file", "file_url": "http://a/b"}])], "messages.0.content.0"),
    *(([said([bad, text("Q?")])], "messages.0.content.0.file_data") for bad in BAD),
    # no question, or no text
    ([said("Anna joined Boris. " * 200)], "messages.0"), ([said("Hello!")], "messages.0"),
    ([said(WHERE)], "messages.0"), ([said(f"{'a' * 2500}\n\n</d>")], "messages.0"),
    ([said(f"{'a' * 2001}\n\n</d>")], "messages.0"),
])  # fmt: skip
def test_what_is_no_chat_is_refused_with_its_place(messages, param):
    assert refusal(*messages).param.startswith(param)


@pytest.mark.parametrize("fields", [
    {"model": 5}, {"stream": "yes"}, {"temperature": "warm"}, {"temperature": -1},
    {"temperature": float("nan")}, {"temperature": 1e400}, {"top_p": 0}, {"seed": 10**40},
    {"seed": 1.5}, {"max_tokens": 0}, {"max_tokens": 10**9}, {"max_completion_tokens": True},
    {"n": 2}, {"logprobs": True}, {"top_logprobs": 2}, {"tools": [{}]},
    {"tools": [{}], "tool_choice": "auto"}, {"functions": [{}]}, {"stop": 5},
    {"response_format": {"type": "json_object"}}, {"stream_options": 1},
    {"presence_penalty": 0.5}, {"frequency_penalty": -1}, {"logit_bias": {"5": 1}},
    {"modalities": ["text", "audio"]},
])  # fmt: skip
def test_fields_that_are_no_good_are_refused_by_name(fields):
    assert refusal(said("Q?"), **fields).param == next(iter(fields))


@pytest.mark.parametrize("fields", [
    {"user": "me", "n": 1, "tools": [], "logprobs": False, "top_logprobs": 0, "logit_bias": {}},
    {"tools": [{}], "tool_choice": "none", "functions": []},
    {"tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "store": False},
    {"response_format": {"type": "text"}, "modalities": ["text"], "presence_penalty": 0},
    {"response_format": None, "audio": None, "stream_options": {"include_usage": None}},
    {"model": None}, {"model": ""}, {"model": "m"},
])  # fmt: skip
def test_fields_that_change_nothing_are_taken(fields):
    body = json.dumps({"messages": [said(ANNA), said("Q?")]} | fields).encode()
    for mark in (b"", b"\xef\xbb\xbf"):
        request, inquiry = taken(mark + body, "m").opened()
        assert inquiry.question == "Q?" and not request.model_extra
    if fields.get("model"):
        with pytest.raises(Refused) as caught:
            taken(body, "n").opened()
        assert (caught.value.status, caught.value.param) == (404, "model")


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
