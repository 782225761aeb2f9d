"""Every figure of docs/results.md is one of a file of bench/results/, rounded as there."""

import csv
import json
import re
from pathlib import Path

import pytest

from bench.__main__ import ORDER
from bench.common import RESULTS, ROOT, markdown
from data import NOT_FOUND, sub_em

PAGE = ROOT / "docs/results.md"
FILES = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}


def objects(value):
    """Yield every object of a file, at any depth."""
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from objects(inner)
    if isinstance(value, dict):
        yield value


def share(x: float, sign: str = "") -> str:
    """Return a number to two digits; a rounded 0 has no sign.

    >>> [share(0.9), share(-0.001, "+"), share(0.31, "+")]
    ['0.90', '0.00', '+0.31']
    """
    text = f"{x:{sign}.2f}"
    return "0.00" if float(text) == 0 else text


def written(file: dict) -> set[str]:
    """Return the figures with their ends that a file can give."""
    out = set()
    for of in objects(file):
        if {"mean", "low", "high"} <= of.keys():
            mean, low, high = (of[name] for name in ("mean", "low", "high"))
            out.add(f"{share(mean)} ({share(low)}-{share(high)})")
            out.add(f"{share(mean, '+')} ({share(low, '+')} to {share(high, '+')})")
        for name, unit in (("ratio", "x"), ("median", "")):
            if {name, f"{name}_min"} <= of.keys() or {name, "min", "max"} <= of.keys():
                prefix = "ratio_" if name == "ratio" else ""
                values = [of[name], of[f"{prefix}min"], of[f"{prefix}max"]]
                for form in ("{:.2f}", "{:.1f}", "{:,.0f}"):
                    middle, low, high = map(form.format, values)
                    out.add(f"{middle}{unit} ({low}-{high})")
    if file.get("benchmark") == "bandit":
        for arm in {cell["arm"] for cell in file["cells"]}:
            values = [cell["mean"] for cell in file["cells"] if cell["arm"] == arm]
            ends = share(min(values)), share(max(values))
            out.add(f"{share(sum(values) / len(values))} ({'-'.join(ends)})")
    return out


def test_every_figure_with_its_ends_is_one_of_a_file():
    number = r"[-+]?\d[\d,]*(?:\.\d+)?"
    figures = re.findall(rf"{number}x? \({number}(?:-| to ){number}\)", PAGE.read_text("utf-8"))
    known = set().union(*map(written, FILES.values()))
    known |= {"0.94x (0.89-1.01)"}  # quartiles of real.json
    turns = FILES["real"]["ask"]["turn_ratio"]
    assert (turns["median"], turns["first_quartile"], turns["third_quartile"]) == (0.94, 0.89, 1.01)
    assert len(figures) > 80
    assert not [figure for figure in figures if figure not in known]


def test_every_decimal_of_the_page_is_one_of_a_file():
    """To its digits; a target is one of the benchmark's."""
    numbers = set()
    for text in (json.dumps(FILES), *(path.read_text() for path in (ROOT / "bench").glob("*.py"))):
        numbers |= {float(x) for x in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)}
    targets = {"0.95", "0.93", "0.90", "0.80", "0.92", "0.85", "0.70", "0.75", "0.25", "0.30"}
    versions = {"2.13", "5.17", "1.16", "2.11", "0.31", "0.55", "9.8", "0.05"}  # of a model, too
    page = re.sub(r"\d{4}-\d\d-\d\d", "", PAGE.read_text("utf-8"))
    unknown = []
    for figure in {*re.findall(r"(?<![\d.])\d+\.\d+(?![\d.e])", page)} - targets - versions:
        digits = len(figure.partition(".")[2])
        if not any(f"{abs(x):.{digits}f}" == figure for x in numbers):
            unknown.append(figure)
    assert not unknown


def test_every_file_is_named_and_every_named_file_is_there():
    named = {*re.findall(r"`([\w-]+)\.json`", PAGE.read_text("utf-8"))}
    assert named == FILES.keys() - {"gpu"}  # the user's own, by `python -m bench.gpu`


def test_the_table_of_all_benchmarks_is_made_of_their_files():
    table = (RESULTS / "table.md").read_text(encoding="utf-8")
    assert table == markdown([FILES[name] for name in ORDER]) + "\n"
    page = PAGE.read_text("utf-8")
    assert all(line in page for line in table.splitlines()[4:])


@pytest.mark.parametrize("agent", ["memagent", "bm25"])
def test_both_agents_of_the_town_are_graded_by_its_one_key(agent):
    with Path(ROOT / "examples/town.csv").open(newline="", encoding="utf-8") as file:
        key = {row["question"]: (row["answer"] or NOT_FOUND).split(" | ")
               for row in csv.DictReader(file)}  # fmt: skip
    assert FILES["town"][agent].keys() == key.keys()
    for question, (answer, score) in FILES["town"][agent].items():
        assert score == sub_em(answer, key[question]), question
    right = sum(score for q, (_, score) in FILES["town"][agent].items() if key[q] != [NOT_FOUND])
    assert (
        f"{agent} has {right} right" in PAGE.read_text() or f"sections {right}" in PAGE.read_text()
    )
