"""The store: what is recorded is what happened, and lines that are wrong are refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.store import FORMAT, VERSION, Entry, Store
from config.errors import UserError

FACTS = [
    Entry("m2", "Ida is in Lima.", speaker="Ida", date="2023-05-08", evidence=("D1:3",)),
    Entry("", "Otto has a dog."),
    Entry("m17", "Ann met Otto.", kind="episodic", session=2, origin="init"),
]
TEXT = st.text(max_size=9)
READ = ("search_memory", {"query": "x", "k": [1, 2.5, None, {"": True}]}, "\udfff")


def change(store, entry_id, **fields):
    old = store.snapshot().get(entry_id)
    return store.record("x", {}, "x", after=[replace(old, version=old.version + 1, **fields)])


def test_ids_are_given_in_order_after_the_highest():
    store = Store([*FACTS, Entry("", "Last.")])
    assert [(entry.id, entry.text[:4]) for entry in store.snapshot().entries] == [
        ("m2", "Ida "), ("m17", "Ann "), ("m18", "Otto"), ("m19", "Last"),
    ]  # fmt: skip
    assert store.new_ids(2) == store.new_ids(2) == ["m20", "m21"] and Store().new_ids(1) == ["m1"]


@pytest.mark.parametrize(("fields", "shown"), [
    ({}, "2023-05-08 Ann: It rains."), ({"speaker": None}, "2023-05-08 It rains."),
    ({"date": None}, "Ann: It rains."),
])  # fmt: skip
def test_an_entry_is_shown_with_what_is_known_of_it(fields, shown):
    entry = replace(Entry("m12", "It rains.", speaker="Ann", date="2023-05-08"), **fields)
    assert (entry.shown, entry.line) == (shown, f"[m12] {shown}")


def test_a_snapshot_is_one_object_until_something_is_written():
    store = Store(FACTS)
    first = store.snapshot()
    read = store.record(*READ, session=4)
    fails = store.record("delete_memory", {}, "Error: x", code="unknown_id")
    assert store.snapshot() is first and first.n == 0
    op = change(store, "m2", text="Ida is in Rome.")
    assert store.journal == [read, fails, op] and [o.n for o in store.journal] == [1, 2, 3]
    assert (read.ok, read.code, read.before, read.after, read.session) == (True, "", (), (), 4)
    assert not fails.ok and op.ok and op.before == (FACTS[0],)
    assert store.snapshot().n == 3 and first.get("m2").text == "Ida is in Lima."
    (gone,) = change(store, "m2", deleted=True).after
    last = store.snapshot()
    assert len(last) == 2 and "m2" not in last and last.get("m2") == gone
    assert "m17" in last and "m99" not in last and last.get("m99") is None


@given(
    st.lists(st.tuples(st.sampled_from(["create", "update", "delete", "read"]), TEXT), max_size=8)
)
def test_any_sequence_is_had_again_at_every_step_and_from_its_lines(acts):
    """The oracle copies the whole state at every step."""
    store, states = Store(FACTS), []
    live = {entry.id: entry for entry in store.snapshot().entries}
    states.append(live)
    for act, word in acts:
        text, live = f"fact {len(states)}", dict(live)
        last = live[max(live)] if live else None
        if act == "read" or not (last or act == "create"):
            store.record("search_memory", {"query": word, "half": "a\ud83d\nb"}, word, session=0)
        elif act == "create":
            (id,) = store.new_ids(1)
            live[id] = Entry(id, text, "semantic", "Zoë", "2024-02-29", 0, ("S4",), parents=("m2",))
            store.record(act, {}, word, after=[live[id]])
        else:
            fields = {"text": text} if act == "update" else {"deleted": True}
            (live[last.id],) = change(store, last.id, **fields).after
            if act == "delete":
                del live[last.id]
        states.append(live)
    lines = [*store.lines()]
    again = Store.from_lines([line.encode().decode() for line in lines], "a record")
    assert again.journal == store.journal and [*again.lines()] == lines
    highest = max(int(id[1:]) for id in store.snapshot().latest)
    assert again.new_ids(1) == store.new_ids(1) == [f"m{highest + 1}"]
    assert again.snapshot().n == store.snapshot().n == store.at(len(store.journal)).n
    for n, live in enumerate(states):
        expected = sorted(live.values(), key=lambda entry: int(entry.id[1:]))
        assert [*again.at(n).entries] == [*store.at(n).entries] == expected


# ---------------------------------------------------------------- lines that are wrong


def written(*entries):
    """Lines: a header, two entries and three operations, or some entries as they are given."""
    if entries:
        header = {"format": FORMAT, "version": VERSION, "entries": len(entries), "operations": 0}
        return [json.dumps(header), *entries]
    store = Store([Entry("m1", "a", origin="init"), Entry("m2", "b", date="2023-05-08")])
    change(store, "m1", text="c")
    store.record("x", {"text": "d"}, "x", after=[Entry("m3", "d")])
    change(store, "m2", deleted=True)
    return [*store.lines()]


@pytest.mark.parametrize(("line", "changes"), [
    (1, {"version": 2}), (1, {"entries": 3}), (1, {"operations": True}), (2, {"text": ""}),
    (3, {"verison": 1}), (4, {"n": 2}), (4, {"before": []}), (4, {"ok": False}), (4, {"args": []}),
    (4, {"session": -1}), (4, {"after": ["m1"]}), (5, {"code": "x"}), (6, {"after": []}),
])  # fmt: skip
def test_lines_that_contradict_each_other_are_refused(line, changes):
    lines = written()
    assert Store.from_lines(lines, "a record").snapshot().n == 3
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | changes)
    with pytest.raises(UserError, match="a record"):
        Store.from_lines(lines, "a record")


def test_lines_that_are_cut_are_refused():
    lines = written()
    for kept in (*(lines[:n] for n in range(len(lines))), [*lines[:-1], lines[-1][:-20]]):
        with pytest.raises(UserError):
            Store.from_lines(kept, "a record")


@pytest.mark.parametrize(("field", "values"), [
    ("text", ("", " \u3000", 5, None, "a\nb", "a\u001b[2Jb", "a\u2028b", "a\ud83db")),
    ("speaker", ("A\u0007", "", ["Ann"])),
    ("date", ("2023-02-30", "2023-5-8", "2023-05-08T10:00", "２０２３-05-08", "", 20230508)),
    ("kind", ("fact", ["semantic"])), ("session", ("3", -1, True, 1.0)),
    ("evidence", ("D1:3", [1])), ("id", ("17", "m0", "m" + "9" * 5000, None)), ("txet", ("x",)),
])  # fmt: skip
def test_an_entry_that_is_wrong_is_named_by_line_and_field(field, values):
    good = {"id": "m1", "text": "Good."}
    for value in values:
        lines = written(json.dumps(good), json.dumps(good | {"id": "m2", field: value}))
        with pytest.raises(UserError, match=f"a record, line 3: {field}") as error:
            Store.from_lines(lines, "a record")
        assert len(str(error.value)) < 500 and str(error.value).isprintable()


@pytest.mark.parametrize("line", ['["Good."]', "Good.", "", "[" * 100_000, '{"n": ' + "9" * 5000])
def test_a_line_that_is_no_entry_is_named(line):
    with pytest.raises(UserError, match="a record, line 2: ") as error:
        Store.from_lines(written(line), "a record")
    assert len(str(error.value)) < 500
