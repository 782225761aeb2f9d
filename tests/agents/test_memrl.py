"""MemRL: what is shown, what is kept, what a group teaches; all with scripted answers."""

import copy

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

    def __init__(self, n=4):
        self.n, self.open = n, 0

    def tasks(self):
        return [self.task(k) for k in range(self.n)]

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
        return Step(
            f"You said {action}.", action in ("yes", "no"), 1.0 if action == "yes" else -1.0
        )

    def close(self):
        if not self.closed:
            self.closed, self.world.open = True, self.world.open - 1


def agent(**settings) -> MemRL:
    return MemRL(MemRLConfig(**({"delta": 0.0} | settings)))


def answering(*said, lesson="do it well"):
    """An engine: actions in turn, whatever the task, and one lesson for all."""
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        if "Steps:" in prompt.text or "Reflection:" in prompt.text:
            return lesson
        depth, turn = 0, prompt.after
        while turn is not None:
            depth, turn = depth + 1, turn.prompt.after
        return said[min(depth, len(said) - 1)]

    engine = ScriptedEngine(Characters(), script)
    engine.prompts = prompts
    return engine


def tried(reader, engine, task, sample=0):
    (trajectory,) = rollout(engine, reader, [(task, sample)], Sampling(0.0))
    return trajectory


def test_a_task_is_worked_on_until_it_is_done_and_leaves_a_script():
    world, reader, engine = Counting(), agent(), answering("perhaps", "yes")
    trajectory = tried(reader, engine, world.task(1))
    *_, act, lesson = trajectory.turns
    notes = reader.tried(trajectory)
    assert (notes.success, notes.reward, notes.steps, notes.failure) == (True, 1.0, 2, "")
    assert act.prompt.after is trajectory.turns[0] and act.prompt.text == "You said perhaps."
    assert act.trained and not lesson.trained and world.open == 0
    assert "Steps:" in lesson.prompt.text
    assert notes.kind == "script" and notes.experience == (
        "Task: task 1\nScript: do it well\nAction: perhaps\nResult: You said perhaps.\n"
        "Action: yes\nResult: You said yes."
    )
    assert reader.reward(trajectory) == 1.0 and notes.intent == "task 1 to be done"


@pytest.mark.parametrize(("said", "failure", "steps"), [
    ("perhaps", "steps", 3), ("no", "", 1), ("crash", "crashed", 1),
])  # fmt: skip
def test_what_is_not_solved_leaves_a_reflection(said, failure, steps):
    reader, engine = agent(), answering(said)
    notes = reader.tried(tried(reader, engine, Counting().task(0)))
    assert (notes.success, notes.failure, notes.steps) == (False, failure, steps)
    assert (notes.reward, notes.kind) == (-1.0, "reflection")
    assert "Reflection: " in notes.experience and "Reflection:" in engine.prompts[-1].text


@pytest.mark.parametrize("most", [2, 0])
def test_what_was_done_without_an_answer_is_judged_where_it_can_be(monkeypatch, most):
    monkeypatch.setattr(Try, "give_up", lambda self, failure: Step(failure, True, 1.0))
    reader, world = agent(max_steps=most), Counting()
    notes = reader.tried(tried(reader, answering("perhaps"), world.task(0)))
    assert (notes.success, notes.reward, notes.failure) == (True, 1.0, "") and world.open == 0


@pytest.mark.parametrize(("most", "told"), [(2, True), (STEPS, False), (0, False), (9, False)])
def test_the_limit_of_responses_is_the_one_that_is_told(most, told):
    reader, engine = agent(max_steps=most), answering("perhaps")
    trajectory = tried(reader, engine, Counting().task(0))
    first = engine.prompts[0].text
    assert ("you have 2 responses in all" in first) is told and "Say yes." in first
    assert reader.tried(trajectory).steps == min(most or STEPS, STEPS)


def test_the_window_ends_a_task():
    world, reader, engine = Counting(), agent(act_tokens=100), answering("perhaps " * 10)
    engine.window = 150  # one action; neither a second nor the lesson fits
    notes = reader.tried(tried(reader, engine, world.task(0)))
    assert (notes.failure, notes.steps, world.open) == ("window", 1, 0)
    assert "Reflection" not in notes.experience and "perhaps" in notes.experience
    engine.window = 100
    assert "window" in tried(reader, engine, world.task(0)).error and world.open == 0


@pytest.mark.parametrize(("settings", "solved", "kind"), [
    (dict(build="trajectory"), True, "trajectory"), (dict(build="script"), True, "script"),
    (dict(update="validation"), False, ""), (dict(update="validation"), True, "script"),
    (dict(update="vanilla"), False, "trajectory"), (dict(update="none"), True, ""),
    (ARMS["rag"], False, "trajectory"), (ARMS["none"], True, ""),
])  # fmt: skip
def test_what_is_kept_is_a_setting(settings, solved, kind):
    reader, engine = agent(**settings), answering("yes" if solved else "no")
    notes = reader.tried(tried(reader, engine, Counting().task(0)))
    assert notes.kind == kind and bool(notes.experience) == bool(kind)
    if settings.get("build") == "script":
        assert "Action" not in notes.experience
    if kind in ("trajectory", ""):  # no call for a lesson
        assert len(engine.prompts) == 1


def filled(**settings):
    reader = agent(**settings)
    bank = reader.opened()
    bank.write("task 5 to be done", "how 5 went", success=True, task_id="t5")
    bank.write("task 6 to be done", "how 6 went", success=False, task_id="t6")
    return reader


def test_experiences_stand_in_the_prompt_as_data_successes_first():
    bare, empty = answering("yes"), answering("yes")
    tried(agent(recall="none"), bare, Counting().task(0))
    tried(agent(), empty, Counting().task(0))
    assert bare.prompts[0].text == empty.prompts[0].text and SHOWN not in bare.prompts[0].text
    engine = answering("yes")
    notes = (reader := filled()).tried(tried(reader, engine, Counting().task(0)))
    text = engine.prompts[0].text
    at = [text.index(part) for part in (SHOWN, SUCCESSES, "how 5 went", FAILURES, "how 6 went")]
    assert at == sorted(at) and [each["id"] for each in notes.shown] in ([1, 2], [2, 1])
    constant = "".join(piece for piece, fixed in engine.prompts[0].pieces if fixed)
    assert "how 5 went" not in constant  # special tokens in it stay text


def test_what_does_not_fit_the_budget_is_neither_shown_nor_credited():
    engine = answering("yes")
    reader = filled(context_tokens=40)
    trajectory = tried(reader, engine, Counting().task(0))
    assert len(reader.tried(trajectory).shown) == 1
    reader.learn([reader.lesson([trajectory])])
    assert sorted(entry.visits for entry in reader.bank.entries())[-2:] == [0, 1]
    tried(none := filled(context_tokens=1), engine, Counting().task(0))
    assert SHOWN not in engine.prompts[-2].text and none.config.context_tokens == 1


def test_the_last_own_try_is_shown_by_itself():
    engine, reader = answering("no", lesson="say yes"), agent(**ARMS["reflection"])
    world = Counting()
    for epoch in range(2):
        reader.epoch = epoch
        reader.learn([reader.lesson([tried(reader, engine, world.task(0))])])
    acts = [p.text for p in engine.prompts if "Say yes." in p.text and "Task:\ntask 0" in p.text]
    assert SHOWN not in acts[0] and "Reflection: say yes" in acts[1]
    tried(reader, engine, world.task(1))
    assert SHOWN not in engine.prompts[-2].text


def test_a_group_retrieves_feeds_back_and_writes_once(monkeypatch):
    reader, world = filled(), Counting()
    reader = reader.on(Characters())
    calls, retrieve = [], Bank.retrieve
    monkeypatch.setattr(
        Bank, "retrieve", lambda self, *a, **k: calls.append(a) or retrieve(self, *a, **k)
    )
    trajectories = [
        tried(reader, answering(said), world.task(0), k)
        for k, said in enumerate(["no", "yes", "yes", *["no"] * 5])
    ]
    prompts = {t.turns[0].prompt.text for t in trajectories}
    reader.after_group(Group(trajectories[0].task, trajectories))
    assert len(calls) == 1 and len(prompts) == 1
    mean = (2 - 6) / 8
    assert [e.q for e in reader.bank.entries()[:2]] == [pytest.approx(0.3 * mean)] * 2
    assert [e.visits for e in reader.bank.entries()[:2]] == [1, 1]
    (new,) = reader.bank.entries()[2:]
    assert new.success and new.kind == "script"  # the first success of the group
    assert new.task_id == "t0" and {*new.parents} == {1, 2} and new.meta["steps"] == 1
    reader = agent()
    trajectories = [tried(reader, answering("no"), world.task(0), k) for k in range(3)]
    reader.after_group(Group(trajectories[0].task, trajectories))
    assert [entry.kind for entry in reader.bank.entries()] == ["reflection"]  # of no success one


def test_every_rank_learns_the_same_from_the_groups_of_a_step():
    """Also from those that it has not sampled, and from what the first of them has changed."""
    settings = dict(k2=1, lam=1.0)  # the one entry that a failure makes the second best
    one, two, world = filled(**settings), filled(**settings), Counting()
    one, two = one.on(Characters()), two.on(Characters())
    groups = []
    for k, said in enumerate(("no", "yes")):
        trajectories = [tried(one, answering(said), world.task(k), n) for n in range(2)]
        groups.append(Group(trajectories[0].task, trajectories))
    shown = [{each["id"] for each in one.tried(g.trajectories[0]).shown} for g in groups]
    for group in groups:
        one.after_group(group)
    for group in copy.deepcopy(groups):
        two.after_group(group)
    assert one.bank.digest == two.bank.digest
    events = one.bank.events()
    assert [{id for _, task, id, *_ in events if task == g.task.id} for g in groups] == shown


def test_a_document_is_read_as_memagent_reads_it_with_the_block_above():
    task = Task("d", "Where is Anna?", ("Oslo",), text="Anna went to Oslo. " * 20)
    plain, read = answering("\\boxed{Oslo}"), answering("\\boxed{Oslo}")
    settings = dict(chunk_tokens=40)
    tried(MemAgent(MemAgent.Config(**settings)), plain, task)
    reader = agent(update="none", **settings)
    trajectory = tried(reader, read, task)
    assert [p.text for p in read.prompts] == [p.text for p in plain.prompts]
    notes = reader.tried(trajectory)
    assert notes.success and notes.steps == len(read.prompts) and reader.reward(trajectory) == 1.0
    with_block = answering("\\boxed{Oslo}")
    reader = agent(**settings)
    reader.opened().write("Where is Bob?", "it stood at the end", success=True, task_id="x")
    trajectory = tried(reader, with_block, task)
    texts = [p.text for p in with_block.prompts]
    assert all("it stood at the end" in text for text in texts[:-1])
    assert (
        texts[0].replace(texts[0].partition("\n\nYou read")[0] + "\n\n", "")
        == plain.prompts[0].text
    )
    assert reader.reward(trajectory) == 1.0 and trajectory.turns[-1].prompt.trained is False


def test_an_answer_that_stands_in_what_is_shown_is_counted_and_the_own_one_is_not_shown():
    task = Task("d", "Where is Anna?", ("Oslo",), text="Anna went to Oslo.")
    for said, leaked in (("Bob went to Oslo.", 1.0), ("Bob went to Oslofjord.", 0.0)):
        reader = agent(chunk_tokens=40)
        reader.opened().write("Where is Bob?", said, success=True, task_id="x")
        reader.opened().write("Where is Anna?", "Anna: Oslo", success=True, task_id="d")
        rows, reader = reader.state(), agent(chunk_tokens=40)
        reader.freeze()
        reader.load_state(rows)
        reader.opened()
        trajectory = tried(reader, answering("\\boxed{Oslo}"), task)
        counts = reader.count(task, trajectory.turns[-1])
        assert (counts["shown"], counts["answer_shown"]) == (1, leaked)
        assert reader.tried(trajectory).experience == "" and len(reader.bank.entries()) == 2


def test_experiences_above_a_document_have_a_budget_and_their_end_is_cut():
    task = Task("d", "Where is Anna?", ("Oslo",), text="Anna went to Oslo. " * 20)
    engine, reader = answering("\\boxed{Oslo}"), agent(chunk_tokens=40, update="none")
    story = "Task: Where is Bob?\nScript: begin well\n" + "step " * 3000 + "the very end"
    reader.opened().write("Where is Bob?", story, success=True, task_id="x")
    notes = reader.tried(tried(reader, engine, task))
    block = engine.prompts[0].text.partition("\n\nYou read")[0]
    used = len(Characters().encode(block))
    assert 400 < used <= 512 and "begin well" in block and "the very end" not in block
    assert [each["id"] for each in notes.shown] == [1]  # it is credited as one that was shown
    assert reader.limits().shown == reader.config.memory_tokens + 512
    assert agent(context_tokens=64).limits().shown == reader.config.memory_tokens + 64
    assert agent(recall="none").limits().shown == reader.config.memory_tokens
    # a task of an environment has no budget unless one is set
    engine, reader = answering("yes"), agent()
    reader.opened().write("task 5 to be done", story, success=True, task_id="x")
    tried(reader, engine, Counting().task(0))
    assert "the very end" in engine.prompts[0].text


def test_no_token_of_an_experience_or_of_a_lesson_is_trained():
    world, reader = Counting(), filled()
    engine = answering("yes", lesson="LESSON")
    trajectories = [tried(reader, engine, world.task(0), k) for k in range(2)]
    trajectories[0].reward = 1.0
    rows = training_rows([Group(world.task(0), trajectories)], GRPOConfig(group_size=2))
    responses = [engine.codec.response(row.response_ids) for row in rows]
    assert len(rows) == 2 and all(text == "yes" for text in responses)
    assert all("how 5 went" in engine.codec.response(row.prompt_ids) for row in rows)


def test_state_brings_back_the_bank():
    reader = filled()
    reader.learn([reader.lesson([tried(reader, answering("yes"), Counting().task(0))])])
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
    trajectory = tried(second, answering("yes"), Counting().task(0))
    second.learn([second.lesson([trajectory])])
    assert path.read_bytes() == before and len(second.bank.entries()) == 2
    monkeypatch.setenv("RANK", "0")
    first.learn([first.lesson([tried(first, answering("yes"), Counting().task(0))])])
    assert first.bank.digest == second.bank.digest


def test_a_lesson_is_no_section_and_stands_below_the_answer():
    task = Task("d", "Where is Anna?", ("Oslo",), text="Anna went to Oslo. " * 4)
    reader = agent(chunk_tokens=40)
    trajectory = tried(reader, answering("\\boxed{Oslo}"), task)
    made, n = record(trajectory, reader), len(trajectory.turns) - 2
    assert len(steps_of(made)) == n == row_of(trajectory, Cell("", "", "", 1), reader)["sections"]
    assert made["answer"] == "\\boxed{Oslo}" and made["turns"][-1]["aside"]
    labels = [(line.label, line.text) for line in end_of(made).lines]
    assert [text for _, text in labels if "do it well" in text] and len(labels) > 1


def test_graded_rewards_are_mapped_to_the_range_of_utilities():
    reader = agent(graded=True)
    trajectory = tried(reader, answering("no"), Counting().task(0))
    trajectory.turns[-1].notes = Tried(success=False, reward=0.25)
    assert reader.lesson([trajectory]).reward == 0.25


def test_a_task_that_cannot_be_begun_is_an_error_of_its_trajectory():
    reader, world = agent(), Counting()
    trajectory = tried(reader, answering("yes"), world.task(99))
    assert "cannot be begun" in trajectory.error
    assert reader.tried(trajectory) is None and reader.reward(trajectory) == 0.0
    assert reader.lesson([trajectory]) is None
