"""The store: what is recorded is what happened, at every step and in its lines."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agents.store import Entry, Op, Store

FACTS = [
    Entry("m2", "Ida is in Lima.", speaker="Ida", date="2023-05-08", evidence=("D1:3",)),
    Entry("", "Otto has a dog."),
    Entry("m17", "Ann met Otto.", kind="episodic", session=2, origin="init"),
]
ENTRIES, OPS = TypeAdapter(list[Entry]), TypeAdapter(list[Op])


def read_store(lines):
    """Do the operations of a store's lines again."""
    head, *rest = map(json.loads, lines)
    store = Store(ENTRIES.validate_python(rest[: head["entries"]]))
    ops = OPS.validate_python(rest[head["entries"] :])
    assert len(ops) == head["operations"]
    for op in ops:
        again = dict(code=op.code, after=op.after, session=op.session)
        assert store.record(op.tool, op.args, op.message, **again) == op
    return store


def change(store, entry_id, **fields):
    old = store.snapshot().get(entry_id)
    return store.record("x", {}, "x", after=[replace(old, version=old.version + 1, **fields)])


def test_ids_are_given_in_order_after_the_highest():
    store = Store([*FACTS, Entry("", "Last.")])
    shown = [(entry.id, entry.text[:4]) for entry in store.snapshot().entries]
    assert shown == [("m2", "Ida "), ("m17", "Ann "), ("m18", "Otto"), ("m19", "Last")]
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
    read = store.record("search_memory", {"query": "x"}, "\udfff", session=4)
    fails = store.record("delete_memory", {}, "Error: x", code="unknown_id")
    assert store.snapshot() is first
    op = change(store, "m2", text="Ida is in Rome.")
    assert store.journal == [read, fails, op] and [o.n for o in store.journal] == [1, 2, 3]
    assert (read.ok, read.code, read.before, read.after, read.session) == (True, "", (), (), 4)
    assert not fails.ok and op.ok and op.before == (FACTS[0],)
    assert first.get("m2").text == "Ida is in Lima."
    (gone,) = change(store, "m2", deleted=True).after
    last = store.snapshot()
    assert len(last) == 2 and "m2" not in last and last.get("m2") == gone
    assert "m17" in last and "m99" not in last and last.get("m99") is None


ACTS = st.tuples(st.sampled_from(["create", "update", "delete", "read"]), st.text(max_size=9))


@given(st.lists(ACTS, max_size=8))
def test_any_sequence_is_had_at_every_step_and_again_from_its_lines(acts):
    """The oracle copies the whole state at every step."""
    store = Store(FACTS)
    live = {entry.id: entry for entry in store.snapshot().entries}
    for n, (act, word) in enumerate(acts):
        last = live[max(live)] if live else None
        if act == "read" or not (last or act == "create"):
            store.record("search_memory", {"query": word, "half": "a\ud83d\nb"}, word, session=0)
        elif act == "create":
            (id,) = store.new_ids(1)
            text = f"fact {n}"
            live[id] = Entry(id, text, "semantic", "Zoë", "2024-02-29", 0, ("S4",), parents=("m2",))
            store.record(act, {}, word, after=[live[id]])
        else:
            fields = {"text": f"fact {n}"} if act == "update" else {"deleted": True}
            (live[last.id],) = change(store, last.id, **fields).after
            if act == "delete":
                del live[last.id]
        expected = sorted(live.values(), key=lambda entry: int(entry.id[1:]))
        assert [*store.snapshot().entries] == expected
    lines = [line.encode().decode() for line in store.lines()]
    again = read_store(lines)
    assert again.journal == store.journal and [*again.lines()] == lines
    highest = max(int(id[1:]) for id in store.snapshot().latest)
    assert again.new_ids(1) == store.new_ids(1) == [f"m{highest + 1}"]
    assert again.snapshot().entries == store.snapshot().entries
