"""BigCodeBench: the file, the verdict, and seven tasks of our own in a real interpreter."""

from __future__ import annotations

import gzip
import json
import os
import sys
import venv

import pytest
from conftest import HANG_S, opened

from config.errors import UserError
from tasks import bcb
from tasks.bcb import BCB, Interpreter, read
from tasks.sandbox import fence, lacking

LACKS = "; ".join(f"{what}: {command}" for what, command in lacking())
needs_sandbox = pytest.mark.skipif(bool(LACKS), reason=LACKS)


def item(prompt: str, arguments: str, gold: str, tests: str, *libs: str, setup: str = "") -> dict:
    """Compose a record: `gold` is the body of the function, `tests` the methods of the class."""
    imports = "".join(f"import {lib}\n" for lib in libs)
    signature = f"def task_func({arguments}):\n"
    body = "".join(f"    {line}\n" for line in gold.strip().split("\n"))
    methods = "".join(f"    {line}\n" if line else "\n" for line in tests.strip().split("\n"))
    return {
        "instruct_prompt": f"{prompt}\nYou should write self-contained code starting with:\n"
                           f"```\n{imports}{signature}```",
        "complete_prompt": f'{imports}{signature}    """{prompt}"""\n',
        "canonical_solution": body,
        "test": f"import unittest\n{setup}\nclass TestCases(unittest.TestCase):\n{methods}",
        "entry_point": "task_func",
        "libs": repr([*libs]),
    }  # fmt: skip


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
    item("Return the days from one ISO date to another, negative if the second is earlier; raise "
         "ValueError for anything else.", "first, second",
         "parse = datetime.date.fromisoformat\nreturn (parse(second) - parse(first)).days",
         "def test_days(self):\n"
         "    for first, second, days in [('2024-02-28', '2024-03-01', 2),\n"
         "                                ('2023-01-02', '2023-01-01', -1)]:\n"
         "        with self.subTest(first):\n"
         "            self.assertEqual(task_func(first, second), days)\n"
         "def test_wrong(self):\n"
         "    with self.assertRaises(ValueError): task_func('today', '2023-01-01')",
         "datetime"),
    item("Run a command, a list of words, and return what it writes to standard output; raise "
         "RuntimeError with its exit code as text if that is not 0.", "command",
         "ran = subprocess.run(command, capture_output=True, text=True)\n"
         "if ran.returncode: raise RuntimeError(str(ran.returncode))\nreturn ran.stdout",
         "def test_output(self):\n    self.assertEqual(task_func(['echo', 'yes']), 'yes\\n')\n"
         "def test_failure(self):\n"
         "    with self.assertRaisesRegex(RuntimeError, '7'): task_func(['sh', '-c', 'exit 7'])",
         "subprocess"),
    item("Insert (name, amount) pairs into a new table sales in an SQLite file at path, and return "
         "the sums by name as a dict.", "pairs, path",
         "base = sqlite3.connect(path)\n"
         "base.execute('create table sales (name text, amount real)')\n"
         "base.executemany('insert into sales values (?, ?)', pairs)\n"
         "base.commit()\n"
         "found = dict(base.execute('select name, sum(amount) from sales group by name'))\n"
         "base.close()\nreturn found",
         "@classmethod\n"
         "def setUpClass(cls):\n    cls.folder = tempfile.mkdtemp()\n"
         "def test_sums(self):\n"
         "    pairs = [('a', 1), ('b', 2), ('a', .5), (\"x'); --\", 1)]\n"
         "    found = task_func(pairs, self.folder + '/a.db')\n"
         "    self.assertEqual(found, {'a': 1.5, 'b': 2, \"x'); --\": 1})\n"
         "    with sqlite3.connect(self.folder + '/a.db') as base:\n"
         "        self.assertEqual(base.execute('select count(*) from sales').fetchone(), (4,))",
         "sqlite3", setup="import tempfile"),
    item("Call function on every item in n threads and return the results in the order of the "
         "items.", "function, items, n",
         "with concurrent.futures.ThreadPoolExecutor(n) as pool:\n"
         "    return list(pool.map(function, items))",
         "def test_order(self):\n"
         "    wait = lambda k: time.sleep(.05 / (k + 1)) or k * k\n"
         "    self.assertEqual(task_func(wait, range(5), 5), [0, 1, 4, 9, 16])\n"
         "def test_threads(self):\n"
         "    barrier = threading.Barrier(3)\n"
         "    task_func(lambda _: barrier.wait(), range(3), 3)",
         "concurrent.futures", setup="import threading, time"),
    item("Return the status of the HTTP answer to a GET request for url, or None if there is no "
         "answer.", "url",
         "try:\n    return urllib.request.urlopen(url, timeout=2).status\n"
         "except OSError:\n    return None",
         "@patch('urllib.request.urlopen')\n"
         "def test_answer(self, opened):\n"
         "    opened.return_value.status = 204\n"
         "    self.assertEqual(task_func('http://localhost/x'), 204)\n"
         "    self.assertEqual(opened.call_args[0][0], 'http://localhost/x')\n"
         "def test_none(self):\n    self.assertIsNone(task_func('http://127.0.0.1:9/'))",
         "urllib.request", setup="from unittest.mock import patch"),
    item("Return mean and population standard deviation of numbers, both rounded to two places; "
         "(None, None) without any.", "numbers",
         "if not numbers: return None, None\n"
         "return round(statistics.fmean(numbers), 2), round(statistics.pstdev(numbers), 2)",
         "def test_both(self):\n    self.assertEqual(task_func([1, 2, 4]), (2.33, 1.25))\n"
         "def test_none(self):\n    self.assertEqual(task_func([]), (None, None))\n"
         "@unittest.expectedFailure\n"
         "def test_text(self):\n    task_func(['a'])",
         "statistics"),
]  # fmt: skip
for number, record in enumerate(ITEMS):
    record["task_id"] = f"Own/{number}"


def write(path, items) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in items))


@pytest.fixture
def path(tmp_path):
    write(path := tmp_path / "bcb.jsonl", ITEMS)
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if LACKS:
        pytest.skip(LACKS)
    write(path := tmp_path_factory.mktemp("bcb") / "bcb.jsonl", ITEMS)
    return BCB(path, sys.executable, seconds=HANG_S)


def response(environment: BCB, id: str, action: str):
    episode = environment.reset(id)
    try:
        return episode.step(action)
    finally:
        episode.close()


@pytest.mark.parametrize("id", [record["task_id"] for record in ITEMS])
def test_gold_solves_each_of_our_own_tasks_and_an_empty_function_does_not(environment, id):
    (task,) = [task for task in environment.tasks() if task.id == id]
    step = response(environment, id, *task.solution)
    assert (step.done, step.reward, step.failure) == (True, 1.0, ""), step
    wrong = response(environment, id, "```python\ndef task_func(*all): return 0\n```")
    assert (wrong.done, wrong.reward, wrong.failure) == (True, -1.0, ""), wrong
    assert "tests passed" in wrong.observation


# ---------------------------------------------------------------- the verdict

TESTS = """
import unittest
class TestCases(unittest.TestCase):
    def test_one(self): self.assertEqual(task_func(1), 2)
    def test_two(self):
        for k in range(3):
            with self.subTest(k): self.assertEqual(task_func(k), k + 1)
"""
BOTH = {"test_one": True, "test_two": True}
RIGHT = "def task_func(k): return k + 1"
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
    "leaves the module": ("import sys; sys.exit(0)", -1.0, "", "0 of 2 tests passed."),
    "leaves the process": ("import os; os._exit(0)", -1.0, "crashed", "0 of 2 tests passed"),
    "leaves in a test": ("import os\ndef task_func(k): os._exit(0)", -1.0, "crashed", "0 of 2"),
    "says a verdict": ("import os, sys\nfor f in (sys.stdout, sys.stderr):\n print('[\"test_one\", "
                       "\"test_two\"]', file=f, flush=True)\nos._exit(0)", -1.0, "crashed", "0 of"),
    "breaks": ("import ctypes\ndef task_func(k): ctypes.string_at(0)", -1.0, "crashed", "0 of 2"),
    "no end": ("def task_func(k):\n while True: pass", -1.0, "timed out", "0 of 2"),
    "no end of output": ("while True: print('spam')", -1.0, "timed out", "0 of 2"),
    "much output": (RIGHT + "\nprint('x' * 3_000_000)", 1.0, "", "left out"),
    "a thread that stays": ("import threading, time\nthreading.Thread(target=time.sleep, "
                            "args=[3600]).start()\n" + RIGHT, 1.0, "", "2 of 2"),
    "a process that stays": ("import os, time\nif not os.fork():\n os.setsid()\n time.sleep(3600)\n"
                             + RIGHT, 1.0, "", "2 of 2"),
    "memory": ("x = bytearray(5 << 30)\n" + RIGHT, -1.0, "", "MemoryError"),
    "own TestCases": (RIGHT.replace("+ 1", "") + "\nimport unittest\nclass TestCases("
                      "unittest.TestCase):\n def test_one(self): pass\n", -1.0, "", "0 of 2"),
    "other text": ("", -1.0, "", "NameError"),
    "half a letter": (RIGHT + " # \ud800", -1.0, "", "0 of 2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    if LACKS:
        pytest.skip(LACKS)
    record = {**ITEMS[0], "test": TESTS, "task_id": "0"}
    write(path := tmp_path_factory.mktemp("verdict") / "bcb.jsonl", [record])
    return BCB(path, sys.executable, seconds=HANG_S)


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


@needs_sandbox
def test_what_fails_around_the_tests_fails_them(path):
    tests = TESTS + "    @classmethod\n    def {}(cls): 1 / len(task_func.__doc__ or '')\n"
    write(path, [{**ITEMS[0], "test": tests.format(name), "task_id": name} for name in (
        "setUpClass", "tearDownClass")])  # fmt: skip
    environment = BCB(path, sys.executable, seconds=HANG_S)
    for id in ("setUpClass", "tearDownClass"):
        step = response(environment, id, fence(RIGHT, "python"))
        assert step.reward == -1.0 and "0 of 2 tests passed." in step.observation
        documented = RIGHT.replace("return", "'Increase.'; return")
        assert response(environment, id, fence(documented, "python")).reward == 1.0


ONE = "def test_one(self): self.assertEqual(task_func(1), 2)"
WRONG = "def test_base(self): self.assertEqual(task_func(1), 3)"
EXIT = "@classmethod\ndef {}(cls): sys.exit(0)"
PROMPT = "import math\ndef task_func(k):\n"


def case_file(*methods: str, base: str = "unittest.TestCase", before="", after="") -> str:
    """Compose the text of a test file."""
    return f"import unittest\n{before}{class_of('TestCases', base, *methods)}{after}"


def class_of(name: str, base: str, *methods: str) -> str:
    body = "\n".join(methods).replace("\n", "\n    ")
    return f"class {name}({base}):\n    {body}\n"


def heir(*methods: str, inherits: str) -> str:
    """Compose the text of a test file whose class inherits a method."""
    return case_file(*methods, base="Base", before=class_of("Base", "unittest.TestCase", inherits))


IN_TEST = "def test_one(self): {}"
EXITS = IN_TEST.format("\n with self.assertRaises(SystemExit): {}(1)")
# what the released evaluator has said of tests and, where it is not `RIGHT`, of code, run beside
# the checkout
GOLDEN = {
    "pass": {
        "plain": case_file(ONE),
        "all tests are of the base": heir("x = 1", inherits=ONE),
        "unpickling in a test": (
            case_file(IN_TEST.format("pickle.loads(pickle.dumps(A()))")),
            f"import pickle\nclass A: pass\n{RIGHT}",
        ),
        "environ": (
            case_file(ONE),
            "def task_func(k):\n environ['A'] = '1'\n return k + int(os.environ['A'])",
        ),
        "a module of builtins": (case_file(ONE), f"__builtins__.len\n{RIGHT}"),
        "the zone of time": (
            case_file(IN_TEST.format("self.assertEqual(time.tzname[0], os.environ['TZ'])")),
            f"import time\n{RIGHT}",
        ),
        "unexpected success": case_file("@unittest.expectedFailure", ONE),
        "expected failure": case_file("@unittest.expectedFailure", WRONG),
        "an import of the prompt": (
            case_file(ONE),
            "def task_func(k): return k + math.floor(1.5)",
        ),
        "the function of the prompt": (
            case_file(IN_TEST.format("self.assertIsNone(task_func(1))")),
            "x = 1",
        ),
    },
    "fail": {
        "a test of the base fails": heir(ONE, inherits=WRONG),
        "one of a base that is no case": case_file(
            ONE, base="Mixin, unittest.TestCase", before=class_of("Mixin", "", WRONG)
        ),
        "all tests are of the base": heir("x = 1", inherits=WRONG),
        "a test that the text does not name": case_file(
            ONE, after="TestCases.test_two = lambda self: self.fail()\n"
        ),
        "exit in tearDownClass": case_file(ONE, EXIT.format("tearDownClass")),
        "exit in tearDownModule": case_file(ONE, after="def tearDownModule(): sys.exit(0)\n"),
        "exit in a cleanup of the class": case_file(
            ONE, "@classmethod\ndef setUpClass(cls): cls.addClassCleanup(sys.exit, 0)"
        ),
        "interrupted at last": case_file(ONE, "def test_two(self): raise KeyboardInterrupt"),
        "unpickling at import": (
            case_file(ONE),
            f"import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\n{RIGHT}",
        ),
        "exit without sys": case_file(EXITS.format("exit")),
        "quit without sys": case_file(EXITS.format("quit")),
        "from the future": (case_file(ONE), f"from __future__ import annotations\n{RIGHT}"),
    },
}


@needs_sandbox
@pytest.mark.parametrize(
    ("verdict", "case"), [(verdict, case) for verdict in GOLDEN for case in GOLDEN[verdict]]
)
def test_a_verdict_is_that_of_the_released_evaluator(path, verdict, case):
    found = GOLDEN[verdict][case]
    tests, code = (found, RIGHT) if isinstance(found, str) else found
    write(path, [{**ITEMS[0], "test": tests, "task_id": "0", "code_prompt": PROMPT}])
    step = response(BCB(path, sys.executable, seconds=20), "0", fence(code, "python"))
    assert (step.reward, step.failure) == (1.0 if verdict == "pass" else -1.0, ""), step


@pytest.fixture
def unconfined(monkeypatch):
    monkeypatch.setattr(bcb, "lacking", lambda: [])
    monkeypatch.setattr(Interpreter, "lacks", lambda self, libraries: set())


def test_the_prompts_code_comes_first_where_a_file_has_it(path, monkeypatch, unconfined):
    """And what is judged with it is another task."""
    ran, digests = [], set()
    monkeypatch.setattr(Interpreter, "judged", lambda *given: ran.append(given[1]) or ({}, "", ""))
    for more in ({}, {"code_prompt": PROMPT}):
        write(path, [{**ITEMS[0], **more, "task_id": "0"}])
        environment = BCB(path, sys.executable)
        response(environment, "0", fence(RIGHT, "python"))
        digests.add(environment.tasks()[0].digest)
    assert ran[0] == f"{RIGHT}\n\n{ITEMS[0]['test']}" and len(digests) == 2
    assert ran[1] == f"{PROMPT}\n    pass\n{ran[0]}"


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


@needs_sandbox
def test_interpreters_below_tmp_and_root_and_debians_own(tmp_path):
    """The sandbox's own /tmp hides none; ours lies below /root where the tests run as root."""
    ours = Interpreter.from_program(sys.executable)
    assert ours.lacks(["pytest", "json", "no_such_library"]) == {"no_such_library"}
    venv.create(tmp_path / "venv", symlinks=True)
    pythons = [tmp_path / "venv" / "bin" / "python"]
    if os.access("/usr/bin/python3", os.X_OK):
        pythons.append("/usr/bin/python3")
        assert Interpreter.from_program("/usr/bin/python3").folders == ()
    for python in pythons:
        verdict, output, why = Interpreter.from_program(python).judged(RIGHT + TESTS, HANG_S)
        assert (verdict, why) == (BOTH, ""), output


# ---------------------------------------------------------------- the file, the parts


def test_tasks_carry_what_is_asked_and_a_fingerprint_of_the_tests(path, unconfined):
    environment = BCB(path, sys.executable)
    tasks = environment.tasks()
    assert [task.id for task in tasks] == [record["task_id"] for record in ITEMS]
    prompt = ITEMS[0]["instruct_prompt"]
    assert prompt == tasks[0].question == tasks[0].intent == environment.reset("Own/0").observation
    assert tasks[0].skills == ("csv",) and tasks[0].dataset == "bcb"
    assert environment.most_steps == 1
    assert "60 seconds" in environment.instructions.replace("\n", " ")
    write(path, [{**ITEMS[0], "test": ITEMS[0]["test"] + "\n"}, *ITEMS[1:]])
    digests = [task.digest for task in BCB(path, sys.executable).tasks()]
    changed = [a != b.digest for a, b in zip(digests, tasks, strict=True)]
    assert changed == [True] + [False] * (len(ITEMS) - 1)


@needs_sandbox
def test_tasks_of_a_missing_library_are_refused_or_left_out(path, capsys):
    write(path, [ITEMS[0], {**ITEMS[1], "libs": "['csv', 'no_such_library']"}])
    with pytest.raises(UserError, match=r"lacks no_such_library, which 1 of 2 tasks need: .* pip"):
        BCB(path, sys.executable)
    (ready,) = opened("bcb", str(path), leave_out=True).tasks()
    said = " ".join(capsys.readouterr().out.split())
    assert ready.id == "Own/0" and "bcb: 1 tasks are left out, which need no_such_library." in said
    environment = BCB(path, sys.executable, skip=True)
    assert environment.left_out == ["Own/1"] and len(environment.tasks()) == 1
    write(path, [{**ITEMS[1], "libs": ["no_such_library"]}])
    with pytest.raises(UserError, match="No task of"):
        BCB(path, sys.executable, skip=True)


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true", "/bin/false", "/"])
def test_what_is_no_interpreter_is_one_sentence(path, unconfined, python):
    with pytest.raises(UserError, match="cannot be run as a Python interpreter"):
        BCB(path, python)


def test_an_interpreter_that_needs_the_whole_machine_is_refused(path, tmp_path, unconfined):
    """Its folder would be shown to what models write."""
    (python := tmp_path / "python").write_text('#!/bin/sh\necho \'["/usr/bin/x", "/", "/"]\'\n')
    python.chmod(0o755)
    with pytest.raises(UserError, match="has / as its folder"):
        BCB(path, python)


def test_what_is_missing_is_told_before_the_first_task(path, monkeypatch):
    monkeypatch.setattr(bcb, "lacking", lambda: [("bwrap", "apt-get install bubblewrap")])
    with pytest.raises(UserError, match="bcb needs bwrap: apt-get install bubblewrap"):
        BCB(path, sys.executable)


def test_an_error_of_the_machine_is_a_failure(path, monkeypatch, unconfined):
    def full(*given, **more):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(bcb, "confine", full)
    step = response(BCB(path, sys.executable), "Own/0", "```python\npass\n```")
    assert step.failure == "crashed: Resource temporarily unavailable" and step.reward == -1.0


def test_a_compressed_file_libraries_as_a_list_and_tests_of_a_base(tmp_path):
    item = {**ITEMS[0], "libs": ["re"], "test": heir(ONE, inherits=WRONG)}
    path = tmp_path / "bcb.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(item)}\n\n".encode()))
    found = read(path)["Own/0"]
    assert found.libs == ("re",) and found.tests == {"test_one", "test_base"}


def broken(**fields) -> str:
    return json.dumps({**ITEMS[0], **fields})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (None, "No file"),
        ("", "holds no task"),
        ("{", "line 1"),
        (b"\xff\xfe", "line 1"),
        (broken() + "\n" + "[" * 100_000, "line 2"),
        (broken() + "\n5", "line 2"),
        (broken(task_id=3), "line 1, task_id"),
        (broken(instruct_prompt=" "), "line 1, instruct_prompt"),
        (broken(test=None), "line 1, test"),
        (broken(test="def x("), "no Python"),
        (broken(test="\0"), "no Python"),
        (broken(test="class Other: pass"), "no class TestCases"),
        (broken(test="class TestCases:\n def other(self): pass"), "no class TestCases"),
        (broken(test="class TestCases(TestCases): pass"), "no class TestCases"),
        (broken(entry_point="a b"), "line 1, entry_point"),
        (broken(code_prompt=["x"]), "line 1, code_prompt"),
        (broken(libs="['a"), "line 1, libs"),
        (broken(libs=[1]), "line 1, libs"),
        (broken(libs="5"), "line 1, libs"),
        (broken() + "\n" + broken(), "Own/0 was there before"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(tmp_path, text, field):
    path = tmp_path / "bcb.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        BCB(path, sys.executable)
    assert str(path) in str(caught.value) and field in str(caught.value)
    assert "\n" not in str(caught.value)
