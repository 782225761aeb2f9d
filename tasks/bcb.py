"""BigCodeBench: a function is written in one response, and judged by the tests of its task.

Holds: `BCB`, `Interpreter`, `read`, `judge`. Leaves out: what shuts the code in (tasks/sandbox.py).
Exercise it: `pytest tests/tasks/test_bcb.py`. Read next: tasks/environments.py.

The form is BigCodeBench's, JSON lines {task_id, instruct_prompt, complete_prompt, test,
entry_point, libs}; canonical_solution and code_prompt are read where they are. The tests are those
that the class `TestCases` has, inherited ones too. A response passes if every one of them has run,
none has failed, and none was skipped as a whole. Verdicts are those of the released evaluator
(bigcodebench/eval/__init__.py and evaluate.py at 47eff25) but for what docs/streams.md lists. Code
and tests share one process, and code can deceive them (a patched assertEqual passes): the reward is
a measurement and no proof.

The interpreter is the user's: BigCodeBench's own packages are of 2022 and want Python 3.10.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from config.errors import UserError, clean, clip
from config.foreign import from_json, read_data
from tasks.environments import Environment, Episode, Step, Work
from tasks.sandbox import confine, fence, fenced, lacking, require

SECONDS = 60.0  # of a task
SHOWN = 2000  # characters of what the tests say
FIELDS = ("task_id", "instruct_prompt", "complete_prompt", "test", "entry_point")
INSTRUCTIONS = """\
Write Python code that does what the task says. Answer with the whole code, imports included, in one
fenced block. Tests that you do not see are run on it, without network, for at most {seconds:g}
seconds. There is one response."""


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


def search() -> None:
    """Write which of the libraries that stdin names are not there; sent like `judge`."""
    import importlib.util
    import json
    import sys

    missing = []
    for name in json.load(sys.stdin):
        try:
            found = importlib.util.find_spec(name.split(".")[0])
        except (ImportError, ValueError):  # no name of a module
            found = None
        if not found:
            missing.append(name)
    print(json.dumps(missing))


class BCB(Environment):
    """Tasks of BigCodeBench's form. UserError: the file, the interpreter or a part is missing.

    python: the interpreter that runs the code. prompt: which text of a task is shown. skip: leave
    out tasks whose libraries the interpreter lacks (`left_out` has their ids) instead of refusing.
    """

    name = "bcb"
    style: Literal["code"] = "code"
    most_steps = 1

    def __init__(
        self,
        path: str | Path,
        python: str | Path,
        prompt: Literal["instruct", "complete"] = "instruct",
        seconds: float = SECONDS,
        skip: bool = False,
    ):
        self.instructions = INSTRUCTIONS.format(seconds=seconds)
        self.seconds, self.prompt = seconds, f"{prompt}_prompt"
        self._items = read(Path(path))
        require(self.name, lacking())
        self.interpreter = Interpreter.of(python)
        needed = {lib for item in self._items.values() for lib in item["libs"]}
        missing = self.interpreter.lacks(sorted(needed))
        self.left_out = [id for id, item in self._items.items() if missing & {*item["libs"]}]
        if self.left_out and not skip:
            raise UserError(
                f"{python} lacks {', '.join(sorted(missing))}, which {len(self.left_out)} of "
                f"{len(self._items)} tasks need: install them with {python} -m pip install, give "
                "another --interpreter, or --leave-out these tasks."
            )
        self.skipped, self.skipped_because = (
            len(self.left_out),
            "need " + ", ".join(sorted(missing)),
        )
        self._tasks = [
            self._work(id, item) for id, item in self._items.items() if id not in self.left_out
        ]
        if not self._tasks:
            raise UserError(f"No task of {path} is left: {python} lacks a library of every one.")

    def _work(self, id: str, item: dict) -> Work:
        gold = item["solution"]
        return Work(
            id, item[self.prompt], (), dataset=self.name, environment=self,
            solution=(fence(gold, "python"),) if gold else (), skills=item["libs"],
            content=blake2b((item["begin"] + item["test"]).encode(), digest_size=8).hexdigest(),
        )  # fmt: skip

    def tasks(self) -> Sequence[Work]:
        """Return all tasks that the interpreter can run, in the order of the file."""
        return self._tasks

    def intent(self, id: str) -> str:
        """Return the prompt."""
        return self._items[id][self.prompt]

    def reset(self, id: str) -> Coding:
        """Begin a task; nothing runs yet."""
        return Coding(self, self._items[id])

    def close(self) -> None:
        """Do nothing: episodes share nothing."""


@dataclass(slots=True)
class Coding(Episode):
    """One try of a task: one response."""

    environment: BCB
    item: dict

    @property
    def observation(self) -> str:
        return self.item[self.environment.prompt]

    def step(self, action: str) -> Step:
        """Judge the code of a response."""
        blocks = fenced(action, "python", "py", "python3")
        if not blocks:
            return Step("There is no fenced block of code.", True, -1.0, "no code")
        names = f"def {self.item['entry_point']}("
        code = next((block for block in reversed(blocks) if names in block), blocks[-1])
        try:
            verdict, said, why = self.environment.interpreter.judged(
                f"{self.item['begin']}{code}\n{self.item['test']}", self.environment.seconds
            )
        except OSError as error:
            return Step(f"Nothing ran: {error.strerror}.", True, -1.0, f"crashed: {error.strerror}")
        tests = {*self.item["tests"], *verdict}
        good = [name for name in tests if verdict.get(name)]
        said = clip(clean(said.strip()), SHOWN)
        summary = f"{len(good)} of {len(tests)} tests passed" + (f"; {why}." if why else ".")
        reward = 1.0 if len(good) == len(tests) and not why else -1.0
        return Step("\n".join(filter(None, (said, summary))), True, reward, why)

    def close(self) -> None:
        """Do nothing: what ran has ended with its step."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that runs code shut in, with the folders that it needs for that."""

    program: str
    folders: tuple[Path, ...]

    @classmethod
    def of(cls, python: str | Path) -> Interpreter:
        """Ask an interpreter for its folders. UserError: it is none, or too old."""
        program = Path(python).expanduser()
        ask = "import json, sys; print(json.dumps([sys.version_info[:2], sys.executable, "
        ask += "sys.prefix, sys.base_prefix]))"
        try:
            said = subprocess.run([program, "-I", "-c", ask], capture_output=True, timeout=60)
            version, *places = json.loads(said.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise UserError(
                f"{python} cannot be run as a Python interpreter: give the path of one, such as "
                "/usr/bin/python3."
            ) from error
        if tuple(version) < (3, 8):
            raise UserError(
                f"{python} is Python {version[0]}.{version[1]}: 3.8 or newer is needed."
            )
        program, *folders = map(Path, places)
        folders = {*folders, program.resolve().parent.parent}
        if Path("/") in folders:
            raise UserError(f"{python} has / as its folder: give one in a folder of its own.")
        outside = sorted(folder for folder in folders if not folder.is_relative_to("/usr"))
        return cls(str(program), tuple(outside))

    def judged(self, module: str, seconds: float) -> tuple[dict[str, bool], str, str]:
        """Run the tests of a module: by name which passed, what was said, why it broke off."""
        source = inspect.getsource(judge) + "\njudge()\n"
        given = json.dumps(module).encode()
        ran = confine([self.program, "-I", "-c", source], seconds, given, self.folders,
                      variables=_variables())  # fmt: skip
        if ran.code is None:
            return {}, ran.output, "timed out"
        try:
            return {**json.loads(ran.errors)}, ran.output, ""
        except (ValueError, TypeError):
            return {}, ran.output + ran.errors, "crashed"

    def lacks(self, libraries: Sequence[str]) -> set[str]:
        """Return those of the libraries that the interpreter cannot find."""
        source = inspect.getsource(search) + "\nsearch()\n"
        given = json.dumps([*libraries]).encode()
        ran = confine([self.program, "-I", "-c", source], 60, given, self.folders)
        try:
            return {*json.loads(ran.output)}
        except ValueError:
            reason = clip(" ".join(ran.errors.split()), 200)
            raise UserError(f"{self.program} does not run in the sandbox ({reason}).") from None


def _variables() -> dict[str, str]:
    """Return what keeps numerical libraries to one thread, and to what this processor can do, and
    what the released evaluator sets."""
    own = {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")}
    theirs = {"TZ": "UTC", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    return own | theirs | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


# ---------------------------------------------------------------- the file


def read(path: Path) -> dict[str, dict]:
    """Read JSON lines: id -> its fields, `tests` (names), `libs` (names), `begin` (what is put
    before a response, or "") and `solution` (or "").

    UserError names the file, the line and what is wrong with it.
    """
    try:
        text = read_data(path).decode()
    except FileNotFoundError:
        raise UserError(f"There is no file {path}: bcb needs BigCodeBench as JSON lines.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no text: {clip(str(error), 200)}.") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    items = [_parsed(f"{path}, line {number}", line) for number, line in lines]
    if not items:
        raise UserError(f"{path} holds no task: bcb needs BigCodeBench as JSON lines.")
    (id, count), *_ = Counter(item["task_id"] for item in items).most_common(1)
    if count > 1:
        raise UserError(f"{path} holds the task {id} {count} times: an id must be its own.")
    return {item["task_id"]: item for item in items}


def _parsed(where: str, line: str) -> dict:
    try:
        item = from_json(line)
    except ValueError as error:
        raise UserError(f"{where}: this is no JSON ({clip(str(error), 200)}).") from error
    if not isinstance(item, dict):
        raise UserError(f"{where} must be an object.")
    for name in FIELDS:
        if not isinstance(item.get(name), str) or not item[name].strip():
            raise UserError(f"{where}: '{name}' must be a text that is not empty.")
    if "\0" in item["test"] or not item["entry_point"].isidentifier():
        raise UserError(f"{where}: 'entry_point' must be a name, and 'test' be Python.")
    try:
        classes = {n.name: n for n in ast.parse(item["test"]).body if isinstance(n, ast.ClassDef)}
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(f"{where}: 'test' is no Python ({clip(str(error), 200)}).") from error
    functions, tests, todo = (ast.FunctionDef, ast.AsyncFunctionDef), set(), ["TestCases"]
    while todo:
        if (found := classes.pop(todo.pop(), None)) is not None:
            methods = [n.name for n in found.body if isinstance(n, functions)]
            tests |= {name for name in methods if name.startswith("test")}
            todo += [base.id for base in found.bases if isinstance(base, ast.Name)]
    if not tests:
        raise UserError(f"{where}: 'test' has no class TestCases with methods test...")
    gold, begin = (item.get(name) or "" for name in ("canonical_solution", "code_prompt"))
    if not (isinstance(gold, str) and isinstance(begin, str)):
        raise UserError(f"{where}: 'canonical_solution' and 'code_prompt' must be texts.")
    return {
        **{name: item[name] for name in FIELDS},
        "tests": sorted(tests),
        "libs": _libraries(where, item.get("libs")),
        "begin": f"{begin}\n    pass\n" if begin else "",
        "solution": f"{begin or item['complete_prompt']}{gold}" if gold else "",
    }


def _libraries(where: str, libraries: object) -> tuple[str, ...]:
    """Return names of packages; the published file writes their list as text."""
    try:
        names = ast.literal_eval(libraries) if isinstance(libraries, str) else libraries or []
        if all(isinstance(name, str) and name.strip() for name in names):
            return tuple(names)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    raise UserError(f"{where}: 'libs' must be a list of names of packages.")
