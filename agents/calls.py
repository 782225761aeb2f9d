"""How models write tool calls: one format for each family of chat templates.

| format | one call | whose |
|---|---|---|
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Hermes, Qwen2.5, Qwen3 |
| xml | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</tool_call>` | Qwen3.5 |
| bare | `{"name": ..., "parameters": {...}}` | Llama 3 |

A model whose template has other marks is told in the prompt to write the first one. What cannot be
read becomes a `Fault` in its place, never an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from agents.tools import is_text, schemas
from config.errors import clean, clip
from tokens.chat_templates import Refused, rendered


@dataclass(frozen=True, slots=True)
class Call:
    """A call that could be read; whether its tool and arguments exist is not known yet."""

    name: str
    arguments: object  # a JSON value


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that should have been a call."""

    code: str  # of agents.tools.CODES: "unreadable", "cut"
    message: str  # what is wrong with it, without a full stop


# ---------------------------------------------------------------- one call

DEEPEST = 8  # lists and objects inside one another; the deepest valid call has 3


def _no_value(text: str) -> None:
    raise ValueError(f"{text} is no JSON value")


DECODER = json.JSONDecoder(parse_constant=_no_value)


def _decode(text: str, at: int = 0) -> tuple[object, int]:
    """Read the JSON value that begins at a place; return it and where it ends. ValueError: it is
    none."""
    try:
        value, end = DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _is_deeper(value, DEEPEST):
        raise ValueError("it is nested too deeply")
    return value, end


def _is_deeper(value: object, levels: int) -> bool:
    """Tell whether a JSON value has more levels of lists and objects than so many."""
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and (
        not levels or any(_is_deeper(item, levels - 1) for item in inside)
    )


def _json(text: str) -> object:
    text = text.strip()
    value, end = _decode(text)
    if end < len(text):
        raise ValueError("something follows after its end")
    return value


def _call(value: object) -> Call:
    """Make a call out of {"name": ..., "arguments" or "parameters": ...}."""
    match value:
        case {"name": str(name), "arguments": arguments} | {
            "name": str(name),
            "parameters": arguments,
        }:
            return Call(name, arguments)
    raise ValueError("it must be an object with a name and arguments")


FUNCTION = re.compile(
    r"\s*<function=([^<>\n]+)>((?>\s*<parameter=[^<>\n]+>.*?</parameter>)*+)\s*</function>\s*",
    re.DOTALL,
)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _in_xml(body: str) -> Call:
    """Read a function with its parameters, whose values are texts or JSON by the tool's schema."""
    function = FUNCTION.fullmatch(body)
    if not function:
        raise ValueError("it must be <function=NAME>, parameters and </function>")
    name, pairs = function[1].strip(), PARAMETER.findall(function[2])
    given = {key.strip(): value for key, value in pairs}
    return Call(name, {k: v if is_text(name, k) else _value(v) for k, v in given.items()})


def _value(text: str) -> object:
    """Read a JSON value; what is none stays a text."""
    try:
        return _json(text)
    except ValueError:
        return text


# ---------------------------------------------------------------- a response

EXAMPLES = {
    "hermes": '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>',
    "xml": "<tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n"
    "</tool_call>",
    "bare": '{"name": "NAME", "parameters": {"ARGUMENT": "VALUE"}}',
}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHT = r"<think>.*?(?:</think>|\Z)"  # which may be cut before its end
MARKED = re.compile(rf"{THOUGHT}|{OPEN}(.*?)(?:({CLOSE})|(?={OPEN})|\Z)|({CLOSE})", re.DOTALL)
BARE = re.compile(r'\{\s*"')  # where a call begins
NAMED = re.compile(r'\{\s*"name"')  # no JSON string can hold it: its quotes would be escaped


def _unreadable(reason: object) -> Fault:
    # the reason may quote what the model wrote
    return Fault("unreadable", f"the call cannot be read: {clip(clean(reason), 200)}")


def _cut(mark: str) -> Fault:
    return Fault("cut", f"the call has no end: {mark} is missing")


@dataclass(frozen=True, slots=True)
class Format:
    """How one model writes calls."""

    kind: Literal["hermes", "xml", "bare"] = "hermes"
    # the schemas are given to the chat template; False: `instructions` has to stand in the prompt
    by_template: bool = False

    def parse(self, response: str) -> list[Call | Fault]:
        """Return the calls of a response in their order; those in its thoughts are none."""
        before, ends, rest = response.partition("</think>")
        if ends and "<think>" not in before:  # of a thought that the prompt has begun
            response = rest
        return [*(_read_bare(response) if self.kind == "bare" else self._read_marked(response))]

    def _read_marked(self, response: str) -> Iterator[Call | Fault]:
        for found in MARKED.finditer(response):
            body, end, stray = found.groups()
            if stray:
                yield _unreadable(f"{OPEN} is missing before it")
            elif body is not None and not end:
                yield _cut(CLOSE)
            elif body is not None:
                try:
                    yield _in_xml(body) if self.kind == "xml" else _call(_json(body))
                except ValueError as error:
                    yield _unreadable(error)

    def instructions(self, schemas: Sequence[dict]) -> str:
        """Describe tools for the prompt; "" where the chat template does so."""
        if self.by_template:
            return ""
        lines = "\n".join(json.dumps(one["function"], ensure_ascii=False) for one in schemas)
        return (
            f"Tools, one JSON schema a line:\n{lines}\n\n"
            "A call is written like this, and several may follow one another:\n"
        ) + EXAMPLES[self.kind]


def _read_bare(response: str) -> Iterator[Call | Fault]:
    """Read objects with anything between them; go on after a damaged one where the next begins."""
    text, at = re.sub(THOUGHT, "", response, flags=re.DOTALL).rstrip(), 0
    while found := BARE.search(text, at):
        try:
            value, at = _decode(text, found.start())
            yield _call(value)
        except ValueError as error:
            following = NAMED.search(text, max(at, found.end()))
            at = following.start() if following else len(text)
            yield _unreadable(error) if "}" in text[:at].rstrip()[-3:] else _cut("}")


# ---------------------------------------------------------------- which one a model has

# The first mark that a chat template has says how its model writes calls. In a template a quote or
# a line break may be escaped
MARKS = (
    ("xml", re.compile(r"\A(?>.*?<tool_call>)(?>.*?<function=).*<parameter=", re.DOTALL)),
    ("", re.compile(r"<tool_call>\s*\[")),  # lists, which are not read
    ("hermes", re.compile(r'\A(?>.*?<tool_call>).*\\?"arguments\\?"', re.DOTALL)),
    ("bare", re.compile(r'\A(?>.*?\{\\?"name\\?": ).*\\?"parameters\\?": ', re.DOTALL)),
)


@lru_cache(8)
def format_of(tokenizer: object) -> Format:
    """Return the format of a tokenizer's model: what its chat template has marks of.

    A template that takes no tools, or writes calls in a way that is not known here, leaves it to
    `Format.instructions` to describe them.
    """
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):  # some tokenizers have several, by name
        template = template.get("tool_use") or template.get("default") or ""
    kind = next((kind for kind, mark in MARKS if mark.search(template)), "")
    return Format(kind or "hermes", by_template=bool(kind) and _takes_tools(tokenizer))


def _takes_tools(tokenizer: object) -> bool:
    """Tell whether a chat template writes the schemas that it is given."""
    message = [{"role": "user", "content": "-"}]
    try:
        given, none = (rendered(tokenizer, message, tools=tools) for tools in ([*schemas()], None))
    except Refused:
        return False
    return given != none
