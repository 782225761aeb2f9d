"""Mails and saved pages: what a person sees of them is read, what hangs on them is named."""

from email.message import EmailMessage

import pytest

from tasks.forms import contents


def mail(body: str = "", html: str = "", **headers: str) -> EmailMessage:
    made = EmailMessage()
    for name, value in (
        {"From": "Jürg Ämisegger <j@x.test>", "Date": "Fri, 03 May 2024 10:00:00 +0000"} | headers
    ).items():
        made[name.replace("_", "-")] = value
    if body:
        made.set_content(body, cte="base64")
    if html and body:
        made.add_alternative(html, subtype="html")
    elif html:
        made.set_content(html, subtype="html")
    return made


def read(content: EmailMessage | bytes, name: str = "standard input") -> tuple[str, str]:
    found = contents(content if isinstance(content, bytes) else bytes(content), name)
    return "\n".join(text for text, _, _ in found.pieces), found.remark


HEAD = "From: Jürg Ämisegger <j@x.test>\nDate: Fri, 03 May 2024 10:00:00 +0000"


@pytest.mark.parametrize(("made", "text"), [
    (mail("Karin unterschrieb in Zürich.", Subject="Brücke"),
     f"{HEAD}\nSubject: Brücke\n\nKarin unterschrieb in Zürich."),
    (mail("The words.", "<p>The <b>words</b>."), f"{HEAD}\n\nThe words."),
    (mail(html="<p>Only <b>HTML</b>.<style>no</style>"), f"{HEAD}\n\nOnly HTML."),
    (mail(" ", "<p>Only HTML."), f"{HEAD}\n\nOnly HTML."),
])  # fmt: skip
def test_headers_and_the_text_are_decoded(made, text):
    assert read(made) == (text, "")
    assert read(bytes(made).replace(b"\n", b"\r\n")) == (text, "")


def test_a_mail_is_a_file_with_its_subject_as_title():
    found = contents(bytes(mail("The words.", Subject="Brücke")), "a.eml")
    assert (found.kind, found.title, found.pieces[0][1]) == ("file", "Brücke", 0)


def test_what_is_attached_is_named_and_a_mail_in_a_mail_is_read():
    made = mail("See the plan.")
    made.add_attachment(b"%PDF-", maintype="application", subtype="pdf", filename="Plän.pdf")
    made.add_attachment("no", filename="a.txt")
    made.add_attachment(mail("Forwarded words.", Subject="Inner"))
    text, remark = read(made)
    assert "See the plan." in text and "Subject: Inner" in text and "Forwarded words." in text
    assert "[Attached and not read: Plän.pdf]" in text and "[Attached and not read: a.txt]" in text
    assert remark == "standard input: left out: 2 attachments."


def test_a_text_behind_a_picture_is_read():
    made = mail("Above.")
    made.add_attachment(b"x", maintype="image", subtype="png", disposition="inline")
    below = EmailMessage()
    below.set_content("Below.")
    made.attach(below)
    assert [line for line in read(made)[0].split("\n") if line][2:] == [
        "Above.", "[Attached and not read: image/png]", "Below.",
    ]  # fmt: skip


def test_an_mbox_is_its_mails():
    mails = (mail("One.", Subject="First"), mail("Two.\n>From here on.", Subject="Second"))
    for made in mails:
        made.replace_header("Content-Transfer-Encoding", "7bit")
        made.set_payload({"First": "One.\n", "Second": "Two.\n>From here on.\n"}[made["Subject"]])
    content = b"".join(
        b"From a@x Fri May  3 10:00:00 2024\n" + bytes(made) + b"\n" for made in mails
    )
    found = contents(content, "a.mbox")
    assert found.kind == "message" and found.title == ""
    assert [(number, name) for _, number, name in found.pieces] == [(1, "First"), (2, "Second")]
    assert found.pieces[1][0].endswith("\n\nTwo.\nFrom here on.")


PAGE = (
    b"From: <Saved by Blink>\nSubject: Bridge\nMIME-Version: 1.0\n"
    b'Content-Type: multipart/related; type="text/html"; boundary="b"\n\n--b\n'
    b"Content-Type: text/html\nContent-Transfer-Encoding: quoted-printable\n\n"
    b"<!DOCTYPE html><html><p>Anna Li=\nndt in Z=C3=BCrich.</p></html>\n--b\n"
    b"Content-Type: text/css\n\np {}\n--b\n"
    b"Content-Type: image/png\nContent-Transfer-Encoding: base64\n\naaaa\n--b--\n"
)


def test_a_saved_page_is_its_words():
    text, remark = read(PAGE, "page.mhtml")
    assert text == "Anna Lindt in Zürich." and remark == "page.mhtml: left out: 1 picture."


def test_an_unknown_or_wrong_encoding_is_remarked_on():
    head = b"From: a\nDate: b\nContent-Type: text/plain; charset=%b\n\nn\xe9 and more"
    assert read(head % b"iso-8859-1")[0].endswith("né and more")
    text, remark = read(head % b"x-nonsense")
    assert text.endswith("and more") and "no known encoding" in remark


@pytest.mark.parametrize(
    "text",
    ["Title: A\nDate: 2024-05-03\n\nA page of a site.", "From: Rome\nTo: Bern\n\nA journey.",
     "From here on\nAll: is text.", "Note: From Anna.\n\nText."],
)  # fmt: skip
def test_a_text_with_a_head_is_no_mail(text):
    assert read(text.encode()) == (text, "")
