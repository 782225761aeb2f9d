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

    def __init__(self, files: dict[str, bytes], commit: str = OLD):
        self.commits, self.main = {commit: files}, commit
        self.served = {}  # path: other bytes than are listed
        self.requests: list[tuple[str, dict]] = []  # path, headers in lower case
        self.breaks: list[int] = []  # bytes after which each of the next answers breaks off
        self.status = 0  # of every answer, with the request's token repeated in it
        self.redirect = ""
        self.sha = ""  # what the listing says its commit is, if not what was asked for

    def answer(self, h: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(h.path).path)
        self.requests.append((path, {name.lower(): value for name, value in h.headers.items()}))
        if self.status:
            said = h.headers.get("Authorization", "")
            return self.send(h, self.status, f"no {said}".encode(), {"X-Error-Message": said})
        if path.startswith("/api/datasets/"):
            return self.listing(h, path.removeprefix("/api/datasets/"))
        if self.redirect and not path.startswith("/cdn"):
            return self.send(h, 302, b"", {"Location": self.redirect + "/cdn" + path})
        commit, _, name = path.partition("/resolve/")[2].partition("/")
        if name not in self.commits.get(commit, {}):
            return self.send(h, 404, b"", {"X-Error-Code": "EntryNotFound"})
        content = self.served.get(name, self.commits[commit][name])
        wanted = h.headers.get("Range", "bytes=0-")
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        headers = {"ETag": '"x"'} | ({"Content-Range": span} if "Range" in h.headers else {})
        stop = self.breaks.pop(0) if self.breaks else None
        return self.send(h, 206 if "Range" in h.headers else 200, part, headers, stop)

    def listing(self, h: BaseHTTPRequestHandler, path: str) -> None:
        repo, kind, revision = path.partition("/revision/")
        repo, _, folder = repo.partition("/tree/")
        if repo != REPO:
            return self.send(h, 404, b"", {"X-Error-Code": "RepoNotFound"})
        if not kind:  # the files of a folder at the only commit
            files = self.commits[folder[:40]]
            inside = [p for p in files if p.startswith(f"{folder[41:]}/")]
            value = [{"type": "file", "path": p, "size": len(files[p]), "oid": "0"} for p in inside]
            names = {p.partition("/")[0] for p in files if "/" in p}
            folders = [{"type": "directory", "path": n, "oid": "0" * 40, "size": 0} for n in names]
            value = value if folder[41:] else folders
        else:
            commit = self.main if revision == "main" else revision
            if commit not in self.commits:
                return self.send(h, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = [self.sibling(p, c) for p, c in self.commits[commit].items()]
            value = {"id": REPO, "sha": self.sha or commit, "siblings": files}
        body, headers = json.dumps(value).encode(), {"Content-Type": "application/json"}
        return self.send(h, 200, body, headers)

    @staticmethod
    def sibling(path: str, content: bytes) -> dict:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        lfs = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        lfs = {"lfs": lfs | {"pointerSize": 130}} if len(content) > 1000 else {}
        return {"rfilename": path, "size": len(content), "blobId": blob} | lfs

    @staticmethod
    def send(h, status: int, body: bytes, headers: dict, stop: int | None = None) -> None:
        h.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            h.send_header(key, value)
        h.end_headers()
        if h.command == "GET":
            h.wfile.write(body[:stop])
        h.close_connection = stop is not None


@contextmanager
def serve(hub: Hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            hub.answer(self)

        do_HEAD = do_GET

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

    hub = Hub({"big.bin": BIG, "small.json": SMALL})
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
    sources(monkeypatch, File(REPO, "big.bin", hashlib.sha256(BIG).hexdigest()))


def test_files_are_loaded_and_checked(hub, tmp_path):
    said, listing = [], f"/api/datasets/{REPO}/revision/{OLD}"
    paths = get("things", tmp_path, say=said.append)
    assert paths == [tmp_path / "things/big.bin", tmp_path / "things/s.json"]
    assert [path.read_bytes() for path in paths] == [BIG, SMALL]
    files = [f"/datasets/{REPO}/resolve/{OLD}/{name}" for name in ("big.bin", "small.json")]
    assert [path for path, _ in hub.requests] == [listing, *files]
    names = {path.name for path in (tmp_path / "things").iterdir()} - {".lock"}
    assert names == {"big.bin", "s.json"} and "free" in said[0]
    hub.requests.clear()
    assert get("things", tmp_path) == paths
    assert [path for path, _ in hub.requests] == [listing]


def test_what_is_there_is_checked_and_never_replaced(hub, tmp_path, monkeypatch):
    (tmp_path / "things").mkdir()
    place = tmp_path / "things/big.bin"
    for known in (False, True):
        if known:
            big_known(monkeypatch)
        for other in (b"other", BIG[::-1]):
            place.write_bytes(other)
            assert "big.bin" in refused("things", tmp_path) and place.read_bytes() == other
    place.write_bytes(BIG)  # by hand
    hub.requests.clear()
    get("things", tmp_path)
    assert hub.requests == []


def test_a_download_that_breaks_off_goes_on_where_it_ended(hub, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_ENDPOINT", os.environ["HF_ENDPOINT"].replace("//", "//me:hush@"))
    hub.breaks, answer = [200_000, *[0] * 5], hub.answer
    assert "hush" not in refused("things", tmp_path) + caplog.text
    assert not (tmp_path / "things/big.bin").exists()
    (partial,) = (tmp_path / "things").glob("*.partial")
    ended = partial.stat().st_size
    assert partial.read_bytes() == BIG[:ended] and 0 < ended <= 200_000
    # nor does a hub that is busy cost what is there
    hub.answer = lambda h: answer(h) if "/api/" in h.path else hub.send(h, 503, b"later", {})
    assert "503" in refused("things", tmp_path) and partial.stat().st_size == ended
    hub.requests.clear()
    hub.answer = answer
    assert get("things", tmp_path)[0].read_bytes() == BIG
    ranges = [headers["range"] for path, headers in hub.requests if path.endswith("big.bin")]
    assert ranges == [f"bytes={ended}-"] and not partial.exists()


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


def test_the_pinned_commit_and_checksum_go_before_the_hub(hub, tmp_path, monkeypatch):
    big_known(monkeypatch)
    hub.commits[NEW], hub.main = {"big.bin": b"new"}, NEW
    assert get("things", tmp_path / "a")[0].read_bytes() == BIG
    hub.commits[OLD] = {"big.bin": BIG[::-1]}
    hub.requests.clear()
    assert "big.bin" in refused("things", tmp_path / "c")
    assert len(hub.requests) == 1  # nothing was loaded
    hub.sha = NEW  # the hub answers with another commit
    assert NEW in refused("things", tmp_path / "d")


ONE, TWO, GONE = File("no/one", "a"), File(REPO, "big.bin"), File(REPO, "gone.bin")


@pytest.mark.parametrize(
    ("files", "name", "named"),
    [
        ([TWO], "nothing", "things"),
        ([TWO, GONE], "things", "gone.bin"),
        ([ONE], "things", "no/one"),
    ],
)
def test_what_the_hub_does_not_have(hub, tmp_path, monkeypatch, files, name, named):
    sources(monkeypatch, *files)
    assert named in refused(name, tmp_path)


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


@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_the_token_is_sent_and_stands_nowhere(hub, tmp_path, monkeypatch, capfd, caplog, status):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    hub.status = status
    said = []
    message = refused("things", tmp_path, say=said.append)
    assert hub.requests[0][1]["authorization"] == "Bearer hf_verysecret"
    assert "verysecret" not in message + "".join(said) + caplog.text + "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"verysecret" in path.read_bytes() for path in files)


def test_a_token_follows_no_redirect_and_is_taken_from_no_file(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    get("things", tmp_path / "out")
    assert "stored" not in str(hub.requests)
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    store = Hub({"big.bin": BIG, "small.json": SMALL})
    with serve(store) as hub.redirect:
        assert get("things", tmp_path)[0].read_bytes() == BIG
    assert len(store.requests) == 2 and "verysecret" not in str(store.requests)


def test_a_folder_that_cannot_be_written_or_is_in_use(hub, tmp_path):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refused("things", tmp_path / "file")
    (tmp_path / "things").mkdir()
    with FileLock(tmp_path / "things/.lock"):
        assert str(tmp_path / "things") in refused("things", tmp_path)
    assert hub.requests == []


def test_every_source_has_a_licence_a_commit_and_checksums():
    known = set()
    for name, (what, licence, files) in downloads.SOURCES.items():
        assert what and licence and len({file.name for file in files}) == len(files), name
        for file in files:
            assert len(bytes.fromhex(downloads.PINS[file.repo])) == 20
            assert len(bytes.fromhex(file.sha256)) == (32 if file.sha256 else 0)
            known |= {file.sha256} - {""}
    assert len(known) == 11
