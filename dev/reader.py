"""How a reader of real text is made of SmolLM2: every command line, setting and seed.

    questions  --data build-->  sets of ours  --sft, sft, sft, train-->  adapter  --export-->

Exercise it: `python -m dev.reader --data DIR --steps-scale 0.1`; on two cores `--processes 2`.

An untrained model of this size is right almost never. It learns in three warm starts what a careful
reader would write, first on short documents, then on longer ones, on two hops and on whole
documents in one prompt, then on many questions about short ones again; reinforcement learning goes
on from there. A stage whose result is there is skipped, a training that was stopped goes on by
--resume: the script can be stopped at any time and called again.

Trained on are questions of train splits alone. XQuAD is evaluated as a whole: none of its
paragraphs is in a document of training (MuSiQue has some of them, and is not used). Questions are
kept apart, Wikipedia is not: a paragraph of HotpotQA's or 2WikiMultiHopQA's training questions may
answer a question of the validation split too, and the few documents with fewer than ten paragraphs
are filled up from the whole file. Of questions whose paragraph is missing the answer is that
nothing was found.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from config.errors import UserError
from config.files import make_folder, read_yaml, replacing
from data import normalize_answer
from report.folder import read_run
from report.summary import markdown_of, summarise, write_summary
from tasks.seen import trained_on

ROOT = Path(__file__).resolve().parent.parent

# source -> its file below --data
LOCAL = {
    "squad": "squad_train_part.json.gz",
    "sentences": "squad_sentences.jsonl.gz",
    "2wiki": "2wikimultihopqa_dev.jsonl.gz",
    "hotpotqa": "hotpotqa_dev.jsonl.gz",
    "extra": "passages_extra.jsonl.gz",
    "xquad": "xquad_en.json.gz",  # evaluated, never trained on
}
# ... or, with --hub, the train split of a data set; nothing stands in for the others. XQuAD's
# articles are of SQuAD's validation split
HUB = {
    "squad": "hf:rajpurkar/squad:train",
    "2wiki": "hf:framolfese/2WikiMultihopQA:train",
    "hotpotqa": "hf:hotpotqa/hotpot_qa/distractor:train",
}
# set -> its source, suite and documents, and how it is built; {names} are filled in by `stages`.
# HotpotQA and 2WikiMultiHopQA have ten paragraphs a question, few of them fewer
ABSENT = "--absent 0.15"
OF_SQUAD = f"--source-split train --test-articles 4/20 {{eight}} {{extra}} {ABSENT}"
SETS = {
    "passages": ("squad", "passages", (1, 4, 16), OF_SQUAD),
    "sentences": ("sentences", "passages", (1,), f"{{eight}} {ABSENT}"),
    "hops-2wiki": ("2wiki", "ruler-hqa", (10,), "{train}"),
    "hops-hotpotqa": ("hotpotqa", "ruler-hqa", (10,), "{train}"),
}
SENTENCES = "data/sentences.json"  # with their answers, below --out
WEIGHTS = "adapter_model.safetensors"
PREFIX = {"ruler-hqa": "hqa"}  # suite -> the beginning of its files' names, else its own
# training -> set -> documents -> weight. About half of the two-hop questions can be demonstrated:
# the others are comparisons, or what links their paragraphs is no title
MIXTURES = {
    # one passage and all its questions: the most answers for a token read
    "short": {"passages": {1: 6, 4: 2}, "sentences": {1: 1.5}},
    "hops": {"passages": {1: 3, 4: 4, 16: 2}, "hops-2wiki": {10: 1}, "hops-hotpotqa": {10: 1.5}},
    # more questions for a token read: what the two before lack is reading, not keeping
    "reading": {"passages": {1: 8, 4: 3}, "hops-2wiki": {10: 0.5}, "hops-hotpotqa": {10: 1}},
    # short documents: the more tasks in a step, the less its mean reward is chance
    "grpo": {"passages": {1: 2, 4: 3}, "hops-hotpotqa": {10: 0.5}},
}
# training -> command, steps, settings. The rank of later ones is that of the adapter that they go
# on from, the training before
EVERY = "--not-found say --micro-tokens 3072 --save-every 20 --seed 0"
TRAININGS = {
    "short": ("sft", 200, "--lora-rank 16 --lr 1e-3 --tasks-per-step 16 --others 2 --mistakes 0.3"),
    "hops": ("sft", 100, "--lr 7e-4 --tasks-per-step 16 --others 3 --mistakes 0.4"),
    "reading": ("sft", 160, "--lr 7e-4 --tasks-per-step 24 --others 1 --mistakes 0.3"),
    "grpo": ("train", 50, "--lr 2e-4 --tasks-per-step 8 --group-size 8 --outcome f1"),
}
ALSO = {"sft": "--also full=0.1", "train": ""}  # command -> what all of its trainings have


# evaluation -> policy, source, suite, documents, agents; of questions that no training has seen. An
# untrained model writes at every section: among 64 passages 1.3 hours of one core, among 256 some
# five. The warm start is what reinforcement learning is measured against
BASE, SHIPPED = "", "shipped"
EVERYONE = "memagent,full,bm25,oracle"
EVALUATIONS = {
    "passages": (SHIPPED, "xquad", "passages", "4,16,64", EVERYONE),
    "passages-256": (SHIPPED, "xquad", "passages", "256", EVERYONE),
    "absent": (SHIPPED, "xquad", "passages --absent 1", "4,16,64", "memagent,full,bm25"),
    "absent-256": (SHIPPED, "xquad", "passages --absent 1", "256", "memagent,full,bm25"),
    "absent-far": (SHIPPED, "xquad", "passages --absent 1 --no-near", "4", "memagent,full,bm25"),
    "passages-warm": ("reading/adapter", "xquad", "passages", "4,16", "memagent"),
    "passages-untrained": (BASE, "xquad", "passages", "4,16", "memagent,full"),
    "passages-untrained-64": (BASE, "xquad", "passages", "64", "memagent"),
    "passages-untrained-256": (BASE, "xquad", "passages", "256", "memagent"),
    "hotpotqa-untrained": (BASE, "hotpotqa", "ruler-hqa", "10,50", "memagent"),
    "hotpotqa": (SHIPPED, "hotpotqa", "ruler-hqa", "10,50", EVERYONE),
}
# suite -> how many questions of a seed, and which
HELD_OUT = {
    "passages": "--together 16 --n 96",
    "ruler-hqa": "--source-split validation --n 128",
}
SEEDS = (0, 1, 2)  # of trained readers among passages: other questions and documents; else 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One command line, and what is there when it is done."""

    name: str
    words: tuple[str, ...]  # after `python cli.py`
    makes: tuple[Path, ...]
    run: Path | None = None  # folder of a training, which goes on by --resume
    partial: Path | None = None  # what a stopped command may have left and cannot replace

    @property
    def done(self) -> bool:
        """Whether all is there. UserError: it is of a training of another length."""
        complete = all(path.exists() for path in self.makes)
        if complete and self.run is not None:
            sections = read_yaml(self.run / "config.yaml").values()
            steps = next(str(section["steps"]) for section in sections if "steps" in section)
            if steps != (wanted := self.words[self.words.index("--steps") + 1]):
                reason = f"{self.run} has {steps} steps, not {wanted}"
                raise UserError(f"{reason}: give another --out, or remove what is there.")
        return complete


def make(plan: Iterable[Stage]) -> None:
    """Run the stages whose results are not there, printing each. UserError: one of them failed."""
    for stage in plan:
        if stage.done:
            print(f"# {stage.name}: done before", flush=True)
            continue
        if stage.partial is not None:
            shutil.rmtree(stage.partial, ignore_errors=True)
        goes_on = stage.run is not None and stage.run.exists()
        words = [*stage.words, *(["--resume"] if goes_on else [])]
        print(f"# {stage.name}\npython cli.py {shlex.join(words)}", flush=True)
        if code := subprocess.call([sys.executable, str(ROOT / "cli.py"), *words]):
            reason = f"The stage {stage.name} ended with exit code {code}"
            raise UserError(f"{reason}: see above; the same call goes on from here.")


def stages(
    sources: dict[str, str],
    out: Path,
    model: str = "smollm2",
    scale: float = 1.0,
    processes: int = 0,
) -> list[Stage]:
    """Return all stages, in order. sources: as LOCAL, with whole paths, or HUB.

    scale: factor on the steps of every training; each has at least one. processes: that train side
    by side on the CPU; 0 = one process, on the device that it finds.
    """
    if "sentences" in sources:  # `main` writes it
        sources = sources | {"sentences": str(out / SENTENCES)}
    # a split of the hub is the train split already; questions that share a document have to be
    # compared with all passages, which are too many there
    on_hub, few = sources["squad"].startswith("hf:"), "--n 4000"
    values = {
        "train": few if on_hub else f"--source-split train {few}",
        "eight": few if on_hub else "--together 8 --n 100000",
        "extra": f"--filler {shlex.quote(sources['extra'])}" if "extra" in sources else "",
    }
    files, plan = {}, []
    for name, (source, suite, documents, how) in SETS.items():
        if source in sources:
            folder = out / "data" / name
            files[name] = {
                n: folder / f"{PREFIX.get(suite, suite)}_{n}.jsonl.gz" for n in documents
            }
            words = ["data", "build", sources[source], str(folder), "--suite", suite, "--seed", "0"]
            words += ["--lengths", ",".join(map(str, documents))]
            words += shlex.split(how.format(**values))
            plan.append(Stage(name, tuple(words), (*files[name].values(),)))
    adapter = []
    for name, (command, steps, settings) in TRAININGS.items():
        parts = [(part, n, w) for part, of in MIXTURES[name].items() for n, w in of.items()]
        data = ",".join(f"{files[part][n]}={w:g}" for part, n, w in parts if part in files)
        words = [command, "--model", model, "--runs", str(out), "--name", name, "--data", data]
        words += ["--steps", str(max(1, round(steps * scale))), *adapter]
        words += [*settings.split(), *ALSO[command].split(), *EVERY.split()]
        words += ["--device", "cpu", "--devices", str(processes)] if processes else []
        plan.append(Stage(name, tuple(words), (out / name / "model",), run=out / name))
        adapter = ["--adapter", str(out / name / "adapter")]
    made = out / "reader", out / "reader-adapter"
    words = ("export", str(out / name), "--out", str(made[0]))
    return [*plan, Stage("export", words, made, partial=made[1])]


def seeds_of(name: str) -> tuple[int, ...]:
    """Return the seeds of an evaluation."""
    policy, _, suite, *_ = EVALUATIONS[name]
    return SEEDS if policy != BASE and suite.startswith("passages") else SEEDS[:1]


def evaluations(sources: dict[str, str], out: Path, model: str = "smollm2") -> list[Stage]:
    """Return the evaluations, greedy; by its command each one goes on.

    The first seed of all comes before the second of any.
    """
    found = []
    named = sorted(
        ((seed, name) for name in EVALUATIONS for seed in seeds_of(name)), key=itemgetter(0)
    )
    for seed, name in named:
        policy, source, how, documents, agents = EVALUATIONS[name]
        suite, *rest = how.split()
        words = ["eval", "--model", str(out / policy) if policy else model, "--suite", suite]
        words += ["--data", sources[source], "--filler", sources["extra"], *rest]
        words += [*HELD_OUT[suite].split(), "--not-found", "say"]
        words += ["--lengths", documents, "--agents", agents, "--temperatures", "0"]
        words += ["--top-k", "2"] if "bm25" in agents else []  # sections that it reads
        words += ["--runs", str(out), "--seed", str(seed)]
        run = f"{name}-{seed}"
        found.append(Stage(run, (*words, "--name", run), (out / run / "summary.json",)))
    return found


def met(rows: Iterable[dict], known: Collection[str]) -> list[str]:
    """Return the ids of the rows whose question is known, by its words (`Task.question_digest`)."""
    return [*dict.fromkeys(str(row["id"]) for row in rows if row["asked"] in known)]


def pool(out: Path, trained: Path) -> None:
    """Write a summary NAME.json and a table NAME.md of each evaluation, its seeds together.

    Intervals are over the documents of all seeds; what two seeds ask is one question, averaged, and
    its documents count as one. UserError: one of the questions is among those that `trained` has
    seen.
    """
    known = trained_on(trained)
    for name in EVALUATIONS:
        rows = []
        for seed in seeds_of(name):
            folder = out / f"{name}-{seed}"
            found = read_run(folder).rows
            if ids := met(found, known):
                raise UserError(f"{folder} asks what was trained on: {', '.join(ids)}.")
            rows += found
        summary = summarise(rows, "documents")
        write_summary(out / f"{name}.json", summary)
        lines = [
            f"- {p['a']} - {p['b']}, {p['length']}: {p['mean']:+.3f} ({p['low']:+.3f} to "
            f"{p['high']:+.3f}), n = {p['n']}"
            for p in summary["paired"]
        ]
        table = markdown_of(summary) + "\n".join(["", *lines, ""])
        (out / f"{name}.md").write_text(table, encoding="utf-8")


def ship(adapter: Path, folder: Path) -> None:
    """Write the adapter with its weights in bfloat16, and what says how it reads and of what.

    It computes in that type where it was trained, so nothing is lost. folder: what is written is
    replaced, its README.md with the licences stays. Where it has these weights nothing is written:
    then it may say what was measured of them (`note_best`).
    """
    weights = load_file(adapter / WEIGHTS)
    half = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    if (folder / WEIGHTS).exists() and _same(half, load_file(folder / WEIGHTS)):
        return
    make_folder(folder)
    for name in ("adapter_config.json", "agent.yaml", "trained_on.csv"):
        shutil.copy(adapter / name, folder)
    save_file(half, folder / WEIGHTS, {"format": "pt"})


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def best_by_length(summaries: Sequence[tuple[dict, float]]) -> list[list]:
    """Return [tokens of the documents, the agent that answered best], for `ask`, by length.

    summaries: with their weight, as of questions that a document holds and of those that it does
    not. A tie is the agent's that reads section by section. The oracle, which knows the evidence,
    is not offered.
    """
    at: dict[int, dict[str, float]] = {}  # by the number of passages
    tokens: dict[int, float] = {}
    for summary, weight in summaries:
        for cell in (cell for cell in summary["cells"] if cell["agent"] != "oracle"):
            means = at.setdefault(cell["length"], {})
            means[cell["agent"]] = means.get(cell["agent"], 0.0) + weight * cell["mean"]
            # tokens of the whole document: bm25 has read less of it
            tokens[cell["length"]] = max(tokens.get(cell["length"], 0), cell["document_tokens"])
    return [
        [round(tokens[n]), max(means, key=lambda name: (means[name], name == "memagent", name))]
        for n, means in sorted(at.items())
    ]


# evaluation -> weight in the choice of the agent: one question in five is one whose document does
# not answer it
CHOSEN_BY = {"passages": 0.8, "passages-256": 0.8, "absent": 0.2, "absent-256": 0.2}


def note_best(folder: Path, out: Path) -> None:
    """Write into the settings of the adapter in `folder` which agent `ask` reads with."""
    read = (json.loads((out / f"{name}.json").read_text()) for name in CHOSEN_BY)
    best = best_by_length([*zip(read, CHOSEN_BY.values(), strict=True)])
    settings = read_yaml(folder / "agent.yaml") | {"ask": {"best": best}}
    with replacing(folder / "agent.yaml") as path:
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


# ---------------------------------------------------------------- questions with their sentence

MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
SPANS = re.compile(
    rf"(?P<date>\b(?:\d{{1,2}} {MONTH}|{MONTH} \d{{1,2}},)(?: \d{{4}})\b)"
    r"|(?P<year>(?<![\d.,-])(?:1[0-9]|20)\d\d(?![\d,.-]*\d)\b)"
)
ASKED = {"year": r"(?:what|which) year\b", "date": r"\bwhen\b|\b(?:what|which) da(?:te|y)\b"}


def answer(question: str, sentence: str) -> str:
    """Return the one date or year of the sentence that the question asks for and lacks, "" where it
    asks for none or for one of several.

    Of 500 sentences that come with their answer it finds the very answer of 27 in 31 (years 14 of
    15, dates 13 of 16, and in 2 of these a part of it).

    >>> answer("When did Ida leave?", "Ida, born in 1911, left in 1931.")
    ''
    >>> answer("When did Ida leave?", "Ida left in 1931.")
    '1931'
    """
    kind = next((kind for kind, words in ASKED.items() if re.search(words, question, re.I)), "")
    spans = [(m.lastgroup, m[0]) for m in SPANS.finditer(sentence) if m.lastgroup in (kind, "year")]
    dates = [span for span in spans if span[0] == "date"]
    given = normalize_answer(question).split()
    left = {text for _, text in dates or spans if normalize_answer(text) not in given}
    return left.pop() if kind and len(left) == 1 else ""


def write_sentences(source: Path, out: Path) -> None:
    """Write the questions {question, sentence, answer?} that have an answer in SQuAD's form."""
    paragraphs: dict[str, list[dict]] = {}
    with gzip.open(source, "rt", encoding="utf-8") as file:
        for k, record in enumerate(map(json.loads, file)):
            text = record["sentence"]
            right = record.get("answer") or answer(record["question"], text)
            if right and (start := text.find(right)) >= 0:
                answers = [{"text": right, "answer_start": start}]
                asked = {"id": f"s{k}", "question": record["question"], "answers": answers}
                paragraphs.setdefault(text, []).append(asked)
    pairs = [{"context": text, "qas": asked} for text, asked in paragraphs.items()]
    articles = [{"title": "", "paragraphs": [pair]} for pair in pairs]
    out.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")


# ---------------------------------------------------------------- the command


def found(folder: str) -> dict[str, str]:
    """Return the sources in a folder. UserError: one is missing."""
    paths = {name: Path(folder, file) for name, file in LOCAL.items()}
    if missing := [path.name for path in paths.values() if not path.is_file()]:
        raise UserError(f"{folder} lacks {', '.join(missing)}.")
    return {name: str(path) for name, path in paths.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.reader", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", metavar="DIR", help=f"folder with {', '.join(LOCAL.values())}")
    where.add_argument("--hub", action="store_true", help=f"instead, {', '.join(HUB.values())}")
    parser.add_argument("--out", type=Path, default=Path("runs/reader"), help="folder of it all")
    parser.add_argument("--model", default="smollm2", help="as of `train`")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="factor on all steps")
    parser.add_argument("--processes", type=int, default=0, help="train in so many, on the CPU")
    parser.add_argument("--evaluate", action="store_true", help="then evaluate what ships")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    given = parser.parse_args(arguments)
    try:
        if not 0 < given.steps_scale < float("inf"):
            raise UserError("--steps-scale must be a positive number.")
        if "," in str(given.out):  # it parts the files of --data
            raise UserError("The path of --out must not have a comma.")
        sources = dict(HUB) if given.hub else found(given.data)
        plan = stages(sources, given.out, given.model, given.steps_scale, given.processes)
        if given.evaluate and given.hub:
            raise UserError("--evaluate needs --data: its questions and passages are no hub's.")
        after = evaluations(sources, given.out, given.model) if given.evaluate else []
        if given.list:
            lines = [f"python cli.py {shlex.join(stage.words)}" for stage in [*plan, *after]]
            print("\n".join(lines))
            return 0
        make_folder(given.out / "data")
        if "sentences" in sources:
            write_sentences(Path(sources["sentences"]), given.out / SENTENCES)
        make(plan)
        ship(given.out / "reader-adapter", given.out / "shipped")
        make(after)
        if after:
            pool(given.out, given.out / "shipped")
            note_best(given.out / "shipped", given.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"The reader is in {given.out / 'reader'}, its adapter in {given.out / 'shipped'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
