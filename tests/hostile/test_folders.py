"""Model folders and data sets of strangers: what costs much is one sentence, nothing is asked for.

Each kind is met in a process of its own with limits of memory and processor time.
"""

import http.server
import subprocess
import sys
import threading

import folders
import pytest
from test_bombs import HEAVY, LIGHT, ROOT, refused, said

from config.errors import UserError

LOADS = "from tokens.codec import Codec"


def test_a_tokenizer_that_costs_much_is_a_sentence(tmp_path):
    kinds = folders.tokenizers()
    paths = {name: folders.model(tmp_path / name, **parts) for name, parts in kinds.items()}
    lines = said(LOADS, "Codec.load(path)", paths.values(), HEAVY, 120)
    for line in refused(lines, paths).values():
        assert "or fails: give another --model" in line


def test_a_tokenizer_as_models_have_it_is_taken(tmp_path):
    from models.convert import _PATTERNS

    paths = []
    for n, patterns in enumerate(_PATTERNS.values()):
        paths.append(folders.model(tmp_path / str(n), pre_tokenizer=folders._split(patterns[0])))
    assert {*said(LOADS, "Codec.load(path)", paths, HEAVY, 120)} == {"taken"}


def test_a_tokenizer_that_gives_up_on_a_text_is_a_sentence(tmp_path):
    from types import SimpleNamespace

    from tokens.codec import Codec

    panic = type("PanicException", (BaseException,), {})

    def encode(*_, **__):
        raise panic("Onig: retry-limit-in-match over\nmore")

    codec = Codec.__new__(Codec)
    codec._inner = SimpleNamespace(encode=encode)
    with pytest.raises(UserError, match=r"gives up on a text \(Onig: retry-limit-in-match over\)"):
        codec.encode("a")


def test_a_part_of_a_model_that_is_too_large_is_a_sentence(tmp_path):
    from config.foreign import PART

    path = folders.model(tmp_path / "model")
    with (path / "tokenizer.json").open("r+b") as file:
        file.truncate(PART + 1)
    assert "more than 64 MiB" in said(LOADS, "Codec.load(path)", [path], HEAVY)[0]


def test_a_table_that_unpacks_to_a_flood_is_a_sentence(tmp_path):
    paths = folders.tables(tmp_path)
    assert sum(path.stat().st_size for path in paths.values()) < 1 << 17
    lines = said(
        "from pathlib import Path\nfrom tasks.readers import records_of",
        "[*records_of(Path(path))]", paths.values(), LIGHT,
    )  # fmt: skip
    for line in refused(lines, paths).values():
        assert "more than 400 times its size" in line


def test_weights_that_declare_more_than_they_hold_are_a_sentence(tmp_path):
    paths = folders.weights(tmp_path)
    imports = "from models.load import load_model"
    lines = said(imports, "load_model(path, 'float32', 'cpu')", paths.values(), HEAVY, 60)
    for line in refused(lines, paths).values():
        assert "no valid safetensors file" in line


def test_nothing_is_asked_for_because_a_folder_names_it(tmp_path):
    from tasks.hub import data_files

    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, (file, text) in folders.cards(f"http://127.0.0.1:{server.server_port}").items():
            folder = tmp_path / name
            folder.mkdir()
            (folder / "a.jsonl").write_text('{"question": "?", "answer": ".", "context": "."}\n')
            (folder / file).write_text(text)
            with pytest.raises(UserError, match="of which nothing is asked"):
                data_files(f"hf:{folder}:train")
        server.shutdown()
    assert asked == []


@pytest.mark.parametrize("imports, call", [
    ("from agents.find import of_model", "of_model(path)"),
    (LOADS, "Codec.load(path)"),
    ("from models.load import load_model", "load_model(path)"),
    ("from models.embedder import embedder_of", "embedder_of('hf:' + path)"),
])  # fmt: skip
def test_a_pipe_in_a_model_folder_is_a_sentence(imports, call, tmp_path):
    paths = folders.pipes(tmp_path)
    lines = said(imports, call, paths.values(), HEAVY)
    for line in refused(lines, paths).values():
        assert "is a pipe or a device and no file" in line


def test_a_pipe_beside_a_gguf_file_is_a_sentence(tmp_path):
    path = folders.pipes(tmp_path)["agent.yaml"] / "a.gguf"
    path.write_bytes(b"")
    (line,) = said("from agents.find import of_model", "of_model(path)", [path])
    assert "is a pipe or a device and no file" in line


def test_a_pipe_ends_ask_at_once(tmp_path):
    path = folders.pipes(tmp_path)["config.json"]
    command = [sys.executable, "cli.py", "ask", "README.md", "Who?", "--model", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and "is a pipe or a device" in result.stderr
