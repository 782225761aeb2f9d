"""Compare the graders with MemAgent's own, on generated responses and answers.

`python -m dev.truth FOLDER`: FOLDER is a checkout of BytedTsinghua-SIA/MemAgent, whose functions
are imported and run unchanged; what they import beside the standard library is replaced by stubs.
Printed for each function: pairs compared, pairs that differ, and how many of these each rule
explains. A rule holds for a pair only if the two sides agree once its cause is taken away. Pairs
that no rule explains are printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

from data import (
    STYLE,
    TAIL_CHARACTERS,
    _plain,
    boxed_reward,
    extract_boxed,
    extract_sentence,
    grade,
    normalize_answer,
    strip_thinking,
)

RAISED = "raised"  # in place of what an original would have returned
Pair = tuple[str, list[str]]  # response, accepted answers
Grader = Callable[[str, list[str]], object]
Rule = Callable[[str, list[str], object, object], bool]  # response, answers, ours, theirs

# ---------------------------------------------------------------- pairs

ANSWERS = [
    ["Lima"], ["Paris", "Lutetia"], ["New York City", "New York"], ["the Beatles"],
    ["The Old Mill"], ["yes"], ["no"], ["1994"], ["7 May 1812"], ["12.5"], ["1,200", "1200"],
    ["U.S.A.", "United States"], ["O'Brien"], ["AT&T"], ["Jean-Luc Moreau"], ["Washington, D.C."],
    ["A"], ["a cat"], ["Montréal"], ["noanswer"], ["3:45 p.m."], ["$40"], ["7%"],
    ["John Q. Public, Jr."], ['"Heat"'], ["Chicago (IL)"], ["Ida Cole and Otto Berg"], ["x^2"],
    ["N/A"], ["The Art of the Long Walk Home, Volume II"],
]  # fmt: skip
FORMS = [
    "{a}", "{a}", "{l}", "{u}", "the {a}", "{a}.", "{a}, France", "old {a}", "{first}", "{last}",
    "{a} or Rome", "Rome", "yes", "no", "", " ", "\n", ".", "...", "The", "a", "{a}{a}", "{spaced}",
    "\\text{{{a}}}", "\\left {a} \\right", "{{{a}}}", "{{{a}", "**{a}**", "{a}\n", "  {a} ",
    "{alias}", ".5 {a}", '"{a}"',
]  # fmt: skip
WRAPPINGS = [
    "\\boxed{{{x}}}", "So it is \\boxed{{{x}}}.", "$\\boxed{{{x}}}$", "\\boxed {x}",
    "$\\boxed {x}$ is it", "\\boxed{{{x}", "\\BOXED{{{x}}}", "\\fbox{{{x}}}",
    "\\boxed\\text{{{x}}}", "\\boxed{{Rome}} or rather \\boxed{{{x}}}",
    "\\boxed{{{x}}} or rather \\boxed{{Rome}}", "{x}", "It is {x}.", "the answer is {x}",
    "Therefore, the answer is {x}.", "the answer is **{x}**.", "the answer is ..{x}..",
    "The answer is {x}", "the answer is Rome. No, the answer is {x}",
    "the answer is ({x})<｜end▁of▁sentence｜>", "the answer is <｜Assistant｜>{x}",
    "\\boxed{{{x}}} the answer is {x}", "<think>{x}</think>\\boxed{{{x}}}, the answer is {x}",
    "<think>the answer is {x} \\boxed{{{x}}}</think>", "<think>the answer is {x} \\boxed{{{x}}}",
    "hm</think>the answer is {x} \\boxed{{{x}}}",
    "<think>\\boxed{{{x}}}</think>the answer is Rome \\boxed{{Rome}}",
    "the answer is {x} \\boxed{{{x}}}<think>or", "<think>the answer is {x}</think>\n",
    "\\boxed{{{x}}}{tail}", "{tail}\\boxed{{{x}}}", "the answer is {x}{tail}", "", " ",
    "<update>{x}</update>", "I do not know",
]  # fmt: skip
LATEX = [
    "\\boxed{", "\\boxed ", "\\boxed", "\\fbox{", "{", "}", "}", "}", "$", "\\text{", "\\left",
    "\\right", "\\!", "\\\\", "tfrac", "dfrac", "^{\\circ}", "^\\circ", "\\$", "\\%", " .", "{.",
    " ", "\n", "Lima", "lima", "the ", "5", ".", ",", "yes", "no", "a", "-",
]  # fmt: skip


def wrapped(n: int, seed: int) -> Iterator[Pair]:
    """Yield n responses: an answer in one of the forms in one of the wrappings."""
    rng = random.Random(seed)
    for _ in range(n):
        answers = rng.choice(ANSWERS)
        a = answers[0]
        x = rng.choice(FORMS).format(
            a=a,
            l=a.lower(),
            u=a.upper(),
            first=a.split()[0],
            last=a.split()[-1],
            spaced=" ".join(a),
            alias=answers[-1],
        )
        yield rng.choice(WRAPPINGS).format(x=x, tail=" and so on" * rng.randint(1, 40)), answers


def fuzz(n: int, seed: int) -> Iterator[Pair]:
    """Yield n strings of pieces of LaTeX, and an answer of the same kind."""
    rng = random.Random(f"fuzz {seed}")
    for _ in range(n):
        response = "".join(rng.choices(LATEX, k=rng.randint(1, 12)))
        yield response, ["".join(rng.choices(LATEX[4:], k=rng.randint(1, 3)))]


# ---------------------------------------------------------------- the originals


def imported(file: Path, stubs: Iterable[str] = ()) -> ModuleType:
    """Import an original's module from its file, with modules beside it; `stubs` are mocked."""
    if not file.is_file():
        sys.exit(f"{file} is not there: is this a checkout of the right repository?")
    package = [str(file.parent)] if file.stem == "__init__" else None
    name = f"original_{file.parent.name}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=package)
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch.dict(sys.modules, {stub: mock.MagicMock() for stub in stubs}),
        mock.patch.object(sys, "path", [str(file.parent), *sys.path]),
    ):
        spec.loader.exec_module(module)
    return module


def quietly(function: Callable) -> Callable:
    """Wrap a function: nothing is printed, and an exception becomes `RAISED`."""

    def call(*args):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                return function(*args)
            except Exception:
                return RAISED

    return call


def pipeline_of(memagent: Path, utils: ModuleType) -> Callable[[str, Sequence[str], str], object]:
    """Return a function (response, answers, api) that runs MemAgent's whole `get_pred`.

    It gives the fields that are written, None where nothing is, `RAISED` where it fails.
    """
    stubs = (
        "tqdm", "datasets", "transformers", "tiktoken", "torch", "torch.multiprocessing",
        "utils.envs",
    )  # fmt: skip
    with mock.patch.dict(sys.modules, {"utils": utils}):
        module = imported(memagent / "taskutils/memory_eval/ruler_hqa.py", stubs)
    module.AutoTokenizer = mock.MagicMock()
    responses: list[str] = []
    engine = SimpleNamespace(run=lambda outputs: [*responses])
    names = ("utils.aio", "utils.recurrent", "utils.recurrent_boxed")
    modules = {"utils": utils, "uvloop": engine} | {name: mock.MagicMock() for name in names}
    out = Path(tempfile.mkdtemp()) / "out.jsonl"

    def get_pred(response: str, answers: Sequence[str], api: str) -> dict | None:
        responses[:] = [response]
        module.args = SimpleNamespace(
            model="m", tokenizer="t", api=api, n_proc=1, force=True, length=0, split="niah"
        )
        items = [{"answers": [*answers], "outputs": [*answers], "context": ""}]
        with mock.patch.dict(sys.modules, modules), contextlib.suppress(ZeroDivisionError):
            module.get_pred(items, module.args, str(out))
        lines = out.read_text(encoding="utf-8").splitlines()
        return json.loads(lines[0]) if lines else None

    once = cache(quietly(get_pred))  # several fields of one response are compared
    return lambda response, answers, api: once(response, tuple(answers), api)


# ---------------------------------------------------------------- comparing


def compare(
    name: str, ours: Grader, theirs: Grader, pairs: Iterable[Pair], rules: dict[str, Rule],
    same: Callable = lambda a, b: a == b,
) -> int:  # fmt: skip
    """Print a line of the table; return how many pairs no rule explains."""
    theirs, why, examples, n = quietly(theirs), Counter(), [], 0
    for response, answers in pairs:
        n += 1
        a, b = ours(response, answers), theirs(response, answers)
        if not same(a, b):
            holding = (rule for rule, holds in rules.items() if holds(response, answers, a, b))
            why[rule := next(holding, "UNEXPLAINED")] += 1
            examples += [(response, answers, a, b)] if rule == "UNEXPLAINED" else []
    explained = "; ".join(f"{count:,} {rule}" for rule, count in why.most_common())
    print(f"{name:<50} {n:>7,} {why.total():>7,}  {explained}", flush=True)
    for example in examples[:5]:
        print("    ", *map(repr, example), sep="  ")
    return len(examples)


def near(a: object, b: object) -> bool:
    """Return whether numbers are equal once one is rounded to .01, as MemAgent does."""
    return None not in (a, b) and RAISED not in (a, b) and abs(a - b) <= 0.005 + 1e-9


def thinks(text: str) -> bool:
    return "<think>" in text or "</think>" in text


def lower(response: str) -> str:
    """Return the response with "the answer is" in lower case, the only form that theirs finds."""
    return re.sub("the answer is", "the answer is", response, flags=re.IGNORECASE)


def without_tokens(text: str) -> str:
    """Return a text without DeepSeek's special tokens, which theirs strips."""
    return text.replace("<｜Assistant｜>", "").replace("<｜end▁of▁sentence｜>", "")


def tidied(response: str) -> str:
    """Strip from a sentence's answer what MemAgent strips: special tokens, dots before it."""
    before, phrase, answer = response.replace("*", "").rpartition("the answer is")
    return before + phrase + without_tokens(answer.strip()).strip().lstrip(".")


def bare(text: str) -> str:
    """Return a text without LaTeX's styles and spaces."""
    return re.sub(r"\\[,;: ]", " ", re.sub(STYLE, "", text))


# ---------------------------------------------------------------- what is compared


def seen_rules(theirs: Grader) -> dict[str, Rule]:
    """Return the rules of em, f1 and sub_em, which grade what a reader sees of an answer."""

    def styles(r: str, a: list[str], ours: object, _) -> bool:
        seen, *golds = map(bare, (lower(r), *a))
        return near(theirs(seen, golds), ours) or near(theirs(without_tokens(seen), golds), ours)

    def nothing_left(r: str, a: list[str], ours: object, _) -> bool:
        answer = extract_boxed(r) or extract_sentence(r) or r
        pair = [
            re.sub(r"[\W_]", "", bare(text).lower()) or "".join(text.split())
            for text in (answer, a[0])
        ]
        return not normalize_answer(bare(a[0])) and ours == float(pair[0] == pair[1] != "")

    return {
        "LaTeX around words, which ours ignores": styles,
        "an answer of which nothing is left, which ours wants as it is": nothing_left,
    }


def rewards(file: Path, pairs: list[Pair]) -> int:
    """Compare the reward of training."""
    theirs = quietly(imported(file).compute_score)
    rules = {
        "think tags (ours drops thinking first)": lambda r, a, ours, _: (
            thinks(r) and theirs(strip_thinking(r), a) == ours
        ),
        "an empty box, an answer that clean-up empties (ours 0)": lambda r, a, ours, _: (
            ours == 0
            and extract_boxed(r.lower()[-TAIL_CHARACTERS:]) == ""
            and "" in (_plain(gold.lower()) for gold in a)
        ),
    }
    return compare("boxed_reward / compute_score", boxed_reward, theirs, pairs, rules)


def pipelines(pipeline: Callable, pairs: list[Pair]) -> int:
    """Compare MemAgent's whole grading of one answer, field by field."""
    unexplained = 0
    for form, api in (("sentence", "recurrent"), ("boxed", "recurrent-boxed")):
        for field in ("sub_em", "em", "f1"):

            def ours(r: str, a: list[str], form=form, field=field) -> float:
                scores = grade(r, a[:1], form)
                return {"sub_em": scores.sub_em_upstream, "em": scores.em, "f1": scores.f1}[field]

            def theirs(r: str, a: list[str], api=api, field=field) -> object:
                item = pipeline(r, a, api)
                return item if item in (None, RAISED) else float(item[f"judge_{field}"])

            rules = pipeline_rules(form, ours, theirs) | seen_rules(theirs)
            name = f"score, {form}: {field} / get_pred"
            unexplained += compare(name, ours, theirs, pairs, rules, near)
    return unexplained


def pipeline_rules(form: str, ours: Grader, theirs: Grader) -> dict[str, Rule]:
    """Return the rules of a whole pipeline."""

    def thought(r: str, a: list[str], mine: float, _) -> bool:
        without = theirs(strip_thinking(r), a)
        return thinks(r) and (near(without, mine) or (without in (None, RAISED) and mine == 0))

    def token(r: str, a: list[str], *_) -> bool:
        seen = r if without_tokens(r) == r else bare(r)  # it may stand beside LaTeX
        return form == "sentence" and near(ours(tidied(strip_thinking(r)), a), theirs(seen, a))

    return {
        "empty output (theirs leaves it out of n)": lambda r, a, mine, other: (
            other is None and mine == 0
        ),
        "theirs ends with an error": lambda r, a, mine, other: other == RAISED and mine == 0,
        "thinking (theirs grades thoughts without an end or an answer)": thought,
        "special tokens, dots before the answer": token,
        "other cases of the answer is (theirs finds lower case)": lambda r, a, mine, _: (
            form == "sentence" and near(theirs(lower(strip_thinking(r)), a), mine)
        ),
    }


# ---------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.truth", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("memagent", type=Path, metavar="FOLDER")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pairs = [*wrapped(args.pairs, args.seed), *fuzz(2 * args.pairs, args.seed)]
    utils = imported(args.memagent / "taskutils/memory_eval/utils/__init__.py")
    print(f"{'function: ours / theirs':<50} {'pairs':>7} {'differ':>7}  of which")
    unexplained = rewards(args.memagent / "verl/utils/reward_score/hotpotqa.py", pairs)
    unexplained += pipelines(pipeline_of(args.memagent, utils), pairs)
    print(f"{unexplained:,} unexplained" if unexplained else "all explained")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
