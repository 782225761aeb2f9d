"""What clients of an OpenAI-compatible server send: a chat, as a document and a question about it.

Holds: `taken`, `ChatRequest` (the body of /v1/chat/completions), `Inquiry`, `Refused`. Leaves out:
HTTP (commands/serve.py), forms of files (tasks/forms.py). No torch.
Exercise it: `pytest tests/tasks/test_chat_requests.py`. Read next: commands/serve.py.

    system, user, assistant ..        the document: everything before the last question
    user    [file, text, text]        files and all but the last text belong to it as well
                          └─────────  the question
"""

from __future__ import annotations

import base64
import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote_to_bytes

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config.errors import UserError, clip
from tasks.documents import Document, Part, together
from tasks.forms import Contents, contents

LONGEST_QUESTION, LINE = 2000, 300
"""Characters of a question, and of a short one. Of a longer message a part is the question."""
BREAK = re.compile(r"\n\s*\n|\n(?=[ \t]*(?:</?\w|```|\"{3}|---|===))")
"""Where a paragraph ends: at a blank line, or before a mark around a text, as in `<document>`."""
ASKS = re.compile(r"\?(?!\w)|[？؟]")
CHAT = "the conversation"  # what messages are part of, beside files by name
GZIP = b"\x1f\x8b"
MOST = 100_000
"""Most messages, and most parts of one."""
MOST_STOPS = 64
MOST_VALUES = 10 * MOST
"""Most values of a body: what is none of them takes memory too, 300 bytes each."""
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # also one that does not end


class Refused(Exception):
    """A request that is not answered, as OpenAI's protocol says it: param names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class File(_Model):
    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class ContentPart(File):
    """A part; a file stands in it, as /v1/responses has it, or in its `file`."""

    type: str
    text: str | None = None
    refusal: str | None = None
    file: File | None = None


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MOST)] | None = (
        None
    )


class StreamOptions(_Model):
    include_usage: bool | None = None


UNSUPPORTED = {
    "one answer is given": ("n",),
    "the answer is text": ("tools", "functions", "response_format", "modalities", "audio"),
    "log-probs are not returned": ("logprobs", "top_logprobs"),
    "tokens are weighed by the model alone": (
        "presence_penalty", "frequency_penalty", "logit_bias",
    ),
}  # fmt: skip
"""Why some fields, which would change the answer, may hold nothing but `USUAL`, or what is 0."""
USUAL = {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
Tokens = Annotated[int, Field(ge=1, le=10**6)]


class ChatRequest(_Model):
    """The body of a request; fields that change nothing here are taken and not heeded."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST)]
    model: str | None = Field(None, max_length=500)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    response_format: dict | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list | None = None
    tool_choice: object = None
    functions: list | None = None
    function_call: object = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict | None = None
    modalities: list | None = None
    audio: dict | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Read a body; Refused, with the field, for whatever is no request that is answered."""
        body = body.removeprefix(codecs.BOM_UTF8)
        if len(body) > MOST_VALUES:  # by less than two bytes a value there is none
            bare = STRING.sub(b"", body)
            if sum(map(bare.count, (b",", b"[", b"{"))) > MOST_VALUES:
                raise Refused(f"The body has more than {MOST_VALUES:,} values.")
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(at) for at in first["loc"] if at not in ("str", "list"))
            what = clip(f"{where}: {first['msg']}" if where else first["msg"], 300)
            raise Refused(f"{what}.", where or None) from None
        except RecursionError:
            raise Refused("The body is nested too deep.") from None
        request._check()
        return request

    def _check(self) -> None:
        """Refuse what would have to be done and is not."""
        idle = {"tools": self.tool_choice == "none", "functions": self.function_call == "none"}
        for why, param in ((why, name) for why, names in UNSUPPORTED.items() for name in names):
            value = getattr(self, param)
            if value and value != USUAL.get(param) and not idle.get(param):
                raise Refused(f"{param} is not supported: {why}.", param, "unsupported_parameter")

    @property
    def most_tokens(self) -> int | None:
        """Return the most tokens of the answer that the client wants."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Return the strings at which the answer ends."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    def cut(self, answer: str) -> str:
        """Return an answer up to the first of the strings at which it ends."""
        found = [at for stop in self.stops if (at := answer.find(stop)) >= 0]
        return answer[: min(found)] if found else answer


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A document and the question about it."""

    document: Document
    question: str
    source: str = ""  # what was taken for the question, where that was to be chosen

    @classmethod
    def from_chat(cls, request: ChatRequest) -> Inquiry:
        """Take a chat apart; Refused for what cannot be read, in the reader's own words."""
        messages = request.messages
        at = f"messages.{len(messages) - 1}"
        if messages[-1].role != "user":
            raise Refused(
                f"The last message is the {messages[-1].role}'s: it must be a question.", at
            )
        pieces = [_parts(message, f"messages.{i}") for i, message in enumerate(messages)]
        question, source = _question(messages, pieces, at)
        return cls(_document(messages, pieces), question, source)


def taken(body: bytes, model: str) -> tuple[ChatRequest, Inquiry]:
    """Read a body to its end, files included; Refused as by `ChatRequest.parse` and
    `Inquiry.from_chat`.

    For a child process (tasks/limited.py): of the chat nothing comes back but the inquiry.
    """
    request = ChatRequest.parse(body)
    if request.model and request.model != model:
        known = f"The model {clip(request.model, 100)!r} is not served: {model} is."
        raise Refused(known, "model", "model_not_found")
    inquiry = Inquiry.from_chat(request)
    return request.model_copy(update={"messages": []}), inquiry


def _parts(message: Message, at: str) -> list[tuple[Contents | None, str]]:
    """Return the texts of a message, and its files as they were read."""
    if message.content is None:
        return []
    if isinstance(message.content, str):
        return [(None, message.content)]
    return [_part(part, f"{at}.content.{k}") for k, part in enumerate(message.content)]


def _part(part: ContentPart, at: str) -> tuple[Contents | None, str]:
    words = part.refusal if part.type == "refusal" else part.text
    if part.type in ("text", "input_text", "output_text", "refusal") and words is not None:
        return None, words
    if part.type in ("file", "input_file"):
        file, at = (part.file, f"{at}.file") if part.file else (part, at)
        name = file.filename or "file"
        return _file(file, name, at), name
    raise Refused(
        f"A part of the type {clip(part.type, 50)!r} is not read: give text or a file with "
        "file_data.",
        at,
    )


def _file(file: File, name: str, at: str) -> Contents:
    if file.file_data is None:
        raise Refused("This server keeps and fetches no files: send their file_data.", at)
    try:
        content = _decoded(file.file_data)
        if content.startswith(GZIP):
            raise UserError(f"{name} is compressed: send it as it is.")
        return contents(content, name)
    except UserError as error:
        raise Refused(str(error), f"{at}.file_data") from None


def _decoded(data: str) -> bytes:
    """Return the bytes of a data URL or of base64, broken into lines, url-safe or unpadded as it
    may be. A text in the charset that a URL names becomes UTF-8. UserError: it is none of these."""
    from webencodings import decode

    head, comma, rest = data.partition(",")
    kind, *how = head.lower().split(";") if comma else [""]
    in_url = kind.startswith("data:")
    try:
        if in_url and "base64" not in how:
            content = unquote_to_bytes(rest)
        else:
            data = unquote_to_bytes(rest).decode() if in_url else data
            plain = re.sub(r"[\s=]+", "", data).translate({ord("-"): "+", ord("_"): "/"})
            content = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        raise UserError("file_data is not in base64.") from None
    named = [word.partition("=")[2].strip("\"' ") for word in how if "charset=" in word]
    if not kind.startswith("data:text/") or not named:
        return content
    try:  # with a mark, which outdoes what a page says of itself
        return codecs.BOM_UTF8 + decode(content, named[0], "strict")[0].encode()
    except (LookupError, UnicodeError):
        raise UserError(f"file_data is no text in the charset {clip(named[0], 50)!r}.") from None


def _question(messages: Sequence[Message], pieces: Sequence[list], at: str) -> tuple[str, str]:
    """Take the question out of the pieces; return it, and where it stood if that was chosen.

    It is the last message's last text. If that is long: its last paragraph, the message's first,
    or the message before, whichever has a question mark (the first also a colon at its end), else
    whichever is short, and of those alike the one that is named first here.
    """
    last = pieces[-1]
    texts = [k for k, (file, text) in enumerate(last) if file is None and text.strip()]
    if not texts:
        raise Refused("The last message holds no question.", at)
    first, final = last[texts[0]][1], last[texts[-1]][1]
    if len(final.strip()) <= LONGEST_QUESTION:
        last[texts[-1]] = None, ""
        return final.strip(), ""
    found = [  # where it stands, its message's pieces, which of them, the question, what is left
        ("the last paragraph", last, texts[-1], *_cut(final, -1)),
        ("the first paragraph", last, texts[0], *_cut(first, 0)),
    ]
    if messages[:-1] and messages[-2].role in ("system", "developer", "user"):
        texts = [(k, text) for k, (file, text) in enumerate(pieces[-2]) if not file]
        found += [("the message before", pieces[-2], *t, "") for t in texts if ASKS.search(t[1])]
    ranked = {}
    for where, among, k, words, rest in found:
        if len(words) <= LONGEST_QUESTION and re.search(r"\w", re.sub(r"<[^>]*>", "", words)):
            colon = where == "the first paragraph" and words.endswith((":", "："))
            rank = bool(ASKS.search(words) or colon), len(words) <= LINE
            ranked.setdefault(rank, []).append((where, among, k, words, rest))
    if not ranked:
        raise Refused(
            f"The last message has {len(final):,} characters and no short paragraph at either end: "
            "put the question into a paragraph, a part or a message of its own.",
            at,
        )
    (where, among, k, words, rest), *alike = ranked[max(ranked)]
    among[k] = None, rest
    return words, where + "".join(f", though {other[0]} could be it" for other in alike)


def _cut(text: str, at: int) -> tuple[str, str]:
    """Take off a text's first (at = 0) or last (-1) paragraph, or line; return it and the rest."""
    text = text.strip()
    near = text[:LONGEST_QUESTION] if at == 0 else text[-LONGEST_QUESTION:]
    cuts = [*BREAK.finditer(near)] or [*re.finditer("\n", near)]
    if len(text) <= LONGEST_QUESTION or not cuts:
        return text, ""
    start, end = cuts[at].span()
    if at == 0:
        return text[:start].rstrip(), text[end:]
    return near[end:].lstrip(), text[: start - len(near)]


def _document(messages: Sequence[Message], pieces: Sequence[list]) -> Document:
    """Put together what stands beside the question: texts by message, files by name."""
    speakers = any(message.role in ("assistant", "tool", "function") for message in messages)
    found: list[tuple[Path, int, Contents]] = []
    for path, content in _contents(messages, pieces, speakers):
        last = found[-1] if found else None
        if last and last[0] == path and content.kind == last[2].kind == "message":
            last[2].pieces.extend(content.pieces)
        else:
            found.append((path, 1, content))
    if not found:
        return Document("", (Part(0, CHAT, "message", 1),), CHAT)
    return together(found, [content.remark for _, _, content in found if content.remark])


def _contents(
    messages: Sequence[Message], pieces: Sequence[list], speakers: bool
) -> Iterator[tuple[Path, Contents]]:
    """Yield files and texts in order, a text with its speaker where there are several."""
    for number, (message, parts) in enumerate(zip(messages, pieces, strict=True), 1):
        for file, text in parts:
            if file is not None:
                yield Path(Path(text).name or "file"), file
            elif text.strip():
                who = f"{message.role.capitalize()}: " if speakers else ""
                yield Path(CHAT), Contents("message", [(f"{who}{text}", number, "")])
