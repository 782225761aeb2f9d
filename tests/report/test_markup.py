"""What becomes HTML: every text escaped, one script at most, and that one by its digest."""

import ast
import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from test_page import HOSTILE, Page, folder_of, record, row

from config.errors import clean
from report.markup import Markup, Section, fill, joined, macro, page, table
from report.page import write_report
from report.summary import summarise

REPORT = Path(__file__).parents[2] / "report"


def test_a_text_is_cleaned_and_escaped_wherever_it_enters_a_page():
    text = " ".join(clean(HOSTILE).split())
    rows = [([HOSTILE, HOSTILE], {HOSTILE: HOSTILE})]
    parts = joined(
        [
            table(HOSTILE, [HOSTILE], rows),
            fill("<p>{}</p>", HOSTILE),
            HOSTILE,
        ]
    )
    made = page(HOSTILE, parts, [Section(HOSTILE, HOSTILE, HOSTILE)])
    assert Page(made).text.count(text) == 13
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


@pytest.mark.usefixtures("rendered")
def test_hostile_texts_in_all_fields_stand_there_as_text(tmp_path):
    rows = [row(f"{HOSTILE}{k}", HOSTILE, HOSTILE, n, HOSTILE) for k in range(2) for n in (4, 8)]
    cell = dict(agent=f"{HOSTILE}0", question=HOSTILE, temperature=HOSTILE, length=4)
    one = record(
        ("none", HOSTILE, HOSTILE), HOSTILE, id=HOSTILE, question=HOSTILE, error=HOSTILE,
        answers=[HOSTILE], kind=HOSTILE, agent=HOSTILE, form=HOSTILE, settings="s",
    )  # fmt: skip
    one["turns"][0]["section"] = HOSTILE
    folder = folder_of(
        tmp_path / "<b>'&amp;\"name", [], records=[one | {"cell": cell}, one | {"sample": 1}]
    )
    known = {HOSTILE: {"asked": 2, "seen": 1}}
    pair = dict(seed=1, against=HOSTILE, temperature="1.0", length=4)
    summary = summarise(rows) | {
        "unit": HOSTILE, "metric": HOSTILE,
        "seeds": [pair | dict(mean=0.5, low=0.1, high=0.9, n=9)],
        "trained_on": [{"policy": HOSTILE, "agents": [HOSTILE], "known": 4, "questions": known}],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(clean(HOSTILE))
    html = write_report(folder).read_text(encoding="utf-8")
    page_ = Page(html)  # nothing but our own elements, and no script but the one of the policy
    policy = re.search('Content-Security-Policy" content="([^"]*)"', html)[1]
    assert re.fullmatch("default-src 'none'; style-src 'unsafe-inline'", policy)
    assert not re.search("<script>alert|<img", html)
    assert clean(html) == html  # no character that steers a page
    assert page_.text.count("<script>alert(") > 30 and "<b>'&amp;\"name" in page_.text
