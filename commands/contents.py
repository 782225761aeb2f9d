"""What a run reads beside its model, as digests: what goes on must go on with the same.

config.yaml, section contents:   setting -> digest of each file that it names, in order
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

from agents import find
from config.files import content, read_yaml
from config.options import RunConfig, SFTConfig, TrainConfig
from config.plugins import is_path
from memagent import Agent
from suites import Suite
from suites._conversations import is_conversations
from suites._training import GENERATED, parts_of
from tasks.hub import is_hub
from tasks.readers import is_function

Contents = dict[str, list[tuple[str, str]]]
"""setting -> (file, its digest and what else the setting says of it) of each file"""


def of_training(run: RunConfig, config: TrainConfig, agent: Agent) -> Contents:
    """Return what a training reads. Tasks that are generated, or of the hub at a commit, are no
    files."""
    also = config.also if isinstance(config, SFTConfig) else ()
    others = [entry.partition("=")[0] for entry in also]
    reward, _, function = run.reward.rpartition(":")
    adapter = Path(run.adapter, "adapter_model.safetensors") if run.adapter else ""
    read = {
        "run.data": [(*_file(source), weight) for source, weight in parts_of(run.data)],
        "run.validation": [_file(run.validation)],
        "run.reward": [(reward, function)],
        "run.agent": [(agent.name if is_path(agent.name) else "",)],
        "run.adapter": [(adapter,)],
        "sft.also": [(name if is_path(name) else "",) for name in others],
    }
    return _digests(read) | of_agents(agent, *map(find.find, others))


def of_stream(suite: Suite, agent: Agent) -> Contents:
    """Return what a stream reads beside its tasks, which are known by their own digests."""
    code = suite.name if is_path(suite.name) else ""
    return _digests({"stream.suite": [(code,)]}) | of_agents(agent)


def of_agents(agent: Agent, *others: type[Agent]) -> Contents:
    """Return the templates and the embedder that an agent and others with its settings read."""
    prompts = dict.fromkeys(chain.from_iterable(kind.prompts for kind in (agent, *others)))
    folder = agent.config.templates
    form, _, model = agent.embedder.partition(":")
    read = {
        "agent.templates": [(Path(folder, f"{name}.txt"),) for name in prompts if folder],
        "agent.embedder": [(Path(model).expanduser() if form == "hf" else "",)],
    }
    return _digests(read)


def _file(source: str) -> tuple[str, str]:
    """Return the file or folder of a source of tasks, "" if it has none, and which part of it."""
    if source in GENERATED or is_hub(source):
        return "", ""
    if is_function(source):
        path, _, part = source.rpartition(":")
        return path, part
    if is_conversations(source):
        path, _, part = source.partition(":")[2].partition("#")
        return path, part
    return source, ""


def _digests(read: Mapping[str, Iterable[tuple]]) -> Contents:
    return {
        setting: [(str(path), _digest(path, *rest)) for path, *rest in files]
        for setting, files in read.items()
        if any(path for path, *_ in files)
    }


def _digest(path: str | Path, *rest: object) -> str:
    return " ".join(str(part) for part in (content(path), *rest) if part)


def section(read: Contents) -> dict[str, dict[str, list[str]]]:
    """Return what config.yaml keeps of them, nothing where there are no files."""
    digests = {setting: [digest for _, digest in files] for setting, files in read.items()}
    return {"contents": digests} if digests else {}


def compare(folder: Path, now: Contents) -> tuple[list[str], set[str]]:
    """Return the files that have changed since a run began, and the settings whose files are the
    same, wherever they lie now. Of what the run has kept no digest nothing is known."""
    path = folder / "config.yaml"
    stored = read_yaml(path).get("contents") if path.exists() else {}
    stored = stored.items() if isinstance(stored, dict) else ()
    before = {setting: known for setting, known in stored if isinstance(known, list)}
    same = {s for s, files in now.items() if before.get(s) == [digest for _, digest in files]}
    changed = [
        file
        for setting, files in now.items()
        for (file, digest), known in zip(files, before.get(setting, ()), strict=False)
        if digest != known
    ]
    return list(dict.fromkeys(changed)), same
