"""What rows say together: means, intervals, paired differences, fates, the table."""

import io
import json
import random
from dataclasses import astuple

import numpy as np
import pytest
from conftest import cell_of
from rich.console import Console
from test_page import row

from report.rows import FATES, Cell
from report.summary import (
    METRICS,
    bootstrap,
    cells,
    compare,
    csv_of,
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
    assert [astuple(cell) for cell, _ in cells(summary)] == [*expected]
    for values, record in zip(expected.values(), summary["cells"], strict=True):
        low, high = bootstrap(values)
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
    del summary["cells"][0]["unformed"]  # of an earlier version
    assert len(csv_of(summary).splitlines()) == 3


@pytest.mark.parametrize(("agents", "pairs"), [
    ("full untrained trained", "trained-full trained-untrained"),  # rows come in any order
    ("memagent full memagent@untrained full@untrained",
     "memagent-full memagent-memagent@untrained memagent-full@untrained full-full@untrained"),
])  # fmt: skip
def test_the_trained_policy_is_paired_with_the_untrained_one(agents, pairs):
    rows = [each for agent in agents.split() for each in asked(agent, [1.0] * 3)]
    assert {f"{p['a']}-{p['b']}" for p in summarise(rows)["paired"]} == {*pairs.split()}


def test_depths_fates_and_occupancy():
    def read(id, reward, held, **other):
        usual = dict(sections=10, needed=1, seen=[2], memory_most=1, depths=[], occupancy=[])
        return row("a", "q", "1.0", 4, id, reward, held=held, **usual | other)

    rows = [
        read("1", 1.0, [[2, 1]], depths=[0.95, 0.31], occupancy=[1.0, 3.0], memory_most=9),
        read("2", 0.0, [[2, 1], [8, 0]], depths=[0.39], occupancy=[3.0, 3.0]),
        read("3", 0.0, [], depths=[1.0], occupancy=[2.0]),
        read("4", 0.0, [], seen=[]),
        read("5", 0.0, [], needed=0),
        read("6", 0.5, [[2, 1], [3, 2]], needed=3),
        read("7", 0.0, [[2, 1]]),
        read("8", 0.0, [[2, 1]], error="gone"),
    ]
    (cell,) = summarise(rows)["cells"]
    assert cell["depths"]["n"] == [0, 0, 0, 2, 0, 0, 0, 0, 0, 1]
    assert (cell["depths"]["mean"][3], cell["depths"]["mean"][9]) == (0.5, 0.0)
    left = [0] * 7 + [1, 0, 0]
    assert cell["fates"] == dict.fromkeys(FATES, 1) | {"wrong": 6, "left": left}
    assert cell["occupancy"] == {"mean": [2.0, 3.0], "most": 9}


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


def test_a_constant_difference_has_width_on_the_side_it_may_err():
    """One of 0 on both sides, as far as the questions tell."""
    ones, zeros = asked("a", [1.0] * 3), asked("b", [0.0] * 3)
    low, high = wilson(1.0, 3)
    for sides, mean, ends in (
        ((ones, zeros), 1.0, (low, high)),
        ((zeros, ones), -1.0, (-high, -low)),
        ((ones, ones), 0.0, (low - 1, 1 - low)),
    ):
        made = compare(*sides)
        assert (made["mean"], made["low"], made["high"]) == pytest.approx((mean, *ends))


def test_the_bootstrap_draws_questions_and_has_width_where_all_agree():
    def plainly(values, draws=4000):
        chance = random.Random(2)
        means = sorted(
            sum(chance.choices(values, k=len(values))) / len(values) for _ in range(draws)
        )
        return means[int(0.025 * draws)], means[int(0.975 * draws)]

    rng = np.random.default_rng(1)
    for values in ((rng.random(128) < 0.7).astype(float), rng.random(40)):
        assert bootstrap(values) == pytest.approx(plainly([*values]), abs=0.015)
        assert bootstrap(values) == bootstrap(values)
    assert bootstrap([1.0] * 20) == wilson(1.0, 20) and bootstrap([0.0]) == wilson(0.0, 1)
    # drawn in several parts
    assert bootstrap(np.arange(3000) % 2)[1] == pytest.approx(0.518, abs=0.003)


def test_questions_about_one_document_are_drawn_together():
    """Cases known by hand: all of a document alike, and documents that are all alike."""
    alike = [float(k % 2) for k in range(8) for _ in range(16)]  # four documents right, four wrong
    names = [f"d{k}" for k in range(8) for _ in range(16)]
    low, high = bootstrap(alike, names)
    whole = bootstrap([float(k % 2) for k in range(8)])
    assert (low, high) == pytest.approx(whole, abs=0.13)  # steps of 1/8
    assert high - low > 2.5 * np.subtract(*reversed(bootstrap(alike)))
    mixed = [float(k % 2) for _ in range(8) for k in range(16)]
    assert bootstrap(mixed, names) == (0.5, 0.5)  # no document differs from another
    for alone in ([*map(str, range(128))], ["d"] * 128):
        assert bootstrap(alike, alone) == bootstrap(alike)

    def rows(agent, values):
        made = zip(asked(agent, values), names, strict=True)
        return [each | {"document": name} for each, name in made]

    summary = summarise([*rows("a", alike), *rows("b", [0.0] * 128)])
    one, two = summary["cells"]
    assert one["documents"] == two["documents"] == 8 and (one["low"], one["high"]) == (low, high)
    assert [(pair["low"], pair["high"]) for pair in summary["paired"]] == [(low, high)]
    assert "(8 a cell)" in markdown_of(summary)
    older = summarise(asked("a", alike))
    assert "documents" not in older["cells"][0] and "share one" not in markdown_of(older)


def test_the_categories_with_answers_are_pooled_with_both_intervals():
    """By hand: of 256 questions about eight conversations half are right, by whole conversations;
    category 5 is left out, and nothing is counted twice."""
    one, four, five = "1 multi-hop", "4 single-hop", "5 adversarial"
    rows = [
        row(agent, f"{kind}, official metric", "0.0", 32, f"{kind}{k}", document=f"d{k % 8}",
            reward=1.0 if kind == five else float(k % 8 < 4))
        for agent, kind in (("a", one), ("a", four), ("a", five), ("b", four)) for k in range(128)
    ]  # fmt: skip
    summary = summarise(rows)
    (pooled,) = summary["pooled"]  # of b there is nothing to pool
    values = [float(k % 8 < 4) for k in range(256)]
    of_both = bootstrap(values, [f"d{k % 8}" for k in range(256)]), bootstrap(values)
    assert pooled == {
        "agent": "a", "question": "1 to 4, official metric", "temperature": "0.0", "length": 32,
        "n": 256, "mean": 0.5, "documents": 8,
        **dict(zip(("low", "high"), of_both[0], strict=True)),
        **dict(zip(("low_questions", "high_questions"), of_both[1], strict=True)),
    }  # fmt: skip
    assert pooled["high"] - pooled["low"] > 3 * (pooled["high_questions"] - pooled["low_questions"])
    of_one = cell_of(summary, "a", "4 single-hop, official metric", "0.0", 32)
    assert (of_one["low_questions"], of_one["high_questions"]) == bootstrap(values[:128])
    text = markdown_of(summary)
    for low, high in of_both:
        assert f"| a | 0.0 | 50.0 [{100 * low:.1f}, {100 * high:.1f}] |" in text
    assert "n = 128 questions a cell" in text and csv_of(summary).count(pooled["question"]) == 2
    assert summarise(asked("a", [1.0]))["pooled"] == []
