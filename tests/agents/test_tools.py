"""The six tools: what each call writes and replies, and that a fault writes nothing."""

import json
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import read_store

from agents.search import Search
from agents.store import Entry, Store
from agents.tools import CODES, MALFORMED, MOST, TOOLS, Scope, apply, is_text, refuse, schemas


def words(text):
    return len(text.split())


SCOPE = Scope(Search(), words, seed=("world", 7))
ENTRIES = (
    Entry("m1", "Ann has a red bike.", "episodic", "Ann", "2023-05-01", 1, ("D1:1",), "init"),
    Entry("m2", "Ben lives in Rome.", "semantic", "Ben", "2023-05-02", 1, ("S3",), "init", 2),
    Entry("m3", "Ann sold the bike.", "episodic", "Ann", "2023-06-01", 2, ("D2:1", "D1:1"), "init"),
    Entry("m4", "It rained.", origin="init", version=3),
    Entry("m5", "Ann is in Oslo. On Monday Ben came. They may swim. Later Ben left. He rests."),
    Entry(
        "m6", "Ann: I like tea. It is hot. Ben: I like milk. Ann: Good. Ben: Yes.", speaker="Ben"
    ),
    Entry("m7", "Ann has a bell.", "episodic", "Ann", "2023-07-01"),
)


def filled():
    """Six entries, and a seventh that was deleted."""
    store = Store(ENTRIES)
    assert apply(store, "delete_memory", {"memory_id": "m7"}, SCOPE).message == "Deleted m7."
    return store


def calls_of(tool, *names):
    """Return what makes a call of a tool, of which these arguments may be given by position."""
    return lambda *values, **rest: (tool, dict(zip(names, values, strict=False)) | rest)


manage, sample = calls_of("manage_memory", "operation"), calls_of("sample_memory")
search, delete = calls_of("search_memory", "query"), calls_of("delete_memory", "memory_id")
split = calls_of("split_memory", "memory_id", "split_criteria")


def merge(*ids, strategy="summarize", **rest):
    return "merge_memory", {"memory_ids": [*ids], "strategy": strategy, **rest}


M1 = "[m1] 2023-05-01 Ann: Ann has a red bike."
M2 = "[m2] 2023-05-02 Ben: Ben lives in Rome."
M3 = "[m3] 2023-06-01 Ann: Ann sold the bike."
M4 = "[m4] It rained."


ONE = "1 of 6 memories:\n"
DONE = [
    (search("Rome"), ONE + M2),
    (search("sold bike", top_k=2), f"2 of 6 memories:\n{M3}\n{M1}"),  # the best first
    (search("Ann Ben Rome", kind="semantic"), ONE + M2),
    (search("Rome bike", speaker=" BEN "), ONE + M2),
    (search("Ann rained", since="2023-05-02"), ONE + M3),
    (search("Ann rained", until="2023-05-02"), ONE + M1),
    (search("Rome bike", since="2023-05-02", until="2023-05-02"), ONE + M2),
    (search("kiwi"), "No memory matches. 6 stored."),
    (search("Rome", kind=None, since=None), ONE + M2),  # nulls count as not given
    (manage("create", content="Ida sings."), "Created m8."),
    (manage("update", content="It rained twice.", memory_id="m4"), "Updated m4 (v4)."),
    (manage("update", content="It rained.", memory_id="m4", date="2023-01-01"), "Updated m4 (v4)."),
    (manage("update", content="IT rained.", memory_id="m4"), "Updated m4 (v4)."),  # the case alone
    (manage("noop"), "No change."),
    (delete("m2", reason="old news"), "Deleted m2."),
    (sample(k=10, kind="semantic"), M2),
    (sample(k=3, strategy="diverse"), f"{M1}\n{M3}\n[m5] {ENTRIES[4].text}"),
    (sample(k=3, strategy="recent"), f"{M4}\n{M2}\n{ENTRIES[5].line}"),
    (merge("m3", "m1", content="Ann sold her bike."), "Merged m3, m1 into m8."),
    (merge("m3", "m1", strategy="extract_common", content="A bike."), "Merged m3, m1 into m8."),
    (merge("m4", "m1", strategy="concatenate"), "Merged m4, m1 into m8."),
    (merge("m4", "m1", content="It rained."), "Merged m4, m1 into m8."),  # the text of one of them
    (split("m4", "thematic", parts=["It", "rained"]), "Split m4 into m8, m9."),
    (split("m5", "temporal"), "Split m5 into m8, m9, m10."),
    (split("m6", "speaker"), "Split m6 into m8, m9, m10, m11."),
    (split("m6", "speaker", max_parts=2), "Split m6 into m8, m9."),
]


@pytest.mark.parametrize(("call", "reply"), DONE)
def test_a_call_does_what_its_reply_says(call, reply):
    store = filled()
    before, n = store.snapshot().entries, len(store.journal)
    op = apply(store, *call, SCOPE)
    assert (op.message, op.ok, op.code) == (reply, True, "")
    assert store.journal[n:] == [op] and op.tool == call[0]
    wrote = reply.split()[0] in ("Created", "Updated", "Deleted", "Merged", "Split")
    assert (store.snapshot().entries != before) == bool(op.after) == wrote


FAULTS = [  # others, of single arguments, are below: see `examples`
    (("drop_memory", {}), "unknown_tool", "name"),
    (("search_memory", '{"query": "Rome"}'), "bad_arguments", "arguments"),
    (("search_memory", None), "bad_arguments", "arguments"),
    (search(" \n"), "empty", "query"),
    (search("a", threshold=0.3), "bad_arguments", "threshold"),
    (search("a", since="2023-02-30"), "bad_arguments", "since"),
    (search("a", since="2023-02-02", until="2023-02-01"), "bad_arguments", "since"),
    (manage("create"), "missing", "content"),
    (manage("update", content="x"), "missing", "memory_id"),
    (manage("create", content=" \t "), "empty", "content"),
    (manage("create", content="a\x07b"), "bad_arguments", "content"),
    (manage("create", content="a\ud800"), "bad_arguments", "content"),
    (manage("create", content="it  RAINED."), "duplicate", "duplicate of m4"),
    (manage("create", content="x", memory_id="m1"), "bad_arguments", "memory_id"),
    (manage("noop", content="x"), "bad_arguments", "content"),
    (manage("noop", date="2023-01-01"), "bad_arguments", "date"),
    (manage("update", content="x", memory_id="m99"), "unknown_id", "memory_id"),
    (manage("update", content="x", memory_id="m7"), "deleted_id", "memory_id"),
    (manage("update", content="It rained.", memory_id="m1"), "duplicate", "duplicate of m4"),
    (manage("update", content=" It rained. ", memory_id="m4"), "duplicate", "duplicate of m4"),
    (delete("m8"), "unknown_id", "memory_id"),
    (sample(kind="procedural"), "refused", "there"),
    (merge("m1", "m1", content="x"), "bad_arguments", "memory_ids"),
    (merge("m1", "m9", content="x"), "unknown_id", "memory_ids"),
    (merge("m1", "x", content="x"), "bad_arguments", r"memory_ids\[1\]"),
    (merge("m1", "m2"), "missing", "content"),
    (merge("m1", "m2", strategy="concatenate", content="x"), "bad_arguments", "content"),
    (merge("m1", "m2", content="It rained."), "duplicate", "duplicate of m4"),
    (split("m9", "temporal"), "unknown_id", "memory_id"),
    (split("m4", "temporal"), "one_part", "split_criteria"),
    (split("m5", "thematic"), "missing", "parts"),
    (split("m5", "thematic", parts=["x", "X "]), "duplicate", "two parts"),
    (split("m5", "thematic", parts=["x", "y", "z"], max_parts=2), "bad_arguments", "parts"),
    (split("m5", "thematic", parts=["x", "It rained."]), "duplicate", "duplicate of m4"),
]


@pytest.mark.parametrize(("call", "code", "field"), FAULTS)
def test_a_fault_names_the_field_and_leaves_the_state_alone(call, code, field):
    store = filled()
    snapshot, n = store.snapshot(), len(store.journal)
    op = apply(store, *call, replace(SCOPE, session=3))
    assert (op.ok, op.code, op.after, op.before, op.session) == (False, code, (), (), 3)
    assert re.match(rf"Error: {field}\b", op.message.replace("]:", "]: ")) or "[" in field
    assert store.snapshot() is snapshot and store.journal[n:] == [op]
    empty = apply(Store(), *call, SCOPE)  # a call's form depends on nothing that is stored
    assert (code in MALFORMED) == (empty.code in MALFORMED)


def gone(k):
    return replace(ENTRIES[k], version=ENTRIES[k].version + 1, deleted=True)


def updated(k, text, **fields):
    return replace(ENTRIES[k], text=text, version=ENTRIES[k].version + 1, **fields)


def part(text, entry_id):
    return replace(ENTRIES[2], id=entry_id, text=text, origin="agent", parents=("m3",))


READING = dict(session=3, date="2023-05-08")
BIKE = "Ann sold her bike."
WRITTEN = [  # what a call depends on, the call, the versions that it writes
    # a new entry belongs to the session that is read
    (READING, manage("create", content=" Ann\n\tmoved. ", kind="episodic"),
     [Entry("m8", "Ann moved.", "episodic", None, "2023-05-08", 3, ("S3",))]),
    (READING, manage("create", content="x", date="2022-01-01"),
     [Entry("m8", "x", None, None, "2022-01-01", 3, ("S3",))]),
    ({}, manage("create", content="y"), [Entry("m8", "y")]),
    # an update keeps what it does not name, and adds what was read when it was written
    ({}, manage("update", content="Ann cycles.", memory_id="m1"), [updated(0, "Ann cycles.")]),
    (READING, manage("update", content="New.", memory_id="m1", kind="semantic", date="2024-01-01"),
     [updated(0, "New.", kind="semantic", date="2024-01-01", evidence=("D1:1", "S3"))]),
    (READING, manage("update", content="Ben moved.", memory_id="m2"), [updated(1, "Ben moved.")]),
    ({}, delete("m2"), [gone(1)]),
    # a merge knows where it came from, and keeps what all have; of the days the last
    (READING, merge("m3", "m1", content=BIKE),
     [Entry("m8", BIKE, "episodic", "Ann", "2023-06-01", None, ("D2:1", "D1:1"),
            parents=("m3", "m1")), gone(2), gone(0)]),
    ({}, merge("m4", "m3", strategy="concatenate"),
     [Entry("m8", "It rained. Ann sold the bike.", None, None, "2023-06-01", None,
            ("D2:1", "D1:1"), parents=("m4", "m3")), gone(3), gone(2)]),
    ({}, merge("m1", "m2", content="x"),
     [Entry("m8", "x", None, None, "2023-05-02", 1, ("D1:1", "S3"), parents=("m1", "m2")),
      gone(0), gone(1)]),
    # parts inherit
    (READING, split("m3", "thematic", parts=["Ann sold it.", "It was red."]),
     [part("Ann sold it.", "m8"), part("It was red.", "m9"), gone(2)]),
]  # fmt: skip


@pytest.mark.parametrize(("scope", "call", "after"), WRITTEN)
def test_what_a_call_writes(scope, call, after):
    store, ids = filled(), [entry.id for entry in after]
    op = apply(store, *call, replace(SCOPE, **scope))
    assert op.after == (*after,) and op.session == scope.get("session")
    assert {*op.before} == {entry for entry in ENTRIES if entry.id in ids}
    assert [store.snapshot().get(entry_id) for entry_id in ids] == after


def test_a_merge_is_no_longer_than_a_text_may_be():
    store = Store([Entry("", letter * 500) for letter in "ab"] + [Entry("", "c" * 499)])
    assert apply(store, *merge("m1", "m2", strategy="concatenate"), SCOPE).code == "refused"
    op = apply(store, *merge("m1", "m3", strategy="concatenate"), SCOPE)
    assert op.ok and len(op.after[0].text) == MOST


def texts(op):
    return [entry.text for entry in op.after if not entry.deleted]


@pytest.mark.parametrize(("call", "parts"), [
    (split("m5", "temporal"), [
        "Ann is in Oslo.", "On Monday Ben came. They may swim.",  # the verb, not the month
        "Later Ben left. He rests."]),
    (split("m6", "speaker"), [
        "Ann: I like tea. It is hot.", "Ben: I like milk.", "Ann: Good.", "Ben: Yes."]),
    (split("m5", "speaker"), [
        "Ann is in Oslo.", "On Monday Ben came. They may swim. Later Ben left. He rests."]),
    (split("m6", "speaker", max_parts=2), [
        "Ann: I like tea. It is hot.", "Ben: I like milk. Ann: Good. Ben: Yes."]),
])  # fmt: skip
def test_a_split_cuts_where_its_criterion_says(call, parts):
    op = apply(filled(), *call, SCOPE)
    assert texts(op) == parts
    if call[1]["split_criteria"] == "speaker":  # the parts say whose they are
        assert not any(entry.speaker for entry in op.after if not entry.deleted)


def test_dates_and_times_begin_a_part():
    days = ("In 2021 he left", "He left in May", "On Sunday he left", "YESTERDAY he left")
    times = ("He left at 9:05", "It was 10:30pm", "It was 5 PM", "Two years passed")
    for told in days + times:
        op = apply(Store([Entry("", f"He came. {told}.")]), *split("m1", "temporal"), SCOPE)
        assert op.ok and texts(op) == ["He came.", f"{told}."], told
    for told in ("He may leave", "They march on", "It has 12 parts", "A dayless idea"):
        op = apply(Store([Entry("", f"He came. {told}.")]), *split("m1", "temporal"), SCOPE)
        assert op.code == "one_part", told


@pytest.mark.parametrize(("sent", "kept"), [
    ({"query": "Ann", "kind": None}, {"query": "Ann"}), ({"query": 5}, {"query": 5}),
    ({"query": " Ann\n"}, {"query": "Ann"}), ("text", {"given": "text"}), (None, {}),
])  # fmt: skip
def test_the_journal_keeps_arguments(sent, kept):
    assert apply(filled(), "search_memory", sent, SCOPE).args == kept


DATED = Entry("m1", "one two three", date="2023-05-08")  # with id and date 5 words
TOKENS = [  # of 9, and whether there is room
    (manage("create", content="a b c d"), False),  # 5 with its id
    (manage("create", content="a b c", date="2023-05-08"), False),
    (manage("create", content="a b c"), True),  # 9 of 9
    (manage("update", content="a b c d", memory_id="m2"), False),
    (manage("update", content="a b d", memory_id="m2"), True),
    (split("m1", "thematic", parts=["one two", "three"]), False),
    (merge("m1", "m2", content="one two three"), True),
    (manage("create", content="again"), True),
]
MEMORIES = [  # of 6
    (manage("create", content="x"), False),
    (split("m5", "temporal"), False),
    (manage("update", content="x " * 400, memory_id="m1"), True),
    (merge("m2", "m3", content="y"), True),
    (manage("create", content="z"), True),
]
ABOVE = [  # a start above the budget may only shrink
    (manage("create", content="x"), False),
    (split("m6", "speaker"), False),
    (manage("update", content="Ben is in Oslo.", memory_id="m5"), True),  # still above, but smaller
    (manage("update", content="Ben was in Oslo.", memory_id="m5"), True),  # as large as before
    (merge("m1", "m2", strategy="concatenate"), True),
    (delete("m6"), True),
]


@pytest.mark.parametrize(("entries", "most", "unit", "calls"), [
    ([DATED], 9, "tokens", TOKENS), (ENTRIES[:6], 6, "memories", MEMORIES),
    (ENTRIES[:6], 20, "tokens", ABOVE), (ENTRIES[:6], 4, "memories", ABOVE),
])  # fmt: skip
def test_hard_budgets_count_entries_or_the_tokens_of_their_lines(entries, most, unit, calls):
    tokens = unit == "tokens"
    scope = replace(SCOPE, **{"budget_tokens" if tokens else "budget_entries": most})
    store = Store(entries)
    for call, fits in calls:
        before = store.snapshot()
        stored = sum(words(entry.line) for entry in before.entries) if tokens else len(before)
        op = apply(store, *call, scope)
        assert op.ok == fits, call
        if not fits:
            full = f"Error: memory full ({stored} of {most} {unit})."
            assert (op.message, op.code) == (full, "full") and store.snapshot() is before


def test_a_reply_holds_whole_entries_and_says_how_many_more():
    store = Store([Entry("", f"{name} sings a song") for name in ("Ann", "Ben", "Ida", "Ulf")])
    for tokens, shown in ((24, 4), (23, 3), (21, 3), (20, 2), (6, 0), (1, 0)):
        scope = replace(SCOPE, reply_tokens=tokens)
        reply = apply(store, *search("song", top_k=4), scope).message
        head, *rest = reply.split("\n")
        more = [f"(+{4 - shown} more)"] if shown < 4 else []
        assert head == "4 of 4 memories:"
        assert rest == [entry.line for entry in store.snapshot().entries[:shown]] + more
        assert words(reply) <= tokens or not shown
    sampled = apply(store, *sample(k=4), replace(SCOPE, reply_tokens=12)).message
    assert sampled == "[m1] Ann sings a song\n[m2] Ben sings a song\n(+2 more)"


def test_a_group_is_shown_the_same_samples():
    """They depend on the seed and on the number of the operation, not on any global generator."""
    many, state = [Entry("", f"fact {k}") for k in range(100)], random.getstate()

    def shown(*seed):
        store, scope = Store(many), replace(SCOPE, seed=seed)
        return [apply(store, *sample(k=10), scope).message for _ in range(5)]

    one, other = shown("task", 1), shown("task", 1)
    assert one == other and len({*one}) == 5  # each operation draws anew
    assert not {*shown("task", 2)} & {*one}
    assert random.getstate() == state


def test_tools_that_are_not_there_are_unknown():
    others = tuple({*TOOLS} - {"search_memory", "manage_memory"})
    few = replace(SCOPE, without=(*others, "update"))
    op = apply(filled(), *delete("m1"), few)
    assert op.code == "unknown_tool" and "search_memory, manage_memory" in op.message
    assert apply(filled(), *manage("update", content="x", memory_id="m1"), few).code == "refused"
    assert apply(filled(), *manage("create", content="x"), few).ok
    assert [one["function"]["name"] for one in schemas(few.without)] == [*TOOLS][:2]
    assert apply(filled(), *delete("m1"), replace(few, without=(*TOOLS,))).code == "unknown_tool"


LIMITS = [  # of a tool an argument that its schema names, a value that fits, others that do not
    ("search_memory", {}, "query", "x" * 500, ("", "x" * 501, 5, ["x"])),
    ("search_memory", {"query": "a"}, "top_k", 20, (0, 21, "5", 5.0, True)),
    ("search_memory", {"query": "a"}, "kind", "procedural", ("", "other", 1)),
    ("search_memory", {"query": "a"}, "until", "2023-05-08", ("", "2023-5-8", 5)),
    ("manage_memory", {"operation": "create"}, "content", "x" * MOST, ("x" * (MOST + 1), 5)),
    ("delete_memory", {}, "memory_id", "m12", ("", "x", "m01", " m1", 5, "m1\n")),
    ("sample_memory", {}, "k", 10, (0, 11)),
    ("merge_memory", {"strategy": "concatenate"}, "memory_ids", ["m1", "m2", "m3", "m4", "m5"],
     (["m1"], [f"m{k}" for k in range(1, 7)], "m1 m2", ["m1", 2])),
    ("split_memory", {"memory_id": "m1", "split_criteria": "thematic"}, "parts", ["x", "y"],
     (["x"], ["x", ""], ["x", 5], [*"abcdef"])),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "rest", "name", "good", "bad"), LIMITS)
def test_arguments_have_limits_that_the_schema_names(tool, rest, name, good, bad):
    assert getattr(TOOLS[tool].model_validate(rest | {name: good}), name) == good
    for value in bad:
        op = apply(filled(), tool, rest | {name: value}, SCOPE)
        assert op.code in MALFORMED and op.message.startswith(f"Error: {name}"), value


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema["function"]["name"])
def test_a_schema_is_short_and_says_what_is_needed(schema):
    function, told = schema["function"], json.dumps(schema)
    parameters, model = function["parameters"], TOOLS[function["name"]]
    assert schema["type"] == "function" and function["description"] == model.__doc__
    assert parameters["additionalProperties"] is False
    assert "null" not in told and "title" not in told
    assert [*parameters["properties"]] == [*model.model_fields]
    needed = {name for name, field in model.model_fields.items() if field.is_required()}
    assert {*parameters.get("required", [])} == needed
    for name, field in parameters["properties"].items():
        assert is_text(function["name"], name) == (field["type"] == "string")


TEXT = st.sampled_from(["Ann moved. Later Ben left.", "tea", "Ben: Good. Ann: No.", "Oslo x"])
ID = st.sampled_from([f"m{k}" for k in range(1, 12)])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
GOOD = {  # of every argument values that may fit
    "query": TEXT, "content": TEXT, "memory_id": ID, "memory_ids": st.lists(ID, max_size=4),
    "parts": st.lists(TEXT, max_size=4), "operation": st.sampled_from(["create", "update"]),
    "strategy": st.sampled_from(["concatenate", "summarize", "random", "diverse", "recent"]),
    "split_criteria": st.sampled_from(["temporal", "thematic", "speaker"]),
    "kind": st.none() | st.just("semantic"), "date": st.just("2024-01-01"),
}  # fmt: skip
NAMES = {tool: [name for name in TOOLS[tool].model_fields if name in GOOD] for tool in TOOLS}
CALL = st.sampled_from([*TOOLS]).flatmap(
    lambda tool: st.tuples(st.just(tool), st.fixed_dictionaries({}, optional={
        **{name: GOOD[name] for name in NAMES[tool]}, "extra": JSON,
    }) | JSON)
) | st.tuples(st.text(max_size=9), JSON)  # fmt: skip


@settings(max_examples=100, derandomize=True)
@given(st.lists(CALL, min_size=1, max_size=8))
def test_whatever_is_called_raises_nothing_and_what_fails_changes_nothing(calls):
    store, tight = Store(ENTRIES), replace(SCOPE, budget_tokens=60, session=2)
    for call in calls:
        before, n = store.snapshot(), len(store.journal)
        op = apply(store, *call, tight)
        assert store.journal[n:] == [op] and op.code in ("", *CODES)
        assert op.ok == (op.code == "") == (not op.message.startswith("Error: "))
        op.message.encode()  # a reply can be tokenised
        sizes = [sum(words(e.line) for e in s.entries) for s in (before, store.snapshot())]
        assert sizes[1] <= max(60, sizes[0])  # no store grows over its hard budget
        assert store.snapshot() is before or op.ok
    refuse(store, tight, "cut", "it has no end")
    again = read_store([*store.lines()])
    assert again.journal == store.journal
    assert again.snapshot().entries == store.snapshot().entries
