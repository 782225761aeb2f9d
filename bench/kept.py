"""How much of a document is read: files of known words, written here, against what `ask` sees.

Holds: the files' containers, and the counting. Leaves out: the templates (bench/kept.yaml); real
documents, of which nobody knows what a person sees (docs/ask.md, "Why these libraries").
Exercise it: `python -m bench.kept [KIND ...]`. Read next: tasks/documents.py.

In a template `@name` becomes a word that a person sees, `~name` one that nobody sees, `@=word`
stands for itself. A file of which something is lost without a remark is called SILENT.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from config.errors import UserError
from config.files import read_yaml
from tasks.documents import read

MARKER = re.compile(r"@=([^\s<\"|)\]\\]+)|([@~])([a-z]*)")
TEMPLATES = read_yaml(Path(__file__).with_suffix(".yaml"))
PACKAGE = TEMPLATES.pop("package")  # what members of a docx begin with


class Words:
    """The words of one file, as they stand in its template, which is their reading order."""

    def __init__(self, also: Sequence[str]):
        self.number, self.seen, self.hidden, self.also = count(1), [], [], also

    def __call__(self, template: str) -> str:
        return MARKER.sub(self._word, template)

    def _word(self, match: re.Match) -> str:
        plain, sign, name = match.groups()
        word = plain or f"{name or 'word'}{next(self.number):03d}"
        (self.hidden if sign == "~" else self.seen).append(word)
        return word


def pdf(pages: Sequence[str], page="", catalog="", font="", across=False, **more: str) -> bytes:
    """Write a PDF: a line of a page is `x y text` or an operator; `more` are objects _10, ...

    across: what stands at one height is drawn together, instead of column by column.
    """
    objects = {
        1: f"<</Type/Catalog/Pages 2 0 R{catalog}>>",
        2: "<</Type/Pages/MediaBox[0 0 612 792]/Kids["
        + " ".join(f"{100 + 2 * k} 0 R" for k in range(len(pages))) + f"]/Count {len(pages)}>>",
        3: font or "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    } | {int(number[1:]): text for number, text in more.items()}  # fmt: skip
    for k, lines in enumerate(pages):
        rows = lines.strip().splitlines()
        if across:
            rows.sort(key=lambda row: -int(row.split()[1]))
        drawn = "\n".join(map(_drawn, rows))
        objects[100 + 2 * k] = (
            f"<</Type/Page/Parent 2 0 R/Contents {101 + 2 * k} 0 R{page}"
            "/Resources<</Font<</F1 3 0 R>>/XObject<</I 40 0 R>>>>>>"
        )
        objects[101 + 2 * k] = f"<</Length {len(drawn)}>>stream\n{drawn}\nendstream"
    out, table = b"%PDF-1.7\n", ["0000000000 65535 f \n"] * (max(objects) + 1)
    for number, text in sorted(objects.items()):
        table[number] = f"{len(out):010d} 00000 n \n"
        out += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    end = f"xref\n0 {len(table)}\n{''.join(table)}trailer<</Size {len(table)}/Root 1 0 R>>\n"
    return out + f"{end}startxref\n{len(out)}\n%%EOF\n".encode()


def _drawn(line: str) -> str:
    match = re.match(r"(\d+) (\d+) ([A-Za-z<].*)", line)
    if not match:
        return line
    text = match[3] if match[3].startswith("<") else f"({match[3]})"
    return f"BT /F1 10 Tf {match[1]} {match[2]} Td {text} Tj ET"


def packed(members: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def docx(**parts: str) -> bytes:
    """Write a docx of the insides of its parts: document, header1, footnotes, chunk1, ..."""
    members, types, main, links = {}, "", "", ""
    for name, inside in parts.items():
        stem = name.rstrip("0123456789")
        root = PACKAGE["roots"].get(stem, f"w:{stem}")
        inside = re.sub(r"\[\[(.*?)\]\]", r'<w:r><w:t xml:space="preserve">\1</w:t></w:r>', inside)
        if stem != "chunk":
            inside = f"<{root} {PACKAGE['namespaces']}>{inside}</{root}>"
        file = f"{name}.{'html' if stem == 'chunk' else 'xml'}"
        members[f"word/{file}"] = inside
        kind = "document.main" if stem == "document" else stem
        types += f'<Override PartName="/word/{file}" ContentType="{PACKAGE["type"]}.{kind}+xml"/>'
        link = f'<Relationship Id="{name}" Type="{PACKAGE["relation"]}/'
        if stem == "document":
            main = f'{link}officeDocument" Target="word/{file}"/>'
        else:
            links += f'{link}{PACKAGE["links"].get(stem, stem)}" Target="{file}"/>'
    return packed({
        "[Content_Types].xml": f"{PACKAGE['types']}{types}</Types>",
        "_rels/.rels": f"{PACKAGE['relations']}{main}</Relationships>",
        "word/_rels/document.xml.rels": f"{PACKAGE['relations']}{links}</Relationships>",
    } | members)  # fmt: skip


def text(template: str, encoding: str = "utf-8", gap: int = 0) -> bytes:
    """Encode a text; `gap` NULs are put before its last line, as a power loss leaves them."""
    before, end, last = template.rstrip("\n").rpartition("\n")
    return (before + end).encode(encoding) + b"\0" * gap + last.encode(encoding.replace("-sig", ""))


WRITERS = {"pdf": pdf, "docx": docx, "epub": lambda **members: packed(members)}
PICTURE = base64.b64encode(bytes(range(256)) * 200).decode()


def files() -> Iterator[tuple[str, str, bytes, Words]]:
    """Yield the kind, name, bytes and words of each file."""
    for kind, templates in TEMPLATES.items():
        for name, template in templates.items():
            words = Words(template.pop("also", []))
            for key, value in template.items():
                if isinstance(value, list):
                    template[key] = [*map(words, value)]
                elif isinstance(value, str):
                    template[key] = words(value).replace("PICTURE", PICTURE)
            yield kind, name, WRITERS.get(kind, text)(**template), words


def places(word: str, content: str) -> list[int]:
    return [m.start() for m in re.finditer(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", content)]


def looked_at(name: str, words: Words) -> tuple[int, int, int, int, str]:
    """Return the words of a file that it has, that are kept or named, lost in silence, and those
    hidden ones that are read; and all that is to be said of it."""
    try:
        document = read([name])
        body, remark = document.text, " ".join(document.remarks)
    except UserError as error:
        body, remark = "", str(error)
    seen = [*words.seen, *words.also]
    at = {word: places(word, body) for word in seen}
    lost = [word for word in seen if not (at[word] or places(word, remark))]
    found = [at[word][0] for word in words.seen if at[word]]
    notes = {
        "LOST" if remark else "SILENT": lost,
        "hidden but read": (hidden := [word for word in words.hidden if places(word, body)]),
        "twice": [word for word in words.seen if len(at[word]) > words.seen.count(word)],
        "before": [words.seen[k] for k, (a, b) in enumerate(pairwise(found)) if a > b],
    }
    said = "; ".join(f"{what} {' '.join(which)}" for what, which in notes.items() if which)
    silent = 0 if remark else len(lost)
    return len(seen), len(seen) - len(lost), silent, len(hidden), f"{said} | {remark}".strip(" |")


def main() -> None:
    sums: dict[str, list[int]] = {}
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        for kind, name, content, words in files():
            if kind in (sys.argv[1:] or kind):
                Path(name).write_bytes(content)
                *numbers, said = looked_at(name, words)
                print(f"{name:24} {numbers[1]:3} of {numbers[0]:<3} {said}", flush=True)
                row = [1, *numbers]
                sums[kind] = [*map(sum, zip(sums.get(kind, [0] * 5), row, strict=True))]
    print("\n| kind | files | words seen | kept or named | lost in silence | hidden but read |")
    print("|---|---|---|---|---|---|")
    for kind, row in sums.items():
        print(f"| {kind} | {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
