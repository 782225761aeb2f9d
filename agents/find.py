"""Find an agent by name or by path, and resolve the settings that it reads with.

    defaults, or what a model says of itself < preset or the file of a run < flags

What a file that came with data may not name is in `reach`. No torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import suites
from config import files
from config.errors import UserError, hide_keys, meant
from config.flags import Given
from config.foreign import read_json
from config.options import (
    EMBEDDED,
    PRESETS,
    READER,
    AskConfig,
    EvalConfig,
    GRPOConfig,
    RunConfig,
    SFTConfig,
    TrainConfig,
    without_url,
)
from config.plugins import Finder, is_path
from config.realmodels import check_model, is_adapter, settings_folder, titled
from config.settings import hints_of
from memagent import Agent

# files of this folder that hold no agent
SHARED = {"bank", "calls", "demos", "find", "likeness", "pay", "retrieval", "rewards", "search",
          "store", "tools"}  # fmt: skip
# agent -> the file of this folder that holds several
BASELINES = dict.fromkeys(("bm25", "full", "none", "oracle"), "baselines")
BASELINES |= dict.fromkeys(("evidence", "facts", "idle", "newest"), "store_baselines")
DEFAULT = "memagent"
FIRST = "bm25"  # which answers first in `ask`, from the sections that match the question best
STATE = "agent_state.json"  # in a model folder: what `Agent.state` returned in training

# what `train --resume` may change of a run: nothing that its steps so far depend on. How much is
# computed at once may change, for a run that ran out of memory; sums are then rounded in another
# order. The URL of a served model may change whatever the setting, its name may not (`changed`)
MAY_CHANGE = {
    "run": {"name", "runs", "save_every", "keep_checkpoints", "keep_trajectories", "device",
            "kv_gib", "sleep", "devices", "num_nodes", "logger"},
    "grpo": {"steps", "micro_tokens", "in_flight", "recompute", "max_mismatch"},
    "sft": {"steps", "micro_tokens", "in_flight", "recompute"},
    "agent": set(),
}  # fmt: skip

# ---------------------------------------------------------------- agents and presets

FINDER = Finder(Agent, "agents", "AGENT", SHARED, method="run", modules=BASELINES)
names, known = FINDER.names, FINDER.known


@cache
def find(name: str) -> type[Agent]:
    """Return the agent `name`: of agents/NAME.py, or of any file by its path.

    A file holds one subclass of `Agent`, or several and one of them as AGENT; or one generator
    function (agent, task), which becomes the `run` of an agent. UserError if it is not there or
    holds no agent.
    """
    return FINDER.find(name)


def learner() -> type[Agent]:
    """Return the agent that a stream teaches: it has a bank."""
    return find("memrl")


def make(name: str, settings: Mapping[str, object]) -> Agent:
    """Make an agent from settings of which it takes its own.

    UserError: they do not fit, or it `needs_embedder` and they name none.
    """
    agent = find(name)(_config(find(name), settings))
    if agent.needs_embedder and not agent.embedder:
        raise UserError(f"The agent {agent.label} compares meanings: name an --embedder.")
    return agent


def _config(kind: type[Agent], settings: Mapping[str, object]) -> object:
    """Return the settings of an agent, of these its own."""
    return kind.Config(**{n: value for n, value in settings.items() if n in hints_of(kind.Config)})


def agent_hints(fields: Iterable[str], agents: Iterable[str] = ()) -> dict[str, object]:
    """Map settings of agents to their types: those of `agents` and of all that are loaded, then of
    others until the `fields` are known."""

    def hints(kinds: Iterable[type[Agent]]) -> dict[str, object]:
        return {name: hint for kind in kinds for name, hint in hints_of(kind.Config).items()}

    found = hints([Agent, *filter(None, map(known, agents)), *FINDER.loaded.values()])
    for name in reversed(names()):  # some of the first ones import what takes its time
        if not {*fields} - found.keys():
            break
        found = hints([find(name)]) | found
    return found


def presets() -> dict[str, dict[str, dict]]:
    """Map every preset, of no agent or of one, to its sections; an agent's own says which agent
    that is."""
    found = dict(PRESETS)
    for name in names():
        for preset, sections in find(name).presets.items():
            run = {"agent": name} if name != DEFAULT else {}
            found[preset] = dict(sections) | {"run": run | sections.get("run", {})}
    return found


def preset_of(name: str, agent: str = "") -> dict[str, dict]:
    """Return a preset's fields by section (run, grpo, agent); `agent`'s own presets go first."""
    choices = PRESETS if name in PRESETS else presets()
    choices = choices | (find(agent).presets if agent and is_path(agent) else {})
    if name not in choices:
        near = meant(name, choices)
        raise UserError(f"Unknown preset {name!r}.{near} Choose one of {', '.join(choices)}.")
    return {"run": {}, "grpo": {}, "agent": {}} | choices[name]


# ---------------------------------------------------------------- settings in files

PROGRAMS = {"reward", "logger", "interpreter"}  # settings whose every value is code
AGENTS = {"agent", "agents", "also"}


def reach(fields: Mapping, loaded: bool = False) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the settings that have code run, or an address asked: name, flag, value, whether it is
    code.

    loaded: with the agents of files that this process has loaded already.
    """
    for name, value in fields.items():
        values = value if isinstance(value, tuple) else (value,)
        flag = f"--{name.replace('_', '-')} {shlex.quote(','.join(map(str, values)))}"
        for text in [str(v) for v in values if v and isinstance(v, str | bool)]:
            # as an agent's name is cut where it is used: my_agent.py@untrained, my_agent.py=0.1
            agents = {text, *(text.partition(sign)[0] for sign in "@=")} if name in AGENTS else ()
            code = name in PROGRAMS or name == "trust_remote_code" or ".py:" in text
            code = code or (name == "suite" and _is_strange(text, suites.known, loaded))
            if code or any(_is_strange(agent, known, loaded) for agent in agents):
                yield name, "--trust-remote-code" if value is True else flag, text, True
            if "://" in text or name == "bank":
                yield name, flag, text, False


def _is_strange(name: str, known: Callable, loaded: bool = False) -> bool:
    """Whether a file is named, of those that this process has not loaded already."""
    return is_path(name) and (loaded or not known(name))


def check_reach(path: Path, fields: Mapping, given: Mapping[str, object]) -> None:
    """Refuse settings of a file that would have code run, or an address asked.

    The file may have come with data: what it says of these counts for nothing. given: the flags of
    this call, which go before the file; with trust_remote_code among them its code may run.
    """
    trusted = given.get("trust_remote_code", False) is not False
    for name, flag, text, code in reach(fields):
        if name in given or (code and trusted):
            continue
        if code:
            what, never = "code", "of it is run"
            flag = " or ".join(dict.fromkeys([flag, "--trust-remote-code"]))
        else:
            what, never = "a file to write to" if name == "bank" else "an address", "goes there"
        message = (
            f"{path} names {what}, {name} {text}, and may have come with data: nothing {never} "
            f"unless you give {flag}."
        )
        raise UserError(hide_keys(message))


def stored_settings(path: Path, given: Mapping[str, object] | None = {}) -> dict[str, dict]:
    """Read a config.yaml or agent.yaml: section -> fields.

    given: the flags of this call, see `check_reach`; None: the caller uses nothing that it refuses.
    No file of an agent or a suite is loaded for it: of one that was not loaded before, only those
    settings are returned that others have too.
    """
    raw = files.read_yaml(path)
    for name in ("weights", "contents"):  # no settings: of an evaluation (report/evaluation.py),
        raw.pop(name, None)  # and of what a run reads (commands/contents.py)
    sections = {name: values for name, values in raw.items() if isinstance(values, dict)}
    sections.get("ask", {}).pop("best", None)  # of an older model folder: nobody reads it
    evaluation, agents = sections.get("eval", {}), [sections.get("run", {}).get("agent")]
    agents += several if isinstance(several := evaluation.get("agents"), list) else []
    agents = [str(agent).partition("@")[0] for agent in agents]
    hints = {"agent": agent_hints(sections.get("agent", {}), agents), "eval": {}}
    if evaluation:
        hints["eval"] = suites.hints() | hints_of(EvalConfig)
    strange = {
        "agent": any(_is_strange(agent, known) for agent in agents),
        "eval": _is_strange(str(evaluation.get("suite")), suites.known),
    }
    for section in [name for name in sections if strange.get(name)]:
        raw[section] = {n: v for n, v in sections[section].items() if n in hints[section]}
    kinds = dict(run=RunConfig, grpo=GRPOConfig, sft=SFTConfig, ask=AskConfig)
    settings = files.typed(raw, path, **kinds, **hints)
    if "eval" in settings:
        settings["eval"] = suites.stored(settings["eval"])
    if given is not None:
        for fields in settings.values():  # a run goes on with the bank that it began with
            check_reach(path, fields, {"bank": ""} | given)
    return settings


def begun(folder: Path, given: Mapping[str, object] | None = {}) -> dict[str, dict]:
    """Read the settings that a run began with, by section; {} if it was stopped before they were
    written. given: see `stored_settings`."""
    if not (folder / "config.yaml").exists() and not any((folder / "checkpoints").glob("step-*")):
        return {}
    return stored_settings(folder / "config.yaml", given)


def training_of(stored: dict[str, dict]) -> TrainConfig:
    """Return how a stored run was trained: by GRPO or from demonstrations."""
    return SFTConfig(**stored["sft"]) if "sft" in stored else GRPOConfig(**stored["grpo"])


def section_of(training: TrainConfig) -> str:
    """Return the section of config.yaml that holds these settings."""
    return "sft" if isinstance(training, SFTConfig) else "grpo"


def changed(stored: dict, **now: object) -> list[str]:
    """List the settings in which a run differs from those now and may not, as "grpo.lr 0.1, not
    0.2"."""
    found = []
    for section, config in now.items():
        values = asdict(config)
        for name, before in stored.get(section, {}).items():
            free = name in MAY_CHANGE[section] or name not in values
            if not free and without_url(before) != without_url(values[name]):
                found.append(f"{section}.{name} {before!r}, not {values[name]!r}")
    return found


# ---------------------------------------------------------------- what a model says of reading


def _of_folder(model: str | Path | None) -> tuple[Path, dict[str, dict]]:
    """Return the agent.yaml of a model, and its sections; none without a model or a file."""
    path = settings_folder(model or "") / "agent.yaml"
    return path, stored_settings(path, None) if model and path.exists() else {}


def of_model(model: str | Path | None) -> dict:
    """Return the settings of agents in a model folder's agent.yaml; {} without one, or for None.

    A cap on sections is never taken from there (only a flag or a preset cuts documents);
    `templates` is relative to the model's folder, and inside it, as its files are.
    """
    path, sections = _of_folder(model)
    settings = dict(sections.get("agent", {}))
    settings.pop("max_sections", None)
    if templates := settings.get("templates"):
        folder, root = path.parent / templates, Path(os.path.realpath(path.parent))
        settings["templates"] = str(folder)
        if root.parent.name == "snapshots":  # of the hub's cache, whose files are links to blobs
            root = root.parent.parent
        places = map(os.path.realpath, (folder, *folder.glob("*.txt")))
        if not all(Path(place).is_relative_to(root) for place in places):
            raise UserError(f"{path} names templates outside the model's folder, {templates}.")
    return settings


def trained_agent(
    model: str | Path | None, given: Mapping[str, object] = {}, flag: str = "agent"
) -> str:
    """Return the agent that a model was trained with, "" if its folder does not say.

    given: the flags of this call, see `check_reach`. flag: the one that names agents here.
    """
    path, sections = _of_folder(model)
    agent = sections.get("run", {}).get("agent", "")
    check_reach(path, {flag: agent}, given)
    return agent


def model_or_default(model: str, endpoint: object = ()) -> str | Path | None:
    """Return the model whose folder gives defaults: the one named, else the embedded one; None for
    an endpoint. UserError as of `check_model`."""
    check_model(model, weights=not endpoint, tokenizer=True)
    return model or (None if endpoint else EMBEDDED)


def starting_point(run: dict) -> str | Path:
    """Return the model or, where they say how they read, the adapters that a training goes on from:
    agents take their settings from there. UserError as of `check_model`."""
    model, adapter = run.get("model", ""), run.get("adapter", "")
    for each in (model, adapter):
        check_model(each, tokenizer=True)
    return adapter if adapter and _of_folder(adapter)[1] else model or EMBEDDED


def agent_of(
    preset: str, model: str | Path | None, given: Mapping[str, object] = {}, flag: str = "agent"
) -> str:
    """Return the default agent: the preset's, else the model's, else memagent."""
    return preset_of(preset)["run"].get("agent") or trained_agent(model, given, flag) or DEFAULT


# ---------------------------------------------------------------- settings resolved


def resolve(
    preset: str,
    model: str | Path | None,
    grpo: dict,
    settings: dict,
    agent: str = "",
    frozen: bool = False,
) -> tuple[GRPOConfig, Agent]:
    """Resolve settings: below, what the model's agent.yaml says; over it the preset, the agent's
    `training`, and the fields that are given.

    agent: "" = the preset's, the model's or memagent. frozen: it answers and is not trained, so
    that a bank of the model's folder stands for the file that it names.
    """
    agent = agent or agent_of(preset, model)
    if unknown := settings.keys() - agent_hints(settings, [agent]).keys():
        raise UserError(f"No agent has a setting {min(unknown)!r}: leave it out.")
    fields, theirs, path = preset_of(preset, agent), of_model(model), _of_folder(model)[0]
    settings = fields["agent"] | settings
    used = {name: theirs[name] for name in hints_of(find(agent).Config) if name in theirs}
    kept = frozen and model and (path.parent / STATE).exists()
    check_reach(path, used, settings | ({"bank": ""} if kept else {}))
    training = GRPOConfig(**fields["grpo"] | find(agent).training | grpo)
    return training, make(agent, theirs | settings)


def resumed(
    preset: str, run: dict, training: dict, agent: dict, section: str = "grpo"
) -> list[dict]:
    """Return the fields to go on with a run: those it began with, below the preset's and those
    given now.

    section: of the settings of training, grpo or sft.
    """
    if not run.get("name"):
        raise UserError("--resume goes on with a run: say which by --name.")
    run = {"runs": RunConfig().runs} | run  # where it lies now: it may have been moved
    stored = begun(files.run_path(run["runs"], run["name"]), run | training | agent)
    if stored and section not in stored:
        raise UserError(
            f"The run {run['name']} was not trained by this command: go on by the other."
        )
    fields = preset_of(preset, run.get("agent", ""))
    given = {"run": run, section: training, "agent": agent}
    return [stored.get(name, {}) | fields.get(name, {}) | values for name, values in given.items()]


def with_state(agent: Agent, model: str | Path | None) -> Agent:
    """Give an agent that is asked, and no longer taught, the state that a model folder holds of it,
    where it does. One that outlives its tasks is told by its `freeze`, if it has such."""
    agent.freeze()
    path, sections = _of_folder(model)
    state = path.parent / STATE
    if model and state.exists() and sections.get("run", {}).get("agent") == agent.name:
        try:
            agent.load_state(read_json(state))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"The agent's state {state} cannot be read: {error}.") from error
    return agent


def settings_of(agents: Iterable[Agent]) -> dict:
    """Merge the settings of several agents, to write them down."""
    return {name: value for agent in agents for name, value in asdict(agent.config).items()}


def altered(agents: Mapping[str, Agent], evaluation: EvalConfig) -> dict[str, str]:
    """Say of agents which settings are not those that they have with the model of an evaluation.

    name -> such as "top_k 2"; no entry for an agent whose settings are all as they would be.
    """
    usual, found = of_model(model_or_default(evaluation.model, evaluation.endpoint)), {}
    for name, agent in agents.items():
        plain = asdict(_config(type(agent), usual))
        parts = [
            f"{field} {str(without_url(value)).rpartition('/')[2] or 'none'}"
            for field, value in asdict(agent.config).items()
            if value != plain[field]
        ]
        if parts:
            found[name] = ", ".join(parts)
    return found


# ---------------------------------------------------------------- a training begins, or has ended


QUICK = 1 << 24  # bytes of a file whose first record is read before torch is loaded


def beginning(
    run: RunConfig, agent: Agent, resume: bool, say: Callable[[str], object], dry: bool = False
) -> RunConfig:
    """Return the settings of a training that can begin, after saying what it will do.

    UserError, before torch is loaded: its folder is another run's, its data is not there, or this
    machine lacks the device or the model (unless it is a `dry` run).
    """
    from config.machine import check_here
    from suites._training import check_sources, parts_of
    from tasks import readers

    first = os.environ.get("RANK", "0") == "0"  # torchrun's others may come later
    if run.name and first:
        files.check_folder(files.run_path(run.runs, run.name), resume)
    sources = [*(source for source, _ in parts_of(run.data)), run.validation]
    if not dry:
        check_sources([*sources, *run.filler])
    for path in map(Path, sources):
        if files.is_file(path) and path.stat().st_size < QUICK:
            next(readers.records_of(path), None)
    if first:
        if "RANK" not in os.environ:  # else each rank would have a name of its own
            run = replace(run, name=files.name_or_now(run.name))
        where = files.run_path(run.runs, run.name) if run.name else Path(run.runs)
        then = f"It goes on in {where}." if resume else f"Results go to {where}."
        say(f"{agent.label} learns from {run.data}, beginning with {titled(run.model)}.")
        say("It is a dry run, which leaves nothing." if dry else then)
    if not dry:
        check_here(run)
    return run


def check_trained(folder: Path, step: int | None = None, out: Path | None = None) -> None:
    """Raise a UserError for a folder that is no run with a checkpoint (of this step), and for
    places of an export that are taken."""
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    steps = sorted(int(name) for name in names if name.isdigit())
    if not steps or "run" not in begun(folder, None):
        near = "" if folder.exists() else files.near_run(folder, "metrics.csv")
        near = near or " Name the folder of a `train` or `sft`."
        raise UserError(f"{folder} is no run with a checkpoint.{near}")
    if step is not None and step not in steps:
        kept = ", ".join(map(str, steps))
        raise UserError(
            f"{folder} keeps no checkpoint of step {step}, only of {kept} (--keep-checkpoints)."
        )
    places = (out, out.absolute().with_name(f"{out.absolute().name}-adapter")) if out else ()
    if taken := next((place for place in places if place.exists()), None):
        raise UserError(f"{taken} is there already: give another --out.")


# ---------------------------------------------------------------- flags


def _begun_by(given: Given) -> tuple[Path, dict[str, dict]]:
    """Return the file of settings that a command line goes on from, and its sections: its
    --config, or of the run that is resumed."""
    if "resume" in given and "name" in given:
        folder = files.run_path(given.get("runs", RunConfig().runs), given["name"])
        return folder / "config.yaml", begun(folder, None)
    path = Path(given.get("config", ""))
    return path, stored_settings(path, None) if "config" in given else {}


def agents_of(given: Given, flag: str = "agent") -> list[str]:
    """Return the agents that a command line is about: those that it names, else those of its
    --config, of the run that is resumed, of the --preset or the --model."""
    path, stored = _begun_by(given)
    begun_with = stored.get("eval", {}).get("agents") or stored.get("run", {}).get("agent")
    if "agent" in given or "agents" in given:
        found = f"{given.get('agent', '')},{given.get('agents', '')}".split(",")
    elif begun_with:
        found = (begun_with,) if isinstance(begun_with, str) else begun_with
        check_reach(path, {flag: found}, given)
    else:
        named, endpoint = given.get("model", ""), given.get("endpoint", ())
        # a plan needs no weights: other commands ask for them
        check_model(named, weights=bool(named) and is_adapter(named))
        model = named or (None if endpoint else EMBEDDED)
        found = [agent_of(given.get("preset", "default"), model, given, flag)]
    return [plain for name in found if (plain := name.partition("@")[0])]


def classes(given: Given, flag: str = "agent") -> list[type]:
    """Return the settings classes of `agents_of`, whose fields are flags too."""
    return [find(name).Config for name in agents_of(given, flag)]


def classes_of_reading(given: Given) -> list[type]:
    """Return the settings classes of who reads, and of who answers first if no agent is named."""
    first = [] if {"agent", "preset"} & given.keys() else [find(FIRST).Config]
    return classes(given) + first


def in_force(
    given: Given, flag: str = "agent", usual: str | Path = EMBEDDED, training: bool = False
) -> dict[str, object]:
    """Return the values that the settings of a command line have where no flag says otherwise.

    flag: the one that names agents. usual: the model that answers where none is named. training:
    whether those of GRPO are among them.
    """
    agents = agents_of(given, flag)
    stored = {n: v for values in _begun_by(given)[1].values() for n, v in values.items()}
    run = stored | given
    model = run.get("model") or (None if run.get("endpoint") else usual)
    preset, kind = preset_of(given.get("preset", "default"), agents[0]), find(agents[0])
    fields = preset["run"] | {flag: agents[0]}
    if flag == "agents":
        fields[flag] = tuple(dict.fromkeys((*agents, *EvalConfig().agents[1:])))
    if training:
        fields |= asdict(GRPOConfig(**preset["grpo"] | kind.training))
    return fields | asdict(_config(kind, of_model(model) | preset["agent"])) | stored


in_reading = partial(in_force, usual=READER)


def classes_of_evaluation(given: Given) -> list[type]:
    """Return the settings classes of the agents that an evaluation asks and of its suite, if one is
    named by --suite or --data or in the --config."""
    path, stored = _begun_by(given)
    if "eval" not in stored and {"grpo", "sft"} & stored.keys():
        raise UserError(f"{path} is of a training: evaluate what it has left, --model RUN/model.")
    evaluation = stored.get("eval", {})
    check_reach(path, {"suite": evaluation.get("suite", "")}, given)
    data = {"data": tuple(given["data"].split(","))} if "data" in given else {}
    evaluation = evaluation | given | data
    usual = () if "agents" in given else EvalConfig().agents[1:]
    named = {"suite", "data"} & evaluation.keys()
    suite = [suites.find(suites.name_of(evaluation))] if named else []
    return [*classes(given, "agents"), *(find(name).Config for name in usual), *suite]
