"""Every figure of docs/results.md that a file of bench/results/ can give is its own.

A row of a table or a part of a sentence is written anew from the files, rounded as the documents
round, and has to stand in the document: a figure that is changed here or there is found.

What no file gives: the demo, its longer form, looking back, the store edited by tools, LoCoMo,
streams, known solutions, the two orders of the prompt, long documents; of the agents side by side
what is said of the warm start; of the real model its training, the cells at 4, 16 and 64
passages and bm25 of two sections at 256, every interval and paired difference of questions that
share documents, what became of answers in the memory, 10 documents of HotpotQA but untrained, and
earlier or further runs of a benchmark ("in two runs before it", "in six runs"). Not looked up: the
tables of real.json, h100.json, reader-256.json, untrained.json and reader-baselines.json.
Rows of the three seeds, the plot of real text: tests/test_front_page.py.
"""

import json
from collections.abc import Iterator
from statistics import fmean

import pytest

from bench.__main__ import ORDER, markdown
from bench.common import RESULTS, ROOT
from dev import agents


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


def of_agents() -> Iterator[str]:
    """All agents side by side: each row of dev/agents.py's tables but those that are left out."""
    found = load("agents")
    for ledger, costs_at in ((False, 64), (True, 12)):
        some = [cell for cell in found if (cell["question"] == "ledger") == ledger]
        for table in agents.tables(some, costs_at):
            rows = [line for line in table.splitlines() if line.startswith("| ")]
            yield from (
                rows[1:]
                if ledger
                else (line for line in rows[1:] if not line.startswith(("| newest |", "| none |")))
            )
    cells = {(c["agent"], c["question"], c["length"]): c for c in found if not c["alone"]}
    assert all(
        cells[agent, *key[1:]]["mean"] == 0
        for key in cells
        for agent in ("newest", "none")
        if key[1] != "ledger"
    )

    def unread(agent: str, question: str, length: int = 64) -> str:
        return f"{100 * cells[agent, question, length]['rates']['sections_unread']:.0f}"

    def right(agent: str, question: str, length: int = 64) -> str:
        return digits(cells[agent, question, length]["mean"])

    n = {length: {c["n"] for (*_, x), c in cells.items() if x == length} for *_, length in cells}
    yield "n = {}, {}, {} and {} questions a cell".format(*(max(n[x]) for x in (4, 16, 64, 256)))
    yield f"n = {max(n[12])} at 12 and {max(n[24])} at 24"
    yield f"costs memoryr1 answers ({right('memoryr1', 'ledger', 12)})"
    one, two, back = "one_fact", "two_hop", "two_hop_reverse"
    saved = cells["infmem", one, 64]["rates"]["tokens_saved"]
    yield f"saves infmem {unread('infmem', one)} % of the sections of one fact at 64 ({saved:,.0f}"
    yield f"{unread('infmem', two)} % of two facts; at 256, {unread('infmem', one, 256)}"
    yield f"and {unread('infmem', two, 256)} %. Yet"
    more = [
        cells["infmem", kind, 64]["tokens_read"] / cells["memagent", kind, 64]["tokens_read"]
        for kind in (one, two)
    ]
    yield f"than memagent, {more[0]:.1f} and {more[1]:.0f} times at 64"
    yield f"fall to {right('infmem', two, 256)} for two facts at 256"
    yield f"right in {right('infmem', back)} and {right('mem1', back)} at 64 sections"
    before = [c["mean"] for (a, q, _), c in cells.items() if a == "mem1, before GRPO"]
    yield f"({digits(min(before))} to {digits(max(before))} right)"
    yield f"in {right('mem1', two)} of two facts at 64 and {right('mem1', two, 256)} at 256"
    for kind, text in ((one, "from {} to {}"), (two, "from {} to {}, and made it read")):
        yield text.format(right("infmem, before GRPO", kind), right("infmem", kind))
    steps = (
        f"{unread('infmem, before GRPO', kind)} to {unread('infmem', kind)} %"
        for kind in (one, two)
    )
    yield f"(unread: {', '.join(steps)})"


def of_gates() -> Iterator[str]:
    """GRU-Mem beside memagent and infmem: each row, and what its gates leave unread."""
    found = load("gates")
    for table in agents.tables(found, 64):
        yield from [line for line in table.splitlines() if line.startswith("| ")][1:]
    (n,) = {c["n"] for c in found}
    yield f"n = {n} questions a cell, the same"
    cells = {(c["agent"], c["question"], c["length"]): c for c in found}
    ours, theirs = (cells[agent, "one_fact", 64] for agent in ("grumem", "memagent"))
    two = cells["grumem", "two_hop", 64]
    yield f"reads {100 * (1 - ours['rates']['sections_unread']):.0f} % of the sections of one fact"
    yield f"is right in {digits(ours['mean'])}, memagent in {digits(theirs['mean'])}"
    assert not any(
        c["rates"][exits]
        for (agent, kind, _), c in cells.items()
        if agent != "memagent" and kind == "one_fact"
        for exits in ("exits_early", "exits_late")
    )
    yield f"reads {100 * (1 - two['rates']['sections_unread']):.0f} %, and is right in"
    yield f"is right in {digits(two['mean'])}; one"
    wrong = [n * two["rates"][exits] for exits in ("exits_early", "exits_late")]
    assert [round(x) for x in wrong] == [1, 4]
    for name in ("tokens_written", "tokens_read"):
        yield f"{ours[name]:,.0f} tokens"
        yield f"memagent {theirs[name]:,.0f}"
    yield f"answer {digits(cells['grumem, before GRPO', 'one_fact', 64]['mean'])} at 64"


def of_the_findings() -> Iterator[str]:
    reader, untrained = load("reader-256")["memagent"], load("untrained")["256 passages"]
    yield f"{digits(fmean(scores(reader)))} among 256; untrained .03,"
    yield f"untrained .03, {digits(fmean(scores(untrained)))}."
    town = load("town")
    reader, bm25 = (int(sum(scores(town[agent]))) for agent in ("memagent", "bm25"))
    yield f"memagent has {reader} right, bm25 with four sections {bm25}"
    front = words((ROOT / "README.md").read_text(encoding="utf-8"))
    assert f"it has {reader} right" in front
    cells = {(c["agent"], c["question"], c["length"]): c for c in load("twice")["cells"]}
    for kind, name, length in (
        ("two_hop_reverse", "two facts in reverse order", 4),
        ("two_hop_reverse", "two facts in reverse order", 16),
        ("two_hop", "two facts", 16),
        ("one_fact", "one fact", 16),
    ):
        pair = [cells[agent, kind, length] for agent in ("Twice", "memagent")]
        yield row(f"{name}, {length}", *map(interval, pair))
        if (kind, length) == ("two_hop_reverse", 16):
            twice, once = (digits(c["mean"]) for c in pair)
            assert f"`Twice` has {twice} right among 16 sections, `memagent` {once}" in front


def of_absent() -> Iterator[str]:
    found = load("absent")["cells"]
    cells = {(c["others"], c["length"], c["agent"]): interval(c) for c in found}
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
    assert f"to {cells[near, 4, 'memagent'].split()[0]} among four of its article" in front


def of_the_ablation() -> Iterator[str]:
    found = load("ablation")
    cells = {(c["asked"], c["cloze"], c["agent"]): c for c in found["cells"]}
    for asked in ("squad", "2wiki"):
        for agent in ("memagent", "oracle"):
            without, with_them = cells[asked, "without", agent], cells[asked, "with", agent]
            a, b = (found[f"{asked}, {cloze}, {agent}"] for cloze in ("without", "with"))
            difference = sum(a[key][1] - b[key][1] for key in a.keys() | b.keys()) / len(a)
            cells_of_row = interval(without), interval(with_them), without["n"]
            yield f"{row(*cells_of_row)} {digits(difference, '+')} ("


def of_learn() -> Iterator[str]:
    cells = {(c["asked"], c["when"]): c for c in load("learn")["cells"]}
    for asked in ("spans", "questions"):
        before, after = cells[asked, "before"], cells[asked, "after"]
        yield f"| {interval(before)} | {interval(after)} | {after['n']} |"


def interval(cell: dict) -> str:
    return f"{digits(cell['mean'])} ({digits(cell['low'])}-{digits(cell['high'])})"


@pytest.mark.parametrize(
    "claims", [of_peers, of_agents, of_gates, of_the_findings, of_absent, of_the_ablation, of_learn]
)
def test_a_figure_is_that_of_its_file(claims):
    text = words((ROOT / "docs/results.md").read_text(encoding="utf-8"))
    missing = [claim for claim in claims() if words(claim) not in text]
    assert not missing, "\n".join(map(str, missing))


def test_the_table_of_all_benchmarks_is_that_of_their_files():
    table = (RESULTS / "table.md").read_text(encoding="utf-8")
    assert table == markdown([load(name) for name in ORDER]) + "\n"
