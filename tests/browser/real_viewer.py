"""The viewer of rows in a real Chromium: `make test-browser`."""

import json

import pytest
from chromium import BINARY, Chromium
from test_page import HOSTILE, record, row

from commands.report import print_comparison
from config.errors import clean
from report.page import write_report
from report.summary import summarise, write_summary

pytestmark = pytest.mark.skipif(not BINARY, reason="needs Chromium: apt-get install chromium")
LINES = "document.querySelectorAll('#rows-lines .rows-line')"


@pytest.fixture(scope="session", autouse=True)
def quick_plots():
    """Render all plots."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def report(folder, rows, records=()):
    """Write the page of an evaluation; return its address."""
    write_summary(folder / "summary.json", summarise(rows))
    for name, lines in (("rows", rows), ("transcripts", records)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return write_report(folder).as_uri()


def evaluated(agent, length, k):
    """A row; of every ten questions the first `right` are answered rightly."""
    right = 9 if agent == "trained" else 2
    return row(
        agent, length=length, id=f"q{k}", settings=f"{agent}{length}", reward=float(k % 10 < right),
        wording=f"Where is person {k}?", answers=["Lima"], prediction=f"town {k}",
        memory=f"Person {k} met aunt {length}-{k}. " + "She left early. " * (10 if agent else 1),
    )  # fmt: skip


ROWS = [
    evaluated(agent, length, k) for agent in ("trained", "full") for length in (4, 64)
    for k in range(40)
]  # fmt: skip
RECORDS = [
    record(("", f"Person {k} was in Oslo.", f"Person {k} is in {'Lima ' * 60}"), id=f"q{k}",
           settings="trained64", question=f"Where is person {k}?")
    for k in range(40)
]  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return report(tmp_path_factory.mktemp("run"), ROWS, RECORDS)


@pytest.fixture
def opened(browser, address):
    page = ready(browser, address)
    yield page
    assert page.problems == []
    page.close()


def ready(browser, address, **how):
    page = browser.open(address, **how)
    page.until("document.querySelector('#rows').dataset.ready")
    return page


def choose(page, column, label):
    """Choose an entry of a filter, as a person would."""
    page.run(
        f"(s => {{ s.value = [...s.options].find(o => o.text === {label!r}).value; "
        f"s.dispatchEvent(new Event('change')); }})"
        f"(document.querySelector('[data-column={column}]'))"
    )


def look_for(page, words):
    page.run("document.querySelector('#rows-search').value = ''")
    page.click("#rows-search")
    page.type(words)


def count_is(page, text):
    page.until(f"document.querySelector('#rows-count').textContent.startsWith({text!r})")


def text_of(page, selector):
    return page.run(f"document.querySelector({selector!r}).innerText")


@pytest.mark.parametrize(("width", "dark"), [(360, True), (800, False), (1600, True)])
def test_nothing_overflows(browser, address, width, dark):
    page = ready(browser, address, width=width, dark=dark)
    choose(page, "length", "64")
    page.click("#rows-lines .rows-line")
    page.until("!!document.querySelector('#rows-open .memory')")
    assert page.run("document.documentElement.scrollWidth") <= width
    # the viewer's own parts stay within it too; long lines of the list are cut with an ellipsis
    assert page.run(
        "[...document.querySelectorAll('#rows, #rows :not(.rows-line *)')].every(e => "
        "e.getBoundingClientRect().right <= innerWidth)"
    )
    assert page.problems == []
    page.close()


@pytest.mark.parametrize("width", [360, 1600])
def test_a_comparison_does_not_overflow(browser, tmp_path, width):
    for name in ("first", "a-second-one-with-a-long-name"):
        (tmp_path / name).mkdir()
        report(tmp_path / name, ROWS)
    print_comparison([*tmp_path.iterdir()], tmp_path / "page.html")
    page = browser.open((tmp_path / "page.html").as_uri(), width=width)
    assert "Differences" in text_of(page, "body") and page.problems == []
    assert page.run("document.documentElement.scrollWidth") <= width
    page.close()


def test_filters_let_through_what_they_say(opened):
    count_is(opened, "160 of 160 readings, 88 right")
    choose(opened, "agent", "trained")
    count_is(opened, "80 of 160 readings, 72 right")
    choose(opened, "result", "wrong")
    count_is(opened, "8 of 160 readings, 0 right")
    choose(opened, "length", "64")
    count_is(opened, "4 of 160 readings")
    assert opened.run(f"{LINES}.length") == 4
    assert "wrong" in text_of(opened, ".rows-line") and "64 sections" in text_of(
        opened, ".rows-line"
    )
    choose(opened, "agent", "all")
    count_is(opened, "36 of 160 readings")
    # a filter that has nothing to choose is not there
    assert opened.run("document.querySelector('[data-column=sampling]').offsetParent === null")


def test_the_search_looks_into_questions_answers_and_memories(opened):
    for words, n in (("PERSON 7?", 4), ("town 12", 4), ("aunt 64-3.", 2), ("nowhere", 0)):
        look_for(opened, words)
        count_is(opened, f"{n} of 160 readings")
        assert opened.run(f"{LINES}.length") == n


def test_a_transcript_is_opened_by_keys_and_by_mouse(opened):
    choose(opened, "length", "64")
    count_is(opened, "80 of")
    opened.run("document.querySelector('#rows-lines').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "PageDown", "ArrowUp", "Home"):
        opened.press(key)
    for _ in range(12):
        opened.press("ArrowDown")
    selected = opened.run(
        "document.getElementById(document.querySelector('#rows-lines')"
        ".getAttribute('aria-activedescendant')).getAttribute('aria-posinset')"
    )
    assert selected == "13" and "person 12?" in text_of(opened, "[aria-selected=true]")
    opened.press("Enter")
    opened.until("document.activeElement.id === 'rows-open'")
    shown = text_of(opened, "#rows-open")
    assert "Where is person 12?" in shown and "section 1." in shown
    assert "Person 12 was in Oslo." in shown and "Lima" in shown
    assert text_of(opened, "#rows-open del").strip() == "was"
    opened.press("Escape")
    assert opened.run("document.activeElement.id") == "rows-lines"
    opened.press("End")  # of another agent: its transcripts were not kept
    opened.until("document.querySelector('[aria-selected=true]').innerText.includes('39')")
    # the list may be drawn anew while the button is down
    opened.click("[aria-selected=true]", meanwhile="dispatchEvent(new Event('resize'))")
    opened.until("document.querySelector('#rows-open').innerText.includes('not kept')")
    assert "aunt 64-39" in text_of(opened, "#rows-open .memory")


def test_foreign_text_stays_text(browser, tmp_path):
    rows = [row(HOSTILE.replace("\ud83d", ""), id=HOSTILE, wording=HOSTILE, memory=HOSTILE,
                prediction=HOSTILE, answers=[HOSTILE], error=error)
            for error in ("", HOSTILE)]  # fmt: skip
    rows[1] |= {"sample": 1}
    records = [record((HOSTILE, HOSTILE + " in", ""), settings="s", id=HOSTILE, question=HOSTILE)]
    page = ready(browser, report(tmp_path, rows, records))
    page.run("window.alert = () => document.title = 'broken in'")
    for k in (1, 2):
        page.click(f"#rows-lines .rows-line:nth-child({k})")
        page.until(f"document.querySelector('#rows-open').innerText.includes('sample {k - 1}')")
        assert clean("<script>alert('&\"')</script><img src=x onerror=alert(1)>") in text_of(
            page, "#rows-open"
        )
    assert page.run("document.querySelectorAll('#rows-open :is(script, img, style)').length") == 0
    assert page.run("document.title") != "broken in" and page.problems == []
    page.close()


def test_without_scripts_the_rest_of_the_page_is_there(browser, address):
    page = browser.open(address, scripts=False)
    shown = page.call("Accessibility.getFullAXTree")["nodes"]
    words = " ".join(str(node.get("name", {}).get("value", "")) for node in shown)
    assert "it does not run here" in words and "Cost of one question" in words
    assert "question, answer, memory" not in words and page.problems == []
    page.close()


def test_of_ten_thousand_rows_few_are_drawn_and_each_is_found(browser, tmp_path):
    rows = [evaluated(agent, length, k) for agent in ("trained", "full") for length in (4, 64)
            for k in range(2500)]  # fmt: skip
    rows[-1]["memory"] += " the needle"
    records = [RECORDS[k % 40] | {"id": f"q{k}"} for k in range(120)]
    page = ready(browser, report(tmp_path, rows, records))
    assert page.run(f"{LINES}.length") < 40
    page.run("document.querySelector('#rows-lines').focus()")
    page.press("End")
    page.until("document.querySelector('[aria-selected=true]').innerText.includes('2499')")
    look_for(page, "the needle")
    count_is(page, "1 of 10,000")
    look_for(page, "person 119?")
    choose(page, "agent", "trained")
    choose(page, "length", "64")
    count_is(page, "1 of")
    page.click(".rows-line")  # in the last block of transcripts
    page.until("document.querySelector('#rows-open').innerText.includes('Person 39 was')")
    assert page.problems == []
    page.close()
