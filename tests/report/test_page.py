"""The page: its numbers, its readings, and that nothing of a document runs or steers."""

import io
import json
import re
from itertools import pairwise

import pytest
from conftest import steps_run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_folders import HOSTILE, evaluation, folder_of, record, row, shown, training, trajectory

from agents.memupdate import MemUpdate
from config.errors import UserError
from data import Task
from memagent import NO_MEMORY, Finish, MemAgent, MemAgentConfig, Prompt, Trajectory, Turn
from report import page as pages
from report import plots, runlog
from report.folder import read_run
from report.page import mark, page_of, write_reading, write_report
from report.records import record as record_of
from report.summary import interval, summarise, write_summary
from report.transcripts import diff, render, runs_of, steps_of, verdict
from report.words import NOTHING, nothing_right

CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def cell_of(agent, length=4, question="one_fact"):
    return dict(agent=agent, question=question, temperature="1.0", length=length)


def change_summary(folder, **fields):
    summary = json.loads((folder / "summary.json").read_text()) | fields
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def drawn(monkeypatch, folder):
    """Return what is drawn on a run's page, by title: lines, words, and how."""
    found = {}

    def plot(lines, title, *words, **how):
        return found.setdefault(title, (lines, words, how)) and ""

    for module in ("page", "training"):
        monkeypatch.setattr(f"report.{module}.plot", plot)
    write_report(folder)
    return found


# ---------------------------------------------------------------- an evaluation


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The folder of five ways of reading, each asked at two lengths about documents that two
    questions share, and its page."""
    agents = {"trained": 9, "untrained": 1, "trained@untrained": 5, "bm25": 2, "full": 4}
    rows = [
        row(agent, kind, length=length, id=f"{length} {k}", reward=float(k < right), settings=agent,
            document=f"d{k % 5}", tokens_read=2000)
        for agent, right in agents.items() for kind in ("one_fact", "two_hop")
        for length in (16, 4) for k in range(10)
    ]  # fmt: skip
    rows.insert(0, row("trained", temperature="0.0", length=16, reward=0.0, settings="trained"))
    rows += [row("mine", "own", id="x", error="gone", prediction=None)]
    records = [
        record(settings=agent, question=f"Which {k}?", id=f"16 {k}", cell=cell_of(agent, 16))
        for agent in agents for k in (0, 6)
    ]  # fmt: skip
    folder = folder_of(tmp_path_factory.mktemp("runs") / "run", rows, records=records)
    asked = {"one_fact": {"asked": 9, "seen": 2}}
    about = {"policy": "p0", "agents": ["memagent"], "known": 4, "questions": asked}
    change_summary(folder, altered={"full": "top_k 2"}, trained_on=[about])
    return folder, shown(write_report(folder))


def test_what_a_reader_sees_first(evaluated):
    """Three figures at the longest documents, one plot, one document before and after training."""
    _, page = evaluated
    low, high = (f"{100 * x:.0f}" for x in interval([1.0] * 9 + [0.0], [k % 5 for k in range(10)]))
    place = "Questions that need one fact, 16 sections"
    assert f"90.0 % trained {low}–{high} %, n 10; {place}" in page.text
    assert "50.0 % trained before training" in page.text
    assert "40.0 % whole document in the prompt" in page.text and page.tags.count("strong") == 3
    first, details = page.html.split('<details class="part"><summary>Details')
    assert first.count("<svg") == 1 and details.count("<svg") == 2  # of the other kinds
    (pair,) = re.findall('<div class="pair">(.*?)<h2>', page.html, re.S)
    headings = re.findall('<h3>([^:<]*): <span class="([^"]*)"', pair)
    assert headings == [("Untrained", "wrong"), ("Trained", "right")]
    assert pair.count("Which 6?") == 2  # the one that the trained policy alone has read rightly
    listed = re.findall('<details class="reading" data-verdict="([^"]*)"( open)?', page.html)
    assert listed[0] == ("right", " open") and [bool(x) for _, x in listed[1:]] == [False] * 9


def test_numbers_and_differences_stand_in_tables(evaluated):
    folder, page = evaluated
    captions = re.findall("<caption>trained minus ([^<]*), by", page.html)
    assert captions == [
        "untrained", "trained before training", "whole document in the prompt",
        "reading only what matches the question",
    ]  # fmt: skip
    assert "temp. 4 16" in page.text.partition("trained minus untrained")[2]
    for part in ("+40.0", "full (top_k 2)", "2,000", "Warning: 2 of the 9 questions"):
        assert part in page.text
    assert '<td class="few">' in page.html  # of a single question
    assert "| trained | 1.0 | 90.0 [" in (folder / "table.md").read_text()
    assert [*folder.glob(".*")] == []  # nothing half-written is left


@pytest.mark.parametrize(("rows", "svgs"), [
    ([row(reward=0.0, length=n) for n in (4, 16)], 1),
    ([row(length=0), row(length=3)], 1),
    ([row(agent=f"agent {i}", length=2**n) for i in range(9) for n in range(25)], 1),
    ([row(length=4), row(agent="b", question="two_hop", length=8)], 2),
    ([], 0),
])  # fmt: skip
def test_pages_of_few_rows_or_none(tmp_path, rows, svgs):
    assert shown(write_report(folder_of(tmp_path / "eval", rows))).tags.count("svg") == svgs


def test_a_page_holds_as_many_readings_as_have_room(tmp_path, monkeypatch):
    records = [record(id=str(k), cell=cell_of("trained"), settings="s") for k in range(9)]
    folder = folder_of(tmp_path / "eval", [row()], records=records)
    monkeypatch.setattr("report.page.SHOWN", 4)
    page = shown(write_report(folder))
    assert page.html.count('<details class="reading"') == 4
    assert "5 of 9 readings are left out here: `show` prints them." in page.text
    monkeypatch.setattr("report.page.CHARACTERS", 45)  # of two readings
    assert shown(write_report(folder)).html.count('<details class="reading"') == 2


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
    assert kept == ["sample 0?", "sample 2?"] and shown(write_report(folder))
    for damaged in ("{\n", "[]\n"):
        (folder / "transcripts.jsonl").write_text(damaged)
        with pytest.raises(UserError, match="damaged"):
            read_run(folder)


def test_a_page_takes_steps_in_proportion_to_its_cells(tmp_path, monkeypatch):
    """Without its plots, of which there are as many as kinds of question."""
    monkeypatch.setattr(plots, "svg_of", lambda *_: "")

    def steps(agents):
        rows = [
            row(f"a{agent}", f"kind {k % 4}", length=2 ** (k // 4), mib=3, document_tokens=9)
            for agent in range(agents)
            for k in range(24)
        ]
        run = read_run(folder_of(tmp_path / f"{agents}", rows))
        page_of(run)
        return steps_run(lambda: page_of(run))

    assert steps(8) < 1.75 * 8 * steps(1)  # 192 cells, 24 cells


def test_an_evaluation_without_a_right_answer_says_what_that_means(tmp_path):
    for remedy, more in {
        "": {},
        "failed": {"error": "KeyError: 'a'", "prediction": None},
        "unformed": {"response": "Lima", "prediction": None},
        "empty": {"response": "<think>I", "prediction": None},
    }.items():
        rows = [row("memagent", id=str(k), reward=0.0, **more) for k in range(4)]
        assert nothing_right(summarise(rows), rows) == NOTHING[remedy]
    assert NOTHING["empty"] in shown(write_report(folder_of(tmp_path / "run", rows))).text
    part = evaluation(tmp_path / "part", rows)  # which may have a right answer yet
    assert NOTHING["empty"] not in shown(write_report(part)).text
    rows[3] |= {"reward": 1.0, "sub_em": 1.0}
    assert nothing_right(summarise(rows), rows) == "" == nothing_right(summarise([]), [])


# ---------------------------------------------------------------- plots


@pytest.mark.usefixtures("rendered")
def test_the_plot_shows_means_and_intervals_where_they_are(tmp_path):
    def heights(values):
        """Return the places of a mean, and of the two ends of its interval."""
        rows = [
            row(question=kind, id=str(i), reward=x, length=n)
            for kind in ("one_fact", "two_hop") for n in (4, 8) for i, x in enumerate(values)
        ]  # fmt: skip
        html = shown(write_report(folder_of(tmp_path / "eval", rows))).html
        svg = "".join(re.findall(r"<svg.*?</svg>", html, re.S))
        # words are words, and colours are the page's, which are light or dark
        assert ">Questions that need one fact</text>" in svg and "prefers-color-scheme:dark" in html
        assert "currentColor" in svg and not re.search(r"#[0-9a-fA-F]{6}\b", svg)
        means = re.findall(r'<use [^>]*? y="([\d.]+)" style="fill: var\(--c0', svg)
        bars = re.findall(
            r'<path d="M [\d.]+ ([\d.]+) ?\nL [\d.]+ ([\d.]+) ?\n" [^>]*var\(--c0', svg
        )
        return [float(means[0]), *map(float, bars[-1])]

    asked = {right: [float(i < right) for i in range(20)] for right in (20, 13, 0)}
    places = {right: heights(values) for right, values in asked.items()}
    one, zero = places[20][0], places[0][0]
    for right, values in asked.items():
        expected = pytest.approx([right / 20, *interval(values)], abs=1e-3)
        assert [(y - zero) / (one - zero) for y in places[right]] == expected


def test_names_at_the_ends_of_lines_do_not_lie_on_each_other():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    ends = (0.5, 0.5, 0.51, 1.0, 1.0, 0.25, 0.0, 0.0)
    lines = {f"line {k} {'x' * 90}": [(1, 0.5), (2, y)] for k, y in enumerate(ends)}
    plots.draw_lines(axes, lines, share=True)
    plots.label_ends(axes, lines, 100)
    assert axes.lines[3].get_ydata()[-1] == 100  # in per cent
    found = {text.get_text()[:6]: text.get_position()[1] for text in axes.texts}
    assert [*found] == [name[:6] for name in lines] and len(axes.texts[0].get_text()) <= 30
    heights = sorted(found.values())
    assert all(b - a > 0.99 * plots.GAP for a, b in pairwise(heights)) and heights[-1] <= 1
    assert heights[0] > 0
    assert found["line 0"] < found["line 2"] < found["line 3"]
    assert found["line 5"] == pytest.approx((25 + 4) / 108)  # it has room where it is


@pytest.mark.parametrize(("n", "band", "drawn"), [
    (3, False, "LineCollection"), (3, True, "FillBetweenPolyCollection"),
    (50, False, "FillBetweenPolyCollection"),
])  # fmt: skip
def test_an_interval_is_a_bar_or_a_band_and_lengths_have_few_ticks(n, band, drawn):
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plots.draw_lines(axes, {"a": [(k, 0.5, 0.4, 0.6) for k in range(n)]}, band=band)
    assert [type(each).__name__ for each in axes.collections] == [drawn]
    for least, scale in ((0, "linear"), (1, "log")):
        plots.set_lengths(axes, range(least, 30))
        assert axes.get_xscale() == scale
    assert len(axes.get_xticks()) <= 7 and axes.get_xticks()[0] == 29


@pytest.mark.parametrize(("metric", "axis"), [
    ("sub_em", "right answers"), ("reward", "right answers"), ("f1", "mean overlap of words (F1)"),
])  # fmt: skip
def test_the_axis_says_what_was_measured(tmp_path, monkeypatch, metric, axis):
    rows = [row("trained", id=str(k), f1=1.0) for k in range(3)]
    folder = folder_of(tmp_path / "run", rows)
    write_summary(folder / "summary.json", summarise(rows, metric=metric))
    (_, words, _) = drawn(monkeypatch, folder)["Questions that need one fact"]
    assert words[1] == axis


# ---------------------------------------------------------------- a training


def test_the_page_of_a_training(tmp_path, monkeypatch):
    folder = training(tmp_path / "run", steps=30, peak_gib=7)
    (folder / "summary.json").write_text(json.dumps(runlog.summary(folder)))
    (folder / "validation.csv").write_text("step,score,n\n10,0.5,64\n20,nan,64\n25,0.75,64\nx")
    writer = runlog.TrajectoryWriter(folder / "trajectories.jsonl.gz")
    for k in (0, 29):
        writer.write([runlog.packed([trajectory(k, s, s / 2) for s in range(3)], MemAgent(), k)])
    page = shown(write_report(folder))
    rewards = [0.5 + k / 64 for k in range(30)]
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert f"{first:.2f} mean reward, first 10 steps" in page.text
    assert f"{last:.2f} mean reward, last 10 steps" in page.text
    assert f"changed by {last - first:+.2f} (95 % interval +" in page.text
    assert "Step 0: right" in page.text and "Step 29: right" in page.text
    labels = re.findall('img" aria-label="([^"]*)', page.html)
    assert "Reward by training step" in labels[0] and page.tags.count("svg") == 7
    lines, _, how = drawn(monkeypatch, folder)["Reward"]
    assert lines["validation"] == [(10, 0.5), (25, 0.75)] and how["band"]
    assert lines["mean of 5"][29] == (29, pytest.approx(sum(rewards[-5:]) / 5))


@pytest.mark.parametrize(("reward", "ends"), [(0.9, (0.4, 1)), (1.5, (1.0, 2.0))])
def test_the_band_of_a_training_ends_where_a_share_ends(tmp_path, monkeypatch, reward, ends):
    folder = training(tmp_path / "run", steps=12, reward=reward, reward_se=0.25)
    lines, _, _ = drawn(monkeypatch, folder)["Reward"]
    assert lines["one step"][0] == (0, reward, *map(pytest.approx, ends))


def test_a_short_training_is_compared_by_its_halves(tmp_path):
    folder = training(tmp_path / "run", steps=12)
    assert "From the first 6 steps to the last 6" in shown(write_report(folder)).text


def test_metrics_that_are_torn_or_not_numbers(tmp_path, monkeypatch):
    metrics = "step,level,reward\n0,0,0.5\n1,0,nan\n2,0,\nx,0,1\n3,1,0.75\n4,1"
    folder = folder_of(tmp_path / "eval", [row()], metrics=metrics)
    assert shown(write_report(folder)).tags.count("svg") == 2
    lines, _, _ = drawn(monkeypatch, folder)["Reward"]
    assert [point[:2] for point in lines["one step"]] == [(0, 0.5), (3, 0.75)]


# ---------------------------------------------------------------- a reading


def test_the_page_of_a_question_marks_its_evidence_and_folds_what_changed_nothing(tmp_path):
    read = record(["none"] * 9 + ["Lima"], id="town.pdf")
    text = "The bridge was\n built by <Anna> in 1904."
    read["turns"][8] |= {"section": text, "where": "page 7"}
    facts = {"by": "smollm2", "took": "2 seconds", "remarks": ""}
    passages = ["was built by <Anna>", "1904"]
    page = shown(write_reading(tmp_path, read, facts, "answer: 1904", "Found on page 7.", passages))
    marked = "The bridge <mark>was\n built by &lt;Anna&gt;</mark> in <mark>1904</mark>."
    assert marked in page.html and "page 7</h3>" in page.html
    assert "Sections 2 to 8: the memory stayed" in page.text and "section 5." in page.text
    assert "Answer: 1904 Found on page 7." in page.text and "took 2 seconds" in page.text
    assert "remarks" not in page.text


def test_a_mark_is_text_whatever_is_looked_for():
    assert mark("a <b> c", []) == mark("a <b> c", [""]) == "a &lt;b&gt; c"
    assert mark("a.c abc", ["a.c"]) == "<mark>a.c</mark> abc"


@pytest.mark.parametrize(("more", "word"), [
    ({"reward": 0.966}, "right"),  # the rest of it is for something else than the answer
    ({"reward": 1.0, "answer": "\\boxed{Rome}"}, "wrong"),
    ({"answer": "\\boxed{Rome}", "score": 0.5}, "partly right"),
    ({"reward": 0.0, "score": 1.0}, "right"),
    ({"error": "gone", "score": 1.0}, "failed"),
    ({"answers": [], "step": None}, "answered"),
    ({"answers": [], "step": 3, "reward": 0.25}, "reward 0.25"),
    ({"answers": [], "step": 3, "reward": None}, "no reward"),
])  # fmt: skip
def test_the_verdict_is_the_grade_and_not_the_reward(more, word):
    assert verdict(record() | more) == word


@given(st.text("ab .\n\u2028", max_size=40), st.text("ab .\n\u2028", max_size=40))
def test_the_difference_holds_both_texts(before, after):
    pieces = diff(before, after)
    assert "".join(text for kind, text in pieces if kind != "out").split() == after.split()
    assert "".join(text for kind, text in pieces if kind != "in").split() == before.split()
    assert all(kind == "same" for kind, _ in pieces) == (before.split() == after.split())


def test_long_texts_of_few_words_are_compared_in_no_time():
    long = "a b " * 500
    assert steps_run(lambda: diff(long, "b a a " * 500)) < 1e5
    assert diff(long, long) == [("same", long)] and diff("", "") == []


@pytest.mark.parametrize(("memories", "most", "runs"), [
    ([f"memory {k}" for k in range(101)], 6, "1-3 (4-97: not shown) 98-100"),
    (["x"] * 4, None, "1 (2: the memory stayed) 3"),
    (["none"] * 10 + ["fact"] * 81 + ["two facts"] * 10, 24,
     "1 (2-9: the memory stayed) 10 (11-90: the memory stayed) 91 (92-99: the memory stayed) 100"),
    (["x"], 24, ""),
])  # fmt: skip
def test_sections_that_change_nothing_are_counted(memories, most, runs):
    found = []
    for note, run in runs_of(steps_of(record(memories)), most):
        first, last = run[0].number, run[-1].number
        numbers = f"{first}-{last}" if last > first else f"{first}"
        found.append(f"({numbers}: {note.partition(': ')[2]})" if note else numbers)
        assert not note or str(first) in note
    assert " ".join(found) == runs
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
    (step,) = steps_of(made)
    assert (step.changes, step.remark) == (diff("fact", after), remark)
    made["turns"][0].pop("memory_after", None)
    assert not response or steps_of(made)[0].changes == diff("fact", after)


def test_an_answer_of_another_policy_is_shown_what_it_needs_and_not_the_memory():
    read = record(("none", "all that was kept", "a part"))
    read["turns"][-1]["frozen"] = True
    assert steps_of(read)[-1].changes == diff("all that was kept", "a part")  # its response
    read["turns"][1]["memory_after"] = "all and more"
    assert steps_of(read)[-1].changes == diff("all that was kept", "all and more")


def test_notes_that_are_another_agents_are_said():
    read = record(agent="memupdate")
    read["turns"][0]["notes"] = {"ops": [3]}
    step = steps_of(read, MemUpdate)[0]
    assert [line.text for line in step.lines] == ["cannot be read"] and step.table == ()
    read["turns"][:0] = [read["turns"][0] | {"aside": True}] * 2  # stand with the next section
    assert [line.before for line in steps_of(read, MemUpdate)[0].lines] == [True, True, False]


def test_a_reading_in_the_terminal():
    changed = record(("Anna met Otto.", "Anna met Boris."), "<think>never ends", 0.0, step=39,
                     temperature=2.2)  # fmt: skip
    changed["turns"][0]["section"] += "x" * 5000
    text = render(changed, 100).plain
    for part in (
        "section 1 of 1", "memory Anna met [-Otto.-] {+Boris.+}", "never ends", "sample 0",
        "characters left out", "step 39", "temperature 2.2",
    ):  # fmt: skip
        assert part in text, text
    assert "in the form" not in text  # it is empty
    assert "in the form" in render(record(answer="Lima")).plain


# ---------------------------------------------------------------- texts of strangers


def hostile_record(**more):
    fields = dict(question=HOSTILE, answers=[HOSTILE], error=HOSTILE, id=HOSTILE)
    bad = record(("none", HOSTILE, HOSTILE), HOSTILE, **fields, **more)
    bad["turns"][0] |= {"section": HOSTILE, "where": HOSTILE}
    return bad


def test_nothing_in_a_document_steers_the_page(tmp_path):
    name = HOSTILE.replace("\ud83d", "")  # a name is written into summary.json
    bad = hostile_record(settings="s", cell=cell_of(name, question=name))
    rows = [row(a, name, id=HOSTILE, error=HOSTILE) for a in (name, "b")]
    folder = folder_of(tmp_path / "eval", rows, unit=name, records=[bad], config=name)
    page = shown(write_report(folder, title=HOSTILE))
    assert page.text.count("<script>alert(") > 8 and "{{ 7 * 7 }}" in page.text
    assert not CONTROL.search(page.html)
    page = shown(write_reading(tmp_path, bad, {HOSTILE: HOSTILE}, HOSTILE, HOSTILE, [HOSTILE]))
    assert page.html.count("<mark>") and not CONTROL.search(page.html)


def test_nothing_in_a_document_steers_the_terminal():
    console = Console(width=10000, file=io.StringIO(), force_terminal=False)
    console.print(render(hostile_record()))
    text = console.file.getvalue()
    # markup stands there as it is, control characters do not
    assert text.count("[bold] \ufffd[31m\ufffd \ufffd \ufffd") >= 5 and not CONTROL.search(text)


# ---------------------------------------------------------------- a page that cannot be written


def test_a_page_that_cannot_be_written_ends_no_run(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(pages, "write_report", fail)
    assert "the disk is full" in pages.try_report(tmp_path)
    with pytest.raises(UserError, match=r"the disk is full.*All is kept.* report ") as error:
        pages.finish_report(tmp_path, "All is kept")
    assert error.value.status == 1
