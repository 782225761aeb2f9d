"""What clients of an OpenAI-compatible server send: a chat, as a text and a question about it.

system, user, assistant ..        the text: everything before the last question
user    [file, text, text]        files and all but the last text belong to it as well
                      └─────────  the question, or a text with its question before or behind it
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

from config.errors import UserError, clip
from tasks.documents import together
from tasks.forms import Contents, contents

MOST, MOST_STOPS = 100_000, 64
"""Most messages, and most parts of one; most strings at which an answer ends."""
UNSUPPORTED = (
    "tools", "functions", "response_format", "modalities", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "logit_bias", "n",
)  # fmt: skip
"""Fields that would change the answer: they may hold nothing but `USUAL`, or what is 0 or empty."""
USUAL = {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
NO_TEXT = (
    "There is no text to read: send a text and a question about it, as two messages or as one with "
    "a blank line between them, or attach a file."
)


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
        """Read a body. UserError, with the field, for whatever is no request that is answered."""
        try:
            request = cls.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(at) for at in first["loc"] if at not in ("str", "list"))
            what = f"{where}: {first['msg']}".removeprefix(": ")
            raise UserError(f"{clip(what, 300)}.") from None
        others = request.model_extra
        if others.get("tool_choice") == "none":
            others.pop("tools", None)
        for name in UNSUPPORTED:
            if others.get(name) not in (None, 0, [], {}, USUAL.get(name)):
                why = "one answer is given, a text without log-probs, by the model alone"
                raise UserError(f"{name} is not supported: {why}.")
        others.clear()
        return request

    def cut(self, answer: str) -> str:
        """Return an answer up to the first of the strings at which it ends."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        found = [answer.find(stop) for stop in stops if stop]
        return answer[: min((at for at in found if at >= 0), default=None)]


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A request whose chat is a text and a question about it."""

    request: ChatRequest  # without its messages
    text: str
    question: str
    source: str = ""  # what was taken for the question, where that was to be chosen
    remarks: tuple[str, ...] = ()  # on what of the files was not read


def read_request(body: bytes) -> Inquiry:
    """Read a body to its end, files included. UserError for what cannot be read."""
    request = ChatRequest.parse(body)
    messages, roles = request.messages, {message.role for message in request.messages}
    if (role := messages[-1].role) != "user":
        raise UserError(f"The last message is the {role}'s: it must be a question.")
    pieces = [
        _piece(part, number, message.role)
        for number, message in enumerate(messages, 1)
        for part in message.parts()
    ]
    question, source = take_question([p for p in pieces if p.file or p.text.strip()], len(messages))
    several = roles - {"system", "developer", "user"}
    found = []
    for piece in pieces:
        if piece.file:
            found.append((Path(piece.name), 1, piece.file))
        elif piece.text.strip():
            who = f"{piece.role.capitalize()}: " if several else ""
            said = Contents("message", [(f"{who}{piece.text}", piece.message, "")])
            found.append((Path("the conversation"), 1, said))
    document = together(found, [file.remark for *_, file in found if file.remark])
    request = request.model_copy(update={"messages": [Message(role="user")]})
    return Inquiry(request, document.text, question, source, document.remarks)


@dataclass(slots=True)
class Piece:
    """A text of a message, or a file as it was read; the question is taken out of the text."""

    message: int
    role: str
    text: str
    file: Contents | None = None
    name: str = ""


def _piece(part: Part, message: int, role: str) -> Piece:
    if part.type in ("text", "input_text", "output_text") and part.text is not None:
        return Piece(message, role, part.text)
    file = part.file or part
    if file.file_data is None:
        kind = clip(part.type, 50)
        raise UserError(
            f"A part of the type {kind!r} is not read: give text or a file with file_data."
        )
    name = Path(file.filename or "file").name or "file"
    return Piece(message, role, "", contents(_decode(file.file_data), name), name)


def _decode(data: str) -> bytes:
    """Return the bytes of a data URL or of base64, in lines, url-safe or unpadded as it may be."""
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


# ---------------------------------------------------------------- the question

LONGEST, SHORT, BESIDE = 2000, 300, 6
"""Characters of a question, and of one that is likelier than a paragraph of a text; words of a
text on one line with its question."""
BREAK = re.compile(
    r"\n\s*\n|\n(?=</?\w|```|\"\"\"|[-=]{3,}\n)|(?<=\n)(?:```|\"\"\"|[-=]{3,})\n|"
    r"(?<=>)\n|(?:(?<=</context>)|(?<=</document>)|(?<=</text>))\s*"
)
"""Where a paragraph ends: at a blank line, a line drawn, or a mark around a text, as <document>."""
SENTENCE = re.compile(r"(?<=[.!?。！？])\s+")
TAGGED = re.compile(r"<(user_query|user_question|question|query|frage)>(.*?)</\1>", re.I | re.S)
LABEL = re.compile(
    r"^(?:[#*\- ]*(?:(?:the|user|my|user's) )?(?:question|query|frage|q)\**: *\**|"
    r"#+ *(?:question|query|frage) *\n)\s*", re.I | re.M
)  # fmt: skip
WRAP = re.compile(r"<(\w+)[^<>]*>(.*)</\1>", re.S)
"""A mark around a whole text, which is none of it."""
TEXT = re.compile(r"\n\W*(?:text|context|document|article|passage|kontext|dokument)\W*[:\n]", re.I)
ANSWERED = re.compile(r"\n\W*(?:a|answer|antwort)\W*:\s*\S", re.I)
CUE = re.compile(
    r"\n[^\w\n]{0,8}(?:\w+ )?(?:answer|antwort|response|a)[*_ ]{0,4}:[*_\s]{0,8}$", re.I
)
"""A last line behind which the answer is to stand, as "Helpful Answer:"."""
ASKS = re.compile(
    r"\W*(?:who|whom|whose|what|when|where|why|which|how|tell|name|find|list|give|explain|describe|"
    r"summari[sz]e|sum up|extract|translate|compare|identify|please|wer|wen|wem|was|wann|wo|wohin|"
    r"woher|warum|welche[rsn]?|wie|nenne|fasse)\b", re.I
)  # fmt: skip
INSTRUCTS = re.compile(
    r"[-*#\d]|\W*(?:you (?:are|act|will|must|should)|you're|act as|be|answer|respond|reply|always|"
    r"never|don't|do not|use|your|today is|(?:the )?current date|du bist|sie sind)\b", re.I
)  # fmt: skip
SPARE = r"(?:title|tags?|follow-?ups?|emoji|quer(?:y|ies))\b"
CHAT = r"(?:chat|conver|session|dialog)"
BACKGROUND = re.compile(
    r"### task:.{0,6000}?(?:<chat_history>|autocompletion system)|.{0,200}?\b"
    r"(?:generate|suggest|create|provide|write|summari[sz]e)\b[^.]{0,80}?\b"
    rf"(?:{SPARE}.{{0,160}}?\b{CHAT}|{CHAT}[^.]{{0,80}}?\b{SPARE})", re.I | re.S
)  # fmt: skip
"""What a chat client asks unseen: the title of a chat, its tags, further questions."""


def take_question(pieces: list[Piece], last: int) -> tuple[str, str]:
    """Take the question out of the pieces; return it, and where it stood if that was chosen.

    It is the last text of the last message. Of one that is long, or that alone holds the text, it
    is a part. UserError: there is no question, or no text.
    """
    texts = [piece for piece in pieces if piece.message == last and not piece.file]
    if not texts:
        raise UserError("The last message holds no question.")
    final, source = texts[-1], ""
    if _likely(texts[0].text) > _likely(final.text):
        final, source = texts[0], "the first part"
    question, final.text = final.text.strip(), ""
    others = [piece for piece in pieces if piece is not final]
    alone = all(piece.role in ("system", "developer") and not piece.file for piece in others)
    if alone and any(BACKGROUND.match(text) for text in (question, *(p.text for p in others))):
        raise UserError(NO_TEXT)
    if not source and (alone or len(question) > SHORT):
        found = split(question)
        if found and (alone or _likely(found[0]) > 2 or len(question) > LONGEST):
            question, final.text, source = found
    if len(question) > LONGEST:
        why = "neither its last paragraph nor its first one can be a question"
        raise UserError(f"The last message is long, and {why}.")
    if (wrap := WRAP.fullmatch(final.text)) and f"<{wrap[1]}" not in wrap[2]:
        final.text = wrap[2].strip()
    if all(map(_instructs, others)) and len(re.findall(r"\w", final.text[:99])) < 12:
        raise UserError(NO_TEXT)
    return question, source


def _instructs(piece: Piece) -> bool:
    """Tell whether a piece only says how to answer, as the system's text of most clients."""
    if piece.file or piece.role not in ("system", "developer") or len(piece.text) > 2 * LONGEST:
        return False
    return all(INSTRUCTS.match(part) for part in BREAK.split(piece.text) if part.strip())


def split(text: str) -> tuple[str, str, str] | None:
    """Return the question in a text, the rest, and where it stood; None if nothing can be one.

    What is marked by <question> or "Question:" goes before paragraphs, and these before sentences.
    Of what is long no more is looked at than a question's length at either end.
    """
    text = CUE.sub("", text).rstrip()
    head, tail = text[: LONGEST + 99], text[-LONGEST - 99 :]
    ends = (tail, len(text) - len(tail)), (head, 0)
    for part, start in ends:
        for tag in [*TAGGED.finditer(part)][-1:]:
            rest = f"{text[: start + tag.start()]}\n\n{text[start + tag.end() :]}"
            return tag[2].strip(), rest.strip(), "the tagged words"
    for part, start in ends:
        for label in [*LABEL.finditer(part)][-1:] if part is tail else [LABEL.match(head)]:
            if not label or ANSWERED.search(part[label.end() :][:SHORT]):
                continue
            before, words = text[: start + label.start()].strip(), text[start + label.end() :]
            end = TEXT.search(words) if before else re.search(r"\n", words)
            question = words[: end.start()] if end else words
            if question.strip() and (before or end):
                rest = f"{before}{words[len(question) :]}".strip()
                return question.strip(), rest, "the words called so"
    kind, first, last = "paragraph", _paragraph(head, 0), _paragraph(tail, -1)
    if (first, last) == (head.strip(), tail.strip()):  # there is one paragraph
        kind, first, last = "sentence", SENTENCE.split(head)[0], SENTENCE.split(tail)[-1]
    place, question = max(("last", last), ("first", first), key=lambda item: _likely(item[1]))
    rest = text.removesuffix(last) if place == "last" else text.removeprefix(first)
    # of sentences nothing but a mark tells a question
    enough = _likely(question) == 4 and len(rest.split()) >= BESIDE if kind == "sentence" else True
    if not _likely(question) or not enough:
        return None
    return question, rest.strip(), f"the {place} {kind}"


def _likely(words: str) -> int:
    """Return how likely words are a question: 0 for what is too long, a mark or a heading, 4 for
    what ends as one."""
    words = words.strip()
    is_mark = not re.sub(r"<[^>]*>|\W", "", words)
    if len(words) > LONGEST or is_mark or TEXT.fullmatch(f"\n{words}\n"):
        return 0
    if re.search(r"[?？؟:：]\W*$", words):
        return 4
    asks = ASKS.match(words) or re.search(r"\?(?!\w)|[？؟]", words)
    return 3 if asks else 2 if len(words) <= SHORT else 1


def _paragraph(text: str, at: int) -> str:
    """Return a text's first (at = 0) or last (-1) paragraph, or its line there that asks."""
    parts = BREAK.split(text)
    part = parts[at].strip()
    line = part.split("\n")[at].strip()
    return line if len(parts) == 1 or _likely(line) == 4 else part
