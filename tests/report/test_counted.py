"""What agents count, as tables and curves: of an evaluation, and of a training's two ends."""

import gzip
import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console
from test_page import HOSTILE, record, row, words_of

from agents import find
from data import Task
from memagent import Agent, Finish, Prompt, Trajectory, Turn
from report import page as report_page
from report import runlog
from report.counted import counted, ends_of, total
from report.markup import macro
from report.reading import Reading
from report.records import record_turn, step_records
from report.summary import summarise
from report.transcripts import render_trajectory, steps_of, transcript
from tokens.codec import Text


@dataclass
class Notes:
    counts: dict


def table_of(agent, turn):
    return turn["notes"]["rows"] if turn.get("notes") else ()


class Clerk(Agent):
    """Counts what its notes say, and shows its tables."""

    name = "clerk"
    keeps = True
    rates = {
        "done": ("done", "turns"), "search_s": ("search_s", "searches"), "late": ("done", "never"),
    }  # fmt: skip
    extras = {
        "tallies": {"Work by tool": "op_", "Why it ended": "stop_", "Nothing": "never_"},
        "curves": {"Size after a session": ("size_", "sizes_"), "Never": ("no_", "nos_")},
        "table": table_of,
    }

    def count(self, task, turn):
        return turn.notes.counts if turn.notes else {}


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


def test_an_episode_is_a_trajectory_that_has_read_its_document_itself():
    """Two documents are read; two questions are answered from what was made of them."""
    costs = dict(tokens_read=4000, model_calls=5.0)
    more = {"searches": 2, "search_s": 0.003, "turns": 4, "done": 3}
    rows = [
        *(row("clerk", "one", id=f"r{k}", counts=counts | more, sections=4, **costs)
          for k, counts in enumerate(COUNTS)),
        *(row("clerk", "one", id=f"l{k}", counts={"searches": 1}, sections=0) for k in range(2)),
        row("plain", "one", id="r0", sections=3),
    ]  # fmt: skip
    summary = summarise(rows, "sessions", agents={"clerk": Clerk(), "plain": Agent()})
    one, plain = summary["cells"]
    assert (one["episodes"], one["tokens_read"], one["model_calls"]) == (2, 2000, 2.5)
    assert one["rates"] == {"done": 0.75, "search_s": 0.001, "late": None}
    assert one["counts"] == total(row.get("counts", {}) for row in rows)
    assert not {"episodes", "tallies", "rates"} & plain.keys()
    assert not {"episodes", "tallies", "rates"} & summarise(rows)["cells"][0].keys()
    text = words_of(macro("section", report_page._counted(summary), ""))
    for line in (
        "temp. | done | search s", "| clerk, one | 4 | 1.0 | 0.75 | 0.001",
        "temp. | episodes | find | store it",
        "| clerk, one | 4 | 1.0 | 2 | 3.50 | 88 % | 0.50 | 12 %",
    ):  # fmt: skip
        assert f"{line}\n" in text, line
    assert "Nothing" not in text and "plain" not in text


def test_a_curve_is_drawn_of_each_agent_at_one_temperature_and_the_longest_length(monkeypatch):
    drawn = {}
    monkeypatch.setattr(report_page.plots, "curves", lambda panels: drawn.update(panels) or "")

    def at(agent, size, temperature="1.0", length=8, kind="one"):
        counts = {"size_1": 2 * size, "sizes_1": 2, "size_2": 2 * size, "sizes_2": 1}
        return row(agent, kind, temperature, length, counts=counts, sections=2)

    rows = [
        at("a", 10), at("a", 30, kind="two"), at("b", 10), at("b", 90, "0.0"), at("b", 90, length=4)
    ]  # fmt: skip
    summary = summarise(rows, "sessions", agents={"a": Clerk(), "b": Clerk()})
    assert "8 sessions, temperature 1.0" in report_page._curves(summary).note
    assert drawn == {"Size after a session": {"a": [(1, 20), (2, 40)], "b": [(1, 10), (2, 20)]}}


# ---------------------------------------------------------------- a training


def trajectory(step, sample, **counts):
    task = Task(f"t{step}", "", (), text="x", kind="sessions")
    turns = []
    for name, n in counts.items():
        prompt = Prompt((), 4, section="s", memory="m")
        turns.append(Turn(prompt, [1], [2], [-1.0], Finish.STOP, Text("r", ())))
        turns[-1].notes = Notes({name: n, "turns": 1})
    return Trajectory(task, turns, sample, 0.5)


@pytest.fixture
def clerk(monkeypatch):
    """Load the clerk; return the name of the file that it would be in."""
    name = str(Path("clerk").absolute())
    monkeypatch.setitem(find.FINDER.loaded, name, Clerk)
    return name


@pytest.fixture
def parts(clerk):
    """Return what two ranks record of the steps 0, 5 and 10, as members of a file."""
    parts = []
    for step, finds in ((0, 1), (5, 50), (10, 3)):
        for rank in range(2):
            counts = dict(op_find=finds + rank, op_store_it=1, size_1=finds, sizes_1=1)
            ours = [trajectory(step, 2 * rank + k, **counts) for k in range(2)]
            parts.append(runlog.packed(ours, Clerk(), step, 1.0))
    return parts


@pytest.fixture
def path(tmp_path, parts):
    path = tmp_path / "trajectories.jsonl.gz"
    path.write_bytes(b"".join(parts))
    return path


def test_the_first_and_the_last_recorded_step_are_read_and_no_other(path, parts):
    first, middle, last = ([(step, k) for k in range(4)] for step in (0, 5, 10))
    bad = gzip.compress(b"}{", mtime=0)
    for content, *ends in (
        (parts, first, last),
        # neither the middle nor what is torn at the end is looked at
        ([*parts[:2], bad, *parts[4:]], first, last),
        ([*parts[:5], parts[5][:30]], first, last[:2]),
        ([*parts[:4], parts[4][:12]], first, middle),
        (parts[:1], first[:2], first[:2]),
        *(([nothing], [], []) for nothing in (b"", b"torn", parts[0][:20], bad)),
        ([gzip.compress(b"[1]\n", mtime=0)], [], []),
    ):
        path.write_bytes(b"".join(content))
        found = (step_records(path.parent, last) for last in (False, True))
        assert [[(r["step"], r["sample"]) for r in some] for some in found] == ends
    path.unlink()
    assert [*step_records(path.parent, True)] == []


def test_a_training_lists_its_ends_side_by_side(path):
    assert ends_of(path.parent)[0] == {
        "step": 0,
        "episodes": 4,
        "tallies": {"Work by tool": {"find": 2 * (1 + 2), "store_it": 4}},
        "curves": {"Size after a session": {"at": [1], "mean": [1], "n": [4]}},
    }
    with path.with_name("metrics.csv").open("w") as file:
        file.write("step,level,reward,step_s,read_tokens,written_tokens\n")
        file.writelines(f"{i},{i // 10},0.5,1,1,1\n" for i in range(12))
    ends = runlog.summary(path.parent)["ends"]
    assert [(end["step"], end["level"]) for end in ends] == [(0, "0"), (10, "1")]


def test_an_agent_that_lists_nothing_has_records_as_before(path, clerk):
    path.write_bytes(runlog.packed([trajectory(0, 0, a=1)], Agent(), 0))
    assert "counts" not in next(step_records(path.parent)) and ends_of(path.parent) == []
    path.write_bytes(runlog.packed([trajectory(0, 0, op_find=1)], Clerk(), 0))
    assert [end["step"] for end in ends_of(path.parent)] == [0]
    del find.FINDER.loaded[clerk]  # of a file that nobody has loaded
    assert ends_of(path.parent) == []


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


def test_an_agents_table_is_drawn_cell_by_cell(clerk):
    html = transcript(episode(ROWS), True)
    assert re.findall("<th>(.*?)</th>", html) == ["question", "after", "found", "won"]
    rows = [re.findall(r"<td>(.*?)</td>", line, re.S) for line in html.split("<tr>")[2:]]
    found = rows[0].pop(2)
    assert found.startswith("<div>[m1] Ida left.</div><div>$x_{$ &lt;script&gt;")
    assert rows[0] == ["<div>Where is Ida?</div>", "<div>Lima</div>", ""]
    assert rows[1] == ["<div>Who?</div>", "", "", "<div>+1</div>"] and "<script" not in html
    console = Console(width=1000, file=io.StringIO())
    console.print(render_trajectory(episode(ROWS)))
    shown = console.file.getvalue()
    assert "after  Lima\nfound  [m1] Ida left.\n    $x_{$ <script>" in shown
    assert "\x1b" not in shown.replace("\x1b[0m", "")
    for damaged in (3, [3], [{"a": 3}], []):
        assert "<table" not in transcript(episode(damaged), True)
    assert "<table" not in transcript(episode(ROWS) | {"agent": "another"}, True)


def test_questions_aside_are_no_sections(clerk):
    steps = steps_of(episode([]))
    assert [(step.number, step.after) for step in steps[:3]] == [
        (1, "one"), (2, "one two"), (3, "said")  # not "context"
    ]  # fmt: skip
    assert steps[3].startswith("2 questions") and len(steps) == 4
    shown = transcript(episode([]), True)
    assert "section 3 of 3" in shown and '<span class="tag ">reward 0.25</span> a ' in shown
    assert "<dt>reward</dt><dd>0.25</dd>" in shown and "<dt>answer</dt>" not in shown
    mine = transcript(episode([]) | {"step": None, "question": "Where?"}, True)  # of somebody's own
    assert ">answered</span> Where?" in mine and "<dt>reward" not in mine
    final = record(("", "one", "context"))
    final["turns"][-1]["frozen"], final["turns"][1]["response"] = True, "two"
    assert [step.after for step in steps_of(final)] == ["one", "two"]


def test_of_a_row_a_section_is_one_and_the_memory_that_was_its_own_counts_once():
    """Also where later turns go on with its conversation, and beside plans and questions, which are
    shown what was looked up."""
    reading = Reading(Task("a", "q?", ("Lima",), text="x"), Agent())
    one, two = dict(section="one in Lima"), dict(section="two in Lima")
    aside, frozen = dict(aside=True), dict(frozen=True)
    for k, more in enumerate(
        (aside, one, one, {}, frozen, aside, two, aside, frozen | {"final": True})
    ):
        prompt = Prompt((), 4, memory=Text("m" * k, (1,) * k), **more)
        turn = Turn(prompt, [1] * 7, [2], [-1.0], Finish.LENGTH, Text("r", ()))
        if not more:
            turn.prompt = replace(prompt, after=turn)
        reading.add(turn)
        assert record_turn(turn).get("frozen", False) == prompt.frozen
    made = reading.row()
    assert (made["model_calls"], made["sections"], made["tokens_read"]) == (9, 2, 63)
    assert made["occupancy"] == [6, 7] and made["memory_most"] == 7  # by the plans, in the end
    assert made["seen"] == [1, 2] and made["memory_cut"] == 5  # all but the answer and the plans
