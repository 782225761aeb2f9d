"""Downloads from a hub on the loopback address; nothing here leaves the machine."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from config.errors import UserError
from tasks import downloads
from tasks.downloads import File, get

BIG = bytes(range(256)) * 2000
SMALL = b'{"question": "?"}\n'
OLD, NEW = "a" * 40, "b" * 40
REPO = "someone/things"
SHA = hashlib.sha256(BIG).hexdigest()


class Hub:
    """Serve the part of the hub's protocol in use: listings of commits, and files with ranges."""

    def __init__(self, files: dict[str, bytes], commit: str = OLD):
        self.commits, self.main = {commit: files}, commit
        self.requests: list[tuple[str, dict]] = []  # path, headers in lower case
        self.status = 0  # of every answer, with the request's token repeated in it

    def answer(self, h: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(h.path).path)
        self.requests.append((path, {name.lower(): value for name, value in h.headers.items()}))
        if self.status:
            said = h.headers.get("Authorization", "")
            return self.send(h, self.status, f"no {said}".encode(), {"X-Error-Message": said})
        if path.startswith("/api/datasets/"):
            return self.listing(h, path.removeprefix("/api/datasets/"))
        commit, _, name = path.partition("/resolve/")[2].partition("/")
        if name not in self.commits.get(commit, {}):
            return self.send(h, 404, b"", {"X-Error-Code": "EntryNotFound"})
        content = self.commits[commit][name]
        wanted = h.headers.get("Range", "bytes=0-")
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        headers |= {"Content-Range": span} if "Range" in h.headers else {}
        return self.send(h, 206 if "Range" in h.headers else 200, part, headers)

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
            files = [{"rfilename": name} for name in self.commits[commit]]
            value = {"id": REPO, "sha": commit, "siblings": files}
        body, headers = json.dumps(value).encode(), {"Content-Type": "application/json"}
        return self.send(h, 200, body, headers)

    @staticmethod
    def send(h, status: int, body: bytes, headers: dict) -> None:
        h.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            h.send_header(key, value)
        h.end_headers()
        if h.command == "GET":
            h.wfile.write(body)


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

    hub = Hub({"folder/big.bin": BIG, "small.json": SMALL})
    # conftest.py keeps every other test off the network
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's tries
    sources(monkeypatch, File(REPO, "folder/big.bin", SHA), File(REPO, "small.json", to="s.json"))
    monkeypatch.setattr(downloads, "PINS", {REPO: OLD, "no/one": OLD})
    for key in ("HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    with serve(hub) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + constants.HUGGINGFACE_CO_URL_TEMPLATE.partition(".co")[2]
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def sources(monkeypatch, *files: File) -> None:
    monkeypatch.setattr(downloads, "SOURCES", {"things": ("Some things", "free", [*files])})


def refused(*args, **more) -> str:
    with pytest.raises(UserError) as error:
        get(*args, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_files_are_loaded_at_their_commit_checked_and_kept(hub, tmp_path):
    hub.commits[NEW], hub.main = {"folder/big.bin": b"new"}, NEW
    said = []
    paths = get("things", tmp_path, say=said.append)
    assert paths == [tmp_path / "things/big.bin", tmp_path / "things/s.json"]
    assert [path.read_bytes() for path in paths] == [BIG, SMALL] and "free" in said[0]
    assert {path.name for path in (tmp_path / "things").iterdir()} == {"big.bin", "s.json"}
    hub.requests.clear()
    assert get("things", tmp_path) == paths and hub.requests == []
    paths[0].unlink()  # as where a download broke off: what is whole stays
    get("things", tmp_path)
    assert paths[0].read_bytes() == BIG and not any("small" in path for path, _ in hub.requests)


def test_another_content_gets_no_name_and_replaces_nothing(hub, tmp_path):
    hub.commits[OLD]["folder/big.bin"] = BIG[::-1]
    assert "big.bin" in refused("things", tmp_path)
    place = tmp_path / "things/big.bin"
    assert not place.exists()
    place.write_bytes(b"other")
    assert "big.bin" in refused("things", tmp_path) and place.read_bytes() == b"other"
    place.write_bytes(BIG)  # by hand
    assert get("things", tmp_path)[0] == place


@pytest.mark.parametrize(("file", "named"), [
    (File(REPO, "gone.bin"), "gone.bin"), (File("no/one", "a"), "no/one"),
])  # fmt: skip
def test_what_the_hub_does_not_have(hub, tmp_path, monkeypatch, file, named):
    sources(monkeypatch, file)
    assert named in refused("things", tmp_path)
    assert "things" in refused("nothing", tmp_path)


def test_without_a_hub_one_sentence_comes(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop"):
        assert name in refused("things", tmp_path / name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "Offline" in refused("things", tmp_path)


@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_the_token_is_sent_and_stands_nowhere(hub, tmp_path, monkeypatch, capfd, caplog, status):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    hub.status = status
    said = []
    message = refused("things", tmp_path, say=said.append)
    with pytest.raises(UserError) as error:
        downloads.commit_of(REPO, "main")
    assert hub.requests[0][1]["authorization"] == "Bearer hf_verysecret"
    message += "".join(said) + caplog.text + "".join(capfd.readouterr()) + str(error.value)
    assert "verysecret" not in message
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"verysecret" in path.read_bytes() for path in files)


def test_a_token_is_taken_from_no_file(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    get("things", tmp_path / "out")
    assert downloads.commit_of(REPO, "main") == OLD
    assert "stored" not in str(hub.requests)


def test_every_source_has_a_licence_a_commit_and_checksums():
    known = set()
    for name, (what, licence, files) in downloads.SOURCES.items():
        assert what and licence and len({file.name for file in files}) == len(files), name
        for file in files:
            assert len(bytes.fromhex(downloads.PINS[file.repo])) == 20
            assert len(bytes.fromhex(file.sha256)) == (32 if file.sha256 else 0)
            known |= {file.sha256} - {""}
    assert len(known) == 11
