"""Forms of other office programs, by a library that a user may install: kreuzberg (MIT)."""

from __future__ import annotations

from config.errors import UserError
from tasks.forms import Contents, check_size, damage

OPEN, OFFICE = (
    "application/vnd.oasis.opendocument.",
    "application/vnd.openxmlformats-officedocument.",
)
MIME = {
    "xlsx": f"{OFFICE}spreadsheetml.sheet",
    "xlsb": "application/vnd.ms-excel.sheet.binary.macroEnabled.12",
    "pptx": f"{OFFICE}presentationml.presentation",
    "odt": f"{OPEN}text",
    "ods": f"{OPEN}spreadsheet",
    "odp": f"{OPEN}presentation",
    "rtf": "application/rtf",
    "msg": "application/vnd.ms-outlook",
    "doc": "application/msword",
    "xls": "application/vnd.ms-excel",
    "ppt": "application/vnd.ms-powerpoint",
}

TABLES = ("xlsx", "xlsb", "xls", "ods")


def of_office(content: bytes, kind: str, name: str) -> Contents:
    """Read a file of a kind of `MIME`, sheets as tables of Markdown. UserError: the library is not
    there, or the file is damaged."""
    try:
        from kreuzberg import ExtractionConfig, extract_bytes_sync
    except ImportError:
        raise UserError(
            f"{name} is {kind}, which is read where kreuzberg is installed (pip install kreuzberg):"
            " else save it as docx or PDF."
        ) from None
    with damage(name, f"{kind} file"):
        form = "markdown" if kind in TABLES else "plain"  # of slides it leaves out the notes
        config = ExtractionConfig(use_cache=False, output_format=form)
        found = extract_bytes_sync(content, MIME[kind], config)
    check_size(len(found.content), name)
    return Contents("file", [(found.content, 0, "")], remark=f"{name} was read by kreuzberg.")
