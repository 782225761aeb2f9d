"""Mails (eml, mbox) and pages saved with their pictures (mhtml): words, and what is attached."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage

from config.errors import UserError
from tasks.forms import Contents, Piece, damage, decoded, few, joined, remark_on

HEAD = re.compile(rb"(?:[!-9;-~]{1,80}+:[^\n]*+\n(?:[ \t][^\n]*+\n)*+)++(?=\r?\n|\Z)")
FROM = re.compile(rb"^From \S[^\n]{0,100}?\d\d:\d\d[^\n]{0,100}\n(?=[!-9;-~]{1,80}:)", re.M)
QUOTED = re.compile(rb"^>(?=>*From )", re.M)
SHOWN = ("From", "To", "Cc", "Date", "Subject")


def is_mail(content: bytes, name: str) -> bool:
    """Tell whether a file is a mail or several: by its headers, some of which all mails have."""
    content = content[: 1 << 16].replace(b"\r\n", b"\n").lstrip(b"\n")
    if FROM.match(content):
        return True
    head = HEAD.match(content)
    names = {line.partition(b":")[0].lower() for line in head[0].split(b"\n")} if head else set()
    ends = name.lower().endswith((".eml", ".mht", ".mhtml", ".mbox"))
    sure = b"from" in names and names & {b"date", b"message-id", b"mime-version", b"received"}
    return bool(sure or (ends and names & {b"from", b"subject", b"mime-version", b"content-type"}))


def of_mail(content: bytes, name: str) -> Contents:
    """Read a mail, or each of several."""
    content = content.replace(b"\r\n", b"\n").lstrip(b"\n")
    starts = [match.end() for match in FROM.finditer(content)] if FROM.match(content) else []
    ends = [match.start() for match in FROM.finditer(content)][1:] + [len(content)]
    left_out: Counter[str] = Counter()
    pieces: list[Piece] = []
    remarks: list[str] = []
    with damage(name, "mail"):
        for number, (a, b) in enumerate(zip(starts or [0], ends, strict=False), 1):
            mail = QUOTED.sub(b"", content[a:b]) if starts else content
            message = message_from_bytes(mail, policy=policy.default)
            text = "\n".join(said(message, name, left_out, remarks)).strip()
            pieces.append((text, number if starts else 0, header(message, "Subject")[:200]))
    remark = joined([remark_on(name, left_out), few(list(dict.fromkeys(remarks)))])
    title = pieces[0][2] if len(pieces) == 1 else ""
    return Contents("message" if starts else "file", pieces, title, remark)


def header(message: EmailMessage, name: str) -> str:
    """Return a header as a person sees it, or as it stands where it is damaged."""
    try:
        words = str(message[name] or "")
    except Exception:  # the parser of headers may raise anything
        words = ""
    written = {key.lower(): value for key, value in message.raw_items()}.get(name.lower(), "")
    return " ".join((words or str(written)).split())


def said(message: EmailMessage, name: str, left_out: Counter, remarks: list[str]) -> Iterator[str]:
    """Yield the headers of a mail and its words; of a saved page, whose sender is a browser, the
    words alone. Attachments are named where they hang."""
    page = "multipart/related" in message.get_content_type() and not message["To"]
    if not page:
        yield from (f"{each}: {words}" for each in SHOWN if (words := header(message, each)))
        yield ""
    for part in shown_parts(message, left_out):
        kind, attached = part.get_content_type(), part.get_filename() or ""
        if kind == "message/rfc822":
            yield from ("", "[Attached mail]")
            yield from said(part.get_payload(0), name, left_out, remarks)
        elif (
            kind not in ("text/plain", "text/html")
            or part.get_content_disposition() == "attachment"
        ):
            left_out["attachment"] += 1
            yield f"[Attached and not read: {' '.join(attached.split()) or kind}]"
        else:
            yield words_of(part, kind, name, left_out, remarks)


def shown_parts(message: EmailMessage, left_out: Counter) -> Iterator[EmailMessage]:
    """Yield the parts that a program for mails shows: of alternatives the text, else the HTML."""
    kind = message.get_content_type()
    if not message.is_multipart() or kind == "message/rfc822":
        yield message
        return
    parts = message.get_payload()
    if kind == "multipart/alternative":
        plain = [part for part in parts if part.get_content_type() == "text/plain"]
        has_words = plain and (plain[0].get_payload(decode=True) or b"").strip()
        parts = plain[:1] if has_words else [p for p in parts if p not in plain][-1:]
    elif kind == "multipart/related":  # a text, and the pictures and styles in it
        parts, rest = parts[:1], parts[1:]
        for part in rest:
            main = part.get_content_maintype()
            styles = part.get_content_type() in ("text/css", "application/javascript")
            what = "picture" if main == "image" else "frame" if main == "text" else "attachment"
            left_out[what] += not styles
    for part in parts:
        yield from shown_parts(part, left_out)


def words_of(
    part: EmailMessage, kind: str, name: str, left_out: Counter, remarks: list[str]
) -> str:
    """Return the text of a part."""
    from tasks.markup import of_html

    content = part.get_payload(decode=True) or b""
    try:
        text, remark = decoded(content, name, kind == "text/html", part.get_content_charset() or "")
    except UserError:
        text, remark = content.decode(errors="replace"), f"{name} has letters in no known encoding."
    if kind == "text/html":
        _, text, more = of_html(text, name)
        remark = joined([remark, more])
    remarks += filter(None, [remark])
    return text
