"""Data sets of the hub: their names, and splits that a hub on the loopback address streams."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_downloads import REPO, Hub, serve
from test_readers import MUSIQUE, SQUAD, parquet

import suites
from config.errors import UserError
from config.options import EvalConfig, RunConfig
from tasks import hub, readers

ROOT = Path(__file__).parents[2]
COMMIT = "c" * 40


@pytest.mark.parametrize(("text", "parts"), [
    ("hf:a/b", ("a/b", "", "", "")), ("hf:squad:train", ("squad", "", "", "train")),
    ("hf:a/b/c:dev", ("a/b", "c", "", "dev")),
    (f"hf:a/b@{COMMIT}:dev", ("a/b", "", COMMIT, "dev")),
    ("hf:a/b/c@refs/pr/1:dev", ("a/b", "c", "refs/pr/1", "dev")),
])  # fmt: skip
def test_names(text, parts):
    assert tuple(hub.Place.parse(text)) == parts and str(hub.Place.parse(text)) == text


def refused(place: str) -> str:
    with pytest.raises(UserError) as error:
        readers.read(place)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    return str(error.value)


def test_what_cannot_be_read_is_refused_in_a_sentence():
    # conftest.py keeps tests off the network, as HF_HUB_OFFLINE=1 does a user
    for name in ("hf:a b", "hf:", "hf:./folder:train", "hf:/tmp"):
        assert name in refused(name)
    assert "Offline" in refused("hf:a/b:train") and "a/b" in refused(f"hf:a/b@{COMMIT}")


@pytest.mark.parametrize(("splits", "place", "named"), [
    ({"train": ["data/a.jsonl"], "test": ["t.csv"]}, ":train", ["data/a.jsonl"]),
    ({"train": ["a.parquet", "b.json.gz"]}, "", ["a.parquet", "b.json.gz"]),
    ({"train": ["a.jsonl"], "test": ["t.jsonl"]}, "", "train, test: name one"),
    ({"train": ["a.jsonl"]}, ":dev", "splits are train"),
    ({"train": ["a.csv"]}, "", "a.csv"),
    ({"train": ["../../other@x/a.jsonl"]}, "", "other@x"),
    ({"train": ["https://else.where/a.jsonl"]}, "", "else.where"),
    ({"train": ["hf://datasets/someone/else@1/a.jsonl"]}, "", "someone/else"),
])  # fmt: skip
def test_files_of_a_split_are_those_of_the_data_set_alone(monkeypatch, splits, place, named):
    """A card may name any."""
    import datasets

    class Builder:
        class config:
            data_files = {
                split: [p if "://" in p else f"hf://datasets/a/b@{COMMIT}/{p}" for p in paths]
                for split, paths in splits.items()
            }

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: Builder)
    name = f"hf:a/b/c@{COMMIT}{place}"
    if isinstance(named, str):
        with pytest.raises(UserError, match=named):
            hub.data_files(name)
    else:
        root = f"hf:a/b@{COMMIT}"
        assert [str(file.path) for file in hub.data_files(name)] == [f"{root}/{n}" for n in named]


def test_a_hub_that_stops_answering_is_one_sentence(monkeypatch):
    import httpx

    class Stream(io.BytesIO):
        def readline(self, n=-1):
            if self.tell() >= 5000:
                raise httpx.ReadTimeout("timed out")
            return super().readline(n)

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


@pytest.fixture
def commits(monkeypatch):
    """Answer every question for a commit; return what was asked for."""
    asked = []
    monkeypatch.setattr(hub, "commit_of", lambda *named: asked.append(named) or COMMIT)
    return asked


def test_names_are_pinned_and_all_else_is_left_alone(commits):
    said, at = [], f"@{COMMIT}"
    pinned = hub.pin("hf:a/b/c:dev", said.append)
    assert pinned == f"hf:a/b/c{at}:dev" and commits == [("a/b", "main")]
    assert "hf:a/b/c:dev" in said[0] and pinned in said[0]
    assert hub.pin("hf:a/b@v2") == f"hf:a/b{at}" and commits[1:] == [("a/b", "v2")]
    for fixed in (pinned, "x.json", "world", "own.py:tasks"):
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
    suite = hub.pinned(suites.make("ruler", {"squad": "hf:s:dev"}))
    assert suite.squad == f"hf:s{at}:dev"


COMMAND = """
import sys
from config.errors import UserError
from tasks import readers
for place in sys.argv[1:]:
    try:
        print(*(task.id for task in readers.read(place)), flush=True)
    except UserError as error:
        print("refused:", error, flush=True)
"""


def test_a_split_is_streamed_at_one_commit(tmp_path):
    squad = [SQUAD | {"id": f"s{i}", "answers": {"text": ["Ada"], "answer_start": [0]}}
             for i in range(8)]  # fmt: skip
    files = {"train-00000-of-00002": squad[:5], "train-00001-of-00002": squad[5:],
             "test-00000-of-00001": squad[:1]}  # fmt: skip
    files = {
        f"data/{name}.parquet": parquet(tmp_path / "x.parquet", part).read_bytes()
        for name, part in files.items()
    }
    (tmp_path / "x.parquet").unlink()
    served = Hub(files, COMMIT)
    # huggingface_hub reads the environment once, when imported
    left_out = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    names = {key: value for key, value in os.environ.items() if key not in left_out}
    names |= {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with serve(served) as endpoint:
        names["HF_ENDPOINT"] = endpoint
        words = [sys.executable, "-c", COMMAND, f"hf:{REPO}:train", "hf:someone/else:test"]
        done = subprocess.run(words, env=names, cwd=tmp_path, capture_output=True, text=True)
    read, missing = done.stdout.splitlines()
    assert read == " ".join(f"s{i}" for i in range(8)), done.stderr
    assert missing.startswith("refused: ") and "someone/else" in missing
    loaded = [path for path, headers in served.requests if "range" in headers and COMMIT in path]
    # No file is kept, and none is loaded twice: here one range is a whole file
    assert sorted(path.rpartition("/")[2] for path in loaded) == [
        "train-00000-of-00002.parquet", "train-00001-of-00002.parquet",
    ]  # fmt: skip
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(path.read_bytes()[:4] == b"PAR1" for path in kept)
