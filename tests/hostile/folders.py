"""Model folders and data sets that cost much: a tokenizer, a card, a table, weights, a pipe."""

import json
import os
import shutil
import struct
from pathlib import Path

from config.options import EMBEDDED


def model(folder: Path, **tokenizer: object) -> Path:
    """Write the embedded policy's folder with other parts of tokenizer.json; return its path."""
    shutil.copytree(EMBEDDED, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer))
    return folder


def _replaced(what: dict, by: str) -> dict:
    return {"type": "Replace", "pattern": what, "content": by}


def _doubled(text: str) -> dict:
    return {"type": "Sequence", "normalizers": [_replaced({"String": text}, text * 2)] * 34}


def _split(pattern: str) -> dict:
    parts = json.loads((EMBEDDED / "tokenizer.json").read_text())["pre_tokenizer"]
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, parts]}


_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OF_MODELS = {  # how published ones cut a text into words
    "Llama 3": _CASED + r"\p{N}{1,3}" + _REST,
    "Qwen2": _CASED + r"\p{N}" + _REST,
}


def tokenizers() -> dict[str, dict]:
    """Parts of tokenizer.json that take long or grow with ordinary texts."""
    decoder = json.loads((EMBEDDED / "tokenizer.json").read_text())["decoder"]
    growing = {"type": "Sequence", "decoders": [decoder, *_doubled("e")["normalizers"]]}
    return {
        **{f"replaced {pattern}": {"normalizer": _replaced({"Regex": pattern}, "")}
           for pattern in ("(a+)+$", r"(\w+\s?)*(?!\w|\W)(?<!\n)b", r"(\d+\d+)+z")},
        **{f"split {pattern}": {"pre_tokenizer": _split(pattern)}
           for pattern in ("(x+x+)+y", "(é+é+)+z", r"\w+\w+\w+(?![\s\S])b", r"(.*a){20}z")},
        **{f"doubled {text}": {"normalizer": _doubled(text)} for text in ("e", "\u2014", "Boris")},
        "doubled when decoded": {"decoder": growing},
    }  # fmt: skip


def tables(folder: Path) -> dict[str, Path]:
    """Parquet files of a few KB: one large value, one value in many rows, rows without an end."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    n, one = 100_000, pa.array(["q"])
    zeros = pa.array([0], pa.int32()).take(pa.array([0] * n))
    short, large = (
        pa.DictionaryArray.from_arrays(zeros, pa.array([value]))
        for value in ("q", "x " * (1 << 23))
    )
    columns = {
        "value": [one, one, pa.array(["x " * (1 << 24)])],
        "references": [short, short, large],
        "rows": [short, short, short],
    }
    for name, arrays in columns.items():
        table = pa.table(arrays, ["question", "answer", "context"])
        path = folder / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd", row_group_size=n)
    return {name: folder / f"{name}.parquet" for name in columns}


def weights(folder: Path) -> dict[str, Path]:
    """Model folders whose safetensors files declare more than they hold."""
    raw = (EMBEDDED / "model.safetensors").read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + n])
    first, second = [name for name in header if name != "__metadata__"][:2]

    def file(**tensor: object) -> bytes:
        changed = json.dumps(header | {second: header[second] | tensor}).encode()
        return struct.pack("<Q", len(changed)) + changed + raw[8 + n :]

    contents = {
        "length": struct.pack("<Q", 1 << 40) + raw[8:],
        "shape": file(shape=[10**12, 10**12]),
        "offsets": file(data_offsets=[0, 10**15]),
        "overlap": file(**header[first]),
    }
    paths = {}
    for name, content in contents.items():
        paths[name] = model(folder / name)
        (paths[name] / "model.safetensors").write_bytes(content)
    return paths


def pipes(folder: Path) -> dict[str, Path]:
    """Model folders with a pipe, or a device, in the place of a file."""
    paths = {}
    for name in ("agent.yaml", "config.json", "generation_config.json", "tokenizer_config.json"):
        paths[name] = model(folder / name)
        (paths[name] / name).unlink(missing_ok=True)
        os.mkfifo(paths[name] / name)
    paths["device"] = model(folder / "device")
    (paths["device"] / "agent.yaml").unlink()
    (paths["device"] / "agent.yaml").symlink_to("/dev/zero")
    return paths
