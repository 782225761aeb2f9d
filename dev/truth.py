"""Compare the text functions with those of the originals, on generated responses and answers.

    python -m dev.truth --memagent FOLDER --rememr1 FOLDER --ruler FOLDER

is run from the repository's root; one folder is enough. Each is a checkout
(BytedTsinghua-SIA/MemAgent, syr-cn/ReMemR1, NVIDIA/RULER), whose functions are imported and run
unchanged; what they import beside the standard library is replaced by stubs. No file of an original
and no data set is needed or kept here.

Printed for each function: pairs compared, pairs that differ, and of these how many each rule
explains. A rule holds for a pair only if the two sides agree once its cause is taken away. Pairs
that no rule explains are printed with examples, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
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
    exact_match,
    extract_boxed,
    extract_sentence,
    f1,
    grade,
    normalize_answer,
    ruler_match,
    strip_thinking,
    sub_em_upstream,
)
from tasks.mentions import answer_recall, count_phrases, phrases

RAISED = "raised"  # in place of what an original would have returned
Pair = tuple[str, list[str]]  # response, accepted answers

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
    name = f"original_{file.parent.name}_{file.stem}"
    package = [str(file.parent)] if file.stem == "__init__" else None
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


def pipeline_of(
    memagent: Path, utils: ModuleType, script: str = "ruler_hqa"
) -> Callable[[str, Sequence[str], str], dict | str | None]:
    """Return a function (response, answers, api) that runs MemAgent's whole `get_pred`.

    It gives the fields that are written, None where nothing is, `RAISED` where it fails.
    """
    stubs = (
        "tqdm", "datasets", "transformers", "tiktoken", "torch", "torch.multiprocessing",
        "utils.envs",
    )  # fmt: skip
    with mock.patch.dict(sys.modules, {"utils": utils}):
        module = imported(memagent / f"taskutils/memory_eval/{script}.py", stubs)
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

Rule = Callable[[str, list[str], object, object], bool]  # response, answers, ours, theirs


class Comparison:
    """The comparison of one function with its original, a line of the table."""

    unexplained = 0  # pairs that no rule explains, of all comparisons

    def __init__(
        self,
        name: str,
        ours: Callable,
        theirs: Callable,
        rules: dict[str, Rule] | None = None,
        same: Callable = lambda a, b: a == b,
    ):
        self.name, self.ours, self.theirs = name, ours, quietly(theirs)
        self.rules, self.same = rules or {}, same

    def run(self, pairs: Iterable[Pair]) -> None:
        n, why, examples = 0, Counter(), []
        for response, answers in pairs:
            n += 1
            ours, theirs = self.ours(response, answers), self.theirs(response, answers)
            if self.same(ours, theirs):
                continue
            holding = (
                name for name, holds in self.rules.items() if holds(response, answers, ours, theirs)
            )
            rule = next(holding, "UNEXPLAINED")
            why[rule] += 1
            if rule == "UNEXPLAINED":
                examples.append((response, answers, ours, theirs))
        Comparison.unexplained += len(examples)
        rules = "; ".join(f"{count:,} {rule}" for rule, count in why.most_common())
        print(f"{self.name:<58} {n:>7,} {why.total():>7,}  {rules}", flush=True)
        for example in examples[:5]:
            print("    ", *map(repr, example), sep="  ")


def close(a: object, b: object) -> bool:
    """Return whether numbers are equal up to the order of the arithmetic."""
    return RAISED not in (a, b) and math.isclose(float(a), float(b), abs_tol=1e-9)


def near(a: object, b: object) -> bool:
    """Return whether numbers are equal once one is rounded to .01, as MemAgent does."""
    return None not in (a, b) and RAISED not in (a, b) and abs(a - b) <= 0.005 + 1e-9


def thinks(text: str) -> bool:
    return "<think>" in text or "</think>" in text


TOKENS = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")


def without_tokens(text: str) -> str:
    for token in TOKENS:
        text = text.replace(token, "")
    return text


def tidied(response: str) -> str:
    """Strip from a sentence's answer what MemAgent strips.

    That is DeepSeek's special tokens, and dots before the answer.
    """
    before, phrase, answer = response.replace("*", "").rpartition("the answer is")
    return before + phrase + without_tokens(answer.strip()).strip().lstrip(".")


# ---------------------------------------------------------------- what is compared


def rewards(name: str, theirs: Callable[[str, list[str]], float]) -> Comparison:
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
    return Comparison(f"boxed_reward / {name}", boxed_reward, theirs, rules)


def extractions(utils: ModuleType) -> list[Comparison]:
    boxed = Comparison(
        "extract_boxed / MemAgent extract_boxed_answer",
        lambda r, a: extract_boxed(r),
        lambda r, a: utils.extract_boxed_answer(r),
        {"theirs raises (ours None)": lambda r, a, ours, theirs: theirs == RAISED and ours is None},
    )
    sentence = Comparison(
        "extract_sentence / MemAgent extract_answer",
        lambda r, a: extract_sentence(r),
        lambda r, a: utils.extract_answer(r),
        {
            "dots before the answer": lambda r, a, ours, theirs: (
                without_tokens(r) == r and extract_sentence(tidied(r)) == theirs
            ),
            "DeepSeek's special tokens": lambda r, a, ours, theirs: (
                extract_sentence(tidied(r)) == theirs
            ),
            "other cases (theirs finds the words in lower case)": lambda r, a, ours, theirs: (
                extract_sentence(tidied(lower(r))) == utils.extract_answer(lower(r))
            ),
        },
    )
    return [boxed, sentence]


APIS = {"sentence": "recurrent", "boxed": "recurrent-boxed"}  # form of the answer -> MemAgent's
EMPTY = "empty output (theirs leaves it out of n)"
Grader = Callable[[str, list[str]], float | str | None]


def lower(response: str) -> str:
    """Return the response with "the answer is" in lower case."""
    return re.sub("the answer is", "the answer is", response, flags=re.IGNORECASE)


def bare(text: str) -> str:
    """Return a text without LaTeX's styles and spaces."""
    return re.sub(r"\\[,;: ]", " ", re.sub(STYLE, "", text))


def grades_what_is_seen(theirs: Grader) -> dict[str, Rule]:
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


def metrics(utils: ModuleType) -> list[Comparison]:
    """Compare metrics on the prediction itself: the box's content, else the whole response.

    Empty predictions are left out.
    """

    def on_pred(function: Callable) -> Callable:
        return lambda r, a: function(extract_boxed(r) or r, a[0]) if r else 0

    def blank(r: str, a: list[str], ours: object, theirs: object) -> bool:
        return ours == 0 and not (extract_boxed(r) or r)

    pairs = [
        (
            "normalize_answer",
            lambda p, g: normalize_answer(p),
            lambda p, g: utils.normalize_answer(p),
        ),
        (
            "exact_match / exact_match_score",
            lambda p, g: exact_match(p, [g]),
            utils.exact_match_score,
        ),
        ("f1 / f1_score", lambda p, g: f1(p, [g]), lambda p, g: utils.f1_score(p, g)[0]),
        (
            "sub_em_upstream / sub_exact_match_score",
            lambda p, g: sub_em_upstream(p, [g]),
            utils.sub_exact_match_score,
        ),
    ]
    return [
        Comparison(
            name,
            on_pred(ours),
            on_pred(theirs),
            {"empty": blank} | ({} if "upstream" in name else grades_what_is_seen(on_pred(theirs))),
            close if "normalize" not in name else lambda a, b: a == b,
        )
        for name, ours, theirs in pairs
    ]


def judged(pipeline: Callable, api: str, field: str, more: Sequence[str] = ()) -> Grader:
    """Return a function that reads one field of MemAgent's `get_pred`, with `more` answers."""

    def theirs(r: str, a: list[str]) -> float | str | None:
        item = pipeline(r, [*a, *more], api)
        return item if item in (None, RAISED) else float(item[field])

    return theirs


def pipeline_rules(form: str, ours: Grader, theirs: Grader, thinking: str) -> dict[str, Rule]:
    """Return the rules of a whole pipeline; thinking: the name of the rule on thoughts."""

    def thought(r: str, a: list[str], mine: float, _) -> bool:
        without = theirs(strip_thinking(r), a)
        return thinks(r) and (near(without, mine) or (without in (None, RAISED) and mine == 0))

    def token(r: str, a: list[str], *_) -> bool:
        seen = r if without_tokens(r) == r else bare(r)  # it may stand beside LaTeX
        return form == "sentence" and near(ours(tidied(strip_thinking(r)), a), theirs(seen, a))

    return {
        EMPTY: lambda r, a, mine, other: other is None and mine == 0,
        "theirs ends with an error": lambda r, a, mine, other: other == RAISED and mine == 0,
        thinking: thought,
        "special tokens, dots before the answer": token,
        "other cases of the answer is (theirs finds lower case)": lambda r, a, mine, _: (
            form == "sentence" and near(theirs(lower(strip_thinking(r)), a), mine)
        ),
    }


def pipelines(pipeline: Callable) -> list[Comparison]:
    """Compare the whole grading of one answer, field by field."""
    comparisons = []
    thinking = "thinking (theirs grades thoughts without an end or an answer)"
    for form, api in APIS.items():
        for field in ("sub_em", "em", "f1"):

            def ours(r: str, a: list[str], form=form, field=field) -> float:
                scores = grade(r, a[:1], form)
                return {"sub_em": scores.sub_em_upstream, "em": scores.em, "f1": scores.f1}[field]

            theirs = judged(pipeline, api, f"judge_{field}")
            rules = pipeline_rules(form, ours, theirs, thinking) | grades_what_is_seen(theirs)
            name = f"score, {form}: {field} / get_pred judge_{field}"
            comparisons.append(Comparison(name, ours, theirs, rules, near))
    return comparisons


def asked_for_all(pipeline: Callable) -> list[Comparison]:
    """Compare the grading of RULER's own tasks, which ask for every answer.

    Their mean is rounded to .01 for each item.
    """
    comparisons = []
    for form, api in APIS.items():

        def ours(r: str, a: list[str], form=form) -> float:
            return grade(r, [*a, "Rome"], form, all_asked=True).sub_em

        theirs = judged(pipeline, api, "judge_sub_em", more=["Rome"])
        rules = pipeline_rules(form, ours, theirs, "thinking")
        name = f"score, {form}: all asked / ruler_general get_pred"
        comparisons.append(Comparison(name, ours, theirs, rules, near))
    return comparisons


def headline(pipeline: Callable) -> list[Comparison]:
    """Compare our headline metric with MemAgent's."""
    comparisons = []
    for form, api in APIS.items():

        def two_way(r: str, a: list[str], _, other: object, form=form) -> bool:
            return grade(r, a, form).sub_em_upstream == other

        def alias(r: str, a: list[str], _, other: object, form=form) -> bool:
            return grade(r, a[:1], form).sub_em == other

        def as_above(r: str, a: list[str], _, other: object) -> bool:
            return other in (None, RAISED) or thinks(r) or without_tokens(r) != r or ".." in r

        def ours(r: str, a: list[str], form=form) -> float:
            return grade(r, a, form).sub_em

        rules = {
            "another accepted answer": alias,
            "their other direction: the prediction in the answer": two_way,
            "as for sub_em_upstream above": as_above,
        } | grades_what_is_seen(judged(pipeline, api, "judge_sub_em"))
        name = f"score, {form}: headline sub_em / judge_sub_em"
        comparisons.append(Comparison(name, ours, judged(pipeline, api, "judge_sub_em"), rules))
    return comparisons


MEMORIES = [
    "<update>{}</update>", "<update>Otto is in {}</update>", "<update>{}.</update>",
    "<update>so \\boxed{{{}}}</update>", "<update>({}) it is</update>",
]  # fmt: skip


def memories_with_tags(n: int, seed: int) -> None:
    """Check that answers are found in memories as ReMemR1's code keeps them, tags and all.

    Of our functions alone: upstream does not look for them.
    """
    rng, missed = random.Random(seed), Counter()
    searched = [a for answers in ANSWERS for a in answers]
    searched = [a for a in searched if normalize_answer(a) not in ("", "yes", "no")]
    for _ in range(n):
        answer = rng.choice(searched)
        memory = rng.choice(MEMORIES).format(answer)
        missed.update(
            stand=not count_phrases(phrases([answer]), memory),
            recall=answer_recall([answer], memory) != 1,
        )
    Comparison.unexplained += missed.total()
    what = "memories with tags: the answer is not seen by stand; recall"
    print(f"{what:<58} {n:>7,} {missed['stand']:>7,}  {missed['recall']:,} by answer_recall")


# ---------------------------------------------------------------- the command


def compare_memagent(checkout: Path, pairs: list[Pair], strings: list[Pair]) -> None:
    theirs = imported(checkout / "verl/utils/reward_score/hotpotqa.py").compute_score
    utils = imported(checkout / "taskutils/memory_eval/utils/__init__.py")
    rewards("MemAgent compute_score", quietly(theirs)).run(pairs)
    rewards("MemAgent compute_score, fuzz", quietly(theirs)).run(strings)
    for comparison in (*extractions(utils), *metrics(utils)):
        comparison.run(pairs)
        comparison.name += ", fuzz"
        comparison.run(strings)
    pipeline = pipeline_of(checkout, utils)
    for comparison in (
        *pipelines(pipeline),
        *asked_for_all(pipeline_of(checkout, utils, "ruler_general")),
        *headline(pipeline),
    ):
        comparison.run(pairs)


def compare_rememr1(checkout: Path, pairs: list[Pair], strings: list[Pair]) -> None:
    theirs = imported(checkout / "verl/utils/reward_score/hotpotqa.py").compute_score
    rewards("ReMemR1 compute_score, em", quietly(theirs)).run(pairs)
    rewards("ReMemR1 compute_score, em, fuzz", quietly(theirs)).run(strings)
    for comparison in metrics(imported(checkout / "taskutils/memory_eval/utils/__init__.py")):
        comparison.name += ", ReMemR1's"
        comparison.run(pairs)


def compare_ruler(checkout: Path, pairs: list[Pair]) -> None:
    match = imported(checkout / "scripts/eval/synthetic/constants.py").string_match_all
    Comparison(
        "ruler_match / NVIDIA string_match_all, in percent",
        lambda r, a: round(100 * ruler_match(r, a), 2),
        lambda r, a: match([r], [a]),
    ).run([(response, [*answers, "Rome"]) for response, answers in pairs])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    checkouts = {
        "memagent": "BytedTsinghua-SIA/MemAgent",
        "rememr1": "syr-cn/ReMemR1",
        "ruler": "NVIDIA/RULER",
    }
    for name, repository in checkouts.items():
        help = f"a checkout of {repository}"
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=help)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--fuzz", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (args.memagent or args.rememr1 or args.ruler):
        parser.error("give at least one checkout")
    pairs, strings = [*wrapped(args.pairs, args.seed)], [*fuzz(args.fuzz, args.seed)]
    print(f"{'function: ours / theirs':<58} {'pairs':>7} {'differ':>7}  of which")
    if args.memagent:
        compare_memagent(args.memagent, pairs, strings)
    if args.rememr1:
        compare_rememr1(args.rememr1, pairs, strings)
    if args.ruler:
        compare_ruler(args.ruler, pairs)
    memories_with_tags(args.pairs, args.seed)
    n = Comparison.unexplained
    print(f"{n:,} unexplained" if n else "all explained")
    return int(n > 0)


if __name__ == "__main__":
    sys.exit(main())
