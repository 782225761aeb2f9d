"""The `memory` commands: what they print is what the store says, and no source is ever changed."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from test_page import record
from typer.testing import CliRunner

from agents.search import Search
from agents.store import Entry, Store
from agents.tools import Scope, apply
from commands.stores import memory_app
from config.errors import CONTROL
from config.flags import AgentGroup
from dev import keeper
from engines.scripted import ScriptedEngine
from report.records import record as record_of
from rollout import rollout
from tasks.conversations import Memory, Probe
from tasks.episodes import Episode
from tokens.codec import Codec

app = typer.Typer(cls=AgentGroup, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(memory_app, name="memory")


def memory(*words):
    return CliRunner().invoke(app, ["memory", *map(str, words)])


def printed(*words) -> str:
    """What a command that succeeds writes to standard output."""
    result = memory(*words)
    assert result.exit_code == 0 and result.exception is None, result.output
    return result.stdout


def refused(*words) -> str:
    """The one sentence of a command that the user has got wrong; nothing else is printed."""
    result = memory(*words)
    assert result.exit_code == 2 and result.stdout == "", result.output
    *taken, why = result.stderr.splitlines()  # which trajectory was taken, and what is wrong
    assert why.startswith("memagent: ") and all(": task " in line for line in taken)
    return why


ENTRIES = (
    Entry("", "Ann has a red bike.", "episodic", "Ann", "2023-05-01", 1, ("D1:1", "D1:2"), "init"),
    Entry("", "Ben lives in Rome.", "semantic", origin="init"),
    Entry("", "It rained. Then Ben left.", date="2023-05-02", origin="init"),
    Entry("", "Carl met Dora.", origin="init"),
)
SOLD = {"operation": "update", "content": "Ann sold a red bike.", "memory_id": "m1"}
CALLS = (
    ("search_memory", {"query": "bike"}),
    ("manage_memory", {"operation": "create", "content": "Ben has a dog."}),
    ("manage_memory", SOLD),
    ("delete_memory", {"memory_id": "m9"}),
    ("merge_memory", {"memory_ids": ["m2", "m5"], "strategy": "concatenate"}),
    ("split_memory", {"memory_id": "m3", "split_criteria": "temporal"}),
    ("delete_memory", {"memory_id": "m4", "reason": "nobody asks"}),
    ("manage_memory", {"operation": "create", "content": "Eve came."}),
    ("delete_memory", {"memory_id": "m4"}),
    ("nothing", {}),
)
SCOPE = Scope(Search(), len, reply_tokens=2000)


def edited() -> Store:
    """Each tool that writes, and three calls that fail."""
    store = Store(ENTRIES)
    scope = Scope(Search(), len, session=7)
    for name, arguments in CALLS:
        apply(store, name, arguments, scope)
    assert [op.n for op in store.journal if not op.ok] == [4, 9, 10]
    return store


def with_store(store, **other) -> dict:
    """A trajectory whose second turn is its last edit."""
    made = record(**other)
    for turn in made["turns"]:
        turn["notes"] = {"phase": "edit", "store": []}
    made["turns"][1]["notes"]["store"] = [*store.lines()]
    return made


def write(path, records) -> Path:
    text = "".join(json.dumps(each) + "\n" for each in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def there(tmp_path):
    """A folder of sources, no byte of which may have changed when the test is over."""
    folder = tmp_path / "there"
    (folder / "run").mkdir(parents=True)
    edited().to_jsonl(folder / "store.jsonl")
    edited().to_jsonl(folder / "store.jsonl.gz")
    kept = with_store(edited(), id="world-1", step=3)
    write(folder / "records.jsonl", [kept])
    write(folder / "run" / "trajectories.jsonl.gz", [kept])

    def content():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = content()
    yield folder
    assert content() == before


every_source = pytest.mark.parametrize(
    "name", ["store.jsonl", "store.jsonl.gz", "records.jsonl", "run"]
)

# ---------------------------------------------------------------- show


@every_source
def test_show_has_the_entries_after_each_operation(there, name):
    store = edited()
    for n in range(len(store.journal) + 1):
        head, *lines = printed("show", there / name, "--until", n).splitlines()
        assert f"; operations: {n} of 10" in head
        assert [line.partition("  ")[0] for line in lines] == [e.line for e in store.at(n).entries]
    assert printed("show", there / name) == printed("show", there / name, "--until", 10)


def test_show_prints_what_is_known_of_an_entry(there):
    lines = printed("show", there / "store.jsonl").splitlines()
    assert lines == [
        "entries: 5; operations: 10 of 10 (search_memory 1, manage_memory 3, delete_memory 3, "
        "merge_memory 1, split_memory 1, call 1); failed: 3 (unknown_id 1, deleted_id 1, "
        "unknown_tool 1)",
        "[m1] 2023-05-01 Ann: Ann sold a red bike.  v2, episodic, session 1, evidence D1:1, D1:2, "
        "S7",
        "[m6] Ben lives in Rome. Ben has a dog.  v1, from m2, m5, evidence S7",
        "[m7] 2023-05-02 It rained.  v1, from m3",
        "[m8] 2023-05-02 Then Ben left.  v1, from m3",
        "[m9] Eve came.  v1, session 7, evidence S7",
    ]


# ---------------------------------------------------------------- which store


def test_the_first_trajectory_of_the_last_step_with_a_store_is_taken(tmp_path):
    def kept(text, **other):
        return with_store(Store([Entry("", text)]), **other)

    path = write(tmp_path / "t.jsonl", [
        kept("a", id="x-1", step=0, sample=0),
        record(id="x-1", step=5, sample=0),
        kept("b", id="x-2", step=5, sample=1),
        kept("c", id="x-2", step=5, sample=2),
        kept("d", id="y-2", step=0, sample=1),
        record(id="x-3", step=9, sample=0),
    ])  # fmt: skip
    for flags, entry, origin in (
        ([], "b", "task x-2, sample 1, step 5"),
        (["--step", 0], "a", "task x-1, sample 0, step 0"),
        (["--task", "y"], "d", "task y-2, sample 1, step 0"),
        (["--task", "2", "--step", 0], "d", ""),
        (["--task", "2"], "b", ""),
    ):
        result = memory("show", path, *flags)
        assert f"[m1] {entry}  v1" in result.stdout and origin in result.stderr, flags
    for flags in (["--step", 9], ["--task", "z"], ["--step", 5, "--task", "y"]):
        assert "None of the 6 readings" in refused("show", path, *flags)


def test_the_last_edit_of_a_trajectory_counts(tmp_path):
    made = with_store(Store([Entry("", "late")]))
    made["turns"][0]["notes"]["store"] = [*Store([Entry("", "early")]).lines()]
    made["turns"][2]["notes"] = None  # the answer's
    assert "late" in printed("show", write(tmp_path / "transcripts.jsonl", [made]))
    assert "late" in printed("show", tmp_path)  # an evaluation's folder


def noted(notes):
    """A trajectory whose last edit left such notes."""
    made = with_store(edited())
    made["turns"][1]["notes"] = notes
    return made


def cut():
    made = with_store(edited(), id="w")
    made["turns"][1]["notes"]["store"][5] = "{}"
    return made


@pytest.mark.parametrize("make, where", [
    (lambda path: None, ""),
    (lambda path: path.write_text('{"text": 3}\n'), "no file of a store"),
    (lambda path: path.write_text("nonsense\n"), "line 1"),
    (lambda path: path.write_bytes(b'{"text": "\xff"}\n'), "line 1"),
    (lambda path: path.write_text("[" * 99999), "line 1"),
    (lambda path: path.write_text('{"format": "memory store"}\n'), ""),
    (lambda path: write(path, [record()]), ""),
    (lambda path: path.mkdir(), ""),
    (lambda path: write(path, [with_store(edited()) | {"turns": [{"notes": 3}]}]), ""),
    (lambda path: write(path, [with_store(edited()), {"id": 1}]), "line 2"),
    (lambda path: write(path, map(noted, (3, {"store": "x"}, {"store": [1]}, {"store": {}}))), ""),
    (lambda path: write(path, [cut()]), "task w, sample 0, step None, line 6"),
])  # fmt: skip
def test_a_source_that_cannot_be_read_is_one_sentence(tmp_path, make, where):
    path = tmp_path / "source.jsonl"
    make(path)
    for word in ("show", "log", "diff"):
        why = refused(word, path)
        assert path.name in why and where in why


@pytest.mark.parametrize("words", [
    "show store.jsonl --task w", "show store.jsonl --step 0", "show store.jsonl --until 11",
    "diff store.jsonl run --from 0", "diff store.jsonl run --to 3",
    "diff store.jsonl --from 12", "diff store.jsonl --to -1",
])  # fmt: skip
def test_what_would_have_no_effect_is_refused(there, monkeypatch, words):
    monkeypatch.chdir(there)
    refused(*words.split())


# ---------------------------------------------------------------- diff and log


def test_a_diff_marks_the_words_that_differ(there, tmp_path):
    store = there / "store.jsonl"
    lines = printed("diff", store, "--from", 2).splitlines()
    assert lines == [
        "added 1, removed 1, changed 1, merged 1, split 1",
        "added",
        "+ [m9] Eve came.  v1, session 7, evidence S7",
        "removed",
        "- [m4] Carl met Dora.  v1",
        "changed",
        "~ [m1] 2023-05-01 Ann: Ann [-has-] {+sold+} a red bike.  version 1 -> 2, "
        "evidence D1:1, D1:2 -> D1:1, D1:2, S7",
        "merged",
        "- [m2] Ben lives in Rome.  v1, semantic",
        "- [m5] Ben has a dog.  v1, session 7, evidence S7",
        "+ [m6] Ben lives in Rome. Ben has a dog.  v1, from m2, m5, evidence S7",
        "split",
        "- [m3] 2023-05-02 It rained. Then Ben left.  v1",
        "+ [m7] 2023-05-02 It rained.  v1, from m3",
        "+ [m8] 2023-05-02 Then Ben left.  v1, from m3",
    ]
    back = printed("diff", store, "--from", 10, "--to", 0)
    assert "~ [m1] 2023-05-01 Ann: Ann [-sold-] {+has+} a red bike.  version 2 -> 1" in back
    merged = printed("diff", store, "--from", 4, "--to", 5).splitlines()
    assert merged[:2] == ["added 0, removed 0, changed 0, merged 1, split 0", "merged"]
    # undone, a merge is a split
    assert "merged 0, split 1" in printed("diff", store, "--from", 5, "--to", 4)
    # of one entry that was there and one that was not, it is none
    assert "added 2, removed 2, changed 1, merged 0, split 1" in printed("diff", store)
    nothing = "added 0, removed 0, changed 0, merged 0, split 0\n"
    assert printed("diff", store, "--from", 8) == nothing
    early = tmp_path / "early.jsonl"  # two sources are their stores
    Store(edited().at(2).entries).to_jsonl(early)
    assert printed("diff", early, there / "run").splitlines() == lines


def test_what_else_differs_than_words_is_said(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    Store([Entry("m1", "It rains.", session=0, kind="semantic")]).to_jsonl(a)
    other = Entry("m1", "It rains.", date="2024-01-02", session=1, evidence=("D1:1",))
    Store([other]).to_jsonl(b)
    assert printed("diff", a, b).splitlines()[-1] == (
        "~ [m1] {+2024-01-02+} It rains.  kind semantic -> none, session 0 -> 1, "
        "evidence none -> D1:1"
    )


@every_source
def test_the_log_has_each_operation_with_its_outcome(there, name):
    head, *lines = printed("log", there / name).splitlines()
    assert "operations: 10 of 10" in head
    text = "\n".join(lines)
    at = [text.index(f"{n:>3}  session 7  {name}") for n, (name, _) in enumerate(CALLS[:9], 1)]
    assert at == sorted(at)
    assert lines[:3] == [
        '  1  session 7  search_memory query="bike"',
        "     ok  1 of 4 memories:",
        "         [m1] 2023-05-01 Ann: Ann has a red bike.",
    ]
    for words in (
        '  4  session 7  delete_memory memory_id="m9"\n'
        "     unknown_id  Error: memory_id: m9 is unknown.\n",
        '  7  session 7  delete_memory memory_id="m4"\n'
        "     reason: nobody asks\n     ok  Deleted m4.\n",
    ):
        assert words in text
    store = edited()
    states = [[e.line for e in store.at(op.n).entries] for op in store.journal]
    assert [line for line in lines if line.startswith("     stored: ")] == [
        f"     stored: {sum(map(len, each))} characters in entries: {len(each)}" for each in states
    ]


def test_long_arguments_are_cut_and_replies_are_not(tmp_path):
    store = Store()
    apply(store, "manage_memory", {"operation": "create", "content": "word " * 190}, SCOPE)
    apply(store, "search_memory", {"query": "word"}, SCOPE)
    store.to_jsonl(tmp_path / "s.jsonl")
    first, _, *rest = printed("log", tmp_path / "s.jsonl").splitlines()[1:]
    assert len(first) < 250 and "characters left out" in first
    assert rest[-2].strip() == f"[m1] {('word ' * 190).strip()}"


# ---------------------------------------------------------------- foreign text, a real trajectory


def test_foreign_text_steers_no_terminal(tmp_path):
    evil = "\x1b[31m\x07\u202eevil\x9b2J\x00\ud83d"
    store = Store([Entry("m1", "[bold]Grüße[/bold] \U0001f600", speaker="A[link]n")])
    store.record(evil, {evil: evil, "reason": evil}, evil, ok=False, code=evil)
    old = store.snapshot().get("m1")
    store.record("x", {}, evil, after=[Entry("m1", "bye", version=old.version + 1)])
    path = tmp_path / "s.jsonl"
    store.to_jsonl(path)
    for source in (path, write(tmp_path / "t.jsonl", [with_store(store, id=evil)])):
        for word in ("show", "log", "diff"):
            result = memory(word, source)
            assert result.exit_code == 0 and not CONTROL.search(result.output.replace("\n", ""))
    shown = printed("show", path, "--until", 0)
    assert "[m1] A[link]n: [bold]Grüße[/bold] \U0001f600" in shown


def test_the_trajectory_of_an_agent_is_a_source(tmp_path):
    texts = "Anna reached Oslo.", "Boris reached Lima."
    memories = tuple(
        Memory(text, None, f"2024-01-0{k}", k, (f"S{k}",)) for k, text in enumerate(texts, 1)
    )
    probe = Probe("p1", "Where is Anna?", ("Oslo",), 0)
    task = Episode("refined", "", (), text="-", memories=memories, probes=(probe,))
    agent = keeper.agent(
        mode="refine", budget="soft", budget_entries=0, call_tokens=200, max_turns=9, without=()
    )
    calls = iter([
        '<tool_call>{"name": "manage_memory", "arguments": {"operation": "update", "content": '
        '"Anna reached Rome.", "memory_id": "m1"}}</tool_call>',
        '<tool_call>{"name": "delete_memory", "arguments": {"memory_id": "m7"}}</tool_call>',
        '<tool_call>{"name": "delete_memory", "arguments": {"memory_id": "m2"}}</tool_call>',
    ])  # fmt: skip

    def answer(prompt):
        return "Oslo" if prompt.frozen else next(calls, "Done.")

    engine = ScriptedEngine(Codec(keeper.make_tokenizer()), answer)
    (trajectory,) = rollout(engine, agent, [(task, 0)])
    assert not trajectory.error
    run = tmp_path / "run"
    run.mkdir()
    made = json.loads(json.dumps(record_of(trajectory, agent, step=4)))
    write(run / "trajectories.jsonl.gz", [made])
    lines = printed("diff", run).splitlines()
    assert lines[0] == "added 0, removed 1, changed 1, merged 0, split 0"
    assert any("Anna reached [-Oslo.-] {+Rome.+}  version 1 -> 2" in line for line in lines)
    assert "unknown_id  Error: memory_id: m7 is unknown." in printed("log", run)


def test_the_commands_load_nothing_heavy_before_they_run():
    heavy = {"torch", "numpy", "transformers", "rich.console", "agents.tools"}
    code = f"import sys, commands.stores; print({heavy!r} & {{*sys.modules}})"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
