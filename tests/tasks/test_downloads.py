"""Downloads from a hub on the loopback address; nothing here leaves the machine."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

from config.errors import UserError
from tasks import downloads
from tasks.downloads import File, get

BIG = bytes(range(256)) * 2000  # 512 kB, stored as LFS
SMALL = b'{"question": "?"}\n'
OLD, NEW = "a" * 40, "b" * 40
REPO = "someone/things"


class Hub:
    """Serve the part of the hub's protocol in use: listings of commits, and files with ranges,
    behind a redirect or not."""

    def __init__(self):
        self.commits = {OLD: {"big.bin": BIG, "small.json": SMALL}}
        self.main = OLD
        self.served = {}  # path: other bytes than are listed
        self.requests: list[tuple[str, str, dict]] = []
        self.breaks: list[int] = []  # bytes after which each of the next answers breaks off
        self.status = 0  # of every answer, with the request's token repeated in it
        self.redirect = ""
        self.sha = ""  # what the listing says its commit is, if not what was asked for

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    def answer(self, h: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(h.path).path)
        self.requests.append(
            (
                path,
                h.headers.get("Range", ""),
                {key.lower(): value for key, value in h.headers.items()},
            )
        )
        if self.status:
            said = h.headers.get("Authorization", "")
            return self.send(h, self.status, f"no {said}".encode(), {"X-Error-Message": said})
        if path.startswith("/api/datasets/"):
            repo, _, revision = path.removeprefix("/api/datasets/").partition("/revision/")
            commit = self.main if revision == "main" else revision
            if repo != REPO:
                return self.send(h, 404, b"", {"X-Error-Code": "RepoNotFound"})
            if commit not in self.commits:
                return self.send(h, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            body = {
                "id": REPO,
                "sha": self.sha or commit,
                "siblings": [self.sibling(p, c) for p, c in self.commits[commit].items()],
            }
            return self.send(
                h, 200, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
        if self.redirect and not path.startswith("/cdn"):
            return self.send(h, 302, b"", {"Location": self.redirect + "/cdn" + path})
        commit, _, name = path.partition("/resolve/")[2].partition("/")
        content = self.served.get(name, self.commits[commit][name])
        start = (
            int(h.headers["Range"].removeprefix("bytes=").rstrip("-"))
            if h.headers.get("Range")
            else 0
        )
        part = (
            {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        )
        stop = self.breaks.pop(0) if self.breaks else None
        self.send(h, 206 if start else 200, content[start:], part, stop)

    @staticmethod
    def sibling(path: str, content: bytes) -> dict:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        lfs = {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "pointerSize": 130,
        }
        return {"rfilename": path, "size": len(content), "blobId": blob} | (
            {"lfs": lfs} if len(content) > 1000 else {}
        )

    @staticmethod
    def send(h, status: int, body: bytes, headers: dict, stop: int | None = None) -> None:
        h.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            h.send_header(key, value)
        h.end_headers()
        h.wfile.write(body[:stop])
        h.close_connection = stop is not None


@contextmanager
def serve(hub: Hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            hub.answer(self)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    hub = Hub()
    # conftest.py keeps every other test off the network
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between http_get's tries
    sources(monkeypatch, File(REPO, "big.bin"), File(REPO, "small.json", to="s.json"))
    monkeypatch.setattr(downloads, "PINS", {REPO: OLD, "no/one": OLD})
    for key in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    with serve(hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield hub


def sources(monkeypatch, *files: File) -> None:
    monkeypatch.setattr(downloads, "SOURCES", {"things": ("Some things", "free", [*files])})


def refused(*args, **more) -> str:
    with pytest.raises(UserError) as error:
        get(*args, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def big_known(monkeypatch) -> None:
    """Let the checksum of big.bin be known, as most of the files of SOURCES have it."""
    sources(monkeypatch, File(REPO, "big.bin", len(BIG), hashlib.sha256(BIG).hexdigest()))


def test_files_are_loaded_and_checked(hub, tmp_path):
    said = []
    paths = get("things", tmp_path, say=said.append)
    assert paths == [tmp_path / "things/big.bin", tmp_path / "things/s.json"]
    assert [path.read_bytes() for path in paths] == [BIG, SMALL]
    assert hub.paths() == [
        f"/api/datasets/{REPO}/revision/{OLD}",
        f"/datasets/{REPO}/resolve/{OLD}/big.bin",
        f"/datasets/{REPO}/resolve/{OLD}/small.json",
    ]
    names = {path.name for path in (tmp_path / "things").iterdir()} - {".lock"}
    assert names == {"big.bin", "s.json"} and "Licence: free." in said[0]
    hub.requests.clear()
    assert get("things", tmp_path) == paths
    assert hub.paths() == [f"/api/datasets/{REPO}/revision/{OLD}"]


def test_what_is_there_and_known_makes_no_request(hub, tmp_path, monkeypatch):
    big_known(monkeypatch)
    (tmp_path / "things").mkdir()
    (tmp_path / "things/big.bin").write_bytes(BIG)  # by hand
    get("things", tmp_path)
    assert hub.requests == []


def test_a_download_that_breaks_off_goes_on_where_it_ended(hub, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_ENDPOINT", os.environ["HF_ENDPOINT"].replace("//", "//me:hush@"))
    hub.breaks = [200_000, *[0] * 5]
    assert "hush" not in refused("things", tmp_path) + caplog.text
    assert not (tmp_path / "things/big.bin").exists()
    (partial,) = (tmp_path / "things").glob("*.partial")
    ended = partial.stat().st_size
    assert partial.read_bytes() == BIG[:ended] and 0 < ended <= 200_000
    hub.requests.clear()
    assert get("things", tmp_path)[0].read_bytes() == BIG
    assert [r for p, r, _ in hub.requests if p.endswith("big.bin")] == [f"bytes={ended}-"]
    assert not partial.exists()


@pytest.mark.parametrize("name", ["big.bin", "small.json"])
@pytest.mark.parametrize(
    "change", [lambda c: c[:-1] + b"!", lambda c: c + b"more", lambda c: c[:-5]]
)
def test_content_that_is_not_what_the_hub_lists_gets_no_name(hub, tmp_path, name, change):
    hub.served[name] = change(hub.commits[OLD][name])
    assert name in refused("things", tmp_path)
    assert not (tmp_path / "things" / name.replace("small", "s")).exists()
    del hub.served[name]
    assert get("things", tmp_path)[1].read_bytes() == SMALL  # and nothing of it is left in the way


@pytest.mark.parametrize("known", [False, True])
def test_a_file_that_differs_is_kept_beside_the_right_one(hub, tmp_path, monkeypatch, known):
    if known:
        big_known(monkeypatch)
    (tmp_path / "things").mkdir()
    place, said = tmp_path / "things/big.bin", []
    for other in (b"other", BIG[::-1]):
        place.write_bytes(other)
        get("things", tmp_path, say=said.append)
        assert place.read_bytes() == BIG
        assert place.with_name("big.bin.differs").read_bytes() == other
        assert any("big.bin.differs" in line for line in said)


def test_the_pinned_commit_and_checksum_go_before_the_hub(hub, tmp_path, monkeypatch):
    big_known(monkeypatch)
    hub.commits[NEW], hub.main = {"big.bin": b"new"}, NEW
    assert get("things", tmp_path / "a")[0].read_bytes() == BIG
    assert get("things", tmp_path / "a", revision="main")[0].read_bytes() == b"new"
    hub.commits[OLD] = {"big.bin": BIG[::-1]}
    hub.requests.clear()
    assert "big.bin" in refused("things", tmp_path / "c")
    assert len(hub.requests) == 1  # nothing was loaded


ONE, TWO, GONE = File("no/one", "a"), File(REPO, "big.bin"), File(REPO, "gone.bin")


@pytest.mark.parametrize(
    ("files", "name", "revision", "named"),
    [
        ([TWO], "nothing", "", "things"),
        ([TWO], "things", "v9", "v9"),
        ([TWO], "things", NEW, NEW),  # the hub answers with another commit
        ([TWO, GONE], "things", "", "gone.bin"),
        ([ONE], "things", "", "there is no no/one"),
        ([ONE, TWO], "things", "main", "several repositories"),
    ],
)
def test_what_the_hub_does_not_have(hub, tmp_path, monkeypatch, files, name, revision, named):
    sources(monkeypatch, *files)
    if revision == NEW:
        hub.commits[NEW], hub.sha = {"big.bin": BIG}, OLD
    assert named in refused(name, tmp_path, revision=revision)


def test_without_a_hub_one_sentence_comes(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://me:hush@127.0.0.1:{silent.getsockname()[1]}/hf_verysecret"
        monkeypatch.setenv("HF_ENDPOINT", url)
        message = refused("things", tmp_path)
        assert "ConnectError" in message and "hush" not in message and "verysecret" not in message
        silent.listen()
        assert "ReadTimeout" in refused("things", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused("things", tmp_path)
    assert hub.requests == []


@pytest.mark.parametrize("status", [200, 401, 403, 404, 500])
def test_the_token_is_sent_and_stands_nowhere(hub, tmp_path, monkeypatch, capfd, caplog, status):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    hub.status = status
    said = []
    message = refused("things", tmp_path, say=said.append)
    assert hub.requests[0][2]["authorization"] == "Bearer hf_verysecret"
    assert "verysecret" not in message + "".join(said) + caplog.text + "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"verysecret" in path.read_bytes() for path in files)


def test_a_token_file_is_not_used(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    get("things", tmp_path / "out")
    assert not any("stored" in str(headers) for _, _, headers in hub.requests)


def test_the_token_does_not_follow_a_redirect_to_another_host(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    store = Hub()
    with serve(store) as hub.redirect:
        assert get("things", tmp_path)[0].read_bytes() == BIG
    sent = [str(headers) for _, _, headers in store.requests]
    assert len(sent) == 2 and not any("verysecret" in headers for headers in sent)


def test_a_hub_that_is_busy_does_not_cost_what_is_there(hub, tmp_path):
    hub.breaks, answer = [200_000, *[0] * 5], hub.answer
    refused("things", tmp_path)
    (partial,) = (tmp_path / "things").glob("*.partial")
    size = partial.stat().st_size
    hub.answer = lambda h: answer(h) if "/api/" in h.path else hub.send(h, 503, b"later", {})
    assert "HTTP 503" in refused("things", tmp_path)
    assert partial.stat().st_size == size > 0


def test_a_folder_that_cannot_be_written_or_is_in_use(hub, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be kept" in refused("things", tmp_path / "file")
    (tmp_path / "things").mkdir()
    with FileLock(tmp_path / "things/.lock"):
        assert "is under way" in refused("things", tmp_path)
    assert hub.requests == []


def test_every_source_has_a_licence_a_commit_and_checksums():
    known = set()
    for name, (what, licence, files) in downloads.SOURCES.items():
        assert what and licence and len({file.name for file in files}) == len(files), name
        for file in files:
            assert len(downloads.PINS[file.repo]) == 40
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
            assert file.size is None or file.sha256
            known |= {file.sha256} - {None}
    assert len(known) == 11
