"""What clients of an OpenAI-compatible server send: a chat, as a document and a question about it.

Holds: `taken`, `ChatRequest` (the body of /v1/chat/completions), `Asked`, `Refused`. Leaves out:
HTTP (commands/serve.py), forms of files (tasks/forms.py). No torch.
Exercise it: `pytest tests/tasks/test_chat_requests.py`. Read next: commands/serve.py.

    system, user, assistant ..        the document: everything before the last question
    user    [file, text, text]        files and all but the last text belong to it as well
                          └─────────  the question
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config.errors import UserError, clip
from tasks.documents import Document, Part, together
from tasks.forms import Contents, contents

LONGEST_QUESTION = 2000
"""Characters of a question. Of a longer message the last paragraph is the question."""
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


class ContentPart(_Model):
    type: str
    text: str | None = None
    file: File | None = None


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MOST)] | None = (
        None
    )


class StreamOptions(_Model):
    include_usage: bool = False


class ResponseFormat(_Model):
    type: str


Tokens = Annotated[int, Field(ge=1, le=10**6)]


class ChatRequest(_Model):
    """The body of a request; fields that change nothing here are taken and not heeded."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST)]
    model: str = Field(max_length=500)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    tools: list | None = None
    functions: list | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Read a body; Refused, with the field, for whatever is no request that is answered."""
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
        given = {
            "n": self.n not in (None, 1) and "one answer is given",
            "logprobs": self.logprobs and "log-probs are not returned",
            "tools": self.tools and "the answer is text, and no tools are called",
            "functions": self.functions and "the answer is text, and no functions are called",
            "response_format": self.response_format
            and self.response_format.type != "text"
            and "the answer is plain text",
        }
        for param, why in given.items():
            if why:
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
class Asked:
    """A document and the question about it."""

    document: Document
    question: str

    @classmethod
    def of(cls, request: ChatRequest) -> Asked:
        """Take a chat apart; Refused for what cannot be read, in the reader's own words."""
        *before, last = request.messages
        at = f"messages.{len(before)}"
        if last.role != "user":
            raise Refused(f"The last message is the {last.role}'s: it must be a question.", at)
        texts = [(None, last.content)] if isinstance(last.content, str) else _parts(last, at)
        k = max((k for k, (file, _) in enumerate(texts) if file is None), default=None)
        if k is None or not texts[k][1].strip():
            raise Refused("The last message holds no question.", at)
        rest, question = _split(texts[k][1], at)
        texts[k] = (None, rest)
        said = [_parts(m, f"messages.{i}") for i, m in enumerate(before)] + [texts]
        return cls(_document(request.messages, said), question)


def taken(body: bytes, model: str) -> tuple[ChatRequest, Asked]:
    """Read a body to its end, files included; Refused as by `ChatRequest.parse` and `Asked.of`.

    For a child process (tasks/limited.py): of the chat nothing comes back but what is asked.
    """
    request = ChatRequest.parse(body)
    if request.model != model:
        known = f"The model {clip(request.model, 100)!r} is not served: {model} is."
        raise Refused(known, "model", "model_not_found")
    asked = Asked.of(request)
    return request.model_copy(update={"messages": []}), asked


def _parts(message: Message, at: str) -> list[tuple[Contents | None, str]]:
    """Return the texts of a message, and its files as they were read."""
    if message.content is None:
        return []
    if isinstance(message.content, str):
        return [(None, message.content)]
    return [_part(part, f"{at}.content.{k}") for k, part in enumerate(message.content)]


def _part(part: ContentPart, at: str) -> tuple[Contents | None, str]:
    if part.type in ("text", "input_text") and part.text is not None:
        return None, part.text
    if part.type in ("file", "input_file") and part.file is not None:
        name = part.file.filename or "file"
        return _file(part.file, name, f"{at}.file"), name
    raise Refused(
        f"A part of the type {clip(part.type, 50)!r} is not read: give text or a file with "
        "file_data.",
        at,
    )


def _file(file: File, name: str, at: str) -> Contents:
    if file.file_data is None:
        raise Refused("This server keeps no files: send file_data instead of file_id.", at)
    head, comma, data = file.file_data.partition(",")
    encoded = data if comma and head.startswith("data:") else file.file_data
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise Refused("file_data is not in base64.", f"{at}.file_data") from None
    if content.startswith(GZIP):
        raise Refused(f"{name} is compressed: send it as it is.", f"{at}.file_data")
    try:
        return contents(content, name)
    except UserError as error:
        raise Refused(str(error), f"{at}.file_data") from None


def _split(text: str, at: str) -> tuple[str, str]:
    """Take a message apart: a short one is a question; of a long one the last paragraph is."""
    if len(text) <= LONGEST_QUESTION:
        return "", text.strip()
    rest, _, question = text.rstrip().rpartition("\n\n")
    if not rest.strip() or len(question) > LONGEST_QUESTION:
        raise Refused(
            f"The last message has {len(text):,} characters and ends in no short paragraph: put "
            "the question into a paragraph, a part or a message of its own.",
            at,
        )
    return rest, question.strip()


def _document(messages: Sequence[Message], said: Sequence[list]) -> Document:
    """Put together what was said before the question: texts by message, files by name."""
    speakers = any(message.role in ("assistant", "tool") for message in messages)
    found: list[tuple[Path, int, Contents]] = []
    for path, content in _pieces(messages, said, speakers):
        last = found[-1] if found else None
        if last and last[0] == path and content.kind == last[2].kind == "message":
            last[2].pieces.extend(content.pieces)
        else:
            found.append((path, 1, content))
    if not found:
        return Document("", (Part(0, CHAT, "message", 1),), CHAT)
    return together(found, [content.remark for _, _, content in found if content.remark])


def _pieces(
    messages: Sequence[Message], said: Sequence[list], speakers: bool
) -> Iterator[tuple[Path, Contents]]:
    """Yield files and texts in order; a text is told who has said it where several have."""
    for number, (message, parts) in enumerate(zip(messages, said, strict=True), 1):
        for file, text in parts:
            if file is not None:
                yield Path(Path(text).name or "file"), file
            elif text.strip():
                who = f"{message.role.capitalize()}: " if speakers else ""
                yield Path(CHAT), Contents("message", [(f"{who}{text}", number, "")])
