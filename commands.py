"""What the commands do that is more than one call: look, build, ask, show, and an evaluation over agents, lengths and temperatures.

Holds: the bodies of the commands. Leaves out: flags (cli.py), training (train.py), the demo (demo.py).
Exercise it: `python cli.py --help`. Read next: demo.py.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.markup import escape
from rich.text import Text as Styled

import data
import hqa
import settings
import suites
import worlds
from agents import AGENTS, SECTIONWISE
from hqa import Evidence
from memagent import AgentConfig, window_of
from progress import bar, console
from settings import EMBEDDED, EvalConfig
from text import UserError, clean

# ---------------------------------------------------------------- data


def look(file: str, form: str | None, pool: Path | None, n: int, kind: str, sections: int) -> None:
    """The first n tasks and what there is in all."""
    if file == "world":
        if kind not in worlds.KINDS:
            raise UserError(f"Unknown kind of question {kind!r}: choose one of {', '.join(worlds.KINDS)}.")
        if sections < 1:
            raise UserError(f"A document has at least 1 section, not {sections}.")
        tasks = list(worlds.make_tasks(0, n, sections, kind))
    else:
        tasks = data.read(file, form, pool)
    for task in tasks[:n]:
        document = clean(task.document)
        console.rule(Styled(clean(task.id)))
        console.print(Styled(document if len(document) < 1200 else f"{document[:600]} [...] {document[-600:]}"))
        console.print(Styled(clean(f"\nquestion  {task.question}\nanswers   {' | '.join(task.answers)}")))
        about = [
            f"kind {task.kind}" * bool(task.kind),
            f"{len(task.order)} {'documents' if task.pool and task.pool.frame == 'documents' else 'passages'}" * bool(task.order),
        ]
        about += [f"evidence at {', '.join(str(k + 1) for k in task.gold)}" * bool(task.gold), f"{len(document):,} characters"]
        console.print(Styled(clean("about     " + ", ".join(filter(None, about)))))
    if file != "world":
        kinds = ", ".join(f"{count} {kind or 'of no kind'}" for kind, count in Counter(t.kind for t in tasks).most_common(8))
        console.print(Styled(clean(f"\n{len(tasks)} tasks: {kinds}")))


def build(
    file: Path, out: Path, documents: tuple[int, ...], n: int, extra: Path | None, split: str, seed: int, compat_seed4: bool,
    evidence: Evidence = Evidence(),
) -> None:  # fmt: skip
    """RULER-HQA sets, one file per length, the same questions in each; nothing is written unless all lengths can be."""
    if not documents:
        raise UserError("No length is given: --documents takes numbers of documents, such as 50,200.")
    questions = suites.of_split(data.read(file), split)
    pool = data.read_passages(extra) if extra else None
    n = min(n, len(questions))
    sets = {d: hqa.build(questions, d, n, pool, seed, compat_seed4, evidence, documents) for d in documents}
    make_folder(out)
    asked = {} if evidence.anywhere else {"evidence_order": evidence.order, "min_distance": evidence.min_distance}
    for d, tasks in sets.items():
        path = out / f"hqa_{d}.jsonl.gz"
        data.write_built(path, tasks, source=file.name, seed=seed, compat_seed4=compat_seed4, **asked)
        console.print(f"{path}: {len(tasks)} questions among {d} documents, {path.stat().st_size / 2**20:.1f} MiB")


def build_ruler(out: Path, config: EvalConfig, tokenizer: str, trust_remote_code: bool) -> None:
    """RULER's tasks, one file a task and length; `config` says which, as for `eval --suite ruler`."""
    codec = codec_of(tokenizer, False, trust_remote_code)
    _, columns = suites.asked_of(config, lambda: codec)
    make_folder(out)
    for column in columns:
        path, tasks = out / f"{column.question}_{column.length}.jsonl.gz", column.make()
        about = {"tokenizer": tokenizer or "base_policy", "seed": config.seed}
        if column.question in suites.ESSAY:
            about["haystack"] = suites.haystack_name(config)
        data.write_built(path, tasks, **about)
        console.print(f"{path}: {len(tasks)} questions at {column.length:,} tokens, {path.stat().st_size / 2**20:.1f} MiB")


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {path} cannot be made: {error.strerror}.") from error


# ---------------------------------------------------------------- models


def open_engine(
    model: str, device: str, dtype: str, trust_remote_code: bool, rows: int = 256, thinking: bool = False, name: str = "transformers",
    window: int | None = None, kv_gib: float = 0.0,
):  # fmt: skip
    """The engine `name` with a model folder's weights, its codec inside. vLLM reserves a window: None = all that the model takes."""
    import torch

    from models import load_model, settle_threads
    from slots import TransformersEngine
    from text import Codec

    codec = Codec.load(model or EMBEDDED, trust_remote_code=trust_remote_code, thinking=thinking)
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    dtype = ("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype
    if name == "vllm":
        from colocated import ColocatedEngine
        from models import window_of_model

        if on_gpu != torch.cuda.is_available():
            raise UserError("vLLM computes on the GPU where there is one: leave --device out.")
        most = window_of_model(model or EMBEDDED, trust_remote_code)
        return ColocatedEngine(
            model or EMBEDDED, codec, min(window or most, most), rows, kv_gib or (0.0 if on_gpu else 1.0), 0.9, dtype,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    loaded = load_model(model or EMBEDDED, dtype, device, trust_remote_code)
    settle_threads(loaded)
    return TransformersEngine(loaded, codec, max_rows=rows)


def open_endpoint(
    urls: Sequence[str], served_as: str, chat: bool, model: str, in_flight: int, thinking: bool, trust_remote_code: bool
):
    """An engine over servers of an OpenAI-compatible protocol; `model` is only where the tokenizer comes from. Without it nobody knows
    the tokens: text is sent, and lengths are estimated."""
    from endpoint import EndpointEngine
    from text import Characters, Codec

    codec = Codec.load(model, trust_remote_code=trust_remote_code, thinking=thinking) if model else Characters()
    return EndpointEngine(urls, served_as, codec, concurrency=in_flight, chat=chat or not model)


def codec_of(model: str, thinking: bool, trust_remote_code: bool):
    from text import Codec

    return Codec.load(model or EMBEDDED, trust_remote_code=trust_remote_code, thinking=thinking)


def reserved(agents: Sequence[str], config: AgentConfig) -> int | None:
    """The window that these agents need; None = all that the model has."""
    own = max(window_of(config, agent) for agent in agents)
    return own if {*agents} <= {*SECTIONWISE} else max(own, config.window) if config.window else None


def pick(name: str):
    if name not in AGENTS:
        raise UserError(f"Unknown agent {name!r}: choose one of {', '.join(AGENTS)}.")
    return AGENTS[name]


def ask(
    file: Path, question: str, model: str, agent: str, temperature: float, device: str, trust_remote_code: bool, config: AgentConfig,
    endpoint: str = "", served_as: str = "", chat: bool = False, engine_name: str = "transformers",
) -> None:  # fmt: skip
    """Read a text, showing the memory whenever it changes; end with the answer."""
    from graders import answered, strip_thinking
    from rollout import Sampling, follow
    from transcripts import diff, unformed

    task = data.from_text(file, question)
    run = pick(agent)
    if endpoint:
        engine = open_endpoint(endpoint.split(","), served_as, chat, model, 1, config.thinking, trust_remote_code)
    else:
        engine = open_engine(model, device, "auto", trust_remote_code, 1, config.thinking, engine_name, reserved([agent], config))
    cut = engine.codec.cut(task.document, config.chunk_tokens, config.max_sections, config.over)
    sections, about = len(cut), "" if engine.codec.exact else "about "
    many = f"{sections:,} section{'s' * (sections != 1)} of {about}{config.chunk_tokens:,}"
    console.print(Styled(clean(f"{file}: {about}{len(cut.ids) + cut.left_out:,} tokens in {many}")))
    if endpoint and not model:
        console.print(
            "[dim]Lengths are estimated at four bytes a token; --model NAME counts and sends the model's own tokens.[/dim]"
        )
    elif not model:
        console.print(
            "[dim]The embedded policy knows generated English only (python cli.py data look world); for real text give --model.[/dim]"
        )
    turn = None
    with contextlib.closing(engine), engine.awake(), bar("turns") as progress:
        total = sections + 1 if agent in SECTIONWISE else 1
        shown = progress.add_task("reading", total=total, note="")
        for number, turn in enumerate(follow(engine, run, task, config, Sampling(temperature)), 1):
            before, after = turn.prompt.memory.strip(), strip_thinking(turn.response).strip()
            for line in _recalls(turn, config):
                progress.console.print(line)
            if turn.step is not None:
                after = before if turn.step.memory is None else turn.step.memory.strip()
            if not turn.prompt.final and after != before:
                style = {"same": "", "out": "red strike", "in": "green underline"}
                changed = [(clean(text), style[kind]) for kind, text in diff(before, after)]
                progress.console.print(Styled.assemble(f"section {number}: ", *changed))
            progress.update(shown, completed=number)
    answer = clean(turn.response).strip()
    final, formed = answered(answer, config.form)
    if formed or not final:  # else it is shown below, as the answer
        console.print(Styled(answer))
    if turn.prompt.cut:
        console.print(f"{turn.prompt.cut:,} tokens of the text were not read: --max-sections or the window cut them off.")
    console.print(Styled(f"answer: {final}" if final else "The response is empty.", style="bold"))
    if final and not formed:
        console.print(Styled(unformed(config.form), style="dim"))


def _recalls(turn, config: AgentConfig) -> Iterator[Styled]:
    """What was recalled for a turn, and what it looks for."""
    recalled = turn.prompt.recalled
    if recalled is not None and recalled.steps:
        sections = ", ".join(map(str, sorted(recalled.steps)))
        yield Styled.assemble(
            ("recalled: ", "magenta"), clean(recalled.text.strip()), (f"  written after section {sections}", "dim")
        )
    elif recalled is not None and recalled.query:
        yield Styled("nothing was found", "magenta")
    if turn.step is not None and turn.step.query and config.callback == "learned":
        yield Styled.assemble(("looks for: ", "magenta"), clean(turn.step.query))


# ---------------------------------------------------------------- trajectories


def read_records(path: Path) -> list[dict]:
    """Trajectories of a run's folder (training's, else the evaluation's) or of a file of them."""
    if path.is_dir():
        found = [path / name for name in ("trajectories.jsonl.gz", "transcripts.jsonl") if (path / name).exists()]
        if not found:
            raise UserError(f"{path} has neither trajectories.jsonl.gz nor transcripts.jsonl.")
        path = found[0]
    from transcripts import is_record

    records, number = [], 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                record = json.loads(line)
                if not is_record(record):
                    raise UserError(f"{path}, line {number} is no trajectory.")
                records.append(record)
    except EOFError:  # the run is being written or was killed: what is whole is shown
        pass
    except (OSError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read past line {number}: {reason}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number} cannot be read: {error}.") from error
    return records


def show(path: Path, step: int | None, task: str, wrong: bool, n: int) -> None:
    from transcripts import render_trajectory

    records = read_records(path)
    chosen = [r for r in records if (step is None or r["step"] == step) and task in r["id"] and not (wrong and r["reward"] > 0)]
    if not chosen and records:
        steps = sorted({record["step"] for record in records if record["step"] is not None})
        if step is not None and step not in steps:
            kept = ", ".join(map(str, steps if len(steps) < 9 else [*steps[:4], "…", *steps[-2:]]))
            raise UserError(
                f"{path} has no trajectories of step {step}; {f'kept are those of {kept}' if steps else 'they are of an evaluation, which has no steps'}."
            )
    if not chosen:
        raise UserError(f"None of the {len(records)} trajectories in {path} is meant.")
    for record in chosen[:n]:
        console.print(render_trajectory(record))
    console.print(f"{min(n, len(chosen))} of {len(chosen)} trajectories")


# ---------------------------------------------------------------- evaluation


def fingerprint(model: str, dtype: object = "") -> str:
    """What tells one policy from another: the folder's weights, configuration, tokenizer and chat template by content, a hub model by its
    name, and the type of its numbers."""
    import hashlib

    folder = Path(model or EMBEDDED)
    if not any(folder.glob("*.safetensors")):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")  # .../snapshots/COMMIT/config.json
        return f"{model} {Path(cached).parent.name if isinstance(cached, str) else ''} {dtype}"
    digest = hashlib.blake2b(str(dtype).encode(), digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def evaluation_folder(config: EvalConfig) -> Path:
    """Where an evaluation's results lie; refused if something else lies there, such as a training run."""
    import yaml

    folder = settings.run_path(config.runs, config.name)
    path = folder / "config.yaml"
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {"eval": {}}
    except (OSError, ValueError, yaml.YAMLError):
        there = None
    if not (isinstance(there, dict) and "eval" in there):
        raise UserError(f"{folder} holds a run that is no evaluation: give this one another --name.")
    return folder


def weights_of(config: EvalConfig) -> dict[bool, list[str]]:
    """Whether it is the policy before training -> the agents that answer with it, as they are named in --agents."""
    groups: dict[bool, list[str]] = {}
    for name in config.agents:
        plain, at, weights = name.partition("@")
        pick(plain)
        if at and weights != "untrained":
            raise UserError(f"{name!r}: after an agent's name only @untrained may stand.")
        if at and not config.untrained:
            raise UserError(f"{name!r} answers with the policy before training: say by --untrained which that is.")
        groups.setdefault(bool(at), []).append(name)
    return groups


def open_for(config: EvalConfig, agent_config: AgentConfig, untrained: bool, agents: Sequence[str]):
    """The engine that answers with the one or the other weights, and the fingerprint of what answers."""
    if config.endpoint:  # the policy before training is another model of the same server
        served = config.untrained if untrained else config.served_as
        engine = open_endpoint(
            config.endpoint, served, config.chat, config.model, config.in_flight, agent_config.thinking, config.trust_remote_code
        )  # which replica answers plays no part
        route = "chat" if config.chat or not config.model else "completions"
        return engine, f"{route} {engine.model} {engine.codec.fingerprint}"
    model = config.untrained if untrained else config.model
    engine = open_engine(
        model, config.device, config.dtype, config.trust_remote_code, config.in_flight, agent_config.thinking,
        config.engine, reserved([name.partition("@")[0] for name in agents], agent_config), config.kv_gib,
    )  # fmt: skip
    return engine, f"{config.engine} {fingerprint(model, engine.dtype)}"


def policy_folder(config: EvalConfig, untrained: bool) -> str:
    """Where the policy that answers lies, or what it is called elsewhere; "" where a server of nobody knows which is asked."""
    return (config.untrained if untrained else config.model) or ("" if config.endpoint else str(EMBEDDED))


class Overlap:
    """How many of the questions that are asked a policy was trained on, by their text, whatever their ids."""

    def __init__(self, policy: str, agents: Sequence[str], look: bool = True):
        self.policy, self.agents = policy, agents
        self.known = data.trained_on(policy) if policy and look else {}
        self.asked: dict[
            str, set[str]
        ] = {}  # name of the questions -> digests; the same questions stand in documents of every length

    def add(self, question: str, tasks: Sequence[data.Task]) -> str:
        """Count a column's questions; returns a warning, "" if none is called for or these questions have had theirs."""
        from tally import overlap

        if not self.known or not tasks:
            return ""
        before = self.summary()["questions"].get(question, {"seen": 0})["seen"]
        self.asked.setdefault(question, set()).update(task.question_digest for task in tasks)
        return "" if before else overlap(self.summary(), question)

    def summary(self) -> dict:
        """{policy, agents, known: questions it was trained on, questions: {name: {asked, seen}}}"""
        counts = {name: {"asked": len(asked), "seen": len(asked & self.known.keys())} for name, asked in self.asked.items()}
        return {"policy": self.policy, "agents": [*self.agents], "known": len(self.known), "questions": counts}


# most of the documents in flight together; each is held as ids, about one byte a character, and a few sections as text
DOCUMENT_CHARACTERS = 1 << 29


def run_suite(config: EvalConfig, agent_config: AgentConfig) -> Path:
    """Every agent on every length at every temperature; rows, summary and report in the evaluation's folder.

    Several calls may fill one folder at the same time: each row is made by one of them, and each writes the summary when all are there.
    """
    from eval import evaluate
    from report import write_report
    from rollout import Sampling
    from suites import asked_of
    from tally import overlaps, summarise, table, write_summary

    groups = weights_of(config)
    samplings = [Sampling(temperature, config.top_p) for temperature in config.temperatures]
    folder = evaluation_folder(config)
    if config.endpoint and not config.model and config.suite == "ruler":
        raise UserError(
            "The lengths of RULER are tokens of the model that is asked: say by --model whose tokenizer the server has."
        )
    unit, asked = asked_of(config, lambda: codec_of(config.model, agent_config.thinking, config.trust_remote_code))
    # of generated English nothing is looked up: its splits share no fact that is asked for, and its questions are all of the same words
    overlap = {
        untrained: Overlap(policy_folder(config, untrained), agents, unit != "sections") for untrained, agents in groups.items()
    }
    done: dict[tuple[str, float, int], list[dict]] = {}  # (agent, temperature, column) -> rows
    # first what nobody else is at, then what others have been at
    for wait in (False, True):
        for untrained, agents in groups.items():
            if wait and all((name, s.temperature, k) in done for name in agents for s in samplings for k in range(len(asked))):
                continue
            engine, fingerprinted = open_for(config, agent_config, untrained, agents)
            make_folder(folder)
            settings.dump(folder / "config.yaml", eval=config, agent=agent_config)
            with contextlib.closing(engine), engine.awake(), bar("answers") as progress:
                for k, column in enumerate(asked):
                    left = [(name, s) for name in agents for s in samplings if (name, s.temperature, k) not in done]
                    tasks = column.make() if left else []
                    if said := overlap[untrained].add(column.question, tasks):
                        progress.console.print(Styled(clean(said), style="bold red"))
                    most = max((task.characters for task in tasks), default=1)
                    for name, sampling in left:
                        samples = config.samples if sampling.temperature > 0 else 1  # greedy answers are all the same
                        shown = progress.add_task(
                            escape(f"{name} T={sampling.temperature:g} {column.question} {column.length}"),
                            total=len(tasks) * samples,
                            note="",
                        )
                        rows = evaluate(
                            engine, pick(name.partition("@")[0]), tasks, agent_config, sampling, name=name, question=column.question,
                            length=column.length, rows=folder / "rows.jsonl", model=fingerprinted, seed=config.seed, samples=samples,
                            in_flight=min(config.in_flight, max(1, DOCUMENT_CHARACTERS // max(1, most))),
                            retries=config.retries, redo_failed=config.redo_failed and not wait, wait=wait,
                            record_to=folder / "transcripts.jsonl", n_records=config.transcripts,
                            progress=lambda row, shown=shown: progress.advance(shown),
                        )  # fmt: skip
                        if len(rows) == len(tasks) * samples:
                            done[name, sampling.temperature, k] = rows
                    tasks = []  # one column's documents at a time
    rows = [row for name in config.agents for s in samplings for k in range(len(asked)) for row in done[name, s.temperature, k]]
    summary = summarise(rows, unit) | {"trained_on": [found.summary() for found in overlap.values() if found.known]}
    settings.dump(folder / "config.yaml", eval=config, agent=agent_config)  # again: another call may have come in between
    write_summary(folder / "summary.json", summary)
    write_report(folder, title=f"Evaluation {config.name}")
    console.print(table(summary, console.width))
    for sentence in overlaps(summary):
        console.print(Styled(clean(sentence), style="bold red"))
    return folder


def is_known(row: dict, rule: str) -> bool:
    r"""Whether an answer without the document is right. rule: right = its box is; contains = or an
    accepted answer stands in it.

    As in MemAgent's filter.py, the answer's letters are looked for as they are, whatever the case:
    normalised, `\boxed{Paris, France}` would be one word with its box.
    """
    said = row["response"].lower()
    return row["reward"] > 0 or (rule == "contains" and any(gold.lower() in said for gold in row["answers"] if gold.strip()))


def filter_questions(
    file: Path,
    out: Path,
    model: str,
    samples: int,
    temperature: float,
    top_p: float,
    answer_tokens: int,
    rule: str,
    device: str,
    engine_name: str,
) -> None:
    """Drop the questions that a model answers without the document; which ones, and what it said, is kept beside OUT."""
    from agents import no_context
    from eval import evaluate
    from rollout import Sampling
    from tally import bootstrap

    tasks = data.read(file)
    if rule not in ("right", "contains"):
        raise UserError(f"The rule must be right or contains, not {rule!r}.")
    if tasks[0].pool is None or any(task.pool is not tasks[0].pool for task in tasks) or out.suffix == ".parquet":
        raise UserError(
            f"{file} has no paragraphs to keep, or {out} is no name of JSON lines: filter questions, before `data build`."
        )
    samples = samples if temperature > 0 else 1
    make_folder(out.parent)
    _, config = settings.resolve("default", model or EMBEDDED, {}, {"final_tokens": answer_tokens})
    engine = open_engine(model, device, "auto", False, 256, config.thinking, engine_name, 1024 + answer_tokens)
    with contextlib.closing(engine), engine.awake(), bar("questions") as progress:
        shown = progress.add_task("asking without the document", total=len(tasks) * samples, note="")
        rows = evaluate(
            engine, no_context, tasks, config, Sampling(temperature, top_p), name="none", length=0,
            rows=out.with_name(f"{out.name}.rows.jsonl"), model=fingerprint(model, engine.dtype), samples=samples,
            progress=lambda row: progress.advance(shown),
        )  # fmt: skip
    known = {row["id"] for row in rows if is_known(row, rule)}
    failed = len({row["id"] for row in rows if row["error"]} - known)
    kept = [task for task in tasks if task.id not in known]
    low, high = bootstrap([float(task.id in known) for task in tasks])
    share = f"{len(known)} of {len(tasks)} questions ({len(known) / len(tasks):.1%}, 95 % interval {low:.1%} to {high:.1%})"
    if not kept:
        raise UserError(f"The model answers {share} without the document: none is left to write.")
    data.write_built(
        out, kept, source=file.name, no_context=str(model or "base_policy"), rule=rule, samples=samples, dropped=len(known)
    )
    unasked = f" Of these {failed} are there because asking failed." if failed else ""
    console.print(f"{share} are answered without the document and dropped; {len(kept)} are in {out}.{unasked}")
