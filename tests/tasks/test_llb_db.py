"""LLB-DB: its file, its score, SQLite and a server beneath it, hostile statements, the counts."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest
from conftest import HANG_S

from config.errors import UserError
from tasks import llb_db
from tasks.llb_db import (
    LLBDB,
    SQLite,
    StatementError,
    digest,
    load,
    own,
    own_file,
    parsed,
    read_action,
    read_rows,
    released_rows,
    same_rows,
)

ROOT = Path(__file__).parents[2]
TRAIN = ROOT.parent / "shared" / "data" / "llb_db_train.json.gz"
published = pytest.mark.skipif(not TRAIN.is_file(), reason=f"needs {TRAIN}, which is not there")
FDS = Path("/proc/self/fd")
SECONDS = llb_db.SECONDS
SERVER = os.environ.get("LLB_SERVER", "")
with_server = pytest.mark.skipif(not SERVER, reason="LLB_SERVER=mysql://USER@HOST is not set")


@pytest.fixture(autouse=True)
def as_slow_as_may_be(monkeypatch):
    """Give statements the time of any machine; what is to be ended gets less."""
    for module in ("llb_db", "sql_server"):
        monkeypatch.setattr(f"tasks.{module}.SECONDS", HANG_S)


def block(sql: str) -> str:
    return f"```sql\n{sql}\n```"


def one_item(**changes) -> llb_db.Item:
    """Make an item of a file with this one: own-1 with other fields."""
    item = own_file()["own-1"] | changes
    return parsed(Path("made"), {"1": item})[0]


# ---------------------------------------------------------------- the file


def changed(place: str, value: object) -> str:
    """Return our own file as JSON, with one field of its first item replaced."""
    items = copy.deepcopy(own_file())
    *path, last = place.split(".")
    inner = items["own-1"]
    for name in path:
        inner = inner[int(name) if name.isdigit() else name]
    inner[int(last) if last.isdigit() else last] = value
    return json.dumps(items)


PYTHON = repr(own_file()["own-1"]["answer_info"])
MALFORMED = [
    ("", "not JSON"),
    ("{'own-1': {}}", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("[]", "JSON object of items"),
    ("{}", "JSON object of items"),
    ('{"7": "x"}', "item 7: an item must be an object"),
    (changed("instruction", None), "item own-1: the field 'instruction' is missing"),
    (changed("instruction", 3), "'instruction' must be a text"),
    (changed("instruction", "\ud800"), "'instruction' holds half of a surrogate"),
    (changed("answer_info", []), "'answer_info' must be an object"),
    (changed("answer_info.sql", ""), "'sql' is empty"),
    (changed("answer_info.direct", None), "one of 'direct' and 'md5'"),
    (changed("answer_info.md5", "5e55"), "one of 'direct' and 'md5'"),
    (changed("answer_info.direct.1", ["Puffin"]), "row 2 of 'direct' has 1 values"),
    (changed("answer_info.direct.0.0", {"a": 1}), "row 1 of 'direct' holds other than"),
    (changed("table_info.name", "a\nb"), "'name' must be"),
    (changed("table_info.column_info_list", {}), "'column_info_list' must be a list"),
    (changed("table_info.column_info_list.0", "boat_id INT"), "must be an object"),
    (changed("table_info.column_info_list.0.name", "NAME"), "the same name"),
    (changed("table_info.column_info_list.0.type", "INT); DROP TABLE x"), "'type' must be a type"),
    (changed("table_info.row_list", "none"), "'row_list' must be a list of rows"),
    (changed("table_info.row_list.2", [3, "Tern"]), "row 3 of 'row_list' has 2 values"),
    (changed("table_info.row_list.0.0", 2**63), "row 1 of 'row_list' holds other than"),
    (changed("table_info.row_list.0.3", float("nan")), "row 1 of 'row_list' holds other than"),
    (changed("skill_list", "insert"), "'skill_list' must be a list"),
    # the two broken files of the release, and its file for another environment
    (changed("answer_info", PYTHON), "db_bench_data.json of the release; use db_bench_runtime_l"),
    (
        json.dumps({"0": {"evaluation_info": "{'ground_truth_command_item': {}}"}}),
        "os_interaction_runtime_learning_data.json",
    ),
    (json.dumps({"0": {"evaluation_info": {}}}), "llb-db reads db_bench_runtime_learning_data"),
]


@pytest.mark.parametrize(("text", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_one_sentence(tmp_path, text, reason):
    path = tmp_path / "db.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path)
    said = str(caught.value)
    assert reason in said and str(path) in said
    assert "\n" not in said and said.endswith(".")


def test_a_file_that_is_not_there_or_damaged(tmp_path):
    with pytest.raises(UserError, match="No file at"):
        LLBDB(tmp_path / "none.json")
    broken = tmp_path / "db.json.gz"
    broken.write_bytes(gzip.compress(json.dumps(own_file()).encode())[:-40])
    with pytest.raises(UserError, match="cannot be read"):
        LLBDB(broken)


def test_a_file_is_read_plain_and_compressed(tmp_path):
    text = json.dumps(own_file()).encode()
    (tmp_path / "db.json").write_bytes(text)
    (tmp_path / "db.json.gz").write_bytes(gzip.compress(text))
    items = load(tmp_path / "db.json")
    assert items == load(tmp_path / "db.json.gz") == own() and len(items) == 8


# ---------------------------------------------------------------- the score


def test_the_digest_by_hand():
    """By the shell: `printf '1,Ann,2.5' | md5sum` and so on, `sort`, `paste -sd,`, `md5sum`."""
    rows = [(3, "Cy", 7.0), (1, "Ann", 2.5), (2, "Bo", None)]
    firsts = ["6b7ad", "22b28", "9ffec"]
    assert digest(rows) == llb_db._md5(",".join(sorted(firsts)))
    assert digest(rows) == "ad4ecd83d31c89dc8355bb50070daff1"
    assert digest([]) == "None"


@pytest.mark.parametrize(
    ("given", "gold", "ordered", "right"),
    [
        ([("a", 1)], [("a", 1.0)], True, True),
        ([("a", 1.0004)], [("a", 1)], True, True),
        ([("a", 1.0006)], [("a", 1)], True, False),
        ([("b", 2), ("a", 1)], [("a", 1), ("b", 2)], False, True),
        ([("b", 2), ("a", 1)], [("a", 1), ("b", 2)], True, False),
        ([("a", 1), ("a", 1)], [("a", 1)], False, False),
        ([("a", 1), ("a", 1), ("b", 1)], [("a", 1), ("b", 1), ("b", 1)], False, False),
        ([(1, "a")], [("a", 1)], False, False),
        ([("7",)], [(7,)], True, True),
        ([("07",)], [(7,)], True, False),
        ([("1.10",)], [("1.1",)], True, False),
        ([(None,)], [("None",)], True, False),
        ([(None,)], [(None,)], True, True),
        ([("A",)], [("a",)], True, False),
        ([(float("inf"),)], [(1,)], True, False),
        ([(10**400,)], [(1,)], True, False),
        ([], [], True, True),
    ],
)
def test_which_rows_are_the_same(given, gold, ordered, right):
    assert same_rows(given, gold, ordered) is right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("[('a', 1), ('b', 2)]", [("a", 1), ("b", 2)], True),
        ("[('b', 2), ('a', 1)]", [("a", 1), ("b", 2)], False),  # order always counts
        ("(a, 1) and (b, 2)", [("a", 1), ("b", 2)], True),
        ("[('a', 1.0000009)]", [("a", 1)], True),
        ("[('a', 1.000002)]", [("a", 1)], False),
        ("[(4.166666666666667,)]", [(4.1667,)], False),
        ("[(1000000.5,)]", [(1000000,)], True),  # a millionth of the number
        ("[('7',)]", [(7,)], False),  # a number in quotes
        ("[(7%,)]", [(7,)], False),
        ("[(+7,)]", [(7,)], True),
        ("[(Decimal('7.50'),)]", [(7.5,)], True),
        ("[(Decimal(\"7\"), 'a')]", [(7, "a")], True),
        ("[(Decimal(Decimal(7)),)]", [(7,)], False),
        ("[(7, 8)]", [(7,)], False),
        ("[('a, b',)]", [("a, b",)], False),  # cut at the comma
        ("[('f(x)',)]", [("f(x)",)], False),  # cut at the parenthesis
        ('[("O\'Neil",)]', [("O'Neil",)], True),
        ("[('O'Neil',)]", [("O'Neil",)], True),
        ("[(''a'',)]", [("a",)], False),
        ("[(a,)]", [("a",)], True),
        ("[(A,)]", [("a",)], False),
        ("[('',)]", [("",)], True),
        ("[(None,)]", [(None,)], False),
        ("[(NULL,)]", [("NULL",)], True),
        ("7, 'a'", [(7, "a")], True),  # without parentheses it is one row
        ("7", [(7,), (8,)], False),
        ('[["a", 1]]', [("a", 1)], False),
        ("", [], True),
        ("there are none", [], True),
        ("[(1,)]", [], False),
        ("", [(1,)], False),
        ("[(1,]", [(1,)], False),
        ("[1,)]", [(1,)], False),
        ("[(Decimal(1,)]", [(1,)], False),
        ("[(no,)]", [(1,)], False),
    ],
)
def test_which_answers_are_right_as_the_release_judges_them(answer, gold, right):
    """Golden values: what its own validator has said of each, run beside the checkout."""
    assert released_rows(answer, gold) is right


def test_two_rules_for_one_answer():
    """own-3 has no order: its gold rows are sloop, ketch; a quoted number is one by our rules."""
    answers = (
        '[["sloop", 9.5], ["ketch", 14]]',
        '[["ketch", "14"], ["sloop", 9.5]]',
        "[('sloop', 9.5), ('ketch', 14)]",
        "[('ketch', 14), ('sloop', 9.5)]",
        "[('sloop', 9.5),\n('ketch', 14)]",  # of several lines the first
    )
    rewards = {}
    for rules in ("own", "released"):
        env = LLBDB(rules=rules)
        rewards[rules] = []
        for rows in answers:
            with closing(env.reset("own-3")) as episode:
                rewards[rules].append(episode.step(f"Answer: {rows}").reward)
    assert rewards == {"own": [1, 1, 1, 1, 1], "released": [-1, -1, 1, -1, -1]}


def test_rules_are_named_and_tell_tasks_apart():
    own_rules, released = LLBDB().tasks(), LLBDB(rules="released").tasks()
    assert own_rules[0].kind == "select, own rules" and len(own_rules) == len(released)
    assert released[0].kind == "select, released rules"
    assert not {t.digest for t in own_rules} & {t.digest for t in released}


def test_the_limits_of_the_release():
    env = LLBDB(rules="released")
    assert env.most_steps == 3 and "You have 3 responses" in env.instructions
    # a mean that our item rounds, an order that is not asked for, a NULL: wrong there
    assert env.skip_list() == ["own-2", "own-3", "own-4"]
    with closing(env.reset("own-1")) as episode:
        steps = [episode.step(block("SELECT 1")) for _ in range(3)]
        assert [step.done for step in steps] == [False, False, True]
    with closing(env.reset("own-1")) as episode:  # what has no action ends the task
        step = episode.step("Let me think.")
        assert (step.done, step.reward, step.failure) == (True, -1.0, "no action")
    with closing(env.reset("own-5")) as episode:
        assert not episode.step(next(t for t in env.tasks() if t.id == "own-5").solution[0]).done
        step = episode.step("I have done it.")
        assert (step.done, step.reward, step.failure) == (True, 1.0, "")


@pytest.mark.parametrize("rules", ["own", "released"])
def test_without_an_answer_a_change_is_judged_by_its_table(rules):
    """As in the release, whose check looks at the table however an episode has ended."""
    env = LLBDB(rules=rules, most_steps=2)
    for task in env.tasks():
        asks = env.items[task.id].direct is not None
        with closing(task.begin()) as episode:
            episode.step(task.solution[0])
            last = episode.step(block("SELECT 1"))
        assert last.done and "no answer was given" in last.observation
        assert (last.reward, last.failure) == ((-1.0, "steps") if asks else (1.0, ""))
        with closing(task.begin()) as episode:  # ended by who acts, the model's window for one
            episode.step(task.solution[0])
            step = episode.give_up("window")
        assert (step.reward, step.failure) == ((-1.0, "window") if asks else (1.0, ""))
        with closing(task.begin()) as episode:
            assert [episode.step(block("SELECT 1")).reward for _ in range(2)] == [0.0, -1.0]


def test_no_answer_is_that_of_no_rows():
    item = one_item(answer_info=own_file()["own-1"]["answer_info"] | {"direct": []})
    for released in (False, True):
        with closing(llb_db.LLBEpisode(item, SQLite(item), 1, released)) as episode:
            assert episode.step(block("SELECT 1")).reward == 1.0


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER\nBY a", True),
        ("select a from t order by f(a)", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 3) AS s", False),
        ("SELECT a FROM t WHERE b = 'in order by (a'", False),
        ("SELECT RANK() OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM t WHERE b IN (SELECT b FROM t) ORDER BY a", True),
    ],
)
def test_order_counts_if_the_statement_itself_sorts(sql, ordered):
    answer = own_file()["own-1"]["answer_info"] | {"sql": sql}
    assert one_item(answer_info=answer).ordered is ordered


# ---------------------------------------------------------------- actions


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("```sql\nSELECT 1;\n```", ("sql", "SELECT 1;")),
        ("I look.\n```SQL SELECT 1```\nThen more.", ("sql", "SELECT 1")),
        ("```\nSELECT 1\n```", ("sql", "SELECT 1")),
        ("```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", ("sql", "SELECT 1")),
        ("```sql\nSELECT 1\n```\nAnswer: [[1]]", ("sql", "SELECT 1")),
        ("Answer: done\n```sql\nSELECT 1\n```", ("answer", "done\n```sql\nSELECT 1\n```")),
        ("It is so.\n**Final Answer:** [[1]]", ("answer", "[[1]]")),
        ("```\nAnswer: [[1]]\n```", ("answer", "[[1]]")),
        ("```sql\nSELECT 1", None),
        ("A response must hold a block that begins with ```sql and ends with ```.", None),
        ("The answer is done", None),
        ("", None),
    ],
)
def test_what_a_response_does(response, action):
    assert read_action(response) == action


@pytest.mark.parametrize(
    ("text", "width", "rows"),
    [
        ('[["a", 1], ["b", null]]', 2, [("a", 1), ("b", None)]),
        ("[('a', 1.5), ('b', None)]", 2, [("a", 1.5), ("b", None)]),
        ('[["a", true]] These are all.', 2, [("a", 1)]),
        ("[('a',)]\nThese are all.", 1, [("a",)]),
        ('```json\n[["a"]]\n```', 1, [("a",)]),
        ('["a", 1]', 2, [("a", 1)]),
        ('["a", "b"]', 1, [("a",), ("b",)]),
        ("42", 1, [(42,)]),
        ("'a b'", 1, [("a b",)]),
        ("[]", 1, []),
        ("12 Main Street", 1, None),
        ("a, b", 2, None),
        ('[["a"], "b"]', 1, None),
        ('[[["a"]]]', 1, None),
        ('[[{"a": 1}]]', 1, None),
        ("{1, 2}", 1, None),
        ("[" * 50_000, 1, None),
        ("(" * 50_000, 1, None),
        ("[[" + "9" * 5_000 + "]]", 1, None),
        ("", 1, None),
        ("null", 1, None),
    ],
)
def test_the_rows_of_an_answer(text, width, rows):
    assert read_rows(text, width) == rows


@pytest.mark.parametrize("filler", [" ", "\n", "`", "(", "Answer:", "answer *", "```sql ", "-- "])
def test_a_long_response_is_read_at_once(filler):
    episode = LLBDB().reset("own-1")
    for response in (filler * 100_000, f"```{filler * 100_000}", f"Answer: [{filler * 100_000}"):
        assert not episode.step(response).done


# ---------------------------------------------------------------- episodes


def test_our_own_items_are_solved_by_their_gold_statements():
    env = LLBDB()
    tasks = env.tasks()
    assert len(tasks) == 8 and env.skip_list() == []
    kinds = {task.kind.removesuffix(", own rules") for task in tasks}
    assert kinds == {"select", "insert", "update", "delete"}
    for task in tasks:
        assert task.environment is env and task.answers == () and task.begin().observation
        assert task.intent in task.question and task.question.count("\n") == 1
        assert len(task.solution) == 2 and read_action(task.solution[0])[0] == "sql"
    assert tasks[0].question.endswith(
        "The table is boats. Its columns are boat_id (INT), name (TEXT), kind (TEXT), "
        "length_m (DOUBLE), berth (INT)."
    )


def test_without_the_statement_a_change_is_not_right():
    env = LLBDB()
    for task in env.tasks():
        with closing(task.begin()) as episode:
            step = episode.step("Answer: done")
        assert step.done and step.reward == -1.0 and not step.failure


def test_a_skip_list_names_what_its_own_statement_does_not_solve(tmp_path):
    items = own_file()
    items["own-2"]["answer_info"]["sql"] = "SELECT MEDIAN(length_m), 4 FROM boats;"
    items["own-5"]["answer_info"]["md5"] = "0" * 32
    (tmp_path / "db.json").write_text(json.dumps(items))
    env = LLBDB(tmp_path / "db.json")
    assert env.skip_list() == ["own-2", "own-5"]


def test_an_episode_shows_results_and_errors_and_goes_on():
    with closing(LLBDB().reset("own-7")) as episode:
        said = [
            episode.step(action)
            for action in (
                block("SELECT loan_id, fine FROM loans WHERE reader = 'Omar'"),
                block("SELECT colour FROM loans"),
                block("DELETE FROM loans WHERE loan_id > 4"),
                "Let me think.",
                block("SELECT 1") + "\nAnswer: [[1]]",
                "Answer: all of them",
            )
        ]
        assert not any(step.done or step.reward for step in said)
        texts = [step.observation for step in said]
        assert texts[0] == "loan_id, fine\n[2, 2.25]\n[5, null]\n(2 rows)"
        assert texts[1].startswith("Error: no such column: colour")
        assert texts[2] == "Done. 1 row changed."
        assert texts[3].startswith("Nothing was carried out")
        assert texts[4].startswith("1\n[1]\n(1 row)") and "ignored" in texts[4]
        assert texts[5].startswith("The answer could not be read")
        end = episode.step("Answer: done")
        assert end.done and end.reward == -1.0
        assert episode.step(block("SELECT 1")) is end


def test_the_last_response_ends_the_episode_as_the_instructions_say(monkeypatch):
    monkeypatch.setattr(llb_db, "SECONDS", SECONDS)
    env = LLBDB(most_steps=3)
    assert "You have 3 responses" in env.instructions and env.most_steps == 3
    assert "SQLite" in env.instructions and "5 seconds" in env.instructions
    with closing(env.reset("own-1")) as episode:
        steps = [episode.step(block("SELECT 1")) for _ in range(3)]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[2].reward == -1.0 and "no answer" in steps[2].observation
    for task in env.tasks():  # an answer in the last response counts
        with closing(task.begin()) as episode:
            assert not episode.step("hm").done
            assert not episode.step(task.solution[0]).done
            assert episode.step(task.solution[1]).reward == 1.0
    assert LLBDB().most_steps == 15 and "You have 15 responses" in LLBDB().instructions


def test_what_the_instructions_show_can_be_done():
    env = LLBDB()
    lines = env.instructions.splitlines()
    start = lines.index("```sql")
    assert read_action("\n".join(lines[start : start + 3]))[0] == "sql"
    answers = [line for line in lines if line.startswith("Answer:")]
    assert len(answers) == 2
    for line in answers:
        with closing(env.reset("own-1")) as episode:
            assert episode.step(line).done


def test_a_closed_episode_is_over():
    episode = LLBDB().reset("own-1")
    episode.close()
    episode.close()
    step = episode.step(block("SELECT 1"))
    assert step.done and step.reward == -1.0 and step.failure == "closed"


def test_fingerprints_tell_tables_and_answers_apart():
    first, *others = (
        one_item(),
        one_item(table_info=own_file()["own-1"]["table_info"] | {"row_list": []}),
        one_item(answer_info=own_file()["own-1"]["answer_info"] | {"direct": [["Tern", 7.0]]}),
        one_item(answer_info=own_file()["own-5"]["answer_info"]),
    )
    assert first.fingerprint == one_item().fingerprint
    assert first.fingerprint not in {item.fingerprint for item in others}
    tasks = LLBDB().tasks()
    assert len({task.digest for task in tasks}) == 8
    assert [t.digest for t in tasks] == [t.digest for t in LLBDB().tasks()]


def test_a_table_that_cannot_be_made_is_one_sentence():
    kinds = own_file()["own-1"]["table_info"]
    item = one_item(table_info=kinds | {"name": "sqlite_boats"})
    with pytest.raises(UserError, match="The table of item 1 cannot be made"):
        SQLite(item)


# ---------------------------------------------------------------- SQLite


@pytest.fixture
def boats():
    with closing(SQLite(own()[0])) as database:
        yield database


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
LONG = "replace(hex(zeroblob(20000)), '0', 'a')"
HOSTILE = [
    ("SELECT 1; DROP TABLE boats", "one statement at a time"),
    ("SELECT * FROM boats a, boats b, boats c, boats d", "more than 500 rows"),
    ("SELECT hex(zeroblob(20000))", "20,000 characters"),
    ("SELECT hex(zeroblob(900000000))", "too big"),
    ("SELECT printf('%.*c', 900000000, 'x')", "not authorized"),
    ("SELECT FORMAT('%.*c', 900000000, 'x')", "not authorized"),
    (ENDLESS + "SELECT * FROM c", "more than 500 rows"),
    ("ATTACH 'PLACE/a.db' AS a", "not authorized"),
    ("ATTACH ':memory:' AS a", "not authorized"),
    ("DETACH main", "not authorized"),
    ("VACUUM INTO 'PLACE/b.db'", "authorization denied"),
    ("PRAGMA journal_mode = WAL", "not authorized"),
    ("PRAGMA table_info(boats)", "not authorized"),
    ("SELECT * FROM pragma_table_info('boats')", "prohibited"),
    ("CREATE VIRTUAL TABLE v USING fts5(a, content='')", "not authorized"),
    ("SELECT load_extension('PLACE/x.so')", "not authorized"),
    ("SELECT writefile('PLACE/c', 'x')", "no such function"),
    ("SELECT readfile('/etc/passwd')", "no such function"),
    ("SELECT ?", "bindings"),
    ("SELECT '\ud800'", "surrogates"),
    ("SELECT 'a\0b'", "null character"),
    ("SELECT 1 " + "+ 1" * 1_000, "Expression tree is too large"),
    ("SELECT 1" + " UNION SELECT 1" * 1_000, "too many terms"),
    ("UPDATE sqlite_master SET sql = ''", "may not be modified"),
    ("garbage", "syntax error"),
]


@pytest.mark.parametrize(("sql", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_statement_is_an_error_reply(tmp_path, sql, reason):
    with closing(LLBDB().reset("own-1")) as episode:
        step = episode.step(block(sql.replace("PLACE", str(tmp_path))))
        assert step.observation.startswith("Error: ") and reason in step.observation
        assert not step.done and not [*tmp_path.iterdir()]
        assert episode.step('Answer: [["Petrel",9.5],["Puffin",9.5],["Tern",7]]').reward == 1.0


@pytest.mark.parametrize("sql", ["", ";", " ;\n; ", "-- nothing", "/* not closed", "/* a */ -- b"])
def test_an_empty_statement_is_an_error_reply(sql):
    with closing(LLBDB().reset("own-1")) as episode:
        assert episode.step(block(sql)).observation.startswith("Error: there is no statement")


def test_a_statement_has_a_longest_length():
    with closing(LLBDB().reset("own-1")) as episode:
        assert "20,000 characters" in episode.step(block(f"SELECT '{'x' * 20_000}'")).observation


@pytest.mark.parametrize(
    "sql",
    [
        ENDLESS + "SELECT count(*) FROM c",
        ENDLESS + "SELECT STDDEV(x) FROM c",
        f"{ENDLESS}SELECT sum(instr({LONG} || x, {LONG} || 'b')) FROM c",
        f"{ENDLESS}SELECT sum({LONG} LIKE '{'%a' * 200}b' || x) FROM c",
        f"{ENDLESS}SELECT sum({LONG} GLOB '{'*a' * 200}b' || x) FROM c",
        ENDLESS + "UPDATE boats SET berth = (SELECT count(*) FROM c)",
        "CREATE VIEW v AS " + ENDLESS + "SELECT sum(x) AS s FROM c",
    ],
)
def test_an_endless_statement_is_ended(monkeypatch, boats, sql):
    with monkeypatch.context() as patch, pytest.raises(StatementError, match="took longer than"):
        patch.setattr(llb_db, "SECONDS", 0.2)
        boats.execute(sql)
        boats.execute("SELECT s FROM v")
    assert boats.table() == [*own()[0].rows]


def test_a_statement_has_its_seconds(monkeypatch, boats):
    """Five of them, as is said; here one."""
    assert SECONDS == 5
    monkeypatch.setattr(llb_db, "SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(StatementError, match="longer than 5 seconds"):
        boats.execute(ENDLESS + "SELECT count(*) FROM c")
    assert 0.9 < time.monotonic() - started


def test_a_table_that_has_become_an_endless_view_is_wrong(monkeypatch):
    monkeypatch.setattr(llb_db, "SECONDS", 0.2)
    with closing(LLBDB().reset("own-5")) as episode:
        episode.step(block("DROP TABLE loans"))
        columns = "x AS loan_id, x AS reader, x AS title, x AS days, count(*) AS fine"
        view = f"CREATE VIEW loans AS {ENDLESS}SELECT {columns} FROM c"
        assert episode.step(block(view)).observation.startswith("Done.")
        step = episode.step("Answer: done")
        assert step.done and step.reward == -1.0
    with closing(LLBDB().reset("own-5")) as episode:
        episode.step(block("DROP TABLE loans"))
        assert episode.step("Answer: done").reward == -1.0


def test_a_temporary_table_does_not_hide_the_one_that_is_judged():
    task = next(task for task in LLBDB().tasks() if task.id == "own-8")
    with closing(task.begin()) as episode:
        episode.step(task.solution[0])
        made = episode.step(block("CREATE TEMP TABLE boats AS SELECT * FROM boats LIMIT 1"))
        assert made.observation.startswith("Done.")
        assert episode.step("Answer: done").reward == 1.0


def test_memory_is_limited():
    """A sort of endless long rows had taken 2 GB within the five seconds."""
    code = f"""
        import re, resource
        from tasks import llb_db
        from tasks.llb_db import SQLite, StatementError, own
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))  # should the limit not hold
        llb_db.SECONDS = 60
        database = SQLite(own()[0])
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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True
    )
    *errors, peak = done.stdout.splitlines()
    assert errors[0] == "it takes too much memory" and errors[1] == "database or disk is full"
    assert len(errors) == 2 and int(peak) < 450, done.stderr


def test_standard_deviations_are_mysqls(boats):
    select = "SELECT STDDEV({0}), STD({0}), STDDEV_POP({0}), STDDEV_SAMP({0}) FROM boats WHERE {1}"

    def row(column: str, where: str) -> tuple:
        return boats.execute(select.format(column, where)).rows[0]

    # berths 4, 11, 7, 2: mean 6, squares 4 + 25 + 1 + 16 = 46
    assert row("berth", "1") == pytest.approx(((46 / 4) ** 0.5,) * 3 + ((46 / 3) ** 0.5,))
    assert row("berth", "boat_id = 1") == (0, 0, 0, None)
    assert row("berth", "berth IS NULL") == (None,) * 4
    assert row("'3 men'", "1")[0] == 0 == row("x'00'", "1")[0]


def test_two_episodes_share_nothing():
    env = LLBDB()
    with closing(env.reset("own-5")) as one, closing(env.reset("own-5")) as other:
        one.step(block("DELETE FROM loans"))
        one.step(block("CREATE TABLE notes (a INT)"))
        one.step(block("CREATE TEMP TABLE notes2 (a INT)"))
        assert "(5 rows)" in other.step(block("SELECT * FROM loans")).observation
        for name in ("notes", "notes2"):
            assert "no such table" in other.step(block(f"SELECT * FROM {name}")).observation
        solution = next(task for task in env.tasks() if task.id == "own-5").solution
        other.step(solution[0])
        assert other.step(solution[1]).reward == 1.0
        assert one.step(solution[1]).reward == -1.0


def test_nothing_is_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    before = {*FDS.iterdir()} if FDS.is_dir() else set()
    with closing(SQLite(own()[0])) as database:
        database.execute(
            "CREATE TEMP TABLE t AS SELECT a.* FROM boats a, boats b, boats c, boats d"
        )
        database.execute("SELECT count(*) FROM (SELECT * FROM t, boats ORDER BY random())")
        if before:
            assert {*FDS.iterdir()} == before
    assert not [*tmp_path.iterdir()]


# words, and what glues them together, of hostile statements
WORDS = """
    SELECT INSERT UPDATE DELETE FROM INTO VALUES SET WHERE boats name berth length_m * 1 -1 NULL
    'x' "y" `z` x'ff' 9e999 ( ) , ; = < || . AS JOIN ON GROUP BY ORDER HAVING LIMIT OFFSET UNION
    ALL WITH RECURSIVE CREATE TABLE TEMP VIEW TRIGGER INDEX DROP ALTER ADD COLUMN RENAME TO
    ATTACH DETACH DATABASE PRAGMA journal_mode temp_store VACUUM REINDEX ANALYZE EXPLAIN BEGIN
    COMMIT ROLLBACK SAVEPOINT a RELEASE RETURNING EXISTS IN LIKE GLOB MATCH BETWEEN CASE WHEN
    THEN END CAST COUNT(*) AVG( STDDEV( zeroblob(99999) randomblob(9) load_extension('x')
    char(0) ? :a @b $c -- /* */ ' " ` sqlite_master sqlite_sequence json_each('[1]') IF NOT
    UNIQUE PRIMARY KEY DEFAULT CHECK FOREIGN \\ é 🜨 \u202e \x00 \ud800 % %s {} SHOW TABLES
    DESCRIBE DUAL SLEEP(9) DELIMITER""".split()
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


def hostile(n: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    forms = (draw.choice(FORMS) for _ in range(n))
    words = [*WORDS, *VALUES * 12]  # three of four
    return [form.format(*draw.choices(words, k=form.count("{}"))) for form in forms]


def test_random_hostile_statements_never_raise(monkeypatch):
    monkeypatch.setattr(llb_db, "SECONDS", 0.5)
    env, statements, ran = LLBDB(), hostile(1_000, 0), 0
    with closing(env.reset("own-1")) as other:
        for start in range(0, len(statements), 10):  # a table soon is dropped or renamed
            with closing(env.reset("own-1")) as episode:
                for sql in statements[start : start + 10]:
                    step = episode.step(f"```sql\n{sql}\n```")
                    assert not step.done and step.observation
                    ran += not step.observation.startswith("Error: ")
                assert episode.database.execute("SELECT 1").rows == [(1,)]
        assert "(6 rows)" in other.step(block("SELECT * FROM boats")).observation
    assert 50 < ran < 950  # neither all refused nor all run


def test_a_solution_is_found_out_when_it_is_looked_at_and_once(monkeypatch):
    env, opened = LLBDB(), []
    real = env.backend.open
    monkeypatch.setattr(env.backend, "open", lambda item: opened.append(item.id) or real(item))
    task = env.tasks()[1]
    assert (task.digest, task.intent, opened) == (task.digest, env.intent("own-2"), [])
    assert task.solution[0].startswith("```sql") and len(task.solution) == 2
    assert [*task.solution][1].startswith("Answer: [[10.458") and opened == ["own-2"]


# ---------------------------------------------------------------- the published file


@published
def test_gold_answers_of_the_published_file_on_sqlite():
    env = LLBDB(TRAIN)
    tasks = env.tasks()
    assert len(tasks) == 361 and sum(env.items[t.id].direct is not None for t in tasks) == 259
    missed = {*env.skip_list()}
    right = [id for id in env.items if id not in missed]
    assert len(right) >= 342
    assert sum("STDDEV" not in env.items[id].sql for id in right) >= 341
    assert 361 - len(LLBDB(TRAIN, rules="released").skip_list()) == 297


@published
@pytest.mark.parametrize("rules", ["own", "released"])
def test_changes_of_the_published_file_without_an_answer(rules):
    env = LLBDB(TRAIN, rules=rules, most_steps=2)
    changes = [task for task in env.tasks() if env.items[task.id].direct is None]
    right = 0
    for task in changes:
        with closing(task.begin()) as episode:
            right += [episode.step(task.solution[0]), episode.step(block("SELECT 1"))][1].reward > 0
    assert (len(changes), right) == (102, 94)


@published
def test_answers_of_other_items_of_the_published_file_are_wrong():
    env = LLBDB(TRAIN)
    tasks = env.tasks()
    reads = [task for task in tasks if env.items[task.id].direct is not None]
    for task, other in zip(reads, reads[1:] + reads[:1], strict=True):
        with closing(task.begin()) as episode:
            assert episode.step(other.solution[1]).reward == -1.0, (task.id, other.id)


# ---------------------------------------------------------------- a server of the user's


@pytest.mark.parametrize("name", ["mariadb", "postgres://u@127.0.0.1", "mysql:/x", ""])
def test_a_database_is_named_by_its_address(name):
    with pytest.raises(UserError, match="mysql://USER"):
        LLBDB(backend=name)


def test_what_is_missing_for_a_server_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(UserError, match=r"PyMySQL.*requirements-environments\.txt"):
        LLBDB(backend="mysql://u@h")


@pytest.mark.parametrize(
    "url", ["mysql://", "mysql://host", "mysql://u@h:port", "mysql://u@h/base", "mysql://u@h?a=b"]
)
def test_an_address_that_is_none_is_one_sentence(url):
    with pytest.raises(UserError, match="The database's address"):
        LLBDB(backend=url)


def test_a_server_that_does_not_answer_is_one_sentence():
    pytest.importorskip("pymysql")
    with pytest.raises(UserError, match="cannot be reached"):
        LLBDB(backend="mysql://root@/?unix_socket=/nowhere/socket")


@pytest.fixture(scope="module")
def maria():
    env = LLBDB(backend=SERVER)
    yield env
    env.close()


def accounts(env: LLBDB) -> tuple[set, set]:
    """Return the names of a server's databases and accounts that are of its episodes."""
    with env.backend.admin.cursor() as cursor:
        cursor.execute(f"SHOW DATABASES LIKE '{env.backend._names}%'")
        databases = {*cursor.fetchall()}
        cursor.execute(f"SELECT user FROM mysql.user WHERE user LIKE '{env.backend._names}%'")
        return databases, {*cursor.fetchall()}


@with_server
def test_our_own_items_on_a_server(maria):
    assert maria.skip_list() == [] and maria.instructions.count(maria.backend.name) == 1
    assert accounts(maria) == (set(), set())


@with_server
@published
def test_gold_answers_of_the_published_file_on_a_server(maria):
    env = LLBDB(TRAIN)
    env.backend = maria.backend
    assert 361 - len(env.skip_list()) >= 346


SERVER_HOSTILE = [
    ("SELECT 1; DROP TABLE boats", "syntax"),
    ("SELECT * FROM boats a, boats b, boats c, boats d, boats e, boats f, boats g", "500 rows"),
    (ENDLESS + "SELECT x FROM c", "500 rows"),
    ("SELECT * FROM boats INTO OUTFILE '/tmp/llb-outfile'", "denied"),
    ("LOAD DATA INFILE '/etc/passwd' INTO TABLE boats", "denied"),
    ("LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE boats", "not allowed"),
    ("SHUTDOWN", "denied"),
    ("DROP DATABASE mysql", "denied"),
    ("SELECT user FROM mysql.user", "denied"),
    ("SET GLOBAL max_connections = 1", "denied"),
    ("INSTALL SONAME 'x'", "denied"),
    ("CREATE USER x", "denied"),
    ("FLUSH TABLES WITH READ LOCK", "denied"),
    ("KILL CONNECTION_ID()", "killed"),
    ("SELECT '\ud800'", "surrogates"),
    ("garbage", "syntax"),
]


@with_server
@pytest.mark.parametrize(("sql", "reason"), SERVER_HOSTILE, ids=range(len(SERVER_HOSTILE)))
def test_a_hostile_statement_is_an_error_reply_of_a_server(maria, sql, reason):
    with closing(maria.reset("own-1")) as episode:
        step = episode.step(block(sql))  # what is too long is not received to its end
        assert step.observation.startswith("Error: ") and reason in step.observation
        assert "(6 rows)" in episode.step(block("SELECT * FROM boats")).observation
        assert episode.step('Answer: [["Petrel",9.5],["Puffin",9.5],["Tern",7]]').reward == 1.0


@with_server
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT SLEEP(3600)",
        "SET STATEMENT max_statement_time = 0 FOR SELECT BENCHMARK(1000000000000, MD5('x'))",
        "BEGIN NOT ATOMIC WHILE TRUE DO SELECT 1; END WHILE; END",
    ],
)
def test_a_server_ends_an_endless_statement(maria, monkeypatch, sql):
    from tasks import sql_server

    with closing(maria.reset("own-1")) as episode:
        with monkeypatch.context() as patch:
            patch.setattr(sql_server, "SECONDS", 0.5)
            assert "took longer than" in episode.step(block(sql)).observation
        assert "(6 rows)" in episode.step(block("SELECT * FROM boats")).observation


@with_server
def test_a_changed_password_changes_nothing(maria):
    with closing(maria.reset("own-1")) as episode:
        episode.step(block("SET PASSWORD = PASSWORD('x')"))
        episode.step(block("KILL CONNECTION_ID()"))
        assert "(6 rows)" in episode.step(block("SELECT * FROM boats")).observation


@with_server
def test_two_episodes_of_a_server_share_nothing(maria):
    with closing(maria.reset("own-5")) as one, closing(maria.reset("own-5")) as other:
        one.step(block("DELETE FROM loans"))
        assert "(5 rows)" in other.step(block("SELECT * FROM loans")).observation
        for sql in ("SELECT * FROM {}.loans", "DROP DATABASE {}", "USE {}"):
            said = one.step(block(sql.format(other.database.name))).observation
            assert "denied" in said
        assert one.database.name in one.step(block("SHOW DATABASES")).observation
        assert other.database.name not in one.step(block("SHOW DATABASES")).observation
        assert len(accounts(maria)[0]) == 2
    assert accounts(maria) == (set(), set())


@with_server
def test_random_hostile_statements_never_raise_on_a_server(maria, monkeypatch):
    from tasks import sql_server

    monkeypatch.setattr(sql_server, "SECONDS", 0.5)
    monkeypatch.setattr(maria, "most_steps", 10**6)
    with closing(maria.reset("own-1")) as episode:
        for sql in hostile(400, 1):
            assert not episode.step(f"```sql\n{sql}\n```").failure
        monkeypatch.setattr(sql_server, "SECONDS", HANG_S)
        assert episode.database.execute("SELECT 1").rows == [(1,)]


@with_server
def test_a_server_goes_on_when_it_is_closed_here(maria):
    env = LLBDB(backend=SERVER)
    assert env.skip_list() == []
    env.close()
    env.close()
    with pytest.raises(UserError, match="cannot be made"):
        env.reset("own-1")
    assert maria.skip_list() == []
