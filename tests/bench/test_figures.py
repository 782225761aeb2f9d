"""Every figure of README.md and docs/results.md that a file of bench/results/ can give is its own.

A row of a table or a part of a sentence is written anew from the files, rounded as the documents
round, and has to stand in the document: a figure that is changed here or there is found.

What no file gives: the demo, its longer form, looking back, the store edited by tools, LoCoMo,
streams, known solutions, the two orders of the prompt, long documents; of the agents side by side
what is said of the warm start; of the real model its training, the cells at 4, 16 and 64
passages and bm25 of two sections at 256, every interval and paired difference of questions that
share documents, what became of answers in the memory, 10 documents of HotpotQA but untrained, and
earlier or further runs of a benchmark ("in two runs before it", "in six runs") and the useful
operations of attention and head. Rows of the three seeds in README.md: tests/test_front_page.py.
"""

import json
import re
from collections.abc import Iterator
from statistics import fmean, median

import pytest

from bench.__main__ import ORDER, markdown
from bench.common import RESULTS, ROOT
from dev import agents
from report.summary import bootstrap, difference_interval


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


def share(found: dict) -> str:
    """Return the share of right answers of documents of their own, with its interval."""
    values = scores(found)
    low, high = bootstrap(values)
    return f"{digits(fmean(values))} ({digits(low)}-{digits(high)})"


def paired(one: dict, other: dict) -> str:
    assert one.keys() == other.keys()
    apart = [one[id][1] - other[id][1] for id in one]
    low, high = difference_interval(apart, ())
    return f"{digits(fmean(apart), '+')} ({digits(low, '+')} to {digits(high, '+')})"


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def cell(name: str, column: int, mean: str) -> re.Pattern:
    """Return a row with this mean in one of its columns, for the others stand in no file."""
    return re.compile(rf"\| {re.escape(name)} (?:\|[^|]*){{{column - 1}}}\| {re.escape(mean)} \(")


def at_256(name: str, mean: str) -> re.Pattern:
    return cell(name, 4, mean)


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


def of_h100() -> Iterator[str]:
    found = load("h100")
    lora = found["update_lora_qwen3_4b"]
    half, full = (lora[f"{kind}_adapters"]["paper"] for kind in ("bfloat16", "float32"))
    yield f"**{full['tokens_per_s']:,}**, with bfloat16 adapters **{half['tokens_per_s']:,}**"
    yield f"| LoRA, Qwen3-4B, `paper` | {full['tokens_per_s']:,} | {full['peak_gib']:.1f} |"
    yield f"the default now | {half['tokens_per_s']:,} | {half['peak_gib']:.1f} |"
    loop, fused = (
        kind["updates"][1:] for kind in found["update_full_qwen3_1_7b_fsdp2"] if "updates" in kind
    )
    rate = fmean(update["tokens_per_s"] for update in fused)
    peak = max(update["peak_gib"] for update in fused)
    adam = (1000 * median(update["adam_s"] for update in kind) for kind in (fused, loop))
    yield "| {:,.0f} | {:.1f} | fused AdamW {:.0f} ms, before {:.0f} |".format(
        round(rate, -2), peak, *adam
    )
    yield f"makes {lora['float32_adapters']['shared_over_paper']} times as many turns a second"
    worst, alone = found["flex"]["summary"]["worst_grad"], found["flex"]["attention_alone"]
    yield f"to {1e6 * worst['float32']:.1f}e-6 in float32"
    yield f"to {worst['bfloat16']:.3f} in bfloat16".replace("0.", ".")
    forward, backward = ([one[f"{way}_TFLOPs"] for one in alone] for way in ("fwd", "bwd"))
    yield f"at {min(forward):.0f} to {max(forward):.0f} TFLOP/s, its backward"
    yield f"backward at {min(backward):.0f} to {max(backward):.0f}."
    rewards = found["smollm2_made_up_rewards"]
    for name, text in (
        ("full", "with bfloat16 logits (mean |difference| of log-probs {}, {} steps)"),
        (
            "full_float32_lm_head_on_both_sides",
            "with float32 logits, the default now ({}, {} steps)",
        ),
    ):
        kl, mean = (fmean(s[k] for s in rewards[name]) for k in ("mismatch_kl", "mismatch_mean"))
        text = text.format(f"{mean:.3f}".lstrip("0"), len(rewards[name]))
        yield f"{kl:.4f}".lstrip("0") + f" {text}"


def of_real() -> Iterator[str]:
    """The benchmarks of the real model."""
    parts = load("real")["parts"]

    def spread(found: dict, form: str = ".1f") -> str:
        return "{} ({}-{})".format(*(f"{found[k]:{form}}" for k in ("median", "min", "max")))

    def gradient(x: float) -> str:
        return f"{x:.1e}".replace("e-0", "e-") if x < 1e-3 else f"{x:.2g}".lstrip("0")

    updates = {
        (dtype, layout): parts[f"update-{dtype}-{layout}"]
        for dtype in ("float32", "bfloat16")
        for layout in ("shared", "paper")
    }
    for (dtype, layout), part in updates.items():
        times = ratio(part) if dtype == "float32" else ratio(part).split()[0]
        unit = " GFLOP/s" if (dtype, layout) == ("float32", "shared") else ""
        yield row(
            f"{dtype}, `{layout}`",
            spread(part["seconds"]["ours"]),
            spread(part["seconds"]["trl"]),
            times,
            f"{part['gflop_per_s']:.0f} of {part['matmul_gflop_per_s']:.0f}{unit}, "
            f"{100 * part['of_matmul']:.0f} %",
            gradient(part["gradient_ours_trl"]),
        )
    single, half = (
        [updates[dtype, layout] for layout in ("shared", "paper")]
        for dtype in ("float32", "bfloat16")
    )
    yield f"order `shared`; 1.6 times, `paper` | {bold(single[0])}, in two runs"
    yield f"; {ratio(single[1])}, before it"
    yield f"5 and 2 times in bfloat16 | {bold(half[0])}, {bold(half[1])} |"
    of_products = (f"{100 * part['of_matmul']:.0f} %" for part in single)
    yield "| {} in `shared`, **{}** in `paper`".format(*of_products)
    apart = {key: gradient(part["gradient_ours_trl"]) for key, part in updates.items()}
    yield "| `paper` **{}** and **{}**; `shared` {} and {} |".format(
        apart["float32", "paper"], apart["bfloat16", "paper"],
        apart["float32", "shared"], apart["bfloat16", "shared"],
    )  # fmt: skip

    for dtype, layout in updates:
        part = parts[f"profile-{dtype}-{layout}"]
        ms = part["ms"]
        rest = ms["bookkeeping"] + ms["gathers"]
        names = ("products", "attention", "head and loss", "norms and small operations")
        shown = (*(ms[name] for name in names), ms["casts and copies"], rest)
        yield row(
            f"{dtype}, `{layout}`",
            f"{part['wall_ms'] / 1000:.1f}",
            *(f"{100 * x / sum(ms.values()):.0f} %" for x in shown),
        )

    def rate(found: dict) -> str:
        return spread(found, ",.0f")

    rollouts = {dtype: parts[f"rollout-{dtype}"] for dtype in ("float32", "bfloat16")}
    for dtype, part in rollouts.items():
        yield row(
            dtype,
            *(rate(part["tokens_per_s"][side]) for side in ("generate", "vllm", "packed", "ours")),
            *(ratio(part[f"over_{side}"]) for side in ("generate", "vllm", "packed")),
        )
    first, second = rollouts.values()
    yield f"weights {bold(first['over_packed'])} in float32, {bold(second['over_packed'])} in"
    yield f"trainings, {ratio(first['over_vllm'])} and {ratio(second['over_vllm'])} |"

    ask = parts["ask"]
    yield f"the {ask['turns']} turns of reading a PDF of 100 pages"
    yield f"of 100 pages ({ask['document_tokens']:,} tokens)"
    yield f"of the whole {ask['tokens']['ours']:,} ({ask['written']['ours']:,} of them written)"
    whole = ask["tokens_per_s"]
    yield row(
        "whole",
        *(f"{whole[side]:.0f}" for side in ("ours", "llama.cpp")),
        f"{digits(ask['ratio'])}x",
    )
    quarters = ("median", "first_quartile", "third_quartile")
    by_turn = (
        "{:.0f} ({:.0f}-{:.0f})".format(*(ask["turn_tokens_per_s"][side][q] for q in quarters))
        for side in ("ours", "llama.cpp")
    )
    middle, low, high = (digits(ask["turn_ratio"][q]) for q in quarters)
    yield row("by turn", *by_turn, f"{middle}x ({low}-{high})")


def of_reader() -> Iterator[str]:
    """The real model's answers."""
    cells, untrained, hotpot = load("reader-256"), load("untrained"), load("hotpotqa-50")
    means = {name: digits(fmean(scores(cells[name]))) for name in ("memagent", "full", "oracle")}
    four = digits(fmean(scores(cells["bm25"])))
    for name, mean in (*means.items(), ("bm25, four sections", four)):
        yield at_256(name, mean)
    for name, other in (("full", "full"), ("bm25", "bm25 of four"), ("oracle", "oracle")):
        apart = fmean(scores(cells["memagent"])) - fmean(scores(cells[name]))
        yield at_256(f"memagent - {other}, paired", digits(apart, "+"))
    yield f"at 256 **{means['memagent']}** beside"
    lost = len(cells["memagent"]) - sum(scores(cells["memagent"]))
    yield f"of its {lost} at 256"
    few, many = (scores(untrained[f"{length} passages"]) for length in (64, 256))
    yield f"2026-11-25: {sum(few)} of {len(few)}, and both answers"
    yield f"2026-11-26, {sum(many)} of {len(many)} and"
    yield at_256("memagent, untrained", digits(fmean(many)))
    yield cell("memagent, untrained", 3, digits(fmean(few)))
    yield f"Untrained, memagent has {share(untrained['HotpotQA, 10 documents'])}"
    fifty = untrained["HotpotQA, 50 documents"]
    yield f"Untrained, memagent has {share(fifty)} there, n = {len(fifty)}"
    yield f"trained minus untrained, paired: {paired(hotpot['memagent'], fifty)}"
    yield f"(7,391 tokens): memagent {share(hotpot['memagent'])}"
    yield f"a question, has {share(hotpot['full'])}, n = {len(hotpot['full'])}"
    yield f"minus it, paired: {paired(hotpot['memagent'], hotpot['full'])}"
    wrong = len(hotpot["memagent"]) - sum(scores(hotpot["memagent"]))
    yield f"of memagent's {wrong:.0f} wrong answers"


def of_baselines() -> Iterator[str]:
    """The baselines in several settings. Their scores are a digit a question."""
    found = load("reader-baselines")["scores"]

    def mean(setting: str, cell: str, kind: str = "graded") -> str:
        return digits(fmean(map(int, found[setting][cell][kind])))

    for order in ("shared", "paper"):
        for form in ("plain", "boxed", "sentence"):
            cells = (
                mean(f"{form}, {order}", f"{agent}, 4")
                + (
                    f" ({mean(f'{form}, {order}', f'{agent}, 4', 'by words')})"
                    if form != "plain"
                    else ""
                )
                for agent in ("full", "bm25", "oracle")
            )
            yield row(f"{form}, `{order}`", *cells)
    intervals = (
        (bootstrap(values), fmean(values))
        for cells in found.values()
        for by_rule in cells.values()
        for values in (list(map(int, right)) for right in by_rule.values())
    )
    widest = max(max(mean - low, high - mean) for (low, high), mean in intervals)
    yield f"intervals reach at most {digits(widest)} to either side"
    for k, name in ((1, "one section"), (2, "two"), (4, "four"), (8, "eight")):
        yield row(name, *(mean(f"top_k {k}", f"bm25, {length}") for length in (4, 16, 64)))


def of_the_front_page() -> Iterator[str]:
    reader, untrained = load("reader-256")["memagent"], load("untrained")["256 passages"]
    yield f"{digits(fmean(scores(reader)))} among 256 (untrained .03 and"
    yield f" and {digits(fmean(scores(untrained)))}):"


RESULTS_PAGE, FRONT_PAGE = ROOT / "docs/results.md", ROOT / "README.md"


@pytest.mark.parametrize(
    ("claims", "page"),
    [
        (of_peers, RESULTS_PAGE),
        (of_agents, RESULTS_PAGE),
        (of_h100, RESULTS_PAGE),
        (of_real, RESULTS_PAGE),
        (of_reader, RESULTS_PAGE),
        (of_baselines, RESULTS_PAGE),
        (of_the_front_page, FRONT_PAGE),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_a_figure_is_that_of_its_file(claims, page):
    text = words(page.read_text(encoding="utf-8"))
    missing = [
        claim
        for claim in claims()
        if not (claim.search(text) if isinstance(claim, re.Pattern) else words(claim) in text)
    ]
    assert not missing, "\n".join(map(str, missing))


def test_the_table_of_all_benchmarks_is_that_of_their_files():
    table = (RESULTS / "table.md").read_text(encoding="utf-8")
    assert table == markdown([load(name) for name in ORDER]) + "\n"
