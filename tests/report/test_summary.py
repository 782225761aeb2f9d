"""What rows say together: means, intervals, paired differences, fates, the table."""

import io
import json
import random
from dataclasses import astuple

import numpy as np
import pytest
from conftest import cell_of
from rich.console import Console

from agents.rememr1 import ReMemR1
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


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), Table I, method 3
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(right, n, low, high):
    assert wilson(right / n, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 - right / n, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def row(agent, question, temperature, length, id, reward, sample=0, **other):
    cell = dict(agent=agent, question=question, temperature=temperature, length=length)
    made = dict(id=id, sample=sample, prediction="x", error="", settings="s", task="t")
    graded = dict(reward=reward, sub_em=reward, tokens_read=100)
    return dict.fromkeys(METRICS, 0.0) | cell | made | graded | other


def printed(summary, width=80):
    """Return the lines of the table in a terminal of that width."""
    console = Console(width=width, file=io.StringIO())
    console.print(table(summary, width))
    return console.file.getvalue().splitlines()


def said(summary, width=200):
    """Return the words of the table, however its lines are broken."""
    return " ".join(" ".join(printed(summary, width)).split())


def test_the_summary_of_a_hand_made_example():
    rows = [
        row("untrained", "one_fact", "1.0", 16, "a", 0.0, prediction=None, tokens_read=300),
        row("untrained", "one_fact", "1.0", 16, "b", 0.0, error="gone", prediction=None),
        row("trained", "one_fact", "1.0", 16, "a", 1.0),
        row("trained", "one_fact", "1.0", 16, "a", 0.0, 1),
        # one sample only: the question still weighs as much as the other
        row("trained", "one_fact", "1.0", 16, "b", 1.0, f1=0.5),
        row("trained", "one_fact", "1.0", 4, "a", 1.0),
        row("trained", "one_fact", "0.0", 4, "a", 0.0),
        row("trained", "two_hop", "1.0", 4, "c", 1.0),
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
    assert summarise([])["cells"] == []


def test_the_table_fits_80_columns_with_five_lengths():
    rows = [
        row(agent, question, temperature, length, "a", 1.0)
        for agent in ("trained", "untrained", "[red]context")
        for question in ("one_fact", "two_hop_reverse") for temperature in ("1.0", "0.0")
        for length in (4, 16, 64, 256, 1024)
    ]  # fmt: skip
    summary = summarise(rows)
    for record in summary["cells"]:
        record |= {"mean": 0.99, "low": 0.97, "high": 1.0, "n": 200}
    text = printed(summary)
    assert max(map(len, text)) <= 80 and "1,024" in text[1]
    # every line has its five cells, none wrapped, and no name is cut
    assert sum(line.count("99 97-100") == 5 for line in text) == 12
    for words, n in ((" trained ", 4), ("two_hop_reverse", 1), ("[red]context", 4)):
        assert sum(words in line for line in text) == n
    assert "n = 200 questions" in text[-1] and "95 % interval" in text[-1]
    summary["cells"] += [summary["cells"][0] | {"length": n} for n in (4096, 16384)]
    text = printed(summary)
    assert max(map(len, text)) <= 80 and sum(line.count(" 99") >= 5 for line in text) == 12
    assert "intervals: table.md" in " ".join(text[-2:])


def test_tables_say_how_often_something_went_wrong():
    rows = [
        row("a", "q", "1.0", 4, "x", 1.0),
        *(row("a", "q", "1.0", 4, k, 0.0, prediction=None, response=response)
          for k, response in enumerate(("Lima", "<think>Lima", " ", "so \\boxed{"))),
        row("b", "q", "1.0", 8, "x", 0.0, error="gone", prediction=None, response="Lima"),
    ]  # fmt: skip
    summary = summarise(rows)
    cell, failed = summary["cells"]
    assert (cell["unformed"], cell["empty"], cell["failed"]) == (2 / 5, 2 / 5, 0)
    assert (failed["unformed"], failed["empty"], failed["failed"]) == (0, 0, 1)
    for text in (said(summary), markdown_of(summary)):
        assert "failures, counted as wrong: 1 of 6" in text
        assert "answers without the form asked for, counted as wrong: 2 of 6" in text
    assert "wrong" not in markdown_of(summarise(rows[:1]))
    del summary["cells"][0]["unformed"]  # of an earlier version
    assert len(csv_of(summary).splitlines()) == 3


def test_settings_that_are_not_the_usual_ones_stand_in_the_tables():
    summary = summarise([row("bm25", "q", "1.0", 4, "a", 1.0)]) | {"altered": {"bm25": "top_k 2"}}
    assert "| bm25 (top_k 2) |" in markdown_of(summary) and "bm25 (top_k 2)" in said(summary)


@pytest.mark.parametrize(("agents", "pairs"), [
    ("full untrained trained", "trained-full trained-untrained"),  # rows come in any order
    ("memagent full memagent@untrained full@untrained",
     "memagent-full memagent-memagent@untrained memagent-full@untrained full-full@untrained"),
])  # fmt: skip
def test_the_trained_policy_is_paired_with_the_untrained_one(agents, pairs):
    rows = [row(agent, "q", "1.0", 4, str(i), 1.0) for agent in agents.split() for i in range(3)]
    assert {f"{p['a']}-{p['b']}" for p in summarise(rows)["paired"]} == {*pairs.split()}


def test_compare_averages_samples_and_a_constant_difference_has_width_on_the_side_it_may_err():
    def side(agent, *values):
        return [row(agent, "q", "1.0", 4, str(i), value) for i, value in enumerate(values)]

    ones, zeros = side("a", 1.0, 1.0, 1.0), side("b", 0.0, 0.0, 0.0)
    up, down = compare(ones, zeros), compare(zeros, ones)
    assert (up["mean"], up["low"], up["high"]) == (1.0, *wilson(1.0, 3))
    assert (down["low"], down["high"]) == (-up["high"], -up["low"])
    twice = [row("a", "q", "1.0", 4, "0", reward, int(reward)) for reward in (0.0, 1.0)]
    assert compare(twice, zeros)["mean"] == 0.5


def test_depths_fates_and_occupancy():
    def read(id, reward, held, depths=(), occupancy=(), **other):
        read = dict(sections=10, needed=1, seen=[2], memory_most=1) | other
        more = dict(held=held, depths=[*depths], occupancy=[*occupancy])
        return row("a", "q", "1.0", 4, id, reward, **read | more)

    rows = [
        read("1", 1.0, [[2, 1]], [0.95, 0.31], [1.0, 3.0], memory_most=9),
        read("2", 0.0, [[2, 1], [8, 0]], [0.39], [3.0, 3.0]),
        read("3", 0.0, [], [1.0], [2.0]),
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
    write_summary(path, summarise([row("a", "q", "1.0", 4, "a", 1.0)]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write_summary(path, summarise([row("a", "q", "1.0", 4, "a", 1.0, seconds=float("nan"))]))
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_compare_is_paired():
    rng = random.Random(0)
    hard = [rng.random() < 0.5 for _ in range(200)]
    a = [row("a", "q", "1.0", 4, str(i), float(not h)) for i, h in enumerate(hard)]
    b = [
        row("b", "q", "1.0", 4, str(i), float(not h and i % 10 > 0)) for i, h in enumerate(hard)
    ]  # right where a is, but for some
    lost = sum(x["sub_em"] != y["sub_em"] for x, y in zip(a, b, strict=True))
    result = compare(a, b)
    assert result["n"] == 200 and result["mean"] == pytest.approx(lost / 200)
    # unpaired, two shares near 1/2 of 200 questions differ by 0.1 either way by chance alone
    assert 0 < result["low"] < result["mean"] < result["high"] < result["mean"] + 0.06
    assert compare(a, b) == result and compare(b, a)["mean"] == -result["mean"]
    assert compare(a, a) == {
        "mean": 0.0,
        "n": 200,
        "low": -wilson(0.0, 200)[1],
        "high": wilson(0.0, 200)[1],
    }  # both sides, as far as 200 tell
    assert compare(a[:50], b[25:])["n"] == 25  # only what both were asked
    assert compare(a, [row("b", "q", "1.0", 8, "0", 1.0)]) == {}


def test_the_bootstrap_draws_questions_and_has_width_where_all_agree():
    def plainly(values, draws=4000):
        chance = random.Random(2)
        means = sorted(
            sum(chance.choices(values, k=len(values))) / len(values) for _ in range(draws)
        )
        return means[int(0.025 * draws)], means[int(0.975 * draws)]

    rng = np.random.default_rng(1)
    for values in ((rng.random(128) < 0.7).astype(float), rng.random(40), rng.normal(size=300)):
        assert bootstrap(values) == pytest.approx(plainly([*values]), abs=0.015)
        assert bootstrap(values) == bootstrap(values)
    assert bootstrap([1.0] * 20) == wilson(1.0, 20) and bootstrap([0.0]) == wilson(0.0, 1)
    assert bootstrap(np.arange(3000) % 2)[1] == pytest.approx(
        0.518, abs=0.003
    )  # drawn in several parts


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
    assert bootstrap(alike, [*map(str, range(128))]) == bootstrap(alike)
    assert bootstrap(alike, ["d"] * 128) == bootstrap(alike)

    def rows(agent, values):
        return [row(agent, "q", "0.0", 4, f"i{k}", value, document=name)
                for k, (value, name) in enumerate(zip(values, names, strict=True))]  # fmt: skip

    summary = summarise([*rows("a", alike), *rows("b", [0.0] * 128)])
    one, two = summary["cells"]
    assert one["documents"] == two["documents"] == 8 and (one["low"], one["high"]) == (low, high)
    assert [(pair["low"], pair["high"]) for pair in summary["paired"]] == [(low, high)]
    assert "documents where questions share one (8 a cell)" in markdown_of(summary)
    older = summarise([{k: v for k, v in r.items() if k != "document"} for r in rows("a", alike)])
    assert "documents" not in older["cells"][0] and "share one" not in markdown_of(older)


def locomo_rows(agent="a", categories=("1 multi-hop", "4 single-hop", "5 adversarial")):
    """Eight conversations of 16 questions in each category; conversations differ, questions not."""
    return [
        row(agent, f"{kind}, official metric", "0.0", 32, f"{kind}{k}", right, document=f"d{k % 8}")
        for kind in categories
        for k in range(16 * 8)
        for right in [float(k % 8 < 4) if kind[0] in "1234" else 1.0]
    ]


def test_the_categories_with_answers_are_pooled_with_both_intervals():
    """By hand: half of 256 questions right, by whole conversations; category 5 is left out."""
    summary = summarise([*locomo_rows(), *locomo_rows("b", ("4 single-hop",))])
    (pooled,) = summary["pooled"]  # of b there is nothing to pool
    values = [float(k % 8 < 4) for k in range(256)]
    documents = [f"d{k % 8}" for k in range(256)]
    assert pooled == {
        "agent": "a", "question": "1 to 4, official metric", "temperature": "0.0", "length": 32,
        "n": 256, "mean": 0.5, "documents": 8,
        **dict(zip(("low", "high"), bootstrap(values, documents), strict=True)),
        **dict(zip(("low_questions", "high_questions"), bootstrap(values), strict=True)),
    }  # fmt: skip
    assert pooled["high"] - pooled["low"] > 3 * (pooled["high_questions"] - pooled["low_questions"])
    of_one = cell_of(summary, "a", "4 single-hop, official metric", "0.0", 32)
    assert (of_one["low_questions"], of_one["high_questions"]) == bootstrap(values[:128])
    assert sum(cell["n"] for cell in summary["cells"]) == 4 * 128  # none is counted twice


def test_tables_show_the_pooled_row_with_both_intervals_and_count_it_nowhere():
    summary = summarise(locomo_rows())
    (pooled,) = summary["pooled"]
    lines = markdown_of(summary).splitlines()
    for line, name, ends in (
        (5, "1 to 4, official metric", ("low", "high")),
        (
            6,
            "1 to 4, official metric, interval over questions",
            ("low_questions", "high_questions"),
        ),
    ):
        low, high = (100 * pooled[end] for end in ends)
        assert lines[line] == f"| {name} | a | 0.0 | 50.0 [{low:.1f}, {high:.1f}] |"
    assert "n = 128 questions a cell" in lines[8]
    assert said(summary, 100).count("1 to 4, official metric") == 2
    assert csv_of(summary).count(pooled["question"]) == 2
    older = {name: part for name, part in summary.items() if name != "pooled"}
    assert "1 to 4" not in markdown_of(older)
    assert summarise([row("a", "4 doors", "0.0", 4, "q", 1.0)])["pooled"] == []


def test_counts_are_added_up_and_become_the_rates_of_their_agent():
    zero = dict.fromkeys((name for rate in ReMemR1.rates.values() for name in rate), 0)
    rows = [
        row("a", "q", "1.0", 4, id, 1.0, counts=zero | {"updates": 4} | counts)
        for id, counts in (
            ("1", dict(queries=2, hits=2, ages=5)), ("2", dict(queries=1, hits=1, ages=4)),
            ("3", {}),
        )
    ]  # fmt: skip
    rows.append(row("b", "q", "1.0", 4, "1", 1.0))
    summary = summarise(rows, agents={"a": ReMemR1(), "b": ReMemR1()})
    ((cell, counts),) = cells(summary, "counts")
    assert cell.agent == "a"
    assert counts == zero | {"updates": 12, "queries": 3, "hits": 3, "ages": 9}
    ((_, rates),) = cells(summary, "rates")
    assert rates.keys() == ReMemR1.rates.keys()
    assert (rates["recall_age"], rates["recall_queries"], rates["recall_holds"]) == (3, 0.25, None)
    assert not [*cells(summarise(rows), "rates")]  # nobody says what the counts mean
