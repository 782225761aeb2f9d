"""Compare the text functions with those of the originals, on generated pairs of response and answers.

    python -m dev.truth --memagent FOLDER --rememr1 FOLDER --ruler FOLDER     # from the repository's root; one folder is enough

Each FOLDER is a checkout (BytedTsinghua-SIA/MemAgent, syr-cn/ReMemR1, NVIDIA/RULER). Its functions are imported from there and run as they
are; what they import beside the standard library is replaced by stubs. No file of an original and no data set is needed or kept here.

Printed for each function: pairs compared, pairs that differ, and of these how many each rule explains. A rule is no guess: it holds for a
pair only if the two agree once its cause is taken away. What no rule explains is printed with examples, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

from commands.taskfiles import is_known
from data import (
    TAIL_CHARACTERS,
    _bare,
    answer_recall,
    boxed_reward,
    count_phrases,
    exact_match,
    extract_boxed,
    extract_sentence,
    f1,
    grade,
    normalize_answer,
    phrases,
    ruler_match,
    strip_thinking,
    sub_em_upstream,
)

RAISED = "raised"  # in place of what an original would have returned
Pair = tuple[str, list[str]]  # response, accepted answers

# ---------------------------------------------------------------- pairs

ANSWERS = [
    ["Lima"],
    ["Paris", "Lutetia"],
    ["New York City", "New York"],
    ["the Beatles"],
    ["The Old Mill"],
    ["yes"],
    ["no"],
    ["1994"],
    ["7 May 1812"],
    ["12.5"],
    ["1,200", "1200"],
    ["U.S.A.", "United States"],
    ["O'Brien"],
    ["AT&T"],
    ["Jean-Luc Moreau"],
    ["Washington, D.C."],
    ["A"],
    ["a cat"],
    ["Montréal"],
    ["noanswer"],
    ["3:45 p.m."],
    ["$40"],
    ["7%"],
    ["John Q. Public, Jr."],
    ['"Heat"'],
    ["Chicago (IL)"],
    ["Ida Cole and Otto Berg"],
    ["x^2"],
    ["N/A"],
    ["The Art of the Long Walk Home, Volume II"],
]
FORMS = [
    "{a}",
    "{a}",
    "{l}",
    "{u}",
    "the {a}",
    "{a}.",
    "{a}, France",
    "old {a}",
    "{first}",
    "{last}",
    "{a} or Rome",
    "Rome",
    "yes",
    "no",
    "",
    " ",
    "\n",
    ".",
    "...",
    "The",
    "a",
    "{a}{a}",
    "{spaced}",
    "\\text{{{a}}}",
    "\\left {a} \\right",
    "{{{a}}}",
    "{{{a}",
    "**{a}**",
    "{a}\n",
    "  {a} ",
    "{alias}",
    ".5 {a}",
    '"{a}"',
]
WRAPPINGS = [
    "\\boxed{{{x}}}",
    "So it is \\boxed{{{x}}}.",
    "$\\boxed{{{x}}}$",
    "\\boxed {x}",
    "$\\boxed {x}$ is it",
    "\\boxed{{{x}",
    "\\BOXED{{{x}}}",
    "\\fbox{{{x}}}",
    "\\boxed\\text{{{x}}}",
    "\\boxed{{Rome}} or rather \\boxed{{{x}}}",
    "\\boxed{{{x}}} or rather \\boxed{{Rome}}",
    "{x}",
    "It is {x}.",
    "the answer is {x}",
    "Therefore, the answer is {x}.",
    "the answer is **{x}**.",
    "the answer is ..{x}..",
    "The answer is {x}",
    "the answer is Rome. No, the answer is {x}",
    "the answer is ({x})<｜end▁of▁sentence｜>",
    "the answer is <｜Assistant｜>{x}",
    "\\boxed{{{x}}} the answer is {x}",
    "<think>{x}</think>\\boxed{{{x}}}, the answer is {x}",
    "<think>the answer is {x} \\boxed{{{x}}}</think>",
    "<think>the answer is {x} \\boxed{{{x}}}",
    "hm</think>the answer is {x} \\boxed{{{x}}}",
    "<think>\\boxed{{{x}}}</think>the answer is Rome \\boxed{{Rome}}",
    "the answer is {x} \\boxed{{{x}}}<think>or",
    "<think>the answer is {x}</think>\n",
    "\\boxed{{{x}}}{tail}",
    "{tail}\\boxed{{{x}}}",
    "the answer is {x}{tail}",
    "",
    " ",
    "<update>{x}</update>",
    "I do not know",
]
LATEX = [
    "\\boxed{",
    "\\boxed ",
    "\\boxed",
    "\\fbox{",
    "{",
    "}",
    "}",
    "}",
    "$",
    "\\text{",
    "\\left",
    "\\right",
    "\\!",
    "\\\\",
    "tfrac",
    "dfrac",
    "^{\\circ}",
    "^\\circ",
    "\\$",
    "\\%",
    " .",
    "{.",
    " ",
    "\n",
    "Lima",
    "lima",
    "the ",
    "5",
    ".",
    ",",
    "yes",
    "no",
    "a",
    "-",
]


def wrapped(n: int, seed: int) -> Iterator[Pair]:
    """n responses, an answer in one of the forms in one of the wrappings."""
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
    """n strings of pieces of LaTeX, and an answer of the same kind."""
    rng = random.Random(f"fuzz {seed}")
    for _ in range(n):
        yield (
            "".join(rng.choices(LATEX, k=rng.randint(1, 12))),
            ["".join(rng.choices(LATEX[4:], k=rng.randint(1, 3)))],
        )


# ---------------------------------------------------------------- the originals


def imported(file: Path, stubs: Iterable[str] = ()) -> ModuleType:
    """An original's module, from its file. Modules beside it are found; those in `stubs` answer anything to anyone."""
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
    """The function, without what it prints; what it raises is `RAISED`."""

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
    """MemAgent's whole `get_pred` for one response: the fields that it writes, None where it writes nothing, `RAISED` where it ends."""
    stubs = (
        "tqdm",
        "datasets",
        "transformers",
        "tiktoken",
        "torch",
        "torch.multiprocessing",
        "utils.envs",
    )
    with mock.patch.dict(sys.modules, {"utils": utils}):
        module = imported(memagent / f"taskutils/memory_eval/{script}.py", stubs)
    module.AutoTokenizer = mock.MagicMock()
    said: list[str] = []
    engine = SimpleNamespace(run=lambda outputs: [*said])
    lent = {"utils": utils, "uvloop": engine} | {
        f"utils.{name}": mock.MagicMock() for name in ("aio", "recurrent", "recurrent_boxed")
    }
    out = Path(tempfile.mkdtemp()) / "out.jsonl"

    def get_pred(response: str, answers: Sequence[str], api: str) -> dict | None:
        said[:] = [response]
        module.args = SimpleNamespace(
            model="m", tokenizer="t", api=api, n_proc=1, force=True, length=0, split="niah"
        )
        with mock.patch.dict(sys.modules, lent), contextlib.suppress(ZeroDivisionError):
            module.get_pred(
                [{"answers": [*answers], "outputs": [*answers], "context": ""}],
                module.args,
                str(out),
            )
        lines = out.read_text(encoding="utf-8").splitlines()
        return json.loads(lines[0]) if lines else None

    once = cache(quietly(get_pred))  # several fields of one response are asked for
    return lambda response, answers, api: once(response, tuple(answers), api)


# ---------------------------------------------------------------- comparing

Rule = Callable[[str, list[str], object, object], bool]  # response, answers, ours, theirs


class Comparison:
    """Counts of one function, printed as a line of the table."""

    missed = 0  # pairs that no rule explains, of all comparisons

    def __init__(
        self,
        name: str,
        ours: Callable,
        theirs: Callable,
        rules: dict[str, Rule] | None = None,
        same: Callable = lambda a, b: a == b,
    ):
        self.name, self.ours, self.theirs, self.rules, self.same = (
            name,
            ours,
            quietly(theirs),
            rules or {},
            same,
        )

    def run(self, pairs: Iterable[Pair]) -> None:
        n, why, examples = 0, Counter(), []
        for response, answers in pairs:
            n += 1
            ours, theirs = self.ours(response, answers), self.theirs(response, answers)
            if self.same(ours, theirs):
                continue
            rule = next(
                (
                    name
                    for name, holds in self.rules.items()
                    if holds(response, answers, ours, theirs)
                ),
                "UNEXPLAINED",
            )
            why[rule] += 1
            if rule == "UNEXPLAINED":
                examples.append((response, answers, ours, theirs))
        Comparison.missed += len(examples)
        print(
            f"{self.name:<58} {n:>7,} {why.total():>7,}  {'; '.join(f'{count:,} {rule}' for rule, count in why.most_common())}",
            flush=True,
        )
        for example in examples[:5]:
            print("    ", *map(repr, example), sep="  ")


def close(a: object, b: object) -> bool:
    """Numbers that are the same but for the order of the arithmetic."""
    return RAISED not in (a, b) and math.isclose(float(a), float(b), abs_tol=1e-9)


def near(a: object, b: object) -> bool:
    """Numbers that are the same once MemAgent has rounded one of them to .01."""
    return None not in (a, b) and RAISED not in (a, b) and abs(a - b) <= 0.005 + 1e-9


def thinks(text: str) -> bool:
    return "<think>" in text or "</think>" in text


TOKENS = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")


def without_tokens(text: str) -> str:
    for token in TOKENS:
        text = text.replace(token, "")
    return text


def tidied(response: str) -> str:
    """The response without what MemAgent takes off a sentence's answer: DeepSeek's special tokens, and dots before it."""
    before, said, answer = response.replace("*", "").rpartition("the answer is")
    return before + said + without_tokens(answer.strip()).strip().lstrip(".")


# ---------------------------------------------------------------- what is compared


def rewards(name: str, theirs: Callable[[str, list[str]], float]) -> Comparison:
    rules = {
        "think tags (ours drops thinking first)": lambda r, a, ours, _: (
            thinks(r) and theirs(strip_thinking(r), a) == ours
        ),
        "an empty box, an answer that clean-up empties (ours 0)": lambda r, a, ours, _: (
            ours == 0
            and extract_boxed(r.lower()[-TAIL_CHARACTERS:]) == ""
            and "" in (_bare(gold.lower()) for gold in a)
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
        },
    )
    return [boxed, sentence]


def metrics(utils: ModuleType) -> list[Comparison]:
    """On the prediction itself: what stands in the box, else the whole response; empty ones are left out."""

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
            {"empty": blank},
            close if "normalize" not in name else lambda a, b: a == b,
        )
        for name, ours, theirs in pairs
    ]


def pipelines(pipeline: Callable) -> list[Comparison]:
    found = []
    for form, api in (("sentence", "recurrent"), ("boxed", "recurrent-boxed")):
        for field in ("sub_em", "em", "f1"):

            def theirs(r: str, a: list[str], api=api, field=field) -> float | str | None:
                item = pipeline(r, a, api)
                return item if item in (None, RAISED) else float(item[f"judge_{field}"])

            def ours(r: str, a: list[str], form=form, field=field) -> float:
                scores = grade(r, a[:1], form)
                return {"sub_em": scores.sub_em_upstream, "em": scores.em, "f1": scores.f1}[field]

            def thought(r: str, a: list[str], mine: float, _, theirs=theirs) -> bool:
                without = theirs(strip_thinking(r), a)
                return thinks(r) and (
                    near(without, mine) or (without in (None, RAISED) and mine == 0)
                )

            def token(r: str, a: list[str], _, other: object, form=form, ours=ours) -> bool:
                return form == "sentence" and near(ours(tidied(strip_thinking(r)), a), other)

            rules = {
                "empty output (theirs leaves it out of n)": lambda r, a, mine, other: (
                    other is None and mine == 0
                ),
                "theirs ends with an error": lambda r, a, mine, other: (
                    other == RAISED and mine == 0
                ),
                "thinking (theirs grades thoughts without an end or an answer)": thought,
                "special tokens, dots before the answer": token,
                "a box of blanks equals an answer of articles (ours 0)": lambda r, a, mine, other: (
                    mine == 0
                    and other == 1
                    and not normalize_answer(a[0])
                    and not (extract_boxed(strip_thinking(r)) or "x").strip()
                ),
            }
            found.append(
                Comparison(
                    f"score, {form}: {field} / get_pred judge_{field}", ours, theirs, rules, near
                )
            )
    return found


def asked_for_all(pipeline: Callable) -> list[Comparison]:
    """RULER's own tasks, every answer asked for; their mean is rounded to .01 for each item."""
    found = []
    for form, api in (("sentence", "recurrent"), ("boxed", "recurrent-boxed")):

        def theirs(r: str, a: list[str], api=api) -> float | str | None:
            item = pipeline(r, [*a, "Rome"], api)
            return item if item in (None, RAISED) else float(item["judge_sub_em"])

        def ours(r: str, a: list[str], form=form) -> float:
            return grade(r, [*a, "Rome"], form, all_asked=True).sub_em

        def thought(r: str, a: list[str], mine: float, _, theirs=theirs) -> bool:
            without = theirs(strip_thinking(r), a)
            return thinks(r) and (near(without, mine) or (without in (None, RAISED) and mine == 0))

        def token(r: str, a: list[str], _, other: object, form=form, ours=ours) -> bool:
            return form == "sentence" and near(ours(tidied(strip_thinking(r)), a), other)

        rules = {
            "empty output (theirs leaves it out of n)": lambda r, a, mine, other: (
                other is None and mine == 0
            ),
            "theirs ends with an error": lambda r, a, mine, other: other == RAISED and mine == 0,
            "thinking": thought,
            "special tokens, dots before the answer": token,
        }
        found.append(
            Comparison(
                f"score, {form}: all asked / ruler_general get_pred", ours, theirs, rules, near
            )
        )
    return found


def headline(pipeline: Callable) -> list[Comparison]:
    found = []
    for form, api in (("sentence", "recurrent"), ("boxed", "recurrent-boxed")):

        def theirs(r: str, a: list[str], api=api) -> float:
            item = pipeline(r, a, api)
            return item if item in (None, RAISED) else float(item["judge_sub_em"])

        def two_way(r: str, a: list[str], _, other: object, form=form) -> bool:
            return grade(r, a, form).sub_em_upstream == other

        def alias(r: str, a: list[str], _, other: object, form=form) -> bool:
            return grade(r, a[:1], form).sub_em == other

        rules = {
            "another accepted answer": alias,
            "their other direction: the prediction in the answer": two_way,
            "as for sub_em_upstream above": lambda r, a, mine, other: (
                other in (None, RAISED) or thinks(r) or without_tokens(r) != r or ".." in r
            ),
        }
        found.append(
            Comparison(
                f"score, {form}: headline sub_em / judge_sub_em",
                lambda r, a, form=form: grade(r, a, form).sub_em,
                theirs,
                rules,
            )
        )
    return found


def filters(memagent: Path) -> list[Comparison]:
    folder = memagent / "taskutils/memory_data"
    verifier = imported(folder / "hotpotqa_verifier.py")
    with mock.patch.dict(sys.modules, {"hotpotqa_verifier": verifier}):
        script = imported(
            folder / "filter.py", ("openai", "rich", "fire", "memory_data", "memory_data.utils")
        )

    def one(function: Callable, response: str, answers: list[str]) -> bool:
        return bool(function(([response], {"ground_truth": answers}))[0])

    boxed, contains = partial(one, quietly(script.scores)), partial(one, script.contains)

    def known(rule: str, response: str, answers: list[str]) -> bool:
        return is_known(
            {"response": response, "reward": boxed_reward(response, answers), "answers": answers},
            rule,
        )

    def thought(theirs: Callable) -> dict[str, Rule]:
        def holds(r: str, a: list[str], ours: object, _) -> bool:
            return thinks(r) and theirs(r, a, strip_thinking(r)) == ours

        return {"think tags (ours drops thinking before it looks at the box)": holds}

    return [
        Comparison(
            "data filter --rule right / filter.py scores",
            partial(known, "right"),
            boxed,
            thought(lambda r, a, rest: boxed(rest, a)),
        ),
        Comparison(
            "data filter --rule contains / filter.py scores or contains",
            partial(known, "contains"),
            lambda r, a: boxed(r, a) or contains(r, a),
            thought(lambda r, a, rest: boxed(rest, a) or contains(r, a)),
        ),
    ]


def held(n: int, seed: int) -> None:
    """The answers that are seen in memories as ReMemR1's code keeps them, tags and all. Ours alone: upstream does not look."""
    rng, missed = random.Random(seed), Counter()
    for _ in range(n):
        answer = rng.choice(
            [
                a
                for answers in ANSWERS
                for a in answers
                if normalize_answer(a) not in ("", "yes", "no")
            ]
        )
        memory = rng.choice(
            [
                "<update>{}</update>",
                "<update>Otto is in {}</update>",
                "<update>{}.</update>",
                "<update>so \\boxed{{{}}}</update>",
                "<update>({}) it is</update>",
            ]
        )
        memory = memory.format(answer)
        missed.update(
            stand=not count_phrases(phrases([answer]), memory),
            recall=answer_recall([answer], memory) != 1,
        )
    Comparison.missed += missed.total()
    print(
        f"{'memories with tags: the answer is not seen by stand; recall':<58} {n:>7,} {missed['stand']:>7,}  {missed['recall']:,} by answer_recall"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, repository in (
        ("memagent", "BytedTsinghua-SIA/MemAgent"),
        ("rememr1", "syr-cn/ReMemR1"),
        ("ruler", "NVIDIA/RULER"),
    ):
        parser.add_argument(
            f"--{name}", type=Path, metavar="FOLDER", help=f"a checkout of {repository}"
        )
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--fuzz", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (args.memagent or args.rememr1 or args.ruler):
        parser.error("give at least one checkout")
    pairs, strings = [*wrapped(args.pairs, args.seed)], [*fuzz(args.fuzz, args.seed)]
    print(f"{'function: ours / theirs':<58} {'pairs':>7} {'differ':>7}  of which")
    if args.memagent:
        theirs = imported(args.memagent / "verl/utils/reward_score/hotpotqa.py").compute_score
        utils = imported(args.memagent / "taskutils/memory_eval/utils/__init__.py")
        rewards("MemAgent compute_score", quietly(theirs)).run(pairs)
        rewards("MemAgent compute_score, fuzz", quietly(theirs)).run(strings)
        for comparison in (*extractions(utils), *metrics(utils)):
            comparison.run(pairs)
            comparison.name += ", fuzz"
            comparison.run(strings)
        pipeline = pipeline_of(args.memagent, utils)
        for comparison in (
            *pipelines(pipeline),
            *asked_for_all(pipeline_of(args.memagent, utils, "ruler_general")),
            *headline(pipeline),
            *filters(args.memagent),
        ):
            comparison.run(pairs)
    if args.rememr1:
        module = imported(args.rememr1 / "verl/utils/reward_score/hotpotqa.py")
        rewards("ReMemR1 compute_score, em", quietly(module.compute_score)).run(pairs)
        rewards("ReMemR1 compute_score, em, fuzz", quietly(module.compute_score)).run(strings)
        for comparison in metrics(
            imported(args.rememr1 / "taskutils/memory_eval/utils/__init__.py")
        ):
            comparison.name += ", ReMemR1's"
            comparison.run(pairs)
    if args.ruler:
        match = imported(args.ruler / "scripts/eval/synthetic/constants.py").string_match_all
        all_asked = [(response, [*answers, "Rome"]) for response, answers in pairs]
        Comparison(
            "ruler_match / NVIDIA string_match_all, in percent",
            lambda r, a: round(100 * ruler_match(r, a), 2),
            lambda r, a: match([r], [a]),
        ).run(all_asked)
    held(args.pairs, args.seed)
    print(f"{Comparison.missed:,} unexplained" if Comparison.missed else "all explained")
    return int(Comparison.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
