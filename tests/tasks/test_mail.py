"""Mails and saved pages: what a person sees of them is read, what hangs on them is named."""

from email.message import EmailMessage

import pytest

from tasks.forms import contents


def mail(body: str = "", html: str = "", **headers: str) -> EmailMessage:
    made = EmailMessage()
    first = {"From": "Jürg Ämisegger <j@x.test>", "Date": "Fri, 03 May 2024 10:00:00 +0000"}
    for name, value in (first | headers).items():
        made[name] = value
    if body:
        made.set_content(body, cte="base64")
    if html and body:
        made.add_alternative(html, subtype="html")
    elif html:
        made.set_content(html, subtype="html")
    return made


def with_attachments() -> EmailMessage:
    made = mail("See the plan.")
    made.add_attachment(b"%PDF-", maintype="application", subtype="pdf", filename="Plän.pdf")
    made.add_attachment("no", filename="a.txt")
    made.add_attachment(mail("Forwarded words.", Subject="Inner"))
    return made


def with_picture() -> EmailMessage:
    made, below = mail("Above."), EmailMessage()
    made.add_attachment(b"x", maintype="image", subtype="png", disposition="inline")
    below.set_content("Below.")
    made.attach(below)
    return made


HEAD = "From: Jürg Ämisegger <j@x.test>\nDate: Fri, 03 May 2024 10:00:00 +0000"
PAGE = (
    b"From: <Saved by Blink>\nSubject: Bridge\nMIME-Version: 1.0\n"
    b'Content-Type: multipart/related; type="text/html"; boundary="b"\n\n--b\n'
    b"Content-Type: text/html\nContent-Transfer-Encoding: quoted-printable\n\n"
    b"<!DOCTYPE html><html><p>Anna Li=\nndt in Z=C3=BCrich.</p></html>\n--b\n"
    b"Content-Type: text/css\n\np {}\n--b\n"
    b"Content-Type: image/png\nContent-Transfer-Encoding: base64\n\naaaa\n--b--\n"
)
WITH = b"From: a\nDate: b\nContent-Type: text/plain; charset=%b\n\nn\xe9 and more"


@pytest.mark.parametrize(("made", "text", "remark"), [
    (mail("Karin unterschrieb in Zürich.", Subject="Brücke"),
     f"{HEAD}\nSubject: Brücke\n\nKarin unterschrieb in Zürich.", ""),
    (mail("The words.", "<p>The <b>words</b>."), f"{HEAD}\n\nThe words.", ""),
    (mail(html="<p>Only <b>HTML</b>.<style>no</style>"), f"{HEAD}\n\nOnly HTML.", ""),
    (mail(" ", "<p>Only HTML."), f"{HEAD}\n\nOnly HTML.", ""),
    # what is attached is named, and a mail in a mail is read
    (with_attachments(), f"{HEAD}\n\nSee the plan.\n\n[Attached and not read: Plän.pdf]\n"
     f"[Attached and not read: a.txt]\n\n[Attached mail]\n{HEAD}\nSubject: Inner\n\n"
     "Forwarded words.", "x: left out: 2 attachments."),
    (with_picture(), f"{HEAD}\n\nAbove.\n\n[Attached and not read: image/png]\nBelow.",
     "x: left out: 1 attachment."),
    (PAGE, "Anna Lindt in Zürich.", "x: left out: 1 picture."),
    (PAGE.replace(b"Subject", b"To: Bo\nSubject"),  # a mail with a picture in it
     'From: "Saved by Blink"\nTo: Bo\nSubject: Bridge\n\nAnna Lindt in Zürich.',
     "x: left out: 1 picture."),
    (WITH % b"iso-8859-1", "From: a\nDate: b\n\nné and more", ""),
    (WITH % b"x-nonsense", "From: a\nDate: b\n\nn\ufffd and more", "no known encoding"),
    # a text with a head is no mail
    *((text.encode(), text, "") for text in (
        "Title: A\nDate: 2024-05-03\n\nA page of a site.", "From: Rome\nTo: Bern\n\nA journey.",
        "From here on\nAll: is text.", "Note: From Anna.\n\nText.",
    )),
])  # fmt: skip
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_words_of_a_mail_are_read_and_the_rest_is_named(made, text, remark, end):
    found = contents(bytes(made).replace(b"\n", end), "x")
    words = "\n".join(piece for piece, _, _ in found.pieces)
    assert words == text and remark in found.remark and bool(remark) == bool(found.remark)


def test_a_mail_is_a_file_with_its_subject_as_title():
    found = contents(bytes(mail("The words.", Subject="Brücke")), "a.eml")
    assert (found.kind, found.title, found.pieces[0][1]) == ("file", "Brücke", 0)


def test_an_mbox_is_its_mails():
    content = b""
    for subject, body in (("First", "One.\n"), ("Second", "Two.\n>From here on.\n")):
        made = mail("x", Subject=subject)
        made.replace_header("Content-Transfer-Encoding", "7bit")
        made.set_payload(body)
        content += b"From a@x Fri May  3 10:00:00 2024\n" + bytes(made) + b"\n"
    found = contents(content, "a.mbox")
    assert found.kind == "message" and found.title == ""
    assert [(number, name) for _, number, name in found.pieces] == [(1, "First"), (2, "Second")]
    assert found.pieces[1][0].endswith("\n\nTwo.\nFrom here on.")
