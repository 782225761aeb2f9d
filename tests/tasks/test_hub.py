"""Data sets of the hub: folders as they lie there, and a hub on the loopback address."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import asked_of
from test_passages import squad as squad_tree
from test_readers import array, hotpot, lines, parquet, same
from typer.testing import CliRunner

import cli
import suites
from commands import train
from config.errors import UserError
from config.options import EvalConfig, RunConfig
from tasks import hub, readers

ROOT = Path(__file__).parents[2]
COMMIT = "c" * 40
REPO = "someone/things"

# ---------------------------------------------------------------- records as the hub has them


def squad(i: int) -> dict:
    return {
        "id": f"s{i}",
        "title": f"Town_{i // 2}",
        "context": f"Queen {i} rules Town {i // 2} since 1994-05-01.",
        "question": f"Who rules town {i}?",
        "answers": {"text": [f"Queen {i}", f"Queen {i}"], "answer_start": [0, 0]},
    }


def columns(i: int, sentences: str = "sentences", **other) -> dict:
    """HotpotQA's columns; 2WikiMultiHopQA's have `content` for `sentences`, and triples."""
    context = {"title": [f"T{i}", f"L{i}"], sentences: [[f"T{i} is.", " Old."], [f"L{i} is."]]}
    facts = {"title": [f"L{i}", f"T{i}", f"L{i}"], "sent_id": [0, 0, 1]}
    labels = {"question": f"Who rules {i}?", "answer": f"Queen {i}", "type": "bridge"}
    return labels | {"context": context, "supporting_facts": facts} | other


def musique(i: int) -> dict:
    return {
        "id": f"2hop__{i}",
        "question": f"When was {i}?",
        "answer": "1994-05-01",
        "answer_aliases": ["May 1994"] if i else [],
        "answerable": True,
        "paragraphs": [
            {"idx": k, "title": f"P{k}", "paragraph_text": f"Text {k} of {i}.",
             "is_supporting": k < 2} for k in range(3)
        ],
        "question_decomposition": [
            {"id": k, "question": "?", "answer": "x", "paragraph_support_idx": 1 - k}
            for k in range(2)
        ],
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Make a folder, and return what names a file's split in it."""

    def make(name: str, write, records) -> str:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, records)
        return f"hf:{tmp_path / 'set'}"

    return make


# ---------------------------------------------------------------- forms


def test_squad(folder):
    records = [squad(i) for i in range(6)]
    folder("data/train-00000-of-00002.parquet", parquet, records[:4])
    folder("data/train-00001-of-00002.parquet", parquet, records[4:])
    place = folder("data/validation-00000-of-00001.parquet", parquet, records[:1])
    tasks = readers.read(f"{place}:train")
    assert [task.id for task in tasks] == [f"s{i}" for i in range(6)]
    assert tasks[3].answers == ("Queen 3",) and tasks[3].dataset == "squad"
    assert tasks[3].document == "Document 1:\nTown_1\nQueen 3 rules Town 1 since 1994-05-01."
    assert tasks[3].gold == (0,) and len({id(task.pool) for task in tasks}) == 1
    assert [task.id for task in readers.read(f"{place}:train", n=5)] == [f"s{i}" for i in range(5)]
    assert [task.id for task in readers.read(f"{place}:validation")] == ["s0"]


def test_hotpotqa(folder):
    records = [columns(i, id=f"h{i}", level="hard") for i in range(3)]
    (task, *_) = tasks = readers.read(folder("validation-00000.parquet", parquet, records))
    assert [t.id for t in tasks] == ["h0", "h1", "h2"] and task.gold == (1, 0)
    assert (task.dataset, task.kind, task.level) == ("hotpotqa", "bridge", "hard")
    assert task.document == "Document 1:\nT0\nT0 is. Old.\n\nDocument 2:\nL0\nL0 is."


def test_2wikimultihopqa(folder):
    evidences = {"fact": ["a"], "relation": ["b"], "entity": ["c"]}
    records = [columns(i, "content", _id=f"w{i}", evidences=evidences) for i in range(2)]
    (task, _) = readers.read(folder("data/train-00000.parquet", parquet, records))
    assert (task.id, task.dataset, task.gold) == ("w0", "2wikimultihopqa", (1, 0))
    assert "T0 is.  Old." in task.document  # its sentences have no blank of their own


def test_pairs_of_the_official_json_stay_pairs(folder, tmp_path):
    """`datasets` would make texts of [title, [sentences]]."""
    records = [hotpot(i) for i in range(3)]
    tasks = readers.read(folder("dev.json", array, records))
    assert same(tasks, readers.read(array(tmp_path / "x.json", records)))
    assert tasks[0].dataset == "hotpotqa" and tasks[0].gold


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_musique_and_answers_that_are_dates(folder, name):
    """`datasets` would make a datetime of the answer."""
    tasks = readers.read(folder(name, lines, [musique(i) for i in range(2)]))
    assert [task.answers for task in tasks] == [("1994-05-01",), ("1994-05-01", "May 1994")]
    assert [(task.kind, task.gold) for task in tasks] == [("2hop", (1, 0))] * 2


def test_squads_tree(folder, tmp_path):
    place = folder("train.json", lambda path, _: squad_tree(path), None)
    assert same(readers.read(place), readers.read(tmp_path / "set" / "train.json"))


def test_passages_among_passages_of_the_hub(folder):
    place = folder("validation-0.parquet", parquet, [squad(i) for i in range(10)])
    place = f"{place}:validation"
    (column,) = asked_of(suite="passages", data=(place,), lengths=(4,), n=4)[1]
    assert [task.n_documents for task in column.make()] == [4] * 4


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
    assert str(Path(text)) == text or text.startswith("hf:./")


def refused(place: str) -> str:
    with pytest.raises(UserError) as error:
        readers.read(place)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    return str(error.value)


def test_what_cannot_be_read_is_refused_in_a_sentence(folder, tmp_path):
    assert "named by hf:ORG/NAME" in refused("hf:a b") and "named by" in refused("hf:")
    assert "there is no folder" in refused(f"hf:{tmp_path / 'none'}:train")
    folder("train.jsonl", lines, [musique(0)])
    place = folder("test.jsonl", lines, [musique(0), "{"])
    assert f"The splits are train, test: name one of them, such as {place}:train" in refused(place)
    assert "The splits are train, test" in refused(f"{place}:dev")
    wrong = refused(f"{place}:test")
    assert wrong.startswith(f"{place}/test.jsonl, line 2:") and "not JSON" in wrong
    other = tmp_path / "csv"
    other.mkdir()
    (other / "train.csv").write_text("question,answer\na,b\n")
    assert "only parquet, JSON lines and JSON" in refused(f"hf:{other}")


def test_a_card_may_name_files_but_none_of_elsewhere(folder, tmp_path):
    lines(tmp_path / "other.jsonl", [musique(0)])
    place = folder("first.jsonl", lines, [musique(1)])
    card = "---\nconfigs:\n- config_name: c\n  data_files:\n  - split: mine\n    path: {}\n---\n"
    (tmp_path / "set" / "README.md").write_text(card.format("first.jsonl"))
    assert [task.id for task in readers.read(f"{place}:mine")] == ["2hop__1"]
    (tmp_path / "set" / "README.md").write_text(card.format("../other.jsonl"))
    assert "which is not a part of it" in refused(place)


def test_links_are_followed(folder, tmp_path):
    """As in the hub's own cache, whose snapshots are links."""
    place = folder("blobs.txt", lines, [musique(0)])
    (tmp_path / "set" / "blobs.txt").rename(tmp_path / "blob")
    (tmp_path / "set" / "train.jsonl").symlink_to(tmp_path / "blob")
    (tmp_path / "link").symlink_to(tmp_path / "set")
    for name in (place, f"hf:{tmp_path / 'link'}:train"):
        assert [task.id for task in readers.read(name)] == ["2hop__0"]


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
            return Stream("\n".join(json.dumps(musique(i)) for i in range(99)).encode())

    monkeypatch.setattr("huggingface_hub.HfFileSystem", System)
    file = hub.DataFile(Path("hf:a/b/x.jsonl"), "hf://datasets/a/b/x.jsonl")
    monkeypatch.setattr(hub, "data_files", lambda path: [file])
    assert "hf:a/b/x.jsonl cannot be read further" in refused("hf:a/b")


@pytest.mark.parametrize("place", ["hf:a/b:train", f"hf:a/b@{COMMIT}:train"])
def test_no_hub_is_one_sentence(place):
    """conftest.py keeps tests off the network, as HF_HUB_OFFLINE=1 does a user."""
    assert refused(place) == (
        f"{place} cannot be read while HF_HUB_OFFLINE is set: "
        "unset it, or give a file or a folder instead."
    )


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
    said = []
    pinned = hub.pin("hf:a/b/c:dev", said.append)
    assert pinned == f"hf:a/b/c@{COMMIT}:dev" and commits == [("a/b", "main")]
    assert said == [f"hf:a/b/c:dev is read at its present commit: {pinned}"]
    assert hub.pin("hf:a/b@v2") == f"hf:a/b@{COMMIT}" and commits[1:] == [("a/b", "v2")]
    for fixed in (pinned, "x.json", "world", f"hf:{tmp_path}:train", "own.py:tasks"):
        assert hub.pin(fixed, said.append) == fixed
    assert len(commits) == 2 and len(said) == 1
    run = RunConfig(data="hf:a/b:train", validation="x.json")
    assert (
        hub.pinned(run).data == f"hf:a/b@{COMMIT}:train" and hub.pinned(run).validation == "x.json"
    )
    mixed = RunConfig(data="x.json=2,hf:a/b:train=0.5,hf:c/d")
    assert hub.pinned(mixed).data == f"x.json=2,hf:a/b@{COMMIT}:train=0.5,hf:c/d@{COMMIT}"
    assert hub.pinned(RunConfig(data="a,b=1.json")).data == "a,b=1.json"
    config = EvalConfig(suite="ruler", data=("q.json", "hf:a/b"))
    assert hub.pinned(config).data == ("q.json", f"hf:a/b@{COMMIT}")
    suite = suites.pinned(suites.make("ruler", {"squad": "hf:s:dev"}), print)
    assert suite.squad == f"hf:s@{COMMIT}:dev"


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


class Hub(BaseHTTPRequestHandler):
    """Serve what `datasets` and huggingface_hub ask for, and note the ranges of files."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}
    ranges: list[tuple[str, str]] = []

    def log_message(self, *_):
        pass

    def send(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        api, tree = f"/api/datasets/{REPO}/revision/", f"/api/datasets/{REPO}/tree/{COMMIT}"
        if path in (f"{api}main", f"{api}{COMMIT}"):
            siblings = [
                {"rfilename": p, "size": len(c), "blobId": "0"} for p, c in self.files.items()
            ]
            return self.json({"id": REPO, "sha": COMMIT, "siblings": siblings})
        if path.startswith(tree):
            return self.listing(path.removeprefix(tree).strip("/"))
        start, _, name = path.partition(f"/resolve/{COMMIT}/")
        if start != f"/datasets/{REPO}" or name not in self.files:
            return self.send(404, X_Error_Code="EntryNotFound" if name else "RepoNotFound")
        content, wanted = self.files[name], self.headers.get("Range", "bytes=0-")
        self.ranges.append((name, wanted))
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        first, last = int(first), min(int(last or 1e9), len(content) - 1)
        span = f"bytes {first}-{last}/{len(content)}"
        return self.send(206, content[first : last + 1], Content_Range=span, ETag='"x"')

    def listing(self, folder: str) -> None:
        inside = [path for path in self.files if not folder or path.startswith(f"{folder}/")]
        entries = [
            {"type": "file", "path": p, "size": len(self.files[p]),
             "oid": hashlib.sha1(self.files[p]).hexdigest()} for p in inside
        ]  # fmt: skip
        if folder:
            return self.json(entries)
        names = {path.partition("/")[0] for path in inside if "/" in path}
        folders = [{"type": "directory", "path": n, "oid": "0" * 40, "size": 0} for n in names]
        return self.json([*folders, *(entry for entry in entries if "/" not in entry["path"])])

    def json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), Content_Type="application/json")


@contextmanager
def serving(files: dict[str, bytes]):
    handler = type("Served", (Hub,), {"files": files, "ranges": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.ranges
    finally:
        server.shutdown()
        server.server_close()


def command(endpoint: str, home: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run a command with that hub; huggingface_hub reads the environment once, when imported."""
    left_out = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "COLUMNS": "200"}
    words = [sys.executable, str(ROOT / "cli.py"), *arguments]
    home.mkdir(exist_ok=True)
    return subprocess.run(words, env=environment, capture_output=True, text=True, cwd=home)


def test_a_split_is_streamed_at_one_commit(tmp_path):
    def as_parquet(records):
        pq.write_table(pa.Table.from_pylist(records), sink := io.BytesIO())
        return sink.getvalue()

    records = [squad(i) for i in range(8)]
    files = {
        "data/train-00000-of-00002.parquet": as_parquet(records[:5]),
        "data/train-00001-of-00002.parquet": as_parquet(records[5:]),
        "data/test-00000-of-00001.parquet": as_parquet(records[:1]),
    }
    out = tmp_path / "out.json"
    with serving(files) as (endpoint, ranges):
        done = command(
            endpoint, tmp_path, "data", "convert", f"hf:{REPO}:train", str(out), "--to", "eval"
        )
        assert done.returncode == 0, done.stderr
        assert f"present commit: hf:{REPO}@{COMMIT}:train\n" in done.stdout
        assert [task.id for task in readers.read(out)] == [f"s{i}" for i in range(8)]
        assert {name for name, _ in ranges} == {name for name in files if "train" in name}
        # No file is kept, and none is loaded twice: here one range is a whole file
        kept = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert out in kept and not any(path.read_bytes()[:4] == b"PAR1" for path in kept)
        assert len(ranges) == 2
        fixed = command(endpoint, tmp_path, "data", "look", f"hf:{REPO}@{COMMIT}:test")
        assert fixed.returncode == 0 and "1 tasks: 1 squad" in fixed.stdout
        assert "present commit" not in fixed.stdout
        missing = command(endpoint, tmp_path, "data", "look", "hf:someone/else:test")
        assert missing.returncode == 2 and "Traceback" not in missing.stderr
        assert "there is no someone/else" in missing.stderr
    for place in (f"hf:{REPO}:train", f"hf:{REPO}@{COMMIT}:train"):  # the hub has gone
        gone = command(endpoint, tmp_path / "new", "data", "look", place)
        assert gone.returncode == 2 and "Traceback" not in gone.stderr
        assert "cannot be read" in gone.stderr and gone.stderr.count("\n") == 1
