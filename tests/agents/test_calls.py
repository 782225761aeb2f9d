"""Calls as models write them: what is written is read, and what is damaged is a fault."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tools import BASES, FORMATS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from agents.calls import DEEPEST, Call, Fault, Format, format_of
from agents.tools import CODES, TOOLS, schemas
from embedded import tiny
from tokens.codec import Codec

HERMES, XML, BARE = FORMATS
FIND = ("search_memory", {"query": "Ann", "top_k": 3})
MAKE = ("manage_memory", {"operation": "create", "content": "Ann sings."})
SPLIT = (
    "split_memory",
    {"memory_id": "m1", "split_criteria": "thematic", "parts": ["a", "b"], "max_parts": 2},
)
IN_JSON = (HERMES, BARE)


def read(form, response):
    """(name, arguments) of each call, and the code of each fault."""
    found = form.parse(response)
    return [(one.name, one.arguments) if isinstance(one, Call) else one.code for one in found]


# ---------------------------------------------------------------- what is written is read


@pytest.mark.parametrize(("form", "written"), [
    (HERMES, '<tool_call>{"name": "x", "arguments": {"b": "é", "a": 1}}</tool_call>'),
    (BARE, '{"name": "x", "parameters": {"b": "é", "a": 1}}'),
    (XML, "<tool_call>\n<function=x>\n<parameter=b>\né\n</parameter>\n<parameter=a>\n1\n"
          "</parameter>\n</function>\n</tool_call>"),
], ids=str)  # fmt: skip
def test_calls_are_written_as_the_model_writes_them(form, written):
    assert form.write("x", {"b": "é", "a": 1}) == written


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_survives_every_format(form, tool):
    more = {"search_memory": {"top_k": 7}, "sample_memory": {"k": 2},
            "split_memory": {"max_parts": 4}}  # fmt: skip
    args = BASES[tool] | more.get(tool, {})
    assert form.parse(form.write(tool, args)) == [Call(tool, args)]


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@settings(max_examples=60, derandomize=True)
@given(
    st.sampled_from(IN_JSON),
    TEXTS
    | st.sampled_from(['"}</tool_call>', '<tool_call>{"name": 1}', "</think>", "a\n\\b", "{"]),
    st.lists(TEXTS, max_size=3),
)
def test_any_text_survives_json(form, text, parts):
    args = {"content": text, "parts": parts}
    assert read(form, f"<think></think>{form.write('x', args)}") == [("x", args)]


@settings(max_examples=40, derandomize=True)
@given(TEXTS)
def test_any_text_without_marks_survives_xml(text):
    text = text.replace("<", "")
    args = {"memory_id": "m1", "parts": [text, "x"], "max_parts": 3, "reason": text}
    assert read(XML, XML.write("split_memory", args)) == [("split_memory", args)]


@pytest.mark.parametrize(("tool", "key", "text", "value"), [
    ("search_memory", "top_k", "5", 5), ("search_memory", "limit", "\n5\n", 5),
    ("search_memory", "query", "5", "5"), ("search_memory", "memory_type", "null", "null"),
    ("split_memory", "parts", '["a", "b"]', ["a", "b"]),
    ("merge_memory", "memory_ids", "m1, m2", "m1, m2"),  # refused as arguments
    ("sample_memory", "k", "NaN", "NaN"), ("search_memory", "unknown", "5", "5"),
    ("unknown", "k", "5", "5"), ("manage_memory", "content", "\n\na\n b \n", "\na\n b "),
])  # fmt: skip
def test_values_of_xml_have_the_types_of_the_schema(tool, key, text, value):
    body = f"<function={tool}><parameter={key}>{text}</parameter></function>"
    assert read(XML, f"<tool_call>{body}</tool_call>") == [(tool, {key: value})]


# ---------------------------------------------------------------- several calls in a message


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_is_thought_is_no_call(form):
    call, other = form.write(*FIND), form.write(*MAKE)
    for response, calls in {
        f"<think>Maybe {other}?</think>I look. {call}\n{other}": [FIND, MAKE],
        f"{call}<think>{other}</think>": [FIND] if form != BARE else [FIND, MAKE],
        f"Hm. {other}</think>{call}": [FIND],  # of a thought that the prompt has begun
        f"<think>Hm. {call}": [],  # cut before its end
        "Nothing to do.": [],
        "": [],
    }.items():
        assert read(form, response) == calls, response


BROKEN = {
    "hermes": '<tool_call>{"name": "search_memory", "arguments": {"query": "Ann}}</tool_call>',
    "xml": "<tool_call><function=search_memory><parameter=query>Ann</function></tool_call>",
    "bare": '{"name": "search_memory", "parameters": {"query": "Ann}}',
}


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_bad_call_does_not_spoil_the_good_ones(form):
    good = form.write(*FIND), form.write(*SPLIT)
    for between in ("", " and ", "\n"):
        response = f"First {good[0]}{between}{BROKEN[form.kind]}\n{good[1]}."
        assert read(form, response) == [FIND, "unreadable", SPLIT]
    assert form.parse(response)[1].message.startswith("the call cannot be read: ")


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_call_that_is_cut_is_noticed_wherever_it_ends(form):
    """Every beginning of a call that shows that it is one is a fault; what came before is not."""
    whole, start = form.write(*SPLIT), {"bare": 2}.get(form.kind, len("<tool_call>"))
    for end in range(start, len(whole)):
        found = read(form, f"{form.write(*FIND)}\n{whole[:end]}")
        assert found[0] == FIND and len(found) == 2 and found[1] in ("cut", "unreadable"), end
        assert form == BARE or found[1] == "cut"
    followed = read(form, f"{whole[:-12]}\n{form.write(*FIND)}")
    assert FIND in followed and followed[0] in ("cut", "unreadable")


@pytest.mark.parametrize(("response", "found"), [
    ("{end}", ["unreadable"]), ("{make} {end} {make}", [MAKE, "unreadable", MAKE]),
    ("{end}{end} <think></think>{end}", ["unreadable"] * 2),
    ("<tool_call><tool_call>{make}", ["cut", "cut", MAKE]), ("<tool_call><tool_call>", ["cut"] * 2),
    ("<tool_call>[{bare}]</tool_call>", ["unreadable"]),
    ("<tool_call>[]</tool_call>", ["unreadable"]),
])  # fmt: skip
def test_marks_without_the_other_and_lists(response, found):
    made = HERMES.write(*MAKE)
    for name, text in {"make": made, "end": made.removeprefix("<tool_call>"),
                       "bare": BARE.write(*MAKE)}.items():  # fmt: skip
        response = response.replace(f"{{{name}}}", text)
    assert read(HERMES, response) == found


# ---------------------------------------------------------------- what is no call

ARGUMENTS = {
    "a key that stands there twice": '{"query": "a", "query": "b"}',
    "no number": '{"top_k": NaN}',
    "no end of a number": '{"top_k": -Infinity}',
    "a number that Python refuses": f'{{"top_k": {"9" * 5000}}}',
    "lists nested beyond Python's stack": f'{{"a": {"[" * 5000}{"]" * 5000}}}',
    "lists nested deeply": f'{{"a": {"[" * DEEPEST}{"]" * DEEPEST}}}',
    "single quotes": "{'query': 'a'}",
    "a comma at the end": '{"query": "a",}',
}
CALLS = {
    "nothing": "",
    "a text": "search_memory",
    "a number": "5",
    "null": "null",
    "no name": '{"arguments": {}}',
    "a name that is no text": '{"name": 5, "arguments": {}}',
    "no arguments": '{"name": "search_memory"}',
    "arguments twice": '{"name": "x", "arguments": {}, "parameters": {}}',
    "arguments outside": '{"name": "search_memory", "query": "a", "arguments": {}}',
    "something after its end": '{"name": "x", "arguments": {}}}',
    **{why: f'{{"name": "search_memory", "arguments": {args}}}' for why, args in ARGUMENTS.items()},
}


@pytest.mark.parametrize("case", CALLS)
def test_what_is_no_call_is_a_fault(case):
    (fault,) = HERMES.parse(f"<tool_call>{CALLS[case]}</tool_call>")
    assert isinstance(fault, Fault) and fault.code == "unreadable"
    assert fault.message.endswith(".") and len(fault.message) < 300
    if case in ARGUMENTS:
        broken = f'{{"name": "search_memory", "parameters": {ARGUMENTS[case]}}}'
        found = read(BARE, f"{BARE.write(*FIND)} {broken} {BARE.write(*MAKE)}")
        assert found[0] == FIND and found[-1] == MAKE and len(found) > 2
        assert {*found[1:-1]} <= {"unreadable", "cut"}


def test_the_deepest_call_that_is_read():
    arguments = "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1)
    found = read(HERMES, f'<tool_call>{{"name": "x", "arguments": {arguments}}}</tool_call>')
    assert found == [("x", json.loads(arguments))]


@pytest.mark.parametrize("body", [
    "", "search_memory", '{"name": "search_memory", "arguments": {}}',
    "<function=>\n</function>", "<function=x>", "<function=x>Ann</function>",
    "<function=x><parameter=a>1</parameter> and </function>",
    "<function=x><parameter=a>1</parameter><parameter=a>2</parameter></function>",
    "<function=x><parameter=a>1</function>", "<function=x></function><function=y></function>",
])  # fmt: skip
def test_what_is_no_xml_call_is_a_fault(body):
    assert read(XML, f"<tool_call>{body}</tool_call>") == ["unreadable"]


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=x>", "</function>",
         "<parameter=a>", "</parameter>", '{"name": ', *'{}[]" ', "\ud800"]  # fmt: skip


@settings(max_examples=150, derandomize=True)
@given(
    st.sampled_from(FORMATS), st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=30)
)
def test_no_response_raises(form, pieces):
    for one in form.parse("".join(pieces)):
        assert isinstance(one, Call) or (one.code in CODES and one.message.encode())


# ---------------------------------------------------------------- the model's own format

HEAD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOLS_SHOWN = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
SHOWN = HEAD + TOOLS_SHOWN
TEMPLATES = {  # our own, with the marks that those of the models have
    "hermes": SHOWN + r"""{{ "<tool_call>\n{\"name\": NAME, \"arguments\": {}}" }}""",
    "xml": SHOWN + """{{ '<tool_call>\n<function=NAME>\n<parameter=KEY>' }}""",
    "bare": SHOWN + """{{ '{"name": NAME, "parameters": {}}' }}""",
}


def tokenizer_with(template):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x"))
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_marks_of_a_chat_template_choose_the_format(kind):
    form = format_of(tokenizer_with(TEMPLATES[kind]))
    assert form == Format(kind, True) and form.instructions(schemas()) == ""
    named = tokenizer_with({"default": HEAD, "tool_use": TEMPLATES[kind]})
    assert format_of(named) == form
    silent = format_of(tokenizer_with(TEMPLATES[kind].replace(TOOLS_SHOWN, "")))
    assert silent == Format(kind, False)
    assert silent.instructions(schemas()).endswith(silent.write("NAME", {"ARGUMENT": "VALUE"}))


@pytest.mark.parametrize("tokenizer", [
    None, tiny.make_tokenizer(), tokenizer_with(HEAD),
    tokenizer_with(SHOWN),  # it takes tools, and calls are written who knows how
    tokenizer_with(HEAD + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"),
    tokenizer_with(SHOWN + """{{ '<tool_call>[{"name": NAME, "arguments": {}}]' }}"""),  # lists
])  # fmt: skip
def test_without_marks_calls_are_described_in_the_prompt(tokenizer):
    form = format_of(tokenizer)
    assert form == Format("hermes", by_template=False)
    told = form.instructions(schemas(("delete_memory",)))
    assert json.loads(told.split("\n")[1]) == schemas(("delete_memory",))[0]["function"]
    assert read(form, told.split("\n")[-1]) == [("NAME", {"ARGUMENT": "VALUE"})]


# ---------------------------------------------------------------- thoughts that a prompt begins

ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n"
BEGUN = {  # what a chat template writes at the end of a prompt: always, or if the model is to think
    "always": ASKED + "<think>\n{% endif %}",
    "if asked": ASKED + "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}",
    "never": ASKED + "{% endif %}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("begun", BEGUN)
def test_a_thought_that_the_template_begins_is_a_thought(kind, begun, thinking, monkeypatch):
    """Its end, if it has one, stands in the response; its mark stands in the prompt."""
    tokenizer = tokenizer_with(TEMPLATES[kind] + BEGUN[begun])
    codec, form = Codec(tokenizer, thinking), format_of(tokenizer)
    call, inside = form.write(*FIND), begun == "always" or (begun == "if asked" and thinking)
    for said, thought in (
        (f"I see {call}\n</think>\n{call}", False), (f"I look. {call}", inside),
        (f"<think>\nI see {call}\n</think>\n{call}", False),
    ):  # fmt: skip
        monkeypatch.setattr(codec, "_decode", lambda ids, said=said: said)
        assert read(form, str(codec.response([0]))) == ([] if thought else [FIND])
