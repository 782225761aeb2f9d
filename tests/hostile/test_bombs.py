"""Small files that cost much: one sentence each, in a process that may take little.

Each kind is met in a process of its own, whose memory and processor time are limited: where a
guard is missing it is ended, on any machine, and nothing here looks at a clock.
"""

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import bombs
import pytest

import suites
from config.errors import UserError
from config.files import NESTED, SETTINGS
from config.foreign import FREE, from_json, read_data
from config.options import EvalConfig
from models.convert import read_header
from report.evaluation import evaluation_folder
from report.folder import settings_of
from report.records import read_records
from tasks import readers
from tasks.readers import read_json

ROOT = Path(__file__).parents[2]
SOURCES = [p for p in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")) if p.parts[-2] != "tests"]
LIGHT, HEAVY = 1 << 31, 12 << 30  # bytes of address space; libraries of models reserve gigabytes
PROGRAM = """
import sys
from config.errors import UserError
{imports}
for path in sys.argv[1:]:
    try:
        {call}
    except UserError as error:
        print(error)
    else:
        print("taken")
"""


def said(imports: str, call: str, paths, memory: int = LIGHT, seconds: int = 30) -> list[str]:
    """What is said of each path in a process with limits of memory and processor time."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    program = PROGRAM.format(imports=imports, call=call)
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)],
        cwd=ROOT, capture_output=True, text=True, preexec_fn=limit,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


def written(folder: Path, files: dict[str, str | bytes], ending: str) -> dict[str, Path]:
    paths = {}
    for name, content in files.items():
        paths[name] = folder / f"{name.replace(' ', '-')}{ending}"
        paths[name].write_bytes(content.encode() if isinstance(content, str) else content)
    return paths


def refused(lines: list[str], paths: dict[str, Path]) -> dict[str, str]:
    """Check that there is one sentence for each path, which names it."""
    assert len(lines) == len(paths), lines
    for line, path in zip(lines, paths.values(), strict=True):
        assert str(path) in line and line.endswith("."), line
    return dict(zip(paths, lines, strict=True))


# ---------------------------------------------------------------- settings


def test_settings_that_cost_much_are_refused_before_they_do(tmp_path):
    paths = written(tmp_path, bombs.settings(), ".yaml")
    lines = said("from config.files import read_yaml", "read_yaml(path)", paths.values())
    found = refused(lines, paths)
    for name in ("lists of lists", "maps of maps", "merged", "itself", "as a key"):
        assert "may not refer to other settings (*a)" in found[name]
    for name in ("deep lists", "deep blocks"):
        assert f"at most {NESTED} lists and sections deep" in found[name]
    assert f"{SETTINGS:,} bytes" in found["long"] and f"{SETTINGS:,} bytes" in found["wide"]
    assert "64 bits" in found["large number"] and "64 bits" in found["large key"]


def test_settings_without_an_end_are_read_no_further():
    (line,) = said("from config.files import read_yaml", "read_yaml(path)", ["/dev/zero"])
    assert f"{SETTINGS:,} bytes" in line


def test_every_reader_of_settings_goes_through_that_door(tmp_path):
    bomb = bombs.settings()["lists of lists"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(bomb)
    assert settings_of(bomb) == {}
    with pytest.raises(UserError, match="no evaluation"):
        evaluation_folder(EvalConfig(runs=str(tmp_path), name="run"), suites.make("world"))
    sources = [p for p in SOURCES if p.parts[-2] != "dev"]
    loads = [path for path in sources if "yaml.safe_load" in path.read_text(encoding="utf-8")]
    assert loads == [ROOT / "config" / "files.py"]


# ---------------------------------------------------------------- packed data

READERS = {
    "store": ("from agents.store import read_entries", "read_entries(path)"),
    "records": ("from report.records import read_records", "read_records(Path(path))"),
    "bcb": ("from tasks.bcb import read", "read(Path(path))"),
    "llb-os": ("from tasks.llb_os import read", "read(Path(path))"),
    "json": ("from tasks.readers import read_json", "read_json(path)"),
    "tasks": ("from tasks.readers import records_of", "[*records_of(Path(path))]"),
    "stores": ("from commands.stores import _first_value", "_first_value(Path(path))"),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_unpacks_to_a_flood_is_refused_when_it_begins(tmp_path, reader):
    files = {"blanks": bombs.flood(), "one line": bombs.flood(b'{"id": "', b'"}\n')}
    imports, call = READERS[reader]
    paths = written(tmp_path, files, ".jsonl.gz")
    given = [paths["one line"]] if reader == "stores" else paths.values()
    lines = said(f"from pathlib import Path\n{imports}", call, given, 3 << 30)
    for line, path in zip(lines, given, strict=True):
        assert str(path) in line and "more than 400 times its size" in line


def test_data_that_repeats_itself_as_data_does_is_read(tmp_path):
    sentences = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 9
    text = sentences * (2 * FREE // len(sentences))  # as RULER's haystacks
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(text).encode()))
    assert len(text) > FREE and read_json(path) == text
    path = tmp_path / "zeros.gz"  # few, however well they are packed
    path.write_bytes(gzip.compress(bytes(FREE)))
    assert read_data(path) == bytes(FREE)


def test_a_file_of_tasks_in_any_packing_is_refused_when_it_floods(tmp_path):
    import pyarrow as pa

    paths = {}
    for ending, packing in (("zst", "zstd"), ("bz2", "bz2")):
        paths[ending] = tmp_path / f"a.jsonl.{ending}"
        with pa.output_stream(str(paths[ending]), compression=packing) as file:
            for _ in range(256):
                file.write(b" " * (1 << 20))
    lines = said(
        "from pathlib import Path\nfrom tasks.readers import records_of",
        "[*records_of(Path(path))]", paths.values(), 3 << 30,
    )  # fmt: skip
    for line in refused(lines, paths).values():
        assert "more than 400 times its size" in line


def test_gzip_in_gzip_is_a_sentence(tmp_path):
    paths = written(tmp_path, {"a": bombs.within_gzip(2000), "b": bombs.within_gzip(2)}, ".txt.gz")
    lines = said(
        "from pathlib import Path\nfrom tasks.forms import contents",
        "contents(Path(path).read_bytes(), path)", paths.values(),
    )  # fmt: skip
    for line in refused(lines, paths).values():
        assert "packed more than once" in line


def test_members_that_hold_no_record_do_not_each_cost_the_rest_of_the_file(tmp_path):
    """Without a line's end each of 4,000 members was read to the end of the file."""
    (tmp_path / "trajectories.jsonl.gz").write_bytes(gzip.compress(b"{}", mtime=0) * 4000)
    program = "from pathlib import Path\nimport gzip\nfrom report.records import step_records"
    count = (
        "n, read = [0], gzip._GzipReader._read_gzip_header\n"
        "def counted(self):\n    n[0] += 1\n    return read(self)\n"
        "gzip._GzipReader._read_gzip_header = counted"
    )
    call = "print([*step_records(Path(path), last=True)], n[0] < 2_000_000)"
    lines = said(f"{program}\n{count}", call, [tmp_path], LIGHT)
    assert lines == ["[] True", "taken"]


# ---------------------------------------------------------------- JSON


def test_json_without_a_ground_is_a_value_error():
    for text in (bombs.deep(), "[" * bombs.DEEP, '{"a":' * bombs.DEEP, "9" * 5000):
        with pytest.raises(ValueError):
            from_json(text)


def test_a_model_folder_whose_json_is_an_abyss_is_a_sentence(tmp_path):
    from agents.find import with_state
    from config.realmodels import adapter_config
    from models.setup import auto_dtype, stored_as

    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text(bombs.deep())
    assert auto_dtype(tmp_path, "cpu") == "float32" and stored_as(tmp_path) == ""
    with pytest.raises(UserError, match="nested too deep"):
        adapter_config(tmp_path)
    assert with_state.__doc__  # its file is read by `from_json` too


def test_a_run_whose_records_are_an_abyss_is_a_sentence(tmp_path):
    path = tmp_path / "transcripts.jsonl"
    path.write_text(bombs.record() + bombs.deep() + "\n")
    with pytest.raises(UserError, match=r"line 2 cannot be read: it is nested too deep"):
        read_records(path)


# ---------------------------------------------------------------- models


def test_a_gguf_file_that_declares_more_than_it_holds_is_a_sentence(tmp_path):
    paths = written(tmp_path, bombs.ggufs(), ".gguf")
    lines = said(
        "from pathlib import Path\nfrom models.convert import read_header",
        "read_header(Path(path))", paths.values(), HEAVY,
    )  # fmt: skip
    found = refused(lines, paths)
    assert all("damaged or cut-off GGUF file" in line for line in found.values())
    for name in ("tensors", "letters", "weights", "dimensions", "place"):
        assert "declares more than it holds" in found[name]


def test_a_gguf_file_of_more_values_than_any_vocabulary_has_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("models.convert.VALUES", 10)
    path = tmp_path / "a.gguf"
    path.write_bytes(bombs.ggufs()["layers"])
    with pytest.raises(UserError, match="it has more than 10 values"):
        read_header(path)


def test_a_config_that_declares_more_than_the_files_hold_is_a_sentence(tmp_path):
    from config.options import EMBEDDED

    config, paths = json.loads((EMBEDDED / "config.json").read_bytes()), {}
    for name, n in bombs.SIZES.items():
        paths[name] = tmp_path / name
        shutil.copytree(EMBEDDED, paths[name])
        (paths[name] / "config.json").write_text(json.dumps(config | {name: n}))
    call = "load_model(path, 'float32', 'cpu')"
    lines = said("from models.load import load_model", call, paths.values(), HEAVY, 60)
    for line in refused(lines, paths).values():
        assert "does not hold what its config.json declares" in line
    call = "geometry(path)"
    given = {"num_hidden_layers": paths["num_hidden_layers"]}
    (
        given["num_hidden_layers"] / "model.safetensors"
    ).unlink()  # as of one that is to be downloaded
    lines = said("from models.plan import geometry", call, given.values(), HEAVY, 60)
    assert "declares, 1,000,000,000 layers" in refused(lines, given)["num_hidden_layers"]


@pytest.fixture
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    from config.options import EMBEDDED

    return PreTrainedTokenizerFast.from_pretrained(EMBEDDED)


@pytest.mark.parametrize("kind", bombs.templates())
def test_a_chat_template_that_costs_much_is_a_sentence(tokenizer, kind):
    from tokens.codec import Codec

    tokenizer.chat_template = bombs.templates()[kind]
    with pytest.raises(UserError, match=r"chat template (takes|is longer).* than .*\.$"):
        Codec(tokenizer)


def test_a_chat_template_that_costs_much_for_one_message_is_a_sentence(tokenizer):
    from tokens.codec import Codec

    tokenizer.chat_template = bombs.for_systems_only()
    codec = Codec(tokenizer)
    codec.chat([("a", True)], system="short")
    with pytest.raises(UserError, match="chat template takes more"):
        codec.chat([("a", True)], system="long " * 300)


def test_every_chat_template_is_rendered_by_that_door():
    calls = [p for p in SOURCES if ".apply_chat_template(" in p.read_text(encoding="utf-8")]
    assert calls == [ROOT / "tokens" / "chat_templates.py"]


def test_a_value_without_an_end_is_read_no_further(tmp_path):
    paths = written(tmp_path, {"a line": "x", "an array": "[\n1,"}, ".jsonl")
    for path in paths.values():
        os.truncate(path, 1 << 33)
    lines = said(
        "from pathlib import Path\nfrom tasks import readers\nreaders.LARGEST = 100",
        "[*readers.records_of(Path(path))]", paths.values(), 3 << 30,
    )  # fmt: skip
    for line in refused(lines, paths).values():
        assert "a value of more than" in line


@pytest.mark.parametrize("text", ["x" * 101, '{"a": 1}\n' + "x" * 101, "[" + "1,\n" * 40 + "1]"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_value_that_is_too_large_to_be_held_is_refused(pack, text, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST", 100)
    monkeypatch.setattr(
        readers, "from_json", lambda _: {"question": "?", "context": ".", "answer": "."}
    )
    path = tmp_path / ("a.jsonl.gz" if pack is gzip.compress else "a.jsonl")
    path.write_bytes(pack(text.encode()))
    with pytest.raises(UserError, match="a value of more than"):
        [*readers.records_of(path)]
