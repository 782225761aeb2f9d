import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tools import BASES, FORMATS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from agents.calls import DEEPEST, Call, Fault, Format, format_of
from agents.tools import TOOLS, schemas
from embedded import tiny
from tokens.codec import Codec

HERMES, LINES, LIST, XML, BARE = FORMATS
FIND = ("search_memory", {"query": "Ann", "top_k": 3})
MAKE = ("manage_memory", {"operation": "create", "content": "Ann sings."})
SPLIT = (
    "split_memory",
    {"memory_id": "m1", "split_criteria": "thematic", "parts": ["a", "b"], "max_parts": 2},
)


def read(form, response):
    """(name, arguments) of each call, and the code of each fault."""
    found = form.parse(response)[2]
    return [(one.name, one.arguments) if isinstance(one, Call) else one.code for one in found]


# ---------------------------------------------------------------- what is written is read


def test_calls_are_written_as_the_model_writes_them():
    name, args = FIND
    assert HERMES.write(name, args) == (
        '<tool_call>{"name": "search_memory", "arguments": {"query": "Ann", "top_k": 3}}'
        "</tool_call>"
    )
    assert LINES.write("x", {}) == '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>'
    assert LIST.write("x", {}) == '<tool_call>[{"name": "x", "arguments": {}}]</tool_call>'
    assert BARE.write("x", {"b": 1, "a": "é"}) == '{"name": "x", "parameters": {"b": 1, "a": "é"}}'
    assert XML.write(name, args) == (
        "<tool_call>\n<function=search_memory>\n<parameter=query>\nAnn\n</parameter>\n"
        "<parameter=top_k>\n3\n</parameter>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_survives_every_format(form, tool):
    more = {
        "search_memory": {"top_k": 7},
        "sample_memory": {"k": 2},
        "split_memory": {"max_parts": 4},
    }
    args = BASES[tool] | more.get(tool, {})
    written = form.write(tool, args)
    assert form.parse(written) == ("", "", [Call(tool, args, form.parse(written)[2][0].text)])
    assert [*form.parse(written)[2][0].arguments] == [*args]


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@settings(max_examples=60, derandomize=True)
@given(
    st.sampled_from([HERMES, LINES, LIST, BARE]),
    TEXTS
    | st.sampled_from(['"}</tool_call>', '<tool_call>{"name": 1}', "</think>", "a\n\\b", "{"]),
    st.lists(TEXTS, max_size=3),
    st.integers(0, 9),
)
def test_any_text_survives_json(form, text, parts, k):
    args = {"content": text, "parts": parts, "k": k}
    (call,) = form.parse(f"<think></think>{form.write('split_memory', args)}")[2]
    assert (call.name, call.arguments) == ("split_memory", args)


@settings(max_examples=40, derandomize=True)
@given(TEXTS)
def test_any_text_without_marks_survives_xml(text):
    text = text.replace("<", "")
    args = {"memory_id": "m1", "parts": [text, "x"], "max_parts": 3, "reason": text}
    assert read(XML, XML.write("split_memory", args)) == [("split_memory", args)]


def test_values_of_xml_have_the_types_of_the_schema():
    def value(tool, key, text):
        body = f"<function={tool}><parameter={key}>{text}</parameter></function>"
        ((_, arguments),) = read(XML, f"<tool_call>{body}</tool_call>")
        return arguments[key]

    assert value("search_memory", "top_k", "5") == value("search_memory", "limit", "\n5\n") == 5
    assert value("search_memory", "query", "5") == "5"
    assert value("search_memory", "memory_type", "null") == "null"
    assert value("split_memory", "parts", '["a", "b"]') == ["a", "b"]
    assert value("merge_memory", "memory_ids", "m1, m2") == "m1, m2"  # refused as arguments
    assert value("sample_memory", "k", "NaN") == "NaN"
    assert value("search_memory", "unknown", "5") == value("unknown", "k", "5") == "5"
    assert value("manage_memory", "content", "\n\na\n b \n") == "\na\n b "


# ---------------------------------------------------------------- several calls in a message


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_thoughts_text_and_calls_are_told_apart(form):
    call = form.write(*FIND)
    response = f"<think>Maybe {form.write(*MAKE)}?</think>I look. {call}\n{form.write(*MAKE)}"
    thoughts, text, found = form.parse(response)
    assert thoughts == f"Maybe {form.write(*MAKE)}?" and text == "I look."
    assert read(form, response) == [FIND, MAKE] and found[0].name == "search_memory"
    assert form.parse("Nothing to do.") == ("", "Nothing to do.", [])
    assert form.parse("") == ("", "", [])
    # a prompt may end with "<think>": then the response begins inside a thought
    assert form.parse(f"Hm.</think>{call}")[0] == "Hm." and read(form, f"Hm.</think>{call}") == [
        FIND
    ]
    assert form.parse(f"Hm. {call}", before="<think>\n") == (f"Hm. {call}", "", [])
    assert form.parse(f"<think>Hm. {call}")[2] == []  # cut before its end


BROKEN = {
    "hermes": '<tool_call>{"name": "search_memory", "arguments": {"query": "Ann}}</tool_call>',
    "list": '<tool_call>[{"name": "search_memory", "arguments": {"query": "Ann}}]</tool_call>',
    "xml": "<tool_call><function=search_memory><parameter=query>Ann</function></tool_call>",
    "bare": '{"name": "search_memory", "parameters": {"query": "Ann}}',
}


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_bad_call_does_not_spoil_the_good_ones(form):
    good = form.write(*FIND), form.write(*SPLIT)
    response = f"First {good[0]}\n{BROKEN[form.kind]}\n{good[1]}"
    assert read(form, response) == [FIND, "unreadable", SPLIT]
    fault = form.parse(response)[2][1]
    assert fault.message.startswith("the call cannot be read: ") and "Ann" in fault.text


def test_a_bad_item_does_not_spoil_its_list():
    good, bad = '{"name": "x", "arguments": {"a": 1}}', '{"name": "x", "arguments": {"a": 1}'
    assert read(LIST, f"<tool_call>[{good}, {good}]</tool_call>") == [("x", {"a": 1})] * 2
    found = read(LIST, f"<tool_call>[{good}, {bad}, {good}]</tool_call>")
    assert found == [("x", {"a": 1}), "unreadable", ("x", {"a": 1})]
    assert read(LIST, "<tool_call>[]</tool_call>") == []  # so SmolLM2 says that it makes no call


def test_bare_calls_with_anything_between_them():
    one, other = BARE.write(*FIND), BARE.write(*MAKE)
    for between in ("", " ", "; ", "\n", " and then "):
        assert read(BARE, f"Well: {one}{between}{other}.") == [FIND, MAKE]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_call_that_is_cut_is_noticed_wherever_it_ends(form):
    """Every beginning of a call that shows that it is one is a fault; what came before is not."""
    whole, start = form.write(*SPLIT), {"bare": 2}.get(form.kind, len("<tool_call>"))
    for end in range(start, len(whole)):
        response = f"{form.write(*FIND)}\n{whole[:end]}"
        found = read(form, response)
        assert found[0] == FIND and len(found) == 2 and found[1] in ("cut", "unreadable"), end
        assert form.kind == "bare" or found[1] == "cut"
    followed = f"{whole[:-12]}\n{form.write(*FIND)}"
    assert FIND in read(form, followed) and read(form, followed)[0] in ("cut", "unreadable")


def test_an_end_without_a_beginning_is_noticed():
    end = HERMES.write(*FIND).removeprefix("<tool_call>")
    assert read(HERMES, end) == ["unreadable"]
    assert read(HERMES, f"{HERMES.write(*MAKE)} {end} {HERMES.write(*MAKE)}") == [
        MAKE,
        "unreadable",
        MAKE,
    ]


# ---------------------------------------------------------------- what is no call

ARGUMENTS = {
    "a key that stands there twice": '{"query": "a", "query": "b"}',
    "no number": '{"top_k": NaN}',
    "no end of a number": '{"top_k": -Infinity}',
    "a number beyond all numbers": '{"top_k": 1e999}',
    "a huge number": f'{{"top_k": {"9" * 19}}}',
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
    body = CALLS[case]
    for form in (HERMES, LIST):
        (fault,) = form.parse(f"<tool_call>{body}</tool_call>")[2]
        assert isinstance(fault, Fault) and fault.code == "unreadable" and fault.text == body
        assert fault.message.endswith(".") and len(fault.message) < 300


@pytest.mark.parametrize("case", CALLS)
def test_a_list_that_cannot_be_read_is_noticed(case):
    found = read(LIST, f"<tool_call>[{CALLS[case]}]</tool_call>")
    assert found == [] if case == "nothing" else {"unreadable", "cut"} & {*map(str, found)}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_is_no_json_is_a_fault_in_bare_calls(case):
    broken = f'{{"name": "search_memory", "parameters": {ARGUMENTS[case]}}}'
    found = read(BARE, f"{BARE.write(*FIND)} {broken} {BARE.write(*MAKE)}")
    assert found[0] == FIND and found[-1] == MAKE
    assert {*found[1:-1]} <= {"unreadable", "cut"} and len(found) > 2


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


@settings(max_examples=150, derandomize=True)
@given(
    st.sampled_from(FORMATS),
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=x>", "</function>"]
            + ["<parameter=a>", "</parameter>", '{"name": ', "{", "}", "[", "]", '"', " ", "\ud800"]
        )
        | st.text(max_size=4),
        max_size=30,
    ),
)
def test_no_response_raises(form, pieces):
    thoughts, text, found = form.parse("".join(pieces))
    assert isinstance(thoughts, str) and isinstance(text, str)
    assert all(isinstance(one, Call | Fault) for one in found)


# ---------------------------------------------------------------- the model's own format

HEAD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOLS_SHOWN = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
TEMPLATES = {  # our own, with the marks that those of the models have
    "hermes": HEAD + TOOLS_SHOWN + r"""{{ "<tool_call>\n{\"name\": NAME, \"arguments\": {}}" }}""",
    "list": HEAD + TOOLS_SHOWN + """{{ '<tool_call>[{"name": NAME, "arguments": {}}]' }}""",
    "xml": HEAD + TOOLS_SHOWN + """{{ '<tool_call>\n<function=NAME>\n<parameter=KEY>' }}""",
    "bare": HEAD + TOOLS_SHOWN + """{{ '{"name": NAME, "parameters": {}}' }}""",
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
    assert form == Format(kind, True, "\n" if kind in ("hermes", "xml") else "")
    assert form.instructions(schemas()) == ""
    if kind == "list":
        named = tokenizer_with({"default": HEAD, "tool_use": TEMPLATES[kind]})
        assert format_of(named) == form


@pytest.mark.parametrize("tokenizer", [
    None, tiny.make_tokenizer(), tokenizer_with(HEAD),
    tokenizer_with(HEAD + TOOLS_SHOWN),  # it takes tools, and calls are written who knows how
    tokenizer_with(HEAD + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"),
])  # fmt: skip
def test_without_marks_calls_are_described_in_the_prompt(tokenizer):
    form = format_of(tokenizer)
    assert form == Format("hermes", by_template=False)
    told = form.instructions(schemas(("delete_memory",)))
    described = json.loads(told.split("\n")[1])
    assert described == schemas(("delete_memory",))[0]["function"]
    assert read(form, told.split("\n")[-1]) == [("NAME", {"ARGUMENT": "VALUE"})]


def test_smollm2_knows_lists_without_a_template_for_tools():
    form = format_of(tokenizer_with("an assistant named SmolLM" + HEAD))
    assert (form.kind, form.by_template) == ("list", False)
    assert form.instructions(schemas()).endswith(form.write("NAME", {"ARGUMENT": "VALUE"}))


# ---------------------------------------------------------------- thoughts that a prompt begins

ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n"
BEGUN = {  # what a chat template writes at the end of a prompt: always, or if the model is to think
    "always": ASKED + "<think>\n{% endif %}",
    "if asked": ASKED + "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}",
    "never": ASKED + "{% endif %}",
}


@pytest.mark.parametrize(
    ("kind", "begun", "thinking"),
    [
        *(("hermes", begun, thinking) for begun in BEGUN for thinking in (False, True)),
        *((kind, "always", False) for kind in ("list", "xml", "bare")),
    ],
)
def test_a_thought_that_the_template_begins_is_a_thought(kind, begun, thinking):
    """Its end, if it has one, stands in the response; its mark stands in the prompt."""
    tokenizer = tokenizer_with(TEMPLATES[kind] + BEGUN[begun])
    codec, form = Codec(tokenizer, thinking), format_of(tokenizer)
    call = form.write(*FIND)

    def parsed(said):
        """A response as an engine gives it: with the mark where the template has begun."""
        codec._decode = lambda ids: said
        thoughts, text, found = form.parse(str(codec.response([0])))
        return thoughts, text, [(one.name, one.arguments) for one in found]

    inside = begun == "always" or (begun == "if asked" and thinking)
    assert parsed(f"I see {call}\n</think>\n{call}") == (f"I see {call}", "", [FIND])
    assert parsed(f"I look. {call}") == (
        (f"I look. {call}", "", []) if inside else ("", "I look.", [FIND])
    )
    if not inside:
        assert parsed(f"<think>\nI see {call}\n</think>\n{call}") == (
            f"I see {call}", "", [FIND],
        )  # fmt: skip
    # whatever the codec says: where the template always begins a thought there is no doubt
    assert bool(form.parse(f"I look. {call}")[2]) is (begun != "always")
