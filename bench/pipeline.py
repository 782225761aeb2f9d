"""SmolLM2 from a warm start to an evaluation, by commands of cli.py, each with a limit of its time.

Exercise it: `python -m bench.pipeline DIR`, before a card is rented, then `python -m bench.gpu
pipeline --tiny`. The recipe is that of dev/reader.py; trainings take what time there is.

    untrained model  --eval-->           (beside the trainings)
    short, hops      --sft-->            adapters; where there are none, those of the repository
    grpo             --train, vLLM-->    with CUDA graphs, and where that fails eager
    the last model   --eval, vLLM-->     passages, HotpotQA, longest documents, side by side

Everything lies in runs/gpu/runs, the adapters in bfloat16 in runs/gpu/runs/shipped. A command is
interrupted at its limit and ended if it goes on; what it has done by then counts: a training is
exported from its last checkpoint, an evaluation is summed up from its rows.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from bench.common import ROOT, table
from bench.parts import Keep, left
from config.errors import UserError
from config.options import READER
from config.realmodels import named_folder
from dev import reader
from report.folder import read_run
from report.training import whole_rows

FOLDER = ROOT / "runs" / "gpu"
TRAININGS = ("short", "hops", "grpo")
# stage -> its share of the whole time; an evaluation of what was trained has all that is left
SHARES = {
    "model": 0.1, "untrained-hqa": 0.35, "untrained-passages": 0.3, "short": 0.17, "hops": 0.12,
    "grpo": 0.35, "export": 0.08,
}  # fmt: skip
RESERVED = 0.25  # of the whole time, for the evaluations
LEAST_S = 12  # a command is not begun with less
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
    "loss", "reward", "mismatch_kl", "mismatch_mean", "grad_norm", "memory_tokens", "turns",
    "read_tokens", "reused_tokens", "written_tokens", "computed_tokens", "rollout_s", "switch_s",
    "update_s", "step_s", "mfu", "peak_gib",
)  # fmt: skip
CELL = ("agent", "length", "n", "mean", "low", "high", "failed", "document_tokens", "seconds")


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
    for path in map(Path, reader.found(str(data)).values()):
        shutil.copy(path, kept)
    sources = reader.found(str(kept))
    (FOLDER / "data").mkdir(exist_ok=True)
    reader.write_sentences(Path(sources["sentences"]), FOLDER / reader.SENTENCES)
    reader.make([stage for stage in reader.stages(sources, FOLDER) if stage.words[0] == "data"])


def pipeline(tiny: bool, keep: Keep) -> dict:
    """Train and evaluate. Rows are kept as a command ends; a missing one was not run.

    tiny: the embedded policy, a step each, one question.
    """
    sources = reader.found(str(FOLDER / "sources"))
    plan = {
        stage.name: stage for stage in reader.stages(sources, FOLDER, scale=1e-9 if tiny else 1)
    }
    if missing := [name for name, x in plan.items() if x.words[0] == "data" and not x.done]:
        raise UserError(f"{FOLDER} lacks {', '.join(missing)}: `python -m bench.pipeline DIR`.")
    run = Pipeline(tiny, keep, sources)
    with ThreadPoolExecutor(1 if tiny else None) as pool:
        try:
            if not tiny:
                code = "from models.packaged import ready; ready('smollm2')"
                run.command("model", [sys.executable, "-c", code])
            before = [x for x in EVALUATIONS if x.startswith("untrained")]
            beside = pool.submit(lambda: [run.evaluate(name, run.model) for name in before])
            model, more = run.train([plan[name].words for name in TRAININGS])
            after = [x for x in EVALUATIONS if x not in before]
            [*pool.map(lambda name: run.evaluate(name, model, more), after)]
            beside.result()
        finally:
            for process in run.processes:
                process.kill()
    return {}


class Pipeline:
    """What has been run and measured."""

    def __init__(self, tiny: bool, keep: Keep, sources: dict[str, str]):
        self.tiny, self.keep, self.sources = tiny, keep, sources
        self.total, self.model = left(), "tiny" if tiny else "smollm2"
        self.engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
        self.runs = FOLDER / ("tiny" if tiny else "runs")
        shutil.rmtree(self.runs, ignore_errors=True)
        (self.runs / "logs").mkdir(parents=True)
        kv = {"run": {"kv_gib": 0.1}, "eval": {"kv_gib": 0.1}}
        self.settings = self.runs / "settings.yaml"
        self.settings.write_text(yaml.safe_dump(kv if tiny else SETTINGS))
        self.processes: set[subprocess.Popen] = set()
        self.lock = threading.Lock()
        self.out: dict = {"model": self.model, "engine": self.engine, "stages": {}}

    def seconds(self, name: str) -> float:
        """Return how long a command may take."""
        if name not in SHARES:
            return left() - GRACE_S
        return min(SHARES[name] * self.total, left() - RESERVED * self.total)

    def note(self, name: str, **found: object) -> None:
        with self.lock:
            self.out["stages"].setdefault(name, {}).update(found)
            print(name, found, flush=True)
            self.keep(self.out)

    def cli(
        self, name: str, words: Sequence[str], more: dict | None = None, kind: str = ""
    ) -> None:
        """Run a command of cli.py. more: what vLLM is told on top."""
        ours = [sys.executable, "cli.py"]
        if more and self.engine == "vllm" and not self.tiny:
            code = "from bench.pipeline import with_vllm; with_vllm()"
            ours = [sys.executable, "-c", code, json.dumps(more)]
        self.command(name, [*ours, *words], kind)

    def command(self, name: str, words: Sequence[str], kind: str = "") -> None:
        """Run a command for at most its time. kind: whose share it has, empty = its own."""
        limit, start = self.seconds(kind or name), time.perf_counter()
        if limit < LEAST_S:
            self.note(name, ended="not begun: no time left")
            return
        ended, path = "done", self.runs / "logs" / f"{name}.log"
        with (
            path.open("w") as log,
            subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as process,
        ):
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
        if process.returncode and ended == "done":
            texts = path.read_text(errors="replace").splitlines()
            said = [text.strip("│ ") for text in texts if re.search(r"\w", text)]
            ended = f"exit code {process.returncode}: {' '.join(said[-1:])[:300]}"
        seconds = round(time.perf_counter() - start, 1)
        self.note(name, ended=ended, seconds=seconds, limit=round(limit, 1))

    def train(self, plan: Sequence[Sequence[str]]) -> tuple[str, dict]:
        """Run the trainings, each from the last adapters that there are.

        Returns the folder of the last model, "": there is none, and what vLLM has to be told.
        """
        adapter, model, more = None if self.tiny else named_folder(READER), "", GRAPHS
        for name, words in zip(TRAININGS, plan, strict=True):
            if name != TRAININGS[0]:
                words = started_from(words, adapter)
            for how in (GRAPHS, EAGER) if name == "grpo" else (None,):
                run = "grpo-eager" if how is EAGER else name
                self.cli(run, [*words, *self.given(run)], how, name)
                if not (self.runs / run / "adapter").exists() and self.saved(run):
                    self.cli(f"export-{run}", ["export", str(self.runs / run)], kind="export")
                rows = whole_rows(self.runs / run / "metrics.csv")
                columns = {
                    c: [round(float(row[c]), 6) for row in rows if c in row] for c in COLUMNS
                }
                self.note(run, n=len(rows), steps={c: x for c, x in columns.items() if x})
                if (self.runs / run / "adapter").exists():
                    adapter, more = self.runs / run / "adapter", how or more
                    model = str(self.runs / run / "model")
                    break
        if model:
            reader.ship(adapter, self.runs / "shipped")
            self.note("shipped", adapter=str(adapter.relative_to(ROOT)))
        return model, more

    def saved(self, run: str) -> bool:
        return any((self.runs / run / "checkpoints").glob("step-*"))

    def given(self, run: str) -> list[str]:
        """Return the words of a training after those of the recipe; the last of a flag counts."""
        words = ["--model", self.model, "--runs", str(self.runs), "--name", run]
        words += ["--micro-tokens", "2048" if self.tiny else "16384"]
        if run.startswith("grpo"):
            words += ["--engine", self.engine, "--config", str(self.settings)]
            words += ["--in-flight", "64", *(["--group-size", "2"] if self.tiny else [])]
        small = "--tasks-per-step 1 --max-sections 2 --chunk-tokens 1536 --memory-tokens 24".split()
        return [*words, *(small if self.tiny else [])]

    def evaluate(self, name: str, model: str, more: dict = GRAPHS) -> None:
        """Evaluate a model, and note the cells of the rows that there are."""
        if not model:
            self.note(name, ended="not begun: nothing was trained")
            return
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


def started_from(words: Sequence[str], adapter: Path | None) -> list[str]:
    """Return the words of a training that goes on from these adapters, None: begins its own."""
    at = words.index("--adapter")
    instead = ["--adapter", str(adapter)] if adapter else ["--lora-rank", "16"]
    return [*words[:at], *instead, *words[at + 2 :]]


def show(result: dict) -> None:
    """Print the tables of the commands, the trainings and the evaluations."""
    stages = result["stages"]
    rows = [(k, x.get("seconds"), x["ended"]) for k, x in stages.items() if "ended" in x]
    table(f"Commands, {result['model']}, {result['engine']}", ("", "s", "ended"), rows)
    rows = []
    for name, steps in ((name, x["steps"]) for name, x in stages.items() if x.get("n")):
        for column in (column for column in steps if not column.endswith("tokens")):
            values = steps[column]
            first, last = (sum(part) / len(part) for part in (values[:5], values[-10:]))
            rows.append((f"{name}: {column}", len(values), f"{first:.4g}", f"{last:.4g}"))
    table("Steps", ("", "n", "mean of the first 5", "of the last 10"), rows)
    rows = [
        (f"{name}: {c['agent']}, {c['length']}", f"{c['mean']:.3f}",
         f"{c['low']:.3f} to {c['high']:.3f}", c["n"])
        for name, found in stages.items() for c in found.get("cells", ())
    ]  # fmt: skip
    table("Right answers", ("", "share", "interval", "n"), rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        files = ", ".join(reader.LOCAL.values())
        raise SystemExit(f"python -m bench.pipeline DIR, a folder with {files}")
    try:
        prepare(Path(sys.argv[1]))
    except UserError as error:
        raise SystemExit(str(error)) from error
