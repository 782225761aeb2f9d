"""Evaluations side by side: pairs, intervals, what is left out, what is refused."""

import json
from pathlib import Path

import pytest
from run_folders import HOSTILE, Page, lines, row, training
from typer.testing import CliRunner

import cli
from config.errors import UserError
from report import compare
from report.compare import side_by_side
from report.folder import Run
from report.summary import interval, summarise, write_summary


def run(name, rows, unit="sections", metric="sub_em", **settings):
    about = {"unit": unit, "metric": metric}
    return Run(Path(name), about, rows, config=json.dumps({"eval": settings}), title=name)


def asked(right, ids=range(20), **other):
    """Rows, of which the first `right` are answered rightly."""
    other |= {"settings": str(other)}
    return [row(id=f"q{k}", reward=float(place < right), **other) for place, k in enumerate(ids)]


def folder(path, rows, unit="sections", config=""):
    path.mkdir(parents=True)
    write_summary(path / "summary.json", summarise(rows, unit))
    (path / "rows.jsonl").write_text(lines(rows))
    if config:
        (path / "config.yaml").write_text(config)
    return path


def invoke(*words):
    return CliRunner().invoke(cli.app, ["report", *map(str, words)])


def test_a_known_difference_with_its_interval():
    summary = side_by_side([run("a", asked(18)), run("b", asked(4))])
    (pair,) = summary["paired"]
    assert (pair["a"], pair["b"], pair["n"]) == ("a: trained", "b: trained", 20)
    assert pair["mean"] == pytest.approx(14 / 20)
    values = [float(4 <= k < 18) for k in range(20)]
    assert (pair["low"], pair["high"]) == interval(values, least=-1)
    assert 0.4 < pair["low"] < pair["mean"] < pair["high"] < 0.95
    means = {cell["agent"]: cell["mean"] for cell in summary["cells"]}
    assert means == {"a: trained": 0.9, "b: trained": 0.2}
    assert compare.remarks(summary) == []


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
    (18, 4, "a: trained is better: a: trained minus b: trained is +70.0 points"),
    (4, 18, "b: trained is better: a: trained minus b: trained is -70.0 points"),
    (9, 10, "Which is better is not shown"),
])  # fmt: skip
def test_a_sentence_says_which_is_better_or_that_it_is_not_shown(first, second, said):
    """Over all cells that both have: a third of the questions at another length differs not."""
    rows = [asked(n) + asked(n, length=64) for n in (first, second)]
    rows[0] += asked(20, temperature="0.0")  # which the second was not asked
    rows[1] += asked(20, length=256)
    (sentence,) = compare.verdicts(side_by_side([run("a", rows[0]), run("b", rows[1])]))
    assert sentence.startswith(said) and "n 40" in sentence


def test_trainings_are_compared_by_their_last_steps(tmp_path):
    a, b = training(tmp_path / "a", steps=30), training(tmp_path / "b", steps=12)
    done = invoke(a, b)
    words = " ".join(done.output.split())
    assert done.exit_code == 0 and "a is better: a minus b is +" in words
    assert "reward, the last 10 steps, 95 % interval" in words and "b: Stopped: step 12" in words
    page = Page((tmp_path / "compare-a-b.html").read_text())
    assert page.tags.count("svg") == 1 and "a is better" in page.text
    runs = [compare.read_named(path, path.name) for path in (a, b)]
    summary = compare.trainings_side_by_side(runs) | {"measure": "loss"}
    assert compare.verdicts(summary)[0].startswith("b is better")  # of losses
    assert invoke(a, folder(tmp_path / "c", asked(3))).exit_code == 2


def test_what_one_alone_was_asked_is_counted_and_left_out():
    second = asked(5, range(10, 40)) + asked(3, range(3), length=64)
    second[0] |= {"task": "another document"}  # question 10
    summary = side_by_side([run("a", asked(20)), run("b", second)])
    (pair,) = summary["paired"]
    assert pair["n"] == 9  # questions 11 to 19
    assert pair["mean"] == pytest.approx(1 - 4 / 9)
    assert summary["left_out"] == [
        {"a": "a: trained", "b": "b: trained", "only_a": 11, "only_b": 24}
    ]
    (sentence,) = compare.remarks(summary)
    assert "11 questions of the first alone and 24 of the second alone" in sentence
    greedy = asked(3, temperature="0.0")
    (left,) = side_by_side([run("a", asked(20) + greedy), run("b", asked(20))])["left_out"]
    assert (left["only_a"], left["only_b"]) == (20, 0)


@pytest.mark.parametrize(("other", "field"), [
    (run("b", asked(1, sub_em=None), metric="reward"), "sub_em"),
    (run("b", asked(1), unit="tokens"), "unit"),
    (run("b", asked(1), suite="ruler"), "suite"),
    (run("b", asked(1, range(50, 60))), "question.*--split test --seed 1000000"),
    (run("b", asked(1, temperature="0.0")), "temperature"),
])  # fmt: skip
def test_unlike_evaluations_are_refused(other, field):
    with pytest.raises(UserError, match=field):
        side_by_side([run("a", asked(3), suite=""), other])


def test_what_was_measured_otherwise_is_compared_by_what_both_have():
    """As a demo, whose folder has the settings of a training, beside an evaluation."""
    demo = run("demo", asked(20, sub_em=0.5), metric="reward")
    demo.config = json.dumps({"run": {"seed": 0}})
    summary = side_by_side([demo, run("b", asked(5), suite="", data=["world"])])
    assert summary["metric"] == "sub_em" and summary["paired"][0]["mean"] == 0.5 - 5 / 20
    assert compare.remarks(summary) == [
        "Measured are demo by reward, b by sub_em; here all of them by sub_em."
    ]
    same = run("c", asked(5), suite="world"), run("d", asked(5), suite="", data=["world"])
    assert "suite" not in " ".join(compare.remarks(side_by_side(same)))


def test_the_command_prints_and_writes_a_page(tmp_path):
    a = folder(tmp_path / "x" / "run", asked(18) + asked(17, length=64), config="eval: {suite: ''}")
    b = folder(tmp_path / "y" / "run", asked(4) + asked(4, length=64), config="run: {seed: 0}")
    c = folder(tmp_path / "x" / "c", asked(3, range(15)))
    done = invoke(a, c)
    assert done.exit_code == 0, done.output
    assert "run: trained − c: trained" in done.output
    words = " ".join(done.output.split())
    assert (
        "+80.0 (+57 … +100, n 15) one_fact, 4 sections, temperature 1.0" in words
        and "25 questions of the first alone" in words
    )
    page = Page((tmp_path / "x" / "compare-run-c.html").read_text())
    assert "run: trained minus c: trained" in page.text and "+80.0" in page.text
    assert "25 questions of the first alone" in page.text and page.tags.count("svg") == 1
    out = tmp_path / "page.html"
    assert invoke(a, b, "--out", out).exit_code == 0  # two of one name are called by their paths
    assert f"{a}: trained minus {b}: trained" in Page(out.read_text()).text
    assert [path.name for path in tmp_path.glob("*/*.html")] == ["compare-run-c.html"]


def test_settings_that_differ_are_said():
    first, second = (run(x, asked(3), model=x, seed=0, runs=x) for x in ("m", ""))
    second.title = "n"
    assert compare.remarks(side_by_side([first, second])) == ["model: m m, n the default."]


def test_markup_in_names_is_shown_as_text(tmp_path):
    name = HOSTILE.replace("\ud83d", "").replace("\0", "")
    rows = asked(3, agent=name, question=name)
    a, b = folder(tmp_path / "[bold]<b>a", rows), folder(tmp_path / "b", rows[1:])
    done = invoke(a, b, "--out", tmp_path / "page.html")
    assert done.exit_code == 0 and "\x1b" not in done.output and "[bold]<b>a" in done.output
    assert "<script>alert(" in Page((tmp_path / "page.html").read_text()).text


def test_mistakes_are_one_sentence(tmp_path):
    a, b, trained, torn = (folder(tmp_path / name, asked(3)) for name in ("a", "b", "c", "torn"))
    (trained / "rows.jsonl").unlink()
    (torn / "summary.json").write_text("{")
    for words in (
        [a, a], [a, "--out", tmp_path / "x.html"], [a, tmp_path / "none"], [a, torn], [a, trained],
        [a, b, "--out", tmp_path / "no" / "x.html"],
    ):  # fmt: skip
        done = invoke(*words)
        assert done.exit_code == 2 and "Traceback" not in done.output, done.output


def test_an_evaluation_that_is_partly_there_is_compared_and_that_is_said(tmp_path):
    rows, config = asked(3), "eval: {suite: ruler-hqa, agents: [trained]}"
    a = folder(tmp_path / "a", rows, "documents", config=config)
    b = folder(tmp_path / "b", rows[:5], config=config)
    (b / "summary.json").unlink()
    done = invoke(a, b)
    words = " ".join(done.output.split())
    assert done.exit_code == 0 and "b: Stopped: 5 answers." in words
    assert "15 questions of the first alone" in words


def test_settings_that_are_not_the_usual_ones_stand_in_the_tables_and_change_no_pair(tmp_path):
    command = "eval --data world --agents bm25 --lengths 4 --kinds one_fact --n 2 --temperatures 0"
    for name, more in (("two", ["--top-k", "2"]), ("usual", [])):
        done = CliRunner().invoke(
            cli.app, [*command.split(), *more, "--runs", str(tmp_path), "--name", name]
        )
        assert done.exit_code == 0 and ("bm25 (top_k 2)" in done.output) == (name == "two")
    assert "bm25 (top_k 2)" in (tmp_path / "two" / "report.html").read_text()
    output = invoke(tmp_path / "two", tmp_path / "usual").output
    assert "two: bm25 (top_k 2)" in output and "two: bm25 − usual: bm25" in output
