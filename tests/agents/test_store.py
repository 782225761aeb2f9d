"""The store: what is recorded is what happened, and nothing that is wrong is loaded."""

import copy
import dataclasses
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agents.store import FORMAT, VERSION, Diff, Entry, Op, Store, diff
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
    """Do everything again, as reading a file does."""
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


def mirrored(d: Diff) -> Diff:
    changed = tuple((new, old) for old, new in d.changed)
    split = tuple((new, olds) for olds, new in d.merged)
    return Diff(d.removed, d.added, changed, tuple((n, o) for o, n in d.split), split)


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
    merges = 0
    for first, store, model, rng in sequences(500):
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
        a, b = (store.at(rng.randrange(len(model.states))) for _ in range(2))
        there, back = diff(a, b), diff(b, a)
        assert there == mirrored(back) and diff(a, a) == Diff((), (), (), (), ())
        kept = {e.id: e for e in a.entries if e.id in b}
        made = {e.id: e for e in there.added} | kept | {old.id: new for old, new in there.changed}
        assert made == {e.id: e for e in b.entries}  # a + diff = b
        merges += bool(there.merged)
    assert merges > 12


# ---------------------------------------------------------------- differences


def test_a_difference_names_what_was_merged_and_split():
    store = Store([Entry("", text) for text in "abcde"])
    start, at = store.snapshot(), store.snapshot().get
    merged = Entry("m6", "ab", parents=("m1", "m2"))
    store.record("merge_memory", {}, "x", after=[gone(at("m1")), gone(at("m2")), merged])
    parts = [Entry("m7", "c1", parents=("m3",)), Entry("m8", "c2", parents=("m3",))]
    store.record("split_memory", {}, "x", after=[gone(at("m3")), *parts])
    update(store, "m4", "D")
    store.record("delete_memory", {}, "x", after=[gone(at("m5"))])
    create(store, "new")
    found = diff(start, store.snapshot())
    assert [e.id for e in found.added] == ["m6", "m7", "m8", "m9"]
    assert [e.id for e in found.removed] == ["m1", "m2", "m3", "m5"]
    assert [(a.text, b.text) for a, b in found.changed] == [("d", "D")]
    assert found.merged == (((at("m1"), at("m2")), merged),)
    assert found.split == ((at("m3"), tuple(parts)),)
    # Merged once more: the parents of the parents
    six, seven = store.snapshot().get("m6"), store.snapshot().get("m7")
    last = Entry("m10", "abc1", parents=("m6", "m7"))
    store.record("merge_memory", {}, "x", after=[gone(six), gone(seven), last])
    found = diff(start, store.snapshot())
    assert [([o.id for o in olds], new.id) for olds, new in found.merged] == [
        (["m1", "m2", "m3"], "m10")
    ]
    assert [(old.id, [n.id for n in news]) for old, news in found.split] == [("m3", ["m8", "m10"])]


# ---------------------------------------------------------------- the store's file


@pytest.mark.parametrize("name", ["store.jsonl", "store.jsonl.gz"])
def test_a_store_is_read_as_it_was_written(tmp_path, name):
    path = tmp_path / name
    for _, store, _, _ in sequences(60):
        create(store, "Grüße, 世界 😀 “x”", speaker="Zoë", date="2024-02-29", session=0,
               kind="semantic", evidence=("D1:3", "S4"), origin="init")  # fmt: skip
        store.record("x\ud800y", {"content": "a\ud83d\nb", "k": [1, 2.5, None, {"": True}]},
                     "\udfff", ok=False, code="bad", session=3)  # fmt: skip
        store.to_jsonl(path)
        again = Store.from_jsonl(path)
        assert [*again.lines()] == [*store.lines()] and again.journal == store.journal
        assert again.snapshot().entries == store.snapshot().entries
        assert again.at(0).entries == store.at(0).entries
    assert [*tmp_path.iterdir()] == [path]
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
    assert "Grüße, 世界" in text and all(
        isinstance(json.loads(line), dict) for line in text.split("\n")[:-1]
    )


@pytest.fixture
def written(tmp_path):
    """A file with two entries (lines 2 and 3) and three operations (4 to 6)."""
    store = Store([Entry("m1", "a", origin="init"), Entry("m2", "b", date="2023-05-08")])
    update(store, "m1", "c")
    create(store, "d")
    store.record("delete_memory", {"id": "m2"}, "x", after=[gone(store.snapshot().get("m2"))])
    path = tmp_path / "store.jsonl"
    store.to_jsonl(path)
    return path


def put(path, line: int, change) -> None:
    lines = path.read_text().splitlines()
    value = json.loads(lines[line - 1])
    change(value)
    lines[line - 1] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def setting(*keys, to):
    def change(value):
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return change


@pytest.mark.parametrize("line, change, field", [
    (1, setting("version", to=2), "no file of a store"),
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
def test_a_file_that_contradicts_itself_is_refused(written, line, change, field):
    assert Store.from_jsonl(written).snapshot().n == 3
    put(written, line, change)
    place = f", line {line}: .*" if line > 1 else " is .*"
    with pytest.raises(UserError, match=f"store.jsonl{place}{field}"):
        Store.from_jsonl(written)
    with pytest.raises(UserError, match=f"a record{place}{field}"):
        Store.from_lines(written.read_text().splitlines(), "a record")


def test_a_file_that_is_cut_is_refused(written, tmp_path):
    whole = written.read_text()
    lines = whole.splitlines(keepends=True)
    for kept in ("", *("".join(lines[:n]) for n in range(1, len(lines))), whole[:-20]):
        written.write_text(kept)
        with pytest.raises(UserError, match=r"no file of a store|not whole|is not JSON"):
            Store.from_jsonl(written)
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(whole.encode())[:-12])
    for path in (packed, tmp_path / "none.jsonl"):
        with pytest.raises(UserError, match=r"cannot be read|No file at"):
            Store.from_jsonl(path)


def test_a_file_is_replaced_whole_or_not_at_all(written, monkeypatch):
    before = written.read_bytes()
    store = Store.from_jsonl(written)
    create(store, "e")
    monkeypatch.setattr(Store, "lines", lambda self: iter(["x", 1 / 0]))
    with pytest.raises(ZeroDivisionError):
        store.to_jsonl(written)
    monkeypatch.undo()
    assert written.read_bytes() == before
    with pytest.raises(UserError, match="there is no folder"):
        store.to_jsonl(written.parent / "none" / "x.jsonl")


# ---------------------------------------------------------------- its first entries


def first(tmp_path, *lines):
    """A file whose initial entries are these lines, the first of which is its second."""
    n = sum(line != b"" for line in lines)
    head = {"format": FORMAT, "version": VERSION, "entries": n, "operations": 0}
    path = tmp_path / "own.jsonl"
    path.write_bytes(b"\n".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in (head, *lines)
    ))  # fmt: skip
    return path


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
def test_an_entry_that_is_wrong_is_named_by_line_and_field(tmp_path, field, values):
    for value in values:
        line = {"text": "Good."} | {field: value}
        with pytest.raises(UserError, match=f"own.jsonl, line 4: '{field}") as error:
            Store.from_jsonl(first(tmp_path, {"text": "a", "id": "m4"}, b"", line, {"text": "b"}))
        assert len(str(error.value)) < 500 and str(error.value).isprintable()


@pytest.mark.parametrize("line", [
    {"date": "2023-05-08"}, ["Good."], "Good.", b'{"text": "a", }', b'{"text": "a"', b"Good.",
    b'{"text": "\xff"}', b'{"text": "a\x07b"}', b"[" * 100_000,
    b'{"session": ' + b"9" * 5000 + b"}",
])  # fmt: skip
def test_a_line_that_is_no_entry_is_named(tmp_path, line):
    with pytest.raises(UserError, match=r"own.jsonl, line 3: .*(text|object|not JSON)"):
        Store.from_jsonl(first(tmp_path, {"text": "a"}, line))
