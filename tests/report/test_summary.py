"""What rows say together: means, intervals, paired differences, the table."""

import io
import json
import random
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from conftest import cell_of
from rich.console import Console
from run_folders import row
from scipy import stats

from memagent import Agent
from report.folder import Run
from report.page import page_of
from report.rows import Cell
from report.summary import (
    METRICS,
    compare,
    interval,
    markdown_of,
    summarise,
    table,
    wilson,
    write_summary,
)


@pytest.mark.parametrize(("right", "n", "low", "high"), [
    # Newcombe, Statistics in Medicine 17 (1998), Table I, method 3
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
    (1, 29, 0.0061, 0.1718),
])  # fmt: skip
def test_wilson_against_published_values(right, n, low, high):
    assert wilson(right / n, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 - right / n, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def asked(agent, values, **other):
    """Return a row for each question, which has this reward."""
    return [row(agent, "q", id=str(k), reward=value, **other) for k, value in enumerate(values)]


def printed(summary, width=80):
    """Return the lines of the table in a terminal of that width."""
    console = Console(width=width, file=io.StringIO())
    console.print(table(summary, width))
    return console.file.getvalue().splitlines()


def test_the_summary_of_a_hand_made_example():
    rows = [
        row("untrained", length=16, reward=0.0, prediction=None, tokens_read=300),
        row("untrained", length=16, id="b", reward=0, error="x", prediction=None, tokens_read=100),
        row("trained", length=16),
        row("trained", length=16, reward=0.0, sample=1),
        # one sample only: the question still weighs as much as the other
        row("trained", length=16, id="b", f1=0.5),
        row("trained"),
        row("trained", temperature="0.0", reward=0.0),
        row("trained", "two_hop", id="c"),
    ]
    summary = summarise(rows, "documents")
    expected = {
        ("trained", "one_fact", "1.0", 4): [1.0],
        ("trained", "one_fact", "0.0", 4): [0.0],
        ("trained", "two_hop", "1.0", 4): [1.0],
        ("untrained", "one_fact", "1.0", 16): [0.0, 0.0],
        ("trained", "one_fact", "1.0", 16): [0.5, 1.0],
    }  # by length, and then as they came
    assert [astuple(Cell.from_row(record)) for record in summary["cells"]] == [*expected]
    for values, record in zip(expected.values(), summary["cells"], strict=True):
        low, high = interval(values)
        leaf = {"mean": sum(values) / len(values), "n": len(values), "low": low, "high": high}
        assert record == record | leaf
        assert {*record} == {*Cell.__dataclass_fields__, *leaf, *METRICS}
    assert cell_of(summary, "trained", "one_fact", "1.0", 16)["f1"] == 0.25
    none = cell_of(summary, "untrained", "one_fact", "1.0", 16)
    assert (none["tokens_read"], none["failed"], none["empty"]) == (200, 0.5, 0.5)
    assert summary["unit"] == "documents" and summary["settings"] == ["s"]
    assert json.loads(json.dumps(summary)) == summary


def test_the_table_fits_80_columns_with_five_lengths():
    agents, kinds = ("trained", "untrained", "[red]context"), ("one_fact", "two_hop_reverse")
    rows = [
        row(agent, kind, length=n)
        for agent in agents for kind in kinds for n in (4, 16, 64, 256, 1024)
    ]  # fmt: skip
    summary = summarise(rows)
    for record in summary["cells"]:
        record |= {"mean": 0.99, "low": 0.97, "high": 1.0, "n": 200}
    for more, shown in (((), "99 97-100"), ((4096, 16384), "99 ")):  # then without intervals
        summary["cells"] += [summary["cells"][0] | {"length": n} for n in more]
        text = printed(summary)
        assert max(map(len, text)) <= 80
        # every line has its five cells, none wrapped, and no name is cut
        assert sum(f"{line} ".count(shown) >= 5 for line in text) == 6
        assert all(sum(f" {name} " in line for line in text) == 2 for name in agents)
        assert {*kinds} <= {line.strip() for line in text}


def test_tables_say_how_often_something_went_wrong():
    responses = ("Lima", "<think>Lima", " ", "so \\boxed{")
    rows = asked("a", [1.0]) + [
        row("a", "q", id=response, reward=0.0, prediction=None, response=response)
        for response in responses
    ]
    gone = row("b", "q", length=8, reward=0.0, error="gone", prediction=None, response="Lima")
    summary = summarise([*rows, gone])
    shares = [[cell[name] for name in ("unformed", "empty", "failed")] for cell in summary["cells"]]
    assert shares == [[2 / 5, 2 / 5, 0], [0, 0, 1]]
    for text in (" ".join(" ".join(printed(summary, 200)).split()), markdown_of(summary)):
        assert "failures, counted as wrong: 1 of 6" in text and "wrong: 2 of 6" in text
    assert "wrong" not in markdown_of(summarise(rows[:1]))


@pytest.mark.parametrize(("agents", "pairs"), [
    ("full untrained trained", "trained-full trained-untrained"),  # rows come in any order
    ("memagent full memagent@untrained full@untrained",
     "memagent-full memagent-memagent@untrained memagent-full@untrained full-full@untrained"),
    ("memagent@untrained memagent", "memagent@untrained-memagent"),
])  # fmt: skip
def test_the_trained_policy_is_paired_with_the_untrained_one(agents, pairs):
    rows = [each for agent in agents.split() for each in asked(agent, [1.0] * 3)]
    assert {f"{p['a']}-{p['b']}" for p in summarise(rows)["paired"]} == {*pairs.split()}


def test_counts_are_summed_and_rates_are_those_of_the_sums():
    class Counting(Agent):
        rates = {"kept": ("kept", "seen"), "lost": ("lost", "asked")}

    rows = [row("a", "q", id=str(k), counts={"kept": k, "seen": 2}) for k in (1, 2)]
    (cell,) = summarise(rows, agents={"a": Counting()})["cells"]
    assert cell["counts"] == {"kept": 3, "seen": 4} and cell["rates"] == {"kept": 0.75}


def test_the_summary_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, summarise(asked("a", [1.0])))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write_summary(path, summarise(asked("a", [1.0], seconds=float("nan"))))
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_compare_is_paired():
    rng = random.Random(0)
    right = [float(rng.random() >= 0.5) for _ in range(200)]
    fewer = [value * (k % 10 > 0) for k, value in enumerate(right)]  # right where a is, mostly
    a, b = asked("a", right), asked("b", fewer)
    result = compare(a, b)
    assert result["n"] == 200
    assert result["mean"] == pytest.approx(sum(map(float.__ne__, right, fewer)) / 200)
    # unpaired, two shares near 1/2 of 200 questions differ by 0.1 either way by chance alone
    assert 0 < result["low"] < result["mean"] < result["high"] < result["mean"] + 0.06
    assert compare(a, b) == result and compare(b, a)["mean"] == -result["mean"]
    assert compare(a[:50], b[25:])["n"] == 25  # only what both were asked
    assert compare(a, asked("b", [1.0], length=8)) == {}
    twice = asked("a", [0.0]) + asked("a", [1.0], sample=1)
    assert compare(twice, asked("b", [0.0]))["mean"] == 0.5
    worse = compare(asked("a", [0.0] * 3), asked("b", [1.0] * 3))
    assert (worse["mean"], worse["low"], worse["high"]) == (-1, -1, -wilson(1, 3)[0])


def sandwich(values, documents):
    """The interval of a constant by least squares, robust to clusters, with both corrections, in
    matrices as the textbooks write it (statsmodels: cov_type="cluster", use_t=True)."""
    y, x = np.asarray(values, dtype=float), np.ones((len(values), 1))
    bread = np.linalg.inv(x.T @ x)
    beta = bread @ x.T @ y
    scores = [x[of].T @ (y - x @ beta)[of] for of in (np.equal(documents, d) for d in {*documents})]
    n, (size, k) = len(scores), x.shape
    small = n / (n - 1) * (size - 1) / (size - k)
    error = np.sqrt((bread @ sum(np.outer(s, s) for s in scores) @ bread * small).item())
    return stats.t.interval(0.95, n - 1, beta.item(), error)


@pytest.mark.parametrize("n", [2, 6, 20, 200])
def test_the_interval_is_that_of_least_squares_robust_to_documents(n):
    rng = np.random.default_rng(n)
    values = rng.normal(0.5, 0.01, 5 * n)  # far from 0 and 1
    documents = [f"d{k}" for k in (*range(n), *rng.integers(0, n, 4 * n))]  # of any sizes
    assert interval(values, documents) == pytest.approx(sandwich(values, documents))
    # as many questions each: the t interval of the documents' means; one each: of the questions
    means = values.reshape(n, 5).mean(1)
    usual = stats.ttest_1samp(means, 0).confidence_interval()
    assert interval(values, np.repeat(range(n), 5).tolist()) == pytest.approx(usual)
    usual = stats.ttest_1samp(values, 0).confidence_interval()
    for alone in ((), [*range(5 * n)], ["d"] * 5 * n):
        assert interval(values, alone) == pytest.approx(usual)


SIX = [k // 16 for k in range(96)]  # documents of 16 questions


@pytest.mark.parametrize(("values", "documents", "least", "ends"), [
    # all alike: as many answers as there are documents
    ([1.0] * 96, SIX, 0, wilson(1, 6)), ([0.0] * 96, SIX, 0, wilson(0, 6)),
    ([0.3] * 96, SIX, 0, wilson(0.3, 6)), ([1.0] * 96, (), 0, wilson(1, 96)),
    ([1.0] * 96, ["d"] * 96, 0, wilson(1, 96)), ([1.0], ["d"], 0, wilson(1, 1)),
    # no document differs from another, though questions do
    ([0.0, 1.0] * 48, SIX, 0, wilson(0.5, 6)), ([0.1, 0.3] * 48, SIX, 0, wilson(0.2, 6)),
    # differences may err to both sides
    ([1.0] * 96, SIX, -1, wilson(1, 6)), ([0.0] * 96, SIX, -1, (-wilson(0, 6)[1], wilson(0, 6)[1])),
    ([-1.0] * 96, SIX, -1, (-1, -wilson(1, 6)[0])),
    ([1.0, -1.0] * 48, SIX, -1, (-wilson(0, 6)[1], wilson(0, 6)[1])),
    # shares end at 0 and 1, differences at -1, and what is none nowhere
    ([0, 1], (), 0, (0, 1)), ([-1, 0.9], (), -1, (-1, 1)),
    ([0, 3], (), 0, (1.5 - 12.7062 * 1.5, 1.5 + 12.7062 * 1.5)), ([2.0] * 96, SIX, 0, (2, 2)),
])  # fmt: skip
def test_an_interval_where_nothing_varies_and_at_its_ends(values, documents, least, ends):
    assert interval(values, documents, least) == pytest.approx(ends)


@pytest.mark.parametrize("n", [6, 20, 60])
def test_of_100_intervals_95_hold_the_truth_however_few_the_documents(n):
    """A bootstrap over documents holds it .89 of the time with six, .93 with 20, .94 with 60."""
    rng, held = np.random.default_rng(0), 0
    documents = np.repeat(range(n), 8).tolist()
    for _ in range(2000):  # documents are easy or hard: their chances are those of beta(4, 4)
        low, high = interval(rng.random(8 * n) < np.repeat(rng.beta(4, 4, n), 8), documents)
        held += low <= 0.5 <= high
    assert 0.935 < held / 2000 < 0.965


def about(agent, values, documents, **other):
    """Return a row for each question, which is about this document."""
    made = zip(asked(agent, values, **other), documents, strict=True)
    return [each | {"document": name} for each, name in made]


ALIKE = [float(k % 2) for k in range(8) for _ in range(16)]  # four documents right, four wrong
EIGHT = [f"d{k}" for k in range(8) for _ in range(16)]


@pytest.mark.parametrize(("documents", "n", "ends", "words"), [
    (EIGHT, 8, interval(ALIKE[::16]), "(8 a cell)"),
    # one document: over its questions, and every table says so
    (["d"] * 128, 1, interval(ALIKE), "(1 a cell); of a single document over its questions"),
    ([None] * 128, None, interval(ALIKE), ""),  # rows of an early version name none
])  # fmt: skip
def test_answers_about_one_document_are_not_independent(documents, n, ends, words):
    summary = summarise([*about("a", ALIKE, documents), *about("b", [0.0] * 128, documents)])
    for record in (summary["cells"][0], *summary["paired"]):
        assert (record["low"], record["high"]) == pytest.approx(ends)
        assert record.get("documents") == n
    assert summary["cells"][1]["high"] == wilson(0, 128 if n in (1, None) else n)[1]
    for text in (markdown_of(summary), " ".join(printed(summary, 400))):
        assert words in text and (n or "intervals over documents" not in text)
    shown = page_of(Run(Path(), summary)).partition("In numbers")[2]
    assert shown.count("n 128, one document") == 3 * (n == 1)


def test_documents_of_one_question_are_one():
    """One at several lengths, each time in another document, is one; so are its samples."""
    a, b = (
        about(agent, values, [f"4, {k}" for k in range(8)], length=4)
        + about(agent, values, [f"16, {k}" for k in range(8)], length=16)
        for agent, values in (("a", ALIKE[::16]), ("b", [0.0] * 8))
    )
    ends = interval(ALIKE[::16])
    pooled = compare(a + [each | {"sample": 1} for each in a], b)
    assert (pooled["n"], pooled["documents"]) == (16, 8)
    assert (pooled["low"], pooled["high"]) == pytest.approx(ends)
    other = compare(b, a)
    assert (other["low"], other["high"]) == pytest.approx((-ends[1], -ends[0]))
    # what shares one of its documents shares all of them
    more = [each | {"id": f"next to {each['id']}"} for each in a[:8]]
    pooled = compare(a + more, b + [each | {"reward": 0, "sub_em": 0.0} for each in more])
    assert (pooled["n"], pooled["documents"]) == (24, 8)


def test_the_categories_with_answers_are_pooled():
    """By hand: of 256 questions about eight conversations half are right, by whole conversations;
    category 5 is left out, and nothing is counted twice."""
    one, four, five = "1 multi-hop", "4 single-hop", "5 adversarial"
    rows = [
        row(agent, f"{kind}, official metric", "0.0", 32, f"{k}", document=f"d{k % 8}",
            reward=1.0 if kind == five else float(k % 8 < 4))
        for agent, kind in (("a", one), ("a", four), ("a", five), ("b", four)) for k in range(128)
    ]  # fmt: skip
    summary = summarise(rows)
    (pooled,) = summary["pooled"]  # of b there is nothing to pool
    values = [float(k % 8 < 4) for k in range(256)]
    low, high = interval(values, [f"d{k % 8}" for k in range(256)])
    assert pooled == {
        "agent": "a", "question": "1 to 4, official metric", "temperature": "0.0", "length": 32,
        "n": 256, "mean": 0.5, "documents": 8, "low": low, "high": high,
    }  # fmt: skip
    assert f"| a | 0.0 | 50.0 [{100 * low:.1f}, {100 * high:.1f}] |" in markdown_of(summary)
    assert summarise(asked("a", [1.0]))["pooled"] == []
