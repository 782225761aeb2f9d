"""What becomes HTML: every text escaped, one script at most, and that one by its digest."""

import ast
import base64
import hashlib
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from test_page import HOSTILE, METRICS_CSV, Page, folder_of

from config.errors import clean
from report.markup import Markup, Section, as_table, fill, folded, joined, macro, page
from report.page import write_report

REPORT = Path(__file__).parents[2] / "report"


def test_a_text_is_cleaned_and_escaped_wherever_it_enters_a_page():
    text = " ".join(clean(HOSTILE).split())
    table = as_table(HOSTILE, [HOSTILE], [[HOSTILE, HOSTILE, HOSTILE]])
    parts = joined([table, folded(HOSTILE, HOSTILE), fill("<p>{}</p>", HOSTILE), HOSTILE])
    made = page(HOSTILE, parts, [Section(HOSTILE, HOSTILE, HOSTILE)])
    assert Page(made).text.count(text) == 14
    assert "<script" not in made and "<img" not in made


def test_a_value_that_is_missing_is_an_error_and_no_gap():
    with pytest.raises(UndefinedError):
        macro("facts")
    with pytest.raises(UndefinedError):
        macro("line", {"label": "a", "text": "b"})  # no note


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


@pytest.mark.parametrize("path", sorted(REPORT.glob("*.py")), ids=lambda path: path.name)
def test_no_html_is_put_together_from_strings(path):
    """A formatted string with a tag in it would take its values as they are."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            literal = "".join(part.value for part in node.values if isinstance(part, ast.Constant))
            assert not re.search("</?[a-z]", literal), f"{path.name}:{node.lineno}"


def test_the_page_of_a_training_that_goes_on_is_loaded_anew(tmp_path):
    folder = folder_of(tmp_path / "run", [])
    metrics = [f"{line},1,2,3" for line in METRICS_CSV.splitlines()[1:]]
    head = "step,level,reward,step_s,read_tokens,written_tokens\n"
    (folder / "metrics.csv").write_text(head + "\n".join(metrics) + "\n")
    refresh = '<meta http-equiv="refresh" content="20">'
    assert refresh not in write_report(folder).read_text()
    (folder / "summary.json").unlink()
    made = write_report(folder, running=True).read_text()
    assert refresh in made and "30 training steps" in Page(made).text
