"""A reader for documents: what is built, asked and trained, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from commands import learn as learning
from commands.stages import Stage, make
from config.errors import UserError
from config.options import LearnConfig

NAMES = "Aldous Bahrami Corelli Dragan Eriksen Fonseca Gruber Hakala Ibanez Jansson".split()


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """A folder of forty passages, each about a person and a year of its own."""
    monkeypatch.chdir(tmp_path)
    for k in range(40):
        name, year = f"{NAMES[k % 10]} {NAMES[k // 10]}son", 1500 + 7 * k
        text = (
            f"The mill of the valley number{k} was bought by {name} in {year} from its owner. "
            f"{name} had the wheel of number{k} replaced and planted a row of limes beside the "
            "road, which are old trees by now and stand under protection since the last war."
        )
        path = Path("docs", f"{k}.txt")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return "docs"


def learnt(monkeypatch, docs, *more):
    """Run the command with evaluations and trainings that leave what they would; return the
    command lines and what was said."""
    done = []

    def run(plan):
        for stage in plan:
            done.append(" ".join(stage.words))
            for path in stage.makes:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".json":
                    mean = 0.25 if "before" in stage.name else 0.5
                    cell = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": 8}
                    path.write_text(json.dumps({"cells": [cell]}))
                elif path.name == "model":
                    path.mkdir(exist_ok=True)

    monkeypatch.setattr(learning, "make", run)
    result = CliRunner().invoke(cli.app, ["learn", docs, "--name", "mine", *more])
    return done, result.output, result.exit_code


def test_what_is_held_out_is_asked_before_and_after_and_learnt_from_never(monkeypatch, docs):
    done, said, code = learnt(monkeypatch, docs)
    assert code == 0, said
    first = [words.split()[0] for words in done]
    assert first == ["data", "eval", "sft", "train", "eval"]
    train, test = (
        {json.loads(line)["text"] for line in Path("runs/mine", name).read_text().splitlines()}
        for name in ("train.jsonl", "test.jsonl")
    )
    assert train and test and not train & test and len(train | test) == 40
    assert "test.jsonl" in done[1] and "test.jsonl" in done[4] and "test.jsonl" not in done[0]
    assert (
        "25 (15-35)" in said and "50 (40-60)" in said and "minutes on two cores, by guess" in said
    )
    assert "No questions of people were asked" in said
    assert Path("runs/mine/model").is_dir() and "ask docs ..." in said


def test_questions_of_people_are_mixed_in_and_asked(monkeypatch, docs):
    done, said, code = learnt(monkeypatch, docs, "--questions", "squad.json", "--steps", "0")
    assert code == 0, said
    assert [words.split()[0] for words in done] == "data data eval eval sft eval eval".split()
    assert "passages_4.jsonl.gz=3" in done[4] and "cloze_4.jsonl.gz=3" in done[4]
    assert done[1].count("--source-split train") == done[3].count("--source-split test") == 1
    assert "No questions of people" not in said


def test_what_of_a_folder_is_not_read_is_said(monkeypatch, docs):
    Path("docs/7.txt").write_bytes(bytes(range(256)))
    _, said, code = learnt(monkeypatch, docs)
    assert code == 0 and "Left out of docs: 7.txt." in said


def test_a_folder_is_one_of_the_same_documents_and_settings(monkeypatch, docs):
    for _ in range(2):
        _, said, code = learnt(monkeypatch, docs)
        assert code == 0, said
    for change in (lambda: ("--n", "8"), lambda: Path("docs/0.txt").write_text("x" * 99) and ()):
        done, said, code = learnt(monkeypatch, docs, *change())
        assert code == 2 and not done
        assert "begun with other documents or settings: give another --name" in said


def test_too_little_text_is_said_before_anything_is_made(monkeypatch, docs):
    Path("docs/few").mkdir()
    Path("docs/few/a.txt").write_text(Path("docs/0.txt").read_text())
    done, said, code = learnt(monkeypatch, "docs/few")
    assert code == 2 and not done and "too few to learn from. Give more text." in said


def test_a_stage_is_made_once_and_one_that_fails_ends_the_call(tmp_path, monkeypatch):
    calls, codes = [], iter([0, 0, 3])
    monkeypatch.setattr("commands.stages.call", lambda words: calls.append(words) or next(codes))
    there, other = tmp_path / "a", tmp_path / "b"
    there.touch()
    make([Stage("one", ("x",), (there,)), Stage("two", ("y",), (other,))])
    assert calls == [["y"]]
    run = tmp_path / "run"
    run.mkdir()  # of a training that was stopped
    with pytest.raises(UserError, match="The stage four ended with exit code 3"):
        make([Stage("three", ("z",), (other,), run=run), Stage("four", ("w",), (other,))])
    assert calls[1:] == [["z", "--resume"], ["w"]]


def test_the_settings_are_those_of_the_reader():
    words = [" ".join(s.words) for s in learning.stages(LearnConfig(), Path("r"))]
    assert "--adapter r/warm/adapter" in words[3] and "smollm2-reader" in words[2]
    assert "--agents memagent" in words[1] and "--absent 0.15" in words[0]
