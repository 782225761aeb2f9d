"""Documents that cost end in time, in one sentence, and what reads them takes one pass.

Every reading happens in a child process with limits: on code that takes n squared steps the tests
fail when these are over, and do not hang.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import HANG_S
from documents import CATALOG, FILES, FONT, ONE_PASS, PAGE, bounded, epub, passes, places, stream
from test_pdf import pdf_of
from typer.testing import CliRunner

import cli
from config.errors import UserError
from tasks import conversations, documents, forms, lexicon, mail, markup, pdf, quotes, records
from tasks.documents import read
from tasks.forms import Contents, contents
from tasks.limited import LINUX, OverLimit, Readers

READING = (forms, markup, documents, lexicon, mail, pdf, quotes, records)
N = 60_000  # characters, of which n squared steps take 5 s or more


@pytest.fixture(scope="module")
def readers():
    pool = Readers(HANG_S / 4, 4096)  # many times what one pass takes on a busy machine
    yield pool
    pool.close()


UNITS = (
    " ", "\n", " \n", "-\n", "a-\n", "a\xad", "a", "a ", "9", ".", "(", "<", "<!--",
    "-- ", "<h1", "[", '"', ": ", "the ", "\\", "\\u00fc", "\x1b[", "\x1b[0", "'data:", "data:a/a",
    "data:image/a;a=b", "data:;base64,aA", "data:image/a,a", f"data:;base64,{'aA' * 30}\n",
    "\u0301\u0316", "\uff9e\u0301", "日", "\0", "\0a", "/*", "@a{", "@a{b{c}", "a{", "a,", ".a",
    "<a/", "<meta charset ", "coding=", "display ", "display:a;", "\\usepackage[a",
)  # fmt: skip
"""Of these many stand in a row, and behind them what fits nothing."""
PATTERNS = {
    forms: "HTML MARKUP CODING CONTROL LONE",
    markup: "EMPTY COMMENT SIMPLE",
    mail: "HEAD FROM QUOTED",
    pdf: "WORD DIGIT NUMBER",
    records: "DATA BASE64 COLOURS ESCAPES ESCAPED OBJECT TIMES BEGINS TAG SPEAKER",
    lexicon: "_SCRIPTS _DROPPED _ODD BREAK _BROKEN _ASCII _PLAIN _WORD SCRIPT",
    quotes: "APART WHOLE WITHIN END SHORT",
    conversations: "CONTROL",
}
FUNCTIONS = ("config.errors.clean", "data.normalize_answer")
ONCE = {"HTML", "SIMPLE", "CODING", "HEAD", "OBJECT", "BEGINS"}  # are tried at a beginning alone
PASSES = [
    f"{module.__name__}.{name}" for module, names in PATTERNS.items() for name in names.split()
]
# patterns that are written where they are used: `contents` goes through them
IN_PLACE = {
    "forms": {"\0+"},
    "pdf": {r"\S+"},  # between two words
    "markup": {r"\n{3,}", r"\s+", "-?[0-9]{1,9}"},
    "documents": {r"(\d+)"},  # of a file's name
    "quotes": {"[{ ]", r"\S{0,20}\s*", r"\s*\S{0,20}$"},  # of a number, and around an answer
}


@pytest.mark.parametrize("name", [*PASSES, *FUNCTIONS])
def test_every_regular_expression_takes_one_pass(readers, name):
    once = name.rpartition(".")[2] in ONCE
    assert readers.start(passes, name, once, UNITS, N, name=name).result() == len(UNITS)


def patterns_in(values: list | tuple) -> Iterator[re.Pattern]:
    for value in values:
        if isinstance(value, re.Pattern):
            yield value
        elif isinstance(value, tuple):
            yield from patterns_in(value)


def test_there_is_no_other_regular_expression():
    """A new one over documents has to be put into the list above."""
    listed = {getattr(module, name) for module, names in PATTERNS.items() for name in names.split()}
    for module in READING:
        assert {*patterns_in([*vars(module).values()])} <= listed, module.__name__
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        names = {"sub", "split", "findall", "finditer", "match", "search", "fullmatch"}
        calls = [
            node.args[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and node.func.attr in names
        ]
        written = {arg.value for arg in calls if isinstance(arg, ast.Constant)}
        assert written == IN_PLACE.get(module.__name__.rpartition(".")[2], set())
        others = [ast.unparse(arg) for arg in calls if not isinstance(arg, ast.Constant)]
        assert all(other.startswith("re.escape(") for other in others)  # words as they are


@pytest.mark.parametrize(("text", "answer"), [
    ("a" * N, "anna left"), ("go " * (N // 6), "go " * (N // 12) + "x"),
    ("go " * (N // 6), "go " * (N // 12)), ("a-\n" * (N // 3), "anna left"),
    ("a\xad" * (N // 4), "anna left"), ("a-" + "\n" * N + "(b", "anna left"),
    ("a" + "\u0301\u0316" * (N // 2), "anna left"), ("a" + "\uff9e\u0301" * (N // 2), "anna left"),
    ("日本" * (N // 8), "日本" * 999 + "x"),
], ids=range(9))  # fmt: skip
def test_an_answer_is_looked_for_in_one_pass(readers, text, answer):
    assert readers.start(places, text, answer).result() >= 0


@pytest.mark.parametrize("name", ONE_PASS)
def test_files_are_read_in_one_pass(readers, name):
    made = ONE_PASS[name](N)
    try:
        assert readers.start(bounded, f"x.{name.split()[0]}", content=made).result().pieces
    except OverLimit:
        raise
    except UserError as error:
        assert "SIG" not in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("unit", ["<h1", "<h1>", "<h1>a</h2>", "<H2 a", "<h3></h3"])
def test_headings_come_from_the_tree_in_one_pass(readers, unit):
    chapter = "<html>" + unit * (N // len(unit)) + "Anna</h1>"
    book = epub(chapter + "</h1><p>Anna")
    found = readers.start(bounded, "x.epub", content=book).result()
    assert all(len(name) <= 200 for _, _, name in found.pieces)


def test_a_heading_in_a_comment_is_none():
    chapter = "<html><!-- <h1>No</h1> --><p>Anna.<h2 class='a>b'>One &amp; <i>all</i></h2>"
    assert contents(epub(chapter), "x.epub").pieces[0][2] == "One & all"


LONG = ["epub long chapter", "pdf one page often", "pdf BT /F1 9 Tf (Anna) Tj ET "]
"""No processor reads these in a second, for they are some KB that stand for minutes."""
LARGE = ["epub tags", "epub deep package", "epub long chapter"]
"""These are some KB that stand for hundreds of MiB."""
SLOW = {*LONG, "pdf page tree", "pdf forms of forms", "pdf compressed often"}  # of any size


@pytest.mark.parametrize("name", LONG)
def test_what_takes_long_is_one_sentence(name, tmp_path):
    path = tmp_path / f"x.{name.split()[0]}"
    path.write_bytes(FILES[name](100_000))
    assert path.stat().st_size < 400_000
    result = CliRunner().invoke(cli.app, ["ask", str(path), "Who?", "--document-s", "1"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert re.search(rf"{path.name} takes more than 1 s to read: .* --document-s\.", said)


@pytest.mark.skipif(not LINUX, reason="other systems do not hold a process to its memory")
@pytest.mark.parametrize("name", LARGE)
def test_what_takes_much_memory_is_left_out_of_a_folder(name, tmp_path):
    kind = name.split()[0]
    (tmp_path / f"a.{kind}").write_bytes(FILES[name](50_000))
    (tmp_path / "b.txt").write_text("Anna left.")
    document = read([tmp_path], HANG_S, 64)
    assert document.text == "Anna left."
    (remark,) = document.remarks
    assert f"a.{kind} takes more than 64 MiB of memory to read: " in remark
    assert "--document-mib" in remark


def test_a_thousand_pages_are_within_the_limits_by_default(tmp_path):
    lines = " ".join("(Anna left for Lima and the old bridge) Tj 0 -12 Td" for _ in range(40))
    kids = " ".join(f"{k} 0 R" for k in range(10, 1010))
    objects = {
        1: CATALOG,
        2: f"<< /Type /Pages /Count 1000 /Kids [{kids}] >>",
        4: stream(f"BT /F1 9 Tf 9 780 Td {lines} ET"),
        5: FONT,
    }
    (tmp_path / "a.pdf").write_bytes(pdf_of(objects | dict.fromkeys(range(10, 1010), PAGE)))
    document = read([tmp_path / "a.pdf"])
    assert len(document.parts) == 1000 and document.text.count("Lima") == 40_000


def test_every_file_is_a_text_or_one_sentence():
    """However few bytes there are, one child reads one after the other, or is replaced."""
    pool = Readers(HANG_S, 1024)
    try:
        for name in FILES:
            if name not in SLOW:
                kind = name.split()[0]
                try:
                    each = pool.start(
                        contents, f"x.{kind}", content=FILES[name](500), name=name
                    ).result()
                    assert isinstance(each, Contents)
                except UserError as error:
                    assert str(error).startswith((f"x.{kind} ", f"x.{kind},", name)), name
                    assert "\n" not in str(error) and len(str(error)) < 500
    finally:
        pool.close()
