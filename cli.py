"""The commands. `python cli.py --help` lists them; every setting of a command is a flag.

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

from agents import find
from config import options
from config.errors import UserError
from config.flags import CHOICE, AgentGroup, command, value_of
from config.options import BaseConfig, Device, EngineName, EvalConfig, GRPOConfig, RunConfig
from memagent import ReadConfig

# Before torch is loaded: its threads wait for work by spinning unless told otherwise, and then
# take the
# cores from whatever else runs. With two of them beside other work on two cores SmolLM2 took 32 to
# 69 s
# for what one thread does in 12, sleeping ones in 13.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    cls=AgentGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Language models that read more than they can hold.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at, convert and build tasks.")
app.add_typer(data_app, name="data")


def _merged(config: Path | None, compat: dict[str, dict], **given: dict) -> list[dict]:
    """Merge fields by section: of a config file, over them those of --compat, then flags."""
    stored = find.stored_settings(config) if config else {}
    return [
        stored.get(section, {}) | compat.get(section, {}) | values
        for section, values in given.items()
    ]


Config = Annotated[
    Path | None, typer.Option(help="replay a run's config.yaml; other flags go on top")
]
Preset = Annotated[
    str,
    typer.Option(
        help="several settings at once: default, demo, or one of an agent's: paper, vime, ..."
    ),
]
Compat = Annotated[
    str,
    typer.Option(
        help="imitate a published system wherever the agent's settings can: paper or upstream; "
        "prints "
        "what it sets and what it cannot imitate",
        rich_help_panel="How the agent reads",
    ),
]
AgentName = Annotated[
    str,
    typer.Option(
        "--agent",
        help="a name in agents/, or a file such as my_agent.py; default: the preset's, else the "
        "model's",
    ),
]
Model = Annotated[
    str, typer.Option(help="folder or hub name of a causal LM; empty = the embedded policy")
]
RESUME = "go on with the run of this --name, with the settings it began with; --steps may be more"
DRY_RUN = "try the whole run on a tiny random model: the plan, two steps, an export"


@command(
    app, RunConfig, GRPOConfig, ReadConfig, everyday=options.EVERYDAY["train"], more=find.own_flags
)
def train(
    config: Config = None,
    preset: Preset = "default",
    resume: Annotated[bool, typer.Option(help=RESUME)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)] = False,
    compat: Compat = "",
    run: dict = {},
    grpo: dict = {},
    agent: dict = {},
):
    """Train a policy with GRPO; results lie in RUNS/NAME."""
    (run,) = _merged(config, {}, run=run)
    name = run.get("agent") or find.agent_of(preset, run.get("model") or options.EMBEDDED)
    theirs = find.compat_of(compat, [name], training=True)
    grpo, agent = _merged(config, theirs, grpo=grpo, agent=agent)
    if resume:
        run, grpo, agent = find.resumed(preset, run, grpo, agent)
        name = run.get("agent") or name
    grpo_config, reader = find.resolve(
        preset, run.get("model") or options.EMBEDDED, grpo, agent, name
    )
    run = find.preset_of(preset, name)["run"] | run | {"agent": reader.name}
    run_config = RunConfig(**run)
    if axes := find.axes(reader, grpo_config, compat):
        typer.echo(axes)
    if dry_run:
        from commands.dryrun import dry_run as run_dry

        return run_dry(run_config, grpo_config, reader, typer.echo, resume)
    from commands.train import run_and_report

    run_and_report(run_config, grpo_config, reader, resume, typer.echo)


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
            help="new folder; default: RUN/model, which is replaced. Adapters go to OUT-adapter, "
            "or to RUN/adapter"
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="of the weights; auto = as the base's"),
    ] = "auto",
):
    """Write a checkpoint as a model folder that transformers, peft and vLLM load."""
    from commands.export import export as run_export

    folder = run_export(run, step, out, dtype, best)
    typer.echo(f"The policy is in {folder}.")


@command(
    app, EvalConfig, ReadConfig, everyday=options.EVERYDAY["eval"], more=find.flags_of_evaluation
)
def _eval(
    config: Config = None,
    preset: Preset = "default",
    compat: Compat = "",
    evaluation: dict = {},
    agent: dict = {},
):
    """Evaluate agents: accuracy by length with n and a 95 % interval; goes on where it was
    stopped."""
    from eval import run_suite

    (evaluation,) = _merged(config, {}, eval=evaluation)
    eval_config = EvalConfig(**evaluation)
    model = find.model_or_default(eval_config.model, eval_config.endpoint)
    if "agents" not in evaluation:
        agents = (find.agent_of(preset, model), *EvalConfig().agents[1:])
        eval_config = replace(eval_config, agents=tuple(dict.fromkeys(agents)))
    names = dict.fromkeys(name.partition("@")[0] for name in eval_config.agents)
    theirs = find.compat_of(compat, names, training=False)
    (agent,) = _merged(config, theirs, agent=agent)
    settings = {"max_sections": None} | agent  # a preset's cap is one of training
    agents = {
        name: find.with_state(find.resolve(preset, model, {}, settings, name)[1], model)
        for name in names
    }
    for reader in agents.values():
        if axes := find.axes(reader, compat=compat if reader.compat else ""):
            typer.echo(axes)
    folder = run_suite(eval_config, agents)
    typer.echo(f"Table and plots: {folder / 'report.html'}; numbers: {folder / 'summary.json'}.")


ENDPOINT = (
    "ask a server of OpenAI's protocol, such as http://127.0.0.1:8000/v1; --model is its "
    "tokenizer, "
    "without it lengths are estimated"
)


@command(app, ReadConfig, more=find.own_flags)
def ask(
    file: Annotated[Path, typer.Argument(help="text to read")],
    question: Annotated[str, typer.Argument()],
    model: Model = "",
    name: AgentName = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    device: Annotated[
        Device, typer.Option(help="where the model computes: cpu, cuda or auto", metavar=CHOICE)
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option(help="run code that comes with the model")
    ] = False,
    engine: Annotated[
        EngineName, typer.Option(help="what answers: transformers or vllm", metavar=CHOICE)
    ] = "transformers",
    endpoint: Annotated[str, typer.Option(help=ENDPOINT)] = "",
    served_as: Annotated[str, typer.Option(help="endpoint: the model's name there")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="endpoint: send text, for servers that take no token ids")
    ] = False,
    preset: Preset = "default",
    compat: Compat = "",
    agent: dict = {},
):
    """Answer a question about a text, showing the memory as it changes."""
    from commands.ask import ask as run_ask

    config = EvalConfig(
        model=model, device=device, engine=engine, trust_remote_code=trust_remote_code, in_flight=1,
        endpoint=tuple(url for url in endpoint.split(",") if url), served_as=served_as, chat=chat,
    )  # fmt: skip
    policy = find.model_or_default(model, endpoint)
    name = name or find.agent_of(preset, policy)
    theirs = find.compat_of(compat, [name], training=False).get("agent", {})
    settings = {"max_sections": None} | theirs | agent
    reader = find.with_state(find.resolve(preset, policy, {}, settings, name)[1], policy)
    if axes := find.axes(reader, compat=compat):
        typer.echo(axes)
    run_ask(file, question, reader, config, temperature)


@command(app)
def show(
    path: Annotated[Path, typer.Argument(help="a run's folder, or a file of trajectories")],
    step: Annotated[int | None, typer.Option(help="only this training step")] = None,
    task: Annotated[str, typer.Option(help="only tasks whose id contains this")] = "",
    wrong: Annotated[bool, typer.Option(help="only trajectories with reward 0")] = False,
    n: Annotated[int, typer.Option("--n", help="how many")] = 3,
    agent: Annotated[
        str, typer.Option(help="the file of an agent of your own, which then shows its turns")
    ] = "",
):
    """Print trajectories: each section, the memory before and after, the answer, the reward."""
    from commands.show import show as run_show

    run_show(path, step, task, wrong, n, agent)


@command(app, GRPOConfig, ReadConfig, more=find.own_flags)
def plan(
    model: Annotated[
        str,
        typer.Option(help="a name such as Qwen/Qwen3-4B, or a folder; empty = the embedded policy"),
    ] = "",
    gpu_gib: Annotated[
        float | None, typer.Option(help="memory of one GPU; default: the card's")
    ] = None,
    devices: Annotated[int, typer.Option(help="GPUs")] = 1,
    card: Annotated[
        str,
        typer.Option(
            help="H200, H100, A100, L40S, RTX 4090, L4 or A10; default: by its memory an RTX 4090 "
            "(24 GiB), L40S (48), H100 (80, and where nothing is said) or H200 (141)"
        ),
    ] = "",
    sections: Annotated[int, typer.Option(help="of a document, for the seconds")] = 15,
    name: AgentName = "",
    preset: Preset = "default",
    grpo: dict = {},
    agent: dict = {},
):
    """Print what fits on a GPU, and how long a step takes, before anything is downloaded."""
    from commands.plan import show as show_plan

    grpo_config, reader = find.resolve(preset, model or options.EMBEDDED, grpo, agent, name)
    if not reader.by_section:
        raise UserError(
            f"A plan is for an agent that is trained section by section, which {reader.label} is "
            "not."
        )
    show_plan(model, gpu_gib, devices, card, sections, grpo_config, reader)


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
    from config.terminal import SupervisedProgress
    from embedded.tiny import train_base

    if out.exists():
        raise UserError(f"{out} is there already: give another --out.")
    base_config = BaseConfig(**config)
    make_folder(out)
    with SupervisedProgress(base_config.steps + base_config.careless_steps) as log:
        train_base(base_config, out, log=log)
    typer.echo(f"The base policy is in {out}; use it with --model {out}.")


@command(app)
def demo(
    agent: Annotated[
        str,
        typer.Option(
            help="a name or a file; one with a demo of its own is trained beside others, several "
            "seeds"
        ),
    ] = find.DEFAULT,
    long: Annotated[bool, typer.Option("--long", help="more questions and more training")] = False,
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
    run_demo("long" if long else "short" if short else "default", seed, name, runs, kind.name)


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
    from commands.taskfiles import show_tasks

    show_tasks(file, form or None, pool, n, kind, sections)


@command(data_app)
def convert(
    file: File,
    out: Path,
    to: Annotated[
        Literal["built", "eval", "memagent", "vime"], typer.Option(help="memagent = parquet")
    ],
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
            "--compat-seed4", help="upstream's shuffle: evidence always in the same places"
        ),
    ] = False,
    evidence_order: Annotated[
        Literal["any", "forward", "reverse"], typer.Option(help="reverse = the last hop first")
    ] = "any",
    min_distance: Annotated[
        float,
        typer.Option(
            help="of pieces of evidence: below 1 a share of the documents, else documents"
        ),
    ] = 0.0,
):
    """Build RULER-HQA sets: the same questions among N documents, OUT/hqa_N.jsonl.gz each."""
    from commands.taskfiles import build_hqa

    config = EvalConfig(
        suite="ruler-hqa",
        lengths=value_of("documents", tuple[int, ...], documents),
        n=n,
        filler=(str(extra),) if extra else (),
        source_split=split,
        seed=seed,
        compat_seed4=compat_seed4,
        evidence_order=evidence_order,
        min_distance=min_distance,
    )
    build_hqa(file, out, config)


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
    """Build RULER's thirteen tasks at any length, offline: OUT/TASK_TOKENS.jsonl.gz each."""
    from commands.taskfiles import build_ruler as run_build

    many = {
        name: value_of(name, tuple[str, ...], text)
        for name, text in (("ruler_tasks", tasks), ("haystack", haystack), ("filler", extra))
    }
    config = EvalConfig(
        suite="ruler",
        lengths=value_of("tokens", tuple[int, ...], tokens),
        n=n,
        squad=squad,
        source_split=split,
        seed=seed,
        data=value_of("questions", tuple[str, ...], questions) or ("world",),
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
        Literal["contains", "right"],
        typer.Option(
            help="contains = drop too if an accepted answer stands anywhere in the response, in "
            "any case, inside a word too (as MemAgent's filter.py); right = if the box is right"
        ),
    ] = "contains",
    device: Annotated[Device, typer.Option(help="where the model computes")] = "auto",
    engine: Annotated[EngineName, typer.Option(help="what answers")] = "transformers",
):
    """Drop questions that a model answers without the document; goes on where it was stopped."""
    from commands.taskfiles import ClosedBook
    from commands.taskfiles import filter_questions as run_filter

    EvalConfig(device=device, engine=engine, samples=samples, top_p=top_p)  # for its checks
    test = ClosedBook(rule, samples, temperature, top_p, answer_tokens)
    run_filter(file, out, model, test, device, engine)


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
