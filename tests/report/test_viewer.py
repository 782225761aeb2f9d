"""The viewer's blocks: what is packed comes back, whatever the texts are."""

import base64
import gzip
import json
import re
from pathlib import Path

import pytest
from test_page import HOSTILE, Page, folder_of, record, row

from config.errors import clean
from data import Task
from memagent import Finish, MemAgent, MemAgentConfig, Prompt, Trajectory, Turn
from report import viewer
from report.page import write_report
from report.reading import row_of
from report.rows import Cell
from report.summary import summarise
from report.transcripts import trace, unformed
from report.viewer import viewer_section


def blocks(html):
    """Read the blocks of a page: name -> value."""
    found = re.findall(r'<script type="application/gzip" id="rows-([\w-]+)">([^<]*)</script>', html)
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def column(block, name):
    values, at = block[name]["values"], block[name]["at"]
    return [values[k] for k in at]


def test_every_row_is_packed_and_opens_its_own_transcript(monkeypatch):
    monkeypatch.setattr(viewer, "TOGETHER", 2)
    rows = [
        row(id=f"q{k}", reward=float(k % 2), wording=f"Where is {k % 3}?", memory=f"memory {k}",
            answers=["Lima", "Peru"], length=4 * (1 + k % 2))
        for k in range(7)
    ]  # fmt: skip
    records = [
        record(id=f"q{k}", settings="s", memories=("", f"was in {k}", f"is in {k}"))
        for k in (5, 0, 3)
    ]
    section, script = viewer_section(rows, summarise(rows), records)
    packed = blocks(section.body)
    assert script == (Path(viewer.__file__).parent / "viewer.js").read_text()
    assert {*packed} == {"list", "memories", "transcripts-0", "transcripts-1"}
    ids = [origin.partition(",")[0] for origin in column(packed["list"], "origin")]
    assert sorted(ids) == [f"q{k}" for k in range(7)]
    for k, name in enumerate(ids):
        number = int(name[1])
        assert column(packed["list"], "question")[k] == f"Where is {number % 3}?"
        assert column(packed["list"], "result")[k] == ("right" if number % 2 else "wrong")
        assert column(packed["memories"], "memory")[k] == f"memory {number}"
        at = column(packed["list"], "record")[k]
        if number in (0, 3, 5):
            opened = packed[f"transcripts-{at // 2}"][at % 2]
            assert opened == ["div", "", *trace(records[at])]
        else:
            assert at is None
    assert column(packed["list"], "sections").count("kept") == 3
    # one of the four that were wrong
    assert "All sections were kept of 1 of the 4 readings that were not fully right" in section.note
    # equal texts come once
    assert packed["list"]["question"]["values"] == ["Where is 0?", "Where is 2?", "Where is 1?"]


def test_what_is_listed_of_rows_of_an_earlier_version():
    rows = [
        row(id="a", prediction=None, response=" It is Lima. "), row(id="b", reward=0.5),
        row(id="c", reward=0.0, error="no window", prediction="x" * 5000),
    ]  # fmt: skip
    listed = blocks(viewer_section(rows, summarise(rows), [record(settings="s")])[0].body)["list"]
    assert column(listed, "question") == ["Where is Anna?", "b", "c"]  # of the transcript, else id
    assert column(listed, "result") == ["right", "partly right", "failed"]
    formless, _, long = column(listed, "answer")
    assert formless == f"It is Lima. {unformed()}" and len(long) < 800
    section, script = viewer_section([], summarise(rows), [])
    assert section.body == script == ""


def test_of_too_many_rows_every_cell_keeps_as_many(monkeypatch):
    monkeypatch.setattr(viewer, "MOST", 6)
    rows = [row(agent, id=f"{k}", settings=agent) for agent in ("a", "b") for k in range(5)]
    section, _ = viewer_section(rows, summarise(rows), [])
    listed = blocks(section.body)["list"]
    assert "first 6 of 10" in section.note
    assert column(listed, "agent") == ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize("text", [
    "</script><script>alert(1)</script>", "<!--", "<script><!--<script>", "a\0b", "\ud83d",
    "\u202eabc\u202c", "&lt;b&gt; &amp;", "a\u2028\u2029", HOSTILE,
])  # fmt: skip
def test_no_text_leaves_its_block_and_every_text_comes_back(text):
    rows = [row(text, text, id=text, prediction=text, error=text, wording=text, memory=text,
                answers=[text])]  # fmt: skip
    records = [record((text, text + " in", text), text, settings="s", id=text, question=text)]
    html = viewer_section(rows, summarise(rows), records)[0].body
    packed = blocks(html)
    assert len(packed) == html.count("<script") == html.count("</script>") == 3
    assert html[html.index("<script") :].count("<") == 6
    for name in ("agent", "question", "answer", "accepted", "error"):
        assert column(packed["list"], name) == [clean(text)]
    assert column(packed["memories"], "memory") == [clean(text)]
    opened = json.dumps(packed["transcripts-0"][0], ensure_ascii=False)
    assert json.dumps(clean(text).split()[0], ensure_ascii=False)[1:-1] in opened
    assert not {"\0", "\u202e"} & {*opened}


def test_a_row_keeps_the_questions_words_and_the_last_memory_in_short():
    task = Task("a", "Where is Anna?" * 100, ("Lima",), text="x")
    prompts = [
        Prompt((), 8, final=memory.startswith("Lima"), section="x", memory=memory)
        for memory in ("", "She left. " * 500, "Lima " * 1000)
    ]
    turns = [Turn(prompt, [], [], [], Finish.STOP, "y") for prompt in prompts]
    agent, cell = MemAgent(MemAgentConfig()), Cell("a", "q", "1.0", 2)
    made = row_of(Trajectory(task, turns), cell, agent)
    assert made["wording"].startswith("Where is Anna?") and len(made["wording"]) < 550
    assert made["memory"].startswith("Lima") and len(made["memory"]) < 2050
    failed = row_of(Trajectory(task, turns[:2], error="gone"), cell, agent)
    assert failed["memory"].startswith("She left.")
    assert row_of(Trajectory(task, []), cell, agent)["memory"] == ""


def test_only_the_script_of_the_rows_may_run_and_only_where_there_are_rows(tmp_path):
    rows = [row(id=f"{k}") for k in range(9)]
    folder = folder_of(tmp_path / "e", rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    text = write_report(folder).read_text()
    assert (
        Page(text)
        and "script-src" in text
        and 'id="rows-list"' in text
        and "Below is every reading." in text
    )
    (folder / "rows.jsonl").unlink()
    text = write_report(folder).read_text()
    assert "<script" not in text and "script-src" not in text and "Below is" not in text
