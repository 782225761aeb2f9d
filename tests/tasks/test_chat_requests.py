"""A chat as a text and a question: tables of (messages, text, question, source)."""

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_documents import pdf

from config.errors import UserError
from tasks.chat_requests import NO_TEXT, ChatRequest, Inquiry, read_request


def said(content, role="user"):
    return {"role": role, "content": content}


def text(words):
    return {"type": "text", "text": words}


def file(content: bytes, name="notes.txt", head="data:text/plain;base64,"):
    data = head + base64.b64encode(content).decode()
    return {"type": "file", "file": {"filename": name, "file_data": data}}


def asked(*messages, **fields) -> Inquiry:
    body = json.dumps({"model": "m", "messages": list(messages)} | fields)
    return read_request(body.encode())


def refusal(*messages, **fields) -> str:
    with pytest.raises(UserError) as caught:
        asked(*messages, **fields)
    assert str(caught.value).endswith(".") and len(str(caught.value)) < 500
    return str(caught.value)


ANNA, WHERE, TELL = "Anna joined Boris. Boris toured Oslo.", "Where is Anna?", "Tell me of Anna."
LONG, LINES = f"{ANNA}\n\n" * 60, f"{ANNA}\n" * 60
CHAIN = (
    "Use the following pieces of context to answer the question.\n\n{}\n\nQuestion: {}\n{}Answer:"
)
INDEX = (
    "Context is below.\n-----\n{}\n-----\nGiven the context, answer the query.\nQuery: {}\nAnswer: "
)
RAG = (
    "### Task:\nRespond to the query.\n\n<context>\n{}\n</context>\n\n"
    "<user_query>\n{}\n</user_query>"
)
CHATS = [  # messages, the text, the question
    ([said(ANNA), said("Hm."), said(f" {WHERE} ")], f"{ANNA}\n\nHm.", WHERE),
    ([said("Be brief.", "system"), said("Hi."), said("Ho.", "assistant"), said(WHERE)],
     "System: Be brief.\n\nUser: Hi.\n\nAssistant: Ho.", WHERE),
    ([said(ANNA, "system"), said(WHERE)], ANNA, WHERE),
    ([said([{"type": "output_text", "text": "Oslo."}], "assistant"), said("x", "function"),
      said(None, "tool"), said(WHERE)], "Assistant: Oslo.\n\nFunction: x", WHERE),
    ([said("Read.", "developer"), said([text("This:"), file(ANNA.encode()), text(WHERE)])],
     f"Read.\n\nThis:\n\n{ANNA}", WHERE),
    ([said([text(WHERE), file(ANNA.encode(), head="")])], ANNA, WHERE),
    ([said([file(pdf("Anna joined.", "Boris toured Oslo."), "a.pdf"), text("?")])],
     "Anna joined.\n\nBoris toured Oslo.", "?"),
    ([said(ANNA), said(f"{WHERE}\n\nBriefly.")], ANNA, f"{WHERE}\n\nBriefly."),
    ([said("Be brief.", "system"), said(f"{ANNA}\n\n{WHERE}")], f"Be brief.\n\n{ANNA}", WHERE),
    ([said("Hi."), said("Ho.", "assistant"), said(f"{LONG}{WHERE}")],
     f"User: Hi.\n\nAssistant: Ho.\n\nUser: {LONG.strip()}", WHERE),
    ([said(f"<context>\n{ANNA}\n</context>\n\nQuestion: {WHERE}")], ANNA, WHERE),
    ([said([text(WHERE), text(LONG)])], LONG, WHERE),
    ([said([text(WHERE), text(ANNA)])], ANNA, WHERE),
]  # fmt: skip
SHAPES = [  # one message, the text, the question; of a short text and of a long one
    ("{}\n\n{}", WHERE), ("{}\n{}", WHERE), ("{1}\n\n{0}", WHERE), ("{1}\n{0}", WHERE),
    ("{1}\r\n\r\n{0}\n", WHERE), ("<context>\n{}\n</context>\n\nQuestion: {}", WHERE),
    ("<context>{}</context> {}", WHERE), ("{1}\n<context>\n{0}\n</context>", TELL),
    ("<context>\n{}\n</context>\n{}", TELL), ("Context: {}\n\nQuestion: {}", WHERE),
    ("Question: {1}\nContext: {0}", TELL), ("Text: {}\n\nQuestion: {}\n\nAnswer:", "The town"),
    ("## Context\n{}\n\n## Question\n{}", WHERE), ("**Context:** {}\n\n**Question:** {}", TELL),
    ("```\n{}\n```\n{}", WHERE), ('"""\n{}\n"""\n\n{}', TELL), ("{}\n---\n{}", TELL),
    ("{1}\n---\n{0}\n---", TELL), (CHAIN.replace("\n{}A", "\nHelpful A"), WHERE), (INDEX, WHERE),
    (RAG, TELL), ("{}\n\n{}", "Wo ist Anna"), ("{1}\n\n{0}", "安娜在哪里？"),
    ("{1}\n\n{0}\n\nThe end.", TELL), ("Sum up:\n\n{0}{1}", "Sum up:"), ("{}\n\nQ: {}", WHERE),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "document", "question"), CHATS)
def test_a_chat_is_taken_apart(messages, document, question):
    chat = asked(*messages)
    assert (chat.question, chat.text) == (question, document)


@pytest.mark.parametrize("document", [ANNA, LONG.strip(), LINES.strip()], ids=["short", "long", ""])
@pytest.mark.parametrize(("shape", "question"), SHAPES)
def test_a_text_and_its_question_stand_in_one_message(shape, question, document):
    chat = asked(said(shape.format(document, question if "Sum" not in shape else "")))
    assert chat.question == question and chat.source
    assert document in chat.text and question not in chat.text


@pytest.mark.parametrize(("message", "question", "source"), [
    (f"{ANNA} " * 60 + WHERE, WHERE, "the last sentence"),
    (f"{WHERE} " + f"{ANNA} " * 60, WHERE, "the first sentence"),
    (f"Who?\n\n{LONG}{WHERE}", WHERE, "the last paragraph"),
    (f"Report\n\n{LONG}{TELL}", TELL, "the last paragraph"),
    (f"{TELL}\n\n{'a ' * 1100}\n\n{'b ' * 500}", TELL, "the first paragraph"),
    (f"{WHERE}\n\nQ: Where is Boris?\nA: In Oslo.\n\nQ: And Clara?\nA: In Lima.", WHERE,
     "the first paragraph"),
    (f"<d>{ANNA}</d>\n\n{WHERE}", WHERE, "the last paragraph"),
    (f"{ANNA} {WHERE}", WHERE, "the last sentence"),  # however short
])  # fmt: skip
def test_it_is_said_what_was_taken_for_the_question(message, question, source):
    chat = asked(said(message))
    assert (chat.question, chat.source) == (question, source)


WORDS = st.sampled_from(["  - a list", "\tcode", "```", "<d>", f"of {WHERE}", "", "\r"])


@given(st.lists(WORDS), st.booleans())
def test_the_rest_of_a_long_message_is_kept_as_it_is(lines, first):
    rest = "\n".join([ANNA, *lines, LONG, *lines, "", TELL]).strip()
    chat = asked(said(f"{WHERE}\n\n{rest}" if first else f"{rest}\n\n{WHERE}"))
    assert (chat.question, chat.text) == (WHERE, rest)


@given(st.text('<>/dquestion aA:\n#*?-=`"', max_size=60), st.integers(0, 3))
def test_no_message_is_more_than_a_sentence_of_refusal(words, times):
    message = "\n".join([words, *[ANNA] * times, words])
    try:
        assert asked(said(message)).question.strip()
    except UserError as error:
        assert str(error)


TITLE = "### Task:\nGenerate a title.\n### Chat History:\n<chat_history>\nUSER: Hi\n</chat_history>"
NAMES = "Provide a concise, 5-word-or-less title for the conversation.\n\nConversation:\nUser: Hi"
SYSTEM = "You are a helpful assistant.\n\n- Be brief.\n\nCurrent date: 2026-11-30"
GIVEN = "Summarize the given session as a 10-word title"


@pytest.mark.parametrize("messages", [
    [said("Hello!")], [said(WHERE)], [said("Hello!\n\nHow are you?")], [said(f"Question: {WHERE}")],
    [said(SYSTEM, "system"), said("Hello!")], [said("Be brief.", "developer"), said(WHERE)],
    [said("Anna went away. Where is Anna?")],  # three words are no text
    [said(TITLE)], [said(TITLE.replace("title", "1-3 broad tags"))], [said(NAMES)],
    [said(GIVEN, "system"), said(f"user: {ANNA}\nassistant: {ANNA}")],
])  # fmt: skip
def test_without_a_text_it_is_said_what_to_send(messages):
    assert refusal(*messages) == NO_TEXT


DATA = "Grüße aus Oslo? ÿþ > ~. " * 9
PLAIN = base64.b64encode(DATA.encode()).decode()
IN_LINES = base64.encodebytes(DATA.encode()).decode()


@pytest.mark.parametrize("data", [
    IN_LINES, IN_LINES.replace("\n", "\r\n "), PLAIN.rstrip("="),
    base64.urlsafe_b64encode(DATA.encode()).decode(), f"DATA:text/plain;Base64,{PLAIN}",
    f"data:;base64,{quote(PLAIN)}", f"data:text/plain,{quote(DATA)}",
])  # fmt: skip
@pytest.mark.parametrize("nested", [True, False])
def test_a_file_comes_in_any_base64_and_in_either_form(data, nested):
    sent = {"filename": "a.txt", "file_data": data}
    part = {"type": "file", "file": sent} if nested else {"type": "input_file"} | sent
    chat = asked(said([part, {"type": "input_text", "text": WHERE}]))
    assert (chat.text.strip(), chat.question) == (DATA.strip(), WHERE)


BAD = [file(b"\x7fELF\0\0"), file(b"\x1f\x8bxx"), file(b"")]
BAD += [{"type": "file", "file": {"file_data": d}} for d in ("%%%", "A", "ü", "=", "QW5u????YQ==")]
BAD += [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"},
        {"type": "file", "file": {"file_id": "f"}}]  # fmt: skip


@pytest.mark.parametrize("messages", [
    [], [said(ANNA), said("Q?", "robot")], [said(5)], [said("Hi."), said("Hello.", "assistant")],
    *([said(empty)] for empty in ("", None, [])), *([said(ANNA), said([bad, text("Q?")])]
    for bad in BAD), [said("Anna joined Boris " * 200)], [said(f"{'a' * 2001}\n\n</d>")],
])  # fmt: skip
def test_what_is_no_chat_is_refused(messages):
    refusal(*messages)


@pytest.mark.parametrize("fields", [
    {"model": 5}, {"stream": "yes"}, {"temperature": "warm"}, {"temperature": -1},
    {"temperature": float("nan")}, {"temperature": 1e400}, {"top_p": 0}, {"seed": 10**40},
    {"seed": 1.5}, {"max_tokens": 0}, {"max_tokens": 10**9}, {"max_completion_tokens": True},
    {"n": 2}, {"logprobs": True}, {"top_logprobs": 2}, {"tools": [{}]},
    {"tools": [{}], "tool_choice": "auto"}, {"functions": [{}]}, {"stop": 5},
    {"response_format": {"type": "json_object"}}, {"stream_options": 1},
    {"presence_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"modalities": ["text", "audio"]},
])  # fmt: skip
def test_fields_that_are_no_good_are_refused_by_name(fields):
    assert refusal(said(ANNA), said("Q?"), **fields).startswith(next(iter(fields)))


@pytest.mark.parametrize("fields", [
    {"user": "me", "n": 1, "tools": [], "logprobs": False, "top_logprobs": 0, "logit_bias": {}},
    {"tools": [{}], "tool_choice": "none", "functions": [], "parallel_tool_calls": True},
    {"response_format": {"type": "text"}, "modalities": ["text"], "presence_penalty": 0},
    {"response_format": None, "audio": None, "stream_options": {"include_usage": None}},
])  # fmt: skip
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_fields_that_change_nothing_are_taken(fields, mark):
    body = json.dumps({"messages": [said(ANNA), said("Q?")]} | fields).encode()
    inquiry = read_request(mark + body)
    assert inquiry.question == "Q?" and not inquiry.request.model_extra


def test_an_answer_ends_at_the_first_stop():
    body = {"model": "m", "messages": [said("Q?")]}
    for stop, cut in ((None, "one two three"), (" three", "one two"), (["three", "two"], "one ")):
        request = ChatRequest.parse(json.dumps(body | {"stop": stop}).encode())
        assert request.cut("one two three") == cut
