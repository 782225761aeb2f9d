"""What clients of an OpenAI-compatible server send: a chat, as a document and a question about it.

system, user, assistant ..        the document: everything before the last question
user    [file, text, text]        files and all but the last text belong to it as well
                      └─────────  the question
"""

from __future__ import annotations

import base64
import codecs
import re
from collections.abc import Sequence
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
BREAK = r"\n\s*\n|\n(?=</?\w|```)"
"""Where a paragraph ends: at a blank line, or before a mark around a text, as in `<document>`."""
ASKS = re.compile(r"\?(?!\w)|[？؟]")
LAST, FIRST = "the last paragraph", "the first paragraph"
CHAT = "the conversation"  # what messages are part of, beside files by name
MOST, MOST_STOPS = 100_000, 64
"""Most messages, and most parts of one; most strings at which an answer ends."""
ASKING = ("system", "developer", "user")  # roles of messages that may hold the question


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


UNSUPPORTED = (
    "tools", "functions", "response_format", "modalities", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "logit_bias", "n",
)  # fmt: skip
"""Fields that would change the answer: they may hold nothing but `USUAL`, or what is 0 or empty."""
USUAL = {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
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
            what = clip(f"{where}: {first['msg']}" if where else first["msg"], 300)
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
        if (role := messages[-1].role) != "user":
            raise Refused(f"The last message is the {role}'s: it must be a question.", at)
        pieces = [_pieces(message, f"messages.{i}") for i, message in enumerate(messages)]
        question, source = _question(messages, pieces, at)
        return cls(_document(messages, pieces), question, source)


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
    """Read a body to its end, files included; refused as by `ChatRequest.parse` and
    `Inquiry.from_chat`.

    For a child process (tasks/limited.py): of the chat nothing comes back but the inquiry.
    """
    try:
        request = ChatRequest.parse(body)
        if request.model and request.model != model:
            raise unserved(request.model, model)
        inquiry = Inquiry.from_chat(request)
    except Refused as error:
        return Taken(refused=(str(error), error.param, error.code, error.status))
    return Taken(request.model_copy(update={"messages": [Message(role="user")]}), inquiry)


@dataclass(slots=True)
class Piece:
    """A text of a message, or a file as it was read; the question is taken out of the text."""

    text: str
    file: Contents | None = None
    name: str = ""


def _pieces(message: Message, at: str) -> list[Piece]:
    if isinstance(message.content, str):
        return [Piece(message.content)]
    return [_piece(part, f"{at}.content.{k}") for k, part in enumerate(message.content or ())]


def _piece(part: ContentPart, at: str) -> Piece:
    words = part.refusal if part.text is None else part.text
    if part.type in ("text", "input_text", "output_text", "refusal") and words is not None:
        return Piece(words)
    if part.type not in ("file", "input_file"):
        kind = clip(part.type, 50)
        raise Refused(
            f"A part of the type {kind!r} is not read: give text or a file with file_data.", at
        )
    file, at = (part.file, f"{at}.file") if part.file else (part, at)
    if file.file_data is None:
        raise Refused("This server keeps and fetches no files: send their file_data.", at)
    name = file.filename or "file"
    try:
        return Piece("", contents(_decoded(file.file_data), name), Path(name).name or "file")
    except UserError as error:
        raise Refused(str(error), f"{at}.file_data") from None


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


def _question(messages: Sequence[Message], pieces: list[list[Piece]], at: str) -> tuple[str, str]:
    """Take the question out of the pieces; return it, and where it stood if that was chosen."""
    texts = [piece for piece in pieces[-1] if piece.text.strip()]
    if not texts:
        raise Refused("The last message holds no question.", at)
    first, final = texts[0], texts[-1]
    others = [
        piece
        for message, own in zip(messages, pieces, strict=True)
        for piece in own
        if message.role not in ("system", "developer") and piece is not final
        if piece.file or piece.text.strip()
    ]
    question, source = final.text.strip(), ""
    if len(question) > LONGEST_QUESTION or (not others and _paragraph(question, -1) != question):
        asking = pieces[-2] if messages[1:] and messages[-2].role in ASKING else []
        places = [
            (LAST, final, _paragraph(final.text, -1)),
            (FIRST, first, _paragraph(first.text, 0)),
            *(("the message before", p, p.text.strip()) for p in asking if ASKS.search(p.text)),
        ]
        places = [place for place in places if _may_ask(place[-1])]
        if not places:
            raise Refused(
                f"The last message has {len(final.text):,} characters and no short paragraph at "
                "either end: put the question into a paragraph, a part or a message of its own.",
                at,
            )
        asked = [p for p in places if ASKS.search(p[-1]) or (p[0] == FIRST and p[-1][-1] in ":：")]
        short = [place for place in places if len(place[-1]) <= SHORT]
        source, final, question = (asked or short or places)[0]
    text = final.text.strip()
    rest = text.removeprefix(question) if source == FIRST else text.removesuffix(question)
    final.text = rest.strip()
    if not any(piece.file or piece.text.strip() for own in pieces for piece in own):
        raise Refused("There is no text to read: send the text before the question.", at)
    return question, source


def _may_ask(words: str) -> bool:
    """Tell whether words are short enough for a question, and more than a mark."""
    return len(words) <= LONGEST_QUESTION and bool(re.search(r"\w", re.sub("<[^>]*>", "", words)))


def _paragraph(text: str, at: int) -> str:
    """Return a text's first (at = 0) or last (-1) paragraph, where there is none its line."""
    text = text.strip()  # of which no more is looked at: what is longer is no question
    text = text[: LONGEST_QUESTION + 1] if at == 0 else text[-LONGEST_QUESTION - 1 :]
    parts = re.split(BREAK, text)
    return (parts if len(parts) > 1 else text.split("\n"))[at].strip()


def _document(messages: Sequence[Message], pieces: Sequence[Sequence[Piece]]) -> Document:
    """Put together what stands beside the question: texts by message, files by name; a text with
    its speaker where there are several."""
    speakers = any(message.role not in ASKING for message in messages)
    found: list[tuple[Path, int, Contents]] = []
    for number, message in enumerate(messages, 1):
        for piece in pieces[number - 1]:
            if piece.file:
                found.append((Path(piece.name), 1, piece.file))
            elif piece.text.strip():
                if not found or found[-1][0] != Path(CHAT):  # texts without a file between them
                    found.append((Path(CHAT), 1, Contents("message", [])))
                who = f"{message.role.capitalize()}: " if speakers else ""
                found[-1][2].pieces.append((f"{who}{piece.text}", number, ""))
    return together(found, [content.remark for _, _, content in found if content.remark])
