"""The pages of runs in a real Chromium, from a telephone's width to a wide screen's: `make
test-browser`."""

import json

import pytest
from chromium import BINARY, Chromium
from run_folders import evaluation, folder_of, record, row, training, trajectory
from test_streams import outcome

from config.options import StreamConfig
from memagent import Agent
from report import runlog, streams
from report.page import write_reading, write_report

pytestmark = pytest.mark.skipif(not BINARY, reason="needs Chromium: apt-get install chromium")
LONG = "unbreakable_" * 20


@pytest.fixture(scope="session", autouse=True)
def quick_plots():
    """Render all plots."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def long_names(folder):
    rows = [
        row(agent, kind, t, n, str(i), float(i % 2), document_tokens=9, seconds=1.0, mib=4,
            sections=4, needed=1, held=[], seen=[1])
        for agent in ("memagent", "full", LONG) for kind in ("two_hop", "one_fact", LONG)
        for t in ("1.0", "0.0") for n in (4, 16, 64, 256, 1024, 4096) for i in range(4)
    ]  # fmt: skip
    cell = dict(agent="memagent", question="two_hop", temperature="1.0", length=4)
    texts = dict(question=LONG, answer=LONG, answers=[LONG], settings="s", cell=cell)
    one = record(("none", LONG, LONG + " and more"), **texts)
    (evaluation(folder, rows) / "transcripts.jsonl").write_text(json.dumps(one) + "\n")
    return write_report(folder, LONG)


def steps(folder):
    writer = runlog.TrajectoryWriter(training(folder) / "trajectories.jsonl.gz")
    writer.write([runlog.packed([trajectory(3, 0)], Agent(), 3)])
    return write_report(folder)


def stream(folder):
    config = StreamConfig(epochs=2, arms=("none", "memrl"))
    outcomes = [outcome("none", None), outcome("memrl", 0.25)]
    summary = streams.summarise_stream(config, outcomes)
    (folder / "report.html").write_text(streams._page(summary, config, outcomes, folder, LONG))
    return folder / "report.html"


def reading(folder):
    return write_reading(folder, record(("none", LONG, LONG), question=LONG), {LONG: LONG})


@pytest.fixture(scope="module", params=[long_names, steps, stream, reading])
def page_of(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("run")).as_uri()


@pytest.mark.parametrize(("width", "dark"), [(360, True), (800, False), (1600, True)])
def test_nothing_is_wider_than_the_page(browser, page_of, width, dark):
    page = browser.open(page_of, width=width, dark=dark)
    page.run("document.querySelectorAll('details').forEach(e => { e.open = true })")
    assert page.run("document.documentElement.scrollWidth") <= width
    too_wide = page.run(
        "[...document.querySelectorAll('main > *, .pair *, figure, details.reading *')]"
        ".filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.tagName + '.' + e.className)"
    )
    assert too_wide == [] and page.problems == []
    page.close()


@pytest.mark.parametrize("width", [360, 1400])
def test_numbers_stand_in_a_line(browser, tmp_path, width):
    page = browser.open(stream(tmp_path).as_uri(), width=width)
    lines = """[...document.querySelectorAll('td')].filter(td => FILTER).map(td => {
      const range = document.createRange(); range.selectNodeContents(td)
      return range.getClientRects().length })"""
    numbers = page.run(
        lines.replace("FILTER", "td.offsetParent && /^-?[\\d.]+( %)?$/.test(td.textContent)")
    )
    assert numbers and all(n == 1 for n in numbers)
    page.close()


def test_letters_stand_out_from_the_page(browser, tmp_path):
    """By WCAG's contrast of 4.5 for text, in both schemes; what is faint on purpose is left out."""
    address = long_names(tmp_path).as_uri()
    ratio = """(() => {
      const lum = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => {
        v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 })
        return .2126 * r + .7152 * g + .0722 * b }
      const under = lum(getComputedStyle(document.body).backgroundColor)
      return Math.min(...['h1', '.note', 'th', 'td', 'summary', 'small'].map(s => {
        const over = lum(getComputedStyle(document.querySelector(s)).color)
        return (Math.max(over, under) + .05) / (Math.min(over, under) + .05) })) })()"""
    for dark in (False, True):
        page = browser.open(address, dark=dark)
        assert page.run(ratio) >= 4.5
        page.close()


def test_a_wide_table_scrolls_in_its_frame(browser, tmp_path):
    page = browser.open(long_names(tmp_path).as_uri(), width=360)
    page.run("document.querySelectorAll('details').forEach(e => { e.open = true })")
    assert page.run("[...document.querySelectorAll('.scroll')]"
                    ".some(e => e.scrollWidth > e.clientWidth + 20)")  # fmt: skip
    page.close()


def test_the_list_is_searched_and_the_slider_goes_through_the_sections(browser, tmp_path):
    cell = dict(question="one_fact", temperature="1.0", length=4)
    records = [
        record(("none", "none", f"{agent} {k}", "Lima"), answer, id=f"q{k}", settings=agent,
               question=f"Where is person {k}?", cell=cell | {"agent": agent})
        for agent, answer in (("trained", "\\boxed{Lima}"), ("untrained", "\\boxed{Rome}"))
        for k in range(5)
    ]  # fmt: skip
    rows = [
        row(agent, id=f"q{k}", settings=agent, reward=float(agent == "trained"))
        for agent in ("trained", "untrained") for k in range(5)
    ]  # fmt: skip
    page = browser.open(write_report(folder_of(tmp_path / "e", rows, records=records)).as_uri())
    shown = "[...document.querySelectorAll('details.reading')].filter(e => !e.hidden).length"
    send = (
        "(() => {{ const e = document.getElementById('{}'); e.value = '{}';"
        "e.dispatchEvent(new Event('input', {{bubbles: true}})) }})()"
    )
    counts = []
    for where, what in (("words", ""), ("words", "PERSON 3"), ("verdict", "wrong"), ("words", "")):
        page.run(send.format(where, what))
        counts.append(page.run(shown))
    assert counts == [10, 2, 1, 5]
    assert page.run("document.getElementById('shown').textContent") == "5 of 10"
    visible = (
        "[...document.querySelectorAll('.pair .step')].filter(e => !e.hidden)"
        ".map(e => e.dataset.step).join()"
    )
    assert page.run(visible) == "2,2"  # where the two memories first differ
    page.run("(() => { const e = document.querySelector('#slide input'); e.value = 3;"
             "e.dispatchEvent(new Event('input', {bubbles: true})) })()")  # fmt: skip
    assert page.run(visible) == "3,3" and page.problems == []
    page.close()
