"""Downloads from a hub on the loopback address; nothing here leaves the machine."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

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
        self.breaks: list[
            int
        ] = []  # how many bytes each of the next answers gives before it breaks off
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
    monkeypatch.setattr(
        downloads,
        "SOURCES",
        {
            "things": (
                "Some things",
                "free",
                [File(REPO, "big.bin"), File(REPO, "small.json", to="s.json")],
            )
        },
    )
    monkeypatch.setattr(downloads, "PINS", {})
    for key in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    with serve(hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield hub


def refused(*args, **more) -> str:
    with pytest.raises(UserError) as error:
        get(*args, **more)
    return str(error.value)


def pin(monkeypatch, content: bytes = BIG) -> None:
    known = File(REPO, "big.bin", len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(downloads, "SOURCES", {"things": ("Some things", "free", [known])})
    monkeypatch.setattr(downloads, "PINS", {REPO: OLD})


def test_files_are_loaded_checked_and_recorded(hub, tmp_path):
    said = []
    paths = get("things", tmp_path, say=said.append)
    assert paths == [tmp_path / "things/big.bin", tmp_path / "things/s.json"]
    assert [path.read_bytes() for path in paths] == [BIG, SMALL]
    assert json.loads((tmp_path / "downloads.json").read_text()) == {
        f"things/{name}": {
            "repo": REPO,
            "path": path,
            "commit": OLD,
            "size": len(c),
            "sha256": hashlib.sha256(c).hexdigest(),
        }
        for name, path, c in (("big.bin", "big.bin", BIG), ("s.json", "small.json", SMALL))
    }
    assert hub.paths() == [
        f"/api/datasets/{REPO}/revision/main",
        f"/datasets/{REPO}/resolve/{OLD}/big.bin",
        f"/datasets/{REPO}/resolve/{OLD}/small.json",
    ]
    assert sorted(p.name for p in (tmp_path / "things").iterdir()) == ["big.bin", "s.json"]
    assert "Licence: free." in said[0]
    # Before anything is asked for
    assert said[1].startswith("HF_ENDPOINT is set: http://127.0.0.1")


def test_the_second_call_makes_no_request(hub, tmp_path):
    first = get("things", tmp_path)
    before = (tmp_path / "downloads.json").stat().st_mtime_ns
    hub.requests.clear()
    assert get("things", tmp_path) == first
    assert get("things", tmp_path, revision=OLD) == first
    assert hub.requests == []
    assert (tmp_path / "downloads.json").stat().st_mtime_ns == before


def test_a_download_that_breaks_off_goes_on_where_it_ended(hub, tmp_path, monkeypatch):
    hub.breaks = [200_000]
    monkeypatch.setattr(downloads, "TRIES", 1)
    message = refused("things", tmp_path)
    assert "the same command goes on" in message
    assert not (tmp_path / "things/big.bin").exists()
    (partial,) = (tmp_path / "things").glob("*.partial")
    assert partial.read_bytes() == BIG[: partial.stat().st_size]
    assert 0 < partial.stat().st_size <= 200_000
    ended = partial.stat().st_size
    hub.requests.clear()
    assert get("things", tmp_path)[0].read_bytes() == BIG
    assert [r for p, r, _ in hub.requests if p.endswith("big.bin")] == [f"bytes={ended}-"]
    assert not partial.exists()


def test_within_a_call_a_break_is_tried_again(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.breaks = [100_000, 100_000]
    assert get("things", tmp_path)[0].read_bytes() == BIG
    asked = [r for p, r, _ in hub.requests if p.endswith("big.bin")]
    assert len(asked) == 3 and asked[0] == "" and all(r.startswith("bytes=") for r in asked[1:])


@pytest.mark.parametrize("name", ["big.bin", "small.json"])
@pytest.mark.parametrize(
    "change", [lambda c: c[:-1] + b"!", lambda c: c + b"more", lambda c: c[:-5]]
)
def test_content_that_is_not_what_the_hub_lists_gets_no_name(
    hub, tmp_path, monkeypatch, name, change
):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.served[name] = change(hub.commits[OLD][name])
    message = refused("things", tmp_path)
    assert name in message
    assert not (tmp_path / "things" / name.replace("small", "s")).exists()
    del hub.served[name]
    assert get("things", tmp_path)[1].read_bytes() == SMALL  # and nothing of it is left in the way


def test_a_file_that_was_changed_later_is_moved_aside(hub, tmp_path):
    (big, _) = get("things", tmp_path)
    big.write_bytes(b"other")
    hub.requests.clear()
    message = refused("things", tmp_path)
    assert "size 5 instead of 512000" in message and "big.bin.differs" in message
    assert hub.requests == []
    assert not big.exists() and big.with_name("big.bin.differs").read_bytes() == b"other"
    assert get("things", tmp_path)[0].read_bytes() == BIG


def test_the_recorded_commit_is_kept_when_the_hub_goes_on(hub, tmp_path):
    get("things", tmp_path)
    hub.commits[NEW], hub.main = {"big.bin": BIG[::-1], "small.json": SMALL}, NEW
    (tmp_path / "things/big.bin").unlink()
    assert get("things", tmp_path)[0].read_bytes() == BIG
    assert f"/datasets/{REPO}/resolve/{OLD}/big.bin" in hub.paths()[-1:]
    # Unless another one is asked for
    assert get("things", tmp_path, revision="main")[0].read_bytes() == BIG[::-1]
    assert {
        entry["commit"] for entry in json.loads((tmp_path / "downloads.json").read_text()).values()
    } == {NEW}
    assert get("things", tmp_path)[0].read_bytes() == BIG[::-1]


def test_a_set_is_ended_at_the_commit_it_was_begun_at(hub, tmp_path, monkeypatch):
    hub.served["small.json"] = SMALL[::-1]
    refused("things", tmp_path)
    hub.commits[NEW], hub.main = {"big.bin": BIG, "small.json": b"new\n"}, NEW
    hub.served.clear()
    assert get("things", tmp_path)[1].read_bytes() == SMALL


@pytest.mark.parametrize("missing", ["big.bin", "s.json"])
def test_a_hub_that_changes_a_commit_is_refused(hub, tmp_path, missing):
    get("things", tmp_path)
    (tmp_path / "things" / missing).unlink()
    hub.commits[OLD] = {"big.bin": BIG[::-1], "small.json": SMALL[::-1]}
    message = refused("things", tmp_path)
    assert "instead of" in message
    assert not (tmp_path / "things" / missing).exists()


def test_a_hub_that_has_lost_the_recorded_commit(hub, tmp_path):
    get("things", tmp_path)
    (tmp_path / "things/big.bin").unlink()
    hub.commits = {NEW: hub.commits[OLD]}
    assert f"has no revision {OLD}" in refused("things", tmp_path)


def test_the_pinned_commit_and_checksum_go_before_the_hub(hub, tmp_path, monkeypatch):
    pin(monkeypatch)
    hub.commits[NEW], hub.main = {"big.bin": b"new"}, NEW
    assert get("things", tmp_path / "a")[0].read_bytes() == BIG
    assert get("things", tmp_path / "b", revision="main")[0].read_bytes() == b"new"
    hub.commits[OLD] = {"big.bin": BIG[::-1]}
    hub.requests.clear()
    assert "is known" in refused("things", tmp_path / "c")
    assert len(hub.requests) == 1  # nothing was loaded


def test_a_file_put_by_hand_is_checked_without_the_hub_where_its_checksum_is_known(
    hub, tmp_path, monkeypatch
):
    pin(monkeypatch)
    (tmp_path / "things").mkdir()
    (tmp_path / "things/big.bin").write_bytes(BIG)
    assert get("things", tmp_path)[0].read_bytes() == BIG
    assert hub.requests == []
    assert json.loads((tmp_path / "downloads.json").read_text())["things/big.bin"]["commit"] == OLD


def test_a_file_put_by_hand_is_checked_against_the_listing_otherwise(hub, tmp_path):
    (tmp_path / "things").mkdir()
    (tmp_path / "things/big.bin").write_bytes(BIG)
    (tmp_path / "things/s.json").write_bytes(b"{}")
    assert "s.json.differs" in refused("things", tmp_path)
    get("things", tmp_path)
    assert not any(path.endswith("big.bin") for path in hub.paths())


def test_names_and_revisions_that_are_not_there(hub, tmp_path, monkeypatch):
    assert "'nothing'" in refused("nothing", tmp_path) and "things" in refused("nothing", tmp_path)
    assert "has no revision v9" in refused("things", tmp_path, revision="v9")
    monkeypatch.setattr(
        downloads, "SOURCES", {"things": ("", "", [File(REPO, "big.bin"), File(REPO, "gone.bin")])}
    )
    assert "gone.bin" in refused("things", tmp_path) and (tmp_path / "things/big.bin").exists()
    monkeypatch.setattr(downloads, "SOURCES", {"things": ("", "", [File("no/one", "big.bin")])})
    assert "there is no no/one" in refused("things", tmp_path)
    monkeypatch.setattr(
        downloads, "SOURCES", {"things": ("", "", [File("no/one", "a"), File("no/two", "b")])}
    )
    assert "several repositories" in refused("things", tmp_path, revision="main")


def test_without_a_hub_one_sentence_comes(hub, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
        monkeypatch.setenv(
            "HF_ENDPOINT", f"http://me:hush@127.0.0.1:{free.getsockname()[1]}/hf_verysecret"
        )
        message = refused("things", tmp_path)
    assert "ConnectError" in message and "hush" not in message and "verysecret" not in message
    assert "HF_ENDPOINT is set and HF_HUB_OFFLINE is not set" in message
    assert (
        str(tmp_path / "things/big.bin") in message and str(tmp_path / "things/s.json") in message
    )


def test_a_hub_that_says_nothing_is_given_up(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "ReadTimeout" in refused("things", tmp_path)


def test_offline_mode_is_kept(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refused("things", tmp_path)
    assert hub.requests == []


def test_a_hub_that_answers_with_another_commit(hub, tmp_path):
    hub.commits[NEW] = {"big.bin": BIG[::-1], "small.json": SMALL}
    hub.sha = OLD
    assert f"answers with {OLD}" in refused("things", tmp_path, revision=NEW)


def test_an_answer_longer_than_listed_is_not_read_to_its_end(hub, tmp_path):
    hub.served["big.bin"] = BIG * 40
    message = refused("things", tmp_path)
    assert 512_000 < int(message.partition("size ")[2].split()[0]) < 5_000_000


def test_the_message_names_the_files_still_missing(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "TRIES", 1)
    hub.breaks = [len(BIG), 3]
    message = refused("things", tmp_path)
    assert (
        str(tmp_path / "things/s.json") in message
        and str(tmp_path / "things/big.bin") not in message
    )


def test_an_answer_that_is_not_a_hubs(hub, tmp_path):
    hub.status = 200
    assert "no answer of a hub" in refused("things", tmp_path)


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_the_token_is_sent_and_stands_nowhere(hub, tmp_path, monkeypatch, capfd, caplog, status):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    hub.status = status
    said = []
    message = refused("things", tmp_path, say=said.append)
    assert hub.requests[0][2]["authorization"] == "Bearer hf_verysecret"
    assert "gets HF_TOKEN" in said[1]
    assert "verysecret" not in message + "".join(said) + caplog.text + "".join(capfd.readouterr())
    assert not any(
        b"verysecret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )


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
    assert len(store.requests) == 2 and not any(
        "verysecret" in str(headers) for _, _, headers in store.requests
    )


def test_a_hub_that_is_busy_does_not_cost_what_is_there(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(downloads, "TRIES", 1)
    hub.breaks = [200_000]
    refused("things", tmp_path)
    (partial,) = (tmp_path / "things").glob("*.partial")
    size, answer = partial.stat().st_size, hub.answer
    hub.answer = lambda h: answer(h) if "/api/" in h.path else hub.send(h, 503, b"later", {})
    assert "HTTP 503" in refused("things", tmp_path)
    assert partial.stat().st_size == size > 0


def test_a_full_disk_is_said_before_anything_is_loaded(hub, tmp_path, monkeypatch):
    import shutil

    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=1000))
    assert "no room for the 0.5 MB" in refused("things", tmp_path)
    assert len(hub.requests) == 1


def test_a_folder_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be kept" in refused("things", tmp_path / "file")


@pytest.mark.parametrize("text", ["{", "[1]", '{"things/big.bin": {"commit": 1}}'])
def test_a_damaged_lock(hub, tmp_path, text):
    (tmp_path / "downloads.json").write_text(text)
    assert "downloads.json is damaged" in refused("things", tmp_path)
    assert hub.requests == []


def test_two_calls_at_once(hub, tmp_path):
    from filelock import FileLock

    with FileLock(tmp_path / ".downloads.json.lock"):
        assert "is under way" in refused("things", tmp_path)


def test_every_source_has_a_licence_a_commit_and_checksums():
    for name, (what, licence, files) in downloads.SOURCES.items():
        assert what and licence and len({file.name for file in files}) == len(files), name
        for file in files:
            assert len(downloads.PINS[file.repo]) == 40
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
            assert file.size is None or file.sha256
    assert (
        len(
            {
                file.sha256
                for _, _, files in downloads.SOURCES.values()
                for file in files
                if file.sha256
            }
        )
        == 11
    )
