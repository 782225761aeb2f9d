"""SmolLM2 from a warm start to an evaluation, by commands of cli.py, each with a limit of its time.

`python -m bench.pipeline DIR` prepares the questions before a card is rented, then `python -m
bench.gpu pipeline [--tiny]` trains by the recipe of dev/reader.py in what time there is:

    untrained model  --eval-->           (beside the trainings)
    short, hops      --sft-->            adapters; where there are none, the repository's own
    grpo             --train, vLLM-->    with CUDA graphs, and where that fails eager
    the last model   --eval, vLLM-->     passages, HotpotQA, longest documents, side by side

Everything lies in runs/gpu/runs, the adapters in bfloat16 in runs/gpu/runs/shipped. A command is
interrupted at its limit, and what it has done by then counts.
"""

from __future__ import annotations

import json
import math
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import yaml

from bench.common import ROOT, table
from config.errors import UserError
from config.options import READER
from config.realmodels import named_folder
from dev import reader
from report.folder import read_run
from report.training import whole_rows

FOLDER = ROOT / "runs" / "gpu"
TRAININGS = ("short", "hops", "grpo")
# command -> its share of the whole time; an evaluation of what was trained has all that is left
SHARES = {
    "model": 0.1, "untrained-hqa": 0.35, "untrained-passages": 0.3, "short": 0.17, "hops": 0.12,
    "grpo": 0.35, "export": 0.08,
}  # fmt: skip
RESERVED = 0.25  # of the whole time, for the evaluations
GRACE_S = 10  # until an interrupted command is ended: a training saves its step
# evaluation -> source, suite, documents, agents, questions; untrained-...: of the model as it was
EVALUATIONS = {
    "untrained-hqa": ("hotpotqa", "ruler-hqa", "50,200", "memagent,full", 64),
    "untrained-passages": ("xquad", "passages", "4,64", "memagent,full", 64),
    "passages": ("xquad", "passages", "4,64,256", "memagent,full,bm25", 128),
    "hqa": ("hotpotqa", "ruler-hqa", "50,200,800", "memagent,full", 64),
    "long": ("hotpotqa", "ruler-hqa", "1600,6400", "memagent,full", 8),
}
# what vLLM is told on top: with few graphs capturing adapters takes no minute
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}
EAGER = {"enforce_eager": True}
# several engines share the card
SETTINGS = {"run": {"kv_gib": 12.0, "sleep": "1"}, "eval": {"kv_gib": 8.0}}
COLUMNS = (
    "loss", "reward", "mismatch_kl", "memory_tokens", "read_tokens", "written_tokens",
    "computed_tokens", "rollout_s", "switch_s", "update_s", "step_s", "mfu", "peak_gib",
)  # fmt: skip
CELL = ("agent", "length", "n", "mean", "low", "high", "failed", "document_tokens", "seconds")


def left() -> float:
    """Return the seconds that are left of the limit of bench.gpu."""
    return signal.getitimer(signal.ITIMER_REAL)[0] or math.inf


def with_vllm() -> None:
    """Be `python cli.py` whose vLLM is told what the first argument says, in JSON."""
    from engines.vllm_colocated import ColocatedEngine

    more, fixed = json.loads(sys.argv.pop(1)), ColocatedEngine._fixed_settings
    ColocatedEngine._fixed_settings = lambda self: fixed(self) | more
    runpy.run_path("cli.py", run_name="__main__")


def prepare(data: Path) -> None:
    """Copy the sources of dev/reader.py from `data`, and build the sets of training of them."""
    kept = FOLDER / "sources"
    kept.mkdir(parents=True, exist_ok=True)
    for path in reader.found(data).values():
        shutil.copy(path, kept)
    sources = reader.found(kept)
    reader.write_sentences(sources["sentences"], FOLDER / reader.SENTENCES)
    reader.run(reader.sets(sources, FOLDER))


class Pipeline:
    """What has been run and measured."""

    def __init__(self, tiny: bool, keep: Callable[[dict], None], sources: dict[str, str]):
        self.tiny, self.keep, self.sources = tiny, keep, sources
        self.total, self.model = left(), "tiny" if tiny else "smollm2"
        self.runs, self.processes, self.lock = FOLDER / "runs", set(), threading.Lock()
        self.engine = "vllm" if find_spec("vllm") else "transformers"
        self.out: dict = {"model": self.model, "engine": self.engine, "stages": {}}
        shutil.rmtree(self.runs, ignore_errors=True)
        (self.runs / "logs").mkdir(parents=True)
        self.settings = self.runs / "settings.yaml"
        self.settings.write_text(yaml.safe_dump({} if tiny else SETTINGS))

    def note(self, name: str, **measured: object) -> None:
        with self.lock:
            self.out["stages"].setdefault(name, {}).update(measured)
            print(name, measured, flush=True)
            self.keep(self.out)

    def seconds(self, name: str) -> float:
        """Return how long a command may take."""
        if name not in SHARES:
            return left() - GRACE_S
        return min(SHARES[name] * self.total, left() - RESERVED * self.total)

    def command(self, name: str, words: Sequence[str], kind: str = "") -> None:
        """Run a command for at most its time. kind: whose share it has; empty = its own."""
        limit, start = self.seconds(kind or name), time.perf_counter()
        if limit <= GRACE_S:
            return self.note(name, ended="not begun: no time left")
        path, ended = self.runs / "logs" / f"{name}.log", "done"
        with path.open("w") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self.processes.add(process)
        try:
            process.wait(None if limit == math.inf else limit)
        except subprocess.TimeoutExpired:
            ended = "at its limit"
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        except BaseException:  # the part's limit and Ctrl-C, too: no command outlives it
            process.kill()
            raise
        if process.wait() and ended == "done":
            last = [text for text in path.read_text(errors="replace").splitlines() if text.strip()]
            ended = f"exit code {process.returncode}: {' '.join(last[-3:])[-300:]}"
        self.note(name, ended=ended, seconds=round(time.perf_counter() - start, 1))

    def cli(self, name: str, words: Sequence[str], more: dict, kind: str = "") -> None:
        """Run a command of cli.py. more: what vLLM is told on top."""
        ours = [sys.executable, "cli.py"]
        if more and self.engine == "vllm" and not self.tiny:
            code = "from bench.pipeline import with_vllm; with_vllm()"
            ours = [sys.executable, "-c", code, json.dumps(more)]
        self.command(name, [*ours, *words], kind)

    def train(self) -> tuple[str, dict]:
        """Run the trainings, each from the last adapters that there are.

        Returns the folder of the last model ("" if there is none), and what vLLM has to be told.
        """
        adapter, model, more = None, "", GRAPHS
        for name in TRAININGS:
            start = adapter
            if start is None and name != TRAININGS[0] and not self.tiny:
                start = named_folder(READER)
            words = reader.training(name, FOLDER, start, 1e-9 if self.tiny else 1)
            for how in (GRAPHS, EAGER) if name == "grpo" else ({},):
                run = "grpo-eager" if how is EAGER else name
                folder = self.runs / run
                self.cli(run, [*words, *self.flags(run)], how, name)
                exported = folder / "adapter" / "agent.yaml"  # what is written last
                if not exported.exists() and (folder / "checkpoints").exists():
                    self.cli(f"export-{run}", ["export", str(folder)], {}, "export")
                rows = whole_rows(folder / "metrics.csv")
                steps = {c: [float(row[c]) for row in rows if c in row] for c in COLUMNS}
                self.note(run, n=len(rows), steps={c: x for c, x in steps.items() if x})
                if exported.exists():
                    adapter, model, more = folder / "adapter", str(folder / "model"), how or more
                    break
        if adapter:
            reader.ship(adapter, self.runs / "shipped")
        return model, more

    def flags(self, run: str) -> list[str]:
        """Return the words of a training after those of the recipe: the last of a flag counts."""
        words = ["--model", self.model, "--runs", str(self.runs), "--name", run]
        words += ["--micro-tokens", "2048" if self.tiny else "16384"]
        if run.startswith("grpo"):
            words += ["--engine", self.engine, "--config", str(self.settings), "--in-flight", "64"]
            words += ["--group-size", "2"] if self.tiny else []
        small = "--tasks-per-step 1 --max-sections 2 --chunk-tokens 1536 --memory-tokens 24"
        return [*words, *(small.split() if self.tiny else [])]

    def evaluate(self, name: str, model: str, more: dict) -> None:
        """Evaluate a model, and note the cells of the rows that there are."""
        if not model:
            return self.note(name, ended="not begun: nothing was trained")
        source, suite, documents, agents, n = EVALUATIONS[name]
        if self.tiny:
            documents, n = documents.split(",")[0], 1
        words = ["eval", "--model", model, "--suite", suite, "--data", self.sources[source]]
        words += ["--filler", self.sources["extra"], *reader.HELD_OUT[suite].split()]
        words += ["--lengths", documents, "--agents", agents, "--n", str(n)]
        words += ["--top-k", "2"] if "bm25" in agents else []
        words += ["--temperatures", "0", "--not-found", "say", "--in-flight", "64"]
        words += ["--engine", self.engine, "--config", str(self.settings)]
        words += ["--runs", str(self.runs), "--name", name]
        words += ["--chunk-tokens", "1536", "--max-sections", "2"] if self.tiny else []
        self.cli(name, words, more)
        try:
            cells = read_run(self.runs / name).summary["cells"]
        except UserError:
            cells = []
        self.note(name, cells=[{k: cell[k] for k in CELL if k in cell} for cell in cells])


def pipeline(tiny: bool, keep: Callable[[dict], None]) -> dict:
    """Train and evaluate. tiny: the embedded policy, a step each, one question."""
    sources = reader.found(FOLDER / "sources")
    if missing := [path.name for path in reader.sets(sources, FOLDER) if not path.exists()]:
        raise UserError(f"{FOLDER} lacks {', '.join(missing)}: `python -m bench.pipeline DIR`.")
    run = Pipeline(tiny, keep, sources)
    before = [name for name in EVALUATIONS if name.startswith("untrained")]
    after = [name for name in EVALUATIONS if name not in before]
    with ThreadPoolExecutor(1 if tiny else None) as pool:
        try:
            if not tiny:
                code = "from models.packaged import ready; ready('smollm2')"
                run.command("model", [sys.executable, "-c", code])
            beside = [pool.submit(run.evaluate, name, run.model, GRAPHS) for name in before]
            model, more = run.train()
            beside += [pool.submit(run.evaluate, name, model, more) for name in after]
            for evaluation in beside:
                evaluation.result()
        finally:
            for process in run.processes:
                process.kill()
    return run.out


def show(result: dict) -> None:
    """Print the tables of the commands and of the evaluations."""
    stages = result["stages"]
    rows = [(name, x.get("seconds"), x["ended"]) for name, x in stages.items() if "ended" in x]
    table(f"Commands, {result['model']}, {result['engine']}", ("", "s", "ended"), rows)
    rows = [
        (f"{name}: {c['agent']}, {c['length']}", f"{c['mean']:.3f}",
         f"{c['low']:.3f} to {c['high']:.3f}", c["n"])
        for name, found in stages.items() for c in found.get("cells", ())
    ]  # fmt: skip
    table("Right answers", ("", "share", "interval", "n"), rows)


if __name__ == "__main__":
    try:
        prepare(Path(*sys.argv[1:2]))
    except UserError as error:
        raise SystemExit(f"python -m bench.pipeline DIR: {error}") from error
