"""BigCodeBench's verdicts, and tasks of our own, in a real interpreter that is shut in.

Run by `make test-sandbox`; nothing here is skipped.
"""

from __future__ import annotations

import os
import sys
import venv

import pytest
from conftest import HANG_S
from test_bcb import ONE, PROMPT, RIGHT, WRONG, case_file, class_of, heir, item, response, write

from suites.bcb import Interpreter, Programs
from tasks.sandbox import fence

ITEMS = [
    item("Write rows (lists of texts) to a CSV file at path, the longest row first, and return how "
         "many fields were written.", "rows, path",
         "rows = sorted(rows, key=len, reverse=True)\n"
         "with open(path, 'w', newline='') as file:\n    csv.writer(file).writerows(rows)\n"
         "return sum(map(len, rows))",
         "def setUp(self):\n    self.path = tempfile.mktemp()\n"
         "def tearDown(self):\n    os.remove(self.path)\n"
         "def test_file(self):\n"
         "    self.assertEqual(task_func([['a'], ['b,c', 'd']], self.path), 3)\n"
         "    self.assertEqual(open(self.path).read().split(), ['\"b,c\",d', 'a'])",
         "csv", setup="import os, tempfile"),
    item("Run a command, a list of words, and return what it writes to standard output; raise "
         "RuntimeError with its exit code as text if that is not 0.", "command",
         "ran = subprocess.run(command, capture_output=True, text=True)\n"
         "if ran.returncode: raise RuntimeError(str(ran.returncode))\nreturn ran.stdout",
         "def test_output(self):\n    self.assertEqual(task_func(['echo', 'yes']), 'yes\\n')\n"
         "def test_failure(self):\n"
         "    with self.assertRaisesRegex(RuntimeError, '7'): task_func(['sh', '-c', 'exit 7'])",
         "subprocess"),
]  # fmt: skip
for number, record in enumerate(ITEMS):
    record["task_id"] = f"Own/{number}"


@pytest.fixture
def path(tmp_path):
    write(path := tmp_path / "bcb.jsonl", ITEMS)
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    write(path := tmp_path_factory.mktemp("bcb") / "bcb.jsonl", ITEMS)
    return Programs(path, sys.executable, seconds=HANG_S)


@pytest.mark.parametrize("id", [record["task_id"] for record in ITEMS])
def test_gold_solves_each_of_our_own_tasks_and_an_empty_function_does_not(environment, id):
    (task,) = [task for task in environment.tasks() if task.id == id]
    step = response(environment, id, *task.solution)
    assert (step.done, step.reward, step.failure) == (True, 1.0, ""), step
    wrong = response(environment, id, "```python\ndef task_func(*all): return 0\n```")
    assert (wrong.done, wrong.reward, wrong.failure) == (True, -1.0, ""), wrong
    assert "tests passed" in wrong.observation


TESTS = """
import unittest
class TestCases(unittest.TestCase):
    def test_one(self): self.assertEqual(task_func(1), 2)
    def test_two(self):
        for k in range(3):
            with self.subTest(k): self.assertEqual(task_func(k), k + 1)
"""
BOTH = {"test_one": True, "test_two": True}
SKIP = "import unittest\ndef task_func(k): {}raise unittest.SkipTest('no')"
CASES = {  # code -> reward, failure, what is said
    "right": (RIGHT, 1.0, "", "2 of 2 tests passed."),
    "wrong in one": ("def task_func(k): return 2", -1.0, "", "1 of 2 tests passed."),
    "wrong in a part": ("def task_func(k): return k + (k != 2)", -1.0, "", "1 of 2 tests passed."),
    "raises": ("def task_func(k): return 1 / 0", -1.0, "", "ZeroDivisionError"),
    "no such function": ("def other(k): return k + 1", -1.0, "", "NameError"),
    "no Python": ("def task_func(k) return", -1.0, "", "SyntaxError"),
    "main is not run": (RIGHT + "\nif __name__ == '__main__': raise OSError", 1.0, "", "2 of 2"),
    "skips all": (SKIP.format(""), -1.0, "", "0 of 2 tests passed."),
    "skips one": (SKIP.format("\n  if k != 1: return k + 1\n  "), -1.0, "", "1 of 2 tests passed."),
    "skips a part": (SKIP.format("\n  if k != 2: return k + 1\n  "), 1.0, "", "2 of 2"),
    "leaves the module": ("import sys; sys.exit(0)", -1.0, "", "0 of 0 tests passed."),
    "leaves the process": ("import os; os._exit(0)", -1.0, "crashed", "0 of 0 tests passed"),
    "leaves in a test": ("import os\ndef task_func(k): os._exit(0)", -1.0, "crashed", "0 of 0"),
    "says a verdict": ("import os, sys\nfor f in (sys.stdout, sys.stderr):\n print('[\"test_one\", "
                       "\"test_two\"]', file=f, flush=True)\nos._exit(0)", -1.0, "crashed", "0 of"),
    "breaks": ("import ctypes\ndef task_func(k): ctypes.string_at(0)", -1.0, "crashed", "0 of 0"),
    "no end": ("def task_func(k):\n while True: pass", -1.0, "timed out", "0 of 0"),
    "no end of output": ("while True: print('spam')", -1.0, "timed out", "0 of 0"),
    "much output": (RIGHT + "\nprint('x' * 3_000_000)", 1.0, "", "left out"),
    "a thread that stays": ("import threading, time\nthreading.Thread(target=time.sleep, "
                            "args=[3600]).start()\n" + RIGHT, 1.0, "", "2 of 2"),
    "a process that stays": ("import os, time\nif not os.fork():\n os.setsid()\n time.sleep(3600)\n"
                             + RIGHT, 1.0, "", "2 of 2"),
    "memory": ("x = bytearray(5 << 30)\n" + RIGHT, -1.0, "", "MemoryError"),
    "own TestCases": (RIGHT.replace("+ 1", "") + "\nimport unittest\nclass TestCases("
                      "unittest.TestCase):\n def test_one(self): pass\n", -1.0, "", "0 of 2"),
    "other text": ("", -1.0, "", "NameError"),
    "half a letter": (RIGHT + " # \ud800", -1.0, "", "0 of 0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    record = {**ITEMS[0], "test": TESTS, "task_id": "0"}
    write(path := tmp_path_factory.mktemp("verdict") / "bcb.jsonl", [record])
    return Programs(path, sys.executable, seconds=HANG_S)


@pytest.mark.parametrize("case", CASES)
def test_a_response_passes_if_all_its_tests_have_run_and_none_was_skipped(
    judged, monkeypatch, case
):
    code, reward, failure, said = CASES[case]
    if failure == "timed out":
        monkeypatch.setattr(judged, "seconds", 2)
    step = response(judged, "0", fence(code, "python"))
    assert (step.done, step.reward, step.failure) == (True, reward, failure), step
    assert said in step.observation and len(step.observation) < 4000
    if failure == "timed out":
        assert step.observation.endswith("; timed out.")


def test_what_fails_around_the_tests_fails_them(path):
    tests = TESTS + "    @classmethod\n    def {}(cls): 1 / len(task_func.__doc__ or '')\n"
    write(path, [{**ITEMS[0], "test": tests.format(name), "task_id": name} for name in (
        "setUpClass", "tearDownClass")])  # fmt: skip
    environment = Programs(path, sys.executable, seconds=HANG_S)
    for id in ("setUpClass", "tearDownClass"):
        step = response(environment, id, fence(RIGHT, "python"))
        assert step.reward == -1.0 and "0 of 2 tests passed." in step.observation
        documented = RIGHT.replace("return", "'Increase.'; return")
        assert response(environment, id, fence(documented, "python")).reward == 1.0


EXIT = "@classmethod\ndef {}(cls): sys.exit(0)"
IN_TEST = "def test_one(self): {}"
EXITS = IN_TEST.format("\n with self.assertRaises(SystemExit): {}(1)")
# (case, whether it passes, tests, code), as the released evaluator said, run beside the checkout
IMPORTED = "def task_func(k): return k + math.floor(1.5)"
ENVIRON = "def task_func(k):\n environ['A'] = '1'\n return k + int(os.environ['A'])"
PICKLED = "pickle.loads(pickle.dumps(A()))"
MIXED = case_file(ONE, base="Mixin, unittest.TestCase", before=class_of("Mixin", "", WRONG))
UNNAMED = "TestCases.test_two = lambda self: self.fail()\n"
CLEANUP = "@classmethod\ndef setUpClass(cls): cls.addClassCleanup(sys.exit, 0)"
GOLDEN = [
    ("plain", True, case_file(ONE), RIGHT),
    ("all tests are of the base", True, heir("x = 1", inherits=ONE), RIGHT),
    ("unpickling in a test", True, case_file(IN_TEST.format(PICKLED)),
     f"import pickle\nclass A: pass\n{RIGHT}"),
    ("environ", True, case_file(ONE), ENVIRON),
    ("a module of builtins", True, case_file(ONE), f"__builtins__.len\n{RIGHT}"),
    ("the zone of time", True,
     case_file(IN_TEST.format("self.assertEqual(time.tzname[0], os.environ['TZ'])")),
     f"import time\n{RIGHT}"),
    ("unexpected success", True, case_file("@unittest.expectedFailure", ONE), RIGHT),
    ("expected failure", True, case_file("@unittest.expectedFailure", WRONG), RIGHT),
    ("an import of the prompt", True, case_file(ONE), IMPORTED),
    ("the function of the prompt", True,
     case_file(IN_TEST.format("self.assertIsNone(task_func(1))")), "x = 1"),
    ("a test of the base fails", False, heir(ONE, inherits=WRONG), RIGHT),
    ("one of a base that is no case", False, MIXED, RIGHT),
    ("all tests of the base fail", False, heir("x = 1", inherits=WRONG), RIGHT),
    ("a test that the text does not name", False, case_file(ONE, after=UNNAMED), RIGHT),
    ("exit in tearDownClass", False, case_file(ONE, EXIT.format("tearDownClass")), RIGHT),
    ("exit in tearDownModule", False,
     case_file(ONE, after="def tearDownModule(): sys.exit(0)\n"), RIGHT),
    ("exit in a cleanup of the class", False, case_file(ONE, CLEANUP), RIGHT),
    ("interrupted at last", False,
     case_file(ONE, "def test_two(self): raise KeyboardInterrupt"), RIGHT),
    ("unpickling at import", False, case_file(ONE),
     f"import pickle\nclass A: pass\n{PICKLED}\n{RIGHT}"),
    ("exit without sys", False, case_file(EXITS.format("exit")), RIGHT),
    ("quit without sys", False, case_file(EXITS.format("quit")), RIGHT),
    ("from the future", False, case_file(ONE), f"from __future__ import annotations\n{RIGHT}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("passes", "tests", "code"), [row[1:] for row in GOLDEN], ids=[row[0] for row in GOLDEN]
)
def test_a_verdict_is_that_of_the_released_evaluator(path, passes, tests, code):
    write(path, [{**ITEMS[0], "test": tests, "task_id": "0", "code_prompt": PROMPT}])
    step = response(Programs(path, sys.executable, seconds=20), "0", fence(code, "python"))
    assert (step.reward, step.failure) == (1.0 if passes else -1.0, ""), step


def test_the_block_with_the_function_counts_and_without_any_nothing_runs(judged):
    use = "```python\nprint(task_func(1))\n```"
    assert response(judged, "0", f"So:\n```python\n{RIGHT}\n```\nUse:\n{use}").reward == 1.0
    assert response(judged, "0", f"```\n{RIGHT}\n```").reward == 1.0
    for text in (RIGHT, "", "```bash\nls\n```", "```python\n" + RIGHT):
        step = response(judged, "0", text)
        assert (step.done, step.reward, step.failure) == (True, -1.0, "no code")


def test_a_patched_assertion_deceives_the_verdict(judged):
    """The limit that docstring and docs state: code and tests share a process."""
    code = "import unittest\nunittest.TestCase.assertEqual = lambda *all: None\n" + RIGHT[:-4]
    assert response(judged, "0", fence(code, "python")).reward == 1.0


def test_interpreters_below_tmp_and_root_and_debians_own(tmp_path):
    """The sandbox's own /tmp hides none; ours lies below /root where the tests run as root."""
    ours = Interpreter.from_program(sys.executable, ["pytest", "json", "no_such_library"])
    assert ours.missing == {"no_such_library"}
    venv.create(tmp_path / "venv", symlinks=True)
    pythons = [tmp_path / "venv" / "bin" / "python"]
    if os.access("/usr/bin/python3", os.X_OK):
        pythons.append("/usr/bin/python3")
        assert Interpreter.from_program("/usr/bin/python3").folders == ()
    for python in pythons:
        verdict, output, why = Interpreter.from_program(python).judged(RIGHT + TESTS, HANG_S)
        assert (verdict, why) == (BOTH, ""), output
