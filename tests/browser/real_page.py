"""The pages of runs in a real Chromium, at the width of a telephone and of a wide screen: `make
test-browser`."""

import json

import pytest
from chromium import BINARY, Chromium, Page
from run_folders import evaluation, folder_of, record, row, training, trajectory
from test_streams import CONFIG, outcome

from commands.report import print_comparison
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


def evaluated(folder):
    rows = [
        row(agent, kind, t, n, str(i), float(i % 2), document_tokens=9, seconds=1.0, mib=4)
        for agent in ("memagent", "full", LONG) for kind in ("two_hop", "one_fact", LONG)
        for t in ("1.0", "0.0") for n in (4, 16, 64, 256, 1024, 4096) for i in range(4)
    ]  # fmt: skip
    cell = dict(agent="memagent", question="two_hop", temperature="1.0", length=4)
    texts = dict(question=LONG, answer=LONG, answers=[LONG], settings="s", cell=cell)
    one = record(("none", LONG, LONG + " and more"), **texts)
    (evaluation(folder, rows) / "transcripts.jsonl").write_text(json.dumps(one) + "\n")
    return write_report(folder, LONG)


def trained(folder):
    writer = runlog.TrajectoryWriter(training(folder) / "trajectories.jsonl.gz")
    writer.write([runlog.packed([trajectory(3, 0)], Agent(), 3)])
    return write_report(folder)


def streamed(folder):
    return streams.rewrite_stream_report(
        folder, CONFIG, [outcome("none", None), outcome("memrl", 0.25)], running=True
    )


def compared(folder):
    agents = ("trained", "untrained", "full", "memagent@untrained")
    rows = [row(agent, id=str(k), length=n) for agent in agents for n in (4, 16) for k in range(9)]
    return print_comparison([folder_of(folder / name, rows) for name in ("first", "second")])


def read(folder):
    return write_reading(folder, record(("none", LONG, LONG), question=LONG), {LONG: LONG})


@pytest.fixture(scope="module", params=[evaluated, trained, streamed, compared, read])
def address(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("run")).as_uri()


WIDER = """[...document.querySelectorAll('main > *, .pair *, figure, details.reading *')]
    .filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + '.' + e.className)"""
# cells with one word, which is not LONG, that takes more than a line
BROKEN = """[...document.querySelectorAll('td, th')].filter(e => /^\\S{1,20}$/.test(e.textContent))
    .filter(e => { const range = document.createRange(); range.selectNodeContents(e)
                   return range.getClientRects().length > 1 }).map(e => e.textContent)"""
# WCAG's contrast of letters, 4.5 at least; what is faint on purpose is left out
CONTRAST = """(() => {
    const lum = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => {
      v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 })
      return .2126 * r + .7152 * g + .0722 * b }
    const under = lum(getComputedStyle(document.body).backgroundColor)
    return Math.min(...['h1', '.note', 'th', 'td', 'summary', 'small'].map(s => {
      const e = document.querySelector(s); if (!e) return 21
      const over = lum(getComputedStyle(e).color)
      return (Math.max(over, under) + .05) / (Math.min(over, under) + .05) })) })()"""


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_a_page_is_legible_and_nothing_is_wider_than_it(browser, address, width, dark):
    page = Page(browser, address, width, dark)
    page.run("document.querySelectorAll('details').forEach(e => { e.open = true })")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(WIDER) == [] and page.run(BROKEN) == [] and page.problems == []
    assert page.run(CONTRAST) >= 4.5
    page.close()


def test_a_wide_table_scrolls_in_its_frame(browser, tmp_path):
    page = Page(browser, evaluated(tmp_path).as_uri(), width=400)
    frames = "[...document.querySelectorAll('.scroll')]"
    assert page.run(f"{frames}.some(e => e.scrollWidth > e.clientWidth + 20)")
    page.close()


SEND = """(() => {{ const e = document.querySelector('{}'); e.value = '{}'
    e.dispatchEvent(new Event('input', {{bubbles: true}})) }})()"""
VISIBLE = "[...document.querySelectorAll('{}')].filter(e => !e.hidden)"


def test_the_list_is_searched_and_the_slider_goes_through_the_sections(browser, tmp_path):
    cell = dict(question="one_fact", temperature="1.0", length=4)
    asked = [(agent, k) for agent in ("trained", "untrained") for k in range(5)]
    records = [
        record(("none", "none", f"{agent} {k}", "Lima"), id=f"q{k}", settings=agent,
               question=f"Where is person {k}?", cell=cell | {"agent": agent})
        for agent, k in asked
    ]  # fmt: skip
    rows = [
        row(agent, id=f"q{k}", settings=agent, reward=float(agent == "trained"))
        for agent, k in asked
    ]
    page = Page(browser, write_report(folder_of(tmp_path / "e", rows, records=records)).as_uri())
    counts = []
    for where, what in (("words", ""), ("words", "PERSON 3"), ("verdict", "wrong"), ("words", "")):
        page.run(SEND.format(f"#{where}", what))
        counts.append(page.run(VISIBLE.format("details.reading") + ".length"))
    assert counts == [10, 2, 1, 5]
    assert page.run("document.getElementById('shown').textContent") == "5 of 10"
    steps = VISIBLE.format(".pair .step") + ".map(e => e.dataset.step).join()"
    assert page.run(steps) == "2,2"  # where the two memories first differ
    page.run(SEND.format("#slide input", 3))
    assert page.run(steps) == "3,3" and page.problems == []
    page.close()
