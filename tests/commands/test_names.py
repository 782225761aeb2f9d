"""A run is named as it was made, by --name, or by its folder; what is neither is told."""

import json
from pathlib import Path

import pytest
from run_folders import record, row
from typer.testing import CliRunner

import cli
from config.errors import UserError
from config.files import found_run, run_path
from config.realmodels import check_model


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with two runs, one of which is called as a folder beside runs/ is."""
    monkeypatch.chdir(tmp_path)
    for name in ("twice", "models"):
        folder = Path("runs", name)
        (folder / "model").mkdir(parents=True)
        (folder / "config.yaml").write_text("eval: {suite: own}\n")
        (folder / "rows.jsonl").write_text(json.dumps(row()) + "\n")
        (folder / "metrics.csv").touch()
        (folder / "transcripts.jsonl").write_text(json.dumps(record()) + "\n")
    Path("models").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "show {}", "report {}", "report {} models", "report runs/models {}",
    ],
)  # fmt: skip
def test_a_run_is_taken_by_its_name_and_by_its_folder(here, words):
    outputs = []
    for name in ("twice", "runs/twice", here / "runs" / "twice"):
        done = CliRunner().invoke(cli.app, words.format(name).split())
        assert done.exit_code == 0, done.output
        outputs.append(done.stdout.replace(f"{here}/", "").replace("runs/twice", "twice"))
    assert len({*outputs}) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("show twise", "There is no twise, and no run of this name in runs. Did you mean"),
        ("report runs/twise", "Did you mean runs/twice?"),
        ("report twice twise", "Did you mean runs/twice?"),
        ("export twise", "Did you mean runs/twice?"),
        ("export twice", "runs/twice is no run with a checkpoint."),
        ("show nix", "There is no nix, and no run of this name in runs.\n"),
        ("eval --model twice", "twice is a run: give runs/twice/model"),
        ("train --resume --name runs/twise", "no run runs/twise to resume. Did you mean runs/twi"),
        ("train --name runs/twice", "The run runs/twice is there already"),
    ],
)
def test_what_is_no_run_is_told_with_the_nearest_one(here, words, told):
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 2 and told in done.output, done.output
    assert done.output.count("memagent: ") == 1


def test_a_name_is_a_run_before_it_is_a_folder_beside_runs(here):
    assert found_run(Path("models")) == Path("runs/models")
    assert found_run(Path("./models/")) == Path("runs/models")
    assert found_run(here / "models") == here / "models"
    assert run_path("runs", "runs/a/b") == run_path("runs", "a/b") == Path("runs/a/b")
    assert run_path("./runs", "runs/a") == Path("runs/a")
    check_model("org/twice")  # of the hub
    with pytest.raises(UserError, match=r"There is no x{300}.*no run"):
        found_run(Path("x" * 300))
