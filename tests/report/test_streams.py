"""The page of a stream: what is drawn, and that sentences can be read."""

from pathlib import Path

import pytest
from test_page import check_golden

from config.options import StreamConfig
from report import plots, streams
from report.summary import interval


@pytest.fixture
def drawn(monkeypatch):
    """Return the axes of every picture by its title, as they are drawn."""
    from matplotlib.figure import Figure

    found = {}

    def draw_only(draw, label):
        draw(axes := Figure().add_subplot())

        found[label] = axes
        return "<svg></svg>"

    monkeypatch.setattr(plots, "_svg", draw_only)
    return found


def outcome(arm: str, mean: float | None) -> dict:
    """A stream of two tasks and two epochs; mean: of its bank's utilities, None = it has none."""
    text = "Task: a\nStep one. " * 20
    shown = [] if mean is None else [{"id": 1, "q": -0.5, "sim": 0.25, "experience": text}]
    rows = [
        {"epoch": epoch, "id": id, "success": id == "a", "error": "", "failure": "", "steps": 1,
         "shown": shown, "action": "act", "confidence": None, "read_tokens": 5, "written_tokens": 2}
        for epoch in (0, 1) for id in ("a", "b")
    ]  # fmt: skip
    names = ("q_negative", "q_zero", "q_positive", "q_min", "q_10", "q_median", "q_90", "q_max")
    stats = {"entries": 0 if mean is None else 4, "never_shown": 0.5, "q_mean": mean or 0.0}
    return {
        "arm": arm, "about": "", "rows": rows, "leaks": [], "digest": "",
        "frozen": {}, "seconds": [1.0, 1.0],
        "stats": [stats | dict.fromkeys(names, 0.0)] * 2,
    }  # fmt: skip


def page(*outcomes) -> str:
    config = StreamConfig(epochs=2, arms=tuple(o["arm"] for o in outcomes))
    summary = streams.summarise_stream(config, outcomes)
    return streams._page(summary, config, outcomes, Path("of an earlier version"))


def test_success_has_its_intervals_as_bars(drawn):
    page(outcome("none", None), outcome("memrl", 0.0))
    solved, so_far = drawn["Tasks solved by epoch"], drawn["Tasks solved so far by epoch"]
    assert solved.get_ylim() == so_far.get_ylim() == (-4, 104)  # they are compared, and bars fit
    names = [text.get_text() for text in solved.figure.legends[0].get_texts()]
    assert names == ["none", "memrl"]
    bars = [bar for container in solved.containers for bar in container[2]]
    heights = {
        round(float(y), 6) for bar in bars for line in bar.get_segments() for y in line[:, 1]
    }
    assert heights == {round(100 * end, 6) for end in interval([1, 0])}
    assert not so_far.containers[0].has_yerr


def test_what_used_up_its_steps_has_not_crashed(drawn):
    stream = outcome("memrl", 0.0)
    for row, failure in zip(stream["rows"], ("steps", "window", "crashed: a bug", ""), strict=True):
        row["failure"] = failure
    stream["rows"][3]["error"] = "ValueError"
    cells = streams.epochs_of(stream)
    assert [(cell["crashed"], cell["ran_out"]) for cell in cells] == [(0, 2), (2, 0)]
    assert ">ran out</th>" in page(stream)


def test_the_page_of_a_stream(drawn):
    """Also where an arm has no utilities, and where none has any."""
    check_golden("stream", page(outcome("none", None), outcome("rag", 0.0), outcome("memrl", 0.25)))
    assert "Utilities" not in page(outcome("none", None))
