"""Runs, exports, adapters, evaluations, banks and stores of the tag `with-upstream` are read."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_store import read_store
from typer.testing import CliRunner

import cli
from config import files
from config.errors import UserError
from config.gone import GONE, TAG, is_gone

MADE = Path(__file__).with_name("made.tar.xz")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(MADE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def before(unpacked, tmp_path, monkeypatch):
    """A copy of the folders, which is the present folder."""
    monkeypatch.chdir(shutil.copytree(unpacked, tmp_path / "before"))


def run(words: str) -> str:
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0, f"{words}: {done.output} {done.exception!r}"
    return done.output


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_run_goes_on_from_its_checkpoint(before, name):
    steps = len(Path("runs", name, "metrics.csv").read_text().splitlines()) - 1
    run(f"train --resume --name {name} --steps {steps + 1}")
    assert len(Path("runs", name, "metrics.csv").read_text().splitlines()) - 1 == steps + 1


def test_settings_are_taken_over(before):
    run("train --config runs/full/config.yaml --name again --dry-run")
    old, new = (files.read_yaml(f"runs/{name}/config.yaml") for name in ("full", "full"))
    assert old == new


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_checkpoint_is_exported_as_before(before, name):
    run(f"export runs/{name} --out anew")
    old, new = (load_file(f"{at}/model.safetensors") for at in (f"runs/{name}/model", "anew"))
    assert old.keys() == new.keys() and all((old[key] == new[key]).all() for key in old)


@pytest.mark.parametrize("model", ["exported", "runs/lora/adapter", "runs/lora/model"])
def test_models_and_adapters_answer(before, model):
    run(f"eval --name asked --model {model} --agents memagent --n 1 --lengths 2 --temperatures 0")
    (row, *_) = rows("runs/asked/rows.jsonl")
    assert not row["error"]


def test_an_evaluation_is_continued(before):
    """Nothing is asked anew: what is new alone."""
    there = rows("runs/evaluated/rows.jsonl")
    run("eval --config runs/evaluated/config.yaml --name evaluated --n 3")
    now = rows("runs/evaluated/rows.jsonl")
    assert now[: len(there)] == there and 2 * len(now) == 3 * len(there)


def test_a_stream_is_continued_with_its_bank(before):
    there = rows("runs/streamed/memrl.jsonl")
    run("stream --name streamed --suite bandit --n 3 --epochs 2 --arms memrl")
    now = rows("runs/streamed/memrl.jsonl")
    assert now[: len(there)] == there and len(now) == 2 * len(there)


def test_a_bank_is_read_by_another_stream(before):
    run("stream --name frozen --suite bandit --n 3 --frozen runs/streamed/memrl.db")
    assert len(rows("runs/frozen/memrl.jsonl")) == 3


def test_a_store_is_read(before):
    store = read_store(Path("store.jsonl").read_text().splitlines())
    assert [entry.shown for entry in store.snapshot().entries] == [
        "2023-05-08 Ann: It rains.",
        "2023-05-09 It snows.",
    ]


@pytest.mark.parametrize("name", "full lora rememr1 memupdate evaluated stores streamed".split())
def test_a_report_is_made_and_readings_are_shown(before, name):
    run(f"report runs/{name}")
    assert Path("runs", name, "report.html").stat().st_size > 5_000
    if name != "streamed":
        assert run(f"show runs/{name}")


@pytest.mark.parametrize(
    ("name", "section", "setting", "words"),
    [
        ("full", "grpo", "turn_reward_scale", "train --resume --name full --steps 2"),
        ("full", "run", "answerer", "export runs/full --out anew"),
        ("memupdate", "agent", "pay", "train --config runs/memupdate/config.yaml --name again"),
        ("evaluated", "eval", "part", "report runs/evaluated"),
        ("evaluated", "eval", "grammar", "eval --name evaluated --model runs/full/model --n 3"),
        ("streamed", "agent", "norm", "stream --name streamed --n 3 --epochs 2 --arms memrl"),
        ("evaluated", "eval", "transcripts", "eval --name evaluated --model runs/full/model --n 3"),
        (
            "streamed",
            "stream",
            "fixed_order",
            "stream --name streamed --n 3 --epochs 2 --arms memrl",
        ),
        ("streamed", "stream", "retries", "stream --name streamed --n 3 --epochs 2 --arms memrl"),
        ("streamed", "stream", "rules", "stream --name streamed --n 3 --epochs 2 --arms memrl"),
    ],
)
def test_another_value_is_refused_wherever_the_file_is_read(before, name, section, setting, words):
    path = Path("runs", name, "config.yaml")
    settings = files.read_yaml(path)
    settings[section][setting] = "other"
    files.dump(path, **settings)
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert setting in said and "other" in said and TAG in said


@pytest.mark.parametrize("name", GONE)
def test_what_went_is_passed_over_with_its_value_alone(name):
    for value in GONE[name]:
        assert is_gone(name, list(value) if isinstance(value, tuple) else value, "a.yaml: run")
    with pytest.raises(UserError) as error:
        is_gone(name, "something else", "a.yaml: run")
    assert all(part in str(error.value) for part in (name, "something else", TAG))
    with pytest.raises(UserError) as error:
        is_gone(name, "openai:http://me:secret@host/v1#m", "a.yaml: run")
    assert "secret" not in str(error.value)
    assert not is_gone("steps", 3, "a.yaml: run")
