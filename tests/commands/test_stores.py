"""The `memory` commands: what they print is what the store says, and no source is ever changed."""

import gzip
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from rich.console import Console
from test_page import record
from typer.testing import CliRunner

from agents.search import Search
from agents.store import Entry, Store, diff, read_entries
from agents.tools import Scope, apply
from commands.stores import memory_app
from config import terminal
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


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No colours, wherever the tests run."""
    monkeypatch.setattr(terminal, "console", Console(highlight=False, color_system=None))


def memory(*words):
    return CliRunner().invoke(app, ["memory", *map(str, words)])


def said(*words) -> str:
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


def values(store, n=None) -> list[dict]:
    """The live entries after the n-th operation, as JSON values."""
    entries = store.at(len(store.journal) if n is None else n).entries
    return json.loads(json.dumps([asdict(entry) for entry in entries]))


ENTRIES = (
    Entry("", "Ann has a red bike.", "episodic", "Ann", "2023-05-01", 1, ("D1:1", "D1:2"), "init"),
    Entry("", "Ben lives in Rome.", "semantic", origin="init"),
    Entry("", "It rained. Then Ben left.", date="2023-05-02", origin="init"),
    Entry("", "Carl met Dora.", origin="init"),
)
CALLS = (
    ("search_memory", {"query": "bike"}),
    ("manage_memory", {"operation": "create", "content": "Ben has a dog."}),
    (
        "manage_memory",
        {"operation": "update", "content": "Ann sold a red bike.", "memory_id": "m1"},
    ),
    ("delete_memory", {"memory_id": "m9"}),
    ("merge_memory", {"memory_ids": ["m2", "m5"], "strategy": "concatenate"}),
    ("split_memory", {"memory_id": "m3", "split_criteria": "temporal"}),
    ("delete_memory", {"memory_id": "m4", "reason": "nobody asks"}),
    ("manage_memory", {"operation": "create", "content": "Eve came."}),
    ("delete_memory", {"memory_id": "m9"}),
    ("nothing", {}),
)  # fmt: skip


def edited(session=7) -> Store:
    """Each tool that writes, two calls that fail, and a restore."""
    store = Store(ENTRIES)
    scope = Scope(Search(), len, session=session)
    for name, arguments in CALLS:
        apply(store, name, arguments, scope)
    store.restore(8)
    assert [op.n for op in store.journal if not op.ok] == [4, 10]
    return store


def with_store(store, **other) -> dict:
    """A trajectory whose second turn is its last edit."""
    made = record(**other)
    for turn in made["turns"]:
        turn["notes"] = {"phase": "edit", "store": []}
    made["turns"][1]["notes"]["store"] = [*store.lines()]
    return made


def write(path, records) -> Path:
    text = "".join(json.dumps(one) + "\n" for one in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def content(folder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    own = ({"text": e.text, "date": e.date, "speaker": e.speaker} for e in ENTRIES)
    write(folder / "own.jsonl", own)
    before = content(folder)
    yield folder
    assert content(folder) == before


SOURCES = ("store.jsonl", "store.jsonl.gz", "records.jsonl", "run")
every_source = pytest.mark.parametrize("name", SOURCES)

# ---------------------------------------------------------------- show


@every_source
def test_show_has_the_entries_after_each_operation(there, name):
    store = edited()
    for n in range(len(store.journal) + 1):
        shown = json.loads(said("show", there / name, "--until", n, "--format", "json"))
        assert shown["entries"] == values(store, n) and shown["until"] == n
    assert json.loads(said("show", there / name, "--format", "json"))["entries"] == values(store)
    assert len({str(values(store, n)) for n in range(12)}) == 7  # the states do differ


def test_show_prints_what_is_known_of_an_entry(there):
    lines = said("show", there / "store.jsonl", "--deleted").splitlines()
    assert lines == [
        "entries: 5; operations: 11 of 11 (search_memory 1, manage_memory 3, delete_memory 3, "
        "merge_memory 1, split_memory 1, call 1, restore 1); failed: 2 (unknown_id 1, "
        "unknown_tool 1)",
        "[m1] 2023-05-01 Ann: Ann sold a red bike.  v2, episodic, session 1, evidence D1:1, D1:2, "
        "S7",
        "[m6] Ben lives in Rome. Ben has a dog.  v1, from m2, m5, evidence S7",
        "[m7] 2023-05-02 It rained.  v1, from m3",
        "[m8] 2023-05-02 Then Ben left.  v1, from m3",
        "[m9] Eve came.  v1, session 7, evidence S7",
        "[m2] Ben lives in Rome.  v2, semantic, deleted",
        "[m3] 2023-05-02 It rained. Then Ben left.  v2, deleted",
        "[m4] Carl met Dora.  v2, deleted",
        "[m5] Ben has a dog.  v2, session 7, evidence S7, deleted",
    ]
    live = said("show", there / "store.jsonl").splitlines()
    assert live == lines[:6]
    early = said("show", there / "store.jsonl", "--until", 4, "--deleted").splitlines()
    assert early[0] == (
        "entries: 5; operations: 4 of 11 (search_memory 1, manage_memory 2, delete_memory 1); "
        "failed: 1 (unknown_id 1)"
    )
    assert len(early) == 6 and "deleted" not in "".join(early)


def test_show_counts_in_json_and_gives_the_deleted_when_asked(there):
    shown = json.loads(said("show", there / "run", "--format", "json", "--deleted"))
    assert shown["failed"] == {"unknown_id": 1, "unknown_tool": 1} and shown["operations"] == 11
    assert sum(shown["tools"].values()) == 11 and shown["tools"]["manage_memory"] == 3
    ids = [entry["id"] for entry in shown["entries"] if entry["deleted"]]
    assert ids == ["m2", "m3", "m4", "m5"] and shown["entries"][:5] == values(edited())


def test_own_data_is_a_store_without_operations(there):
    own = there / "own.jsonl"
    assert json.loads(said("show", own, "--format", "json"))["entries"] == values(
        Store(read_entries(own))
    )
    assert said("log", own) == "entries: 4; operations: 0 of 0; failed: 0\n"
    assert "added 0, removed 0, changed 0" in said("diff", own)
    assert "from 0 to 0" in refused("show", own, "--until", 1)


# ---------------------------------------------------------------- which store


def test_the_first_trajectory_of_the_last_step_with_a_store_is_taken(tmp_path):
    def one(text, **other):
        return with_store(Store([Entry("", text)]), **other)

    path = write(tmp_path / "t.jsonl", [
        one("a", id="x-1", step=0, sample=0),
        record(id="x-1", step=5, sample=0),
        one("b", id="x-2", step=5, sample=1),
        one("c", id="x-2", step=5, sample=2),
        one("d", id="y-2", step=0, sample=1),
        record(id="x-3", step=9, sample=0),
    ])  # fmt: skip

    def taken(*flags):
        result = memory("show", path, "--format", "json", *flags)
        ((entry),) = json.loads(result.stdout)["entries"]
        return entry["text"], result.stderr.removeprefix(f"{path}: ").strip()

    assert taken() == ("b", "task x-2, sample 1, training step 5")
    assert taken("--sample", 2) == ("c", "task x-2, sample 2, training step 5")
    assert taken("--step", 0) == ("a", "task x-1, sample 0, training step 0")
    assert taken("--task", "y") == ("d", "task y-2, sample 1, training step 0")
    assert taken("--task", "2", "--step", 0)[0] == "d" and taken("--task", "2")[0] == "b"
    for flags in (["--step", 9], ["--task", "z"], ["--sample", 7], ["--step", 5, "--task", "y"]):
        why = refused("show", path, *flags)
        assert "None of the 4 trajectories with a store" in why
        assert "the first one is of task x-1, sample 0, training step 0." in why


def test_the_last_edit_of_a_trajectory_counts(tmp_path):
    made = with_store(Store([Entry("", "late")]))
    made["turns"][0]["notes"]["store"] = [*Store([Entry("", "early")]).lines()]
    made["turns"][2]["notes"] = None  # the answer's
    assert "late" in said("show", write(tmp_path / "transcripts.jsonl", [made]))
    assert "late" in said("show", tmp_path)  # an evaluation's folder


def test_a_choice_is_refused_where_there_is_none(there):
    for flags in (["--task", "w"], ["--step", 0], ["--sample", 0]):
        for name in ("own.jsonl", "store.jsonl"):
            assert "no source holds trajectories" in refused("show", there / name, *flags)
        assert "no source holds trajectories" in refused(
            "diff", there / "own.jsonl", there / "store.jsonl", *flags
        )
    assert "changed 1" in said("diff", there / "own.jsonl", there / "run", "--task", "w")


@pytest.mark.parametrize("make, why", [
    (lambda path: None, "No file at"),
    (lambda path: path.write_text('{"text": 3}\n'), "line 1: 'text'"),
    (lambda path: path.write_text("nonsense\n"), "line 1: this is not JSON"),
    (lambda path: path.write_bytes(b'{"text": "\xff"}\n'), "line 1: this is not JSON"),
    (lambda path: path.write_text("[" * 99999), "line 1: this is not JSON"),
    (lambda path: path.write_text('{"format": "memory store"}\n'), "is no file of a store"),
    (lambda path: write(path, [record()]), "None of the 1 trajectories"),
    (lambda path: path.mkdir(), "neither trajectories.jsonl.gz nor transcripts.jsonl"),
    (lambda path: write(path, [with_store(edited()) | {"turns": [{"notes": 3}]}]), "line 1"),
    (lambda path: write(path, [with_store(edited()), {"id": 1}]), "line 2 is no trajectory"),
])  # fmt: skip
def test_a_source_that_cannot_be_read_is_one_sentence(tmp_path, make, why):
    path = tmp_path / "source.jsonl"
    make(path)
    for word in ("show", "log", "diff"):
        assert why in refused(word, path)


def test_damaged_notes_are_no_store_and_damaged_lines_are_named(tmp_path):
    damaged = [with_store(edited()) for _ in range(4)]
    for made, notes in zip(
        damaged, (3, {"store": "x"}, {"store": [1]}, {"store": {}}), strict=True
    ):
        made["turns"][1]["notes"] = notes
    path = write(tmp_path / "t.jsonl", damaged)
    assert "None of the 4 trajectories" in refused("show", path)
    cut = with_store(edited(), id="w")
    cut["turns"][1]["notes"]["store"][5] = "{}"
    why = refused("show", write(path, [cut]))
    assert f"{path}, task w, sample 0, line 6: 'n'" in why


# ---------------------------------------------------------------- diff


def test_a_diff_marks_the_words_that_differ(there):
    store = there / "store.jsonl"
    lines = said("diff", store, "--from", 2).splitlines()
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
    back = said("diff", store, "--from", 11, "--to", 0)
    assert "~ [m1] 2023-05-01 Ann: Ann [-sold-] {+has+} a red bike.  version 2 -> 1" in back
    merged = said("diff", store, "--from", 4, "--to", 5).splitlines()
    assert merged[:2] == ["added 0, removed 0, changed 0, merged 1, split 0", "merged"]
    # undone, a merge is a split
    assert "merged 0, split 1" in said("diff", store, "--from", 5, "--to", 4)
    # of one entry that was there and one that was not, it is none
    assert "added 2, removed 2, changed 1, merged 0, split 1" in said("diff", store)
    assert said("diff", store, "--from", 8) == "added 0, removed 0, changed 0, merged 0, split 0\n"


def test_what_else_differs_than_words_is_said(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"text": "It rains.", "session": 0, "kind": "semantic"}])
    b = write(tmp_path / "b.jsonl", [{"text": "It rains.", "date": "2024-01-02", "session": 1,
                                      "evidence": ["D1:1"]}])  # fmt: skip
    assert said("diff", a, b).splitlines()[-1] == (
        "~ [m1] {+2024-01-02+} It rains.  kind semantic -> none, session 0 -> 1, "
        "evidence none -> D1:1"
    )


@pytest.mark.parametrize("no_color, seen", [
    (False, "Ann \x1b[9;31mhas\x1b[0m \x1b[32msold\x1b[0m a red bike."),
    (True, "[-has-]"),
])  # fmt: skip
def test_removed_words_are_red_and_struck_and_inserted_ones_green(
    there, monkeypatch, no_color, seen
):
    colours = dict(force_terminal=True, color_system="standard", no_color=no_color)
    monkeypatch.setattr(terminal, "console", Console(highlight=False, **colours))
    text = said("diff", there / "store.jsonl")
    assert seen in text and ("[-" in text) == ("{+" in text) == no_color
    assert ("\x1b[32m" in text) == (not no_color)


def test_a_diff_of_two_sources_is_that_of_their_stores(there, tmp_path):
    early, store = tmp_path / "early.jsonl", edited()
    store.restore(2)
    store.to_jsonl(early)
    two = said("diff", early, there / "run", "--format", "json")
    assert two == said("diff", there / "store.jsonl", "--from", 2, "--format", "json")
    found, store = json.loads(two), edited()
    wanted = diff(store.at(2), store.snapshot())
    ids = {name: [entry["id"] for entry in found[name]] for name in ("added", "removed")}
    assert ids == {"added": ["m9"], "removed": ["m4"]}
    assert [(c["before"]["text"], c["after"]["text"]) for c in found["changed"]] == [
        (old.text, new.text) for old, new in wanted.changed
    ]
    assert found["changed"][0]["words"][1:3] == [["out", "has "], ["in", "sold "]]
    ((merged),), ((split),) = found["merged"], found["split"]
    assert [e["id"] for e in merged["before"]] == ["m2", "m5"] and merged["after"]["id"] == "m6"
    assert split["before"]["id"] == "m3" and [e["id"] for e in split["after"]] == ["m7", "m8"]
    # every entry that came or went stands somewhere, and once
    links = {"m2", "m5", "m6", "m3", "m7", "m8"}
    assert {e.id for e in (*wanted.added, *wanted.removed)} == links | {"m9", "m4"}


def test_diff_refuses_what_would_have_no_effect(there):
    store = there / "store.jsonl"
    for flags in (["--from", 0], ["--to", 3]):
        assert "no second source" in refused("diff", store, there / "own.jsonl", *flags)
    assert "from 0 to 11" in refused("diff", store, "--from", 12)
    assert "from 0 to 11" in refused("diff", store, "--to", -1)


@every_source
def test_the_log_has_each_operation_with_its_outcome(there, name):
    head, *lines = said("log", there / name).splitlines()
    assert "operations: 11 of 11" in head
    text = "\n".join(lines)
    at = [text.index(f"{n:>3}  session 7  {name}") for n, (name, _) in enumerate(CALLS[:9], 1)]
    assert at == sorted(at)
    assert lines[:3] == [
        '  1  session 7  search_memory query="bike"',
        "     ok  1 of 4 memories:",
        "         [m1] 2023-05-01 Ann: Ann has a red bike.",
    ]
    assert (
        '  4  session 7  delete_memory memory_id="m9"\n'
        "     unknown_id  Error: memory_id: m9 is unknown.\n"
    ) in text
    assert (
        '  7  session 7  delete_memory memory_id="m4"\n'
        "     reason: nobody asks\n     ok  Deleted m4.\n"
    ) in text
    assert text[: text.rindex("\n")].endswith(
        " 11  restore n=8\n     ok  Restored the entries as they were after operation 8."
    )
    store = edited()
    lines_of = [[e.line for e in store.at(op.n).entries] for op in store.journal]
    assert [line for line in lines if line.startswith("     stored: ")] == [
        f"     stored: {sum(map(len, each))} characters in entries: {len(each)}"
        for each in lines_of
    ]
    assert len({*map(len, lines_of)}) > 1 and lines[-1].startswith("     stored: ")


def test_long_arguments_are_cut_and_replies_are_not(tmp_path):
    store = Store()
    apply(store, "manage_memory", {"operation": "create", "content": "word " * 190}, SCOPE)
    apply(store, "search_memory", {"query": "word"}, SCOPE)
    store.to_jsonl(tmp_path / "s.jsonl")
    first, _, *rest = said("log", tmp_path / "s.jsonl").splitlines()[1:]
    assert len(first) < 250 and "characters left out" in first
    shown = f"[m1] {('word ' * 190).strip()}"
    assert rest[-2].strip() == shown
    assert rest[-1].strip() == f"stored: {len(shown)} characters in entries: 1"


SCOPE = Scope(Search(), len, reply_tokens=2000)


# ---------------------------------------------------------------- foreign text, a real trajectory


def test_foreign_text_steers_no_terminal_and_is_whole_in_json(tmp_path):
    evil = "\x1b[31m\x07\u202eevil\x9b2J\x00\ud83d"
    store = Store([Entry("m1", "[bold]Grüße[/bold] \U0001f600", speaker="A[link]n")])
    store.record(evil, {evil: evil, "reason": evil}, evil, ok=False, code=evil)
    old = store.snapshot().get("m1")
    store.record("x", {}, evil, after=[Entry("m1", "bye", version=old.version + 1)])
    path = tmp_path / "s.jsonl"
    store.to_jsonl(path)
    run = write(tmp_path / "t.jsonl", [with_store(store, id=evil)])
    for source in (path, run):
        for word in ("show", "log", "diff"):
            result = memory(word, source)
            assert result.exit_code == 0 and not CONTROL.search(result.output.replace("\n", ""))
    assert "[m1] A[link]n: [bold]Grüße[/bold] \U0001f600" in said("show", path, "--until", 0)
    shown = said("show", path, "--until", 1, "--format", "json")
    assert shown.isascii() and not CONTROL.search(shown)
    assert json.loads(shown)["failed"] == {evil: 1}
    assert json.loads(shown)["entries"] == json.loads(json.dumps(values(store, 1)))


def test_the_trajectory_of_an_agent_is_a_source(tmp_path):
    memories = tuple(
        Memory(text, None, f"2024-01-0{k}", k, (f"S{k}",))
        for k, text in enumerate(("Anna reached Oslo.", "Boris reached Lima."), 1)
    )
    probe = Probe("p1", "Where is Anna?", ("Oslo",), 0)
    task = Episode("refined", "", (), text="-", memories=memories, probes=(probe,))
    agent = keeper.agent(
        mode="refine", budget="soft", budget_entries=0, call_tokens=200, max_turns=9, without=()
    )
    said_by_policy = iter([
        '<tool_call>{"name": "manage_memory", "arguments": {"operation": "update", "content": '
        '"Anna reached Rome.", "memory_id": "m1"}}</tool_call>',
        '<tool_call>{"name": "delete_memory", "arguments": {"memory_id": "m7"}}</tool_call>',
        '<tool_call>{"name": "delete_memory", "arguments": {"memory_id": "m2"}}</tool_call>',
    ])  # fmt: skip

    def answer(prompt):
        return "Oslo" if prompt.frozen else next(said_by_policy, "Done.")

    engine = ScriptedEngine(Codec(keeper.make_tokenizer()), answer)
    (trajectory,) = rollout(engine, agent, [(task, 0)])
    assert not trajectory.error
    made = json.loads(json.dumps(record_of(trajectory, agent, step=4)))
    run = tmp_path / "run"
    run.mkdir()
    write(run / "trajectories.jsonl.gz", [made])
    lines = said("diff", run).splitlines()
    assert lines[0] == "added 0, removed 1, changed 1, merged 0, split 0"
    assert any("Anna reached [-Oslo.-] {+Rome.+}  version 1 -> 2" in line for line in lines)
    assert "unknown_id  Error: memory_id: m7 is unknown." in said("log", run)
    # in tokens of the run's model, as the agent has counted them
    (run / "config.yaml").write_text(json.dumps({"run": {"model": str(keeper.WEIGHTS)}}))
    edits = [turn.notes for turn in trajectory.turns if turn.notes and turn.notes.phase == "edit"]
    counted = [(n.tokens, n.entries) for n in edits if n.ops]
    stored = [line.strip() for line in said("log", run).splitlines() if " stored: " in line]
    assert stored == [f"stored: {n} tokens in entries: {entries}" for n, entries in counted]
    assert len({*stored}) == 2 and "tokens" in stored[0]
    for other in ({"eval": {"endpoint": ["http://h/v1"]}}, {"run": {"model": "/nowhere"}}, [5], {}):
        (run / "config.yaml").write_text(json.dumps(other))
        assert " characters in entries: 1" in said("log", run).splitlines()[-1]
    assert "[m2] 2024-01-02 Boris reached Lima." in said("show", run, "--until", 2)
    assert "Boris" not in said("show", run)


def test_the_commands_load_nothing_heavy_before_they_run():
    heavy = {"torch", "numpy", "pydantic", "transformers", "rich.console", "agents.tools"}
    code = f"import sys, commands.stores; print({heavy!r} & {{*sys.modules}})"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
