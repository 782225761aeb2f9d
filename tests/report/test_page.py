"""The page: its sections, its plots; trajectories as people see them."""

import base64
import io
import json
import os
import re
from dataclasses import asdict
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import steps_run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agents.rememr1 import RecallNotes, ReMemR1, Response
from config.errors import UserError
from data import Task
from memagent import NO_MEMORY, Finish, MemAgent, MemAgentConfig, Prompt, Trajectory, Turn
from memory import Recall
from report import plots
from report.folder import read_run
from report.markup import Markup
from report.page import comparisons, write_report
from report.records import record as record_of
from report.summary import METRICS, interval, summarise, write_summary
from report.training import read_training
from report.transcripts import diff, examples, render_trajectory, steps_of
from report.words import NOTHING, nothing_right

# for HTML, for matplotlib, for rich, for the terminal, for UTF-8
HOSTILE = (
    "$x_{$ <script>alert('&\"')</script><img src=x onerror=alert(1)> "
    "[bold] \x1b[31m\x00 \ud83d \u202e --> ]]> \\1 </style></pre>"
)


class Page(HTMLParser):
    """Parse a page; check that elements nest, ids are unique and nothing runs or is fetched but the
    script whose digest the policy names."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.html = text
        self.open, self.tags, self.ids, self.refs, self.words = [], [], [], [], []
        self.scripts, self.kinds = [], []  # their text, the attributes of all
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids)) and set(self.refs) <= set(self.ids)
        allowed = (
            "html head meta title style body main footer h1 h2 h3 p section div figure "
            "table caption thead tbody tr th td b small details summary span ins del dl dt dd pre "
            "svg defs g path use text clippath rect tspan nav ul li a "
            "script input label select"
        )
        assert set(self.tags) <= {*allowed.split()}
        digests = re.findall("'sha256-([^']*)'", text.partition("<title>")[0])
        made = [base64.b64encode(sha256(code.encode()).digest()) for code in self.scripts]
        assert [digest.decode() for digest in made] == digests
        assert "://" not in text and "url(#" not in re.sub(r"url\(#[\w-]+\)", "", text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "script":
            assert not attributes or ("type", "application/gzip") in attributes
            self.kinds.append(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on") and name not in ("src", "srcset", "action")
            self.ids += [value] if name == "id" else []
            self.refs += [value[1:]] if name == "href" else []
            self.refs += re.findall(r"url\(#([^)]+)\)", value or "")
            assert name != "href" or value.startswith("#")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts += [] if self.kinds[-1] else [data]
        else:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def row(
    agent="trained", question="one_fact", temperature="1.0", length=4, id="a", reward=1.0, **other
):
    cell = dict(agent=agent, question=question, temperature=temperature, length=length)
    graded = dict(reward=reward, sub_em=reward, prediction="x", error="")
    origin = dict(id=id, sample=0, settings="s", task="t")
    return dict.fromkeys(METRICS, 0.0) | cell | graded | origin | other


def record(
    memories=("none", "Anna met Otto.", "Anna met Otto."),
    answer="\\boxed{Lima}",
    reward=1.0,
    **other,
):
    """Return a trajectory that reads `section 1`, `section 2`, ...

    memories: before each section, and before the answer.
    """
    sections = [*(f"section {k}." for k in range(1, len(memories))), ""]
    responses = *memories[1:], answer
    turns = [
        {"final": not section, "section": section, "memory": memory, "response": response}
        | {"finish": "stop"}
        for section, memory, response in zip(sections, memories, responses, strict=True)
    ]
    return {
        "id": "a", "step": None, "sample": 0, "question": "Where is Anna?", "answers": ["Lima"],
        "kind": "one_fact", "reward": reward, "answer": answer, "error": "", "seconds": 0.1,
        "turns": turns,
    } | other  # fmt: skip


def folder_of(path, rows, unit="sections", records=(), metrics=None, config=None, agents=None):
    path.mkdir(exist_ok=True)
    write_summary(path / "summary.json", summarise(rows, unit, agents=agents))
    if records:
        (path / "transcripts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if metrics:
        (path / "metrics.csv").write_text(metrics)
    if config:
        (path / "config.yaml").write_text(config)
    return path


METRICS_CSV = "step,level,reward\n" + "".join(f"{i},{i // 10},{i / 40}\n" for i in range(30))
CONFIG = "run:\n  data: world\n  lengths: [4, 8, 16]\n"


# ---------------------------------------------------------------- golden pages


def words_of(html):
    """Return what a page says, a line for each thing that stands apart; a plot says its label, and
    what is faint has a ~."""
    html = html.replace('<span class="few">', "~")
    html = re.sub(r"<(style|script|footer)\b.*?</\1>", "", html, flags=re.S)
    html = re.sub(r'<svg role="img" aria-label="([^"]*)".*?</svg>', r"[\1]", html, flags=re.S)
    html = re.sub(r"<(?=h\d|p|li|tr|caption|summary|dt|figure|section)", "\n<", html)
    html = re.sub(r"<(?=t[dh]\b|dd|small)", " | <", html)
    lines = (" ".join(unescape(re.sub("<[^>]*>", "", line)).split()) for line in html.split("\n"))
    return "\n".join(filter(None, lines)) + "\n"


def check_golden(name, html):
    """Compare a page with the one that was looked at; GOLDEN=1 in the environment keeps it."""
    assert Page(html)
    path = Path(__file__).with_name("golden") / f"{name}.txt"
    if os.environ.get("GOLDEN"):
        path.write_text(words_of(html), encoding="utf-8")
    assert words_of(html).splitlines() == path.read_text(encoding="utf-8").splitlines()


def notes(recalled=Recall(), evidence="", step=Response(), asked=""):
    """Return the notes of a turn of ReMemR1 as a file has them."""
    return json.loads(json.dumps(asdict(RecallNotes(recalled, evidence, step=step, asked=asked))))


def looking_back(**other):
    """Return a trajectory that looks back for Otto, at first in vain."""
    memories = ("none", "Otto reached Lima.", "Ida left.", "Ida left.", "Lima.")
    looked = record(memories, agent="rememr1", **other)
    query = "who is Otto?"
    found = Recall("Otto reached Lima.", query, (1,), 0.25)
    of = [
        notes(asked=query), notes(Recall(query=query)), notes(asked=query),
        notes(found, "answer", Response(errors=("multi_update", "truncated"), stray=True)),
        notes(Recall("Ida left.", "Ida", (3, 2), 1.0), "unknown", None),
    ]  # fmt: skip
    looked["turns"] = [
        turn | {"notes": each} for turn, each in zip(looked["turns"], of, strict=True)
    ]
    looked["turns"][3]["finish"] = "length"
    return looked


def test_the_page_of_an_evaluation(tmp_path):
    """With everything that it may say: pooled kinds, counts, fates, depths, seeds, a training."""
    counts = dict.fromkeys((name for rate in ReMemR1.rates.values() for name in rate), 0)
    counts |= {"updates": 10, "queries": 4, "hits": 2, "sought": 1, "holds": 1, "no_update": 3}
    read = dict(
        sections=10, needed=1, seen=[2], memory_most=3, depths=[0.35], occupancy=[1.0, 3.0],
        document_tokens=9, mib=3, seconds=2.0, tokens_read=2000, model_calls=2.5, counts=counts,
    )  # fmt: skip
    rows = [
        row(agent, question, temperature, length, str(i), float(i < right), **read,
            held=[[2, 1], [8, 0]], document=f"d{i % 5}")
        for agent, right in (("trained", 9), ("untrained", 1), ("full", 0))
        for question in ("1 multi-hop, official metric", "4 single-hop, official metric")
        for temperature in ("1.0", "0.0") for length in (4, 16) for i in range(10)
    ]  # fmt: skip
    rows += [row("mine", "one_fact", id="x", error="gone", prediction=None)]
    cell = dict(agent="trained", question="one_fact", temperature="1.0", length=4)
    wrong = record(("none", *["Anna met Otto."] * 4), "It is Lima.", 0.0, form="boxed",
                   agent="rememr1", cell=cell, settings="s")  # fmt: skip
    wrong["turns"][0]["notes"] = notes() | {"recalled": None}  # damaged; the others have none
    records = [
        wrong,
        looking_back(cell=cell, settings="s", sample=1),
        record(cell=cell | {"agent": "full"}, settings="s", sample=2),
    ]
    folder = folder_of(
        tmp_path / "demo", rows, records=records, metrics=METRICS_CSV, config=CONFIG,
        agents={"trained": ReMemR1()},
    )  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    summary["altered"] = {"full": "top_k 2"}
    pair = dict(seed=1, against="full", temperature="1.0", length=4)
    summary["seeds"] = [pair | dict(mean=0.5, low=0.1, high=0.9, n=9)]
    summary["trained_on"] = [
        {"policy": policy, "agents": ["trained"], "known": 4}
        | {"questions": {"one_fact": {"asked": 9, "seen": n}}}
        for policy, n in (("p0", 2), ("p1", 0))
    ]
    (folder / "summary.json").write_text(json.dumps(summary))
    check_golden("evaluation", write_report(folder).read_text(encoding="utf-8"))
    assert [*folder.glob(".*")] == []  # nothing half-written is left


def test_the_page_of_a_training(tmp_path):
    names = "mismatch mismatch_mean memory_tokens read_tokens rollout_s update_s peak_gib".split()
    head = ",".join(["step,level,reward,reward_se,groups_without_signal", *names])
    lines = [f"{k},{k // 10},{k / 40},.1,.5{',2' * len(names)}" for k in range(30)]
    folder = folder_of(tmp_path / "run", [], metrics="\n".join([head, *lines, ""]), config=CONFIG)
    end = {"episodes": 2, "tallies": {"Work by tool": {"find": 3, "store_it": 1}}}
    end["curves"] = {"Size": {"at": [1, 2], "mean": [3, 4], "n": [2, 1]}}
    about = {"steps": 30, "reward": 0.5, "skipped_updates": 2, "metric": "reward", "paired": []}
    about["gain"] = {"steps": 10, "first": 0.1, "last": 0.6, "low": 0.4, "high": 0.6}
    about["ends"] = [end | {"step": 0, "level": "0"}, end | {"step": 29, "level": "2"}]
    (folder / "summary.json").write_text(json.dumps({"unit": "sections", "cells": []} | about))
    (folder / "validation.csv").write_text("step,score,n\n10,0.5,64\n20,nan,64\n25,0.75,64\nx")
    check_golden("training", write_report(folder).read_text(encoding="utf-8"))


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize(("rows", "svgs"), [
    ([row(reward=0.0, length=n) for n in (4, 16)], 1),
    ([row(length=0), row(length=3)], 1),
    ([row(agent=f"agent {i}", length=2**n) for i in range(9) for n in range(25)], 1),
    ([row(length=4), row(agent="b", question="two_hop", length=8)], 2),
    ([], 0),
])  # fmt: skip
def test_reports_of_few_rows_or_none(tmp_path, rows, svgs):
    html = write_report(folder_of(tmp_path / "eval", rows)).read_text()
    assert Page(html).tags.count("svg") == svgs


def test_only_transcripts_of_this_evaluation_once_each(tmp_path):
    origins = [(0, "s"), (1, "old"), (0, "s"), (2, None)]
    records = [record(sample=k, settings=x, question=f"sample {k}?") for k, x in origins]
    records += [record(id="b", cell={"agent": "a"}), {"id": "x", "sample": 0, "settings": "s"}]
    folder = folder_of(tmp_path / "eval", [row()], records=records)
    summary = json.loads((folder / "summary.json").read_text())
    for part in ("paired", "metric", "pooled"):  # which an older version's lacks
        del summary[part]
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "transcripts.jsonl").open("a") as file:
        file.write('{"id": "torn')
    kept = [record["question"] for record in read_run(folder).records]
    assert kept == ["sample 0?", "sample 2?"] and Page(write_report(folder).read_text())
    for damaged in ("{\n", "[]\n"):
        (folder / "transcripts.jsonl").write_text(damaged)
        with pytest.raises(UserError, match=r"transcripts\.jsonl is damaged"):
            read_run(folder)


def test_the_right_example_is_a_long_one_whose_memories_are_words_of_the_document():
    def made(n, memory, reward=1.0, agent="trained"):
        """A record of n sections, which name Otto alone."""
        texts = dict(id=f"{n} {memory}", cell={"agent": agent})
        read = record(["none"] * n + [memory], reward=reward, **texts)
        read["turns"][0]["section"] = "Otto met Anna."
        return read

    right = [made(2, "anna met Otto"), made(9, "Anna met Otto"), made(20, "Anna met Boris"),
             made(30, "none"), made(40, "Otto", agent="full")]  # fmt: skip
    wrong = [made(n, memory, 0.0) for n, memory in ((3, "Boris"), (12, "Ida"), (5, "Otto"))]
    found = examples([*right, *wrong], "trained")
    assert [record["id"] for record in found] == ["9 Anna met Otto", "12 Ida"]
    assert examples([right[2], right[0] | {"reward": None}], "trained") == [right[2]]
    assert examples([], "") == []


@pytest.mark.usefixtures("rendered")
def test_the_plot_shows_means_and_intervals_where_they_are(tmp_path):
    def heights(values):
        rows = [row(id=str(i), reward=x, length=n) for n in (4, 8) for i, x in enumerate(values)]
        html = write_report(folder_of(tmp_path / "eval", rows)).read_text()
        svg = "".join(re.findall(r"<svg.*?</svg>", html, re.S))
        # words are words, and colours are the page's, which are light or dark
        assert ">Questions that need one fact</text>" in svg and "prefers-color-scheme:dark" in html
        assert "currentColor" in svg and not re.search(r"#[0-9a-fA-F]{6}\b", svg)
        ends = re.findall(r'<use [^>]*? y="([\d.]+)" style="fill: var\(--c0', svg)
        return [*map(float, ends[:6])]

    # drawn are two low ends, two high ends, two means
    asked = {right: [float(i < right) for i in range(20)] for right in (20, 13, 0)}
    drawn = {right: heights(values) for right, values in asked.items()}
    one, zero = drawn[20][4], drawn[0][4]
    for right, values in asked.items():
        low, high = interval(values)
        expected = pytest.approx([low, low, high, high, right / 20, right / 20], abs=1e-4)
        assert [(y - zero) / (one - zero) for y in drawn[right]] == expected


def test_metrics_that_are_torn_or_not_numbers(tmp_path):
    metrics = "step,level,reward\n0,0,0.5\n1,0,nan\n2,0,\nx,0,1\n3,1,0.75\n4,1"
    folder = folder_of(tmp_path / "eval", [row()], metrics=metrics)
    read = read_training(folder, {"run": {"lengths": [4, 8], "data": "world"}}, "reward")
    assert read.rewards == [(0, 0.5, "4"), (3, 0.75, "8")] and read.lengths == {4, 8}
    assert Page(write_report(folder).read_text()).tags.count("svg") == 2
    (folder / "metrics.csv").write_text("step,loss\n0,1\n")
    assert "Reward by" not in Page(write_report(folder).read_text()).text


def test_the_comparison_with_before_comes_first_then_the_one_with_who_reads_all():
    agents = ("memagent", "bm25", "oracle", "full", "full@untrained", "memagent@untrained")
    tables = comparisons(summarise([row(agent) for agent in agents])).body
    captions = re.findall(r"<caption>memagent minus ([^ ,]*)", tables)
    assert captions == ["memagent@untrained", "full", "bm25", "oracle", "full@untrained"]


def test_a_page_takes_steps_in_proportion_to_its_cells(tmp_path, monkeypatch):
    """Without its plots, of which there are as many as kinds of question; a step that looks at all
    cells for each of them would take eight times as many."""
    monkeypatch.setattr(plots, "_svg", lambda *_: Markup("<svg></svg>"))

    def steps(agents):
        rows = [
            row(f"a{agent}", f"kind {k % 4}", length=2 ** (k // 4), mib=3, document_tokens=9)
            for agent in range(agents)
            for k in range(24)
        ]
        folder = folder_of(tmp_path / f"{agents}", rows)
        write_report(folder)
        return steps_run(lambda: write_report(folder))

    assert steps(8) < 1.75 * 8 * steps(1)  # 192 cells, 24 cells


# ---------------------------------------------------------------- trajectories


@given(st.text("ab .\n\u2028", max_size=40), st.text("ab .\n\u2028", max_size=40))
def test_the_difference_holds_both_texts(before, after):
    pieces = diff(before, after)
    assert "".join(text for kind, text in pieces if kind != "out").split() == after.split()
    assert "".join(text for kind, text in pieces if kind != "in").split() == before.split()
    assert all(kind == "same" for kind, _ in pieces) == (before.split() == after.split())


def test_sections_that_are_left_out_are_counted():
    def numbers(*args, **kwargs):
        return [s if isinstance(s, str) else s.number for s in steps_of(*args, **kwargs)]

    assert numbers(record([f"memory {i}" for i in range(101)]), most=6) == [
        1, 2, 3, "94 sections left out", 98, 99, 100
    ]  # fmt: skip
    assert numbers(record(["x"] * 4)) == [1, "1 section left out: the memory stayed as it was", 3]
    # 100 sections, changes at 10 and 91
    changes = record(["none"] * 10 + ["fact"] * 81 + ["two facts"] * 10)
    gap = "{} sections left out: the memory stayed as it was".format
    assert numbers(changes) == [1, gap(8), 10, gap(80), 91, gap(8), 100]
    step = steps_of(changes)[2]
    assert (step.before, step.after, step.section) == ("none", "fact", "section 10.")
    assert steps_of(record() | {"turns": []}) == []


@pytest.mark.parametrize(("finish", "response", "empty", "after", "remark"), [
    (Finish.ERROR, "", "keep", "fact", "failed"),
    (Finish.LENGTH, "cut sho", "keep", "cut sho", "cut at its limit"),
    (Finish.STOP, "", "keep", "fact", ""),
    (Finish.STOP, "", "placeholder", NO_MEMORY, ""),
    (Finish.STOP, "", "empty", "", ""),
])  # fmt: skip
def test_the_memory_that_a_last_turn_leaves(codec, finish, response, empty, after, remark):
    """As where the next prompt could not be made. The record says what a silent turn left, which
    its agent's settings decide; one of an earlier version does not."""
    prompt = Prompt((("x", True),), 9, section="section 1.", memory="fact")
    turn = Turn(prompt, [], [], [], finish, codec.text(response))
    broken = Trajectory(Task("a", "Where?", ("Lima",), text="x"), [turn], error="no next prompt")
    made = json.loads(json.dumps(record_of(broken, MemAgent(MemAgentConfig(empty=empty)))))
    found = [(step.before, step.after, step.remark) for step in steps_of(made)]
    assert found == [("fact", after, remark)]
    made["turns"][0].pop("memory_after", None)
    assert not response or steps_of(made)[0].after == after


def test_a_trajectory_in_the_terminal():
    hot = dict(step=39, temperature=2.2)
    changed = record(("Anna met Otto.", "Anna met Boris."), "<think>never ends", 0.0, **hot)
    changed["turns"][0]["section"] += "x" * 5000
    console = Console(width=300, record=True, file=io.StringIO(), force_terminal=True)
    console.print(render_trajectory(changed, 100))
    text = console.export_text()
    for part in (
        "section 1 of 1", "memory Anna met [-Otto.-] {+Boris.+}", "never ends", "2 stop",
        "sample 0", "characters left out", "step 39", "temperature 2.2",
    ):  # fmt: skip
        assert part in text, text
    assert "in the form" not in text  # it is empty
    assert "in the form" in render_trajectory(record(answer="Lima")).plain  # of older ones: of any


def test_an_evaluation_without_a_right_answer_says_what_that_means():
    for remedy, more in {
        "": {},
        "failed": {"error": "KeyError: 'a'", "prediction": None},
        "unformed": {"response": "Lima", "prediction": None},
        "empty": {"response": "<think>I", "prediction": None},
    }.items():
        rows = [row("memagent", id=str(k), reward=0.0, **more) for k in range(4)]
        assert nothing_right(summarise(rows), rows) == NOTHING[remedy]
        rows[3] |= {"reward": 1.0, "sub_em": 1.0}
        assert nothing_right(summarise(rows), rows) == "" == nothing_right(summarise([]), [])


def test_nothing_in_a_document_steers_the_terminal():
    fields = dict(question=HOSTILE, answers=[HOSTILE], error=HOSTILE, id=HOSTILE)
    bad = record(("none", HOSTILE, HOSTILE), HOSTILE, **fields)
    bad["turns"][0]["section"] = HOSTILE
    console = Console(width=10000, file=io.StringIO(), force_terminal=False)
    console.print(render_trajectory(bad))
    text = console.file.getvalue()
    # markup stands there as it is, control characters do not
    assert text.count("[bold] \ufffd[31m\ufffd \ufffd \ufffd") >= 5
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)
