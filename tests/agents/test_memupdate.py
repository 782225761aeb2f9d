"""The agent that edits a store: what is sampled, when it stops, what it is paid, who is asked."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import random_policy
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import models.embedder as embedders
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
from eval import Conditions, evaluate
from grpo import GRPO, training_rows
from memagent import Finish, Group, Turn
from models.logprobs import logprobs, pack
from report.metrics import describe
from report.records import record_turn
from report.rows import Cell
from rollout import Sampling, rollout
from suites import ledger
from tasks.conversations import Memory, Probe, Session, Utterance
from tasks.episodes import Episode, questions_of
from tokens.codec import Codec


@pytest.fixture(scope="module")
def codec():
    return Codec(keeper.make_tokenizer())


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def create(text):
    return call("manage_memory", operation="create", content=text)


def reads(prompt):
    """Answer as a reader of the memories would: the place of the first entry about the person."""
    question = next(piece for piece, constant in prompt.pieces[::-1] if not constant)
    return keeper.answer(question, prompt.memory)


def reading(script):
    """Frozen prompts are answered from the memories they show."""
    return lambda prompt: reads(prompt) if prompt.frozen else script(prompt)


def play(codec, agent, task, script, n=1):
    """Run an agent on scripted calls."""
    engine = ScriptedEngine(codec, reading(script), per_step=3)
    done = list(rollout(engine, agent, [(task, k) for k in range(n)]))
    for trajectory in done:
        assert not trajectory.error, trajectory.error
        trajectory.reward = agent.reward(trajectory)
    return sorted(done, key=lambda t: t.sample)


def noted(trajectory, phase="edit"):
    return [t.notes for t in trajectory.turns if t.notes is not None and t.notes.phase == phase]


def parts(trajectory):
    return next(n.parts for n in noted(trajectory)[::-1] if n.parts)


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
PROBES = (
    Probe("p1", "Where is Anna?", ("Oslo",), 0),
    Probe("p2", "Where is Dora?", ("Genoa",), 0),
)
REFINED = Episode("refined", "", (), text="-", memories=MEMORIES, probes=PROBES)


def editor(**settings):
    return keeper.agent(**settings)


def refiner(**settings):
    """The default, on a store that is there already."""
    own = dict(mode="refine", budget="soft", budget_entries=0, max_turns=30, max_calls=4,
               format_weight=0.05, call_tokens=200, show="relevant", templates="")  # fmt: skip
    return editor(**own | settings)


# ---------------------------------------------------------------- episodes


def test_a_perfect_editor_is_right_about_everybody(codec):
    rng = random.Random(0)
    for k in range(8):
        task = ledger.make_ledger(k, 12)
        (done,) = play(codec, editor(), task, lambda p: keeper.demonstrate(rng, p, 1.0))
        won = parts(done)
        assert (won["score_before"], won["score_after"], won["valid"]) == (0, 1, 1)
        assert noted(done)[-1].entries <= keeper.ENTRIES


def test_sessions_are_read_in_order_with_their_dates_and_new_entries_have_them(codec):
    (done,) = play(codec, editor(), TASK, lambda p: create(f"{p.section[:10]} was a day."))
    prompts = [turn.prompt for turn in done.turns if not turn.prompt.frozen]
    sections = [p.section.replace("\n ", "\n") for p in prompts]  # a blank before a first word
    assert sections == [f"{s.when}\n{s.text}" for s in TASK.sessions]
    assert prompts[1].memory == f"[m1] 2024-01-01 {TASK.sessions[0].date} was a day."
    # hard budget of six entries: the seventh is refused, and the policy is told
    last = noted(done)[-1]
    assert last.ops[-1]["code"] == "full" and "6 of 6 memories" in last.ops[-1]["message"]


@pytest.mark.parametrize(("settings", "says", "stop", "ops"), [
    (dict(max_turns=5), "", "no_call", 0),
    (dict(max_turns=5, max_ops=3), create("a") + create("b"), "ops", 4),  # one is not run
    (dict(max_turns=2, max_calls=1), create("a"), "turns", 2),
    (dict(max_turns=9, max_invalid=3), "<tool_call>{", "invalid", 3),
    # what is past the limit is not run, whatever its form
    (dict(max_turns=9, max_calls=1), "<tool_call>{</tool_call>" + create("a"), "invalid", 6),
])  # fmt: skip
def test_why_editing_stops(codec, settings, says, stop, ops):
    agent = editor(call_tokens=400, budget="none", **settings)
    (done,) = play(codec, agent, FIRST, lambda p: says)
    notes = noted(done)
    assert [n.stop for n in notes][-1] == stop and not any(n.stop for n in notes[:-1])
    assert sum(len(n.ops) for n in notes) == ops
    assert agent.count(FIRST, done.turns[len(notes) - 1])[f"stop_{stop}"] == 1
    # all stand in the journal, in order, those too that were not run
    journal = Store.from_lines(notes[-1].store, "the record").journal
    assert [op.message for op in journal] == [op["message"] for n in notes for op in n.ops]
    assert parts(done)["valid"] == (sum(op.ok for op in journal) / ops if ops else 0)
    if stop == "ops":
        assert journal[-1].code == "too_many" and "at most 3 operations" in journal[-1].message


@pytest.mark.parametrize("limit", ["ops", "turns"])
def test_the_limits_are_those_of_one_piece_of_text_and_of_a_whole_refinement(codec, limit):
    """Two sessions, the second in several pieces; each is edited up to the limit, and all read."""
    own = dict(max_ops=2, max_turns=9) if limit == "ops" else dict(max_ops=30, max_turns=2)
    agent = editor(call_tokens=400, budget="none", templates="", chunk_tokens=32, **own)
    first, second = TASK.sessions[:2]
    said = [*first.utterances, *second.utterances] * 3
    task = replace(TASK, sessions=(first, replace(second, utterances=tuple(said))))
    told = []

    def script(prompt):
        told.append((str(prompt.section), prompt.text))
        return create(f"a{len(told)}")

    (done,) = play(codec, agent, task, script)
    pieces = list(dict.fromkeys(section for section, _ in told))
    assert len(pieces) == 3 and len(told) == 2 * len(pieces)
    notes = noted(done)
    assert [n.stop for n in notes] == ["", limit] * len(pieces)
    assert {n.session for n in notes[2:]} == {2}
    left = [text.partition(" operations left")[0].rpartition("; ")[2] for _, text in told]
    full, after = {"ops": ("2", "1"), "turns": ("8", "4")}[limit]
    assert left == [full, after] * len(pieces)
    (done,) = play(codec, refiner(**own), REFINED, script)
    assert [n.stop for n in noted(done)] == ["", limit]


@pytest.mark.parametrize(("over", "kept"), [("center", [1, 2, 8]), ("head", [1, 2, 3])])
def test_of_more_sessions_than_are_to_be_read_the_others_are_not_asked_about(codec, over, kept):
    agent = editor(max_sections=3, over=over, budget="none", max_turns=1, answer_k=9)
    (done,) = play(codec, agent, TASK, lambda p: create(f"a{len(p.text)}{p.section[:10]}"))
    assert [n.session for n in noted(done)] == kept
    about = [p.question for p in TASK.probes if {*p.sessions} <= {*kept}]
    assert 0 < len(about) < len(TASK.probes)
    assert [a["question"] for a in noted(done)[-1].answers] == about
    assert parts(done)["unread"] == len(TASK.probes) - len(about)


BAD = "<tool_call>{"
UNKNOWN = call("drop_memory", memory_id="m1")
ILL_TYPED = call("manage_memory", operation="create", content=7)


@pytest.mark.parametrize(("turns", "made"), [
    ([BAD, UNKNOWN, ILL_TYPED, create("a")], 3),  # the fourth session is never read
    ([BAD, UNKNOWN + BAD, "", BAD, BAD, ILL_TYPED], 6),  # a turn without a call is none
    ([BAD, BAD, create("a") + BAD, BAD, BAD, BAD], 6),
    ([create("a"), create("a"), create("a"), create("a")], 8),  # refused as duplicates
    ([BAD, BAD, call("delete_memory", memory_id="m60"), BAD, BAD], 8),
])  # fmt: skip
def test_three_turns_in_a_row_without_a_call_of_the_right_form_end_the_episode(codec, turns, made):
    """In a stream of sessions with one turn each, and all probes are asked all the same."""
    said = iter(turns)
    (done,) = play(codec, editor(call_tokens=200), TASK, lambda p: next(said, ""))
    notes = noted(done)
    assert len(notes) == made
    assert [n.stop == "invalid" for n in notes] == [False] * (made - 1) + [made < 8]
    assert "unread" not in parts(done) and len(notes[-1].answers) == len(TASK.probes)


def test_what_did_not_fit_the_window_is_neither_asked_nor_paid_for(codec):
    """A store that grows until the window ends in the fourth session: of five probes two are about
    later ones, and one about the session whose third piece was not shown."""
    agent = editor(call_tokens=24, templates="", budget="none", chunk_tokens=64)
    long = replace(TASK.sessions[3], utterances=TASK.sessions[3].utterances * 20)
    probes = tuple(
        Probe(f"p{k}", f"Where is {who}?", ("Oslo",), 1, (f"S{k}",))
        for k, who in enumerate(("Anna", "Boris", "Carl", "Dora", "Emil"), 2)
    )
    sessions = (*TASK.sessions[:3], long, *TASK.sessions[4:])
    task = replace(TASK, sessions=sessions, probes=probes)

    def script(prompt):
        third = "2024-01-03" in prompt.section
        return create("Boris reached Oslo." if third else f"It rained {len(prompt.memory)} times.")

    engine = ScriptedEngine(codec, reading(script))
    seen, on = [], agent.on(codec)
    steps = on.run(task)
    prompt = next(steps)
    while not prompt.frozen:  # what an episode without a window is shown
        seen.append(len(prompt.ids(codec)))
        ids = codec.encode(script(prompt))
        prompt = steps.send(
            Turn(prompt, prompt.ids(codec), ids, [0.0] * len(ids), Finish.STOP, codec.decode(ids))
        )
    assert max(seen[:5]) == seen[4] < seen[5]
    (read,) = rollout(engine, agent, [(task, 0)])
    engine.window = seen[4] + 24  # up to the second piece of the fourth session
    (done,) = rollout(engine, agent, [(task, 0)])
    notes, won = noted(done), parts(done)
    assert not done.error and notes[-1].stop == "context" and len(notes) < len(seen)
    assert notes[-1].session == 4
    assert [a["question"] for a in notes[-1].answers] == ["Where is Anna?", "Where is Boris?"]
    assert (won["unread"], won["score_after"], won["delta_1"]) == (3, 0.5, 0.5)
    # those that are not asked have gained nothing: filling the window early pays less, not more
    assert "unread" not in parts(read) and len(noted(read)[-1].answers) == 5
    assert won["delta"] == pytest.approx(0.5 * 2 / 5) and parts(read)["delta"] >= won["delta"]
    none = replace(task, probes=probes[2:])
    for credit in (False, True):
        agent = agent.with_settings(turn_credit=credit)
        (done,) = rollout(engine, agent, [(none, 0)])
        assert not done.error and parts(done)["unread"] == 3 and parts(done)["delta"] == 0
        assert not any(t.prompt.frozen for t in done.turns)
        assert {*noted(done)[-1].gains} == ({0.0} if credit else set())
    engine.window = seen[0] - 1
    (refused,) = rollout(engine, agent, [(task, 0)])
    assert "does not fit the model's window" in refused.error


def test_members_of_a_group_draw_alike_and_edit_stores_of_their_own(codec):
    places = iter(("Genoa", "Lima", "Oslo"))

    def script(prompt):
        if "None yet." not in prompt.text:
            return ""
        return call("sample_memory", k=2) + create(f"Dora reached {next(places)}.")

    notes = [noted(trajectory) for trajectory in play(codec, refiner(), REFINED, script, n=3)]
    assert len({first.ops[0]["message"] for first, _ in notes}) == 1
    stores = [Store.from_lines(last.store, "the notes").snapshot().entries for _, last in notes]
    assert [len(entries) for entries in stores] == [4] * 3
    assert len({entries[-1].text for entries in stores}) == 3


def test_frozen_questions_are_answered_greedily_and_known_answers_are_not_asked_again(codec):
    asked = []

    class Listening(ScriptedEngine):
        def add(self, prompt, sampling=Sampling(), seed=0):
            assert sampling.temperature == (0 if prompt.frozen else 0.7)
            asked.extend([prompt] if prompt.frozen else [])
            return ScriptedEngine.add(self, prompt, sampling, seed)

    engine, agent = Listening(codec, reading(lambda p: ""), per_step=1), refiner().on(codec, None)
    list(rollout(engine, agent, [(REFINED, k) for k in range(4)], Sampling(0.7), in_flight=1))
    assert len(asked) == len(REFINED.probes)  # nothing was changed: one answer to each probe


def test_another_codec_begins_without_the_answers_of_the_first(codec):
    agent = refiner()
    for each in (codec, Codec(keeper.make_tokenizer())):
        (done,) = play(each, agent, REFINED, lambda p: "")
        assert len(noted(done, "probe")) == len(REFINED.probes)


# ---------------------------------------------------------------- rewards


def test_the_reward_is_what_the_probes_have_won_and_its_parts(codec):
    (idle,) = play(codec, refiner(), REFINED, lambda p: "")
    assert idle.reward == 0 and (parts(idle)["valid"], parts(idle)["score_before"]) == (0, 0.5)
    (done,) = play(codec, refiner(), REFINED, once(create("Dora reached Genoa.")))
    won, agent = parts(done), refiner().on(codec)
    before = agent.tokens_of(Store(memupdate.entries_of(MEMORIES)).snapshot())
    after = before + agent.measure("[m4] Dora reached Genoa.")
    over = 0.1 * (after / before - 1)
    assert (won["score_after"], won["delta"], won["format"]) == (1.0, 0.5, 0.05)
    assert (won["tokens_before"], won["tokens_after"]) == (before, after)
    assert won["size"] == pytest.approx(-over) and won["compression"] == 0
    assert done.reward == won["reward"] == pytest.approx(0.5 + 0.05 - over)
    probes = (*(replace(p, category=k) for k, p in enumerate(PROBES, 1)),
              Probe("p3", "Where is Carl?", ("Rome",), 2))  # fmt: skip
    calls = create("Dora reached Genoa.") + call("delete_memory", memory_id="m3")
    (done,) = play(codec, refiner(budget="none"), replace(REFINED, probes=probes), once(calls))
    won = parts(done)
    assert (won["delta_1"], won["delta_2"]) == (0.0, 0.0)  # one of category 2 won, one lost
    assert won["retained"] == 0.5 and won["size"] == 0  # of the two that were right at the start


WIPE = [call("delete_memory", memory_id=f"m{k}") for k in (1, 2, 3)]
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


STREAM = replace(
    REFINED,
    id="stream",
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
    (done,) = play(codec, agent, task, script)
    gains = [r["gain"] for r in agent.turn_rewards(done) or [] if r]
    assert bool(gains) == settings["turn_credit"]
    return agent.reward(done), parts(done), [*itertools.accumulate(gains)]


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
        call("search_memory", query="Dora"), call("delete_memory", memory_id="m1"),
        create("Dora met Emil. Dora met Emil. Dora met Emil. Dora met Emil."), "",
    ])  # fmt: skip
    (done,) = play(codec, agent, task, lambda p: next(said))
    won, gains = parts(done), [r["gain"] for r in agent.turn_rewards(done) if r]
    assert len(gains) == 6 and sum(map(bool, gains)) >= 2
    assert gains[2] == gains[5] == 0  # nothing was changed
    assert won["delta"] and sum(gains) == pytest.approx(won["delta"])


# ---------------------------------------------------------------- what is shown


def test_what_has_changed_an_answer_is_noted_beside_it(codec):
    """And shown, with what an update has replaced."""
    calls = create("Dora reached Genoa.") + call("delete_memory", memory_id="m2")
    (done,) = play(codec, refiner(), REFINED, once(calls))
    anna, dora = noted(done)[-1].answers
    assert (anna["before"], anna["after"], anna["won"]) == ("Oslo", "Oslo", 0.0)
    assert anna["found_before"] == anna["found_after"] and not anna["caused"]
    assert (dora["expected"], dora["before"], dora["after"]) == ("Genoa", "unknown", "Genoa")
    assert (dora["won"], dora["score_before"], dora["score_after"]) == (1.0, 0.0, 1.0)
    assert noted(done)[0].ops[0]["message"] in dora["caused"]
    assert "+ [m4] Dora reached Genoa." in dora["entries"] and anna["entries"] == []
    calls = call("manage_memory", operation="update", content="Anna reached Quito.", memory_id="m1")
    (done,) = play(codec, refiner(), REFINED, once(calls))
    turns = [record_turn(turn) for turn in done.turns]
    ((anna, dora),) = filter(None, (memupdate.table_of(refiner(), turn) for turn in turns))
    assert anna["before"] == "Oslo (1)" and anna["after"] == "Quito (0, -1)"
    assert anna["changed by"] == ["Updated m1 (v2)."]
    assert anna["changed entries"] == [
        "- [m1] 2024-01-01 Anna reached Oslo.", "+ [m1] 2024-01-01 Anna reached Quito."
    ]  # fmt: skip
    assert dora["before"] == "unknown (0)" and dora["after"] == "unknown (0, +0)"
    labels = {line.label: line.text for turn in turns for line in refiner().lines(turn)}
    assert labels["stops"] == "no call" and "delta -0.500" in labels["worth"]
    assert labels["manage_memory"] == "Updated m1 (v2)."


def test_the_memory_after_a_turn_is_what_is_stored_after_it(codec):
    """As the next prompt shows it, of a store that is shown whole."""
    rng, agent = random.Random(5), editor()
    (done,) = play(codec, agent, TASK, lambda p: keeper.demonstrate(rng, p, 0.5))
    edits = [turn for turn in done.turns if not turn.prompt.frozen]
    records = [*map(record_turn, edits)]
    lines = memupdate.files_of(agent, records)["store.jsonl"].splitlines()
    stored = [*Store.from_lines(lines, "the record").snapshot().entries]
    after = [agent.memory_after(record) for record in records]
    for made, following in itertools.pairwise([*zip(after, edits, strict=True)]):
        shown = [line.strip() for line in following[1].prompt.memory.splitlines()]
        assert made[0].splitlines() == shown
    assert len({*after}) > 3 and after[-1] == "\n".join(e.line for e in stored)


def test_every_part_of_the_reward_and_every_operation_is_a_column(codec):
    agent = editor()
    (done,) = play(codec, agent, TASK, lambda p: create("Anna left."))
    counts = Counter()
    for turn in done.turns:
        counts.update(agent.count(TASK, turn))
    rates = {name: pair for name, pair in agent.rates.items() if counts[pair[1]]}
    columns = {name: counts[above] / counts[below] for name, (above, below) in rates.items()}
    for name, value in parts(done).items():
        if name not in ("reward", "valid"):
            assert columns[name] == pytest.approx(value), name
    assert columns["op_create"] >= 1 and counts["error_duplicate"] == counts["calls"] - 1
    assert sum(columns[f"stop_{why}"] for why in memupdate.STOPS) >= 1
    assert (counts["stores_after_8"], counts["edit_turns"], counts["episodes"]) == (1, 8, 1)


# ---------------------------------------------------------------- questions


class Reader:
    """Edits as the careful demonstrator does, and counts the sections that are read."""

    def __init__(self):
        self.edits = []

    def __call__(self, prompt):
        if prompt.frozen:
            return reads(prompt)
        self.edits.append(prompt.text)
        return keeper.demonstrate(random.Random(0), prompt, 1.0)


def evaluated(codec, path, tasks, agent, script, temperature=0.0, samples=1):
    engine, cell = ScriptedEngine(codec, script), Cell("a", "ledger", "", 8)
    conditions = Conditions(samples=samples)
    return evaluate(engine, agent, tasks, Sampling(temperature), cell, path, conditions)


def test_in_an_evaluation_a_store_serves_all_questions_about_its_sessions(codec, tmp_path):
    """Each sample has its own, and in a second evaluation nothing of the first is left."""
    tasks, script, agent = list(questions_of(TASK, TASK.probes)), Reader(), editor()
    for k in (1, 2):
        rows = evaluated(codec, tmp_path / f"rows-{k}", tasks, agent, script)
        assert len(script.edits) == k * len(TASK.sessions)  # read once
    assert [row["reward"] for row in rows] == [1.0] * len(tasks)
    assert [row["model_calls"] for row in rows] == [1 + len(TASK.sessions), *[1] * (len(tasks) - 1)]
    script = Reader()
    rows = evaluated(codec, tmp_path / "rows", tasks[:3], editor(), script, 1.0, samples=2)
    assert len(script.edits) == 2 * len(TASK.sessions) and len(rows) == 3 * 2


def test_in_training_and_its_validation_every_trajectory_makes_its_own_store(codec):
    """Tasks without probes: of two questions about the same sessions, in groups of three; then
    again, as after an update of the weights."""
    tasks, script = list(questions_of(TASK, TASK.probes))[:2], Reader()
    module = GRPO(
        random_policy(codec),
        ScriptedEngine(codec, script),
        editor(),
        ledger.LedgerTasks((8,), 0),
        GRPOConfig(steps=2, tasks_per_step=(2,), group_size=3, without_signal="keep"),
        validation=tasks,
    )
    for k in (1, 2):
        groups = module.sample_groups(tasks, k)
        assert [len(g.trajectories) for g in groups] == [3, 3]
        assert all(t.reward == 1.0 and len(t.turns) == 1 + len(TASK.sessions)
                   for g in groups for t in g.trajectories)  # fmt: skip
        assert len(script.edits) == 6 * k * len(TASK.sessions)
    script.edits.clear()
    for k in (1, 2):
        assert module.validate() == {"score": 1.0, "n": 2}
        assert len(script.edits) == 2 * k * len(TASK.sessions)


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


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("data", "validation"), [("long", "short"), ("one_short", "")])
def test_a_training_refuses_a_budget_below_one_entry_before_any_step(tmp_path, data, validation):
    """In the validation, and in the last task of the first step."""
    own = tmp_path / "own.py"
    own.write_text(
        "from data import Task\n"
        "def task(name, n):\n"
        "    return Task(name, 'Where is Anna?', ('Oslo',), text='Anna reached Oslo. ' * n)\n"
        "def long(): return [task('a', 40), task('b', 40)]\n"
        "def one_short(): return [task('a', 40), task('b', 1)]\n"
        "def short(): return [task('c', 1)]\n"
    )
    run = RunConfig(
        runs=str(tmp_path), name="x", model=str(keeper.WEIGHTS), agent="memupdate", device="cpu",
        data=f"{own}:{data}", validation=validation and f"{own}:{validation}", shuffle=False,
    )  # fmt: skip
    config = GRPOConfig(steps=1, tasks_per_step=(2,), group_size=2)
    with pytest.raises(UserError, match="tokens holds no entry"):
        build(run, config, editor(budget_entries=0, memory_budget=0.1))


def test_a_budget_below_one_entry_is_refused_by_the_agent_of_any_task(codec):
    short = Task("short", "Where is Anna?", ("Oslo",), text="Anna reached Oslo. It rained.")
    agent = editor(budget_entries=0, memory_budget=0.1).on(codec)
    agent.check(ledger.make_ledger(0, 12))
    with pytest.raises(UserError, match=r"budget of \d tokens holds no entry: give a larger"):
        agent.check(short)
    editor(budget="none", budget_entries=0).on(codec).check(short)
    find.make("idle", {"memory_budget": 0.1}).on(codec).check(short)  # which stores nothing
    with pytest.raises(UserError, match="without"):
        editor(without=("drop_memory",))


@pytest.mark.parametrize("name", ["idle", "facts", "newest", "evidence"])
def test_an_agent_without_a_turn_that_could_be_trained_is_not_trained(name, codec):
    config = GRPOConfig(steps=1, tasks_per_step=(1,), group_size=2)
    agent = find.make(name, {"search": "dense", "embedder": "hash:256"})
    run = RunConfig(model=str(keeper.WEIGHTS), data="ledger", lengths=(6,), agent=name, name="x")
    with pytest.raises(UserError, match=f"The agent {name} makes no turn that could be trained"):
        resolved(run, config, agent)
    give_embedder([agent])
    (done,) = rollout(ScriptedEngine(codec, reads), agent, [(REFINED, 0)])  # nor is it a traceback
    assert f"The agent {name} made no turn" in done.error
    assert not find.find(name).trains and find.find("memupdate").trains


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
    update = call("manage_memory", operation="update", content="b", memory_id="m1")
    says = create("a") + update + call("delete_memory", memory_id="m1")
    (done,) = play(codec, agent, FIRST, lambda p: says)
    assert [op["code"] for op in noted(done)[0].ops] == ["", "refused", "unknown_tool"]


def test_stores_that_begin_with_other_memories_are_not_taken_for_each_other():
    """The texts of two documents are the same, their speakers and dates are not."""
    one, two = (replace(REFINED, probes=(), beginning=name) for name in ("first", "second"))
    agent = refiner()
    assert one.document_digest == two.document_digest
    assert agent.source(one) != agent.source(two) and agent.source(one) is not None
    assert agent.source(REFINED) is None


# ---------------------------------------------------------------- embedders


def ranked(snapshot, question):
    """Rank entries by the cosines of their embeddings, in the obvious way."""
    entries, embedder = snapshot.entries, embedders.embedder_of("hash:256")
    cosines = embedder.embed([*map(searched, entries)]) @ embedder.embed([question], True)[0]
    order = sorted(range(len(entries)), key=lambda i: (-round(float(cosines[i]), 6), i))
    return [entries[i].line for i in order]


def test_an_embedder_decides_what_is_found_in_the_very_snapshot(codec):
    edits = once(create("Dora reached Genoa."), call("delete_memory", memory_id="m2"),
                 call("search_memory", query="Where is Emil?", top_k=2))  # fmt: skip
    found = {}
    for how, embedder in (("bm25", ""), ("dense", "hash:256")):
        agent = refiner(search=how, embedder=embedder, answer_k=2, answer_order="best")
        give_embedder([agent])
        (done,) = play(codec, agent, REFINED, edits)
        found[how] = noted(done)[-1].answers, noted(done)[0].ops[-1]["message"]
    store = Store.from_lines(noted(done)[-1].store, "the notes")
    states = store.at(0), store.snapshot()
    for k, probe in enumerate(REFINED.probes):
        for which, state in zip(("found_before", "found_after"), states, strict=True):
            assert found["dense"][0][k][which] == ranked(state, probe.question)[:2]
    # of somebody who is nowhere words find nothing, meanings the nearest; and so do the tools
    assert not found["bm25"][0][1]["found_before"]
    nearest = ranked(states[1], "Where is Emil?")[:2]
    assert found["dense"][1].splitlines() == ["2 of 3 memories:", *nearest]
    assert found["bm25"][1] == "No memory matches. 3 stored."


def test_texts_that_an_embedder_has_cut_are_counted_with_the_search(codec, monkeypatch):
    monkeypatch.setattr(
        embedders._Hashed, "cut", lambda self, texts, query=False: [True for _ in texts]
    )
    task = next(ledger.make_questions(0, 1, 5))
    for how, embedder in (("bm25", ""), ("dense", "hash:64")):
        agent = editor(search=how, embedder=embedder)
        give_embedder([agent])
        (done,) = play(codec, agent, task, lambda prompt: create("Anna left."))
        (asked,) = noted(done, "answer")
        # all entries, and the question
        assert asked.entries and asked.search_cut == (asked.entries + 1 if embedder else 0)
        counts = agent.count(task, done.turns[-1])
        assert counts["search_cut"] == asked.search_cut
        assert (counts["recall"], counts["sought"]) == (asked.recall, 1)


# ---------------------------------------------------------------- what is trained

NO_TOOLS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}" + NO_TOOLS
FORMATS = {  # the marks that a model's template has, none of which is ever written, and its format
    "hermes": (CHAT + '{# <tool_call>{"name": NAME, "arguments": {}} #}', Format("hermes", True)),
    "xml": (CHAT + "{# <tool_call>\n<function=NAME>\n<parameter=KEY> #}", Format("xml", True)),
    "bare": (CHAT + '{# {"name": NAME, "parameters": {}} #}', Format("bare", True)),
    "chat": (NO_TOOLS, Format()),  # roles, and calls described in the prompt
    "plain": (None, Format()),  # neither
}
OTHERS = ("delete_memory", "sample_memory", "merge_memory", "split_memory")


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
    codec = Codec(tokenizer)
    assert format_of(codec.tokenizer) == form
    agent, n = refiner(max_turns=3, call_tokens=400, without=OTHERS).on(codec), itertools.count()

    def write(prompt):
        args = {"operation": "create", "content": f"Dora saw {next(n)}."}
        return "I look. " + form.write("manage_memory", args) + form.write(
            "search_memory", {"query": "Dora"}
        )  # fmt: skip

    done = play(codec, agent, REFINED, write, n=3)
    for k, trajectory in enumerate(done):
        trajectory.reward = float(k)
        ops = [op for notes in noted(trajectory) for op in notes.ops]
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
    if kind != "hermes":  # of texts that differ as much as any
        return
    # in the packed batch, too: the log-probs are those of these very tokens, one turn at a time
    policy, rows = random_policy(codec), rows[:3]
    (batch,) = pack(rows, 1 << 20)
    alone = []
    for row in (rows[i] for i in batch.index):
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        scores = policy(ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        alone.append(scores.gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0])
    assert torch.allclose(logprobs(policy, batch), torch.cat(alone), atol=1e-5)
