"""What clients of an OpenAI-compatible server send: a chat, as a document and a question about it.

system, user, assistant ..        the document: everything before the last question
user    [file, text, text]        files and all but the last text belong to it as well
                      └─────────  the question
"""

from __future__ import annotations

import base64
import codecs
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, unquote_to_bytes

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config.errors import UserError, clean, clip
from tasks.documents import Document, together
from tasks.forms import Contents, contents

LONGEST_QUESTION, SHORT = 2000, 300
"""Characters of a question, and of one that is likelier than a paragraph of a text."""
BREAK = re.compile(r"\n\s*\n|\n(?=</?\w|```)")
"""Where a paragraph ends: at a blank line, or before a mark around a text, as in `<document>`."""
MOST, MOST_STOPS = 100_000, 64
"""Most messages, and most parts of one; most strings at which an answer ends."""
UNSUPPORTED = (
    "tools", "functions", "response_format", "modalities", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "logit_bias", "n",
)  # fmt: skip
"""Fields that would change the answer: they may hold nothing but `USUAL`, or what is 0 or empty."""
USUAL = {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]}


class Refused(Exception):
    """A request that is not answered: its HTTP status, OpenAI's code, and the field in question."""

    def __init__(self, message: str, param: str | None = None, code=None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def plain(self) -> dict:
        """Return it in OpenAI's form."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": clip(clean(self), 1000), "type": kinds.get(self.status, kind)}
        return {"error": error | {"param": self.param, "code": self.code}}


# ---------------------------------------------------------------- the body


class _Model(BaseModel):
    model_config = ConfigDict(strict=True)


class File(_Model):
    file_data: str | None = None
    filename: str | None = None


class Part(File):
    """A part of a message; a file stands in it, as /v1/responses has it, or in its `file`."""

    type: str
    text: str | None = None
    file: File | None = None


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MOST)] | None = None

    def parts(self) -> list[Part]:
        whole = isinstance(self.content, str)
        return [Part(type="text", text=self.content)] if whole else self.content or []


class StreamOptions(_Model):
    include_usage: bool | None = None


Tokens = Annotated[int, Field(ge=1, le=10**6)]


class ChatRequest(_Model):
    """What of a request is heeded; other fields change nothing here, or are refused."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST)]
    model: str | None = Field(None, max_length=500)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Read a body; Refused, with the field, for whatever is no request that is answered."""
        try:
            request = cls.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(at) for at in first["loc"] if at not in ("str", "list"))
            what = clip(f"{where}: {first['msg']}".removeprefix(": "), 300)
            raise Refused(f"{what}.", where or None) from None
        others = request.model_extra
        if others.get("tool_choice") == "none":
            others.pop("tools", None)
        for name in UNSUPPORTED:
            if others.get(name) not in (None, 0, [], {}, USUAL.get(name)):
                why = "one answer is given, a text without log-probs, by the model alone"
                raise Refused(f"{name} is not supported: {why}.", name, "unsupported_parameter")
        others.clear()
        return request

    def cut(self, answer: str) -> str:
        """Return an answer up to the first of the strings at which it ends."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        found = [answer.find(stop) for stop in stops if stop]
        return answer[: min((at for at in found if at >= 0), default=None)]


# ---------------------------------------------------------------- the question


@dataclass(slots=True)
class Piece:
    """A text of a message, or a file as it was read; the question is taken out of the text."""

    message: int
    role: str
    text: str
    file: Contents | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A document and the question about it."""

    document: Document
    question: str
    source: str = ""  # what was taken for the question, where that was to be chosen

    @classmethod
    def from_chat(cls, request: ChatRequest) -> Inquiry:
        """Take a chat apart; Refused for what cannot be read, in the reader's own words."""
        messages, roles = request.messages, {message.role for message in request.messages}
        if (role := messages[-1].role) != "user":
            at = f"messages.{len(messages) - 1}"
            raise Refused(f"The last message is the {role}'s: it must be a question.", at)
        pieces = [
            _piece(part, number, message.role, f"messages.{number - 1}.content.{k}")
            for number, message in enumerate(messages, 1)
            for k, part in enumerate(message.parts())
        ]
        pieces = [piece for piece in pieces if piece.file or piece.text.strip()]
        question, source = _question(pieces, len(messages))
        return cls(_document(pieces, roles), question, source)


def _piece(part: Part, message: int, role: str, at: str) -> Piece:
    if part.type in ("text", "input_text", "output_text") and part.text is not None:
        return Piece(message, role, part.text)
    file = part.file or part
    if file.file_data is None:
        kind = clip(part.type, 50)
        why = f"A part of the type {kind!r} is not read: give text or a file with file_data."
        raise Refused(why, at)
    name = file.filename or "file"
    try:
        found = contents(_decoded(file.file_data), name)
    except UserError as error:
        raise Refused(str(error), f"{at}.file_data") from None
    return Piece(message, role, "", found, Path(name).name or "file")


def _decoded(data: str) -> bytes:
    """Return the bytes of a data URL or of base64, in lines, url-safe or unpadded as it may be.
    UserError: it is neither."""
    head, _, content = data.partition(",")
    if head[:5].lower() == "data:":
        if not head.lower().endswith(";base64"):
            return unquote_to_bytes(content)
        data = unquote(content)
    data = "".join(data.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except ValueError:
        raise UserError("file_data is not in base64.") from None


def _question(pieces: list[Piece], last: int) -> tuple[str, str]:
    """Take the question out of the pieces; return it, and where it stood if that was chosen.

    It is the last text of the last message. Of one that is long, or that alone holds the text, it
    is the last paragraph or, where that one is likelier, the first.
    """
    at = f"messages.{last - 1}"
    texts = [piece for piece in pieces if piece.message == last and not piece.file]
    if not texts:
        raise Refused("The last message holds no question.", at)
    final, source = texts[-1], ""
    question = final.text.strip()
    alone = all(piece is final or piece.role in ("system", "developer") for piece in pieces)
    if len(question) > LONGEST_QUESTION or (alone and _paragraph(question, -1) != question):
        question, source = _paragraph(question, -1), "the last paragraph"
        first = _paragraph(texts[0].text, 0)
        if _asks(first) > _asks(question):
            final, question, source = texts[0], first, "the first paragraph"
        if not _asks(question):
            why = "neither its last paragraph nor its first one can be a question"
            raise Refused(f"The last message is long, and {why}.", at)
    text = final.text.strip()
    at_end = source != "the first paragraph"
    final.text = (text.removesuffix(question) if at_end else text.removeprefix(question)).strip()
    if not any(piece.file or piece.text for piece in pieces):
        raise Refused("There is no text to read: send the text before the question.", at)
    return question, source


def _asks(words: str) -> int:
    """Return how likely words are a question: 0 for what is too long or a mark, 3 for what asks."""
    if len(words) > LONGEST_QUESTION or not re.sub(r"<[^>]*>|\W", "", words):
        return 0
    return 3 if re.search(r"\?(?!\w)|[？؟]|[:：]$", words) else 2 if len(words) <= SHORT else 1


def _paragraph(text: str, at: int) -> str:
    """Return a text's first (at = 0) or last (-1) paragraph, where there is none its line."""
    text = text.strip()  # of which no more is looked at: what is longer is no question
    text = text[: LONGEST_QUESTION + 1] if at == 0 else text[-LONGEST_QUESTION - 1 :]
    parts = BREAK.split(text)
    return (parts if len(parts) > 1 else text.split("\n"))[at].strip()


def _document(pieces: list[Piece], roles: set[str]) -> Document:
    """Put together what stands beside the question: texts by message, files by name; a text with
    its speaker where there are several."""
    several = roles - {"system", "developer", "user"}
    chat, found = Path("the conversation"), []
    for piece in pieces:
        if piece.file:
            found.append((Path(piece.name), 1, piece.file))
        elif piece.text:
            if not found or found[-1][0] != chat:  # texts without a file between them
                found.append((chat, 1, Contents("message", [])))
            who = f"{piece.role.capitalize()}: " if several else ""
            found[-1][2].pieces.append((f"{who}{piece.text}", piece.message, ""))
    return together(found, [file.remark for *_, file in found if file.remark])


# ---------------------------------------------------------------- in a child process


@dataclass(frozen=True, slots=True)
class Taken:
    """What a child process says of a body: the request and its inquiry, or what `Refused` holds."""

    request: ChatRequest | None = None
    inquiry: Inquiry | None = None
    refused: tuple[str, str | None, str | None, int] | None = None

    def opened(self) -> tuple[ChatRequest, Inquiry]:
        if self.refused:
            raise Refused(*self.refused)
        return self.request, self.inquiry


def unserved(name: str, model: str) -> Refused:
    """Return what is said of a model that a client names and a server does not have."""
    known = f"The model {clip(name, 100)!r} is not served: {model} is (serve --called names it)."
    return Refused(known, "model", "model_not_found", 404)


def taken(body: bytes, model: str) -> Taken:
    """Read a body to its end, files included: of the chat nothing comes back but the inquiry."""
    try:
        request = ChatRequest.parse(body)
        if request.model and request.model != model:
            raise unserved(request.model, model)
        inquiry = Inquiry.from_chat(request)
    except Refused as error:
        return Taken(refused=(str(error), error.param, error.code, error.status))
    return Taken(request.model_copy(update={"messages": [Message(role="user")]}), inquiry)
