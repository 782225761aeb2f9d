"""What becomes HTML: every text escaped, one script at most, and that one by its digest."""

import ast
import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from conftest import unrendered
from jinja2 import UndefinedError
from test_page import HOSTILE, Page, folder_of, record, row

from config.errors import clean
from report import plots
from report.markup import Markup, Section, fill, folded, joined, macro, page, table
from report.page import write_report
from report.summary import summarise

REPORT = Path(__file__).parents[2] / "report"


def test_a_text_is_cleaned_and_escaped_wherever_it_enters_a_page():
    text = " ".join(clean(HOSTILE).split())
    rows = [([HOSTILE, HOSTILE], {HOSTILE: HOSTILE})]
    parts = joined(
        [
            table(HOSTILE, [HOSTILE], rows),
            folded(HOSTILE, HOSTILE),
            fill("<p>{}</p>", HOSTILE),
            HOSTILE,
        ]
    )
    made = page(HOSTILE, parts, [Section(HOSTILE, HOSTILE, HOSTILE)])
    assert Page(made).text.count(text) == 15
    assert "<script" not in made and "<img" not in made


def test_a_value_that_is_missing_is_an_error_and_no_gap():
    with pytest.raises(UndefinedError):
        macro("facts")
    with pytest.raises(UndefinedError):
        macro("lead", "Running", "a sentence")  # no warnings


def test_one_script_runs_and_no_other():
    assert "<script" not in page("t", Markup(), []) and "script-src" not in page("t", Markup(), [])
    code = "document.title = 'a' && \"b\";"
    made = page("t", Markup(), [], code)
    inside = re.findall("<script>(.*?)</script>", made, re.S)
    assert inside == [code]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', made)[1]
    assert policy.endswith(f"; script-src 'sha256-{digest}'") and "default-src 'none'" in policy
    for bad in ("'</script>'", "'<!--'"):
        with pytest.raises(ValueError, match="cannot stand in a page"):
            page("t", Markup(), [], bad)


def test_no_html_is_put_together_from_strings():
    """A formatted string with a tag in it would take its values as they are."""
    for path in REPORT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                assert not re.search("</?[a-z]", "".join(parts)), f"{path.name}:{node.lineno}"


FIELDS = (
    "question", "answer", "accepted answer", "section", "memory", "error", "id",
    "agent of a record", "form", "kind of a record", "agent", "kind", "temperature", "unit",
    "metric", "config.yaml", "folder", "title", "policy", "seed's rival",
)  # fmt: skip


def hostile(folder, name):
    """Return the folder of a run, finished, with a hostile text in one place of it."""

    def text(field, usual):
        return HOSTILE if field == name else usual

    folder = folder / ("<b>'&amp;\"name" if name == "folder" else "run")
    agent, kind = text("agent", "trained"), text("kind", "one_fact")
    temperature = text("temperature", "1.0")
    rows = [row(a, kind, temperature, n, text("id", "a")) for a in (agent, "other") for n in (4, 8)]
    cell = dict(agent=agent, question=kind, temperature=temperature, length=4)
    one = record(
        ("none", text("memory", "Anna met Otto."), text("memory", "Anna met Otto.")),
        text("answer", "\\boxed{Lima}"),
        id=text("id", "a"), question=text("question", "Where?"), error=text("error", ""),
        answers=[text("accepted answer", "Lima")], kind=text("kind of a record", "one_fact"),
        agent=text("agent of a record", "memagent"), form=text("form", "boxed"), settings="s",
    )  # fmt: skip
    one["turns"][0]["section"] = text("section", "Anna met Otto.")
    folder_of(folder, [], records=[one | {"cell": cell}, one | {"sample": 1}])
    summary = summarise(rows)
    summary["unit"] = text("unit", "sections")
    summary["trained_on"] = [
        {"policy": text("policy", "mine"), "agents": ["trained"], "known": 4,
         "questions": {kind: {"asked": 2, "seen": 1}}},
    ]  # fmt: skip
    pair = dict(seed=1, against=text("seed's rival", "b"), temperature="1.0", length=4)
    summary["seeds"] = [pair | dict(mean=0.5, low=0.1, high=0.9, n=9)]
    if name == "metric":
        summary["metric"] = HOSTILE
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(clean(text("config.yaml", "run: {}")))
    return folder


@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize("name", FIELDS)
def test_a_hostile_text_in_any_field_stands_there_as_text(tmp_path, monkeypatch, name):
    if name not in ("agent", "kind", "unit", "metric"):  # which no plot has
        monkeypatch.setattr(plots, "_svg", unrendered)
    folder = hostile(tmp_path, name)
    title = HOSTILE if name == "title" else ""
    html = write_report(folder, title).read_text(encoding="utf-8")
    page_ = Page(html)  # nothing but our own elements, and no script but the one of the policy
    policy = re.search('Content-Security-Policy" content="([^"]*)"', html)[1]
    assert re.fullmatch("default-src 'none'; style-src 'unsafe-inline'", policy)
    assert not re.search("<script>alert|<img|[\0-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", html)
    shown = "<b>'&amp;\"name" if name == "folder" else "<script>alert("
    # by which something is looked up, not shown; of which a few characters are
    if name not in ("agent of a record", "form", "id"):
        assert shown in page_.text
