"""Small files that cost much: one sentence each, in a process that may take little."""

import gzip
import io
import json
import os
import tracemalloc
from pathlib import Path

import bombs
import pytest
from child import in_child, refused, written
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.foreign import FREE, RATIO, check_parts, from_json, read_json, unpacked
from suites import bcb, llb_os
from tasks import readers

FLOOD = f"more than {RATIO} times its size"
READERS = {
    "json": lambda path: read_json(Path(path)),
    "bcb": bcb.read,
    "llb-os": llb_os.Systems,
    "tasks": lambda path: [*readers.records_of(Path(path))],
    "all tasks": readers.read_json,
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=3)
)


@settings(max_examples=30)
@given(VALUES)
def test_json_comes_back_packed_or_not(tmp_path, value):
    folder, text = tmp_path, json.dumps(value).encode()
    (folder / "a.json").write_bytes(text)
    (folder / "a.json.gz").write_bytes(gzip.compress(text))
    assert read_json(folder / "a.json") == read_json(folder / "a.json.gz") == value
    assert readers.read_json(folder / "a.json.gz") == value


@pytest.mark.parametrize("reader", READERS)
def test_what_unpacks_to_a_flood_is_refused_when_it_begins(tmp_path, reader):
    files = {"blanks": bombs.flood(), "one line": bombs.flood(b'{"id": "', b'"}\n')}
    paths = written(tmp_path, files, ".jsonl.gz")
    if reader == "json":  # it has a cap of its own, which comes first
        found = in_child(lambda: str(tried(paths["blanks"])))
        assert FLOOD in found or "MiB" in found
    else:
        refused(READERS[reader], paths, FLOOD, 2 << 30)


def test_unpacking_sets_no_more_aside_than_a_file_may_have():
    """gzip sets aside as much as it is asked for: the largest file would take its size twice."""
    packed, most = io.BytesIO(gzip.compress(b"Lima")), 4 * FREE
    tracemalloc.start()
    assert unpacked(packed, "a.gz").read(most) == b"Lima"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * most


def tried(path: Path) -> object:
    try:
        return read_json(path)
    except (UserError, ValueError) as error:
        return error


def test_data_that_repeats_itself_as_data_does_is_read():
    sentences = b"The grass is green. The sky is blue. The sun is yellow. Here we go. " * 9
    haystack = sentences * (FREE // len(sentences) + 999)  # as RULER's
    for text in (haystack, bytes(FREE)):  # few zeros, however well they are packed
        assert unpacked(io.BytesIO(gzip.compress(text)), "a.gz").read() == text
    with pytest.raises(UserError, match=FLOOD):
        unpacked(io.BytesIO(gzip.compress(bytes(2 * FREE))), "a.gz").read()
    plain = io.BytesIO(b"x")
    assert unpacked(plain, "a.json") is plain


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_of_more_bytes_than_its_kind_has_is_refused(tmp_path, pack):
    path = tmp_path / ("a.json.gz" if pack is gzip.compress else "a.json")
    path.write_bytes(pack(b'"' + b"x" * 98 + b'"'))
    assert len(read_json(path, 100)) == 98
    with pytest.raises(ValueError, match="MiB"):
        read_json(path, 99)


@pytest.mark.parametrize(
    "text",
    [bombs.deep(), "[" * bombs.DEEP, '{"a":' * bombs.DEEP, "9" * 5000, "{", "", b"\xff", "nul"],
)
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        from_json(text)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "vocab.txt", "merges.txt"])
def test_a_part_of_a_model_is_no_pipe_and_not_larger_than_one_can_be(tmp_path, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / name).touch()
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 1 << 33)
    check_parts(tmp_path.iterdir())
    os.truncate(tmp_path / name, (1 << 26) + 1)
    with pytest.raises(UserError, match=name):
        check_parts(tmp_path.iterdir())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe"):
        check_parts(tmp_path.iterdir())
