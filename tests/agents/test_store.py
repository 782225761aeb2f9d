"""The store: what is recorded is what happened, and nothing that is wrong is loaded."""

import copy
import json
import random
from dataclasses import replace

import pytest

from agents.store import FORMAT, VERSION, Entry, Store
from config.errors import UserError

FACTS = [
    Entry("m2", "Ida is in Lima.", speaker="Ida", date="2023-05-08", evidence=("D1:3",)),
    Entry("", "Otto has a dog."),
    Entry("m7", "Ann met Otto.", kind="episodic", session=2, origin="init"),
]


def update(store, entry_id, **fields):
    old = store.snapshot().get(entry_id)
    return store.record("x", {}, "x", after=[replace(old, version=old.version + 1, **fields)])


def test_ids_are_given_in_order_after_the_highest():
    snapshot = Store([*FACTS, Entry("", "Last.")]).snapshot()
    texts = [(entry.id, entry.text) for entry in snapshot.entries]
    assert texts == [
        ("m2", "Ida is in Lima."), ("m7", "Ann met Otto."), ("m8", "Otto has a dog."),
        ("m9", "Last."),
    ]  # fmt: skip
    order = [f"m{n}" for n in (1, 2, 9, 10, 11, 100)]
    mixed = Store([Entry(one, "x") for one in reversed(order)])
    assert [entry.id for entry in mixed.snapshot().entries] == order
    assert mixed.new_ids(2) == mixed.new_ids(2) == ["m101", "m102"] and Store().new_ids(1) == ["m1"]


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
    read = store.record("search_memory", {"query": "x"}, "No memory matches.", session=4)
    fails = store.record("delete_memory", {}, "Error: x", code="unknown_id")
    assert store.snapshot() is first and first.n == 0
    op = update(store, "m2", text="Ida is in Rome.")
    assert store.journal == [read, fails, op] and [o.n for o in store.journal] == [1, 2, 3]
    assert (read.ok, read.code, read.before, read.after, read.session) == (True, "", (), (), 4)
    assert not fails.ok and op.ok and op.before == (FACTS[0],)
    second = store.snapshot()
    assert second != first and second.n == 3 and second.get("m2").version == 2
    assert first.get("m2").text == "Ida is in Lima." and first.get("m7") is second.get("m7")
    gone = update(store, "m2", deleted=True).after[0]
    last = store.snapshot()
    assert len(last) == 2 and "m2" not in last and last.get("m2") == gone
    assert "m7" in last and "m99" not in last and last.get("m99") is None


class Model:
    """The store in the obvious way: the whole state is copied at every step."""

    def __init__(self, entries):
        self.states = [{entry.id: entry for entry in entries}]

    def write(self, after):
        self.states.append(copy.copy(self.states[-1]) | {entry.id: entry for entry in after})

    def live(self, n=-1):
        found = [entry for entry in self.states[n].values() if not entry.deleted]
        return tuple(sorted(found, key=lambda entry: int(entry.id[1:])))


def act(store, model, rng):
    """Do one operation of any kind, drawn at random, whose arguments may be any text."""
    live, word = [*model.live()], rng.choice(["Grüße, 世界 “x”", "fact"]) + str(rng.random())
    kind = rng.choice(["create", "update", "delete", "merge", "split", "read", "fail"])
    olds = rng.sample(live, min(len(live), 2 if kind == "merge" else 1))
    after = []
    if kind in ("delete", "merge", "split"):
        after = [replace(old, version=old.version + 1, deleted=True) for old in olds]
    if kind == "update":
        after = [replace(old, version=old.version + 1, text=word) for old in olds]
    new = {"create": 1, "merge": 1, "split": 2}.get(kind, 0) if olds or kind == "create" else 0
    parents = tuple(old.id for old in olds if kind != "create")
    after += [Entry(i, f"{word} {i}", "semantic", "Zoë", "2024-02-29", 0, ("D1:3", "S4"),
                    "init", parents=parents) for i in store.new_ids(new)]  # fmt: skip
    args = {"content": "a\ud83d\nb", "k": [1, 2.5, None, {"": True}]}
    code = "x" if kind == "fail" else ""
    op = store.record(kind, args, "\udfff", code=code, after=iter(after), session=3)
    model.write(after)
    assert op.before == tuple(model.states[-2][e.id] for e in after if e.id in model.states[-2])


def test_any_sequence_is_had_again_at_every_step_and_from_its_lines():
    for seed in range(300):
        rng = random.Random(seed)
        first = [Entry(f"m{k + 1}", f"fact {k}", origin="init") for k in range(rng.randrange(4))]
        store, model, taken = Store(first), Model(first), []
        for _ in range(rng.randrange(1, 9)):
            act(store, model, rng)
            taken.append((store.snapshot(), model.live()))
        assert all(snapshot.entries == live for snapshot, live in taken)  # none has changed
        lines = [*store.lines()]
        assert all(line.encode() and isinstance(json.loads(line), dict) for line in lines)
        again = Store.from_lines(lines, "a record")
        assert again.journal == store.journal and [*again.lines()] == lines
        assert again.new_ids(1) == store.new_ids(1)
        assert again.snapshot().n == store.snapshot().n == store.at(len(store.journal)).n
        for n in range(len(model.states)):
            assert again.at(n).entries == store.at(n).entries == model.live(n)


# ---------------------------------------------------------------- lines that are wrong


@pytest.fixture
def written():
    """Lines: two entries (2 and 3) and three operations (4 to 6)."""
    store = Store([Entry("m1", "a", origin="init"), Entry("m2", "b", date="2023-05-08")])
    update(store, "m1", text="c")
    store.record("x", {"text": "d"}, "x", after=[Entry("m3", "d")])
    update(store, "m2", deleted=True)
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
    (1, setting("operations", to=True), "not whole"),
    (2, setting("text", to=""), "'text'"),
    (3, setting("id", to="m1"), "'id'"),
    (3, setting("verison", to=1), "'verison'"),
    (4, setting("n", to=2), "'n'"),
    (4, setting("after", 0, "version", to=3), "v3"),
    (4, setting("before", 0, "text", to="z"), "'before'"),
    (4, setting("before", to=[]), "'before'"),
    (4, setting("after", 0, "text", to="z\u0007"), "'after.0.text'"),
    (4, setting("ok", to=False), "'ok'"),
    (4, setting("code", to="x"), "'ok'"),
    (4, setting("args", to=[]), "'args'"),
    (4, setting("session", to=-1), "'session'"),
    (4, setting("after", to=["m1"]), "'after.0'"),
    (4, lambda op: op.update(after=op["after"] * 2), "twice"),
    (5, setting("after", 0, "id", to="m4"), "m4"),
    (5, setting("after", 0, "id", to=""), " v1"),
    (5, setting("after", 0, "version", to=2), "m3 v2"),
    (5, setting("after", 0, "deleted", to=True), "m3 v1"),
    (5, lambda op: op.pop("code"), "'code'"),
    (6, setting("after", to=[]), "'before'"),
    (6, lambda op: op.update(after=[{"id": "m1", "text": "c", "version": 2}]), "m1 v2"),
])  # fmt: skip
def test_lines_that_contradict_each_other_are_refused(written, line, change, field):
    assert Store.from_lines(written, "a record").snapshot().n == 3
    value = json.loads(written[line - 1])
    change(value)
    written[line - 1] = json.dumps(value)
    place = f", line {line}: .*" if line > 1 else " is .*"
    with pytest.raises(UserError, match=f"a record{place}{field}"):
        Store.from_lines(written, "a record")


def test_what_is_deleted_stays_so(written):
    back = json.loads(written[5])
    back.update(n=4, before=back["after"], after=[{"id": "m2", "text": "b", "version": 3}])
    written[0] = written[0].replace('"operations": 3', '"operations": 4')
    with pytest.raises(UserError, match="m2 v3"):
        Store.from_lines([*written, json.dumps(back)], "a record")


def test_lines_that_are_cut_are_refused(written):
    for kept in (*(written[:n] for n in range(len(written))), [*written[:-1], written[-1][:-20]]):
        with pytest.raises(UserError, match=r"no store|not whole|is not JSON"):
            Store.from_lines(kept, "a record")


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
    ("", ({"date": "2023-05-08"}, ["Good."], '"Good."', '{"text": "a", }', '{"text": "a"', "Good.",
          "", '{"text": "a\x07b"}', "[" * 100_000, '{"session": ' + "9" * 5000 + "}")),
])  # fmt: skip
def test_an_entry_that_is_wrong_is_named_by_line_and_field(field, values):
    for value in values:
        line = {"text": "Good."} | {field: value} if field else value
        lines = [{"format": FORMAT, "version": VERSION, "entries": 3, "operations": 0}]
        lines += [{"text": "a", "id": "m4"}, line, {"text": "b"}]
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        with pytest.raises(UserError, match=f"a record, line 3: '?{field}") as error:
            Store.from_lines(texts, "a record")
        assert len(str(error.value)) < 500 and str(error.value).isprintable()
