import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from agents.calls import Call, Format
from agents.search import Search
from agents.store import Entry, Store
from agents.tools import CODES, MOST, TOOLS, Scope, apply, checked, is_text, refuse, schemas


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


def manage(operation, **rest):
    return "manage_memory", {"operation": operation, **rest}


def merge(*ids, strategy="summarize", **rest):
    return "merge_memory", {"memory_ids": [*ids], "strategy": strategy, **rest}


def split(memory_id, criteria, **rest):
    return "split_memory", {"memory_id": memory_id, "split_criteria": criteria, **rest}


# ---------------------------------------------------------------- the table of the tools

M1 = "[m1] 2023-05-01 Ann: Ann has a red bike."
M2 = "[m2] 2023-05-02 Ben: Ben lives in Rome."
M3 = "[m3] 2023-06-01 Ann: Ann sold the bike."
M4 = "[m4] It rained."


def search(query, **rest):
    return "search_memory", {"query": query, **rest}


def sample(**rest):
    return "sample_memory", rest


def delete(memory_id, **rest):
    return "delete_memory", {"memory_id": memory_id, **rest}


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
    (search("Ann Ben Rome", memory_type="semantic", limit=1), ONE + M2),  # other names
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
    ((None, {}), "unknown_tool", "name"),
    (("search_memory", '{"query": "Rome"}'), "bad_arguments", "arguments"),
    (search(" \n"), "empty", "query"),
    (search("x" * 501), "too_long", "query"),
    (search("a", top_k=2, limit=2), "bad_arguments", "limit"),
    (search("a", threshold=0.3), "bad_arguments", "threshold"),
    (search("a", since="2023-02-30"), "bad_arguments", "since"),
    (search("a", since="2023-02-02", until="2023-02-01"), "bad_arguments", "since"),
    (manage("create"), "missing", "content"),
    (manage("update", content="x"), "missing", "memory_id"),
    (manage("create", content=" \t "), "empty", "content"),
    (manage("create", content="\u200b\ufeff"), "bad_arguments", "content"),  # nothing visible
    (manage("create", content="a\x07b"), "bad_arguments", "content"),
    (manage("create", content="a\ud800"), "bad_arguments", "content"),
    (manage("create", content="it  RAINED."), "duplicate", "duplicate of m4"),
    (manage("create", content="x", memory_id="m1"), "bad_arguments", "memory_id"),
    (manage("noop", content="x"), "bad_arguments", "content"),
    (manage("update", content="x", memory_id="m99"), "unknown_id", "memory_id"),
    (manage("update", content="x", memory_id="m7"), "deleted_id", "memory_id"),
    (manage("update", content="It rained.", memory_id="m1"), "duplicate", "duplicate of m4"),
    (manage("update", content=" It rained. ", memory_id="m4"), "duplicate", "duplicate of m4"),
    (delete("m8"), "unknown_id", "memory_id"),
    (merge("m1", "m1", content="x"), "bad_arguments", "memory_ids"),
    (merge("m1", "m9", content="x"), "unknown_id", "memory_ids"),
    (merge("m1", "x", content="x"), "bad_arguments", r"memory_ids\[1\]"),
    (merge("m1", "m2"), "missing", "content"),
    (merge("m1", "m2", strategy="concatenate", content="x"), "bad_arguments", "content"),
    (merge("m1", "m2", content="It rained."), "duplicate", "duplicate of m4"),
    (split("m9", "temporal"), "unknown_id", "memory_id"),
    (split("m4", "temporal"), "one_part", "split_criteria"),
    (split("m5", "thematic"), "missing", "parts"),
    (split("m5", "thematic", parts=["x", "X "]), "bad_arguments", "parts"),
    (split("m5", "thematic", parts=["x", "y", "z"], max_parts=2), "bad_arguments", "parts"),
    (split("m5", "thematic", parts=["x", "It rained."]), "duplicate", "duplicate of m4"),
]


OF_FORM = {"unknown_tool", "bad_arguments", "missing", "too_long", "empty"}


@pytest.mark.parametrize(("call", "code", "field"), FAULTS)
def test_a_fault_names_the_field_and_leaves_the_state_alone(call, code, field):
    store = filled()
    snapshot, n = store.snapshot(), len(store.journal)
    op = apply(store, *call, SCOPE)
    assert (op.ok, op.code, op.after, op.before) == (False, code, (), ())
    assert re.match(rf"Error: {field}[:.]", op.message) and op.message.endswith(".")
    assert store.snapshot() is snapshot and store.journal[n:] == [op]
    form = checked(*call, SCOPE)  # which depends on nothing that is stored
    assert (form == (code, op.message)) == isinstance(form, tuple) == (code in OF_FORM)


def test_every_code_is_in_the_table():
    others = {"full", "refused", "unreadable", "cut", "too_many"}  # below, and of the agent
    assert {code for _, code, _ in FAULTS} | others == {*CODES}
    for store, said in ((Store(), "the store"), (filled(), "kind: ")):
        op = apply(store, *sample(kind="procedural"), SCOPE)
        assert op.code == "empty" and op.message.startswith(f"Error: {said}")


# ---------------------------------------------------------------- what is written


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
    (READING, manage("create", content=" Ann\n\tmoved. ", memory_type="episodic"),
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
    op = apply(store, *merge("m1", "m2", strategy="concatenate"), SCOPE)
    assert op.code == "too_long" and f"1001 characters of {MOST}" in op.message
    assert apply(store, *merge("m1", "m3", strategy="concatenate"), SCOPE).ok


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


def test_the_journal_keeps_arguments_and_the_reason():
    store = filled()
    op = apply(store, "delete_memory", {"memory_id": "m1", "reason": " gone "}, SCOPE)
    assert op.args == {"memory_id": "m1", "reason": "gone"}
    for sent, kept in (
        ({"query": 5}, {"query": 5}),
        ({"query": "Ann", "limit": 1}, {"query": "Ann", "top_k": 1}),
        ("text", {"given": "text"}),
        ({"query": float("nan")}, {"unreadable": "dict"}),
        (None, {}),
    ):
        assert apply(store, "search_memory", sent, SCOPE).args == kept
    assert len(json.dumps(apply(store, "search_memory", {"x": "y" * 10**6}, SCOPE).args)) < 9000


# ---------------------------------------------------------------- budgets


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


@pytest.mark.parametrize(
    ("entries", "most", "unit", "calls"),
    [
        ([DATED], 9, "tokens", TOKENS),
        (ENTRIES[:6], 6, "memories", MEMORIES),
        (ENTRIES[:6], 20, "tokens", ABOVE),
        (ENTRIES[:6], 4, "memories", ABOVE),
    ],
)
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


# ---------------------------------------------------------------- replies


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


# ---------------------------------------------------------------- what a run allows


def test_tools_that_are_not_there_are_unknown():
    few = replace(SCOPE, tools=("search_memory", "manage_memory"), may_update=False)
    op = apply(filled(), *delete("m1"), few)
    assert op.code == "unknown_tool" and "are search_memory, manage_memory." in op.message
    op = apply(filled(), *manage("update", content="x", memory_id="m1"), few)
    assert op.code == "refused" and op.message.startswith("Error: operation: ")
    assert apply(filled(), *manage("create", content="x"), few).ok


# ---------------------------------------------------------------- the schema is the check

# for each tool a call to which any optional argument may be added
BASES = {
    "search_memory": {"query": "a"},
    "manage_memory": {"operation": "update", "content": "x", "memory_id": "m1"},
    "delete_memory": {"memory_id": "m1"},
    "sample_memory": {},
    "merge_memory": {"memory_ids": ["m1", "m2"], "strategy": "summarize", "content": "x"},
    "split_memory": {"memory_id": "m1", "split_criteria": "thematic", "parts": ["x", "y"]},
}


def examples(schema):
    """(values that a schema allows, values that it forbids)."""
    if "enum" in schema:
        return schema["enum"], ["", "other", 1]
    if schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        return [low, high], [low - 1, high + 1, str(low), float(low), True]
    if schema["type"] == "array":
        good, bad = examples(schema["items"])
        least, most = schema["minItems"], schema["maxItems"]
        several = [f"m{k}" for k in range(1, most + 2)]  # ids, and texts as well
        lists = [several[:least], several[:most]], [several[: least - 1], several, "m1 m2"]
        return lists[0], [*lists[1], *([*several[: least - 1], value] for value in bad)]
    if "pattern" in schema:
        good = ["2023-05-08"] if "0-9]{4}" in schema["pattern"] else ["m1", "m12"]
        return good, ["", "x", "m01", " m1", "2023-5-8", 5]
    longest = schema["maxLength"]
    return ["x", "x" * longest], ["", "x" * (longest + 1), 5, ["x"]]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_schema_says_what_is_checked(tool):
    model, (schema,) = TOOLS[tool], schemas((tool,))
    parameters = schema["function"]["parameters"]
    assert schema["type"] == "function" and schema["function"]["name"] == tool
    assert parameters["additionalProperties"] is False
    assert [*parameters["properties"]] == [*model.model_fields]
    for name, field in parameters["properties"].items():
        good, bad = examples(field)
        for value in good:
            base = BASES[tool]
            if (name, value) in (("operation", "noop"), ("strategy", "concatenate")):
                base = {key: base[key] for key in base if key == "memory_ids"}
            if (name, value) == ("operation", "create"):
                base = {"content": "x"}
            call = model.model_validate(base | {name: value})
            assert getattr(call, name) == value
        for value in bad:
            store = filled()
            snapshot = store.snapshot()
            op = apply(store, tool, BASES[tool] | {name: value}, SCOPE)
            assert op.message.startswith(f"Error: {name}") and not op.ok, (name, value)
            assert op.code in OF_FORM - {"missing"} and store.snapshot() is snapshot
        if "default" in field:
            assert getattr(model.model_validate(BASES[tool]), name) == field["default"]
        assert is_text(tool, name) == (field["type"] == "string")
    for name in parameters["properties"]:
        rest = {key: value for key, value in BASES[tool].items() if key != name}
        op = apply(filled(), tool, rest, SCOPE)
        assert (op.code == "missing") == (name in BASES[tool])
        assert op.message.startswith(f"Error: {name}: field required") == (
            name in parameters.get("required", [])
        )


def test_schemas_are_for_the_tools_asked_for():
    assert [one["function"]["name"] for one in schemas()] == [*TOOLS] == [*SCOPE.tools]
    assert len(schemas(("delete_memory",))) == 1
    assert "null" not in json.dumps(schemas()) and "title" not in json.dumps(schemas())


# ---------------------------------------------------------------- whatever is called

WORDS = ("Ann", "bike", "Rome", "tea", "rain", "moved", "Oslo", "sings", "May", "2021.")
NASTY = ("", *'{}[]"\\<>', "\n", "é", "\u202e", "\0", "\ud800", "🙂", "9" * 30, "[" * 1200)
VALUES = (
    *(None, True, -1, 10**30, 1.5, "", "m1", "\ud800", [], ["m1"], {}, {"a": {"b": [1]}}),
    "x" * 2000,
)
FORMATS = [Format(), Format("xml"), Format("bare")]


def some_call(draw, store):
    """A call of a form that the schemas allow, which may still fail for want of an entry, or of
    room; or one with a damage, as values or, written, as a text."""
    name, args = draw.choice([draw.choice(DONE)[0], manage("create", content="x")])
    ids = [entry.id for entry in store.snapshot().entries] or ["m1"]
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 8)))
    fresh = {"content": text, "memory_id": draw.choice(ids), "parts": [f"{text} 1", f"{text} 2"]}
    fresh["memory_ids"] = draw.sample(ids, min(len(ids), draw.randint(2, 3)))
    args = {key: fresh.get(key, value) for key, value in args.items()}
    key = draw.choice([*args, "extra", "memory_type", "limit", "\ud800"])
    match draw.randrange(10):
        case 0:
            args.pop(key, None)
        case 1:
            args[key] = draw.choice([*VALUES, [args.get(key)], str(args.get(key))])
        case 2:
            name = draw.choice([f"{name}s", "", None, 3, *TOOLS])
        case 3:
            args = draw.choice([[*args], None, "x"])
        case 4 | 5 | 6 | 7:
            form = draw.choice(FORMATS)
            text = form.write(name, args)
            at = draw.randrange(len(text) + 1)
            rest = draw.choice(["", text[at:], text[at + draw.randint(1, 12) :]])
            return form.parse(text[:at] + draw.choice(NASTY) + rest)
    return [Call(name, args)]


def test_thousands_of_calls_raise_nothing_and_what_fails_changes_nothing():
    draw = random.Random(20)
    store, tight = Store(ENTRIES), replace(SCOPE, budget_tokens=60, session=2)
    codes: Counter[str] = Counter()
    for _ in range(3_000):
        before, n, ops = store.snapshot(), len(store.journal), []
        for call in some_call(draw, store):
            if isinstance(call, Call):
                ops.append(apply(store, call.name, call.arguments, tight))
            else:
                ops.append(refuse(store, tight, call.code, f"Error: {call.message}"))
        assert store.journal[n:] == ops
        for op in ops:
            codes[op.code] += 1
            assert op.ok == (op.code == "") == (not op.message.startswith("Error: "))
            assert op.ok or op.code in CODES
            op.message.encode()  # a reply can be tokenised
        sizes = [sum(words(e.line) for e in s.entries) for s in (before, store.snapshot())]
        assert sizes[1] <= max(60, sizes[0])  # no store grows over its hard budget
        assert store.snapshot() is before or any(op.ok for op in ops)
        if len(store.journal) > 200:  # about as long as an episode
            again = Store.from_lines([*store.lines()], "a record")
            assert again.snapshot().entries == store.snapshot().entries
            store = Store(ENTRIES)
    often = {"", "bad_arguments", "missing", "unknown_tool", "unreadable", "cut", "full"}
    assert often <= {code for code, count in codes.items() if count > 15}


def test_values_nested_without_end():
    deep: object = "x"
    for _ in range(20_000):
        deep = {"query": [deep]}
    for call in (("search_memory", deep), (deep, {}), ("merge_memory", {"content": deep})):
        assert not apply(filled(), *call, SCOPE).ok
