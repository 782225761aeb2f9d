"""The store: what is recorded is what happened, and nothing that is wrong is loaded."""

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agents.store import FORMAT, VERSION, Entry, Op, Store
from config.errors import UserError

FACTS = [
    Entry("m2", "Ida is in Lima.", speaker="Ida", date="2023-05-08", evidence=("D1:3",)),
    Entry("", "Otto has a dog."),
    Entry("m7", "Ann met Otto.", kind="episodic", session=2, origin="init"),
]


def texts(snapshot) -> dict[str, str]:
    return {entry.id: entry.text for entry in snapshot.entries}


def update(store: Store, entry_id: str, text: str) -> Op:
    old = store.snapshot().get(entry_id)
    new = replace(old, text=text, version=old.version + 1)
    return store.record("manage_memory", {"id": entry_id}, "Updated.", after=[new])


def create(store: Store, text: str, **other) -> Op:
    entry = Entry(store.new_ids(1)[0], text, **other)
    return store.record("manage_memory", {"text": text}, "Created.", after=[entry])


def redone(store: Store) -> Store:
    """Do everything again, as reading its lines does."""
    return Store.from_lines([*store.lines()], "a record")


def gone(entry: Entry) -> Entry:
    return replace(entry, version=entry.version + 1, deleted=True)


# ---------------------------------------------------------------- entries and ids


def test_an_entry_is_shown_with_what_is_known_of_it():
    entry = Entry("m12", "It rains.", speaker="Ann", date="2023-05-08")
    assert entry.line == "[m12] 2023-05-08 Ann: It rains."
    assert replace(entry, speaker=None).shown == "2023-05-08 It rains."
    assert replace(entry, date=None).shown == "Ann: It rains."


def test_ids_are_given_in_order_after_the_highest():
    snapshot = Store([*FACTS, Entry("", "Last.")]).snapshot()
    assert [entry.id for entry in snapshot.entries] == ["m2", "m7", "m8", "m9"]
    assert snapshot.get("m8").text == "Otto has a dog." and snapshot.get("m9").text == "Last."
    order = [f"m{n}" for n in (1, 2, 9, 10, 11, 100)]
    mixed = Store([Entry(one, "x") for one in reversed(order)])
    assert [entry.id for entry in mixed.snapshot().entries] == order
    assert mixed.new_ids(2) == ["m101", "m102"] and Store().new_ids(1) == ["m1"]


@pytest.mark.parametrize("entries", [[Entry("m1", "a"), Entry("m1", "b")], [Entry("x1", "a")],
    [Entry("m01", "a")], [Entry("m1", "a\nb")], [Entry("m1", "a", date="1.5.2023")]])  # fmt: skip
def test_what_no_store_may_hold_is_refused(entries):
    with pytest.raises(ValueError):
        Store(entries)


# ---------------------------------------------------------------- operations


def test_every_operation_is_one_record():
    store = Store(FACTS)
    read = store.record("search_memory", {"query": "x"}, "No memory matches.", session=4)
    fails = store.record("delete_memory", {"id": "m99"}, "Error: x", ok=False, code="unknown_id")
    op = update(store, "m2", "Ida is in Rome.")
    assert store.journal == [read, fails, op] and [o.n for o in store.journal] == [1, 2, 3]
    assert (read.ok, read.code, read.before, read.after, read.session) == (True, "", (), (), 4)
    assert (fails.ok, fails.code) == (False, "unknown_id")
    assert op.before == (FACTS[0],) and op.after[0].version == 2
    assert op.after[0].evidence == ("D1:3",)
    again = replace(op.after[0], version=3)
    assert store.record("x", {}, "x", after=iter([again])).after == (again,)


def test_a_snapshot_is_one_object_until_something_is_written():
    store = Store(FACTS)
    first = store.snapshot()
    store.record("search_memory", {}, "x")
    store.record("manage_memory", {}, "Error: x", ok=False, code="x")
    assert store.new_ids(2) == store.new_ids(2) == ["m9", "m10"]  # used up by a record alone
    assert store.snapshot() is first and first.n == 0 and {first: 1}[store.snapshot()] == 1
    update(store, "m2", "Ida is in Rome.")
    second = store.snapshot()
    assert second is not first and second != first and second.n == 3
    assert first.get("m2").text == "Ida is in Lima." and second.get("m2").version == 2
    assert first.get("m7") is second.get("m7")  # shared
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.n = 5


def test_a_deleted_entry_leaves_a_tombstone():
    store = Store(FACTS)
    op = store.record("delete_memory", {}, "Deleted.", after=[gone(store.snapshot().get("m2"))])
    snapshot = store.snapshot()
    assert len(snapshot) == 2 and "m2" not in snapshot and snapshot.get("m2") == op.after[0]
    assert "m7" in snapshot and "m99" not in snapshot and snapshot.get("m99") is None
    with pytest.raises(ValueError, match="m2 is deleted"):
        update(store, "m2", "Back.")


@pytest.mark.parametrize("after", [
    [Entry("m10", "x")], [Entry("m3", "x")], [Entry("m9", "x"), Entry("m11", "y")],
    [Entry("m9", "x", version=2)], [Entry("m9", "x", deleted=True)],
    [Entry("m2", "x")], [Entry("m2", "x", version=3)],
    [Entry("m2", "x", version=2), Entry("m2", "y", version=2)], [Entry("m9", "x")] * 2,
    [Entry("m9", "a\tb")], [Entry("", "x")],
])  # fmt: skip
def test_a_wrong_record_changes_nothing(after):
    store = Store(FACTS)
    lines = [*store.lines()]
    with pytest.raises(ValueError):
        store.record("manage_memory", {}, "x", after=after)
    with pytest.raises(ValueError, match="failed"):
        store.record("manage_memory", {}, "x", ok=False, after=[Entry("m9", "x")])
    assert [*store.lines()] == lines and not store.journal and store.new_ids(1) == ["m9"]


# ---------------------------------------------------------------- random sequences


class Model:
    """The store in the obvious way: the whole state is copied at every step."""

    def __init__(self, entries):
        self.states = [{entry.id: entry for entry in entries}]

    def write(self, after=()):
        self.states.append(copy.copy(self.states[-1]) | {entry.id: entry for entry in after})

    def live(self, n=-1):
        found = [entry for entry in self.states[n].values() if not entry.deleted]
        return tuple(sorted(found, key=lambda entry: int(entry.id[1:])))


def act(store: Store, model: Model, rng: random.Random) -> None:
    """Do one operation of any kind, drawn at random."""
    live, word = list(model.live()), f"fact {rng.random()}"
    kind = rng.choice(["create", "update", "delete", "merge", "split", "read", "fail"])
    after = []
    if kind == "create":
        after = [Entry(store.new_ids(1)[0], word)]
    elif kind in ("update", "delete", "split") and live:
        old = rng.choice(live)
        new = replace(old, text=word, version=old.version + 1)
        after = [new] if kind == "update" else [gone(old)]
        if kind == "split":
            after += [Entry(i, f"{word} {i}", parents=(old.id,)) for i in store.new_ids(2)]
    elif kind == "merge" and len(live) > 1:
        olds = rng.sample(live, 2)
        parents = tuple(old.id for old in olds)
        after = [*map(gone, olds), Entry(store.new_ids(1)[0], word, parents=parents)]
    ok = kind != "fail"
    op = store.record(kind, {"word": word}, kind, ok=ok, code="" if ok else "x", after=after)
    model.write(after)
    assert op.before == tuple(model.states[-2][e.id] for e in after if e.id in model.states[-2])


def sequences(count: int) -> Iterator[tuple[list[Entry], Store, Model, random.Random]]:
    for seed in range(count):
        rng = random.Random(seed)
        first = [Entry(f"m{k + 1}", f"fact {k}", origin="init") for k in range(rng.randrange(4))]
        store, model, taken = Store(first), Model(first), []
        for _ in range(rng.randrange(1, 9)):
            act(store, model, rng)
            taken.append((store.snapshot(), model.live()))
        assert all(snapshot.entries == live for snapshot, live in taken)  # none has changed
        yield first, store, model, rng


def test_random_sequences():
    for first, store, model, _ in sequences(500):
        assert [store.at(n).entries for n in range(len(store.journal) + 1)] == [
            model.live(n) for n in range(len(model.states))
        ]
        again = redone(store)
        assert again.journal == store.journal and again.new_ids(1) == store.new_ids(1)
        assert again.snapshot().entries == store.snapshot().entries == model.live()
        assert again.snapshot().n == store.snapshot().n
        new = [e.id for op in store.journal for e in op.after[:]
               if e.id not in {old.id for old in op.before}]  # fmt: skip
        assert [*{e.id: 0 for e in first}, *new] == [f"m{k + 1}" for k in range(len(first + new))]


# ---------------------------------------------------------------- its lines


def test_a_store_is_read_as_it_was_written():
    for _, store, _, _ in sequences(60):
        create(store, "Grüße, 世界 😀 “x”", speaker="Zoë", date="2024-02-29", session=0,
               kind="semantic", evidence=("D1:3", "S4"), origin="init")  # fmt: skip
        store.record("x\ud800y", {"content": "a\ud83d\nb", "k": [1, 2.5, None, {"": True}]},
                     "\udfff", ok=False, code="bad", session=3)  # fmt: skip
        again = redone(store)
        assert [*again.lines()] == [*store.lines()] and again.journal == store.journal
        assert again.snapshot().entries == store.snapshot().entries
        assert again.at(0).entries == store.at(0).entries
    text = "\n".join(store.lines())
    assert "Grüße, 世界" in text and text.encode() and "\ud800" not in text
    assert all(isinstance(json.loads(line), dict) for line in text.split("\n"))


@pytest.fixture
def written():
    """Lines: two entries (2 and 3) and three operations (4 to 6)."""
    store = Store([Entry("m1", "a", origin="init"), Entry("m2", "b", date="2023-05-08")])
    update(store, "m1", "c")
    create(store, "d")
    store.record("delete_memory", {"id": "m2"}, "x", after=[gone(store.snapshot().get("m2"))])
    return [*store.lines()]


def setting(*keys, to):
    def change(value):
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return change


@pytest.mark.parametrize("line, change, field", [
    (1, setting("version", to=2), "no store"),
    (1, setting("entries", to=3), "not whole"),
    (1, setting("operations", to="x"), "not whole"),
    (2, setting("text", to=""), "'text'"),
    (3, setting("id", to="m1"), "'id'"),
    (3, setting("verison", to=1), "'verison'"),
    (4, setting("n", to=2), "'n'"),
    (4, setting("after", 0, "version", to=3), "v3"),
    (4, setting("before", 0, "text", to="z"), "'before'"),
    (4, setting("before", to=[]), "'before'"),
    (4, setting("after", 0, "text", to="z\u0007"), "'after.0.text'"),
    (4, setting("ok", to=False), "failed"),
    (4, setting("args", to=[]), "'args'"),
    (4, setting("session", to=-1), "'session'"),
    (4, setting("after", to=["m1"]), "'after.0'"),
    (5, setting("after", 0, "id", to="m4"), "m4"),
    (5, lambda op: op.pop("code"), "'code'"),
    (6, setting("after", to=[]), "'before'"),
])  # fmt: skip
def test_lines_that_contradict_each_other_are_refused(written, line, change, field):
    assert Store.from_lines(written, "a record").snapshot().n == 3
    value = json.loads(written[line - 1])
    change(value)
    written[line - 1] = json.dumps(value)
    place = f", line {line}: .*" if line > 1 else " is .*"
    with pytest.raises(UserError, match=f"a record{place}{field}"):
        Store.from_lines(written, "a record")


def test_lines_that_are_cut_are_refused(written):
    for kept in (*(written[:n] for n in range(len(written))), [*written[:-1], written[-1][:-20]]):
        with pytest.raises(UserError, match=r"no store|not whole|is not JSON"):
            Store.from_lines(kept, "a record")


# ---------------------------------------------------------------- its first entries


def first(*lines):
    """A store whose initial entries are these lines, the first of which is its second."""
    head = {"format": FORMAT, "version": VERSION, "entries": len(lines), "operations": 0}
    texts = (line if isinstance(line, str) else json.dumps(line) for line in (head, *lines))
    return Store.from_lines(texts, "a record")


@pytest.mark.parametrize("field, values", [
    ("text", ("", " \u3000", 5, None, "a\nb", "a\u0000b", "a\u001b[2Jb", "a\u2028b", "a\ud83db")),
    ("speaker", ("A\u0007", "", ["Ann"])),
    ("date", ("2023-02-30", "2023-5-8", "20230508", "2023-W19-1", "2023-05-08T10:00", "0000-01-01",
              "２０２３-05-08", "", 20230508)),
    ("kind", ("fact", ["semantic"])),
    ("session", ("3", -1, True, 1.0)),
    ("evidence", ("D1:3", [1], ["\ud800"])),
    ("id", ("17", "m0", "m" + "9" * 5000, None, "m4")),
    ("txet", ("x",)),
])  # fmt: skip
def test_an_entry_that_is_wrong_is_named_by_line_and_field(field, values):
    for value in values:
        line = {"text": "Good."} | {field: value}
        with pytest.raises(UserError, match=f"a record, line 3: '{field}") as error:
            first({"text": "a", "id": "m4"}, line, {"text": "b"})
        assert len(str(error.value)) < 500 and str(error.value).isprintable()


@pytest.mark.parametrize("line", [
    {"date": "2023-05-08"}, ["Good."], '"Good."', '{"text": "a", }', '{"text": "a"', "Good.", "",
    '{"text": "a\x07b"}', "[" * 100_000, '{"session": ' + "9" * 5000 + "}",
])  # fmt: skip
def test_a_line_that_is_no_entry_is_named(line):
    with pytest.raises(UserError, match=r"a record, line 3: .*(text|object|not JSON)"):
        first({"text": "a"}, line)
