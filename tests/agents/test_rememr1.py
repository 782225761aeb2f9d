from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.rememr1 import (
    ERRORS,
    NOT_RECALLED,
    EvidenceSearch,
    ReMemR1,
    ReMemR1Config,
    parse_step,
    read_step,
)
from config.errors import UserError
from data import Pool, Task
from embedded import tiny
from engines.scripted import ScriptedEngine
from eval import evaluate
from memagent import (
    NO_MEMORY,
    Finish,
    Group,
    MemAgent,
    MemAgentConfig,
    Prompt,
    Trajectory,
    Turn,
)
from memory import Recall
from report.metrics import describe_turns
from report.rows import Cell
from rollout import Sampling, follow, rollout
from tasks import worlds
from tasks.mentions import answer_recall

SIZES = dict(chunk_tokens=24, memory_tokens=13, final_tokens=24, query_tokens=8, step_tokens=40)
CONFIG = ReMemR1Config(**SIZES)


WHERE = (
    "Anna Rome Otto Lima Ida Oslo Nils Nice Emil Cork Olga Graz",
    "Karin Kyoto Peter Paris Petra Perth Rita Riga Sonja Sofia Viktor Vienna",
    "Max Malmo Marta Milan Mina Miami Marco Minsk Leon Leeds Laura Linz",
)  # by section
FACTS = [
    [f"{name} reached {place}." for name, place in zip(*[iter(row.split())] * 2, strict=True)]
    for row in WHERE
]
TASK = Task(
    "t", "Where is Otto?", ("Lima",), " ".join(fact for section in FACTS for fact in section)
)


def drive(task, config, codec, answers, finish=Finish.STOP):
    """Run the agent on scripted responses; returns its turns."""
    steps, turns = ReMemR1(config).on(codec).run(task), []
    prompt = next(steps)
    for answer in answers:
        text = codec.text(answer)
        turns.append(Turn(prompt, [], list(text.ids), [], finish, text))
        try:
            prompt = steps.send(turns[-1])
        except StopIteration:
            return turns
    raise AssertionError("the agent wants more turns than there are answers")


def driven(codec, *answers, task=TASK, config=CONFIG, **settings):
    return drive(task, replace(config, **settings), codec, answers)


def states(trajectory, config=CONFIG):
    """What each turn earns, by name; `sum` is what trains, the rest stands in the turn's notes."""
    found = []
    turn_rewards = ReMemR1(config).turn_rewards(trajectory)
    for turn, rewards in zip(trajectory.turns, turn_rewards, strict=True):
        assert [*rewards] == ["memory", "callback", "format"]
        found.append(rewards | {"sum": sum(rewards.values())})
        if turn.notes is not None:
            found[-1] |= {name: getattr(turn.notes, name) for name in ("gain", "level", "covered")}
    return found


def column(name, found):
    return [state[name] for state in found]


def pay(trajectory, config=CONFIG):
    """Give the turns their rewards, as training does."""
    rewards = ReMemR1(config).turn_rewards(trajectory)
    for turn, own in zip(trajectory.turns, rewards, strict=True):
        turn.rewards = own
    return trajectory


def counted(task, config, turns) -> Counter:
    """What is counted of the turns of a trajectory."""
    n: Counter = Counter()
    for turn in turns:
        n.update(ReMemR1(config).count(task, turn))
    return n


def ask(memory: str, query: str = "") -> str:
    return f"<update>{memory}</update>" + f"<recall>{query}</recall>" * bool(query)


# ---------------------------------------------------------------- the parser


@pytest.mark.parametrize(("response", "memory", "query", "errors"), [
    # a query over several lines
    ("<update>Anna.</update><recall>who\nis she?</recall>", "Anna.", "who is she?", ""),
    # two on one line
    ("<update>a</update><recall>q1</recall> and <recall>q2</recall>", "a", "q1", "multi_recall"),
    ("<recall>q</recall>", None, "q", "no_update"),  # a recall only
    ("<update>a</update><recall>who", "a", None, "unclosed_recall"),
    ("<update>a\nb\n\nc</update>", "a\nb\n\nc", None, ""),  # an update over several lines
    ("<update> \n </update>", None, None, "empty_update"),
    ("", None, None, "no_update"),
    ("Anna met Otto.", None, None, "no_update"),
    ("<update>a</update> <update>b</update>", "a", None, "multi_update"),
    ("<update></update><update>b</update>", "b", None, "multi_update empty_update"),
    ("<update>a <update>b</update>", "b", None, "multi_update"),  # opened anew before it was closed
    ("<update>a", None, None, "no_update"),
    ("a</update>", None, None, "no_update"),
    ("<update>a</update><recall> </recall>", "a", None, "empty_recall"),
    ("<update>a</update><recall></recall><recall>q</recall>", "a", "q",
     "multi_recall empty_recall"),
    ("<update>a</update><recall>q <recall>r</recall>", "a", "r", "unclosed_recall"),
    # tags in a query
    ("<update>a</update><recall>who is <b>Anna</b>?</recall>", "a", "who is Anna ?", ""),
    ("<update>a <recall>q</recall> b</update>", "a  b", "q", ""),  # no query stays in a memory
    ("<thinking>an <update> or a <recall>x</recall>?</thinking><update>a</update>", "a", None, ""),
    ("<thinking>never closed <update>a</update>", "a", None, ""),
    ("<update>A <recall>who</update>", "A who", None, "unclosed_recall"),
    ("<UPDATE>a</UPDATE>", None, None, "no_update"),  # tags are written as the prompt writes them
])  # fmt: skip
def test_the_parsers_table(response, memory, query, errors):
    step = parse_step(response)
    assert (step.memory, step.query, " ".join(step.errors)) == (memory, query, errors)
    cut = parse_step(response, Finish.LENGTH)
    assert cut == replace(step, errors=(*step.errors, "truncated"))
    thinking = response.partition("<thinking>")[2].partition("</thinking>")
    assert step.thinking == (thinking[0].strip() if thinking[1] else None)


@given(
    st.lists(
        st.sampled_from(
            "<update> </update> <recall> </recall> <thinking> </thinking>".split()
            + [" a", "\n", " b "]
        ),
        max_size=14,
    )
)
def test_whatever_is_written_no_tag_of_ours_gets_into_a_query_and_no_query_into_a_memory(parts):
    step = parse_step("".join(parts))
    assert {*step.errors} <= {*ERRORS} and len({*step.errors}) == len(step.errors)
    assert step.query is None or ("<" not in step.query and step.query.strip())
    if step.memory is not None:
        assert step.memory.strip() and "<" not in step.memory and "no_update" not in step.errors
        assert parse_step(step.memory).query is None
    assert (step.memory is None) == bool(
        {"no_update", "empty_update"} & {*step.errors}
        and not ("multi_update" in step.errors and step.memory)
    )


@pytest.mark.parametrize(("response", "memory"), [
    ("<recall>q</recall>", None),
    ("<update> </update>", None),
    ("so <recall>q</recall> it is", None),
    ("<thinking>t</thinking><update>a</update><recall>who", "a"),
])  # fmt: skip
def test_what_becomes_the_memory(codec, response, memory):
    turn = Turn(None, [], [], [], Finish.STOP, codec.text(response))
    assert read_step(turn, replace(CONFIG, memory_tokens=64), codec).memory == memory


LONG = " ".join(["Otto"] * 300)


@pytest.mark.parametrize(("response", "query"), [
    ("<update>a</update><recall>Otto</recall>", "Otto"),
    ("<update>a</update>", None),
    ("<recall>who\nis she?</recall>", "who is she?"),  # several lines
    ("<recall>who is <b>Anna</b>?</recall>", "who is Anna ?"),  # tags in it
    ("<recall><recall>Anna</recall>", "Anna"),
    ("<recall>  Otto   Lima </recall>", "Otto Lima"),  # blanks
    ("<recall>\tOtto</recall>", "Otto"),
    ("<recall>   </recall>", None),  # blank
    ("<recall></recall>", None),  # empty
    ("<recall></recall> or </recall>", None),
    ("<recall></recall>\n<recall>Otto</recall>", "Otto"),
    ("<thinking>a <recall>Ida</recall>?</thinking><update>a</update>", None),  # in thinking
    ("<thinking>a <recall>Ida</recall></thinking> <recall>Otto</recall>", "Otto"),
    ("<think><recall>Ida</recall>\n</think><recall>Otto</recall>", "Otto"),
    # two on a line
    ("<recall>q1</recall> and <recall>q2</recall>", "q1"),
    ("<recall>q1</recall>\n<recall>q2</recall>", "q1"),  # on two lines
    ("<recall>who", None),
    ("<recall>who\n<recall>Otto</recall>", "Otto"),
    ("<RECALL>Otto</RECALL>", None),
    (f"<recall>{LONG}</recall>", " Otto" * 128),  # over the cap
])  # fmt: skip
def test_what_is_looked_for(codec, response, query):
    turn = Turn(None, [], [], [], Finish.STOP, codec.text(response))
    step = read_step(turn, replace(CONFIG, query_tokens=128), codec)
    assert (step.query, step.query_cut) == (query, LONG in response)


def test_caps_cut_memory_and_query_and_say_so(codec):
    config = replace(CONFIG, memory_tokens=4, query_tokens=2)
    (turn, *_) = drive(TASK, config, codec, [ask("Anna met Otto. Ida left.", "Anna met Otto")] * 4)
    step = turn.notes.step
    assert (step.memory, step.memory_cut) == (" Anna met Otto.", True)
    assert (step.query, step.query_cut) == (" Anna met", True)
    turns = drive(TASK, config, codec, [ask("Anna left.", "Anna met Otto")] * 3 + ["x"])
    # what is looked for is what the cap has left
    assert turns[-1].notes.recalled.query == " Anna met"
    (turn, *_) = drive(TASK, config, codec, [ask("Anna met Otto.", "Anna")] * 4)
    assert not turn.notes.step.memory_cut and not turn.notes.step.query_cut


# ---------------------------------------------------------------- the agent


def test_what_is_looked_for_stands_in_the_next_prompt_and_only_there(codec):
    otto, karin = "Otto reached Lima.", "Karin reached Kyoto."
    answers = [ask(otto), ask(karin, "Otto"), ask("Max left.", "Karin and Rome"), "\\boxed{Lima}"]
    turns = driven(codec, *answers)
    assert [t.notes.recalled for t in turns] == [
        *(Recall(), Recall(), Recall(otto, "Otto", (1,), 1.0, 1)),
        Recall(karin, "Karin and Rome", (2,), 1 / 3, 1),
    ]
    shown = [
        t.prompt.text.partition("<recalled_memory>\n")[2].partition("\n</recalled_memory>")[0]
        for t in turns
    ]
    assert shown == [NOT_RECALLED, NOT_RECALLED, otto, karin]
    assert [t.prompt.memory for t in turns] == [NO_MEMORY, otto, karin, "Max left."]
    assert [t.prompt.final for t in turns] == [False, False, False, True]
    assert [t.notes.step is None for t in turns] == [False, False, False, True]
    assert [t.notes.asked for t in turns] == ["", "Otto", "Karin and Rome", ""]
    assert [t.prompt.max_tokens for t in turns] == [40, 40, 40, 24]
    # the three ways of looking back differ in nothing else
    question, off = (driven(codec, *answers, callback=how) for how in ("question", "off"))
    assert [t.notes.recalled.text for t in question] == ["", "", otto, otto]
    assert [t.notes.recalled for t in off] == [Recall()] * 4
    learned, question, off = ([t.prompt.text for t in arm] for arm in (turns, question, off))
    assert learned[:2] == question[:2] == off[:2]
    assert learned[2] == question[2] == off[2].replace(NOT_RECALLED, otto)


def test_the_question_is_looked_for_whether_or_not_the_policy_asks(codec):
    answers = [ask("Otto reached Lima."), ask("Max left."), "nonsense", "x"]
    asking = replace(CONFIG, callback="question")
    turns = drive(TASK, asking, codec, answers)
    assert [t.notes.recalled.query for t in turns] == ["", *[TASK.question] * 3]
    assert [t.notes.recalled.steps for t in turns] == [(), (), (1,), (1,)]
    # nor is it its doing
    assert column("callback", states(Trajectory(TASK, turns), asking)) == [0] * 4
    answers[2] = ask("Max left.", "Otto")
    # it asks, but that is not what is looked for
    besides = drive(TASK, asking, codec, answers)
    assert besides[-1].notes.recalled.steps == (1,)
    assert column("callback", states(Trajectory(TASK, besides), asking)) == [0] * 4
    own = drive(TASK, CONFIG, codec, answers)
    assert column("callback", states(Trajectory(TASK, own))) == [0, 0, 1, 0]


def test_a_response_without_an_update_never_wipes_the_memory_unnoticed(codec):
    answers = [ask("Otto reached Lima."), "<recall>Otto</recall>", "nonsense", "x"]
    turns = drive(TASK, CONFIG, codec, answers)
    assert [t.prompt.memory for t in turns] == [NO_MEMORY] + 3 * ["Otto reached Lima."]
    # what stands in the prompt anyway is not recalled
    assert turns[2].notes.recalled == Recall(query="Otto")
    assert [t.notes.step.errors for t in turns[:-1]] == [(), ("no_update",), ("no_update",)]


def test_thoughts_of_a_thinking_model_are_neither_update_nor_query(codec):
    thought = "<think><update>a</update><recall>b</recall></think>"
    turns = driven(codec, thought + ask("c", "d"), ask("e"), ask("f"), "x")
    assert (turns[0].notes.step.memory, turns[0].notes.step.query) == ("c", "d")
    assert turns[1].notes.recalled.query == "d"


def test_training_and_evaluation_see_the_same_prompts(codec, tmp_path):
    """One task alone is a batch like any other."""
    said = [
        ask("Otto reached Lima.", "Anna"), "<recall>Otto", ask("Ida left.", "Otto Lima"), "x",
        ask("", "Lima"), ask("Max left.\nAnna too.", "Lima\nAnna"), ask("Anna met Otto."),
    ]  # fmt: skip

    def prompts(run) -> list[tuple]:
        seen: list[tuple] = []

        def script(prompt: Prompt) -> str:
            seen.append((prompt.text, codec.chat(prompt.pieces)))
            return "\\boxed{Lima}" if prompt.final else said[(len(seen) - 1) % len(said)]

        run(ScriptedEngine(codec, script))
        return seen

    task = worlds.make_task(0, 9, "two_hop_reverse")
    agent, cell = tiny.agent("rememr1", step_tokens=60), Cell("a", "", "", 9)
    trained = prompts(lambda engine: list(rollout(engine, agent, [(task, 0)])))
    followed = prompts(lambda engine: list(follow(engine, agent, task, Sampling())))
    evaluated = prompts(
        lambda engine: evaluate(engine, agent, [task], Sampling(), cell, tmp_path / "rows")
    )
    assert trained == followed == evaluated and len(trained) == 10
    assert sum(NOT_RECALLED not in text for text, _ in trained) >= 2


@pytest.mark.parametrize("layout", ["shared", "paper"])
def test_prompts_have_their_blocks_in_order_and_share_what_they_can(layout):
    config = ReMemR1Config(layout=layout)
    agent = ReMemR1(config)
    slots = [piece for piece, constant in agent.template("recall_update") if not constant]
    rest = ["problem", "recalled_memory", "memory"]
    assert slots == {"shared": ["section", *rest], "paper": [*rest, "section"]}[layout]
    assert [p for p, constant in agent.template("recall_final") if not constant] == rest
    text = "".join(piece for piece, constant in agent.template("recall_update") if constant)
    for tag in ("thinking", "update", "recall"):
        assert text.count(f"<{tag}>") == text.count(f"</{tag}>") >= 1
    louder = agent.with_settings(example_query=config.example_query.upper())
    assert config.example_query in text
    assert config.example_query.upper() in "".join(p for p, _ in louder.template("recall_update"))


def test_templates_of_ones_own(tmp_path, codec):
    (tmp_path / "recall_update.txt").write_text(
        "{prompt}|{recalled_memory}|{memory}|{chunk}|<update>"
    )
    (tmp_path / "recall_final.txt").write_text("{prompt}|{recalled_memory}|{memory}|\\boxed{}")

    def own(**settings) -> ReMemR1:
        return ReMemR1(replace(CONFIG, templates=str(tmp_path), **settings))

    answers = [ask("Otto."), ask("Ida."), ask("Max.", "Otto"), "x"]
    turns = drive(TASK, own().config, codec, answers)
    assert turns[-1].prompt.text == f"{TASK.question}|Otto.|Max.|\\boxed{{}}"
    (tmp_path / "recall_update.txt").write_text("{prompt} without a section")
    with pytest.raises(UserError, match=r"recall_update\.txt does not show the section"):
        own()
    (tmp_path / "recall_update.txt").write_text("{chunk} {memory}")
    with pytest.raises(UserError, match="does not show the recalled memory"):
        own()
    assert own(callback="off").config.callback == "off"
    (tmp_path / "recall_update.txt").write_text("{chunk} {recalled_memory}")
    (tmp_path / "recall_final.txt").write_text("{chunk} {recalled_memory}")
    with pytest.raises(UserError, match="slot for the section, which this prompt is given none of"):
        own()


@pytest.mark.parametrize("wrong", [
    {"callback": "always"}, {"query_tokens": 0}, {"recall_k": 0}, {"step_tokens": -1},
    {"example_query": "{section}"}, {"example_query": "<update>"},
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        ReMemR1Config(**wrong)


def test_retrievers_and_several_hits_reach_the_prompt(codec):
    query = "who left Rome or Lima"
    answers = [ask("Anna left Rome."), ask("Otto left Lima."), ask("Ida left.", query), "x"]
    for retriever in ("word_recall", "tfidf", "bm25"):
        config = replace(CONFIG, retriever=retriever, recall_k=2, query_tokens=64)
        last = drive(TASK, config, codec, answers)[-1]
        recalled = last.notes.recalled
        assert recalled.text == "Anna left Rome.\n\nOtto left Lima.", retriever
        assert {*recalled.steps} == {1, 2}, retriever
        assert recalled.text in last.prompt.text
    nothing = [*answers[:2], ask("Ida left.", "Boris"), "x"]
    assert drive(TASK, CONFIG, codec, nothing)[-1].notes.recalled == Recall(query="Boris")


def test_the_window_has_room_for_what_is_recalled(codec):
    agent = ReMemR1(ReMemR1Config(100, 20, 10, step_tokens=50, recall_k=2))
    assert agent.turn_tokens() == agent.window_needed() == 100 + 3 * 20 + 50 + 1024
    assert MemAgent(MemAgentConfig(100, 20, 10)).turn_tokens() == 100 + 20 + 20 + 1024
    shorter = agent.with_settings(step_tokens=None, query_tokens=7)
    assert shorter.turn_tokens() == 100 + 3 * 20 + 47 + 1024


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(("answers", "text", "question", "share"), [
    (["UK", "United Kingdom"], "the UK", "", 1.0),
    (["no"], "well known", "", None),
    (["no show"], "it is well known", "", 0.0),
    (["Barrier of Flames"], "the barrier of flames", "", 1.0),
    # the question has it: nothing was found by reading
    (["Lima"], "Lima.", "Where is Lima?", None),
    (["Old Lima"], "in Lima", "Where is Lima?", 0.0),
    (["yes"], "yes", "", None),
    (["yes", "Lima"], "Lima", "", 1.0),
    (["Lima", "Rome"], "", "", 0.0),
    ([], "Lima", "", None),
])  # fmt: skip
def test_how_much_of_an_answer_a_text_holds(answers, text, question, share):
    assert answer_recall(answers, text, question) == share


def test_where_all_answers_are_asked_for_each_one_counts(codec):
    assert answer_recall(["12", "7"], "only 12", all_asked=True) == 0.5
    assert answer_recall(["12", "7"], "only 12") == 1.0
    both = replace(TASK, answers=("Lima", "Rome"), dataset="ruler", kind="niah", question="Which?")
    found, final = ask("Otto reached Lima."), "\\boxed{Lima, Rome}"
    answers = [found, ask("Max left.", "Otto"), ask("Lima, Rome."), final]
    assert column("gain", rewards(codec, answers, both)) == [0.5, -0.5, 1, 0]
    n = counted(both, CONFIG, drive(both, CONFIG, codec, answers))
    assert (n["hits"], n["sought"], n["holds"]) == (1, 1, 0)


def rewards(codec, answers, task=TASK, config=CONFIG, **settings):
    config = replace(config, **settings)
    return states(Trajectory(task, drive(task, config, codec, answers)), config)


def test_gain_and_level_and_each_reward_alone(codec):
    answers = [ask("Otto reached Lima."), ask("Otto reached Lima."), ask("Max left.")]
    found = rewards(codec, [*answers, "\\boxed{Lima}"])
    assert column("gain", found) == [1, 0, -1, 0] and column("level", found) == [1, 1, 0, 0]
    assert column("memory", found) == [1, 0, -1, 0] and column("format", found) == [1, 1, 1, 1]
    assert column("sum", found) == [2, 1, 0, 1]
    assert column("covered", found[:-1]) == [1, 1, 1]
    found = rewards(codec, [*answers, "Lima"], memory_reward="level")
    assert column("memory", found) == [1, 1, 0, 0] and column("format", found) == [1, 1, 1, 0]
    # the first memory's wording is worth nothing
    named = replace(TASK, answers=(NO_MEMORY.split()[-1],), question="What is short?")
    paid = rewards(codec, [ask(NO_MEMORY), ask("x"), ask(NO_MEMORY), "x"], named)
    assert column("gain", paid) == [0] * 4


def test_the_first_memorys_wording_is_never_seen_text(codec):
    """Equation 6 with m_0 empty: a gold word of the literal was not in sight when it came back."""
    named = replace(TASK, answers=("previous",), question="Which?")
    config = replace(CONFIG, memory_tokens=64, query_tokens=64)
    answers = [ask("it is previous"), ask(NO_MEMORY), ask("x", "previous"), "x"]
    turns = drive(named, config, codec, answers)
    assert [t.prompt.memory for t in turns[1:]] == ["it is previous", NO_MEMORY, "x"]
    paid = states(Trajectory(named, turns), config)
    assert column("callback", paid) == [0, 0, 1, 0]


# Equation 5: max_y recall(y, m_t) - max_y recall(y, m_t-1)
# Equation 6: max_y recall(y, E + m_t + c_t) - max_y recall(y, m_t + c_t)
# recall(y, x): the share of y's words that x has; m_0 is empty. Each line: the memories after the
# three sections with a query or none, and by hand (eq. 5, eq. 6) of each turn. The sections are
# FACTS; what is asked at a turn is looked for in the memories written by then. Other than in the
# printed equations, words of the question, yes and no are not looked for.
@pytest.mark.parametrize(("question", "answers", "memories", "paid"), [
    ("Is Otto in Lima?", ("yes",), ("yes, Otto", "Ida", "yes"), [(0, 0)] * 3),
    ("Did Otto move?", ("no",), ("no", ("Ida", "no"), ("Max", "no")), [(0, 0)] * 3),
    ("Who is older, Leo or Eva?", ("Eva",), ("Eva", ("Ida", "Eva"), "Eva"), [(0, 0)] * 3),
    ("Who is older, Leo or Eva?", ("Eva",), ("Eva", "Ida", ("Leo", "Eva")), [(0, 0)] * 3),
    ("Where is Fort Gray?", ("Gray Bay",), ("Gray", "Gray Bay", "Bay"), [(0, 0), (1, 0), (0, 0)]),
    ("Where?", ("Bay Hill", "Cape"), ("Bay", "Cape", "Bay Hill"), [(0.5, 0), (0.5, 0), (0, 0)]),
    ("Where?", ("Bay Hill",), ("Bay", "Hill", ("Hill", "Bay")), [(0.5, 0), (0, 0), (0, 0.5)]),
    ("Yes or no?", ("no", "Cape"), ("Cape", "no", "Ida"), [(1, 0), (-1, 0), (0, 0)]),
])  # fmt: skip
def test_golden_vectors_of_equations_5_and_6(codec, question, answers, memories, paid):
    task = replace(TASK, question=question, answers=answers)
    responses = [ask(*(m if isinstance(m, tuple) else (m,))) for m in memories] + ["\\boxed{x}"]
    of_turns = rewards(codec, responses, task)
    assert [(s["memory"], s["callback"]) for s in of_turns] == [*paid, (0, 0)]


def test_an_update_without_a_turn_after_it_has_added_nothing_yet(codec):
    """A trajectory that broke off: the memory is known to have been what the prompt shows."""
    turns = driven(codec, ask("Otto reached Lima."), ask("Lima."), ask("Lima."), "x")
    broken = Trajectory(TASK, turns[:2])
    assert [(s["gain"], s["level"]) for s in states(broken)] == [(1, 1), (0, 1)]


def test_the_callback_reward_is_the_turns_that_has_asked(codec):
    found, left, looks = ask("Otto reached Lima."), ask("Max left."), ask("Max left.", "Otto")
    answers = [found, left, looks, "\\boxed{Lima}"]
    paid = rewards(codec, answers)
    assert column("callback", paid) == [0, 0, 1, 0] and column("gain", paid) == [1, -1, 0, 0]
    # the answer in sight already, in section or memory: the look back has brought nothing
    first = replace(TASK, text=" ".join(f for k in (1, 2, 0) for f in FACTS[k]))
    assert column("callback", rewards(codec, answers, first)) == [0, 0, 0, 0]
    again = [found, ask("Lima, said Otto.", "Otto"), ask("Max left.", "Otto reached"), answers[3]]
    assert column("callback", rewards(codec, again)) == [0, 0, 0, 0]


def test_what_was_recalled_before_is_not_seen_and_words_of_the_question_are_not_looked_for(codec):
    found, looks, final = ask("Otto reached Lima."), ask("Max left.", "Otto"), "\\boxed{Lima}"
    four = replace(TASK, text=" ".join(f for k in (0, 1, 2, 1) for f in FACTS[k]))
    named = replace(four, question="Is it Lima or Rome, Otto?")
    answers = [found, looks, looks, looks, final]
    # at 2 the memory that it started from has it
    assert column("callback", rewards(codec, answers, four)) == [0, 0, 1, 1, 0]
    found = rewards(codec, answers, named)
    assert column("callback", found) == column("covered", found) == [0] * 5


@pytest.mark.parametrize(("response", "paid"), [
    (ask("Otto reached Lima."), (1, 1)),
    (ask("Otto reached\nLima."), (1, 1)),
    (ask("Lima.") + ask("Lima."), (0, 1)),
    (ask(" ") + ask("Lima."), (0, 1)),
    (ask("Lima.", "Anna"), (1, 1)),
    (ask("Lima.") + "<recall>Anna", (0, 1)),
    ("<thinking>x" + ask("Lima."), (0, 1)),
    ("<thinking>x</thinking>" + ask("Lima."), (1, 1)),
    ("Lima.", (0, 0)),
    (ask("\n"), (0, 0)),
    ("<update>x <update>Lima.</update>", (0, 1)),
    (ask("Lima.") + "</update>", (0, 1)),
    (ask("Lima.") + "</recall>", (0, 1)),
    ("</thinking>" + ask("Lima.") + "<thinking>", (0, 1)),
    # a thinking model's thoughts count for nothing
    ("<think>" + ask("Lima.") + "</think>" + ask("x"), (1, 0)),
    ("<thinking>a <update> of an <update></thinking>" + ask("Lima."), (1, 1)),
])  # fmt: skip
def test_format_and_level_of_an_update(codec, response, paid):
    state = rewards(codec, [response, ask("x"), ask("x"), "\\boxed{Lima}"])[0]
    assert (state["format"], state["level"]) == paid


@pytest.mark.parametrize(("response", "paid"), [
    ("\\boxed{Lima}", 1),
    ("\\boxed{Lima} or \\boxed{Rome}", 1),
    ("\\boxed{Lima}\n\\boxed{Rome}", 1),
    ("\\boxed{}", 0),
    ("\\boxed{ }", 0),
    ("Lima", 0),
    ("\\boxed{Lima", 0),
    ("\\fbox{Lima}", 0),
])  # fmt: skip
def test_format_of_the_answer(codec, response, paid):
    answers = [ask("x"), ask("x"), ask("x"), response]
    assert rewards(codec, answers)[-1]["format"] == paid
    sentence = [*answers[:-1], "Therefore, the answer is Lima."]
    assert rewards(codec, sentence, form="sentence")[-1]["format"] == 1
    plain = rewards(codec, answers, form="plain")[-1]["format"]
    assert plain == 1 and rewards(codec, [*answers[:-1], " "], form="plain")[-1]["format"] == 0


def test_a_trajectory_that_failed_has_rewards_for_what_it_has(codec):
    turns = driven(codec, ask("Otto reached Lima."), ask("Max left."), ask("x"), "x")[:2]
    turns[1] = replace(turns[1], finish=Finish.ERROR, notes=None, response=codec.text(""))
    assert column("sum", states(Trajectory(TASK, turns, error="lost"))) == [2, 0]


# ---------------------------------------------------------------- counting


def test_looks_back_are_counted(codec):
    config = replace(CONFIG, callback="learned", example_query="the year")
    four = replace(TASK, text=" ".join(f for k in (0, 1, 2, 1) for f in FACTS[k]))
    answers = [
        ask("Otto reached Lima.", "Year!"),
        ask("Max left.", "Otto"),
        "<update>Max left.</update><recall>otto",
        ask("Anna " * 14, "the Otto"),
        "\\boxed{Lima}",
    ]
    n = counted(four, config, drive(four, config, codec, answers))
    kept = [len(codec.encode(text)) for text in ("Otto reached Lima.", "Max left.", "Max left.")]
    assert {k: v for k, v in n.items() if v} == {
        **dict(updates=4, queries=3, hits=2, ages=1 + 3, sought=2, holds=2, evidence_sought=2),
        **dict(evidence=2, degenerate=2, unclosed_recall=1, stray_tag=1, memory_capped=1),
        "memory_length": sum(kept) + config.memory_tokens,
    }
    # what is counted is what the rates are made of
    assert {*n} | {*ERRORS} == {name for rate in ReMemR1.rates.values() for name in rate}
    yes, asking = replace(four, answers=("yes",)), replace(config, callback="question")
    answers = [ask(f"Otto {k}", "Otto") for k in range(4)] + ["x"]
    n = counted(yes, asking, drive(yes, asking, codec, answers))
    # not looked for; not asked for
    assert (n["hits"], n["sought"], n["holds"], n["degenerate"]) == (3, 0, 0, 0)
    assert n["evidence_sought"] == 0


def test_what_a_text_holds_of_the_evidence():
    bridge = Task(
        "b",
        "Where was the author of Heat born?",
        ("Lima",),
        pool=Pool(["Heat", "Ida Cole", "Rome"], ["By Ida Cole.", "Born in Lima.", "x"]),
        order=[2, 1, 0],
        gold=(2, 1),
    )
    assert bridge.clues == ("Heat", "Ida Cole")
    assert EvidenceSearch(bridge).clues == [" ida cole "]  # the question has the first
    compared = replace(bridge, question="Is Heat older than Rome?", answers=("no",), gold=(2, 0))
    yes_or_no = replace(bridge, answers=("no",), gold=())
    both = replace(TASK, answers=("Lima", "Rome"), dataset="ruler", kind="niah")
    fact = worlds.make_task(0, 2, "two_hop_reverse")
    for task, text, held in (
        (bridge, "Lima?", "answer"),
        (bridge, "by ida cole", "evidence"),
        (bridge, "Heat", "neither"),
        (bridge, "", "neither"),
        (compared, "Heat, no", "unknown"),
        (yes_or_no, "Ida Cole", "unknown"),
        (both, "Lima", "evidence"),
        (both, "Rome, Lima", "answer"),
        (both, "x", "neither"),
        (fact, fact.clues[0], "evidence"),
        (fact, fact.clues[1], "answer"),
    ):
        assert EvidenceSearch(task).in_text(text) == held, (task.question, text)


def test_a_steps_metrics_are_means_of_what_its_turns_did(codec):
    found, looks = ask("Otto reached Lima."), ask("Max left.", "Otto")
    trajectories = [
        pay(Trajectory(TASK, driven(codec, *answers), k))
        for k, answers in enumerate([
            [found, ask("Max left."), looks, "\\boxed{Lima}"],
            ["x", looks, found, "Lima"],
        ])
    ]  # fmt: skip
    m = describe_turns([Group(TASK, trajectories)], ReMemR1(CONFIG))
    written = [turn.prompt.memory for t in trajectories for turn in t.turns[1:]]
    wanted = {
        "answer_gain": 1 / 6, "answer_level": 2 / 6, "answer_covered": 1,
        "turn_reward_memory": 1 / 6, "turn_reward_callback": 1 / 6,
        "turn_reward_format": 5 / 6, "turn_reward_format_final": 1 / 2,
        "turn_groups_without_signal": 1 / 4, "format_no_update": 1 / 6, "format_stray_tag": 0,
        "recall_queries": 2 / 6, "recall_hits": 1 / 2, "recall_age": 2, "recall_holds": 1,
        "recall_evidence": 1,
        "memory_length": sum(len(memory.ids) for memory in written) / 6,
    }  # fmt: skip
    assert {name: m[name] for name in wanted} == pytest.approx(wanted)
    # caps and tags are those of the response, what was recalled that of the prompt
    first = trajectories[0]
    notes = first.turns[0].notes
    notes.step = replace(notes.step, stray=True, memory_cut=True, query_cut=True)
    first.turns[-1].notes = EvidenceSearch(TASK).notes(Recall("x", "x", (1,), 1.0, 1))
    m = describe_turns([Group(TASK, trajectories)], ReMemR1(CONFIG))
    wanted = dict(memory_capped=1 / 6, query_capped=1 / 6, format_stray_tag=1 / 6,
                  recall_hits=1 / 2, recall_evidence=0)  # fmt: skip
    assert {name: m[name] for name in wanted} == pytest.approx(wanted)
