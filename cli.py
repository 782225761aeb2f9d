"""The commands. `python cli.py --help` lists them; every setting of a command is a flag, and its help is the setting's docstring.

Holds: typer commands, nothing else: logic is in the modules that they call, imported only when they run.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated

import typer

from agents import find
from config import files, options, presets
from config.errors import UserError, clean, clip
from config.options import BaseConfig, EvalConfig, GRPOConfig, RunConfig
from memagent import AgentConfig

# Before torch is loaded: its threads wait for work by spinning unless told otherwise, and then take the cores from whatever else
# runs. With two of them beside other work on two cores SmolLM2 took 32 to 69 s for what one thread does in 12, sleeping ones in 13.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Language models that read more than they can hold.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at, convert and build tasks.")
app.add_typer(data_app, name="data")


def command(parent: typer.Typer, *classes: type, name: str | None = None) -> Callable:
    """Register a command whose flags are its own parameters and every field of the given settings classes.

    The command is called with one dict per class: the fields that the user gave. A UserError becomes one sentence and exit code 2.
    """

    def register(function: Callable) -> Callable:
        own = list(inspect.signature(function).parameters.values())[: -len(classes) or None]
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = [p.replace(annotation=hints[p.name]) for p in own]
        taken = {p.name for p in own}
        for cls in classes:
            types, docs = typing.get_type_hints(cls), options.docs(cls)
            for field in fields(cls):
                if field.name in taken:
                    continue
                taken.add(field.name)
                default = field.default if field.default is not MISSING else ""
                parameters.append(
                    _flag(
                        field.name,
                        types[field.name],
                        default,
                        docs.get(field.name, ""),
                        cls.__name__,
                    )
                )

        @functools.wraps(function)
        def run(**values):
            given = []
            try:
                _whole(values)
                for cls in classes:
                    names = [f.name for f in fields(cls) if f.name not in {p.name for p in own}]
                    types = typing.get_type_hints(cls)
                    given.append(
                        {
                            n: _value(n, types[n], values[n])
                            for n in names
                            if values.get(n) is not None
                        }
                    )
                return function(*[values[p.name] for p in own], *given)
            except UserError as error:
                typer.echo(
                    f"memagent: {clip(clean(error), 2000)}", err=True
                )  # it may quote somebody else's file
                raise typer.Exit(2) from None
            except KeyboardInterrupt:
                typer.echo(
                    "memagent: stopped. Finished work is kept: the same command goes on (train with --resume).",
                    err=True,
                )
                raise typer.Exit(130) from None
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    why = "the disk is full; make room and call again, train with --resume: finished work is kept."
                elif error.errno in REFUSED and error.filename is not None:
                    why = f"{clip(clean(error.filename), 200)} cannot be used: {error.strerror}."
                else:
                    raise
                typer.echo(f"memagent: {why}", err=True)
                raise typer.Exit(2) from None

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # typer would look through it and see the dicts
        return parent.command(name=name or function.__name__.strip("_").replace("_", "-"))(run)

    return register


# how a system refuses a path, wherever in the program it is used first
REFUSED = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)


def _whole(values: dict) -> None:
    """UserError for an argument with a NUL byte: no path, name or text of a user's has one, and the system's calls end there."""
    for name, value in values.items():
        if isinstance(value, str | Path) and "\0" in str(value):
            raise UserError(
                f"{name.upper().replace('_', '-')} holds a NUL byte: {clip(str(value), 200)}."
            )


def _flag(name: str, kind: object, default: object, doc: str, panel: str) -> inspect.Parameter:
    """One field as an optional flag; several values are given as one text with commas."""
    several = typing.get_origin(kind) is tuple
    plain = (
        str if several else next((t for t in typing.get_args(kind) if t is not type(None)), kind)
    )
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    about = f"{doc} (default: {shown})" if shown not in ("", None) else doc
    option = typer.Option(
        f"--{name.replace('_', '-')}"
        + (f"/--no-{name.replace('_', '-')}" if plain is bool else ""),
        help=about,
        rich_help_panel=panel,
        show_default=False,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[plain | None, option],
    )


def _value(name: str, kind: object, value: object) -> object:
    if typing.get_origin(kind) is not tuple:
        return value
    item = typing.get_args(kind)[0]
    try:
        return tuple(_doubled([v if v == "..." else item(v) for v in str(value).split(",") if v]))
    except (ValueError, TypeError):
        raise UserError(
            f"--{name.replace('_', '-')} takes values of the form 4,8,16, not {value!r}."
        ) from None


def _doubled(values: list) -> list:
    """50,...,6400 is 50,100,200, .. as far as 6400: each number twice the one before."""
    out = []
    for value, following in zip(values, [*values[1:], None], strict=False):
        if value != "...":
            out.append(value)
            continue
        if not out or not isinstance(following, int) or not 0 < out[-1] < following:
            raise ValueError
        while out[-1] * 2 < following:
            out.append(out[-1] * 2)
    return out


def _merged(
    config: Path | None, compat: str = "", training: bool = False, **given: dict
) -> list[dict]:
    """Fields from a config file, over them those of --compat, the flags on top; one dict per section."""
    classes = {"run": RunConfig, "grpo": GRPOConfig, "agent": AgentConfig, "eval": EvalConfig}
    stored = files.load(config, **classes) if config else {}
    theirs = presets.compat_fields(compat, training)
    return [
        stored.get(section, {}) | theirs.get(section, {}) | values
        for section, values in given.items()
    ]


def _check_compat(compat: str, agents: Sequence[str]) -> None:
    if compat and "rememr1" not in agents:
        raise UserError(
            "--compat is about ReMemR1: give --agent rememr1 (eval: --agents) or --preset rememr1 too."
        )


Config = Annotated[
    Path | None, typer.Option(help="replay a run's config.yaml; other flags go on top")
]
RESUME = "go on with the run of this --name, with the settings it began with; --steps may be more"
Preset = Annotated[
    str, typer.Option(help="several settings at once: default, paper, vime, rememr1, demo")
]
Compat = Annotated[
    str,
    typer.Option(
        help="rememr1, where its paper and its code differ: every axis as the one or the other has it (paper, upstream); the axes are "
        "printed, and with upstream what of its code is not imitated"
    ),
]


@command(app, RunConfig, GRPOConfig, AgentConfig)
def train(
    config: Config = None,
    preset: Preset = "default",
    compat: Compat = "",
    resume: Annotated[bool, typer.Option(help=RESUME)] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="everything but the weights: the plan, two small steps, an export"
        ),
    ] = False,
    run: dict = {},
    grpo: dict = {},
    agent: dict = {},
):
    """Train a policy with GRPO; results lie in RUNS/NAME."""
    run, grpo, agent = _merged(config, compat, training=True, run=run, grpo=grpo, agent=agent)
    if resume:
        run, grpo, agent = find.resumed(preset, run, grpo, agent)
    reader = find.reader_of(preset, run.get("model") or options.EMBEDDED)
    run_config = RunConfig(**presets.preset_fields(preset)[2] | {"agent": reader} | run)
    _check_compat(compat, [run_config.agent])
    grpo_config, agent_config = find.resolve(
        preset, run_config.model or options.EMBEDDED, grpo, agent, run_config.agent
    )
    if run_config.agent == "rememr1":
        typer.echo(find.axes(agent_config, grpo_config, compat))
    if dry_run:
        from commands.dryrun import dry_run as run_dry

        return run_dry(run_config, grpo_config, agent_config, typer.echo, resume)
    from commands.train import TrainingProgress
    from commands.train import train as run_training
    from models.ranks import is_first
    from report.page import write_report
    from report.runlog import summary
    from report.summary import write_summary

    folder = run_training(
        run_config,
        grpo_config,
        agent_config,
        resume,
        callbacks=[TrainingProgress(grpo_config.steps)],
    )
    if not is_first():  # one of torchrun's other processes
        return
    if not (folder / "rows.jsonl").exists():  # a demo's folder has the numbers of its evaluation
        write_summary(folder / "summary.json", summary(folder))
        write_report(folder, title=f"Training {folder.name}")
    if not run_config.keep_checkpoints:
        typer.echo(f"Neither checkpoint nor policy was kept; see {folder / 'report.html'}.")
        return
    typer.echo(
        f"The policy is in {folder / 'model'}, its training in {folder / 'report.html'} and the files beside it."
    )


@command(app)
def export(
    run: Annotated[Path, typer.Argument(help="a run's folder")],
    step: Annotated[int | None, typer.Option(help="of which checkpoint; default: the last")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="of the checkpoint with the best validation")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="new folder; default: RUN/model, which is replaced. Adapters go to OUT-adapter, or to RUN/adapter"
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="of the weights: float32, bfloat16, or auto = as the base's")
    ] = "auto",
):
    """Write a checkpoint, of any number of ranks, as a model folder that transformers, peft and vLLM load."""
    from commands.export import export as run_export

    if dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype must be auto, float32 or bfloat16, not {dtype!r}.")
    folder = run_export(run, step, out, dtype, best)
    typer.echo(f"The policy is in {folder}.")


@command(app, EvalConfig, AgentConfig)
def _eval(
    config: Config = None,
    preset: Preset = "default",
    compat: Compat = "",
    evaluation: dict = {},
    agent: dict = {},
):
    """Evaluate agents on tasks: accuracy by length with n and a 95 % interval; goes on where an earlier call was stopped."""
    evaluation, agent = _merged(config, compat, eval=evaluation, agent=agent)
    from eval import run_suite

    eval_config = EvalConfig(**evaluation)
    model = find.policy(eval_config.model, eval_config.endpoint)
    if "agents" not in evaluation:
        eval_config = replace(
            eval_config, agents=(find.reader_of(preset, model), *EvalConfig().agents[1:])
        )
    agents = [name.partition("@")[0] for name in eval_config.agents]
    _check_compat(compat, agents)
    _, agent_config = find.resolve(
        preset, model, {}, {"max_sections": None} | agent
    )  # a preset's cap is one of training
    if "rememr1" in agents:
        typer.echo(find.axes(agent_config, compat=compat))
    folder = run_suite(eval_config, agent_config)
    typer.echo(f"Table and plots: {folder / 'report.html'}; numbers: {folder / 'summary.json'}.")


@command(app, AgentConfig)
def ask(
    file: Annotated[Path, typer.Argument(help="text to read")],
    question: Annotated[str, typer.Argument()],
    model: Annotated[
        str,
        typer.Option(help="folder or hub name of a causal LM; empty = the embedded base policy"),
    ] = "",
    reader: Annotated[
        str,
        typer.Option(
            "--agent",
            help="memagent, rememr1, full, bm25 or none; default: the preset's, else the model's",
        ),
    ] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option(help="run code that comes with the model")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="what answers: transformers or vllm")
    ] = "transformers",
    endpoint: Annotated[
        str,
        typer.Option(
            help="ask a server of OpenAI's protocol, such as http://127.0.0.1:8000/v1; --model is its tokenizer, without it lengths are estimated"
        ),
    ] = "",
    served_as: Annotated[str, typer.Option(help="endpoint: the model's name there")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="endpoint: send text, for servers that take no token ids")
    ] = False,
    preset: Preset = "default",
    compat: Compat = "",
    agent: dict = {},
):
    """Answer a question about a text, showing the memory as it changes."""
    EvalConfig(device=device, engine=engine)  # for its checks
    (agent,) = _merged(None, compat, agent=agent)
    policy = find.policy(model, endpoint)
    reader = reader or find.reader_of(preset, policy)
    _check_compat(compat, [reader])
    _, agent_config = find.resolve(preset, policy, {}, {"max_sections": None} | agent)
    if reader == "rememr1":
        typer.echo(find.axes(agent_config, compat=compat))
    from commands.ask import ask as run_ask

    run_ask(
        file,
        question,
        model,
        reader,
        temperature,
        device,
        trust_remote_code,
        agent_config,
        endpoint,
        served_as,
        chat,
        engine,
    )


@command(app)
def show(
    path: Annotated[Path, typer.Argument(help="a run's folder, or a file of trajectories")],
    step: Annotated[int | None, typer.Option(help="only this training step")] = None,
    task: Annotated[str, typer.Option(help="only tasks whose id contains this")] = "",
    wrong: Annotated[bool, typer.Option(help="only trajectories with reward 0")] = False,
    n: Annotated[int, typer.Option("--n", help="how many")] = 3,
):
    """Print trajectories: each section, the memory before and after, the answer, the reward."""
    from commands.show import show as run_show

    run_show(path, step, task, wrong, n)


@command(app, GRPOConfig, AgentConfig)
def plan(
    model: Annotated[
        str,
        typer.Option(
            help="a name such as Qwen/Qwen3-4B, or a folder; empty = the embedded base policy"
        ),
    ] = "",
    gpu_gib: Annotated[
        float | None, typer.Option(help="memory of one GPU; default: the card's")
    ] = None,
    devices: Annotated[int, typer.Option(help="GPUs")] = 1,
    card: Annotated[
        str,
        typer.Option(
            help="H200, H100, A100, L40S, RTX 4090, L4 or A10; default: by its memory an RTX 4090 (24 GiB), L40S (48), H100 (80, and where nothing is said) or H200 (141)"
        ),
    ] = "",
    sections: Annotated[int, typer.Option(help="of a document, for the seconds")] = 15,
    reader: Annotated[
        str, typer.Option("--agent", help="memagent or rememr1; default: the preset's")
    ] = "",
    preset: Preset = "default",
    grpo: dict = {},
    agent: dict = {},
):
    """Print what fits on a GPU, and how long a step takes, before anything is downloaded."""
    from agents.baselines import SECTIONWISE
    from commands.plan import show as show_plan

    reader = reader or find.reader_of(preset, model or options.EMBEDDED)
    grpo_config, agent_config = find.resolve(preset, model or options.EMBEDDED, grpo, agent, reader)
    if reader not in SECTIONWISE:
        raise UserError(
            f"A plan is for an agent that is trained, {' or '.join(SECTIONWISE)}, not {reader!r}."
        )
    show_plan(model, gpu_gib, devices, card, sections, grpo_config, agent_config, reader)


@command(app)
def doctor():
    """Print what is installed, what of it can be used here, and what to do about the rest."""
    from commands.doctor import show as show_doctor

    if not show_doctor():
        raise typer.Exit(1)


@command(app, BaseConfig)
def base(
    out: Annotated[Path, typer.Option(help="folder of the model; it must not be there yet")] = Path(
        "runs/base"
    ),
    config: dict = {},
):
    """Train the embedded base policy from nothing, on generated English."""
    from config.files import make_folder
    from config.terminal import BaseProgress
    from embedded.tiny import train_base

    if out.exists():
        raise UserError(f"{out} is there already: give another --out.")
    base_config = BaseConfig(**config)
    make_folder(out)
    with BaseProgress(base_config.steps + base_config.careless_steps) as log:
        train_base(base_config, out, log=log)
    typer.echo(f"The base policy is in {out}; use it with --model {out}.")


@command(app)
def demo(
    reader: Annotated[
        str,
        typer.Option(
            "--agent",
            help="memagent; rememr1 = beside memagent, on a task where looking back pays, several seeds",
        ),
    ] = "memagent",
    long: Annotated[bool, typer.Option("--long", help="more questions and more training")] = False,
    short: Annotated[
        bool, typer.Option("--short", help="a few steps and questions: does everything run?")
    ] = False,
    seed: Annotated[int, typer.Option(help="of training and questions")] = 0,
    name: Annotated[
        str | None,
        typer.Option(
            help="name of the run, default: demo, or demo-AGENT; an earlier demo of this name is replaced"
        ),
    ] = None,
    runs: Annotated[str, typer.Option(help="folder of all runs")] = "runs",
):
    """Train the embedded policy with GRPO, evaluate it beside the untrained one and others, write a report."""
    from commands.demo import run_demo, run_versus

    if reader not in ("memagent", "rememr1"):
        raise UserError(f"There is no demo of {reader!r}: choose memagent or rememr1.")
    if name is None:
        name = "demo" if reader == "memagent" else f"demo-{reader}"
    run = run_versus if reader == "rememr1" else run_demo
    run("long" if long else "short" if short else "default", seed, name, runs)


# ---------------------------------------------------------------- data

File = Annotated[Path, typer.Argument(help="a file of tasks in any known form")]
Form = Annotated[str, typer.Option(help="its form, if it is not seen from the file")]
Passages = Annotated[
    Path | None,
    typer.Option(help="official HotpotQA json that an eval set's passage numbers count in"),
]


@command(data_app)
def look(
    file: Annotated[str, typer.Argument(help="a file of tasks, or world = generated English")],
    form: Form = "",
    pool: Passages = None,
    n: Annotated[int, typer.Option("--n", help="how many tasks")] = 3,
    kind: Annotated[str, typer.Option(help="world: kind of question")] = "two_hop",
    sections: Annotated[int, typer.Option(help="world: sections of a document")] = 2,
):
    """Print the first tasks of a file and what there is in all."""
    from commands.taskfiles import look as run_look

    run_look(file, form or None, pool, n, kind, sections)


@command(data_app)
def convert(
    file: File,
    out: Path,
    to: Annotated[str, typer.Option(help="built, eval, memagent (parquet) or vime")],
    form: Form = "",
    pool: Passages = None,
):
    """Write tasks in another form."""
    from tasks import readers, writers

    tasks = readers.read(file, form or None, pool)
    writers.write(out, tasks, to)
    typer.echo(f"{len(tasks)} tasks are in {out}.")


@command(data_app)
def build(
    file: Annotated[Path, typer.Argument(help="questions with their own paragraphs")],
    out: Annotated[Path, typer.Argument(help="folder")],
    documents: Annotated[
        str, typer.Option(help="documents of a task, e.g. 50,200,800")
    ] = "50,200,800",
    n: Annotated[int, typer.Option("--n", help="questions")] = 128,
    extra: Annotated[Path | None, typer.Option(help="further passages as filler")] = None,
    split: Annotated[
        str, typer.Option(help="only questions of this split of the source: train or validation")
    ] = "",
    seed: Annotated[int, typer.Option()] = 0,
    compat_seed4: Annotated[
        bool,
        typer.Option(
            "--compat-seed4", help="upstream's constant shuffle: evidence always in the same places"
        ),
    ] = False,
    evidence_order: Annotated[
        str, typer.Option(help="of the evidence: any, forward or reverse (the last hop first)")
    ] = "any",
    min_distance: Annotated[
        float,
        typer.Option(
            help="between pieces of evidence: below 1 the share of the documents it exceeds, else documents"
        ),
    ] = 0.0,
):
    """Build RULER-HQA sets: the same questions among 50, 200, ... documents, one file OUT/hqa_N.jsonl.gz a length."""
    from commands.taskfiles import build as run_build
    from tasks.hqa import Evidence

    evidence = Evidence(evidence_order, min_distance)
    run_build(
        file,
        out,
        _value("documents", tuple[int, ...], documents),
        n,
        extra,
        split,
        seed,
        compat_seed4,
        evidence,
    )


@command(data_app)
def build_ruler(
    out: Annotated[Path, typer.Argument(help="folder")],
    tokens: Annotated[
        str, typer.Option(help="of a task, e.g. 4096,...,131072 (each twice the one before)")
    ] = "4096",
    tasks: Annotated[
        str,
        typer.Option(
            help="all, or some, such as niah_single_1,vt; empty = those whose sources are given"
        ),
    ] = "",
    tokenizer: Annotated[
        str,
        typer.Option(
            help="folder or hub name of the model whose tokens count; empty = the embedded policy's"
        ),
    ] = "",
    n: Annotated[int, typer.Option("--n", help="questions a task and length")] = 128,
    haystack: Annotated[str, typer.Option(help="essays: text files, or files of passages")] = "",
    squad: Annotated[str, typer.Option(help="file of SQuAD's form, for qa_1")] = "",
    questions: Annotated[
        str, typer.Option(help="HotpotQA's questions with their paragraphs, for qa_2")
    ] = "",
    extra: Annotated[str, typer.Option(help="further passages as filler")] = "",
    split: Annotated[str, typer.Option(help="only questions of this split of the source")] = "",
    seed: Annotated[int, typer.Option()] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option(help="run code that comes with the tokenizer")
    ] = False,
):
    """Build RULER's thirteen tasks at any length, offline: one file OUT/TASK_TOKENS.jsonl.gz each."""
    from commands.taskfiles import build_ruler as run_build

    many = {
        name: _value(name, tuple[str, ...], text)
        for name, text in (("ruler_tasks", tasks), ("haystack", haystack), ("filler", extra))
    }
    config = EvalConfig(
        suite="ruler",
        lengths=_value("tokens", tuple[int, ...], tokens),
        n=n,
        squad=squad,
        source_split=split,
        seed=seed,
        data=_value("questions", tuple[str, ...], questions) or ("world",),
        **many,
    )
    run_build(out, config, tokenizer, trust_remote_code)


@command(data_app, name="filter")
def filter_questions(
    file: Annotated[Path, typer.Argument(help="questions with their own paragraphs")],
    out: Annotated[Path, typer.Argument(help="set without the known ones")],
    model: Annotated[str, typer.Option(help="folder or hub name of the model that is asked")] = "",
    samples: Annotated[int, typer.Option(help="answers a question; one right one is enough")] = 2,
    temperature: Annotated[float, typer.Option()] = 1.0,
    top_p: Annotated[float, typer.Option()] = 0.7,
    answer_tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 512,
    rule: Annotated[
        str,
        typer.Option(
            help="contains = dropped too if an accepted answer stands anywhere in the response, whatever the case, inside a word too (as MemAgent's filter.py looks); right = only if the box is right"
        ),
    ] = "contains",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    engine: Annotated[
        str, typer.Option(help="what answers: transformers or vllm")
    ] = "transformers",
):
    """Drop questions that a model answers without the document; says their share. Goes on where an earlier call was stopped."""
    from commands.taskfiles import filter_questions as run_filter

    EvalConfig(device=device, engine=engine, samples=samples, top_p=top_p)  # for its checks
    run_filter(file, out, model, samples, temperature, top_p, answer_tokens, rule, device, engine)


@command(data_app)
def get(
    name: Annotated[
        str,
        typer.Argument(
            help="hotpotqa, 2wiki, musique, memagent-train, memagent-eval or ruler-assets"
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder; files come to OUT/NAME")] = Path("data"),
    revision: Annotated[str, typer.Option(help="another revision than the pinned one")] = "",
):
    """Download a data set at a pinned revision, checked; a stopped download goes on."""
    from tasks.downloads import get as run_get

    run_get(name, out, revision, typer.echo)


if __name__ == "__main__":
    sys.exit(app())
