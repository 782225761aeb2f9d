"""The store: what is recorded is what happened, and nothing that is wrong is loaded."""

import copy
import dataclasses
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agents.store import (
    Diff,
    Entry,
    Op,
    Store,
    diff,
    read_entries,
    replay,
    text_fault,
)
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


def gone(entry: Entry) -> Entry:
    return replace(entry, version=entry.version + 1, deleted=True)


# ---------------------------------------------------------------- entries and ids


def test_an_entry_is_shown_with_what_is_known_of_it():
    entry = Entry("m12", "It rains.", speaker="Ann", date="2023-05-08")
    assert entry.shown == "2023-05-08 Ann: It rains."
    assert entry.line == "[m12] 2023-05-08 Ann: It rains."
    assert replace(entry, speaker=None).shown == "2023-05-08 It rains."
    assert replace(entry, date=None).shown == "Ann: It rains."
    assert Entry("m1", "It rains.").shown == "It rains."


def test_ids_are_given_in_order_after_the_highest():
    snapshot = Store([*FACTS, Entry("", "Last.")]).snapshot()
    assert [entry.id for entry in snapshot.entries] == ["m2", "m7", "m8", "m9"]
    assert snapshot.get("m8").text == "Otto has a dog." and snapshot.get("m9").text == "Last."
    order = [f"m{n}" for n in (1, 2, 9, 10, 11, 100)]
    mixed = Store([Entry(one, "x") for one in reversed(order)])
    assert [entry.id for entry in mixed.snapshot().entries] == order
    assert mixed.new_ids(2) == ["m101", "m102"] and Store().new_ids(1) == ["m1"]


def test_new_ids_are_used_up_by_the_record_alone():
    store = Store(FACTS)
    assert store.new_ids(2) == store.new_ids(2) == ["m9", "m10"]
    store.record("search_memory", {}, "Nothing.")
    store.record("manage_memory", {}, "Error: no.", ok=False, code="bad")
    assert store.new_ids(1) == ["m9"]
    create(store, "x")
    assert store.new_ids(1) == ["m10"]


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
    assert snapshot.deleted == op.after and store.at(0).deleted == ()
    with pytest.raises(ValueError, match="m2 is deleted"):
        update(store, "m2", "Back.")


@pytest.mark.parametrize("after, ok, why", [
    ([Entry("m10", "x")], True, "must be m9 v1"),
    ([Entry("m9", "x"), Entry("m11", "y")], True, "must be m10 v1"),
    ([Entry("m3", "x")], True, "must be m9 v1"),
    ([Entry("m9", "x", version=2)], True, "must be m9 v1"),
    ([Entry("m9", "x", deleted=True)], True, "before it is there"),
    ([Entry("m2", "x")], True, "v1 does not follow v1"),
    ([Entry("m2", "x", version=3)], True, "v3 does not follow v1"),
    ([Entry("m2", "x", version=2), Entry("m2", "y", version=2)], True, "written twice"),
    ([Entry("m9", "x"), Entry("m9", "y")], True, "written twice"),
    ([Entry("m9", "a\tb")], True, "'text' holds the control character U\\+0009"),
    ([Entry("", "x")], True, "must be m9 v1"),
    ([Entry("m9", "x")], False, "failed writes nothing"),
])  # fmt: skip
def test_a_wrong_record_changes_nothing(after, ok, why):
    store = Store(FACTS)
    lines = [*store.lines()]
    with pytest.raises(ValueError, match=why):
        store.record("manage_memory", {}, "x", ok=ok, after=after)
    assert [*store.lines()] == lines and not store.journal and store.new_ids(1) == ["m9"]


def test_restoring_is_one_more_operation():
    store = Store(FACTS)
    update(store, "m2", "Ida is in Rome.")
    create(store, "New.")
    store.record("delete_memory", {}, "x", after=[gone(store.snapshot().get("m7"))])
    op = store.restore(1)
    assert store.snapshot().entries == store.at(1).entries and op.n == 4 and op.tool == "restore"
    assert store.snapshot().get("m2").version == 2 and store.snapshot().get("m9").deleted
    assert store.new_ids(1) == ["m10"]  # m9 is never used again
    store.restore(3)
    assert texts(store.snapshot()) == texts(store.at(3)) and "m9" in store.snapshot()
    update(store, "m9", "Newer.")
    for n in (-1, 7, "1", True):
        with pytest.raises(UserError, match="from 0 to 6"):
            store.restore(n)
    with pytest.raises(ValueError, match=r"Store\.restore"):
        store.record("restore", {"n": 0}, "x")
    # A policy may call anything
    store.record("restore", {"n": 0}, "Error: unknown tool", ok=False, code="unknown_tool")
    assert [*replay(FACTS, store.journal).lines()] == [*store.lines()]


def test_a_copy_goes_its_own_way():
    store = Store(FACTS)
    update(store, "m2", "Ida is in Rome.")
    twin, lines = store.copy(), [*store.lines()]
    assert twin.snapshot().get("m7") is store.snapshot().get("m7")
    update(twin, "m2", "Ida is in Oslo.")
    create(twin, "Only here.")
    assert [*store.lines()] == lines and store.snapshot().get("m2").text == "Ida is in Rome."
    assert len(store.journal) == 1 and len(twin.journal) == 3
    create(store, "Only there.")
    assert texts(twin.snapshot())["m9"] == "Only here."
    assert texts(store.snapshot())["m9"] == "Only there."


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
    kind = rng.choice(["create", "update", "delete", "merge", "split", "read", "fail", "restore"])
    if kind == "restore":
        n = rng.randrange(len(store.journal) + 1)
        model.write(store.restore(n).after)
        assert model.live() == model.live(n)
        return
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


def test_2000_random_sequences():
    merges = 0
    for first, store, model, rng in sequences(2000):
        assert [store.at(n).entries for n in range(len(store.journal) + 1)] == [
            model.live(n) for n in range(len(model.states))
        ]
        again = replay(first, store.journal)
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
    assert merges > 50


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
    store.restore(1)
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


@pytest.mark.parametrize("line, change, said", [
    (1, setting("version", to=2), "no file of a store"),
    (1, setting("entries", to=3), "not whole: 3 entries and 3 operations"),
    (1, setting("operations", to="x"), "not whole"),
    (2, setting("text", to=""), "line 2: 'text' is blank"),
    (3, setting("id", to="m1"), "line 3: 'id' is m1, as in line 2"),
    (3, setting("date", to="2023-02-30"), "line 3: 'date' must be a day"),
    (3, setting("verison", to=1), "line 3: 'verison' is no field"),
    (4, setting("n", to=2), "line 4: 'n' contradicts"),
    (4, setting("after", 0, "version", to=3), "line 4: m1 v3 does not follow v1"),
    (4, setting("before", 0, "text", to="z"), "line 4: 'before' contradicts"),
    (4, setting("before", to=[]), "line 4: 'before' contradicts"),
    (4, setting("after", 0, "text", to="z\u0007"), "line 4: 'text' holds the control character"),
    (4, setting("ok", to=False), "line 4: an operation that failed writes nothing"),
    (4, setting("args", to=[]), "line 4: 'args' must not be"),
    (4, setting("session", to=-1), "line 4: 'session' must be a whole number"),
    (4, setting("after", to=["m1"]), "line 4: an entry must be an object"),
    (5, setting("after", 0, "id", to="m4"), "line 5: m4 v1 is new and must be m3 v1"),
    (5, lambda op: op.pop("code"), "line 5: an operation has the fields n, tool"),
    (6, setting("args", "n", to=0), "line 6: 'message' contradicts|'after' contradicts"),
    (6, setting("args", "n", to=9), "line 6: There is no operation 9"),
    (6, setting("after", to=[]), "line 6: 'after' contradicts"),
])  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(written, line, change, said):
    assert Store.from_jsonl(written).snapshot().n == 3
    put(written, line, change)
    with pytest.raises(UserError, match=said) as error:
        Store.from_jsonl(written)
    assert str(written) in str(error.value)


def test_a_store_is_read_from_its_lines(written):
    store = Store.from_jsonl(written)
    create(store, "Grüße", speaker="Zoë")
    store.record("x\ud800y", {"content": "\ud83d"}, "\udfff", ok=False, code="bad")
    lines = [*store.lines()]
    again = Store.from_lines(lines, "a record")
    assert [*again.lines()] == lines and again.journal == store.journal
    assert again.snapshot().entries == store.snapshot().entries
    for changed, said in [
        ([], "a record is no file of a store"),
        (lines[:-1], "a record is not whole"),
        ([*lines[:-1], "\ud800"], "a record, line 8: this is not JSON"),
        ([*lines[:2], lines[1], *lines[3:]], "a record, line 3: 'id' is m1, as in line 2"),
    ]:
        with pytest.raises(UserError, match=said):
            Store.from_lines(changed, "a record")


def test_a_file_that_is_cut_is_refused(written, tmp_path):
    whole = written.read_text()
    lines = whole.splitlines(keepends=True)
    for kept in ("", *("".join(lines[:n]) for n in range(1, len(lines))), whole[:-20]):
        written.write_text(kept)
        with pytest.raises(UserError, match=r"no file of a store|not whole|is not JSON"):
            Store.from_jsonl(written)
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(whole.encode())[:-12])
    with pytest.raises(UserError, match="cannot be read"):
        Store.from_jsonl(packed)
    with pytest.raises(UserError, match="No file at"):
        Store.from_jsonl(tmp_path / "none.jsonl")


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


def test_replay_refuses_operations_of_another_store():
    store = Store(FACTS)
    update(store, "m2", "x")
    create(store, "y")
    with pytest.raises(ValueError, match="v2 does not follow v2"):
        replay(FACTS, store.journal[:1] * 2)
    with pytest.raises(ValueError, match="'n' contradicts"):
        replay(FACTS, store.journal[1:])
    with pytest.raises(ValueError, match="m2 v2 is new"):
        replay([], store.journal)
    with pytest.raises(ValueError, match="'before' contradicts"):
        replay([replace(FACTS[0], text="z"), *FACTS[1:]], store.journal)


# ---------------------------------------------------------------- own data


def own(tmp_path, *lines, name="own.jsonl"):
    path = tmp_path / name
    raw = b"\n".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    )
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz"])
def test_own_data_become_entries(tmp_path, name):
    path = own(
        tmp_path,
        b"\xef\xbb\xbf" + b'{"text": "Ida is in Lima."}\r',
        b"",
        {"text": "Grüße 😀", "date": "2024-02-29", "speaker": "Zoë", "kind": "semantic",
         "session": 3, "evidence": ["D1:3"], "id": "m5"},
        {"text": "No more.", "date": None, "speaker": None},
        name=name,
    )  # fmt: skip
    assert read_entries(path) == [
        Entry("m6", "Ida is in Lima.", origin="init"),
        Entry("m5", "Grüße 😀", "semantic", "Zoë", "2024-02-29", 3, ("D1:3",), "init"),
        Entry("m7", "No more.", origin="init"),
    ]
    assert len(Store(read_entries(path)).snapshot()) == 3
    assert read_entries(own(tmp_path, b"")) == []


GOOD = {"text": "Good."}


@pytest.mark.parametrize("line, said", [
    ({"date": "2023-05-08"}, "'text' is missing"),
    ({"text": ""}, "'text' is blank"),
    ({"text": " \u3000"}, "'text' is blank"),
    ({"text": 5}, "'text' must be a text, not 5"),
    ({"text": None}, "'text' must be a text, not None"),
    ({"text": "a\nb"}, r"'text' holds the control character U\+000A"),
    ({"text": "a\u0000b"}, r"'text' holds the control character U\+0000"),
    ({"text": "a\u001b[2Jb"}, r"'text' holds the control character U\+001B"),
    ({"text": "a\u0085b"}, r"'text' holds the control character U\+0085"),
    ({"text": "a\u2028b"}, r"'text' holds the control character U\+2028"),
    ({"text": "a\ud83db"}, r"'text' holds U\+D83D, half of a surrogate pair"),
    (GOOD | {"speaker": "A\u0007"}, r"'speaker' holds the control character U\+0007"),
    (GOOD | {"speaker": ""}, "'speaker' is blank"),
    (GOOD | {"speaker": ["Ann"]}, "'speaker' must be a text"),
    (GOOD | {"date": "2023-02-30"}, "'date' must be a day such as 2023-05-08, not '2023-02-30'"),
    (GOOD | {"date": "2023-5-8"}, "'date' must be a day"),
    (GOOD | {"date": "20230508"}, "'date' must be a day"),
    (GOOD | {"date": "2023-W19-1"}, "'date' must be a day"),
    (GOOD | {"date": "2023-05-08T10:00"}, "'date' must be a day"),
    (GOOD | {"date": "0000-01-01"}, "'date' must be a day"),
    (GOOD | {"date": "２０２３-05-08"}, "'date' must be a day"),
    (GOOD | {"date": "day 3"}, "'date' must be a day"),
    (GOOD | {"date": ""}, "'date' must be a day"),
    (GOOD | {"date": 20230508}, "'date' must be a day"),
    (GOOD | {"kind": "fact"}, "'kind' must be one of episodic, semantic, procedural"),
    (GOOD | {"kind": ["semantic"]}, "'kind' must be one of"),
    (GOOD | {"session": "3"}, "'session' must be a whole number from 0, not '3'"),
    (GOOD | {"session": -1}, "'session' must be"),
    (GOOD | {"session": True}, "'session' must be"),
    (GOOD | {"session": 1.0}, "'session' must be"),
    (GOOD | {"evidence": "D1:3"}, "'evidence' must be a list of texts"),
    (GOOD | {"evidence": [1]}, "'evidence' must be a list of texts"),
    (GOOD | {"evidence": ["\ud800"]}, "'evidence' must be a list of texts"),
    (GOOD | {"id": "17"}, "'id' must be an id such as \"m17\""),
    (GOOD | {"id": "m0"}, "'id' must be"),
    (GOOD | {"id": "m" + "9" * 5000}, "'id' must be"),
    (GOOD | {"id": None}, "'id' must be"),
    (GOOD | {"id": "m4"}, "'id' is m4, as in line 1"),
    (GOOD | {"version": 2}, "'version' is no field"),
    (GOOD | {"txet": "x"}, "'txet' is no field; there are text, date, speaker"),
    (["Good."], "a line must be an object"),
    ("Good.", "a line must be an object"),
    (b'{"text": "a", }', "this is not JSON"),
    (b'{"text": "a"', "this is not JSON"),
    (b"Good.", "this is not JSON"),
    (b'{"text": "\xff"}', "this is not JSON"),
    (b'{"text": "a\x07b"}', "this is not JSON"),
    (b"[" * 100_000, "this is not JSON"),
    (b'{"session": ' + b"9" * 5000 + b"}", "this is not JSON"),
])  # fmt: skip
def test_own_data_that_are_wrong_name_line_and_field(tmp_path, line, said):
    path = own(tmp_path, GOOD | {"id": "m4"}, GOOD, b"", line, GOOD)
    with pytest.raises(UserError, match=f"own.jsonl, line 4: {said}") as error:
        read_entries(path)
    assert len(str(error.value)) < 500 and str(error.value).isprintable()


def test_a_file_of_a_store_is_no_own_data(written):
    with pytest.raises(UserError, match="line 1: 'format' is no field"):
        read_entries(written)


def test_a_fault_of_a_text_can_be_asked_for():
    assert text_fault("Fine – 世界 😀") == ""
    assert "one paragraph" in text_fault("a\nb") and "surrogate" in text_fault("\udc00")
