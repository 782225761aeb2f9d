"""The page of a stream: what is drawn, and that sentences can be read."""

from pathlib import Path

from run_folders import Page

from config.options import StreamConfig
from report import streams
from report.summary import interval


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


def page(*outcomes) -> Page:
    config = StreamConfig(epochs=2, arms=tuple(o["arm"] for o in outcomes))
    summary = streams.summarise_stream(config, outcomes)
    return Page(streams._page(summary, config, outcomes, Path("of an earlier version")))


def test_success_is_drawn_with_its_intervals(monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        streams,
        "plot",
        lambda lines, title, *_, **how: drawn.setdefault(title, (lines, how)) and "",
    )
    page(outcome("none", None), outcome("memrl", 0.0))
    low, high = interval([1, 0])
    assert drawn["Tasks solved"] == (
        {arm: [(1, 0.5, low, high), (2, 0.5, low, high)] for arm in ("none", "memrl")},
        {"share": True},
    )
    assert drawn["Tasks solved so far"][0]["memrl"] == [(1, 0.5), (2, 0.5)]


def test_what_used_up_its_steps_has_not_crashed():
    stream = outcome("memrl", 0.0)
    for row, failure in zip(stream["rows"], ("steps", "window", "crashed: a bug", ""), strict=True):
        row["failure"] = failure
    stream["rows"][3]["error"] = "ValueError"
    cells = streams.epochs_of(stream)
    assert [(cell["crashed"], cell["ran_out"]) for cell in cells] == [(0, 2), (2, 0)]
    assert ">ran out</th>" in page(stream).html


def test_the_page_of_a_stream():
    """Also where an arm has no utilities, and where none has any."""
    made = page(outcome("none", None), outcome("rag", 0.0), outcome("memrl", 0.25))
    figures = ["50.0 %"] * 3
    assert made.html.count("<strong>50.0 %</strong>") == len(figures)
    for part in (
        "solved with memrl", "memrl minus none", "+0.0 (",
        "The bank at the end of each epoch", "q mean",
    ):  # fmt: skip
        assert part in made.text, part
    assert "The bank at the end" not in page(outcome("none", None)).text
