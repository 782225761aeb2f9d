"""Runs side by side: pairs, intervals, what is left out, what is refused."""

import json
from pathlib import Path

import pytest
from run_folders import HOSTILE, folder_of, lines, row, shown, training
from typer.testing import CliRunner

import cli
from config.errors import UserError
from report import compare
from report.compare import remarks, side_by_side, verdicts
from report.folder import Run
from report.summary import interval


def run(name, rows, unit="sections", metric="sub_em", **settings):
    about = {"unit": unit, "metric": metric}
    return Run(Path(name), about, rows, config=json.dumps({"eval": settings}), title=name)


def asked(right, ids=range(20), **other):
    """Rows, of which the first `right` are answered rightly."""
    other |= {"settings": str(other)}
    return [row(id=f"q{k}", reward=float(place < right), **other) for place, k in enumerate(ids)]


def invoke(*words, code=0):
    done = CliRunner().invoke(cli.app, ["report", *map(str, words)])
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return " ".join(done.output.split())


def test_a_known_difference_with_its_interval():
    summary = side_by_side([run("a", asked(18)), run("b", asked(4))])
    (pair,) = summary["paired"]
    assert (pair["a"], pair["b"], pair["n"]) == ("a: trained", "b: trained", 20)
    assert pair["mean"] == pytest.approx(14 / 20)
    values = [float(4 <= k < 18) for k in range(20)]
    assert (pair["low"], pair["high"]) == interval(values, least=-1)
    means = {cell["agent"]: cell["mean"] for cell in summary["cells"]}
    assert means == {"a: trained": 0.9, "b: trained": 0.2} and remarks(summary) == []


def test_agents_are_paired_by_name_else_with_the_first_one_of_the_first_run():
    first = asked(9, agent="full") + asked(5, agent="mine") + asked(5, agent="mine", length=64)
    second = asked(1, agent="mine", length=64) + asked(2, agent="other") + asked(3, agent="mine")
    third = asked(7, agent="full", temperature="0.0") + asked(8, agent="full")
    summary = side_by_side([run("a", first), run("b", second), run("c", third)])
    found = {(pair["a"], pair["b"], pair["length"]): pair["mean"] for pair in summary["paired"]}
    assert found == {
        ("a: mine", "b: mine", 4): pytest.approx(2 / 20),
        ("a: mine", "b: mine", 64): pytest.approx(4 / 20),
        ("a: full", "b: other", 4): pytest.approx(7 / 20),
        ("a: full", "c: full", 4): pytest.approx(1 / 20),
    }


@pytest.mark.parametrize(("first", "second", "said"), [
    (18, 4, ("a: trained is better than b: trained", "+70.0 points")),
    (4, 18, ("b: trained is better than a: trained", "+70.0 points")),
    (9, 10, ("not shown", "-5.0 points")),
])  # fmt: skip
def test_a_sentence_says_which_is_better_or_that_it_is_not_shown(first, second, said):
    """Over all cells that both have."""
    rows = [asked(n) + asked(n, length=64) for n in (first, second)]
    rows[0] += asked(20, temperature="0.0")  # which the second was not asked
    rows[1] += asked(20, length=256)
    (sentence,) = verdicts(side_by_side([run("a", rows[0]), run("b", rows[1])]))
    assert all(part in sentence for part in (*said, "n 40"))


def test_trainings_are_compared_by_their_last_steps(tmp_path):
    a, b = training(tmp_path / "a", steps=30), training(tmp_path / "b", steps=12)
    words = invoke(a, b)
    assert "a is better than b by +" in words and "the last 10 steps (95 % interval +" in words
    assert "b: Stopped: step 12" in words
    page = shown(tmp_path / "compare-a-b.html")
    assert page.tags.count("svg") == 1 and "a is better" in page.text
    runs = [compare.read_named(path, path.name) for path in (a, b)]
    summary = compare.trainings_side_by_side(runs) | {"measure": "loss"}
    assert verdicts(summary)[0].startswith("b is better than a by +")  # of losses
    invoke(a, folder_of(tmp_path / "c", asked(3)), code=2)


def test_what_one_alone_was_asked_is_counted_and_left_out():
    second = asked(5, range(10, 40)) + asked(3, range(3), length=64)
    second[0] |= {"task": "another document"}  # question 10
    summary = side_by_side([run("a", asked(20)), run("b", second)])
    (pair,) = summary["paired"]
    assert pair["n"] == 9 and pair["mean"] == pytest.approx(1 - 4 / 9)  # questions 11 to 19
    (sentence,) = remarks(summary)
    assert "11 questions of the first alone and 24 of the second alone" in sentence
    greedy = asked(3, temperature="0.0")
    (overall,) = side_by_side([run("a", asked(20) + greedy), run("b", asked(20))])["overall"]
    assert (overall["only_a"], overall["only_b"]) == (20, 0)


@pytest.mark.parametrize(("other", "field"), [
    (run("b", asked(1, sub_em=None), metric="reward"), "sub_em"),
    (run("b", asked(1), unit="tokens"), "unit"),
    (run("b", asked(1), suite="ruler"), "suite"),
    (run("b", asked(1, range(50, 60))), "--seed 1000000"),
    (run("b", asked(1, temperature="0.0")), "temperature"),
    (run("b", []), "b holds no rows"),
])  # fmt: skip
def test_unlike_evaluations_are_refused(other, field):
    with pytest.raises(UserError, match=field):
        side_by_side([run("a", asked(3), suite=""), other])


def test_settings_and_measures_that_differ_are_said():
    """A demo has the settings of a training, and its metric is the reward."""
    demo = run("demo", asked(20, sub_em=0.5), metric="reward")
    demo.config = json.dumps({"run": {"seed": 0}})
    summary = side_by_side([demo, run("b", asked(5), suite="", data=["world"])])
    assert summary["metric"] == "sub_em" and summary["paired"][0]["mean"] == 0.5 - 5 / 20
    (sentence,) = remarks(summary)
    assert "demo by reward, b by sub_em" in sentence
    same = run("c", asked(5), suite="world"), run("d", asked(5), suite="", data=["world"])
    assert "suite" not in " ".join(remarks(side_by_side(same)))
    first, second = (run(x, asked(3), model=x, seed=0, runs=x, agents=[x]) for x in ("m", ""))
    second.title = "n"
    assert remarks(side_by_side([first, second])) == ["model: m m, n the default."]


def test_the_command_prints_and_writes_a_page(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("report.page.plot", lambda lines, *_, **__: drawn.append([*lines]) or "")
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    usual = asked(18, agent="bm25") + asked(18) + asked(17, length=64)
    a = folder_of(tmp_path / "x" / "run", usual, config="eval: {suite: ''}")
    b = folder_of(tmp_path / "y" / "run", asked(4) + asked(4, length=64))
    both = asked(9, agent="bm25") + asked(3, range(15))
    c = folder_of(tmp_path / "x" / "c", both)
    summary = json.loads((c / "summary.json").read_text()) | {"altered": {"trained": "top_k 2"}}
    (c / "summary.json").write_text(json.dumps(summary))
    words = invoke(a, c)
    assert "run: trained is better" in words and "25 questions of the first alone" in words
    page = shown(tmp_path / "x" / "compare-run-c.html")
    assert "90.0 % run: trained" in page.text and "20.0 % c: trained" in page.text
    names = [page.text.index(x) for x in ("run: trained minus c: trained", "c: trained (top_k 2)")]
    assert names == sorted(names)  # differences first
    assert "+80.0 +57 … +100, n 15" in page.text
    assert drawn == [["run: trained", "c: trained"]]  # and no other pair
    out = tmp_path / "page.html"
    invoke(a, b, "--out", out)  # two of one name are called by their paths
    assert f"{a}: trained minus {b}: trained" in shown(out).text
    assert [path.name for path in tmp_path.glob("*/*.html")] == ["compare-run-c.html"]


def test_markup_in_names_is_shown_as_text(tmp_path):
    name = HOSTILE.replace("\ud83d", "").replace("\0", "")
    rows = asked(3, agent=name, question=name)
    a, b = folder_of(tmp_path / "[bold]<b>a", rows), folder_of(tmp_path / "b", rows[1:])
    words = invoke(a, b, "--out", tmp_path / "page.html")
    assert "\x1b" not in words and "[bold]<b>a" in words
    assert "<script>alert(" in shown(tmp_path / "page.html").text


def test_mistakes_are_one_sentence(tmp_path):
    a, b, empty, torn = (folder_of(tmp_path / name, asked(3)) for name in ("a", "b", "c", "torn"))
    (empty / "rows.jsonl").unlink()
    (torn / "summary.json").write_text("{")
    for words in (
        [a, a], [a, "--out", tmp_path / "x.html"], [a, tmp_path / "none"], [a, torn], [a, empty],
        [a, b, "--out", tmp_path / "no" / "x.html"],
    ):  # fmt: skip
        invoke(*words, code=2)


def test_an_evaluation_that_is_partly_there_is_compared_and_that_is_said(tmp_path):
    rows, config = asked(3), "eval: {suite: ruler-hqa, agents: [trained]}"
    a = folder_of(tmp_path / "a", rows, "documents", config=config)
    b = folder_of(tmp_path / "b", rows, "documents", config=config)
    (b / "rows.jsonl").write_text(lines(rows[:5]))
    (b / "summary.json").unlink()
    words = invoke(a, b)
    assert "b: Stopped: 5 answers." in words and "15 questions of the first alone" in words
