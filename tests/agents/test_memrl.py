"""MemRL: what is shown, what is kept, what a group teaches; all with scripted answers."""

import copy
from types import SimpleNamespace

import pytest

from agents.bank import Bank
from agents.memrl import ARMS, CONSTANTS, FAILURES, SHOWN, SUCCESSES, MemRL, MemRLConfig, Tried
from config.errors import UserError
from config.options import GRPOConfig
from data import Task
from engines.scripted import ScriptedEngine
from grpo import training_rows
from memagent import Group, MemAgent
from report.reading import row_of
from report.records import record
from report.rows import Cell
from report.transcripts import end_of, steps_of
from rollout import Sampling, rollout
from tasks.environments import Environment, Episode, Step, Work
from tokens.codec import Characters

STEPS = 3


class Counting(Environment):
    """Tasks that are solved by the action "yes" within three steps."""

    name, most_steps = "counting", STEPS
    instructions = "Say yes."
    open = 0

    def tasks(self):
        return [self.task(k) for k in range(4)]

    def task(self, k):
        return Work(f"t{k}", f"task {k}", (), text="", environment=self, solution=("yes",))

    def intent(self, id):
        return f"task {id[1:]} to be done"

    def reset(self, id):
        self.open += 1
        if id == "t99":
            raise UserError("t99 cannot be begun.")
        return Try(self, f"task {id[1:]}")

    def close(self): ...


class Try(Episode):
    def __init__(self, world, observation):
        self.world, self.observation, self.closed = world, observation, False

    def step(self, action):
        if action == "crash":
            return Step("It crashed.", True, -1.0, "crashed")
        right, done = action == "yes", action in ("yes", "no")
        return Step(f"You said {action}.", done, 1.0 if right else -1.0)

    def close(self):
        if not self.closed:
            self.closed, self.world.open = True, self.world.open - 1


DOCUMENT = Task("d", "Where is Anna?", ("Oslo",), text="Anna went to Oslo. " * 20)
OSLO = "\\boxed{Oslo}"


def agent(**settings) -> MemRL:
    return MemRL(MemRLConfig(**({"delta": 0.0} | settings)))


def filled(**settings):
    """An agent that knows a success and a failure."""
    reader = agent(**settings)
    bank = reader.opened()
    bank.write("task 5 to be done", "how 5 went", success=True, task_id="t5")
    bank.write("task 6 to be done", "how 6 went", success=False, task_id="t6")
    return reader


def knowing(intent, experience, **settings):
    reader = agent(**settings)
    reader.opened().write(intent, experience, success=True, task_id="x")
    return reader


def tried(reader, *said, task=0, sample=0, lesson="do it well", window=None):
    """Try a task, or the so-manyth one of `Counting`, with these actions in turn, and one lesson:
    the trajectory, its notes, the prompts and their texts, the world."""
    prompts, world = [], Counting()

    def script(prompt):
        prompts.append(prompt)
        if "Steps:" in prompt.text or "Reflection:" in prompt.text:
            return lesson
        depth, turn = 0, prompt.after
        while turn is not None:
            depth, turn = depth + 1, turn.prompt.after
        return said[min(depth, len(said) - 1)]

    engine = ScriptedEngine(Characters(), script)
    engine.window = window
    task = world.task(task) if isinstance(task, int) else task
    (done,) = rollout(engine, reader, [(task, sample)], Sampling(0.0))
    notes = reader.tried(done) if isinstance(reader, MemRL) else None
    texts = [prompt.text for prompt in prompts]
    return SimpleNamespace(done=done, notes=notes, prompts=prompts, texts=texts, world=world)


def learn(reader, *said, **how):
    reader.learn([reader.lesson([tried(reader, *said, **how).done])])


def test_a_task_is_worked_on_until_it_is_done_and_leaves_a_script():
    it = tried(reader := agent(), "perhaps", "yes", task=1)
    (first, act, lesson), notes = it.done.turns, it.notes
    assert (notes.success, notes.reward, notes.steps, notes.failure) == (True, 1.0, 2, "")
    assert act.prompt.after is first and act.prompt.text == "You said perhaps."
    assert act.trained and not lesson.trained and it.world.open == 0
    assert "Steps:" in lesson.prompt.text
    assert notes.kind == "script" and notes.experience == (
        "Task: task 1\nScript: do it well\nAction: perhaps\nResult: You said perhaps.\n"
        "Action: yes\nResult: You said yes."
    )
    assert reader.reward(it.done) == 1.0 and notes.intent == "task 1 to be done"


@pytest.mark.parametrize(("said", "failure", "steps"), [
    ("perhaps", "steps", 3), ("no", "", 1), ("crash", "crashed", 1),
])  # fmt: skip
def test_what_is_not_solved_leaves_a_reflection(said, failure, steps):
    it = tried(agent(), said)
    notes = it.notes
    assert (notes.success, notes.failure, notes.steps) == (False, failure, steps)
    assert (notes.reward, notes.kind) == (-1.0, "reflection")
    assert "Reflection: " in notes.experience and "Reflection:" in it.texts[-1]


@pytest.mark.parametrize("most", [2, 0])
def test_what_was_done_without_an_answer_is_judged_where_it_can_be(monkeypatch, most):
    monkeypatch.setattr(Try, "give_up", lambda self, failure: Step(failure, True, 1.0))
    it = tried(agent(max_steps=most), "perhaps")
    assert (it.notes.success, it.notes.reward, it.notes.failure) == (True, 1.0, "")
    assert it.world.open == 0


@pytest.mark.parametrize(("most", "told"), [(2, True), (STEPS, False), (0, False), (9, False)])
def test_the_limit_of_responses_is_the_one_that_is_told(most, told):
    it = tried(agent(max_steps=most), "perhaps")
    assert ("you have 2 responses in all" in it.texts[0]) is told and "Say yes." in it.texts[0]
    assert it.notes.steps == min(most or STEPS, STEPS)


def test_the_window_ends_a_task():
    reader, said = agent(act_tokens=100), "perhaps " * 10
    it = tried(reader, said, window=150)  # one action; neither a second nor the lesson fits
    assert (it.notes.failure, it.notes.steps, it.world.open) == ("window", 1, 0)
    assert "Reflection" not in it.notes.experience and "perhaps" in it.notes.experience
    it = tried(reader, said, window=100)
    assert "window" in it.done.error and it.world.open == 0


@pytest.mark.parametrize(("settings", "solved", "kind"), [
    (dict(build="trajectory"), True, "trajectory"), (dict(build="script"), True, "script"),
    (dict(update="validation"), False, ""), (dict(update="validation"), True, "script"),
    (dict(update="vanilla"), False, "trajectory"), (dict(update="none"), True, ""),
    (ARMS["rag"], False, "trajectory"), (ARMS["none"], True, ""),
])  # fmt: skip
def test_what_is_kept_is_a_setting(settings, solved, kind):
    it = tried(agent(**settings), "yes" if solved else "no")
    assert it.notes.kind == kind and bool(it.notes.experience) == bool(kind)
    if settings.get("build") == "script":
        assert "Action" not in it.notes.experience
    if kind in ("trajectory", ""):  # no call for a lesson
        assert len(it.prompts) == 1


def test_experiences_stand_in_the_prompt_as_data_successes_first():
    bare, empty = tried(agent(recall="none"), "yes"), tried(agent(), "yes")
    assert bare.texts[0] == empty.texts[0] and SHOWN not in bare.texts[0]
    it = tried(filled(), "yes")
    parts = (SHOWN, SUCCESSES, "how 5 went", FAILURES, "how 6 went")
    at = [it.texts[0].index(part) for part in parts]
    assert at == sorted(at) and [each["id"] for each in it.notes.shown] in ([1, 2], [2, 1])
    constant = "".join(piece for piece, fixed in it.prompts[0].pieces if fixed)
    assert "how 5 went" not in constant  # special tokens in it stay text


def test_what_does_not_fit_the_budget_is_neither_shown_nor_credited():
    it = tried(reader := filled(context_tokens=40), "yes")
    assert len(it.notes.shown) == 1
    reader.learn([reader.lesson([it.done])])
    assert sorted(entry.visits for entry in reader.bank.entries())[-2:] == [0, 1]
    assert SHOWN not in tried(filled(context_tokens=1), "yes").texts[0]


def test_the_last_own_try_is_shown_by_itself():
    reader, acts = agent(**ARMS["reflection"]), []
    for reader.epoch in range(2):
        it = tried(reader, "no", lesson="say yes")
        acts.append(it.texts[0])
        reader.learn([reader.lesson([it.done])])
    assert SHOWN not in acts[0] and "Reflection: say yes" in acts[1]
    assert SHOWN not in tried(reader, "no", task=1).texts[0]


def test_a_group_retrieves_feeds_back_and_writes_once(monkeypatch):
    reader, calls, retrieve = filled().on(Characters()), [], Bank.retrieve
    monkeypatch.setattr(
        Bank, "retrieve", lambda self, *a, **k: calls.append(a) or retrieve(self, *a, **k)
    )
    said = ["no", "yes", "yes", *["no"] * 5]
    done = [tried(reader, each, sample=k).done for k, each in enumerate(said)]
    reader.after_group(Group(done[0].task, done))
    assert len(calls) == 1 and len({each.turns[0].prompt.text for each in done}) == 1
    mean = (2 - 6) / 8
    *known, new = reader.bank.entries()
    assert [(e.q, e.visits) for e in known] == [(pytest.approx(0.3 * mean), 1)] * 2
    assert new.success and new.kind == "script"  # the first success of the group
    assert new.task_id == "t0" and {*new.parents} == {1, 2} and new.meta["steps"] == 1
    reader = agent()
    done = [tried(reader, "no", sample=k).done for k in range(3)]
    reader.after_group(Group(done[0].task, done))
    assert [entry.kind for entry in reader.bank.entries()] == ["reflection"]  # of no success one


def test_every_rank_learns_the_same_from_the_groups_of_a_step():
    """Also from those that it has not sampled, and from what the first of them has changed."""
    # the one entry that is shown is one that a failure makes the second best
    one, two = (filled(k2=1, lam=1.0).on(Characters()) for _ in range(2))
    groups = []
    for k, said in enumerate(("no", "yes")):
        done = [tried(one, said, task=k, sample=n).done for n in range(2)]
        groups.append(Group(done[0].task, done))
    shown = [{each["id"] for each in one.tried(g.trajectories[0]).shown} for g in groups]
    for reader, seen in ((one, groups), (two, copy.deepcopy(groups))):
        for group in seen:
            reader.after_group(group)
    assert one.bank.digest == two.bank.digest
    events = one.bank.events()
    assert [{id for _, task, id, *_ in events if task == g.task.id} for g in groups] == shown


def test_a_document_is_read_as_memagent_reads_it_with_the_block_above():
    plain = tried(MemAgent(MemAgent.Config(chunk_tokens=40)), OSLO, task=DOCUMENT)
    reader = agent(update="none", chunk_tokens=40)
    it = tried(reader, OSLO, task=DOCUMENT)
    assert it.texts == plain.texts
    assert it.notes.success and it.notes.steps == len(it.texts) and reader.reward(it.done) == 1.0
    reader = knowing("Where is Bob?", "it stood at the end", chunk_tokens=40)
    it = tried(reader, OSLO, task=DOCUMENT)
    assert all("it stood at the end" in text for text in it.texts[:-1])
    block = it.texts[0].partition("\n\nYou read")[0]
    assert it.texts[0].replace(block + "\n\n", "") == plain.texts[0]
    assert reader.reward(it.done) == 1.0 and it.done.turns[-1].prompt.trained is False


@pytest.mark.parametrize(("said", "leaked"), [
    ("Bob went to Oslo.", 1.0), ("Bob went to Oslofjord.", 0.0),
])  # fmt: skip
def test_an_answer_that_stands_in_what_is_shown_is_counted_and_the_own_one_is_not_shown(
    said, leaked
):
    known = knowing("Where is Bob?", said)
    known.bank.write("Where is Anna?", "Anna: Oslo", success=True, task_id="d")
    reader = agent(chunk_tokens=40)
    reader.freeze()
    reader.load_state(known.state())
    reader.opened()
    it = tried(reader, OSLO, task=DOCUMENT)
    counts = reader.count(DOCUMENT, it.done.turns[-1])
    assert (counts["shown"], counts["answer_shown"]) == (1, leaked)
    assert it.notes.experience == "" and len(reader.bank.entries()) == 2


def test_experiences_above_a_document_have_a_budget_and_their_end_is_cut():
    story = "Task: Where is Bob?\nScript: begin well\n" + "step " * 3000 + "the very end"
    reader = knowing("Where is Bob?", story, chunk_tokens=40, update="none")
    it = tried(reader, OSLO, task=DOCUMENT)
    block = it.texts[0].partition("\n\nYou read")[0]
    assert 400 < len(Characters().encode(block)) <= 512
    assert "begin well" in block and "the very end" not in block
    assert [each["id"] for each in it.notes.shown] == [1]  # it is credited as one that was shown
    for settings, room in (({}, 512), ({"context_tokens": 64}, 64), ({"recall": "none"}, 0)):
        reader = agent(**settings)
        assert reader.limits().shown == reader.config.memory_tokens + room
    # a task of an environment has no budget unless one is set
    assert "the very end" in tried(knowing("task 5 to be done", story), "yes").texts[0]


def test_no_token_of_an_experience_or_of_a_lesson_is_trained():
    reader = filled()
    done = [tried(reader, "yes", sample=k, lesson="LESSON").done for k in range(2)]
    done[0].reward = 1.0
    rows = training_rows([Group(done[0].task, done)], GRPOConfig(group_size=2))
    codec = Characters()
    assert [codec.response(row.response_ids) for row in rows] == ["yes"] * 2
    assert all("how 5 went" in codec.response(row.prompt_ids) for row in rows)


def test_state_brings_back_the_bank():
    learn(reader := filled(), "yes")
    other = agent()
    other.load_state(reader.state())
    assert other.bank.digest == reader.bank.digest
    found = [bank.retrieve("task 0 to be done").ids for bank in (reader.bank, other.bank)]
    assert found[0] == found[1] and found[0]


def test_published_constants_are_settings_of_every_environment():
    paper = CONSTANTS["paper"]
    for name, fields in paper.items():
        assert MemRLConfig(**fields).delta == fields["delta"], name
    assert [(c["delta"], c["k1"], c["k2"]) for c in paper.values()] == [
        (0.38, 10, 5), (0.5, 10, 5), (0.37, 10, 5), (0.62, 5, 3), (0.25, 5, 3),
    ]  # fmt: skip
    with pytest.raises(UserError, match="name an embedder"):
        MemRLConfig(retrieve="dense")


def test_of_several_ranks_the_first_alone_writes_the_file(tmp_path, monkeypatch):
    path = tmp_path / "b.db"
    first = agent(bank=str(path))
    first.opened().write("task 5 to be done", "how", success=True, task_id="t5")
    monkeypatch.setenv("RANK", "1")
    second = agent(bank=str(path))
    assert second.opened().digest == first.bank.digest
    before = path.read_bytes()
    learn(second, "yes")
    assert path.read_bytes() == before and len(second.bank.entries()) == 2
    monkeypatch.setenv("RANK", "0")
    learn(first, "yes")
    assert first.bank.digest == second.bank.digest


def test_a_lesson_is_no_section_and_stands_below_the_answer():
    reader = agent(chunk_tokens=40)
    done = tried(reader, OSLO, task=DOCUMENT).done
    made, n = record(done, reader), len(done.turns) - 2
    assert len(steps_of(made)) == n == row_of(done, Cell("", "", "", 1), reader)["sections"]
    assert made["answer"] == OSLO and made["turns"][-1]["aside"]
    labels = [(line.label, line.text) for line in end_of(made).lines]
    assert [text for _, text in labels if "do it well" in text] and len(labels) > 1


def test_graded_rewards_are_mapped_to_the_range_of_utilities():
    reader = agent(graded=True)
    done = tried(reader, "no").done
    done.turns[-1].notes = Tried(success=False, reward=0.25)
    assert reader.lesson([done]).reward == 0.25


def test_a_task_that_cannot_be_begun_is_an_error_of_its_trajectory():
    it = tried(reader := agent(), "yes", task=99)
    assert "cannot be begun" in it.done.error
    assert it.notes is None and reader.reward(it.done) == 0.0
    assert reader.lesson([it.done]) is None
