"""LLB-DB: its file, its score, SQLite beneath it, hostile statements, the counts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
from conftest import HANG_S

from config.errors import UserError
from suites import llb_db
from suites.llb_db import OWN, Databases, SQLite, StatementError, digest, read_action, right_rows

ROOT = Path(__file__).parents[2]
TRAIN = ROOT.parent / "shared" / "data" / "llb_db_train.json.gz"
published = pytest.mark.skipif(not TRAIN.is_file(), reason=f"needs {TRAIN}, which is not there")
FDS = Path("/proc/self/fd")
RIGHT = "Answer: [('Petrel', 9.5), ('Puffin', 9.5), ('Tern', 7)]"  # to own-1
LOOK = "```sql\nSELECT 1\n```"
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
LONG = "replace(hex(zeroblob(20000)), '0', 'a')"


@pytest.fixture(autouse=True)
def as_slow_as_may_be(monkeypatch):
    """Give statements the time of any machine; what is to be ended gets less."""
    monkeypatch.setattr(llb_db, "SECONDS", HANG_S)


def block(sql: str) -> str:
    return f"```sql\n{sql}\n```"


def steps(env: Databases, id: str, *actions: str) -> list:
    with closing(env.reset(id)) as episode:
        return [episode.step(action) for action in actions]


def outcomes(env: Databases, id: str, *actions: str) -> list[tuple]:
    return [(step.done, step.reward, step.failure) for step in steps(env, id, *actions)]


def with_field(path: Path, place: str, value: object) -> Databases:
    """Open our own file with one field of its first item replaced."""
    items = json.loads(OWN.read_text())
    *inside, last = (int(name) if name.isdigit() else name for name in place.split("."))
    inner = items["own-1"]
    for name in inside:
        inner = inner[name]
    inner[last] = value
    path.write_text(json.dumps(items))
    return Databases(path)


@pytest.mark.parametrize(("place", "value", "field"), [
    ("instruction", None, "instruction"), ("instruction", "\ud800", "instruction"),
    ("answer_info.sql", " ", "answer_info.sql"), ("answer_info.direct", None, "'direct'"),
    ("answer_info.direct.0.0", {"a": 1}, "answer_info.direct.0.0"),
    ("answer_info.md5", "5e55", "'direct'"), ("table_info.name", "a\nb", "table_info.name"),
    ("table_info.name", "sqlite_boats", "reserved"),
    ("table_info.column_info_list", [], "column_info_list"),
    ("table_info.column_info_list.0.name", "NAME", "duplicate column name"),
    ("table_info.column_info_list.0.type", "INT); DROP", "column_info_list.0.type"),
    ("table_info.row_list.2", [3, "Tern"], "one value per column"),
    ("table_info.row_list.0.1", "a\0", "table_info.row_list.0.1"),
    ("table_info.row_list.0.1", "\ud800", "table_info.row_list.0.1"),
    ("table_info.row_list.0.1", float("nan"), "table_info.row_list.0.1"),
    ("table_info.row_list", [[{}] * 5] * 1000, "table_info.row_list.0.0"),
    ("skill_list", "insert", "skill_list"),
])  # fmt: skip
def test_a_malformed_item_is_one_sentence_about_its_first_mistake(tmp_path, place, value, field):
    """Other malformed files are those of tests/commands/test_malformed.py."""
    with pytest.raises(UserError) as caught:
        with_field(path := tmp_path / "db.json", place, value)
    told = str(caught.value)
    assert field in told and f"{path}, item own-1" in told and "\n" not in told
    assert caught.value.__cause__.error_count() < 10


def test_tasks_have_kinds_and_a_fingerprint_of_tables_and_answers(tmp_path):
    tasks = Databases().tasks()
    assert {task.kind for task in tasks} == {"select", "insert", "update", "delete"}
    # those of all versions: a stored row is found again by them
    assert [task.digest for task in tasks[:3]] == [
        "f616917cdb9c8e3d", "84aa29f334e5e544", "0dab5926ad96932d",
    ]  # fmt: skip
    changes = [("table_info.row_list", []), ("answer_info.direct", [["Tern", 7.0]])]
    found = [with_field(tmp_path / "db.json", *change).tasks() for change in changes]
    assert len({tasks[0].digest, *(changed[0].digest for changed in found)}) == 3
    assert all(changed[1].digest == tasks[1].digest for changed in found)
    assert tasks[0].question.endswith(
        "The table is boats. Its columns are boat_id (INT), name (TEXT), kind (TEXT), "
        "length_m (DOUBLE), berth (INT)."
    )


@pytest.mark.parametrize(("rows", "of_them"), [
    # by the shell: `printf '1,Ann,2.5' | md5sum` and so on, `sort`, `paste -sd,`, `md5sum`
    ([(3, "Cy", 7.0), (1, "Ann", 2.5), (2, "Bo", None)], "ad4ecd83d31c89dc8355bb50070daff1"),
    ([], "None"),
])  # fmt: skip
def test_the_digest_by_hand(rows, of_them):
    assert digest(rows) == digest(reversed(rows)) == of_them


@pytest.mark.parametrize(("answer", "gold", "right"), [
    ("[('a', 1), ('b', 2)]", [("a", 1), ("b", 2)], True),
    ("[('b', 2), ('a', 1)]", [("a", 1), ("b", 2)], False),  # order always counts
    ("(a, 1) and (b, 2)", [("a", 1), ("b", 2)], True),
    ("[('a', 1.0000009)]", [("a", 1)], True), ("[('a', 1.000002)]", [("a", 1)], False),
    ("[(1000000.5,)]", [(1000000,)], True),  # a millionth of the number
    ("[('7',)]", [(7,)], False), ("[(7%,)]", [(7,)], False), ("[(+7,)]", [(7,)], True),
    ("[(Decimal('7.50'),)]", [(7.5,)], True), ("[(Decimal(\"7\"), 'a')]", [(7, "a")], True),
    ("[(Decimal(Decimal(7)),)]", [(7,)], False), ("[(7, 8)]", [(7,)], False),
    ("[('a, b',)]", [("a, b",)], False),  # cut at the comma, or the parenthesis
    ("[('f(x)',)]", [("f(x)",)], False),
    ('[("O\'Neil",)]', [("O'Neil",)], True), ("[('O'Neil',)]", [("O'Neil",)], True),
    ("[(''a'',)]", [("a",)], False), ("[(a,)]", [("a",)], True), ("[(A,)]", [("a",)], False),
    ("[('',)]", [("",)], True), ("[(None,)]", [(None,)], False), ("[(NULL,)]", [("NULL",)], True),
    ("7, 'a'", [(7, "a")], True), ("7", [(7,), (8,)], False),  # without parentheses one row
    ('[["a", 1]]', [("a", 1)], False), ("there are none", [], True), ("[(1,)]", [], False),
    ("", [(1,)], False), ("[(1,]", [(1,)], False), ("[1,)]", [(1,)], False),
    ("[(Decimal(1,)]", [(1,)], False), ("[(no,)]", [(1,)], False),
])  # fmt: skip
def test_which_answers_are_right_as_the_release_judges_them(answer, gold, right):
    """Golden values: what its own validator has said of each, run beside the checkout."""
    assert right_rows(answer, gold) is right


@pytest.mark.parametrize(("response", "action"), [
    ("```sql\nSELECT 1;\n```", ("sql", "SELECT 1;")),
    ("I look.\n```SQL SELECT 1```\nThen more.", ("sql", "SELECT 1")),
    ("```\nSELECT 1\n```", ("sql", "SELECT 1")),
    ("```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", ("sql", "SELECT 1")),
    ("```sql\nSELECT 1\n```\nAnswer: [[1]]", ("sql", "SELECT 1")),
    ("Answer: done\n```sql\nSELECT 1\n```", ("answer", "done\n```sql\nSELECT 1\n```")),
    ("It is so.\n**Final Answer:** [[1]]", ("answer", "[[1]]")),
    ("```\nAnswer: [[1]]\n```", ("answer", "[[1]]")), ("```sql\nSELECT 1", None),
    ("A response must hold a block that begins with ```sql and ends with ```.", None),
    ("The answer is done", None), ("", None),
])  # fmt: skip
def test_what_a_response_does(response, action):
    assert read_action(response) == action


@pytest.mark.parametrize("filler", [" ", "\n", "`", "(", "Answer:", "answer *", "```sql ", "-- "])
def test_a_long_response_is_read_at_once(filler):
    filler *= 100_000
    for response in (filler, f"```{filler}", f"Answer: [{filler}"):
        assert steps(Databases(), "own-1", response)[0].reward <= 0


def test_our_own_items_are_solved_by_their_solutions_alone(tmp_path):
    env = Databases()
    assert len(env.tasks()) == 8 and env.skip_list() == []
    for task in env.tasks():
        assert task.intent in task.question == env.reset(task.id).observation
        assert outcomes(env, task.id, "Answer: done") == [(True, -1.0, "")]
    wrong = with_field(tmp_path / "db.json", "answer_info.sql", "SELECT MEDIAN(length_m), 4;")
    assert wrong.skip_list() == ["own-1"]


def test_a_solution_is_found_out_when_it_is_looked_at_and_once(monkeypatch):
    env, opened = Databases(), []
    monkeypatch.setattr(llb_db, "SQLite", lambda item: opened.append(item) or SQLite(item))
    task = env.tasks()[1]
    assert (task.digest, task.intent, opened) == (task.digest, env.intent("own-2"), [])
    assert task.solution[0].startswith("```sql") and len(task.solution) == 2
    assert [*task.solution][1].startswith("Answer: [(10.458")
    assert opened == [env.items["own-2"]]


def test_an_episode_shows_results_and_errors_and_goes_on(monkeypatch):
    monkeypatch.setattr(llb_db, "STEPS", 9)
    shown = {
        block("SELECT loan_id, fine FROM loans WHERE reader = 'Omar'"): (
            "loan_id, fine\n[2, 2.25]\n[5, null]\n(2 rows)"
        ),
        block("SELECT colour FROM loans"): "Error: no such column: colour",
        block("DELETE FROM loans WHERE loan_id > 4"): "Done. 1 row changed.",
        block("CREATE TABLE t (a)"): "Done.",
        f"{LOOK}\nAnswer: [(1,)]": "1\n[1]\n(1 row)\n\nOnly the first statement was run",
        f"{LOOK}\n{LOOK}": "1\n[1]\n(1 row)\n\nOnly the first statement was run",
        block(" ;-- nothing\n/* not closed"): "Error: there is no statement",
        block(f"SELECT '{'x' * 20_000}'"): "Error: a statement may have 20,000 characters",
    }
    *going, end = steps(Databases(), "own-7", *shown, "Answer: done")
    for step, text in zip(going, shown.values(), strict=True):
        assert step.observation.startswith(text) and not step.done
        assert ("ignored" in step.observation) == ("Only" in text)
    assert end.done and end.reward == -1.0


@pytest.mark.parametrize(("actions", "last"), [
    ([LOOK, LOOK], (False, 0.0, "")), ([LOOK, LOOK, LOOK], (True, -1.0, "steps")),
    ([LOOK, LOOK, RIGHT], (True, 1.0, "")), (["Let me think."], (True, -1.0, "no action")),
    ([f"{RIGHT}\nThese are all."], (True, 1.0, "")),  # of several lines the first
    ([RIGHT.replace(" ('Tern'", "\n('Tern'")], (True, -1.0, "")),
])  # fmt: skip
def test_how_an_episode_ends(actions, last):
    assert outcomes(Databases(), "own-1", *actions)[-1] == last


def test_no_answer_is_that_of_no_rows(tmp_path):
    env = with_field(tmp_path / "db.json", "answer_info.direct", [])
    assert outcomes(env, "own-1", "I do not know.") == [(True, 1.0, "")]


def test_without_an_answer_a_change_is_judged_by_its_table():
    """As in the release, whose check looks at the table however an episode has ended."""
    env = Databases()
    for task in env.tasks():
        rows_asked = env.items[task.id].direct is not None
        *_, last = steps(env, task.id, task.solution[0], LOOK, LOOK)
        assert "no answer was given" in last.observation
        with closing(task.begin()) as episode:  # ended by who acts, the model's window for one
            episode.step(task.solution[0])
            given_up = episode.give_up("window")
        for step, failure in ((last, "steps"), (given_up, "window")):
            expected = (True, -1.0, failure) if rows_asked else (True, 1.0, "")
            assert (step.done, step.reward, step.failure) == expected
        assert outcomes(env, task.id, LOOK, LOOK, LOOK)[-1] == (True, -1.0, "steps")


def test_two_episodes_share_nothing(monkeypatch):
    monkeypatch.setattr(llb_db, "STEPS", 9)
    env = Databases()
    solution = env.tasks()[4].solution
    with closing(env.reset("own-5")) as one, closing(env.reset("own-5")) as other:
        for sql in ("DELETE FROM loans", "CREATE TABLE n (a INT)", "CREATE TEMP TABLE m (a INT)"):
            one.step(block(sql))
        assert "(5 rows)" in other.step(block("SELECT * FROM loans")).observation
        for name in "nm":
            assert "no such table" in other.step(block(f"SELECT * FROM {name}")).observation
        other.step(solution[0])
        assert other.step(solution[1]).reward == 1.0 and one.step(solution[1]).reward == -1.0


@pytest.fixture
def boats():
    with closing(SQLite(Databases().items["own-1"])) as database:
        yield database


HOSTILE = [
    ("SELECT 1; DROP TABLE boats", "one statement at a time"),
    ("SELECT * FROM boats a, boats b, boats c, boats d", "more than 500 rows"),
    ("SELECT hex(zeroblob(20000))", "20,000 characters"),
    ("SELECT hex(zeroblob(900000000))", "too big"),
    ("SELECT printf('%.*c', 900000000, 'x')", "not authorized"),
    ("SELECT FORMAT('%.*c', 900000000, 'x')", "not authorized"),
    ("ATTACH 'PLACE/a.db' AS a", "not authorized"),
    ("DETACH main", "not authorized"),
    ("VACUUM INTO 'PLACE/b.db'", "authorization denied"),
    ("PRAGMA journal_mode = WAL", "not authorized"),
    ("PRAGMA table_info(boats)", "not authorized"),
    ("SELECT * FROM pragma_table_info('boats')", "prohibited"),
    ("CREATE VIRTUAL TABLE v USING fts5(a, content='')", "not authorized"),
    ("SELECT load_extension('PLACE/x.so')", "not authorized"),
    ("SELECT writefile('PLACE/c', 'x')", "no such function"),
    ("SELECT ?", "bindings"),
    ("SELECT '\ud800'", "surrogates"),
    ("SELECT 'a\0b'", "null character"),
    ("SELECT 1 " + "+ 1" * 250, "Expression tree is too large"),
    ("SELECT 1" + " UNION SELECT 1" * 1_000, "too many terms"),
    ("SELECT " + ", ".join("1" * 201), "too many columns"),
    ("UPDATE sqlite_master SET sql = ''", "may not be modified"),
    ("garbage", "syntax error"),
]


@pytest.mark.parametrize(("sql", "reason"), HOSTILE)
def test_a_hostile_statement_is_an_error_reply(tmp_path, sql, reason):
    step, end = steps(Databases(), "own-1", block(sql.replace("PLACE", str(tmp_path))), RIGHT)
    assert step.observation.startswith("Error: ") and reason in step.observation
    assert not step.done and not [*tmp_path.iterdir()] and end.reward == 1.0


@pytest.mark.parametrize("sql", [
    ENDLESS + "SELECT count(*) FROM c", ENDLESS + "SELECT STDDEV(x) FROM c",
    f"{ENDLESS}SELECT sum(instr({LONG} || x, {LONG} || 'b')) FROM c",
    f"{ENDLESS}SELECT sum({LONG} LIKE '{'%a' * 200}b' || x) FROM c",
    f"{ENDLESS}SELECT sum({LONG} GLOB '{'*a' * 200}b' || x) FROM c",
    ENDLESS + "UPDATE boats SET berth = (SELECT count(*) FROM c)",
    "CREATE VIEW v AS " + ENDLESS + "SELECT sum(x) AS s FROM c",
])  # fmt: skip
def test_an_endless_statement_is_ended(monkeypatch, boats, sql):
    with monkeypatch.context() as patch, pytest.raises(StatementError, match="took longer than"):
        patch.setattr(llb_db, "SECONDS", 0.2)
        boats.execute(sql)
        boats.execute("SELECT s FROM v")
    assert boats.table() == [*boats.item.rows]


def test_what_is_no_table_any_more_is_wrong_and_a_temporary_one_hides_none(monkeypatch):
    env = Databases()
    made = block("CREATE TEMP TABLE boats AS SELECT * FROM boats LIMIT 1")
    *_, made, end = steps(env, "own-8", env.tasks()[7].solution[0], made, "Answer: done")
    assert made.observation.startswith("Done.") and end.reward == 1.0
    monkeypatch.setattr(llb_db, "SECONDS", 0.2)
    columns = "x AS loan_id, x AS reader, x AS title, x AS days, count(*) AS fine"
    view = block(f"CREATE VIEW loans AS {ENDLESS}SELECT {columns} FROM c")
    for sql in ([view], []):
        *_, end = steps(env, "own-5", block("DROP TABLE loans"), *sql, "Answer: done")
        assert end.done and end.reward == -1.0


def test_memory_is_limited():
    """A sort of endless long rows had taken 2 GB within the five seconds."""
    code = f"""
        import re, resource
        from suites import llb_db
        from suites.llb_db import Databases, SQLite, StatementError
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))  # should the limit not hold
        llb_db.SECONDS = 60
        database = SQLite(Databases().items["own-1"])
        for form in ("SELECT hex(zeroblob(20000)) || x AS y FROM c ORDER BY y",
                     "INSERT INTO boats (name) SELECT hex(zeroblob(20000)) FROM c"):
            try:
                database.execute({ENDLESS!r} + form)
            except StatementError as error:
                print(error)
        assert len(database.table()) == 6
        # not ru_maxrss, which a process takes over from the one that forked it
        peak = re.search("VmHWM:[^0-9]*([0-9]+)", open("/proc/self/status").read())
        print(int(peak[1]) // 1024)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    *errors, peak = done.stdout.splitlines()
    assert errors == ["it takes too much memory", "database or disk is full"], done.stderr
    assert int(peak) < 450


@pytest.mark.parametrize(("column", "where", "found"), [
    ("berth", "1", (46 / 4) ** 0.5),  # 4, 11, 7, 2: mean 6, squares 4 + 25 + 1 + 16
    ("berth", "boat_id = 1", 0), ("berth", "berth IS NULL", None),
])  # fmt: skip
def test_standard_deviations_are_mysqls(boats, column, where, found):
    select = "SELECT STDDEV({0}), STD({0}), STDDEV_POP({0}) FROM boats WHERE {1}"
    assert boats.execute(select.format(column, where))[1] == [pytest.approx((found,) * 3)]


def test_nothing_is_on_the_disk(tmp_path, monkeypatch, boats):
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    before = {*FDS.iterdir()} if FDS.is_dir() else set()
    boats.execute("CREATE TEMP TABLE t AS SELECT a.* FROM boats a, boats b, boats c, boats d")
    boats.execute("SELECT count(*) FROM (SELECT * FROM t, boats ORDER BY random())")
    assert not [*tmp_path.iterdir()] and (not before or {*FDS.iterdir()} == before)


VALUES = (
    "name", "berth", "length_m", "1", "-1.5", "NULL", "'x'", "x'ff'", "9e999", "boat_id || name",
    "zeroblob(9999)", "randomblob(9)", "COUNT(*)", "AVG(berth)", "STDDEV(name)", "char(0, 55296)",
    "(SELECT max(berth) FROM boats)", "CAST(x'ff' AS TEXT)", "a.*, b.*, c.*", "name LIKE '%e%'",
    "boats a, boats b, boats c, boats d", "9223372036854775807 + berth", "1 / 0", "'%' || name",
)  # fmt: skip
FORMS = (
    "{}", "{} {} {} {}", "SELECT {} {} {} FROM boats", "SELECT {} FROM boats WHERE {} {} {}",
    "SELECT {} FROM boats GROUP BY {} ORDER BY {}", "INSERT INTO boats VALUES ({}, {}, {}, {}, {})",
    "UPDATE boats SET name = {}, berth = {} WHERE {} = {}", "DELETE FROM boats WHERE {} = {}",
    "CREATE TABLE {} AS SELECT {} AS a FROM boats", "ALTER TABLE boats {} {} {}", "{} TABLE {}",
)  # fmt: skip


def test_random_hostile_statements_never_raise(monkeypatch):
    monkeypatch.setattr(llb_db, "SECONDS", 0.5)
    monkeypatch.setattr(llb_db, "STEPS", 100)
    env, draw, ran = Databases(), random.Random(0), 0
    told = " ".join(sql for sql, _ in HOSTILE if len(sql) < 200)
    words = [*told.split(), *"' \" ` -- /* TEMP TRIGGER BEGIN".split(), *VALUES * 12]
    with closing(env.reset("own-1")) as other:
        for _ in range(100):  # a table soon is dropped or renamed
            with closing(env.reset("own-1")) as episode:
                for form in draw.choices(FORMS, k=10):
                    sql = form.format(*draw.choices(words, k=form.count("{}")))
                    step = episode.step(block(sql))
                    assert not step.done and step.observation
                    ran += not step.observation.startswith("Error: ")
                assert episode.database.execute("SELECT 1")[1] == [(1,)]
        assert "(6 rows)" in other.step(block("SELECT * FROM boats")).observation
    assert 50 < ran < 950  # neither all refused nor all run


@published
def test_answers_of_the_published_file():
    env = Databases(TRAIN)
    asked = [task for task in env.tasks() if env.items[task.id].direct is not None]
    changes = [task for task in env.tasks() if task not in asked]
    assert (len(asked), len(changes), len(env.skip_list())) == (259, 102, 361 - 297)
    ends = [steps(env, task.id, task.solution[0], LOOK, LOOK)[-1] for task in changes]
    assert sum(end.reward > 0 for end in ends) == 94
    for task, other in zip(asked, asked[1:] + asked[:1], strict=True):
        (step,) = steps(env, task.id, other.solution[1])
        assert step.reward == -1.0, (task.id, other.id)
