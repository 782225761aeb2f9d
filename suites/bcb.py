"""BigCodeBench: a function is written in one response, and judged by the tests of its task.

The form is BigCodeBench's JSON lines. A response passes if every test of the class `TestCases`,
inherited ones too, has run, none has failed, and none was skipped as a whole. Verdicts are those of
the released evaluator (bigcodebench/eval/__init__.py and evaluate.py at 47eff25) but for what
docs/evaluation.md lists. Code and tests share one process, and code can deceive them (a patched
assertEqual passes): the reward is a measurement and no proof.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, StringConstraints

from config.errors import UserError, clean, clip
from suites import Scope, Suite
from tasks.environments import Environment, Episode, Step, Text, Texts, Work, checked
from tasks.readers import records_of
from tasks.sandbox import confine, fence, fenced, lacking, require

SECONDS = 60.0  # of a task
SHOWN = 2000  # characters of what the tests say
INSTRUCTIONS = """\
Write Python code that does what the task says. Answer with the whole code, imports included, in one
fenced block. Tests that you do not see are run on it, without network, for at most {seconds:g}
seconds. There is one response."""

# ---------------------------------------------------------------- the file


def _names(libraries: object) -> object:
    """Return a list of names that the published file writes as text."""
    try:
        return ast.literal_eval(libraries) if isinstance(libraries, str) else libraries or ()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("this is no list of names of packages") from None


class Item(BaseModel):
    """One task as the file has it."""

    task_id: Text
    instruct_prompt: Text
    complete_prompt: Text
    entry_point: Annotated[str, StringConstraints(pattern=r"^[^\W\d]\w*$")]
    test: Annotated[Text, StringConstraints(pattern=r"class TestCases\b")]
    libs: Annotated[Texts, BeforeValidator(_names)] = ()
    canonical_solution: str | None = None
    code_prompt: str | None = None

    @property
    def begin(self) -> str:
        """What is put before a response."""
        return f"{self.code_prompt}\n    pass\n" if self.code_prompt else ""


def read(path: str | Path) -> dict[str, Item]:
    """Read JSON lines, or another container of such records: id -> item. UserError: it is wrong."""
    items: dict[str, Item] = {}
    for record in records_of(Path(path)):
        item = checked(Item, record.fields, record.where, "bcb reads BigCodeBench's JSON lines")
        if item.task_id in items:
            raise record.error(f"the task {item.task_id} was there before: ids must differ")
        items[item.task_id] = item
    if not items:
        raise UserError(f"{path} holds no task: bcb needs BigCodeBench as JSON lines.")
    return items


# ---------------------------------------------------------------- the verdict


def judge() -> None:
    """Run the tests of a module that stdin brings; write which there are, and which passed, to
    stderr.

    It is sent to the user's interpreter as text, and needs Python 3.8 and nothing of ours.
    """
    import builtins
    import json
    import os
    import sys
    import traceback
    import types
    import unittest

    verdict, given = os.fdopen(os.dup(2), "w"), json.load(sys.stdin)
    os.dup2(1, 2)  # what code and tests say joins the output
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    passed, parts, skipped = set(), set(), set()

    class Result(unittest.TestResult):
        def addSuccess(self, test, *error):
            passed.add(test._testMethodName)

        # the released evaluator looks at failures and errors alone
        addExpectedFailure = addUnexpectedSuccess = addSuccess

        def addSubTest(self, test, part, error):
            super().addSubTest(test, part, error)
            if error is None:
                parts.add(test._testMethodName)

        def addSkip(self, test, reason):
            if hasattr(test, "test_case"):  # one part of a test
                skipped.add(test.test_case._testMethodName)
            print("skipped:", reason)

    result, names, failed = Result(), [], set()
    try:
        # As in the released evaluator: a name of its own, by which what stands under `if __name__
        # == "__main__"` is not run and nothing is found (by pickle) before all of it has run; os,
        # sys and environ without an import; no exit and quit
        builtins.exit = builtins.quit = None
        module = types.ModuleType("__test__")
        module.__dict__.update(
            os=os, sys=sys, environ=os.environ, __builtins__=builtins, __file__="__test__.py"
        )
        exec(compile(given, "__test__.py", "exec"), module.__dict__)
        sys.modules["__test__"] = module
        loader = unittest.defaultTestLoader
        names = loader.getTestCaseNames(module.TestCases)
        loader.loadTestsFromTestCase(module.TestCases).run(result)
    except BaseException:  # an exit while a class is torn down, too
        traceback.print_exc(file=sys.stdout)
        failed = {"all"}
    for test, text in result.failures + result.errors:
        print(text)
        # "all": what is set up and torn down for the class
        failed.add(getattr(getattr(test, "test_case", test), "_testMethodName", "all"))
    good = set() if "all" in failed else (passed | skipped & parts) - failed
    sys.stdout.flush()
    verdict.write(json.dumps({name: name in good for name in names}) + "\n")
    verdict.flush()
    os._exit(0)  # threads that the code has left do not matter


# what a Python is, and which of the libraries that stdin names it cannot find
ASK = """
import importlib.util, json, sys

def is_missing(name):
    try:
        return importlib.util.find_spec(name.split(".")[0]) is None
    except (ImportError, ValueError):  # no name of a module
        return True

assert sys.version_info >= (3, 8)
missing = [name for name in json.load(sys.stdin) if is_missing(name)]
print(json.dumps([sys.executable, [sys.prefix, sys.base_prefix], missing]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that runs code shut in, with the folders that it needs for that."""

    program: str
    folders: tuple[Path, ...]
    missing: frozenset[str]
    """those of the libraries it was asked for that it lacks"""

    @classmethod
    def from_program(cls, python: str | Path, libraries: Sequence[str] = ()) -> Interpreter:
        """Ask an interpreter what it is. UserError: it is none, or too old."""
        program, names = Path(python).expanduser(), json.dumps([*libraries]).encode()
        try:
            ask = [program, "-I", "-c", ASK]
            answer = subprocess.run(ask, input=names, capture_output=True, timeout=60).stdout
            program, folders, missing = json.loads(answer)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise UserError(
                f"{python} cannot be run as a Python interpreter of 3.8 or newer: give the path of "
                "one, such as /usr/bin/python3."
            ) from error
        places = {*map(Path, folders), Path(program).resolve().parent.parent}
        if Path("/") in places:
            raise UserError(f"{python} has / as its folder: give one in a folder of its own.")
        outside = sorted(place for place in places if not place.is_relative_to("/usr"))
        return cls(program, tuple(outside), frozenset(missing))

    def judged(self, module: str, seconds: float) -> tuple[dict[str, bool], str, str]:
        """Run the tests of a module: by name which passed, what was said, why it broke off."""
        # numerical libraries keep to one thread and to what this processor can do; the rest is as
        # in the released evaluator
        variables = {
            name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")
        }
        variables |= {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MPLBACKEND": "Agg",
            "TZ": "UTC",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": "0",
        }
        argv = [self.program, "-I", "-c", inspect.getsource(judge) + "\njudge()\n"]
        ran = confine(argv, seconds, json.dumps(module).encode(), self.folders, variables)
        if ran.code is None:
            return {}, ran.output, "timed out"
        try:
            return {**json.loads(ran.errors)}, ran.output, ""
        except (ValueError, TypeError, RecursionError):
            return {}, ran.output + ran.errors, "crashed"


# ---------------------------------------------------------------- the suite


class Programs(Environment):
    """Tasks of BigCodeBench's form. UserError: the file, the interpreter or a part is missing.

    python: the interpreter that runs the code. skip: leave out tasks whose libraries it lacks
    instead of refusing.
    """

    name, most_steps = "bcb", 1

    def __init__(
        self, path: str | Path, python: str | Path, seconds: float = SECONDS, skip: bool = False
    ):
        self.instructions, self.seconds = INSTRUCTIONS.format(seconds=seconds), seconds
        items = read(path)
        require(self.name, lacking())
        libraries = sorted({library for item in items.values() for library in item.libs})
        self.interpreter = Interpreter.from_program(python, libraries)
        lacks = self.interpreter.missing
        self.items = {id: item for id, item in items.items() if not lacks & {*item.libs}}
        self.skipped = len(items) - len(self.items)
        self.skipped_because = f"need {', '.join(sorted(lacks))}"
        if (self.skipped and not skip) or not self.items:
            raise UserError(
                f"{self.skipped} of {len(items)} tasks of {path} {self.skipped_because}, which "
                f"{python} lacks: install them with {python} -m pip install, give another "
                "--interpreter, or --leave-out these tasks."
            )

    def tasks(self) -> Sequence[Work]:
        return [self._work(id, item) for id, item in self.items.items()]

    def _work(self, id: str, item: Item) -> Work:
        gold = f"{item.code_prompt or item.complete_prompt}{item.canonical_solution}"
        return Work(
            id, item.instruct_prompt, (), dataset=self.name, environment=self,
            solution=(fence(gold, "python"),) if item.canonical_solution else (),
            skills=item.libs,
            content=blake2b((item.begin + item.test).encode(), digest_size=8).hexdigest(),
        )  # fmt: skip

    def intent(self, id: str) -> str:
        return self.items[id].instruct_prompt

    def reset(self, id: str) -> Coding:
        return Coding(self, self.items[id])


@dataclass(slots=True)
class Coding(Episode):
    """One try of a task: one response."""

    environment: Programs
    item: Item

    @property
    def observation(self) -> str:
        return self.item.instruct_prompt

    def step(self, action: str) -> Step:
        """Judge the code of a response."""
        blocks = fenced(action, "python", "py", "python3")
        if not blocks:
            return Step("There is no fenced block of code.", True, -1.0, "no code")
        names = f"def {self.item.entry_point}("
        code = next((block for block in reversed(blocks) if names in block), blocks[-1])
        module = f"{self.item.begin}{code}\n{self.item.test}"
        try:
            tests, output, why = self.environment.interpreter.judged(
                module, self.environment.seconds
            )
        except OSError as error:
            return Step(f"Nothing ran: {error.strerror}.", True, -1.0, f"crashed: {error.strerror}")
        good = sum(map(bool, tests.values()))  # of whatever the code may have written there
        summary = f"{good} of {len(tests)} tests passed" + (f"; {why}." if why else ".")
        observation = "\n".join(filter(None, (clip(clean(output.strip()), SHOWN), summary)))
        return Step(observation, True, 1.0 if 0 < good == len(tests) else -1.0, why)


@dataclass(frozen=True)
class BCB(Suite):
    """Programs."""

    interpreter: str = ""
    """the Python that runs the programs, with the libraries they need; empty = this one"""
    leave_out: bool = False
    """leave out the tasks whose libraries that Python lacks, instead of refusing them all"""

    unit, metric, may_differ = "steps", "reward", ("leave_out",)

    def environment(self, scope: Scope) -> Programs:
        python = self.interpreter or sys.executable
        return Programs(self.file_in(scope), python, skip=self.leave_out)
