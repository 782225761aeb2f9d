import json
import random
import re
from collections import Counter
from dataclasses import asdict, replace

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
    Entry("m2", "Ben lives in Rome.", "semantic", "Ben", "2023-05-02", 1, ("D1:2",), "init"),
    Entry("m3", "Ann sold the bike.", "episodic", "Ann", "2023-06-01", 2, ("D2:1", "D1:1"), "init"),
    Entry("m4", "It rained.", None, None, None, None, (), "init"),
    Entry("m5", "Ann is in Oslo. On Monday Ben came. They may swim. Later Ben left. He rests."),
    Entry("m6", "Ann: I like tea. It is hot. Ben: I like milk. Ann: Good. Ben: Yes."),
    Entry("m7", "Ann has a bell.", "episodic", "Ann", "2023-07-01"),
)


def filled():
    """Six entries, and a seventh that was deleted."""
    store = Store(ENTRIES)
    assert apply(store, "delete_memory", {"memory_id": "m7"}, SCOPE).message == "Deleted m7."
    return store


def redone(store):
    """Do everything again, as reading a file does."""
    return Store.from_lines([*store.lines()], "a record")


def lines(store):
    """A store's state, byte by byte, without the operations."""
    return [json.dumps(asdict(entry)) for entry in store.snapshot().entries]


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
    (manage("create", content="Ida sings."), "Created m8."),
    (manage("update", content="It rained twice.", memory_id="m4"), "Updated m4 (v2)."),
    (manage("update", content="It rained.", memory_id="m4", date="2023-01-01"), "Updated m4 (v2)."),
    (manage("update", content="IT rained.", memory_id="m4"), "Updated m4 (v2)."),  # the case alone
    (manage("noop"), "No change."),
    (delete("m2"), "Deleted m2."),
    (delete("m2", reason="old news"), "Deleted m2."),
    (sample(k=10, kind="semantic"), M2),
    (sample(k=3, strategy="diverse"), f"{M1}\n{M3}\n[m5] {ENTRIES[4].text}"),
    (sample(k=2, strategy="recent"), f"[m6] {ENTRIES[5].text}\n[m5] {ENTRIES[4].text}"),
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
    before, n = lines(store), len(store.journal)
    op = apply(store, *call, SCOPE)
    assert (op.message, op.ok, op.code) == (reply, True, "")
    assert store.journal[n:] == [op] and op.tool == call[0]
    wrote = reply.split()[0] in ("Created", "Updated", "Deleted", "Merged", "Split")
    assert (lines(store) != before) == bool(op.after) == wrote


SIX = [f"m{k}" for k in range(1, 7)]
FAULTS = [
    (("drop_memory", {}), "unknown_tool", "name"),
    ((None, {}), "unknown_tool", "name"),
    (("search_memory", '{"query": "Rome"}'), "bad_arguments", "arguments"),
    (search(" \n"), "empty", "query"),
    (("search_memory", {}), "missing", "query"),
    (search("x" * 501), "too_long", "query"),
    (search("a", top_k=21), "bad_arguments", "top_k"),
    (search("a", top_k=0), "bad_arguments", "top_k"),
    (search("a", top_k="5"), "bad_arguments", "top_k"),
    (search("a", top_k=True), "bad_arguments", "top_k"),
    (search("a", top_k=2, limit=2), "bad_arguments", "limit"),
    (search("a", threshold=0.3), "bad_arguments", "threshold"),
    (search("a", kind="x"), "bad_arguments", "kind"),
    (search("a", since="2023-02-30"), "bad_arguments", "since"),
    (search("a", until="May 8"), "bad_arguments", "until"),
    (search("a", since="2023-02-02", until="2023-02-01"), "bad_arguments", "since"),
    (("manage_memory", {}), "missing", "operation"),
    (manage("delete"), "bad_arguments", "operation"),
    (manage("create"), "missing", "content"),
    (manage("update", memory_id="m1"), "missing", "content"),
    (manage("update", content="x"), "missing", "memory_id"),
    (manage("create", content=["x"]), "bad_arguments", "content"),
    (manage("create", content=" \t "), "empty", "content"),
    (manage("create", content="\u200b\ufeff"), "bad_arguments", "content"),  # nothing visible
    (manage("create", content="a\x07b"), "bad_arguments", "content"),
    (manage("create", content="a\ud800"), "bad_arguments", "content"),
    (manage("create", content="x" * 1001), "too_long", "content"),
    (manage("create", content="it  RAINED."), "duplicate", "duplicate of m4"),
    (manage("create", content="x", memory_id="m1"), "bad_arguments", "memory_id"),
    (manage("noop", content="x"), "bad_arguments", "content"),
    (manage("update", content="x", memory_id="m99"), "unknown_id", "memory_id"),
    (manage("update", content="x", memory_id="m7"), "deleted_id", "memory_id"),
    (manage("update", content="x", memory_id="[m1]"), "bad_arguments", "memory_id"),
    (manage("update", content="It rained.", memory_id="m1"), "duplicate", "duplicate of m4"),
    (manage("update", content=" It rained. ", memory_id="m4"), "duplicate", "duplicate of m4"),
    (delete("m8"), "unknown_id", "memory_id"),
    (delete("m7"), "deleted_id", "memory_id"),
    (sample(k=0), "bad_arguments", "k"),
    (sample(kind="procedural"), "empty", "kind"),
    (merge("m1", content="x"), "bad_arguments", "memory_ids"),
    (merge(*SIX, content="x"), "bad_arguments", "memory_ids"),
    (merge("m1", "m1", content="x"), "bad_arguments", "memory_ids"),
    (merge("m1", "m9", content="x"), "unknown_id", "memory_ids"),
    (merge("m1", "m7", content="x"), "deleted_id", "memory_ids"),
    (merge("m1", "x", content="x"), "bad_arguments", r"memory_ids\[1\]"),
    (merge("m1", "m2"), "missing", "content"),
    (merge("m1", "m2", strategy="concatenate", content="x"), "bad_arguments", "content"),
    (merge("m1", "m2", content="It rained."), "duplicate", "duplicate of m4"),
    (split("m9", "temporal"), "unknown_id", "memory_id"),
    (split("m7", "temporal"), "deleted_id", "memory_id"),
    (split("m4", "temporal"), "one_part", "split_criteria"),
    (split("m5", "thematic"), "missing", "parts"),
    (split("m5", "thematic", parts=["x"]), "bad_arguments", "parts"),
    (split("m5", "thematic", parts=["x", "X "]), "bad_arguments", "parts"),
    (split("m5", "thematic", parts=["x", "y", "z"], max_parts=2), "bad_arguments", "parts"),
    (split("m5", "thematic", parts=["x", "It rained."]), "duplicate", "duplicate of m4"),
]


@pytest.mark.parametrize(("call", "code", "field"), FAULTS)
def test_a_fault_names_the_field_and_leaves_the_state_alone(call, code, field):
    store = filled()
    before, snapshot, n = lines(store), store.snapshot(), len(store.journal)
    op = apply(store, *call, SCOPE)
    assert (op.ok, op.code, op.after, op.before) == (False, code, (), ())
    assert re.match(rf"Error: {field}[:.]", op.message) and op.message.endswith(".")
    assert store.snapshot() is snapshot and lines(store) == before
    assert store.journal[n:] == [op]


def test_every_code_is_in_the_table():
    others = {"full", "refused", "unreadable", "cut", "too_many"}  # below, and of the agent
    assert {code for _, code, _ in FAULTS} | others == {*CODES}
    assert apply(Store(), "sample_memory", {}, SCOPE).code == "empty"


def test_aliases_mean_the_same():
    for alias, main in (
        ({"query": "Ann", "limit": 1}, {"query": "Ann", "top_k": 1}),
        ({"query": "Ann", "memory_type": "semantic"}, {"query": "Ann", "kind": "semantic"}),
    ):
        a, b = (apply(filled(), "search_memory", args, SCOPE) for args in (alias, main))
        assert a.ok and (a.message, a.args) == (b.message, b.args)
    made = apply(filled(), *manage("create", content="x", memory_type="procedural"), SCOPE)
    assert made.after[0].kind == "procedural"
    sampled = apply(filled(), "sample_memory", {"memory_type": "semantic"}, SCOPE)
    assert sampled.message == M2


# ---------------------------------------------------------------- what is written


def test_a_created_entry_belongs_to_the_session_that_is_read():
    store = Store()
    reading = replace(SCOPE, session=3, date="2023-05-08")
    op = apply(store, *manage("create", content=" Ann\n\tmoved. ", kind="episodic"), reading)
    wanted = Entry("m1", "Ann moved.", "episodic", None, "2023-05-08", 3, ("S3",))
    assert op.after == store.snapshot().entries == (wanted,) and op.session == 3
    dated = apply(store, *manage("create", content="x", date="2022-01-01"), reading).after[0]
    assert (dated.date, dated.session, dated.evidence) == ("2022-01-01", 3, ("S3",))
    refined = apply(store, *manage("create", content="y"), SCOPE).after[0]
    assert (refined.date, refined.session, refined.evidence) == (None, None, ())


def test_an_update_keeps_what_it_does_not_name():
    store = filled()
    op = apply(store, *manage("update", content="Ann has a bike.", memory_id="m1"), SCOPE)
    assert op.before == (ENTRIES[0],)
    assert op.after == (replace(ENTRIES[0], text="Ann has a bike.", version=2),)
    call = manage("update", content="New.", memory_id="m1", kind="semantic", date="2024-01-01")
    entry = apply(store, *call, replace(SCOPE, session=9, date="2025-01-01")).after[0]
    assert (entry.kind, entry.date, entry.version) == ("semantic", "2024-01-01", 3)
    # inherited, and what was read when it was written
    assert (entry.session, entry.evidence) == (1, ("D1:1", "S9"))
    call = manage("update", content="Newer.", memory_id="m1")
    assert apply(store, *call, replace(SCOPE, session=9)).after[0].evidence == ("D1:1", "S9")


def test_the_form_of_a_call_depends_on_nothing_that_is_stored():
    full = replace(SCOPE, budget_entries=0)
    for name, arguments in [
        ("delete_memory", {"memory_id": "m99"}),
        manage("create", content="Ben lives in Rome."),
        manage("update", content="x", memory_id="m9"),
        ("sample_memory", {"kind": "procedural"}),
    ]:
        op = apply(filled(), name, arguments, full)
        assert not op.ok and not isinstance(checked(name, arguments, full), tuple)
    for name, arguments in [("drop", {}), ("delete_memory", {}), ("sample_memory", [])]:
        op = apply(filled(), name, arguments, full)
        assert checked(name, arguments, full) == (op.code, op.message)


def test_a_merge_knows_where_it_came_from():
    store = filled()
    op = apply(store, *merge("m3", "m1", content="Ann sold her bike."), SCOPE)
    kept = ("episodic", "Ann", "2023-06-01", None, ("D2:1", "D1:1"))
    wanted = Entry("m8", "Ann sold her bike.", *kept, parents=("m3", "m1"))
    assert store.snapshot().get("m8") == wanted
    assert {*op.before} == {ENTRIES[0], ENTRIES[2]}
    assert "m1" not in store.snapshot() and store.snapshot().get("m3").deleted
    mixed = apply(store, *merge("m4", "m8", strategy="concatenate"), SCOPE).after[0]
    assert mixed.text == "It rained. Ann sold her bike."
    assert (mixed.kind, mixed.speaker, mixed.date) == (None, None, "2023-06-01")
    assert (mixed.evidence, mixed.parents) == (("D2:1", "D1:1"), ("m4", "m8"))
    store = Store([Entry("", letter * 500) for letter in "ab"] + [Entry("", "c" * 499)])
    op = apply(store, *merge("m1", "m2", strategy="concatenate"), SCOPE)
    long = f"Error: memory_ids: a text would have 1001 characters of {MOST}."
    assert (op.code, op.message) == ("too_long", long)
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


def test_the_parts_of_a_split_inherit():
    op = apply(filled(), *split("m3", "thematic", parts=["Ann sold it.", "It was red."]), SCOPE)
    for entry, text, entry_id in zip(
        op.after, ("Ann sold it.", "It was red."), ("m8", "m9"), strict=False
    ):
        wanted = dict(id=entry_id, text=text, origin="agent", version=1, parents=("m3",))
        assert entry == replace(ENTRIES[2], **wanted)
    assert op.after[2] == replace(ENTRIES[2], version=2, deleted=True)


def test_the_journal_keeps_arguments_and_the_reason():
    store = filled()
    op = apply(store, "delete_memory", {"memory_id": "m1", "reason": " gone "}, SCOPE)
    assert op.args == {"memory_id": "m1", "reason": "gone"}
    for sent, kept in (
        ({"query": 5}, {"query": 5}),
        ("text", {"given": "text"}),
        ({"query": float("nan")}, {"unreadable": "dict"}),
        (None, {}),
    ):
        assert apply(store, "search_memory", sent, SCOPE).args == kept
    assert len(json.dumps(apply(store, "search_memory", {"x": "y" * 10**6}, SCOPE).args)) < 9000


# ---------------------------------------------------------------- budgets


def test_a_hard_budget_in_tokens_counts_shown_lines():
    store = Store([Entry("", "one two three", date="2023-05-08")])  # with id and date 5
    tight = replace(SCOPE, budget_tokens=9)
    full = "Error: memory full (5 of 9 tokens)."
    n = len(store.journal)
    op = apply(store, *manage("create", content="a b c d"), tight)  # 5 with its id
    assert (op.message, op.code, op.ok) == (full, "full", False)
    assert len(store.journal) == n + 1 and len(store.snapshot()) == 1
    op = apply(store, *manage("create", content="a b c"), replace(tight, date="2023-05-08"))
    assert op.message == full
    assert apply(store, *manage("create", content="a b c"), tight).ok  # 9 of 9
    op = apply(store, *manage("update", content="a b c d", memory_id="m2"), tight)
    assert op.message == "Error: memory full (9 of 9 tokens)."
    assert apply(store, *manage("update", content="a b d", memory_id="m2"), tight).ok
    op = apply(store, *split("m1", "thematic", parts=["one two", "three"]), tight)
    assert op.code == "full"
    assert apply(store, *merge("m1", "m2", content="one two three"), tight).ok
    assert apply(store, *manage("create", content="again"), tight).ok


def test_a_hard_budget_in_entries():
    store = filled()
    tight = replace(SCOPE, budget_entries=6)
    full = "Error: memory full (6 of 6 memories)."
    for call in (manage("create", content="x"), split("m5", "temporal")):
        op = apply(store, *call, tight)
        assert (op.message, op.code) == (full, "full")
    assert apply(store, *manage("update", content="x " * 400, memory_id="m1"), tight).ok
    assert apply(store, *merge("m2", "m3", content="y"), tight).ok
    assert apply(store, *manage("create", content="z"), tight).ok


@pytest.mark.parametrize("budget", [{"budget_tokens": 20}, {"budget_entries": 4}])
def test_a_start_above_the_budget_may_only_shrink(budget):
    store, tight = filled(), replace(SCOPE, **budget)
    assert apply(store, *manage("create", content="x"), tight).code == "full"
    assert apply(store, *split("m6", "speaker"), tight).code == "full"
    shorter = manage("update", content="Ben is in Oslo.", memory_id="m5")
    assert apply(store, *shorter, tight).ok  # still above it, but smaller
    same = manage("update", content="Ben was in Oslo.", memory_id="m5")
    assert apply(store, *same, tight).ok  # ... or as large as before
    assert apply(store, *merge("m1", "m2", strategy="concatenate"), tight).ok
    assert apply(store, "delete_memory", {"memory_id": "m6"}, tight).ok


# ---------------------------------------------------------------- replies


def test_a_reply_holds_whole_entries_and_says_how_many_more():
    store = Store([Entry("", f"{name} sings a song") for name in ("Ann", "Ben", "Ida", "Ulf")])
    everything = {"query": "song", "top_k": 4}
    for tokens, shown in ((24, 4), (23, 3), (21, 3), (20, 2), (6, 0), (1, 0)):
        scope = replace(SCOPE, reply_tokens=tokens)
        reply = apply(store, "search_memory", everything, scope).message
        head, *rest = reply.split("\n")
        more = [f"(+{4 - shown} more)"] if shown < 4 else []
        assert head == "4 of 4 memories:"
        assert rest == [entry.line for entry in store.snapshot().entries[:shown]] + more
        assert words(reply) <= tokens or not shown
    sampled = apply(store, "sample_memory", {"k": 4}, replace(SCOPE, reply_tokens=12)).message
    assert sampled == "[m1] Ann sings a song\n[m2] Ben sings a song\n(+2 more)"


def test_a_group_is_shown_the_same_samples():
    """They depend on the seed and on the number of the operation, not on any global generator."""
    many = [Entry("", f"fact {k}") for k in range(100)]

    def shown(seed, disturb):
        store, scope, replies = Store(many), replace(SCOPE, seed=seed), []
        for k in range(5):
            random.seed(k if disturb else 77)
            state = random.getstate()
            replies.append(apply(store, "sample_memory", {"k": 10}, scope).message)
            assert random.getstate() == state
        return replies

    group = [shown(("task", 1), disturb) for disturb in (False, True, False)]
    assert group[0] == group[1] == group[2]
    assert len({*group[0]}) == 5  # each operation draws anew
    assert not {*shown(("task", 2), False)} & {*group[0]}


def test_recent_samples_are_those_updated_most_often():
    store = Store([Entry("", f"fact {k}") for k in range(10)])
    for entry_id in ("m4", "m2", "m4"):
        text = f"news {len(store.journal)}"
        apply(store, *manage("update", content=text, memory_id=entry_id), SCOPE)
    reply = apply(store, "sample_memory", {"strategy": "recent", "k": 4}, SCOPE).message
    ids = [line.partition("]")[0][1:] for line in reply.split("\n")]
    assert ids == ["m4", "m2", "m10", "m9"]


# ---------------------------------------------------------------- what a run allows


def test_tools_that_are_not_there_are_unknown():
    few = replace(SCOPE, tools=("search_memory", "manage_memory"), may_update=False)
    store = filled()
    op = apply(store, "delete_memory", {"memory_id": "m1"}, few)
    said = "'delete_memory' is no tool; there are search_memory, manage_memory."
    assert (op.code, op.message) == ("unknown_tool", f"Error: name: {said}")
    op = apply(store, *manage("update", content="x", memory_id="m1"), few)
    assert (op.code, op.message) == ("refused", "Error: operation: update is not allowed here.")
    assert apply(store, *manage("create", content="x"), few).ok


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
            op = apply(filled(), tool, BASES[tool] | {name: value}, SCOPE)
            assert op.message.startswith(f"Error: {name}") and not op.ok, (name, value)
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


def valid_call(draw, store):
    """A call that the schemas allow; it may still fail for want of an entry, or of room."""
    ids = [entry.id for entry in store.snapshot().entries] or ["m1"]
    one, text = draw.choice(ids), " ".join(draw.choices(WORDS, k=draw.randint(1, 8)))
    match draw.randrange(8):
        case 0:
            return "search_memory", {"query": text, "top_k": 3, "since": "2023-05-01"}
        case 1:
            return manage("create", content=text, date="2023-05-08")
        case 2:
            return manage("update", content=text, memory_id=one)
        case 3:
            return manage("noop")
        case 4:
            return "delete_memory", {"memory_id": one, "reason": "old"}
        case 5:
            strategy = draw.choice(["random", "diverse", "recent"])
            return "sample_memory", {"k": 4, "strategy": strategy}
        case 6:
            return merge(*draw.sample(ids, min(len(ids), draw.randint(2, 3))), content=text)
    return split(one, "thematic", parts=[f"{text} 1", f"{text} 2"], max_parts=3)


NASTY = (*'{}[]"\\<>', "\n", "é", "\u202e", "\0", "\ud800", "🙂", "9" * 30)
VALUES = (
    *(None, True, -1, 10**30, 1.5, "", "m1", "\ud800", [], ["m1"], {}, {"a": {"b": [1]}}),
    "x" * 2000,
)


def mutated_text(draw, text):
    """What is left of a call after some damage to its characters."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        to = min(len(text), at + draw.randint(1, 12))
        text = draw.choice([
            text[:at],  # cut
            text[:at] + text[to:],
            text[:at] + draw.choice(NASTY) + text[to:],
            text[:at] + text[at:to][::-1] + text[to:],  # characters swapped
            text[:at] + text[:to] + text[to:],
            text[:at] + draw.choice(("[", '{"a":')) * 1200 + text[at:],
        ])  # fmt: skip
    return text


def mutated_call(draw, name, args):
    """A call with another name, or with arguments of other types, missing, unknown or nested."""
    args = dict(args)
    for _ in range(draw.randint(1, 2)):
        key = draw.choice([*args, "extra", "memory_type", "limit", "\ud800"])
        change = draw.randrange(5)
        if change == 0:
            args.pop(key, None)
        elif change == 1:
            args[key] = draw.choice(VALUES)
        elif change == 2:
            args[key] = [args.get(key)]
        elif change == 3:
            args[key] = str(args.get(key))
        else:
            name = draw.choice([f"{name}s", "", None, 3, *TOOLS])
    return name, draw.choice([args] * 9 + [[*args], None, "x"])


FORMATS = [Format(), Format(gap="\n"), Format("list"), Format("xml"), Format("bare")]


def called(store, scope, form, response):
    """Make the calls of a response, or one; return their operations."""
    calls, ops = form.parse(response)[2] if isinstance(response, str) else [response], []
    for call in calls:
        if isinstance(call, Call):
            ops.append(apply(store, call.name, call.arguments, scope))
        else:
            ops.append(refuse(store, scope, call.code, f"Error: {call.message}", call.text))
    return ops


def test_thousands_of_mutated_calls():
    """No exception; what fails changes nothing.

    Half of the calls are damaged as text, in all formats, half as values.
    """
    draw = random.Random(20)
    store, tight = Store(ENTRIES), replace(SCOPE, budget_tokens=60, session=2)
    codes: Counter[str] = Counter()
    failed = 0
    for made in range(3_000):
        name, args = valid_call(draw, store)
        form = draw.choice(FORMATS)
        if made % 2:
            response = mutated_text(draw, form.write(name, args))
        else:
            response = Call(*mutated_call(draw, name, args), "")
        before, n = store.snapshot(), len(store.journal)
        ops = called(store, tight, form, response)
        assert store.journal[n:] == ops
        for op in ops:
            codes[op.code] += 1
            assert op.ok == (op.code == "") == (not op.message.startswith("Error: "))
            assert op.ok or op.code in CODES
            op.message.encode()  # a reply can be tokenised
        sizes = [sum(words(e.line) for e in s.entries) for s in (before, store.snapshot())]
        assert sizes[1] <= max(60, sizes[0])  # no store grows over its hard budget
        if not any(op.ok for op in ops):
            assert store.snapshot() is before
            failed += 1
        if len(store.journal) > 200:  # about as long as an episode
            assert redone(store).snapshot().entries == store.snapshot().entries
            store = Store(ENTRIES)
    often = {"", "bad_arguments", "missing", "unknown_tool", "unreadable", "cut", "full"}
    assert often <= {code for code, count in codes.items() if count > 15}
    assert failed > 2400


def test_values_nested_without_end():
    deep: object = "x"
    for _ in range(20_000):
        deep = {"query": [deep]}
    for name, arguments in (
        ("search_memory", deep),
        (deep, {}),
        ("merge_memory", {"content": deep}),
    ):
        assert not apply(filled(), name, arguments, SCOPE).ok
