"""The agent that edits a store: what is sampled, when it stops, what it is paid, who is asked."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import random_policy
from hashes import Hashes
from test_calls import write
from test_store import read_store
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from agents import find, memupdate
from agents.calls import Format, format_of
from agents.search import searched
from agents.store import Store
from commands.train import build, resolved
from config.errors import UserError
from config.options import GRPOConfig, RunConfig
from data import Task
from dev import keeper
from engines.open import give_embedder
from engines.scripted import ScriptedEngine
from grpo import GRPO, training_rows
from memagent import Group
from report.metrics import describe
from report.records import record_turn
from rollout import Sampling, rollout
from suites import ledger
from tasks.conversations import Memory, Probe, Session, Utterance
from tasks.episodes import Episode, questions_of
from tasks.writers import write_eval_json
from tokens.codec import Codec


@pytest.fixture(scope="module")
def codec():
    return Codec(keeper.make_tokenizer())


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def create(text):
    return call("manage_memory", operation="create", content=text)


def update(id, text):
    return call("manage_memory", operation="update", content=text, memory_id=id)


def delete(id):
    return call("delete_memory", memory_id=id)


def reads(prompt):
    """Answer as a reader of the memories would: the place of the first entry about the person."""
    question = next(piece for piece, constant in prompt.pieces[::-1] if not constant)
    return keeper.answer(question, prompt.memory)


def play(codec, agent, task, script, n=1, window=None):
    """Run an agent on scripted calls; frozen prompts are answered from the memories they show."""
    engine = ScriptedEngine(codec, lambda p: reads(p) if p.frozen else script(p), per_step=3)
    engine.window = window
    done = list(rollout(engine, agent, [(task, k) for k in range(n)]))
    for trajectory in done:
        assert not trajectory.error, trajectory.error
        trajectory.reward = agent.reward(trajectory)
    return sorted(done, key=lambda t: t.sample)


def edit(codec, agent, task, script, **how):
    """Run an agent once: its trajectory, the notes of its edits, the parts of its reward, what
    it has answered in the end, and the store."""
    (done,) = play(codec, agent, task, script, **how)
    notes = notes_of(done)
    parts = next((note.parts for note in notes[::-1] if note.parts), {})
    store = read_store(notes[-1].store) if notes else None
    answers = notes[-1].answers if notes else ()
    asked = [answer["question"] for answer in answers]
    edits = [turn for turn in done.turns if not turn.prompt.frozen]
    return SimpleNamespace(done=done, notes=notes, parts=parts, answers=answers, asked=asked,
                           store=store, edits=edits)  # fmt: skip


def notes_of(trajectory, phase="edit"):
    return [t.notes for t in trajectory.turns if t.notes is not None and t.notes.phase == phase]


def once(*calls):
    """Make calls in the first turn, and none in the second."""
    return lambda prompt: "" if "None yet." not in prompt.text else "".join(calls)


TASK = ledger.make_ledger(3, 8)
FIRST = replace(TASK, sessions=TASK.sessions[:1])
PLACES = {"Anna": "Oslo", "Boris": "Lima", "Carl": "Rome"}
MEMORIES = tuple(
    Memory(f"{person} reached {place}.", None, f"2024-01-0{k}", k, (f"S{k}",))
    for k, (person, place) in enumerate(PLACES.items(), 1)
)
PROBES = (Probe("p1", "Where is Anna?", ("Oslo",), 0), Probe("p2", "Where is Dora?", ("Genoa",), 0))
REFINED = Episode("refined", "", (), text="-", memories=MEMORIES, probes=PROBES)
STREAM = replace(
    REFINED,
    text=" ".join(m.text for m in MEMORIES),
    memories=(),
    sessions=tuple(
        Session(k, m.date, m.date, (Utterance(f"S{k}", "", m.text),))
        for k, m in enumerate(MEMORIES, 1)
    ),
    probes=tuple(
        Probe(f"p{k}", f"Where is {who}?", (place,), 0, (f"S{k}",))
        for k, (who, place) in enumerate(PLACES.items(), 1)
    ),
)


def editor(**settings):
    return keeper.agent(**settings)


def refiner(**settings):
    """The default, on a store that is there already."""
    own = dict(mode="refine", budget="soft", budget_entries=0, max_turns=30, max_calls=4,
               format_weight=0.05, call_tokens=200, show="relevant", templates="")  # fmt: skip
    return editor(**own | settings)


def test_sessions_are_read_in_order_with_their_dates_and_new_entries_have_them(codec):
    it = edit(codec, editor(), TASK, lambda p: create(f"{p.section[:10]} was a day."))
    prompts = [turn.prompt for turn in it.edits]
    sections = [p.section.replace("\n ", "\n") for p in prompts]  # a blank before a first word
    assert sections == [f"{s.when}\n{s.text}" for s in TASK.sessions]
    assert prompts[1].memory == f"[m1] 2024-01-01 {TASK.sessions[0].date} was a day."
    # hard budget of six entries: the seventh is refused, and the policy is told
    last = it.notes[-1].ops[-1]
    assert last["code"] == "full" and "6 of 6 memories" in last["message"]
    assert it.store.journal[1].session == 2


BAD = "<tool_call>{"
TWO_BAD = "<tool_call>{</tool_call>" + create("a")


@pytest.mark.parametrize(("settings", "says", "stop", "ops"), [
    (dict(max_turns=5), "", "no_call", 0),
    (dict(max_turns=5, max_ops=3), create("a") + create("b"), "ops", 4),  # one is not run
    (dict(max_turns=2, max_calls=1), create("a"), "turns", 2),
    (dict(max_turns=9, max_invalid=3), BAD, "invalid", 3),
    (dict(max_turns=9, max_calls=1), TWO_BAD, "invalid", 6),  # what is past the limit is not run
])  # fmt: skip
def test_why_editing_stops(codec, settings, says, stop, ops):
    agent = editor(call_tokens=400, budget="none", **settings)
    it = edit(codec, agent, FIRST, lambda p: says)
    assert [n.stop for n in it.notes] == [""] * (len(it.notes) - 1) + [stop]
    assert agent.count(FIRST, it.edits[-1])[f"stop_{stop}"] == 1
    # all stand in the journal, in order, those too that were not run
    journal = it.store.journal
    assert [op.message for op in journal] == [op["message"] for n in it.notes for op in n.ops]
    assert len(journal) == ops
    assert it.parts["valid"] == (sum(op.ok for op in journal) / ops if ops else 0)
    if stop == "ops":
        assert journal[-1].code == "too_many" and "at most 3 operations" in journal[-1].message


@pytest.mark.parametrize(("limits", "stop", "left"), [
    (dict(max_ops=2, max_turns=9), "ops", ["2", "1"]),
    (dict(max_ops=30, max_turns=2), "turns", ["8", "4"]),
])  # fmt: skip
def test_limits_are_those_of_one_piece_of_text_and_of_a_whole_refinement(codec, limits, stop, left):
    """Two sessions, the second in several pieces; each is edited up to the limit, and all read."""
    agent = editor(call_tokens=400, budget="none", templates="", chunk_tokens=32, **limits)
    first, second = TASK.sessions[:2]
    said = [*first.utterances, *second.utterances] * 3
    task, told = replace(TASK, sessions=(first, replace(second, utterances=tuple(said)))), []

    def script(prompt):
        told.append(prompt.text.partition(" operations left")[0].rpartition("; ")[2])
        return create(f"a{len(told)}")

    notes = edit(codec, agent, task, script).notes
    assert len(told) > 4 and told == left * (len(told) // 2)
    assert [n.stop for n in notes] == ["", stop] * (len(told) // 2)
    assert {n.session for n in notes[2:]} == {2}
    assert [n.stop for n in edit(codec, refiner(**limits), REFINED, script).notes] == ["", stop]


@pytest.mark.parametrize(("over", "kept"), [("center", [1, 2, 8]), ("head", [1, 2, 3])])
def test_of_more_sessions_than_are_to_be_read_the_others_are_not_asked_about(codec, over, kept):
    agent = editor(max_sections=3, over=over, budget="none", max_turns=1, answer_k=9)
    it = edit(codec, agent, TASK, lambda p: create(f"a{len(p.text)}{p.section[:10]}"))
    assert [n.session for n in it.notes] == kept
    about = [p.question for p in TASK.probes if {*p.sessions} <= {*kept}]
    assert 0 < len(about) < len(TASK.probes) and it.asked == about
    assert it.parts["unread"] == len(TASK.probes) - len(about)


UNKNOWN = call("drop_memory", memory_id="m1")
ILL_TYPED = call("manage_memory", operation="create", content=7)


@pytest.mark.parametrize(("turns", "made"), [
    ([BAD, UNKNOWN, ILL_TYPED, create("a")], 3),  # the fourth session is never read
    ([BAD, UNKNOWN + BAD, "", BAD, BAD, ILL_TYPED], 6),  # a turn without a call is none
    ([BAD, BAD, create("a") + BAD, BAD, BAD, BAD], 6),
    ([create("a"), create("a"), create("a"), create("a")], 8),  # refused as duplicates
    ([BAD, BAD, delete("m60"), BAD, BAD], 8),
])  # fmt: skip
def test_three_turns_in_a_row_without_a_call_of_the_right_form_end_the_episode(codec, turns, made):
    """In a stream of sessions with one turn each, and all probes are asked all the same."""
    said = iter(turns)
    it = edit(codec, editor(call_tokens=200), TASK, lambda p: next(said, ""))
    assert [n.stop == "invalid" for n in it.notes] == [False] * (made - 1) + [made < 8]
    assert "unread" not in it.parts and len(it.answers) == len(TASK.probes)


def test_what_did_not_fit_the_window_is_neither_asked_nor_paid_for(codec):
    """A store that grows until the window ends in the second session, which has several pieces: of
    four probes two are about later ones."""
    agent = editor(call_tokens=24, templates="", budget="none", chunk_tokens=64, turn_credit=True)
    long = replace(TASK.sessions[1], utterances=TASK.sessions[1].utterances * 20)
    probes = tuple(
        Probe(f"p{k}", f"Where is {who}?", ("Oslo",), 1, (f"S{k}",))
        for k, who in enumerate(("Boris", "Anna", "Carl", "Dora"), 1)
    )
    task = replace(TASK, sessions=(TASK.sessions[0], long, *TASK.sessions[2:4]), probes=probes)

    def script(prompt):
        first = "2024-01-01" in prompt.section
        return create("Boris reached Oslo." if first else f"It rained {len(prompt.memory)} times.")

    read = edit(codec, agent, task, script)
    assert "unread" not in read.parts and read.parts["delta"] == 1 / 4
    sizes = [len(turn.prompt_ids) for turn in read.edits]
    pieces = [notes.session for notes in read.notes]
    ends = [k for k in range(1, len(sizes)) if sizes[k] > max(sizes[:k])]
    assert {(pieces[k - 1], pieces[k]) for k in ends} == {(1, 2), (2, 2), (3, 4)}
    for k in ends:  # the first turn that does not fit
        asked = [p for p in probes if not {*p.sessions} & {*pieces[k:]}]
        it = edit(codec, agent, task, script, window=max(sizes[:k]) + 24)
        assert it.notes[-1].stop == "context" and len(it.notes) == k
        assert it.asked == [p.question for p in asked]
        assert (it.parts["unread"], it.parts["score_after"]) == (4 - len(asked), 1 / len(asked))
        # those that are not asked have gained nothing: filling the window early does not pay
        assert it.parts["delta"] == pytest.approx(1 / 4) == sum(it.notes[-1].gains)
    later = replace(task, probes=probes[3:])
    it = edit(codec, agent, later, script, window=max(sizes[: ends[0]]) + 24)
    assert it.parts["delta"] == 0 and it.edits == it.done.turns
    with pytest.raises(AssertionError, match="does not fit the model's window"):
        play(codec, agent, task, script, window=sizes[0])


def test_members_of_a_group_draw_alike_and_edit_stores_of_their_own(codec):
    places = iter(("Genoa", "Lima", "Oslo"))

    def script(prompt):
        if "None yet." not in prompt.text:
            return ""
        return call("sample_memory", k=2) + create(f"Dora reached {next(places)}.")

    done = play(codec, refiner(), REFINED, script, n=3)
    assert len({notes_of(trajectory)[0].ops[0]["message"] for trajectory in done}) == 1
    stores = [read_store(notes_of(t)[-1].store).snapshot().entries for t in done]
    assert [len(entries) for entries in stores] == [4] * 3
    assert len({entries[-1].text for entries in stores}) == 3


def test_frozen_questions_are_answered_greedily_and_known_answers_are_not_asked_again(codec):
    asked = []

    class Listening(ScriptedEngine):
        def add(self, prompt, sampling=Sampling(), seed=0):
            assert sampling.temperature == (0 if prompt.frozen else 0.7)
            asked.extend([prompt] if prompt.frozen else [])
            return ScriptedEngine.add(self, prompt, sampling, seed)

    agent = refiner()
    for k, each in enumerate((codec, Codec(keeper.make_tokenizer())), 1):  # another policy's
        engine = Listening(each, lambda p: reads(p) if p.frozen else "", per_step=1)
        agent = agent.on(each)
        list(rollout(engine, agent, [(REFINED, i) for i in range(4)], Sampling(0.7), in_flight=1))
        assert len(asked) == k * len(REFINED.probes)  # one answer to each probe


def test_the_reward_is_what_the_probes_have_won_and_its_parts(codec):
    def won(agent, task, *calls):
        it = edit(codec, agent, task, once(*calls))
        assert it.done.reward == it.parts["reward"]
        return it.parts

    dora, agent = create("Dora reached Genoa."), refiner().on(codec)
    idle = won(refiner(), REFINED)
    assert (idle["reward"], idle["valid"], idle["score_before"]) == (0, 0, 0.5)
    before = sum(agent.measure(f"[m{k}] {m.date} {m.text}") for k, m in enumerate(MEMORIES, 1))
    after = before + agent.measure("[m4] Dora reached Genoa.")
    paid, over = won(refiner(), REFINED, dora), 0.1 * (after / before - 1)
    assert paid == pytest.approx(paid | {
        "score_after": 1, "delta": 0.5, "format": 0.05, "tokens_before": before, "size": -over,
        "tokens_after": after, "compression": 0, "reward": 0.5 + 0.05 - over,
    })  # fmt: skip
    four_of_two = won(refiner(budget_entries=2), REFINED, dora)
    assert four_of_two["size"] == pytest.approx(-0.1)
    probes = (*(replace(p, category=k) for k, p in enumerate(PROBES, 1)),
              Probe("p3", "Where is Carl?", ("Rome",), 2))  # fmt: skip
    paid = won(refiner(budget="none"), replace(REFINED, probes=probes), dora, delete("m3"))
    assert (paid["delta_1"], paid["delta_2"]) == (0.0, 0.0)  # one of category 2 won, one lost
    assert paid["retained"] == 0.5 and paid["size"] == 0  # of the two that were right at the start
    paid = won(streamer(), STREAM, create("a"))
    share = paid["tokens_after"] / streamer().on(codec).source_tokens(STREAM, ())
    assert paid["compression"] == pytest.approx(0.05 * (1 - share)) and 0 < share < 1


WIPE = [delete(f"m{k}") for k in (1, 2, 3)]
SHEET = "January February 1 2 3 2023 yes no blue red Rome Lima Genoa Oslo where is reached"
EXPLOITS = {  # calls of one turn: those of section 7 of the specification, and others
    "wipe": WIPE,
    "cheat sheet": [create(SHEET)],
    "wipe, then a cheat sheet": [*WIPE, create(SHEET)],
    "question and frequent words": [create(f"Where is Dora? {SHEET}")],
    "quotes": [create("Where is Dora? Where is Anna?")],
    "invalid": ["<tool_call>{", "<tool_call>[]</tool_call>"],
    "search": [call("search_memory", query="Dora")] * 4,  # looks, and changes nothing
    "noop": [call("manage_memory", operation="noop")] * 4,
}


def streamer(**settings):
    """The default on a stream of sessions, with room for what it is given here."""
    own = dict(budget="soft", budget_entries=0, memory_budget=2.0, call_tokens=400, max_turns=4,
               format_weight=0.05, compression_weight=0.05, templates="")  # fmt: skip
    return editor(**own | settings)


def earned(codec, mode, calls, **settings):
    """Make the calls when a session is first shown, or at the start, and none in other turns;
    return the reward, its parts and the sums of the turns' gains so far."""
    agent, task = (refiner, REFINED) if mode == "refine" else (streamer, STREAM)
    if mode == "build":  # there is nothing to be wiped at the start
        calls = [c for c in calls if c not in WIPE] or calls
    seen: list[str] = []

    def script(prompt):
        section, known = str(prompt.section), [*seen]
        seen.append(section)
        return "".join(calls) if section not in known and (section or not known) else ""

    agent = agent(**settings)
    it = edit(codec, agent, task, script)
    gains = [r["gain"] for r in agent.turn_rewards(it.done) or [] if r]
    assert bool(gains) == settings["turn_credit"]
    return it.done.reward, it.parts, [*itertools.accumulate(gains)]


@pytest.mark.parametrize("turn_credit", [False, True])
@pytest.mark.parametrize("mode", ["refine", "build"])
def test_no_exploit_earns_more(codec, mode, turn_credit):
    """Than doing nothing and the term for valid calls; nor is any turn on the way paid for one."""
    own = dict(turn_credit=turn_credit)
    nothing, _, _ = earned(codec, mode, [], **own)
    for name, calls in EXPLOITS.items():
        reward, won, so_far = earned(codec, mode, calls, **own)
        assert reward <= nothing + 0.05 + 1e-9 and won["delta"] <= 0, name
        assert max(so_far, default=0) <= 0, name
        assert sum(so_far[-1:]) == pytest.approx(won["delta"] * turn_credit), name
        if mode == "refine" and calls[: len(WIPE)] == WIPE:
            assert won["score_after"] == 0 and reward < -0.4, name
    # what is known pays
    told = {"refine": [create("Dora reached Genoa.")], "build": [create("Anna reached Oslo.")]}
    assert earned(codec, mode, told[mode], **own)[0] > nothing + 0.2


def test_the_gains_of_the_turns_add_up_to_what_the_episode_has_won(codec):
    agent = refiner(turn_credit=True, max_turns=9)
    task = replace(REFINED, probes=(*PROBES, Probe("p3", "Where is Emil?", ("Paris",), 0)))
    said = iter([
        create("Where is Genoa . Dora reached Genoa."),
        create("Where is Paris . Where is Paris . Emil reached Paris."),
        call("search_memory", query="Dora"), delete("m1"),
        create("Dora met Emil. Dora met Emil. Dora met Emil. Dora met Emil."), "",
    ])  # fmt: skip
    it = edit(codec, agent, task, lambda p: next(said))
    gains = [r["gain"] for r in agent.turn_rewards(it.done) if r]
    assert len(gains) == 6 and sum(map(bool, gains)) >= 2
    assert gains[2] == gains[5] == 0  # nothing was changed
    assert it.parts["delta"] and sum(gains) == pytest.approx(it.parts["delta"])


def test_what_has_changed_an_answer_is_noted_and_shown_beside_it(codec):
    calls = create("Dora reached Genoa.") + update("m1", "Anna reached Quito.") + delete("m2")
    (done,) = play(codec, refiner(), REFINED, once(calls))
    turns = [record_turn(turn) for turn in done.turns]
    ((anna, dora),) = filter(None, (memupdate.table_of(refiner(), turn) for turn in turns))
    assert anna["before"] == "Oslo (1)" and anna["after"] == "Quito (0, -1)"
    assert anna["changed by"] == ["Updated m1 (v2)."]
    assert anna["changed entries"] == [
        "- [m1] 2024-01-01 Anna reached Oslo.", "+ [m1] 2024-01-01 Anna reached Quito."
    ]  # fmt: skip
    assert (dora["expected"], dora["before"]) == ("Genoa", "unknown (0)")
    assert dora["after"] == "Genoa (1, +1)" and dora["found after"] == ["[m4] Dora reached Genoa."]
    assert dora["changed entries"] == ["+ [m4] Dora reached Genoa."]
    labels = {line.label: line.text for turn in turns for line in refiner().lines(turn)}
    assert labels["stops"] == "no call" and "delta 0.000" in labels["worth"]
    assert labels["delete_memory"] == "Deleted m2." and labels["found"]


def test_the_memory_after_a_turn_is_what_is_stored_after_it(codec):
    """As the next prompt shows it, of a store that is shown whole."""
    rng, agent = random.Random(5), editor()
    edits = edit(codec, agent, TASK, lambda p: keeper.demonstrate(rng, p, 0.5)).edits
    records = [*map(record_turn, edits)]
    lines = memupdate.files_of(agent, records)["store.jsonl"].splitlines()
    entries = read_store(lines).snapshot().entries
    after = [agent.memory_after(record) for record in records]
    for memory, following in zip(after[:-1], edits[1:], strict=True):
        assert memory.splitlines() == [*map(str.strip, following.prompt.memory.splitlines())]
    assert len({*after}) > 3 and after[-1] == "\n".join(entry.line for entry in entries)


def test_every_part_of_the_reward_and_every_operation_is_a_column(codec):
    agent, counts = editor(), Counter()
    it = edit(codec, agent, TASK, lambda p: create("Anna left."))
    for turn in it.done.turns:
        counts.update(agent.count(TASK, turn))
    columns = {
        name: counts[above] / counts[below]
        for name, (above, below) in agent.rates.items()
        if counts[below]
    }
    shown = {name: part for name, part in it.parts.items() if name not in ("reward", "valid")}
    assert columns == pytest.approx(columns | shown)
    assert columns["op_create"] == 1 and columns["stop_turns"] == 8
    assert counts["error_duplicate"] == counts["calls"] - 1
    assert (counts["stores_after_8"], counts["edit_turns"], counts["episodes"]) == (1, 8, 1)
    question = next(ledger.make_questions(0, 1, 5))
    (done,) = play(codec, agent, question, lambda p: create("Anna left."))
    counts = agent.count(question, done.turns[-1])
    assert (counts["recall"], counts["sought"]) == (notes_of(done, "answer")[0].recall, 1)


def test_in_training_and_its_validation_every_trajectory_makes_its_own_store(codec):
    """Two questions about the same sessions, in groups of three; again, as after an update."""
    edits = []

    def script(prompt):
        if prompt.frozen:
            return reads(prompt)
        edits.append(prompt.text)
        return keeper.demonstrate(random.Random(0), prompt, 1.0)

    tasks = list(questions_of(TASK, TASK.probes))[:2]
    config = GRPOConfig(steps=2, tasks_per_step=(2,), group_size=3, without_signal="keep")
    policy, engine = random_policy(codec), ScriptedEngine(codec, script)
    source = ledger.LedgerTasks((8,), 0)
    module = GRPO(policy, engine, editor(), source, config, validation=tasks)
    for k in (1, 2):
        groups = module.sample(tasks, k)
        read = [t for group in groups for t in group.trajectories]
        assert len(read) == 6 and {t.reward for t in read} == {1.0}
        assert {len(t.turns) for t in read} == {1 + len(TASK.sessions)}
        assert module.validate() == {"score": 1.0, "n": 2}
        assert len(edits) == k * (6 + 2) * len(TASK.sessions)


@pytest.mark.parametrize(("order", "found"), [
    ("best", [5, 1, 2]), ("oldest", [2, 4, 5]), ("newest", [5, 4, 2]),
])  # fmt: skip
def test_the_entries_that_answer_and_their_order(codec, order, found):
    """Of equals the newest, but for `best`, whose equals are in the order of their ids."""
    texts = [("Ann left.", 1), ("Ann left.", 3), ("Ben left.", 9), ("Ann left.", 4),
             ("Ann and Ann left.", 5)]  # fmt: skip
    memories = [Memory(text, date=f"2024-01-0{day}") for text, day in texts]
    agent = refiner(answer_k=3, answer_order=order).on(codec)
    entries = agent.context(Store(memupdate.entries_of(memories)).snapshot(), "Ann?")
    assert [int(entry.id[1:]) for entry in entries] == found


@pytest.mark.parametrize("mode", ["build", "refine"])
def test_a_prompt_shows_what_matches_best_and_where_nothing_is_read_the_newest(codec, mode):
    again = replace(STREAM.sessions[1], number=4)
    task = replace(STREAM, sessions=(*STREAM.sessions, again), memories=MEMORIES)
    agent, told = streamer(mode=mode, show="relevant", show_k=1, max_turns=1), []

    def script(prompt):
        told.append(prompt.memory.split("]")[0])
        return create(prompt.section[-20:])

    play(codec, agent, task, script)
    assert told[-1] == {"build": "[m2", "refine": "[m3"}[mode]


def test_a_budget_below_one_entry_is_refused_before_any_step(codec, tmp_path):
    small = dict(budget_entries=0, memory_budget=0.1)
    short = Task("short", "Where is Anna?", ("Oslo",), text="Anna reached Oslo. It rained.")
    agent = editor(**small).on(codec)
    agent.check(ledger.make_ledger(0, 12))
    with pytest.raises(UserError, match="budget"):
        agent.check(short)
    editor(budget="none", budget_entries=0).on(codec).check(short)
    find.make("idle", {"memory_budget": 0.1}).on(codec).check(short)  # which stores nothing
    long = replace(short, text=short.text * 40)
    for name, tasks in (("long", [long, long]), ("short", [short, short])):
        write_eval_json(tmp_path / f"{name}.json", tasks)
    for data, validation in (("long", "short"), ("short", "")):
        run = RunConfig(
            runs=str(tmp_path), name="x", model=str(keeper.WEIGHTS), agent="memupdate",
            device="cpu", shuffle=False, data=str(tmp_path / f"{data}.json"),
            validation=validation and str(tmp_path / f"{validation}.json"),
        )  # fmt: skip
        with pytest.raises(UserError, match="budget"):
            build(run, GRPOConfig(steps=1, tasks_per_step=(2,), group_size=2), editor(**small))


@pytest.mark.parametrize("name", ["idle", "evidence"])
def test_an_agent_that_never_edits_is_not_trained(name):
    run = RunConfig(model=str(keeper.WEIGHTS), data="ledger", lengths=(6,), agent=name, name="x")
    with pytest.raises(UserError, match=f"The agent {name} makes no turn"):
        resolved(run, GRPOConfig(steps=1, tasks_per_step=(1,), group_size=2), find.make(name, {}))


@pytest.mark.parametrize(("settings", "kept"), [
    ({"budget": "none"}, 6), ({"budget_entries": 2}, 2), ({"memory_budget": 0.5}, 3),
])  # fmt: skip
def test_newest_keeps_the_latest_within_its_budget(codec, settings, kept):
    memories = tuple(Memory(f"Anna met {k} people.") for k in range(6))
    task = replace(REFINED, memories=memories, text=" ".join(m.text for m in memories) * 2)
    agent = find.make("newest", {"mode": "refine"} | settings).on(codec)
    assert [entry.text for entry in agent.start(task)] == [m.text for m in memories[-kept:]]


def test_an_ablation_takes_tools_away(codec):
    agent = editor(without=("delete_memory", "update"), call_tokens=400)
    calls = create("a") + update("m1", "b") + delete("m1")
    (first, *_) = edit(codec, agent, FIRST, lambda p: calls).notes
    assert [op["code"] for op in first.ops] == ["", "refused", "unknown_tool"]
    with pytest.raises(UserError, match="without"):
        editor(without=("drop_memory",))


def test_stores_that_begin_with_other_memories_are_not_taken_for_each_other():
    """The texts of two documents are the same, their speakers and dates are not."""
    one, two = (replace(REFINED, probes=(), beginning=name) for name in ("first", "second"))
    agent = refiner()
    assert one.document_digest == two.document_digest
    assert agent.source(one) != agent.source(two) and agent.source(one) is not None
    assert agent.source(REFINED) is None


def test_an_embedder_decides_what_is_found_in_the_very_snapshot(codec):
    query = "Where is Emil?"  # who is nowhere: words find nothing, meanings the nearest
    edits = once(create("Dora reached Genoa."), delete("m2"),
                 call("search_memory", query=query, top_k=2))  # fmt: skip
    task, replies = replace(REFINED, probes=(Probe("p", query, ("-",), 0),)), {}
    for how, embedder in (("bm25", ""), ("dense", "hash:256")):
        agent = refiner(search=how, embedder=embedder, answer_k=2, answer_order="best")
        give_embedder([agent])
        it = edit(codec, agent, task, edits)
        replies[how] = it.notes[0].ops[-1]["message"]
    embed, (answer,) = Hashes("", 256).embed, it.answers
    for side, store in (("before", Store(agent.start(task))), ("after", it.store)):
        entries = store.snapshot().entries
        cosines = embed([*map(searched, entries)]) @ embed([query], True)[0]
        order = sorted(range(len(cosines)), key=lambda i: (-round(float(cosines[i]), 6), i))
        nearest = [entries[i].line for i in order[:2]]
        assert answer[f"found_{side}"] == nearest
    assert replies["dense"].splitlines() == ["2 of 3 memories:", *nearest]
    assert replies["bm25"] == "No memory matches. 3 stored."


CHAT = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORMATS = {  # the marks that a model's template has, none of which is ever written, and its format
    "hermes": (CHAT + '{# <tool_call>{"name": NAME, "arguments": {}} #}', Format("hermes", True)),
    "xml": (CHAT + "{# <tool_call>\n<function=NAME>\n<parameter=KEY> #}", Format("xml", True)),
    "plain": (None, Format()),  # calls described in the prompt
}


def by_bytes():
    """A tokenizer that gives every text back to the last blank and line break, as XML needs it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: k for k, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


@pytest.mark.parametrize("kind", FORMATS)
def test_exactly_the_sampled_ids_are_trained_in_every_format(kind):
    """A scripted model writes calls as the format has them."""
    tokenizer = by_bytes() if kind == "xml" else keeper.make_tokenizer()
    tokenizer.chat_template, form = FORMATS[kind]
    codec, n = Codec(tokenizer), itertools.count()
    assert format_of(codec.tokenizer) == form
    agent = refiner(max_turns=3, call_tokens=400, without=("merge_memory", "split_memory"))

    def script(prompt):
        args = {"operation": "create", "content": f"Dora saw {next(n)}."}
        search = write(form, "search_memory", {"query": "Dora"})
        return "I look. " + write(form, "manage_memory", args) + search

    done = play(codec, agent, REFINED, script, n=3)
    for k, trajectory in enumerate(done):
        trajectory.reward = float(k)
        ops = [op for notes in notes_of(trajectory) for op in notes.ops]
        assert [op["tool"] for op in ops] == ["manage_memory", "search_memory"] * 3
        assert all(op["ok"] for op in ops), ops
    rows = training_rows([Group(REFINED, done)], GRPOConfig(without_signal="keep"))
    sampled = [t for d in done for t in d.turns if not t.prompt.frozen]
    assert len(sampled) == 9 and any(t.prompt.frozen for d in done for t in d.turns)
    for row, turn in zip(rows, sampled, strict=True):
        assert row.prompt_ids == turn.prompt_ids and row.response_ids == turn.response_ids
        written = codec.tokenizer.decode(turn.response_ids)
        assert "Created m" not in written and "memories:" not in written  # no reply
        assert turn.response_ids[-1] == codec.tokenizer.eos_token_id
    # the answers of the frozen policy are no part of what the step's metrics describe
    metrics = describe([Group(REFINED, done)], {})
    assert metrics["written_tokens"] == sum(len(t.response_ids) for t in sampled)
