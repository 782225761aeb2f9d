"""Plots: one colour an agent, labels that fit, panels that can be compared."""

import pytest
from matplotlib.figure import Figure
from test_page import row

from report import plots
from report.summary import summarise


@pytest.fixture
def drawn(monkeypatch):
    """Return the axes of each panel, as they are drawn."""
    found = []

    def draw_only(draw, label):
        draw(axes := Figure(figsize=(5.6, 3.5)).add_subplot())
        found.append(axes)
        return "<svg></svg>"

    monkeypatch.setattr(plots, "_svg", draw_only)
    return found


def test_an_agent_has_its_colour_on_every_page_and_other_dashes_in_its_other_states():
    page = ["memagent", "full", "memagent@untrained", "mine", "other"]
    comparison = ["a: full", "a: memagent", "b: memagent", "b: full", "none"]
    demo = ["trained", "untrained", "full"]
    of_page, of_comparison, of_demo = (plots.looks(names) for names in (page, comparison, demo))
    colours = {name: look["color"] for name, look in (of_page | of_comparison | of_demo).items()}
    for agent in ("memagent", "full"):
        same = {colours[name] for name in colours if agent in name}
        assert len(same) == 1, agent
    assert colours["trained"] == colours["untrained"] == colours["memagent"]
    assert len({colours[name] for name in ("memagent", "full", "mine", "other", "none")}) == 5
    assert [of_comparison[f"{run}: memagent"]["linestyle"] for run in "ab"] == ["-", "--"]
    assert [of_demo[name]["linestyle"] for name in ("untrained", "trained")] == ["--", "-"]
    strangers_first = plots.looks(["mine", "memagent"])
    assert strangers_first["memagent"]["color"] == colours["memagent"]
    many = plots.looks(f"agent {k}" for k in range(20))
    assert len(many) == 20 and len({look["color"] for look in many.values()}) == 8


@pytest.mark.parametrize("lengths", [
    [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128], [50, 100, 200, 400, 800, 1600, 3200, 6400,
    12800, 25600], [0, 1, 2, 3, 1000], [7], [8192, 114688, 131072, 262144, 917504, 3670016],
])  # fmt: skip
def test_labels_of_lengths_do_not_touch_each_other(lengths):
    figure = Figure(figsize=(5.6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(lengths, lengths)
    plots.length_axis(axes, lengths)
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(a.x1 < b.x0 for a, b in zip(sorted(boxes, key=lambda b: b.x0), sorted(
        boxes, key=lambda b: b.x0)[1:], strict=False))  # fmt: skip
    assert max(axes.get_xticks()) == lengths[-1] and len(boxes) >= min(len(lengths), 2)


def test_panels_that_are_compared_have_one_scale_and_bars_inside(drawn):
    rows = [
        row(agent, kind, length=n, id=str(i), reward=float(i > 0) * (agent == "a"),
            occupancy=[1.0, 9.0 if agent == "a" else 2.0], memory_most=9)
        for agent in "ab" for kind in ("one_fact", "two_hop") for n in (4, 64) for i in range(9)
    ]  # fmt: skip
    summary = summarise(rows)
    plots.accuracy(summary)
    assert [axes.get_ylim() for axes in drawn] == [(-4, 104)] * 2
    labels = [label.get_text() for label in drawn[0].get_yticklabels()]
    assert labels[0] == "0 %" and labels[-1] == "100 %"
    ends = [y for container in drawn[0].containers for bars in container[2]
            for line in bars.get_segments() for _, y in line]  # fmt: skip
    assert min(ends) == 0 and 60 < max(ends) <= 100
    drawn.clear()
    plots.occupancy(summary)
    assert len(drawn) == 2 and drawn[0].get_ylim() == drawn[1].get_ylim() == (0, 1.05 * 9)
