"""How models write tool calls: one format for each family of chat templates.

Holds: `Call`, `Fault`, `Format`, `format_of`. Leaves out: what a call does (agents/tools.py), when
one is asked for (agents/memupdate.py). No torch.
Exercise it: `pytest tests/agents/test_calls.py`. Read next: agents/memupdate.py.

    response --transformers--> thoughts, text, bodies of calls --ours--> a Call or a Fault each

transformers' `chat_parsing` splits a response by a response template of ours. It could read the
bodies too, but raises for the whole message if one of them is damaged; the bodies are therefore
taken as text, and each is read by itself. What cannot be read becomes a Fault in its place, never
an exception. Some chat templates begin a thought at the end of the prompt: the response then has
only its end, or not even that.

| format | one call | whose |
|---|---|---|
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Hermes, Qwen2.5, Qwen3 |
| list | `<tool_call>[{"name": ..., "arguments": {...}}]</tool_call>` | SmolLM2 |
| xml | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</tool_call>` | Qwen3.5 |
| bare | `{"name": ..., "parameters": {...}}` | Llama 3 |

A model whose template has other marks is told in the prompt to write the first one. What a
tokenizer's own `response_template` says is not looked at.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from agents.tools import is_text, schemas
from config.errors import clean, clip
from tokens.chat_templates import rendered

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate


@dataclass(frozen=True, slots=True)
class Call:
    """A call that could be read; whether its tool and arguments exist is not known yet."""

    name: str
    arguments: object  # a JSON value
    text: str  # as the model wrote it


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that should have been a call."""

    code: str  # of agents.tools.CODES: "unreadable", "cut"
    message: str  # what is wrong with it
    text: str  # as the model wrote it


class _Unreadable(Exception):
    """The reason why a text is no call."""


# ---------------------------------------------------------------- JSON

DEEPEST = 8  # lists and objects inside one another; the deepest valid call has 3


def _object(pairs: list[tuple[str, object]]) -> dict:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Unreadable(f"{_brief(twice)} stands there twice")
    return values


def _number(text: str) -> int | float:
    """Read a number. _Unreadable: it is none that JSON knows, or so long that Python refuses it."""
    if len(text) > 18:
        raise _Unreadable("a number has more than 18 characters")
    if not math.isfinite(number := float(text)):
        raise _Unreadable(f"{text} is no JSON value")
    return int(text) if text.removeprefix("-").isdecimal() else number


DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_number, parse_float=_number, parse_int=_number
)


def _decode(text: str, at: int = 0) -> tuple[object, int]:
    """Read the JSON value that begins at a place; return it and where it ends."""
    try:
        value, end = DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        where = f"character {error.pos - at + 1}"
        raise _Unreadable(f"it is not JSON: {error.msg.lower()} at {where}") from None
    except RecursionError:
        raise _Unreadable("it is nested too deeply") from None
    if _deeper(value, DEEPEST):
        raise _Unreadable("it is nested too deeply")
    return value, end


def _deeper(value: object, levels: int) -> bool:
    """Tell whether a JSON value has more levels of lists and objects than so many."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not levels or any(_deeper(item, levels - 1) for item in inside)


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


# ---------------------------------------------------------------- the body of a call


def _call(value: object, text: str) -> Call | Fault:
    """Make a call out of {"name": ..., "arguments" or "parameters": ...}."""
    if not isinstance(value, dict):
        return _fault("it must be an object with a name and arguments", text)
    if not isinstance(value.get("name"), str):
        return _fault("name: must be the name of a tool", text)
    given = [key for key in ("arguments", "parameters") if key in value]
    if len(given) != 1:
        return _fault(f"arguments: {'given twice' if given else 'missing'}", text)
    if others := [key for key in value if key not in ("name", "type", *given)]:
        return _fault(f"{_brief(others[0])}: must stand inside the arguments", text)
    return Call(value["name"], value[given[0]], text)


def _fault(reason: str, text: str) -> Fault:
    reason = clip(clean(reason), 200)  # it may quote what the model wrote
    return Fault("unreadable", f"the call cannot be read: {reason}.", text)


def _in_json(body: str) -> list[Call | Fault]:
    """Read an object, or a list of objects."""
    value = _json(body)
    if isinstance(value, list):
        return [_call(item, _dumps(item)) for item in value]
    return [_call(value, body)]


NAME = '"name"'  # no JSON string can hold it: its quotes would be escaped


def _next_call(text: str, at: int) -> int:
    """Return where, from a place on, an object begins whose first key is its name, or the end."""
    while (name := text.find(NAME, at)) >= 0:
        begin = text.rfind("{", at, name)
        if begin >= 0 and not text[begin + 1 : name].strip():
            return begin
        at = name + 1
    return len(text)


def _objects(text: str) -> Iterator[Call | Fault]:
    """Read objects with anything between them; go on after a damaged one where the next begins."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _decode(text, at)
            yield _call(value, text[at:end])
        except _Unreadable as error:
            end = _next_call(text, at + 1)
            piece = text[at:end].strip()
            closed = "}" in piece[-3:]
            yield _fault(str(error), piece) if closed else _cut("}", piece)
        at = text.find("{", end)


def _cut(mark: str, text: str) -> Fault:
    return Fault("cut", f"the call has no end: {mark} is missing.", text)


FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
PARAMETER_END = "</parameter>"


def _in_xml(body: str) -> list[Call | Fault]:
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
        value = inside[found.end() : end].removeprefix("\n").removesuffix("\n")
        pairs.append((found[1].strip(), value))
        at = end + len(PARAMETER_END)
    return [Call(name, _typed(name, _object(pairs)), body)]


def _typed(tool: str, arguments: dict) -> dict:
    """Read the values that are no texts by the tool's schema as JSON; what is none stays a text."""
    return {
        key: value if not isinstance(value, str) or is_text(tool, key) else _value(value)
        for key, value in arguments.items()
    }


def _value(text: str) -> object:
    try:
        return _json(text)
    except _Unreadable:
        return text


# ---------------------------------------------------------------- formats

# An anchor is needed: transformers takes what follows it in the prompt as the response's beginning
_SPEC = {"start_anchor": "<|im_start|>assistant\n"}
THOUGHT = "<think>", "</think>"
_OTHERS = {"thinking": dict(zip(("open", "close"), THOUGHT, strict=True)), "content": {}}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKED = _SPEC | {"fields": _OTHERS | {"tool_calls": {"open": OPEN, "close": CLOSE}}}
# Bare calls have no closing mark: from the first on, all that follows is taken as calls
BARE = _SPEC | {"fields": _OTHERS | {"tool_calls": {"open_pattern": r'(?=\{\s*")'}}}


@lru_cache
def _splitter(bare: bool) -> ResponseTemplate:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(BARE if bare else MARKED)


@dataclass(frozen=True, slots=True)
class Format:
    """How one model writes calls."""

    kind: Literal["hermes", "list", "xml", "bare"] = "hermes"
    # the schemas are given to the chat template; False: `instructions` has to stand in the prompt
    by_template: bool = False
    gap: str = ""  # between the marks of a call and its body
    # what the chat template itself writes of a response if it begins a thought, else "": where the
    # model is not asked to think, and where it is
    begun: tuple[str, str] = ("", "")

    def parse(self, response: str, before: str = "") -> tuple[str, str, list[Call | Fault]]:
        """Split a response into thoughts, text and calls in their order. Never raises.

        before: what the prompt has written of the response, such as "<think>"; "" = what is known
        of the chat template. A response that ends a thought which it did not begin is taken to
        begin inside it.
        """
        from transformers.utils.chat_parsing import ResponseParser

        if not before:
            before, response = self._begin(response)
        parser = ResponseParser(_splitter(self.kind == "bare"), prefix=before)
        closed = parser.feed(response + "\n")  # so that no mark stands at the very end
        parts: dict[str, list[str]] = {"thinking": [], "content": []}
        calls: list[Call | Fault] = []
        for k, event in enumerate([*closed, *parser.finalize()[1]]):
            if event["type"] != "region_close":
                continue
            if event["field"] == "tool_calls":
                calls += self._read(event["value"], cut=k >= len(closed))
            elif event["field"] in parts:
                parts[event["field"]].append(event["value"])
                if self.kind != "bare" and event["field"] == "content" and CLOSE in event["value"]:
                    calls.append(_fault(f"{OPEN} is missing before it", event["value"]))
        thoughts, text = ("\n".join(filter(None, texts)) for texts in parts.values())
        return thoughts, text, calls

    def _begin(self, response: str) -> tuple[str, str]:
        """Return what the prompt has written of a response, and the response without the mark that
        a codec puts before it if the template began a thought (`Codec.response`)."""
        always, thinking = self.begun
        if THOUGHT[0] in thinking and response.startswith(THOUGHT[0]):
            return thinking, response.removeprefix(THOUGHT[0])
        before, ends, _ = response.partition(THOUGHT[1])
        if not always and ends and THOUGHT[0] not in before:
            return thinking or THOUGHT[0], response
        return always, response

    def _read(self, body: str, cut: bool) -> list[Call | Fault]:
        """Read one body; cut: it goes to the end of the response."""
        if self.kind == "bare":
            return [*_objects(body)]
        if cut:
            return [_cut(CLOSE, piece.strip()) for piece in body.split(OPEN)]
        try:
            return _in_xml(body) if self.kind == "xml" else _in_json(body)
        except _Unreadable as error:
            reason = str(error)
        *lost, last = body.split(OPEN)
        if lost:  # calls without an end before this one
            return [*(_cut(CLOSE, call.strip()) for call in lost), *self._read(last.strip(), cut)]
        # An item that is damaged does not spoil the others of its list
        found = [*_objects(body)] if self.kind != "xml" and body.startswith("[") else []
        noticed = any(isinstance(call, Fault) for call in found)
        return found if noticed else [*found, _fault(reason, body)]

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
        call = call.replace(CLOSE, CLOSE.replace("/", r"\/"))  # the same in JSON
        call = f"[{call}]" if self.kind == "list" else call
        return f"{OPEN}{self.gap}{call}{self.gap}{CLOSE}"

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
    ("list", re.compile(r"<tool_call>\s*\[")),
    ("hermes", re.compile(r'\A(?>.*?<tool_call>).*\\?"arguments\\?"', re.DOTALL)),
    ("bare", re.compile(r'\A(?>.*?\{\\?"name\\?": ).*\\?"parameters\\?": ', re.DOTALL)),
    ("list", re.compile("named SmolLM")),  # SmolLM2: its template itself knows no tools
)
GAP = re.compile(r"<tool_call>(?:\\n|\n)")


def format_of(tokenizer: object) -> Format:
    """Return the format of a tokenizer's model: what its chat template has marks of.

    A template that takes no tools, or writes calls in a way that is not known here, leaves it to
    `Format.instructions` to describe them.
    """
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):  # some tokenizers have several, by name
        template = template.get("tool_use") or template.get("default") or ""
    if not template:
        return Format()
    kind = next((kind for kind, mark in MARKS if mark.search(template)), None)
    gap = "\n" if GAP.search(template) else ""
    by_template = kind is not None and _takes_tools(tokenizer)
    return Format(
        kind or "hermes", by_template, gap, (_begun(tokenizer, False), _begun(tokenizer, True))
    )


def _takes_tools(tokenizer: object) -> bool:
    """Tell whether a chat template writes the schemas that it is given."""
    from jinja2 import TemplateError

    message = [{"role": "user", "content": "-"}]
    try:
        given, none = (rendered(tokenizer, message, tools=tools) for tools in ([*schemas()], None))
    except TemplateError:
        return False
    return given != none


def _begun(tokenizer: object, thinking: bool) -> str:
    """Return what a chat template writes of a response if that begins a thought, else "".

    thinking: whether the model is asked to think.
    """
    from jinja2 import TemplateError

    message, switch = [{"role": "user", "content": "-"}], {"enable_thinking": thinking}
    try:
        prompt, whole = (
            rendered(tokenizer, message, add_generation_prompt=k, **switch) for k in (False, True)
        )
    except TemplateError:
        return ""
    written = whole.removeprefix(prompt)
    return written if written.rfind(THOUGHT[0]) > written.rfind(THOUGHT[1]) else ""
