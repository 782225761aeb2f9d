"""Every figure of docs/results.md that a file of bench/results/ can give is its own.

A row of a table or a part of a sentence is written anew from the files, rounded as the documents
round, and has to stand in the document: a figure that is changed here or there is found.

What no file gives, the page's own table says ("What is kept"). Not looked up: the tables of
real.json, h100.json and reader-baselines.json.
Rows of the three seeds, the findings: tests/test_front_page.py.
"""

import csv
import json
import re
from collections.abc import Iterator
from statistics import fmean

import pytest

from bench.__main__ import ORDER, markdown
from bench.common import RESULTS, ROOT
from data import NOT_FOUND, sub_em
from report.summary import interval


def load(name: str):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def words(text: str) -> str:
    return " ".join(text.split())


def digits(x: float, sign: str = "") -> str:
    """Return a share to two digits: .98, 1.00, and with a sign +.05, -.01, .00."""
    text = f"{x:{sign}.2f}".replace("0.", ".", 1)
    return ".00" if text in ("+.00", "-.00") and not sign else text


def ratio(found: dict) -> str:
    return f"{digits(found['ratio'])}x ({digits(found['ratio_min'])}-{digits(found['ratio_max'])})"


def bold(found: dict) -> str:
    """Return a ratio that missed its target."""
    times, spread = ratio(found).split()
    return f"**{times}** {spread}"


def scores(found: dict) -> list[float]:
    return [score for _, score in found.values()]


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# ---------------------------------------------------------------- what the documents say


def of_peers() -> Iterator[str]:
    """The benchmarks beside other libraries: `make bench`, the client."""
    results = [load(name) for name in ORDER]
    yield from (line for line in markdown(results).splitlines()[4:])
    cells = {(c["layout"], c["group"], c["vocabulary"]): c for c in load("update")["cells"]}
    for layout, target in (
        ("paper", "`paper` 3 times as fast as TRL's"),
        ("shared", "`shared` 6 times as fast"),
    ):
        few, many = (cells[layout, group, 426] for group in (8, 16))
        ratios = f"{bold(few)} at G = 8, {bold(many)} at G = 16 ({few['repeats']} repeats)"
        yield row(f"update in the order {target}, vocabulary 426", ratios)
    rollouts = load("rollout")
    groups, documents = rollouts["cells"]
    yield (
        f"| rollout 2 times as fast as `generate` | {bold(documents)} for documents; "
        f"{ratio(groups)} for groups: met ({rollouts['repeats']} repeats) |"
    )
    yield f"to {groups['ratio']}"
    client = load("client")
    asked, sides = client["asked"], {name: side["ratio"] for name, side in client["sides"].items()}
    yield f"the same {asked['items']} items, {asked['in_flight']} in flight, greedy"
    yield f"whole processes, {asked['rounds']} rounds"
    same, ids = (
        (digits(r["median"]), f"({digits(r['min'])}-{digits(r['max'])})")
        for r in (sides["ours"], sides["ours, ids"])
    )
    yield f"**{same[0]}** {same[1]} by the same route; {ids[0]} {ids[1]} in token ids"
    yield f"takes {same[0]} times the wall time"
    yield f"our default, {ids[0]} times"
    prefill, trained = load("prefill")["lines"]
    yield f"`shared` prefills {prefill['measured']} of the tokens of `paper`"
    yield f"trains on {trained['measured']} of them"
    yield f"**Python of `rollout()`**: {load('loop')['lines'][0]['measured']} ms a turn"


def of_agents() -> Iterator[str]:
    """All agents side by side: each row."""
    found = load("agents")
    cells = {(c["agent"], c["question"], c["length"]): c for c in found if not c["alone"]}
    alone = {c["agent"]: c for c in found if c["alone"] and c["question"] == "one_fact"}
    one, two, back = "one_fact", "two_hop", "two_hop_reverse"
    for agent in ("memagent", "rememr1", "full", "bm25", "oracle"):
        at = [
            cells[agent, *key] for key in ((one, 64), (one, 256), (two, 64), (two, 256), (back, 64))
        ]
        costs = at[0]["tokens_read"], at[0]["tokens_written"]
        tokens = [f"{count:,.0f}" for count in costs]
        yield row(agent, *map(written, at), *tokens, f"{alone[agent]['seconds']:.2f}")


def of_the_findings() -> Iterator[str]:
    reader, untrained = load("reader-256")["memagent"], load("untrained")["256 passages"]
    yield f"{digits(fmean(scores(reader)))} among 256; untrained .03,"
    yield f"untrained .03, {digits(fmean(scores(untrained)))}."
    town, key = load("town"), keys_of_the_town()
    right = {  # agent -> how many of the questions that the report answers, and of the others
        agent: [
            sum(score for q, (_, score) in town[agent].items() if (key[q] == [NOT_FOUND]) == absent)
            for absent in (False, True)
        ]
        for agent in ("memagent", "bm25")
    }
    (reader, said), (bm25, _) = right.values()
    yield f"memagent has {reader} right, bm25 with four sections {bm25}"
    yield f"to {said} of the ten that it does not answer memagent says"
    front = words((ROOT / "README.md").read_text(encoding="utf-8"))
    assert f"it has {reader} right" in front
    assert f"to {said} of the 10 that town.pdf does not answer" in front
    cells = {(c["agent"], c["question"], c["length"]): c for c in load("twice")["cells"]}
    for kind, name, length in (
        ("two_hop_reverse", "two facts in reverse order", 4),
        ("two_hop_reverse", "two facts in reverse order", 16),
        ("two_hop", "two facts", 16),
        ("one_fact", "one fact", 16),
    ):
        pair = [cells[agent, kind, length] for agent in ("Twice", "memagent")]
        yield row(f"{name}, {length}", *map(written, pair))
        if (kind, length) == ("two_hop_reverse", 16):
            twice, once = (digits(c["mean"]) for c in pair)
            assert f"`Twice` has {twice} right among 16 sections, `memagent` {once}" in front


def of_absent() -> Iterator[str]:
    found = load("absent")["cells"]
    cells = {(c["others"], c["length"], c["agent"]): written(c) for c in found}
    n = {c["length"]: c["n"] for c in found if c["agent"] == "memagent"}
    near = "its article's"
    for others in ("unrelated", near):
        ours, full, bm25 = (cells[others, 4, agent] for agent in ("memagent", "full", "bm25"))
        yield row(others, 4, ours, n[4], full, bm25, n[4])
    for length in (16, 64):
        yield f"| {near} | {length} | {cells[near, length, 'memagent']} | {n[length]} |"
    front = words((ROOT / "README.md").read_text(encoding="utf-8"))
    assert cells["unrelated", 4, "memagent"].startswith("1.00")
    assert f"all of {n[4]} questions" in front
    four, more, most = (cells[near, length, "memagent"].split()[0] for length in (4, 16, 64))
    assert f"to {four} among four of its article, {more} among 16, {most} among 64" in front


def of_real_text() -> Iterator[str]:
    """What is kept of real text; 64 and 256 passages are shared by the same questions."""
    found, untrained = load("reader-256"), load("untrained")
    documents, ours = found["documents"], found["memagent"]
    table = (ROOT / "docs/results.md").read_text().partition("### Single facts in real text")[2]
    at_256 = {
        cells[1].strip(): cells[-2].strip()
        for line in table.splitlines()[:30]
        if len(cells := line.split("|")) == 7
    }
    names = {"full": "full", "bm25": "bm25, four sections", "oracle": "oracle"}
    assert at_256["memagent"] == mean(ours, documents)
    for agent, name in names.items():
        pair = f"memagent - {name.replace(', four sections', ' of four')}, paired"
        assert at_256[name] == mean(found[agent], documents)
        assert at_256[pair] == difference(ours, found[agent], documents)
    cells = [mean(untrained[f"{n} passages"], documents) for n in (64, 256)]
    yield f"| {' | '.join(cells)} |"
    ours, full = (load("hotpotqa-50")[agent] for agent in ("memagent", "full"))
    few, many = (untrained[f"HotpotQA, {n} documents"] for n in (10, 50))
    yield f"memagent {mean(ours, {})}, bm25"
    yield f"full {mean(full, {})}, n = {len(full)} each"
    yield f"minus full {difference(ours, full, {})}"
    yield f"Untrained, memagent has {mean(few, {})}, n = {len(few)}, and"
    yield f"Untrained, memagent has {mean(many, {})}, n = {len(many)};"
    yield f"trained minus untrained, paired: {difference(ours, many, {})}"


def mean(found: dict, documents: dict) -> str:
    """Return the mean score of questions; documents: of those that share one."""
    low, high = interval(scores(found), [documents.get(id, id) for id in found])
    return written({"mean": fmean(scores(found)), "low": low, "high": high})


def difference(a: dict, b: dict, documents: dict) -> str:
    values = [a[id][1] - b[id][1] for id in a]
    ends = interval(values, [documents.get(id, id) for id in a], least=-1)
    low, high = (digits(end, "+") for end in ends)
    return f"{digits(fmean(values), '+')} ({low} to {high})"


def written(cell: dict) -> str:
    return f"{digits(cell['mean'])} ({digits(cell['low'])}-{digits(cell['high'])})"


@pytest.mark.parametrize("claims", [of_peers, of_agents, of_the_findings, of_absent, of_real_text])
def test_a_figure_is_that_of_its_file(claims):
    text = words((ROOT / "docs/results.md").read_text(encoding="utf-8"))
    missing = [claim for claim in claims() if words(claim) not in text]
    assert not missing, "\n".join(map(str, missing))


def test_the_intervals_of_a_file_are_those_of_its_rows():
    for cell in load("agents") + load("twice")["cells"]:  # of 0 and 1, a document each
        right = round(cell["n"] * cell["mean"])
        ends = interval([1.0] * right + [0.0] * (cell["n"] - right))
        assert (cell["low"], cell["high"]) == pytest.approx(ends), cell
    absent = load("absent")
    for cell in absent["cells"]:
        rows = absent[f"{cell['others']}, {cell['length']}, {cell['agent']}"]
        documents = [*map(absent["documents"][str(cell["length"])].get, rows)]
        ends = interval(scores(rows), documents)
        assert (cell["low"], cell["high"]) == pytest.approx(ends, abs=1e-4), cell


def keys_of_the_town() -> dict[str, list[str]]:
    """Return the accepted forms of the answer to every question of town.csv."""
    with (ROOT / "examples/town.csv").open(newline="", encoding="utf-8") as file:
        return {
            r["question"]: (r["answer"] or NOT_FOUND).split(" | ") for r in csv.DictReader(file)
        }


def test_both_agents_of_the_town_are_scored_by_its_one_key():
    town, key = load("town"), keys_of_the_town()
    for agent in ("memagent", "bm25"):
        assert town[agent].keys() == key.keys()
        for question, (answer, score) in town[agent].items():
            assert score == sub_em(answer, key[question]), (agent, question)
    assert key["When did the great fire begin?"] == ["ninth of September 1734", "9 September 1734"]


def test_every_part_of_the_results_says_what_is_kept_of_it():
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    table = text.partition("## What is kept\n")[2].partition("\n## ")[0]
    parts = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.M)[1:]
    titles = re.findall(r"^##+ (.+)$", text, re.M)
    assert [*parts[:-1]] == [t for t in titles if t not in ("What is kept", "Missed targets")]
    kept = {f"{name}.json" for name in re.findall(r"`([\w-]+)\.json`", table)}
    there = {path.name for path in RESULTS.glob("*.json")}
    assert kept == there - {"gpu.json"}  # the user's own, by `python -m bench.gpu`


def test_the_table_of_all_benchmarks_is_that_of_their_files():
    table = (RESULTS / "table.md").read_text(encoding="utf-8")
    assert table == markdown([load(name) for name in ORDER]) + "\n"
