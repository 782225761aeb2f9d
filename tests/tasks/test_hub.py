"""Data sets of the hub: folders as they lie there, and a hub on the loopback address."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import asked_of
from test_downloads import REPO, Hub, serve
from test_passages import squad as squad_tree
from test_readers import FLASHRAG, HUB, MUSIQUE, SQUAD, array, hotpot, lines, parquet, same
from typer.testing import CliRunner

import cli
import suites
from commands import train
from config.errors import UserError
from config.options import EvalConfig, RunConfig
from tasks import hub, readers

ROOT = Path(__file__).parents[2]
COMMIT = "c" * 40


def squad(i: int) -> dict:
    context = f"Queen {i} rules Town {i // 2} since 1994-05-01."
    answers = {"text": [f"Queen {i}"] * 2, "answer_start": [0, 0]}
    return SQUAD | {"id": f"s{i}", "title": f"Town_{i}", "context": context, "answers": answers}


@pytest.fixture
def folder(tmp_path):
    """Make a folder, and return what names it."""

    def make(name: str, write, records) -> str:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, records)
        return f"hf:{tmp_path / 'set'}"

    return make


# ---------------------------------------------------------------- forms


def test_files_of_a_split_are_read_one_after_the_other(folder):
    records = [squad(i) for i in range(10)]
    folder("data/train-00000-of-00002.parquet", parquet, records[:4])
    folder("data/train-00001-of-00002.parquet", parquet, records[4:])
    place = folder("data/validation-00000-of-00001.parquet", parquet, records[:1])
    tasks = readers.read(f"{place}:train")
    assert [task.id for task in tasks] == [f"s{i}" for i in range(10)]
    assert tasks[3].document == "Document 1:\nTown_3\nQueen 3 rules Town 1 since 1994-05-01."
    assert tasks[3].answers == ("Queen 3",) and len({id(task.pool) for task in tasks}) == 1
    assert [task.id for task in readers.read(f"{place}:train", n=5)] == [f"s{i}" for i in range(5)]
    assert [task.id for task in readers.read(f"{place}:validation")] == ["s0"]
    (column,) = asked_of(suite="passages", data=(f"{place}:train",), lengths=(4,), n=4)[1]
    assert [task.n_documents for task in column.make()] == [4] * 4


# `datasets` would make texts of [title, [sentences]], and a datetime of such an answer
@pytest.mark.parametrize(
    ("name", "write", "record"),
    [
        ("validation-00000.parquet", parquet, HUB),
        ("train.jsonl", lines, FLASHRAG),
        ("dev.json", array, hotpot(1)),
        ("train.jsonl", lines, MUSIQUE | {"answer": "1994-05-01"}),
        ("train.jsonl.gz", lines, MUSIQUE | {"answer": "1994-05-01"}),
        ("train.json", lambda path, _: squad_tree(path), None),
    ],
)
def test_a_file_is_read_in_its_folder_as_it_is_alone(folder, tmp_path, name, write, record):
    tasks = readers.read(folder(name, write, [record]))
    assert same(tasks, readers.read(tmp_path / "set" / name))


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf:a/b", ("a/b", "", "", "")),
        ("hf:squad:train", ("squad", "", "", "train")),
        ("hf:a/b/c:dev", ("a/b", "c", "", "dev")),
        (f"hf:a/b@{COMMIT}:dev", ("a/b", "", COMMIT, "dev")),
        ("hf:a/b/c@refs/pr/1:dev", ("a/b", "c", "refs/pr/1", "dev")),
        ("hf:./x/y/z:train", ("./x/y/z", "", "", "train")),
        ("hf:/x y@1", ("/x y@1", "", "", "")),
    ],
)
def test_names(text, parts):
    assert tuple(hub.Place.parse(text)) == parts and str(hub.Place.parse(text)) == text


def refused(place: str) -> str:
    with pytest.raises(UserError) as error:
        readers.read(place)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    return str(error.value)


def test_what_cannot_be_read_is_refused_in_a_sentence(folder, tmp_path):
    # conftest.py keeps tests off the network, as HF_HUB_OFFLINE=1 does a user
    for name in ("hf:a b", "hf:", f"hf:{tmp_path / 'none'}:train", "hf:a/b:train"):
        assert name in refused(name)
    folder("train.jsonl", lines, [MUSIQUE])
    place = folder("test.jsonl", lines, [MUSIQUE, "{"])
    for name in (place, f"{place}:dev"):
        assert f"train, test: name one of them, such as {place}:train" in refused(name)
    assert refused(f"{place}:test").startswith(f"{place}/test.jsonl, line 2:")
    other = tmp_path / "csv"
    other.mkdir()
    (other / "train.csv").write_text("question,answer\na,b\n")
    assert "train.csv" in refused(f"hf:{other}")


def test_a_card_may_name_files_but_none_of_elsewhere(folder, tmp_path):
    lines(tmp_path / "other.jsonl", [MUSIQUE])
    place = folder("first.jsonl", lines, [MUSIQUE])
    card = "---\nconfigs:\n- config_name: c\n  data_files:\n  - split: mine\n    path: {}\n---\n"
    (tmp_path / "set" / "README.md").write_text(card.format("first.jsonl"))
    assert len(readers.read(f"{place}:mine")) == 1
    (tmp_path / "set" / "README.md").write_text(card.format("../other.jsonl"))
    assert "other.jsonl" in refused(place)


def test_links_are_followed(folder, tmp_path):
    """As in the hub's own cache, whose snapshots are links."""
    place = folder("blobs.txt", lines, [MUSIQUE])
    (tmp_path / "set" / "blobs.txt").rename(tmp_path / "blob")
    (tmp_path / "set" / "train.jsonl").symlink_to(tmp_path / "blob")
    (tmp_path / "link").symlink_to(tmp_path / "set")
    for name in (place, f"hf:{tmp_path / 'link'}:train"):
        assert len(readers.read(name)) == 1


def test_a_hub_that_stops_answering_is_one_sentence(monkeypatch):
    import httpx

    class Stream(io.BytesIO):
        def read(self, n=-1):
            if self.tell() >= 5000:
                raise httpx.ReadTimeout("timed out")
            return super().read(min(n, 5000) if n >= 0 else 5000)

    class System:
        def __init__(self, token):
            pass

        def open(self, url, mode):
            records = (json.dumps(MUSIQUE | {"id": f"{i}"}) for i in range(99))
            return Stream("\n".join(records).encode())

    monkeypatch.setattr("huggingface_hub.HfFileSystem", System)
    file = hub.DataFile(Path("hf:a/b/x.jsonl"), "hf://datasets/a/b/x.jsonl")
    monkeypatch.setattr(hub, "data_files", lambda path: [file])
    assert "hf:a/b/x.jsonl" in refused("hf:a/b")


# ---------------------------------------------------------------- the commit


@pytest.fixture
def commits(monkeypatch):
    """Answer every question for a commit; return what was asked for."""
    from huggingface_hub import constants

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "commit_of", lambda *named: asked.append(named) or COMMIT)
    return asked


def test_names_are_pinned_and_all_else_is_left_alone(commits, tmp_path):
    said, at = [], f"@{COMMIT}"
    pinned = hub.pin("hf:a/b/c:dev", said.append)
    assert pinned == f"hf:a/b/c{at}:dev" and commits == [("a/b", "main")]
    assert "hf:a/b/c:dev" in said[0] and pinned in said[0]
    assert hub.pin("hf:a/b@v2") == f"hf:a/b{at}" and commits[1:] == [("a/b", "v2")]
    for fixed in (pinned, "x.json", "world", f"hf:{tmp_path}:train", "own.py:tasks"):
        assert hub.pin(fixed, said.append) == fixed
    assert len(commits) == 2 and len(said) == 1
    for data, found in (
        ("hf:a/b:train", f"hf:a/b{at}:train"),
        ("x.json=2,hf:a/b:train=0.5,hf:c/d", f"x.json=2,hf:a/b{at}:train=0.5,hf:c/d{at}"),
        ("a,b=1.json", "a,b=1.json"),
    ):
        run = hub.pinned(RunConfig(data=data, validation="x.json"))
        assert (run.data, run.validation) == (found, "x.json")
    config = hub.pinned(EvalConfig(suite="ruler", data=("q.json", "hf:a/b")))
    assert config.data == ("q.json", f"hf:a/b{at}")
    suite = suites.pinned(suites.make("ruler", {"squad": "hf:s:dev"}), print)
    assert suite.squad == f"hf:s{at}:dev"


def test_train_and_eval_are_given_the_commit(commits, monkeypatch):
    """And so write it into the settings of the run, config.yaml."""
    import eval

    given = []
    monkeypatch.setattr(train, "train", lambda run, *rest, **more: given.append(run.data) or Path())
    monkeypatch.setattr("report.runlog.summary", lambda folder: {})
    monkeypatch.setattr("report.summary.write_summary", lambda path, summary: None)
    monkeypatch.setattr("report.page.write_report", lambda *_: None)
    monkeypatch.setattr(
        eval, "run_suite", lambda config, *_: given.extend(config.data) or Path("x")
    )
    for command in ("train", "sft", "eval"):
        done = CliRunner().invoke(cli.app, [command, "--data", "hf:a/b:train"])
        assert done.exit_code == 0, done.output
        assert f"hf:a/b@{COMMIT}:train" in done.output.replace("\n", "")
    assert given == [f"hf:a/b@{COMMIT}:train"] * 3


# ---------------------------------------------------------------- a hub


COMMANDS = """
import json, sys
from typer.testing import CliRunner
import cli
for line in sys.stdin:
    done = CliRunner().invoke(cli.app, json.loads(line))
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""


@contextmanager
def commands(endpoint: str, home: Path):
    """Yield what runs commands with that hub, in a process of its own: huggingface_hub reads the
    environment once, when imported."""
    left_out = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "COLUMNS": "200"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    words = [sys.executable, "-c", COMMANDS]
    environment["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(words, env=environment, cwd=home, **pipes) as process:

        def run(*arguments: str) -> list:
            print(json.dumps(arguments), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


def test_a_split_is_streamed_at_one_commit(tmp_path):
    records = [squad(i) for i in range(8)]
    files = {"train-00000-of-00002": records[:5], "train-00001-of-00002": records[5:],
             "test-00000-of-00001": records[:1]}  # fmt: skip
    files = {
        f"data/{name}.parquet": parquet(tmp_path / "x.parquet", part).read_bytes()
        for name, part in files.items()
    }
    (tmp_path / "x.parquet").unlink()
    served = Hub(files, COMMIT)
    with serve(served) as endpoint, commands(endpoint, tmp_path) as run:
        code, output, errors = run("data", "look", f"hf:{REPO}:train", "--n", "9")
        assert code == 0, errors
        assert f"hf:{REPO}@{COMMIT}:train\n" in output
        assert re.findall(r"─ (\w+) ─", output) == [f"s{i}" for i in range(8)]
        loaded = [p for p, headers in served.requests if "range" in headers and "resolve" in p]
        # No file is kept, and none is loaded twice: here one range is a whole file
        assert sorted(path.rpartition("/")[2] for path in loaded) == [
            "train-00000-of-00002.parquet", "train-00001-of-00002.parquet",
        ]  # fmt: skip
        kept = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not any(path.read_bytes()[:4] == b"PAR1" for path in kept)
        missing = run("data", "look", "hf:someone/else:test")
        served.answer = lambda h: setattr(h, "close_connection", True)  # the hub has gone
        gone = run("data", "look", f"hf:{REPO}@{'d' * 40}:train")
    for (code, _, errors), name in ((missing, "someone/else"), (gone, REPO)):
        assert code == 2 and name in errors and "Traceback" not in errors
