"""The commands. `python cli.py --help` lists them; settings are flags.

Holds: typer commands, nothing else: logic is in the modules that they call, imported only when
they run.
Read next: any room, by its charter (`agents/__init__.py` and so on).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

import suites
from agents import find
from commands.groups import add_groups
from config import options
from config.errors import UserError
from config.files import found_run, run_path
from config.flags import DRY_RUN, RESUME, AgentGroup, AgentName, Config, Preset, command
from config.options import (
    AskConfig,
    EvalConfig,
    GRPOConfig,
    PlanConfig,
    RunConfig,
    SFTConfig,
)
from config.presets import PRESETS
from config.realmodels import titled
from memagent import ReadConfig

# Before torch is loaded: its threads spin while they wait unless told otherwise (CONTRIBUTING.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if hasattr(sys.stdout, "reconfigure"):  # letters that a pipe cannot encode are no end of a reading
    sys.stdout.reconfigure(errors="replace")

app = typer.Typer(
    cls=AgentGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Language models that read more than they can hold.",
)


def _merged(config: Path | None, **given: dict) -> list[dict]:
    """Merge fields by section: of a config file, over them flags."""
    flags = {name: value for fields in given.values() for name, value in fields.items()}
    stored = find.stored_settings(config, flags) if config else {}
    return [stored.get(section, {}) | values for section, values in given.items()]


@command(
    app,
    RunConfig,
    GRPOConfig,
    ReadConfig,
    more=find.own_flags,
    in_force=find.in_training,
)
def train(
    config: Config = None,
    preset: Preset = "default",
    resume: Annotated[bool, typer.Option(help=RESUME)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)] = False,
    run: dict = {},
    grpo: dict = {},
    agent: dict = {},
):
    """Train a policy with GRPO; results go to RUNS/NAME."""
    from models.policy import check_rate

    run, grpo, agent = _merged(config, run=run, grpo=grpo, agent=agent)
    name = run.get("agent") or find.agent_of(preset, find.starting_point(run), run)
    if resume:
        run, grpo, agent = find.resumed(preset, run, grpo, agent)
        name = run.get("agent") or name
    grpo_config, reader = find.resolve(preset, find.starting_point(run), grpo, agent, name)
    run = find.preset_of(preset, name)["run"] | run | {"agent": reader.name}
    run_config = find.beginning(RunConfig(**run), reader, resume, typer.echo, dry_run)
    brought = {} if preset in PRESETS else find.preset_of(preset, name)["grpo"]
    if "lr" not in brought | grpo:
        check_rate(run_config, grpo_config)
    if dry_run:
        from commands.dryrun import dry_run as run_dry

        return run_dry(run_config, grpo_config, reader, typer.echo, resume)
    from commands.train import run_and_report

    run_and_report(run_config, grpo_config, reader, resume, typer.echo)


@command(
    app,
    RunConfig,
    SFTConfig,
    ReadConfig,
    more=find.own_flags,
    unused=options.UNUSED["sft"],
    in_force=find.in_force,
)
def sft(
    config: Config = None,
    resume: Annotated[bool, typer.Option(help=RESUME)] = False,
    run: dict = {},
    sft: dict = {},
    agent: dict = {},
):
    """Warm a policy up on what a careful reader would write; results go to RUNS/NAME."""
    from models.policy import check_rate

    run, sft, agent = _merged(config, run=run, sft=sft, agent=agent)
    if resume:
        run, sft, agent = find.resumed("default", run, sft, agent, "sft")
    model = find.starting_point(run)
    name = run.get("agent") or find.agent_of("default", model, run)
    reader = find.resolve("default", model, {}, agent, name)[1]
    run_config, sft_config = RunConfig(**run | {"agent": reader.name}), SFTConfig(**sft)
    run_config = find.beginning(run_config, reader, resume, typer.echo)
    if "lr" not in sft:
        check_rate(run_config, sft_config)
    from commands.train import run_and_report

    run_and_report(run_config, sft_config, reader, resume, typer.echo)


@command(app)
def export(
    run: Annotated[Path, typer.Argument(help="a run, by its name or its folder")],
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


@command(
    app,
    EvalConfig,
    ReadConfig,
    more=find.flags_of_evaluation,
    unused=find.unused_in_evaluation,
    in_force=find.in_evaluation,
)
def _eval(
    config: Config = None,
    preset: Preset = "default",
    evaluation: dict = {},
    agent: dict = {},
):
    """Evaluate agents: accuracy by length, n and a 95 % interval; goes on where it stopped."""
    evaluation, agent = _merged(config, eval=evaluation, agent=agent)
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


@command(app, AskConfig, ReadConfig, more=find.own_flags, in_force=find.in_reading)
def ask(
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
    settings: dict = {},
    agent: dict = {},
):
    """Answer a question about documents, showing the memory as it changes and its pages."""
    from commands.questions import How
    from commands.questions import run as run_ask
    from config.machine import check_here

    config, how = AskConfig(**settings), How(reader, preset, agent)
    check_here(config)
    run_ask(words or [], config, how)


@command(app)
def show(
    path: Annotated[Path, typer.Argument(help="a run, by name or folder, or a file of readings")],
    step: Annotated[int | None, typer.Option(help="only this training step")] = None,
    task: Annotated[str, typer.Option(help="only tasks whose id contains this")] = "",
    wrong: Annotated[bool, typer.Option("--wrong", help="only readings with reward 0")] = False,
    right: Annotated[bool, typer.Option("--right", help="only fully right ones")] = False,
    n: Annotated[int, typer.Option("--n", help="how many")] = 3,
    agent: Annotated[
        str, typer.Option(help="the file of an agent of your own, which then shows its turns")
    ] = "",
):
    """Print readings: each section, the memory before and after, the answer, the reward."""
    from commands.show import show as run_show

    run_show(found_run(path), step, task, wrong, n, agent, right)


@command(app, PlanConfig, GRPOConfig, ReadConfig, more=find.own_flags, in_force=find.in_training)
def plan(
    config: Config = None,
    name: AgentName = "",
    preset: Preset = "default",
    machine: dict = {},
    grpo: dict = {},
    agent: dict = {},
):
    """Say what fits on a GPU, how long it takes and how to train it, before any download."""
    from commands.plan import show as show_plan

    stored = find.stored_settings(config, grpo | agent | machine) if config else {}
    show_plan(name, preset, stored, (machine, grpo, agent), config)


@command(app)
def doctor():
    """Print what is installed, what of it can be used here, and what to do about the rest."""
    from commands.doctor import show as show_doctor

    if not show_doctor():
        raise typer.Exit(1)


@command(app)
def demo(
    agent: Annotated[
        str,
        typer.Option(
            help="a name or a file; one with a demo of its own is trained beside others, several "
            "seeds"
        ),
    ] = find.DEFAULT,
    short: Annotated[
        bool, typer.Option("--short", help="a few steps and questions: does everything run?")
    ] = False,
    seed: Annotated[int, typer.Option(help="of training and questions")] = 0,
    name: Annotated[
        str | None,
        typer.Option(
            help="name of the run, default: demo, or demo-AGENT; an earlier one is replaced"
        ),
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


add_groups(app)

if __name__ == "__main__":
    sys.exit(app())
