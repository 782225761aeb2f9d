"""Calls as models write them: what is written is read, and what is damaged is a fault."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from agents.calls import DEEPEST, Call, Format, format_of
from agents.tools import CODES, REMOVABLE, schemas
from embedded import tiny

HERMES, XML, BARE = FORMATS = [Format(), Format("xml"), Format("bare")]
FIND = ("search_memory", {"query": "Ann", "top_k": 3})
MAKE = ("manage_memory", {"operation": "create", "content": "Ann sings."})
SPLIT = (
    "split_memory",
    {"memory_id": "m1", "split_criteria": "thematic", "parts": ["a", "b"], "max_parts": 2},
)


def write(form, name, arguments):
    """Write a call as a model of this format would; XML knows no escapes."""
    if form.kind == "bare":
        return json.dumps({"name": name, "parameters": arguments})
    if form.kind == "hermes":
        call = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
        return f"<tool_call>{call}</tool_call>"
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def read(form, response):
    """(name, arguments) of each call, and the code of each fault."""
    found = form.parse(response)
    return [(one.name, one.arguments) if isinstance(one, Call) else one.code for one in found]


def tagged(body, form=HERMES):
    return read(form, f"<tool_call>{body}</tool_call>")


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
MARK = st.sampled_from(["</tool_call>", "<tool_call>", "</think>", "a\n\\b", '{"name": ', '"}'])


@settings(max_examples=200, derandomize=True)
@given(st.sampled_from(FORMATS), TEXT | MARK, st.lists(TEXT, max_size=3))
def test_any_text_survives_every_format(form, text, parts):
    if form == XML:
        text, parts = text.replace("<", ""), [part.replace("<", "") for part in parts]
    args = {"memory_id": text, "parts": parts, "max_parts": 3, "reason": "\n"}
    call = write(form, "split_memory", args)
    assert read(form, f"<think></think>{call}") == [("split_memory", args)]


@pytest.mark.parametrize(("tool", "key", "text", "value"), [
    ("search_memory", "top_k", "5", 5), ("sample_memory", "k", "\n5\n", 5),
    ("search_memory", "query", "5", "5"), ("search_memory", "kind", "null", "null"),
    ("split_memory", "parts", '["a", "b"]', ["a", "b"]),
    ("merge_memory", "memory_ids", "m1, m2", "m1, m2"),  # refused as arguments
    ("sample_memory", "k", "NaN", "NaN"), ("search_memory", "unknown", "5", "5"),
    ("unknown", "k", "5", "5"), ("manage_memory", "content", "\n\na\n b \n", "\na\n b "),
])  # fmt: skip
def test_values_of_xml_have_the_types_of_the_schema(tool, key, text, value):
    body = f"<function={tool}><parameter={key}>{text}</parameter></function>"
    assert tagged(body, XML) == [(tool, {key: value})]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_is_thought_is_no_call(form):
    call, other = write(form, *FIND), write(form, *MAKE)
    for response, calls in {
        f"<think>Maybe {other}?</think>I look. {call}\n{other}": [FIND, MAKE],
        f"{call}<think>{other}</think>": [FIND],
        f"Hm. {other}</think>{call}": [FIND],  # of a thought that the prompt has begun
        f"<think>Hm. {call}": [],  # cut before its end
        "Nothing to do.": [],
        "": [],
    }.items():
        assert read(form, response) == calls, response


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_bad_call_does_not_spoil_the_good_ones_and_one_that_is_cut_is_noticed(form):
    good, whole = write(form, *FIND), write(form, *SPLIT)
    broken = {"hermes": good.replace('"Ann"', '"Ann'), "xml": good.replace("3\n</parameter>", "3")}
    broken["bare"] = broken["hermes"]
    for between in ("", " and ", "\n"):
        response = f"First {good}{between}{broken[form.kind]}\n{whole}."
        found = read(form, response)
        assert found[0] == FIND and found[-1] == SPLIT and len(found) == 3
        assert found[1] in ("cut", "unreadable")
    for end in range(2 if form == BARE else len("<tool_call>"), len(whole)):
        found = read(form, f"{good}\n{whole[:end]}")
        assert found[0] == FIND and len(found) == 2 and found[1] in ("cut", "unreadable"), end
        assert form == BARE or found[1] == "cut"


@pytest.mark.parametrize(("response", "found"), [
    ("</tool_call>", ["unreadable"]), ("{make} </tool_call> {make}", [MAKE, "unreadable", MAKE]),
    ("<tool_call><tool_call>{make}", ["cut", "cut", MAKE]), ("<tool_call><tool_call>", ["cut"] * 2),
])  # fmt: skip
def test_marks_without_the_other(response, found):
    assert read(HERMES, response.replace("{make}", write(HERMES, *MAKE))) == found


ARGUMENTS = (
    '{"top_k": NaN}', '{"top_k": -Infinity}', f'{{"top_k": {"9" * 5000}}}', '{"query": "a",}',
    f'{{"a": {"[" * 5000}{"]" * 5000}}}', f'{{"a": {"[" * DEEPEST}{"]" * DEEPEST}}}',
    "{'query': 'a'}",
)  # fmt: skip


@pytest.mark.parametrize("body", [
    "", "search_memory", "5", "null", '{"arguments": {}}', '{"name": 5, "arguments": {}}',
    '{"name": "search_memory"}', '{"name": "x", "arguments": {}}}', '[{"name": "x"}]', "[]",
    *(f'{{"name": "search_memory", "arguments": {args}}}' for args in ARGUMENTS),
])  # fmt: skip
def test_what_is_no_call_is_a_fault(body):
    assert tagged(body) == ["unreadable"]
    (fault,) = HERMES.parse(f"<tool_call>{body}</tool_call>")
    assert len(fault.message) < 300
    if body.startswith('{"name": "search_memory", '):
        good = write(BARE, *FIND), write(BARE, *MAKE)
        found = read(BARE, f"{good[0]} {body.replace('arguments', 'parameters')} {good[1]}")
        assert found[0] == FIND and found[-1] == MAKE and len(found) > 2
        assert {*found[1:-1]} <= {"unreadable", "cut"}


def test_the_deepest_call_that_is_read():
    arguments = "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1)
    assert tagged(f'{{"name": "x", "arguments": {arguments}}}') == [("x", json.loads(arguments))]


@pytest.mark.parametrize("body", [
    "", "search_memory", '{"name": "search_memory", "arguments": {}}',
    "<function=>\n</function>", "<function=x>", "<function=x>Ann</function>",
    "<function=x><parameter=a>1</parameter> and </function>",
    "<function=x><parameter=a>1</function>", "<function=x></function><function=y></function>",
])  # fmt: skip
def test_what_is_no_xml_call_is_a_fault(body):
    assert tagged(body, XML) == ["unreadable"]


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=x>", "</function>",
         "<parameter=a>", "</parameter>", '{"name": ', *'{}[]" ', "\ud800"]  # fmt: skip
PIECES = st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=30)


@settings(max_examples=150, derandomize=True)
@given(st.sampled_from(FORMATS), PIECES)
def test_no_response_raises_and_none_is_slow(form, pieces):
    for one in form.parse("".join(pieces) * 20):
        assert isinstance(one, Call) or (one.code in CODES and one.message.encode())


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
    assert silent.instructions(()).endswith(write(silent, "NAME", {"ARGUMENT": "VALUE"}))


@pytest.mark.parametrize("tokenizer", [
    None, tiny.make_tokenizer(), tokenizer_with(HEAD),
    tokenizer_with(SHOWN),  # it takes tools, and calls are written who knows how
    tokenizer_with(HEAD + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"),
    tokenizer_with(SHOWN + """{{ '<tool_call>[{"name": NAME, "arguments": {}}]' }}"""),  # lists
])  # fmt: skip
def test_without_marks_calls_are_described_in_the_prompt(tokenizer):
    form = format_of(tokenizer)
    assert form == Format("hermes", by_template=False)
    (schema,) = schemas((*{*REMOVABLE} - {"delete_memory"},))
    told = form.instructions((schema,))
    assert json.loads(told.split("\n")[1]) == schema["function"]
    assert read(form, told.split("\n")[-1]) == [("NAME", {"ARGUMENT": "VALUE"})]
