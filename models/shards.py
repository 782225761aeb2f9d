"""Read the shards of torch.distributed.checkpoint, any of which a stranger may have written.

torch unpickles the metadata of a checkpoint, and each value that is no tensor, in a way that runs
what a pickle says. Here metadata may name the classes of `NAMED` alone, and such values are read as
tensors are: by torch's own unpickler of weights.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata

NAMED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, x in vars(torch).items() if isinstance(x, torch.dtype))},
}  # fmt: skip
"""What the metadata of a checkpoint may name, by module: all of it builds plain data."""
PATHS = {"PosixPath", "WindowsPath"}
UNREAD = {"torch.serialization": {"_get_layout"}, "pathlib": PATHS, "pathlib._local": PATHS}
"""What it has and nothing reads: layouts, and the folder's old path."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if name in UNREAD.get(module, ()):
            return lambda *_: None
        if name in NAMED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")


class Reader(FileSystemReader):
    """Read the shards in a folder, with metadata that build nothing but what `NAMED` holds."""

    def read_metadata(self) -> Metadata:
        """Return what the checkpoint holds. UnpicklingError, ValueError, ...: it is none."""
        with (self.path / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        for part in metadata.storage_data.values():
            if Path(part.relative_path).name != part.relative_path:
                raise ValueError(f"{part.relative_path} is not in its folder")
        return metadata


class Loading(DefaultLoadPlanner):
    """Load in place; what is no tensor is read by torch's unpickler of weights, too."""

    def load_bytes(self, read_item, value: io.BytesIO) -> None:
        ours = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), ours)
        ours.seek(0)
        super().load_bytes(read_item, ours)  # which unpickles whatever it is given
