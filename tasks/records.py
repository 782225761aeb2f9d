"""Text as a person would read it: JSON without its escapes, notebooks, ChatGPT's export, subtitles.

Of other JSON the text as it stands is read, with its escapes decoded: numbers, fields and their
order are not touched. What is no JSON, such as JSON with comments, keeps its escapes.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from tasks.forms import Contents, Piece, remark_on

DATA = re.compile(  # in JSON, slashes and line ends may be escaped; lines after the first are long
    r"data:(?P<kind>[\w.+/\\-]{0,160}+)(?:;[\w.=+%*-]{1,40}+){0,4};base64,"
    r"(?:[\w+/=%-]|\\[/nr]){20,}+(?:\n[\w+/=-]{40,}+)*+",
    re.ASCII,
)
# a value of JSON that is not said to be base64: longer than keys, with signs of all kinds
BASE64 = re.compile(
    r'"(?=[^"a-z]*+[a-z])(?=[^"A-Z]*+[A-Z])(?=[^"0-9]*+[0-9])[\w+/=\r\n-]{1000,}+"', re.ASCII
)
ESCAPES = re.compile(r"(?:\\(?:u\w{4}|.))+")  # together, as a letter may be two of them
ESCAPED = re.compile('["\\\\\0-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ud800-\udfff]')  # these stay escapes
COLOURS = re.compile(r"\x1b\[[0-?]*+[ -/]*+[@-~]")  # of terminals
OBJECT = re.compile(r"<[^\n]*>")  # the name of what is shown otherwise
PICTURE, BLOCK = "picture", "block of data"


def of_text(text: str, name: str) -> Contents:
    """Return a text as it is read, with a remark on what was left out of it."""
    left_out: Counter[str] = Counter()

    def leave_out(match: re.Match) -> str:
        what = PICTURE if match["kind"].startswith("image") else BLOCK
        left_out[what] += 1
        return f"{what} left out"

    text, kind = DATA.sub(leave_out, text), "file"
    if BEGINS.match(text):
        pieces = [(_subtitles(text), 0, "")]
    elif not text.lstrip().startswith(("{", "[")):
        pieces = [(text, 0, "")]
    else:
        before = left_out.copy()
        try:
            kind, pieces = _known_json(text, left_out)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            left_out = before
            pieces = [(_json(text, left_out), 0, "")]
    shown = [
        (COLOURS.sub("", piece.replace("\r\n", "\n").replace("\r", "\n")), number, label)
        for piece, number, label in pieces
    ]
    return Contents(kind, shown, remark=remark_on(name, left_out))


# ---------------------------------------------------------------- JSON


def _json(text: str, left_out: Counter[str]) -> str:
    """Return JSON, or lines of JSON, with decoded strings and without base64; else the text."""
    lines = [text] if _is_json(text) else text.split("\n")
    shown = "\n".join(ESCAPES.sub(_letters, line) if _is_json(line) else line for line in lines)
    shown, n = BASE64.subn(f'"{BLOCK} left out"', shown)
    left_out[BLOCK] += n
    return shown


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


def _known_json(text: str, left_out: Counter[str]) -> tuple[str, list[Piece]]:
    """Return what a notebook or ChatGPT's export consists of; any of several errors if it is
    neither, or damaged."""
    if '"nbformat"' in text:
        return "file", [(_notebook(json.loads(text), left_out), 0, "")]
    if '"mapping"' not in text:
        raise ValueError("no form that is known")
    made, pieces = json.loads(text), []
    for number, chat in enumerate(made if isinstance(made, list) else [made], 1):
        title = " ".join(str(chat["title"] or "").split())
        pieces.append(("\n\n".join(_kept(chat, left_out)), number, title))
    return "conversation", pieces


def _kept(chat: dict, left_out: Counter[str]) -> Iterator[str]:
    """Yield the messages of a conversation with ChatGPT that its last answer goes back to, with
    their speakers; others belong to branches that were given up."""
    path: dict[str, None] = {}
    node = chat["current_node"]
    while node and node not in path:
        path[node] = None
        node = chat["mapping"][node].get("parent")
    said = {key: _message(entry.get("message") or {}) for key, entry in chat["mapping"].items()}
    left_out["message of another branch"] += sum(
        bool(words) and key not in path for key, words in said.items()
    )
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


def _notebook(notebook: dict, left_out: Counter[str]) -> str:
    """Return the cells of a notebook (nbformat 4) with what they print."""
    pieces = []
    for cell in notebook["cells"]:
        source = _joined(cell.get("source", ""))
        is_code = cell["cell_type"] == "code" and source
        pieces.append(f"```\n{source}\n```" if is_code else source)
        pieces += [_seen(each, left_out) for each in cell.get("attachments", {}).values()]
        for output in cell.get("outputs", ()):
            error = "\n".join(output.get("traceback", ())) or output.get("evalue")
            plain = {"text/plain": error or output.get("text", "")}
            pieces.append(_seen(output.get("data") or plain, left_out))
    if not any(pieces):
        raise ValueError("no cell says anything")
    return "\n\n".join(piece.strip("\n") for piece in pieces if piece.strip())


def _joined(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _seen(kinds: dict[str, Any], left_out: Counter[str]) -> str:
    """Return an output as text: plain, unless that only names an object that is shown otherwise."""
    from tasks.markup import of_html

    texts = {kind: _joined(value) for kind, value in kinds.items()}
    plain = texts.pop("text/plain", "")
    if texts and OBJECT.fullmatch(plain):
        plain = ""
    if any(kind.startswith("image/") for kind in texts):
        left_out[PICTURE] += 1
        return f"{plain}\n[{PICTURE} left out]"
    if plain or not texts:
        return plain
    for kind in ("text/markdown", "text/html", "text/latex", "application/json"):
        text = texts.get(kind, "")
        if text := of_html(text, "")[1] if kind == "text/html" else text:
            return text
    left_out[BLOCK] += 1
    return f"[{BLOCK} left out]"


# ---------------------------------------------------------------- subtitles

CLOCK = r"(?:(\d{1,3}):)?(\d\d):(\d\d)[.,]\d{3}"
TIMES = re.compile(rf"^{CLOCK} *+--> *+{CLOCK}[^\n]*+$", re.M)
BEGINS = re.compile(rf"\s*+(?:WEBVTT\b|(?:\d{{1,6}}[ \t]*+\n)?{CLOCK} *+--> *+{CLOCK})")
TAG = re.compile(r"<[^<>\n]{0,200}>|\{\\[^{}\n]{0,200}\}")
SPEAKER = re.compile(r"<v(?:\.[\w.]*+)? ([^<>\n]{1,200})>")
STOPS = (".", "!", "?", "…", "。", "？", "！")
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
        found = SPEAKER.search(body)
        speaker = found[1] if found else spoke
        for line in body.split("\n"):
            shown = " ".join(html.unescape(TAG.sub("", line)).split())
            if not shown or shown == last:
                continue
            begins = not out or out.rstrip("\"'”’)]").endswith(STOPS)
            timed = begins and second - marked >= EVERY_S
            if timed or speaker != spoke:
                out += "\n" * bool(out)
                if second - marked >= EVERY_S:
                    out, marked = f"{out}[{hours}:{minutes:02}:{seconds:02}] ", second
                out += f"{speaker}: " * bool(found)
                spoke = speaker
            elif out:
                out += " "
            out, last = out + shown, shown
    return out
