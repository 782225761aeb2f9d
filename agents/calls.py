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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agents.tools import is_text, schemas
from config.errors import clean, clip
from tokens.chat_templates import rendered


@dataclass(frozen=True, slots=True)
class Call:
    """A call that could be read; whether its tool and arguments exist is not known yet."""

    name: str
    arguments: object  # a JSON value


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that should have been a call."""

    code: str  # of agents.tools.CODES: "unreadable", "cut"
    message: str  # what is wrong with it


class _Unreadable(Exception):
    """The reason why a text is no call."""


# ---------------------------------------------------------------- JSON

DEEPEST = 8  # lists and objects inside one another; the deepest valid call has 3


def _object(pairs: list[tuple[str, object]]) -> dict:
    values = dict(pairs)
    for name in values if len(values) < len(pairs) else ():
        if [key for key, _ in pairs].count(name) > 1:
            raise _Unreadable(f"{_brief(name)} stands there twice")
    return values


def _no_value(text: str) -> None:
    raise _Unreadable(f"{text} is no JSON value")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_value)


def _decode(text: str, at: int = 0) -> tuple[object, int]:
    """Read the JSON value that begins at a place; return it and where it ends."""
    try:
        value, end = DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        where = f"character {error.pos - at + 1}"
        raise _Unreadable(f"it is not JSON: {error.msg.lower()} at {where}") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        raise _Unreadable("a number is too long") from None
    except RecursionError:
        raise _Unreadable("it is nested too deeply") from None
    if _is_deeper(value, DEEPEST):
        raise _Unreadable("it is nested too deeply")
    return value, end


def _is_deeper(value: object, levels: int) -> bool:
    """Tell whether a JSON value has more levels of lists and objects than so many."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(item, levels - 1) for item in inside)


def _json(text: str) -> object:
    text = text.strip()
    value, end = _decode(text)
    if end < len(text):
        raise _Unreadable(f"after its end {_brief(text[end:].strip())} follows")
    return value


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _brief(text: str) -> str:
    return repr(clip(clean(text), 40))


# ---------------------------------------------------------------- one call


def _call(value: object) -> Call:
    """Make a call out of {"name": ..., "arguments" or "parameters": ...}."""
    if not isinstance(value, dict):
        raise _Unreadable("it must be an object with a name and arguments")
    if not isinstance(value.get("name"), str):
        raise _Unreadable("name: must be the name of a tool")
    given = [key for key in ("arguments", "parameters") if key in value]
    if len(given) != 1:
        raise _Unreadable(f"arguments: {'given twice' if given else 'missing'}")
    if others := [key for key in value if key not in ("name", "type", *given)]:
        raise _Unreadable(f"{_brief(others[0])}: must stand inside the arguments")
    return Call(value["name"], value[given[0]])


def _unreadable(reason: object) -> Fault:
    reason = clip(clean(reason), 200)  # it may quote what the model wrote
    return Fault("unreadable", f"the call cannot be read: {reason}.")


def _cut(mark: str) -> Fault:
    return Fault("cut", f"the call has no end: {mark} is missing.")


FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
PARAMETER_END = "</parameter>"


def _in_xml(body: str) -> Call:
    """Read a function with its parameters, whose values are texts or JSON by the tool's schema."""
    function = FUNCTION.fullmatch(body)
    if not function:
        raise _Unreadable("it must be <function=NAME>, parameters and </function>")
    name, inside = function[1].strip(), function[2].rstrip()
    pairs, at = [], 0
    while at < len(inside):
        found = PARAMETER.match(inside, at)
        end = inside.find(PARAMETER_END, found.end()) if found else -1
        if end < 0:
            raise _Unreadable(f"{_brief(inside[at:].strip())} is no <parameter=KEY> with its end")
        key = found[1].strip()
        value = inside[found.end() : end].removeprefix("\n").removesuffix("\n")
        pairs.append((key, value if is_text(name, key) else _value(value)))
        at = end + len(PARAMETER_END)
    return Call(name, _object(pairs))


def _value(text: str) -> object:
    """Read a JSON value; what is none stays a text."""
    try:
        return _json(text)
    except _Unreadable:
        return text


NAMED = re.compile(r'\{\s*"name"')  # no JSON string can hold it: its quotes would be escaped


def _bare(text: str) -> Iterator[Call | Fault]:
    """Read objects with anything between them; go on after a damaged one where the next begins."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _decode(text, at)
        except _Unreadable as error:
            following = NAMED.search(text, at + 1)
            end = following.start() if following else len(text)
            yield _unreadable(error) if "}" in text[at:end].strip()[-3:] else _cut("}")
        else:
            yield _tried(_call, value)
        at = text.find("{", end)


def _tried(read: Callable[[object], Call], written: object) -> Call | Fault:
    try:
        return read(written)
    except _Unreadable as error:
        return _unreadable(error)


# ---------------------------------------------------------------- a response

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHT = r"<think>.*?(?:</think>|\Z)"  # which may be cut before its end
STRAY = rf"({CLOSE}).*?(?=<think>|{OPEN}|\Z)"
MARKED = re.compile(rf"{THOUGHT}|{OPEN}(.*?)({CLOSE}|\Z)|{STRAY}", re.DOTALL)
BARE = re.compile(rf'{THOUGHT}|(?=\{{\s*")(.*)', re.DOTALL)


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
        if self.kind == "bare":
            return [
                call
                for found in BARE.finditer(response)
                for call in _bare((found[1] or "").strip())
            ]
        return [call for found in MARKED.finditer(response) for call in self._between(found)]

    def _between(self, found: re.Match) -> Iterator[Call | Fault]:
        """Read what stands between two marks, where they are those of a call."""
        body, end, stray = found.groups()
        if stray:
            yield _unreadable(f"{OPEN} is missing before it")
        if body is None:
            return
        call = _tried(self._call, body) if end else _cut(CLOSE)
        *lost, last = body.split(OPEN) if isinstance(call, Fault) else [body]
        for _ in lost:  # calls without an end before this one
            yield _cut(CLOSE)
        yield _tried(self._call, last) if lost and end else call

    def _call(self, body: str) -> Call:
        return _in_xml(body) if self.kind == "xml" else _call(_json(body))

    def write(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write one call as this model would; the arguments keep their order.

        XML knows no escapes: there a value must not hold a closing mark.
        """
        if self.kind == "bare":
            return _dumps({"name": name, "parameters": dict(arguments)})
        if self.kind == "xml":
            texts = {k: v if isinstance(v, str) else _dumps(v) for k, v in arguments.items()}
            values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
            return f"{OPEN}\n<function={name}>\n{values}</function>\n{CLOSE}"
        call = _dumps({"name": name, "arguments": dict(arguments)})
        return OPEN + call.replace(CLOSE, r"<\/tool_call>") + CLOSE  # the same in JSON

    def instructions(self, schemas: Sequence[dict]) -> str:
        """Describe tools for the prompt; "" where the chat template does so."""
        if self.by_template:
            return ""
        lines = "\n".join(_dumps(schema["function"]) for schema in schemas)
        example = self.write("NAME", {"ARGUMENT": "VALUE"})
        return (
            f"Tools, one JSON schema a line:\n{lines}\n\n"
            f"A call is written like this, and several may follow one another:\n{example}"
        )


# ---------------------------------------------------------------- which one a model has

# The first mark that a chat template has says how its model writes calls. In a template a quote or
# a line break may be escaped
MARKS = (
    ("xml", re.compile(r"\A(?>.*?<tool_call>)(?>.*?<function=).*<parameter=", re.DOTALL)),
    ("", re.compile(r"<tool_call>\s*\[")),  # lists, which are not read
    ("hermes", re.compile(r'\A(?>.*?<tool_call>).*\\?"arguments\\?"', re.DOTALL)),
    ("bare", re.compile(r'\A(?>.*?\{\\?"name\\?": ).*\\?"parameters\\?": ', re.DOTALL)),
)


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
    from jinja2 import TemplateError

    message = [{"role": "user", "content": "-"}]
    try:
        given, none = (rendered(tokenizer, message, tools=tools) for tools in ([*schemas()], None))
    except TemplateError:
        return False
    return given != none
