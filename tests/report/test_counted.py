"""What agents count, as tables and curves: of an evaluation, and of a training's two ends."""

import gzip
import io
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console
from test_page import HOSTILE, METRICS_CSV, Page, folder_of, record, row, words_of

from agents import find
from data import Task
from memagent import Agent, Finish, Prompt, Trajectory, Turn
from report import page as report_page
from report import runlog
from report.counted import counted, ends_of
from report.markup import macro
from report.page import write_report
from report.reading import Reading
from report.records import record_turn, step_records
from report.summary import summarise
from report.transcripts import render_trajectory, steps_of, transcript
from tokens.codec import Text


@dataclass
class Notes:
    counts: dict


class Clerk(Agent):
    """Counts what its notes say, and shows its tables."""

    name = "clerk"
    keeps = True
    rates = {"done": ("done", "turns"), "search_s": ("search_s", "searches")}
    tallies = {"Work by tool": "op_", "Why it ended": "stop_", "Nothing": "never_"}
    curves = {"Size after a session": ("size_", "sizes_"), "Never": ("no_", "nos_")}

    def count(self, task, turn):
        return turn.notes.counts if turn.notes else {}

    def table(self, turn):
        return turn["notes"]["rows"] if turn.get("notes") else ()


COUNTS = [
    {"op_store_it": 1, "op_find": 3, "stop_done": 1, "size_1": 10, "sizes_1": 1, "sizes_x": 9},
    {"op_find": 4, "op_store_it": 0, "size_1": 20, "sizes_1": 1, "size_10": 9, "sizes_10": 2},
]


def test_counts_become_tallies_and_curves():
    assert counted(COUNTS, Clerk()) == {
        "episodes": 2,
        "tallies": {"Work by tool": {"find": 7, "store_it": 1}, "Why it ended": {"done": 1}},
        "curves": {"Size after a session": {"at": [1, 10], "mean": [15, 4.5], "n": [2, 1 + 1]}},
    }
    assert counted([{"updates": 3}, {"op_find": 0}], Clerk()) == {}
    assert counted(COUNTS, Agent()) == counted([], Clerk()) == {}


# ---------------------------------------------------------------- an evaluation


def reading(k, read=4):
    """Return a row of the clerk; read: sections that it has read itself."""
    counts = COUNTS[k] | {"searches": 2, "search_s": 0.003, "turns": 4, "done": 3}
    costs = dict(tokens_read=1000 * read, model_calls=5.0, seconds=8.0)
    return row("clerk", "one", id=f"r{k}{read}", counts=counts, sections=read, **costs)


# two documents are read; two questions are answered from what was made of them
SHARED = [
    reading(0), reading(1),
    *(row("clerk", "one", id=f"l{k}", counts={"searches": 1}, sections=0) for k in range(2)),
    row("plain", "one", id="r0", sections=3, tokens_read=70, model_calls=4.0),
]  # fmt: skip
AGENTS = {"clerk": Clerk(), "plain": Agent()}


def test_an_episode_is_a_trajectory_that_has_read_its_document_itself():
    one, plain = summarise(SHARED, "sessions", agents=AGENTS)["cells"]
    assert (one["episodes"], one["tokens_read"], one["model_calls"]) == (2, 2000, 2.5)
    assert one["rates"] == {"done": 0.75, "search_s": 0.001}
    assert not {"episodes", "tallies", "rates"} & plain.keys()


def shown(summary, *sections):
    """Return sections of the page, without those that are left out."""
    made = [section(summary) for section in sections]
    html = "".join(macro("section", section, "") for section in made if section.body)
    assert Page(html)
    return html


def test_the_report_lists_counts_by_episode_and_share():
    summary = summarise(SHARED, "sessions", agents=AGENTS)
    text = words_of(shown(summary, report_page._counted, report_page._cost))
    # of 2 episodes; the later questions have read nothing, and the plain agent lists nothing
    for line in (
        "| agent, question | sessions | temp. | done | search s",
        "| clerk, one | 4 | 1.0 | 0.75 | 0.001",
        "| agent, question | sessions | temp. | episodes | find | store it",
        "| clerk, one | 4 | 1.0 | 2 | 3.50 | 88 % | 0.50 | 12 %",
        "| clerk, one | 4 | 1.0 | 2 | 0.50 | 100 %",
        "| clerk, one | 4 | 1.0 | 4 | 2,000 | 0 | 2.5 | 4.00 | 0",
        "| plain, one | 4 | 1.0 | 1 | 70 | 0 | 4.0 | 0.00 | 0",
    ):
        assert line in text.split("\n"), line
    assert "Nothing" not in text
    usual = summarise(SHARED[-1:], "sessions", agents=AGENTS)
    words = shown(usual, report_page._counted, report_page._curves)
    assert not re.search("What the agents did|Along an episode", words)


def test_a_curve_is_drawn_of_each_agent_at_one_temperature_and_the_longest_length(monkeypatch):
    drawn = {}
    monkeypatch.setattr(report_page.plots, "curves", lambda panels: drawn.update(panels) or "")

    def at(agent, size, temperature="1.0", length=8, kind="one"):
        counts = {"size_1": size, "sizes_1": 1, "size_2": 2 * size, "sizes_2": 1}
        return row(agent, kind, temperature, length, counts=counts, sections=2)

    rows = [
        at("a", 10), at("a", 30, kind="two"), at("b", 10), at("b", 90, "0.0"), at("b", 90, length=4)
    ]  # fmt: skip
    summary = summarise(rows, "sessions", agents={"a": Clerk(), "b": Clerk()})
    assert report_page._curves(summary).note.endswith(" 8 sessions, temperature 1.0.")
    assert drawn == {"Size after a session": {"a": [(1, 20), (2, 40)], "b": [(1, 10), (2, 20)]}}


# ---------------------------------------------------------------- a training


def trajectory(step, sample, agent=Clerk, **counts):
    task = Task(f"t{step}", "", (), text="x", kind="sessions")
    turns = [
        Turn(Prompt((), 4, section="s", memory="m"), [1], [2], [-1.0], Finish.STOP, Text("r", ()))
        for _ in counts
    ]
    for turn, (name, n) in zip(turns, counts.items(), strict=True):
        turn.notes = Notes({name: n, "turns": 1})
    return Trajectory(task, turns, sample, 0.5)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the folder of a training that recorded the steps 0, 5 and 10 on two ranks."""
    monkeypatch.setitem(find.FINDER.loaded, str(Path("clerk").absolute()), Clerk)
    folder = folder_of(tmp_path / "run", [], metrics=METRICS_CSV)
    writer = runlog.TrajectoryWriter(folder / "trajectories.jsonl.gz")
    for step, finds in ((0, 1), (5, 50), (10, 3)):
        for rank in range(2):
            counts = dict(op_find=finds + rank, op_store_it=1, size_1=finds, sizes_1=1)
            ours = [trajectory(step, 2 * rank + k, **counts) for k in range(2)]
            writer.write([runlog.packed(ours, Clerk(), step, 1.0)])
    return folder


def members(path):
    """Return the gzip members of a file."""
    data = path.read_bytes()
    starts = [m.start() for m in re.finditer(re.escape(b"\x1f\x8b\x08\0\0\0\0\0"), data)]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def test_the_first_and_the_last_recorded_step_are_read_and_no_other(run):
    path = run / "trajectories.jsonl.gz"

    def ids(last):
        return [(r["step"], r["sample"]) for r in step_records(run, last)]

    first, last = [(0, k) for k in range(4)], [(10, k) for k in range(4)]
    assert (ids(False), ids(True)) == (first, last)
    parts = members(path)
    assert len(parts) == 6
    # neither the middle nor what is torn at the end is looked at
    path.write_bytes(b"".join([*parts[:2], gzip.compress(b"}{", mtime=0), *parts[4:]]))
    assert ids(True) == last
    path.write_bytes(b"".join(parts[:5]) + parts[5][:30])
    assert ids(True) == last[:2]
    path.write_bytes(b"".join(parts[:4]) + parts[4][:12])
    assert ids(True) == [(5, k) for k in range(4)]
    path.write_bytes(parts[0])
    assert ids(True) == ids(False) == first[:2]
    for nothing in (b"", b"torn", parts[0][:20], gzip.compress(b"[1]\n", mtime=0)):
        path.write_bytes(nothing)
        assert ids(True) == ids(False) == []
    path.unlink()
    assert ids(True) == []


def test_a_training_lists_its_ends_side_by_side(run):
    ends = ends_of(run)
    tally = {"find": 2 * (1 + 2), "store_it": 4}
    assert ends[0] == {
        "step": 0,
        "episodes": 4,
        "tallies": {"Work by tool": tally},
        "curves": {"Size after a session": {"at": [1], "mean": [1], "n": [4]}},
    }
    assert [end["step"] for end in ends] == [0, 10]
    with (run / "metrics.csv").open("w") as file:
        file.write("step,level,reward,step_s,read_tokens,written_tokens\n")
        file.writelines(f"{i},{i // 10},0.5,1,1,1\n" for i in range(12))
    summary = runlog.summary(run)
    assert [end["level"] for end in summary["ends"]] == ["0", "1"]
    (run / "summary.json").write_text(json.dumps(summary))
    text = Page(write_report(run).read_text()).text
    # one transcript a task, named by its id where the question is hidden
    assert text.count("reward 0.5 t10") == 1 and "t5" not in text and "t0 " not in text


def test_an_agent_that_lists_nothing_has_records_as_before(run):
    path = run / "trajectories.jsonl.gz"
    path.write_bytes(runlog.packed([trajectory(0, 0, a=1)], Agent(), 0))
    assert "counts" not in next(step_records(run)) and ends_of(run) == []
    path.write_bytes(runlog.packed([trajectory(0, 0, op_find=1)], Clerk(), 0))
    assert [end["step"] for end in ends_of(run)] == [0]
    del find.FINDER.loaded[str(Path("clerk").absolute())]  # of a file that nobody has loaded
    assert ends_of(run) == []


# ---------------------------------------------------------------- one trajectory


def episode(rows):
    """Return a training's record: three sections, two questions aside, no answer."""
    made = record(["", "one", "one two", "context", "context", "answer"], "", 0.25, step=7)
    made |= {"agent": "clerk", "question": "", "answers": [], "answer": ""}
    made["turns"] = made["turns"][:-1]
    for turn in made["turns"][3:]:
        turn |= {"frozen": True, "section": ""}
    made["turns"][2] |= {"notes": {"rows": rows}, "response": "said"}
    return made


ROWS = [
    {"question": "Where is Ida?", "after": ["Lima"], "found": ["[m1] Ida left.", HOSTILE]},
    {"question": "Who?", "won": "+1"},
]


@pytest.fixture
def clerk(monkeypatch):
    monkeypatch.setitem(find.FINDER.loaded, str(Path("clerk").absolute()), Clerk)


def test_an_agents_table_is_drawn_cell_by_cell(clerk):
    html = transcript(episode(ROWS), True)
    columns = re.findall("<th>(.*?)</th>", html)
    assert columns == ["question", "after", "found", "won"]  # by first appearance
    rows = [re.findall(r"<td>(.*?)</td>", line, re.S) for line in html.split("<tr>")[2:]]
    assert rows[0][:2] == ["<div>Where is Ida?</div>", "<div>Lima</div>"] and rows[0][3] == ""
    assert rows[0][2].startswith("<div>[m1] Ida left.</div><div>$x_{$ &lt;script&gt;")
    assert rows[1] == ["<div>Who?</div>", "", "", "<div>+1</div>"]
    assert "<script" not in html
    console = Console(width=1000, file=io.StringIO())
    console.print(render_trajectory(episode(ROWS)))
    printed = console.file.getvalue()
    assert (
        "question  Where is Ida?\nafter  Lima\nfound  [m1] Ida left.\n    $x_{$ <script>" in printed
    )
    assert "\x1b" not in printed.replace("\x1b[0m", "")


def test_a_table_that_cannot_be_made_is_left_out(clerk):
    for damaged in (3, [3], [{"a": 3}]):
        assert "<table" not in transcript(episode(damaged), True)
    assert "<table" not in transcript(episode(ROWS) | {"agent": "another"}, True)
    assert "<table" not in transcript(episode([]), True)


def test_questions_aside_are_no_sections(clerk):
    steps = steps_of(episode([]))
    assert [step if isinstance(step, str) else step.number for step in steps] == [
        1, 2, 3, "2 questions to the policy as it was before training left out",
    ]  # fmt: skip
    assert [step.after for step in steps[:3]] == ["one", "one two", "said"]  # not "context"
    shown = transcript(episode([]), True)
    assert "section 3 of 3" in shown and '<span class="tag ">reward 0.25</span> a ' in shown
    assert "<dt>reward</dt><dd>0.25</dd>" in shown and "<dt>answer</dt>" not in shown
    mine = episode([]) | {"step": None, "question": "Where?"}  # of somebody's own
    assert ">answered</span> Where?" in transcript(mine, True)
    assert "<dt>reward" not in transcript(mine, True)
    final = record(("", "one", "context"))
    final["turns"][-1]["frozen"], final["turns"][1]["response"] = True, "two"
    assert [step.after for step in steps_of(final)] == ["one", "two"]


def test_a_row_counts_calls_and_the_memory_that_was_its_own():
    reading = Reading(Task("a", "q?", ("Lima",), text="x"), Agent())
    memories = [((1,) * n, frozen) for n, frozen in ((0, False), (3, False), (5, False), (2, True))]
    for k, (ids, frozen) in enumerate(memories):
        prompt = Prompt((), 4, final=k == 3, section=f"s{k}", memory=Text("m" * len(ids), ids))
        turn = Turn(prompt, [1] * 7, [2], [-1.0], Finish.STOP, Text("r", ()))
        if frozen:
            turn.prompt = Prompt((), 4, True, "", prompt.memory, frozen=True)
        reading.add(turn)
        assert record_turn(turn).get("frozen", False) == frozen
    made = reading.row()
    assert (made["model_calls"], made["sections"], made["tokens_read"]) == (4, 3, 28)
    assert made["occupancy"] == [3, 5] and made["memory_most"] == 5  # not what was looked up


def test_a_section_of_several_turns_is_one_and_its_memory_counts_once():
    """Also where the later turns go on with its conversation, and beside a plan and a question."""
    reading = Reading(Task("a", "q?", ("Lima",), text="x"), Agent())
    one, two = "one in Lima", "two in Lima"
    turns = [("", dict(aside=True)), (one, {}), (one, {}), ("", {}), ("", dict(frozen=True)),
             ("", dict(aside=True)), (two, {}), ("", dict(final=True))]  # fmt: skip
    for k, (section, more) in enumerate(turns):
        prompt = Prompt((), 4, section=section, memory=Text("m" * k, (1,) * k), **more)
        turn = Turn(prompt, [1], [2], [-1.0], Finish.LENGTH, Text("r", ()))
        if k == 3:
            turn.prompt = replace(prompt, after=turn)
        reading.add(turn)
    made = reading.row()
    assert (made["model_calls"], made["sections"], made["seen"]) == (8, 2, [1, 2])
    assert made["occupancy"] == [6, 7]  # as the plan of the second and the answer are shown it
    assert made["memory_cut"] == 5  # all but the answer and the plans
