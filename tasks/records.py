"""Text as a person would read it: JSON without its escapes, notebooks, ChatGPT's export, subtitles.

Of other JSON the text as it stands is read, with its escapes decoded: numbers, fields and their
order are not touched. What is no JSON, such as JSON with comments, keeps its escapes.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from tasks.forms import Contents

DATA = re.compile(  # in JSON, slashes and line ends may be escaped; lines after the first are long
    r"data:(?P<kind>[\w.+/\\-]{0,160}+)(?:;[\w.=+%*-]{1,40}+){0,4};base64,"
    r"(?P<bits>(?:[\w+/=%-]|\\[/nr]){20,}+(?:\n[\w+/=-]{40,}+)*+)",
    re.ASCII,
)
# a value of JSON that is not said to be base64: longer than keys, with signs of all kinds
BASE64 = re.compile(
    r'"(?=[^"a-z]*+[a-z])(?=[^"A-Z]*+[A-Z])(?=[^"0-9]*+[0-9])(?P<bits>[\w+/=\r\n-]{1000,}+)"',
    re.ASCII,
)
ESCAPES = re.compile(r"(?:\\(?:u\w{4}|.))+")  # together, as a letter may be two of them
ESCAPED = re.compile('["\\\\\0-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ud800-\udfff]')  # these stay escapes
COLOURS = re.compile(r"\x1b\[[0-?]*+[ -/]*+[@-~]")  # of terminals
OBJECT = re.compile(r"<[^\n]*>")  # the name of what is shown otherwise


def of_text(text: str, name: str) -> Contents:
    """Return a text as it is read, with a remark on what was left out of it."""
    left_out = LeftOut()
    text = left_out.without(text)
    pieces, kind = [], "file"
    if BEGINS.match(text):
        pieces = [(_subtitles(text), 0, "")]
    elif text.lstrip().startswith(("{", "[")):
        pieces, kind = _known_json(text, left_out)
    shown = [
        (COLOURS.sub("", piece.replace("\r\n", "\n").replace("\r", "\n")), number, label)
        for piece, number, label in pieces or [(_json(text, left_out), 0, "")]
    ]
    remark = f"{name}: left out: {left_out}." if str(left_out) else ""
    return Contents(kind, shown, remark=remark)


class LeftOut:
    """Takes pictures and other data out of texts, and counts them."""

    def __init__(self):
        self.sizes: dict[str, list[float]] = {}  # KB of each, by the kind of thing

    def __str__(self) -> str:
        """Say what was left out: "2 pictures (120.0 KB)"; "" = nothing."""
        return " and ".join(
            f"{len(sizes):,} {what}{'s' * (len(sizes) > 1)}"
            + (f" ({sum(sizes):,.1f} KB)" if any(sizes) else "")
            for what, sizes in self.sizes.items()
        )

    def add(self, what: str, bits: str) -> str:
        """Count something, with its size in base64; return what stands in its place."""
        self.sizes.setdefault(what, []).append(0.75 * len(bits) / 1000)
        return f"{what} left out"

    def without(self, text: str) -> str:
        """Return a text without the data: URLs in it that are in base64."""

        def place(match: re.Match) -> str:
            picture = match["kind"].startswith("image")
            return self.add("picture" if picture else "data block", match["bits"])

        return DATA.sub(place, text)


# ---------------------------------------------------------------- JSON


def _json(text: str, left_out: LeftOut) -> str:
    """Return JSON, or lines of JSON, with decoded strings and without base64; else the text."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    lines = [text] if _is_json(text) else text.split("\n")
    shown = "\n".join(ESCAPES.sub(_letters, line) if _is_json(line) else line for line in lines)
    return BASE64.sub(lambda match: f'"{left_out.add("data block", match["bits"])}"', shown)


def _letters(escapes: re.Match) -> str:
    """Return what escapes stand for, but for those that neither JSON nor a text can do without."""
    letters = json.loads(f'"{escapes[0]}"')
    return ESCAPED.sub(lambda letter: json.dumps(letter[0])[1:-1], letters)


def _is_json(text: str) -> bool:
    """Tell whether a text is JSON, without keeping what it says."""
    try:
        json.loads(text, object_pairs_hook=bool, parse_int=bool, parse_float=bool)
    except (ValueError, RecursionError):
        return False
    return True


def _known_json(text: str, left_out: LeftOut) -> tuple[list, str]:
    """Return the pieces of a notebook or of ChatGPT's export, and their kind; [] for other JSON."""
    try:
        if '"nbformat"' in text:
            return [(_notebook(json.loads(text), left_out), 0, "")], "file"
        if '"mapping"' in text:
            made = json.loads(text)
            chats = made if isinstance(made, list) else [made]
            return [
                (
                    "\n\n".join(_kept(chat, left_out)),
                    number,
                    " ".join(str(chat["title"] or "").split()),
                )
                for number, chat in enumerate(chats, 1)
            ], "conversation"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        left_out.sizes.clear()  # it is read as other JSON is
    return [], "file"


def _kept(chat: dict, left_out: LeftOut) -> Iterator[str]:
    """Yield the messages of a conversation with ChatGPT that its last answer goes back to, with
    their speakers; others belong to branches that were given up."""
    path: dict[str, None] = {}
    node = chat["current_node"]
    while node and node not in path:
        path[node] = None
        node = chat["mapping"][node].get("parent")
    said = {key: _message(entry.get("message") or {}) for key, entry in chat["mapping"].items()}
    for key, words in said.items():
        if words and key not in path:
            left_out.add("abandoned message", "")
    if chat.get("create_time"):
        yield f"{datetime.fromtimestamp(chat['create_time'], UTC):%Y-%m-%d}"
    yield from (said[key] for key in reversed(path) if said[key])


def _message(message: dict) -> str:
    """Return what a message says, and who says it; "" for what a person does not see."""
    content, about = message.get("content") or {}, message.get("metadata") or {}
    role = (message.get("author") or {}).get("role", "")
    if role == "system" or about.get("is_visually_hidden_from_conversation"):
        return ""
    parts = content.get("parts") or [content.get("text") or ""]
    texts = [part if isinstance(part, str) else part.get("text") or "[picture]" for part in parts]
    words = "\n".join(filter(None, texts)).strip()
    return f"{role.capitalize()}: {words}" if words else ""


# ---------------------------------------------------------------- notebooks

SHOWN = ("text/markdown", "text/html", "text/latex", "application/json")


def _notebook(notebook: dict, left_out: LeftOut) -> str:
    """Return the cells of a notebook (nbformat 4) with what they print."""
    pieces = []
    for cell in notebook["cells"]:
        kind, source = cell["cell_type"], _joined(cell.get("source", ""))
        pieces.append(f"```\n{source}\n```" if kind == "code" and source else source)
        pieces += [_seen(each, left_out) for each in cell.get("attachments", {}).values()]
        for output in cell.get("outputs", ()):
            error = _joined([f"{line}\n" for line in output.get("traceback", ())])
            plain = error or output.get("evalue") or output.get("text", "")
            pieces.append(_seen(output.get("data") or {"text/plain": plain}, left_out))
    if not any(pieces):
        raise ValueError("no cell says anything")
    return "\n\n".join(piece.strip("\n") for piece in pieces if piece.strip())


def _joined(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _seen(kinds: dict[str, Any], left_out: LeftOut) -> str:
    """Return an output as text: plain, unless that only names an object that is shown otherwise."""
    from tasks.markup import of_html

    texts = {kind: _joined(value) for kind, value in kinds.items()}
    plain = texts.pop("text/plain", "")
    if texts and OBJECT.fullmatch(plain):
        plain = ""
    if pictures := [text for kind, text in texts.items() if kind.startswith("image/")]:
        return f"{plain}\n[{left_out.add('picture', max(pictures, key=len))}]"
    if plain or not texts:
        return plain
    for kind in SHOWN:
        text = texts.get(kind, "")
        if text := of_html(text, "")[1] if kind == "text/html" else text:
            return text
    return f"[{left_out.add('data block', ''.join(texts.values()))}]"


# ---------------------------------------------------------------- subtitles

CLOCK = r"(?:(\d{1,3}):)?(\d\d):(\d\d)[.,]\d{3}"
TIMES = re.compile(rf"^{CLOCK} *+--> *+{CLOCK}[^\n]*+$", re.M)
BEGINS = re.compile(rf"\s*+(?:WEBVTT\b|(?:\d{{1,6}}[ \t]*+\n)?{CLOCK} *+--> *+{CLOCK})")
TAG = re.compile(r"<[^<>\n]{0,200}>|\{\\[^{}\n]{0,200}\}")
SPEAKER = re.compile(r"<v(?:\.[\w.]*+)? ([^<>\n]{1,200})>")
EVERY_S = 60  # seconds, after which a time is written where a sentence begins


def _subtitles(text: str) -> str:
    """Join the words of srt and vtt, with a time where a sentence begins after a minute, and with
    speakers where they are named. A line that is shown again, as it scrolls, is there once."""
    out, last, spoke, marked = "", "", "", -EVERY_S
    cues = [*TIMES.finditer(text)]
    for cue, following in zip(cues, [*cues[1:], None], strict=True):
        hours, minutes, seconds = (int(each or 0) for each in cue.groups()[:3])
        second = 3600 * hours + 60 * minutes + seconds
        body = text[cue.end() : following.start() if following else len(text)]
        body = body.lstrip("\n").partition("\n\n")[0] if body.strip() else ""
        who = SPEAKER.search(body)
        for line in body.split("\n"):
            shown = " ".join(html.unescape(TAG.sub("", line)).split())
            if not shown or shown == last:
                continue
            sentence = not out or out.rstrip("\"'”’)]").endswith(
                (".", "!", "?", "…", "。", "？", "！")
            )
            if (who and who[1] != spoke) or (sentence and second - marked >= EVERY_S):
                out += "\n" * bool(out)
                if second - marked >= EVERY_S:
                    out, marked = f"{out}[{hours}:{minutes:02}:{seconds:02}] ", second
                out += f"{who[1]}: " if who else ""
                spoke = who[1] if who else spoke
            elif out:
                out += " "
            out, last = out + shown, shown
    return out
