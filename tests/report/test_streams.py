"""The page of a stream: what is drawn, what counts as a crash, what is shown of a bank."""

import pytest
from run_folders import Page, shown

from config.options import StreamConfig
from report import streams
from report.summary import interval

CONFIG = StreamConfig(epochs=2, arms=("none", "rag", "memrl"))


def outcome(arm: str, mean: float | None) -> dict:
    """A stream of two tasks and two epochs; mean: of its bank's utilities, None = it has none."""
    memory = [] if mean is None else [{"id": 1, "q": -0.5, "sim": 0.25, "experience": "Step one."}]
    rows = [
        {"epoch": epoch, "id": id, "success": id == "a", "error": "", "failure": "", "steps": 1,
         "shown": memory, "confidence": None, "read_tokens": 5, "written_tokens": 2}
        for epoch in (0, 1) for id in ("a", "b")
    ]  # fmt: skip
    names = ("q_negative", "q_zero", "q_positive", "q_min", "q_10", "q_median", "q_90", "q_max")
    stats = {"entries": 0 if mean is None else 4, "q_mean": mean or 0.0} | dict.fromkeys(names, 0.0)
    return {
        "arm": arm, "about": "", "rows": rows, "leaks": [], "digest": "", "frozen": {},
        "seconds": [1.0, 1.0], "stats": [stats] * 2,
    }  # fmt: skip


@pytest.fixture
def page(tmp_path):
    """Return a function that makes the page of outcomes."""

    def made(*outcomes) -> Page:
        return shown(streams.rewrite_stream_report(tmp_path, CONFIG, outcomes, running=False))

    return made


def test_success_is_drawn_with_its_intervals(page, monkeypatch):
    drawn = {}

    def plot(lines, title, *_, **how):
        return drawn.setdefault(title, lines) and ""

    monkeypatch.setattr(streams, "plot", plot)
    page(outcome("none", None), outcome("memrl", 0.0))
    solved = [(epoch, 0.5, *interval([1, 0])) for epoch in (1, 2)]
    assert drawn["Tasks solved"] == {"none": solved, "memrl": solved}
    assert drawn["Tasks solved so far"]["memrl"] == [(1, 0.5), (2, 0.5)]


def test_what_used_up_its_steps_has_not_crashed(page):
    stream = outcome("memrl", 0.0)
    for row, failure in zip(stream["rows"], ("steps", "window", "crashed: a bug", ""), strict=True):
        row["failure"] = failure
    stream["rows"][3]["error"] = "ValueError"
    cells = streams.epochs_of(stream)
    assert [(cell["crashed"], cell["ran_out"]) for cell in cells] == [(0, 2), (2, 0)]


def test_arms_are_compared_on_the_tasks_that_both_have_done():
    stopped = outcome("none", None)
    del stopped["rows"][3]
    summary = streams.summarise_stream(CONFIG, [stopped, outcome("memrl", 0.0)])
    assert [(d["n"], d["mean"], d["low"]) for d in summary["differences"]] == [
        (1, 0.0, interval([0.0], least=-1)[0])
    ]


def test_the_page_has_figures_tables_and_of_those_that_have_one_the_bank(page):
    made = page(outcome("none", None), outcome("rag", 0.0), outcome("memrl", 0.25))
    assert made.html.count("<strong>50.0 %</strong>") == 3 and "q mean" in made.text
    assert "memrl minus none" in made.text and "+0.0 (" in made.text
    assert "q mean" not in page(outcome("none", None)).text
