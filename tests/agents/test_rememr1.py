"""ReMemR1 with scripted answers: what is parsed, recalled, paid by equations 5 to 7, counted."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.rememr1 import ERRORS, NOT_RECALLED, EvidenceSearch, ReMemR1, ReMemR1Config, parse_step
from config.errors import UserError
from data import Pool, Task
from memagent import NO_MEMORY, Finish, Group, MemAgent, MemAgentConfig, Trajectory, Turn
from memory import Recall
from report.metrics import describe_turns
from tasks import worlds

CONFIG = ReMemR1Config(
    chunk_tokens=24, memory_tokens=13, final_tokens=24, query_tokens=8, step_tokens=40
)
LONG = dict(memory_tokens=64, query_tokens=64)
WHERE = (
    "Anna Rome Otto Lima Ida Oslo Nils Nice Emil Cork Olga Graz",
    "Karin Kyoto Peter Paris Petra Perth Rita Riga Sonja Sofia Viktor Vienna",
    "Max Malmo Marta Milan Mina Miami Marco Minsk Leon Leeds Laura Linz",
)  # by section
FACTS = [
    [f"{name} reached {place}." for name, place in zip(*[iter(row.split())] * 2, strict=True)]
    for row in WHERE
]


def sections(*order) -> str:
    """The text of a task whose sections are those of `FACTS`, in an order."""
    return " ".join(fact for k in order for fact in FACTS[k])


TASK = Task("t", "Where is Otto?", ("Lima",), sections(0, 1, 2))
BOTH = replace(TASK, question="Which?", answers=("Lima", "Rome"), dataset="ruler", kind="niah")
OTTO, LEFT, LOOKS = "Otto reached Lima.", "Max left.", ("Max left.", "Otto")


def ask(memory: str, query: str = "") -> str:
    return f"<update>{memory}</update>" + f"<recall>{query}</recall>" * bool(query)


def drive(codec, *answers, task=TASK, **settings):
    """Run the agent on scripted responses; returns its turns."""
    steps, turns = ReMemR1(replace(CONFIG, **settings)).on(codec).run(task), []
    prompt = next(steps)
    for answer in answers:
        text = codec.text(answer)
        turns.append(Turn(prompt, [], list(text.ids), [], Finish.STOP, text))
        try:
            prompt = steps.send(turns[-1])
        except StopIteration:
            return turns
    raise AssertionError("the agent wants more turns than there are answers")


def states(turns, task=TASK, **settings):
    """What each turn earns, by name; `sum` is what trains, the rest stands in the turn's notes."""
    found = []
    turn_rewards = ReMemR1(replace(CONFIG, **settings)).turn_rewards(Trajectory(task, turns))
    for turn, rewards in zip(turns, turn_rewards, strict=True):
        assert [*rewards] == ["memory", "callback", "format"]
        found.append(rewards | {"sum": sum(rewards.values())})
        if turn.notes is not None:
            found[-1] |= {name: getattr(turn.notes, name) for name in ("gain", "level", "covered")}
    return found


def rewards(codec, answers, task=TASK, **settings):
    return states(drive(codec, *answers, task=task, **settings), task, **settings)


def column(name, found):
    return [state[name] for state in found]


def counted(turns, task=TASK) -> Counter:
    """What is counted of the turns of a trajectory."""
    n: Counter = Counter()
    for turn in turns:
        n.update(ReMemR1(CONFIG).count(task, turn))
    return n


THOUGHT = "<think><update>t</update><recall>t</recall></think>"


@pytest.mark.parametrize(("response", "memory", "query", "errors"), [
    # a query over several lines
    ("<update>Anna.</update><recall>who\nis she?</recall>", "Anna.", "who is she?", ""),
    ("<update>a</update><recall>  Otto \t Lima </recall>", "a", "Otto Lima", ""),
    # two on one line
    ("<update>a</update><recall>q1</recall> and <recall>q2</recall>", "a", "q1", "multi_recall"),
    ("so <recall>q</recall> it is", None, "q", "no_update"),  # a recall only
    ("<update>a</update><recall>who", "a", None, "unclosed_recall stray"),
    ("<update>a\nb\n\nc</update>", "a\nb\n\nc", None, ""),  # an update over several lines
    ("<update> \n </update>", None, None, "empty_update"),
    ("", None, None, "no_update"), ("Anna met Otto.", None, None, "no_update"),
    ("<update>a</update> <update>b</update>", "a", None, "multi_update"),
    ("<update></update><update>b</update>", "b", None, "multi_update empty_update"),
    # opened anew before it was closed
    ("<update>a <update>b</update>", "b", None, "multi_update stray"),
    ("<update>a", None, None, "no_update stray"), ("a</update>", None, None, "no_update stray"),
    ("<update>a</update></update>", "a", None, "stray"),
    ("<update>a</update><recall> </recall>", "a", None, "empty_recall"),
    ("<update>a</update><recall></recall> or </recall>", "a", None, "empty_recall stray"),
    ("<update>a</update><recall></recall>\n<recall>q</recall>", "a", "q",
     "multi_recall empty_recall"),
    ("<update>a</update><recall>q\n<recall>r</recall>", "a", "r", "unclosed_recall stray"),
    # tags in a query
    ("<update>a</update><recall>who is <b>Anna</b>?</recall>", "a", "who is Anna ?", ""),
    ("<update>a <recall>q</recall> b</update>", "a  b", "q", ""),  # no query stays in a memory
    ("<thinking>an <update> or a <recall>x</recall>?</thinking><update>a</update>", "a", None, ""),
    ("<thinking>a <recall>x</recall></thinking><update>a</update> <recall>q</recall>", "a", "q",
     ""),
    ("<thinking>never closed <update>a</update>", "a", None, "stray"),
    ("</thinking><update>a</update><thinking>", "a", None, "stray"),
    ("<update>A <recall>who</update>", "A who", None, "unclosed_recall stray"),
    ("<UPDATE>a</UPDATE>", None, None, "no_update"),  # tags are written as the prompt writes them
])  # fmt: skip
def test_the_parsers_table(codec, response, memory, query, errors):
    step = parse_step(response)
    assert (step.memory, step.query) == (memory, query)
    assert [*step.errors, *["stray"] * step.stray] == errors.split()
    cut = parse_step(response, Finish.LENGTH)
    assert cut == replace(step, errors=(*step.errors, "truncated"))
    thinking = response.partition("<thinking>")[2].partition("</thinking>")
    assert step.thinking == (thinking[0].strip() if thinking[1] else None)
    # the thoughts of a thinking model are neither update nor query
    for said in (response, THOUGHT + response):
        turns = drive(codec, said, ask("x"), ask("x"), "x", **LONG)
        assert turns[0].notes.step == step
        assert states(turns)[0]["format"] == (not errors)


TAGS = "<update> </update> <recall> </recall> <thinking> </thinking>"
PIECES = [*TAGS.split(), " a", "\n", " b "]


@given(st.lists(st.sampled_from(PIECES), max_size=14))
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


def test_caps_cut_memory_and_query_and_say_so(codec):
    short = ask("Anna met Otto.", "Anna met")
    long = ask("Anna met Otto. Ida left.", "Anna met Otto")
    turns = drive(codec, short, short, long, "x", memory_tokens=4, query_tokens=2)
    fits, _, cut = (turn.notes.step for turn in turns[:3])
    assert (cut.memory, cut.memory_cut) == (" Anna met Otto.", True)
    assert (cut.query, cut.query_cut) == (" Anna met", True)
    assert turns[-1].notes.recalled.query == " Anna met"  # what the cap has left
    assert not fits.memory_cut and not fits.query_cut


def test_what_is_looked_for_stands_in_the_next_prompt_and_only_there(codec):
    otto, karin = OTTO, "Karin reached Kyoto."
    answers = [ask(otto), ask(karin, "Otto"), ask(LEFT, "Karin and Rome"), "\\boxed{Lima}"]
    turns = drive(codec, *answers)
    assert [t.notes.recalled for t in turns] == [
        *(Recall(), Recall(), Recall(otto, "Otto", (1,), 1.0, 1)),
        Recall(karin, "Karin and Rome", (2,), 1 / 3, 1),
    ]
    shown = [
        t.prompt.text.partition("<recalled_memory>\n")[2].partition("\n</recalled_memory>")[0]
        for t in turns
    ]
    assert shown == [NOT_RECALLED, NOT_RECALLED, otto, karin]
    assert [t.prompt.memory for t in turns] == [NO_MEMORY, otto, karin, LEFT]
    assert [t.prompt.final for t in turns] == [False, False, False, True]
    assert [t.notes.step is None for t in turns] == [False, False, False, True]
    assert [t.notes.asked for t in turns] == ["", "Otto", "Karin and Rome", ""]
    assert [t.prompt.max_tokens for t in turns] == [40, 40, 40, 24]
    # the three ways of looking back differ in nothing else
    question, off = (drive(codec, *answers, callback=how) for how in ("question", "off"))
    assert [t.notes.recalled.text for t in question] == ["", "", otto, otto]
    assert [t.notes.recalled for t in off] == [Recall()] * 4
    learned, question, off = ([t.prompt.text for t in arm] for arm in (turns, question, off))
    assert learned[:2] == question[:2] == off[:2]
    assert learned[2] == question[2] == off[2].replace(NOT_RECALLED, otto)


def test_the_question_is_looked_for_whether_or_not_the_policy_asks(codec):
    for third in ("nonsense", ask(*LOOKS)):
        turns = drive(codec, ask(OTTO), ask(LEFT), third, "x", callback="question")
        assert [t.notes.recalled.query for t in turns] == ["", *[TASK.question] * 3]
        assert [t.notes.recalled.steps for t in turns] == [(), (), (1,), (1,)]
        # nor is it its doing
        assert column("callback", states(turns, callback="question")) == [0] * 4


def test_a_response_without_an_update_never_wipes_the_memory_unnoticed(codec):
    turns = drive(codec, ask(OTTO), "<recall>Otto</recall>", "nonsense", "x")
    assert [t.prompt.memory for t in turns] == [NO_MEMORY, OTTO, OTTO, OTTO]
    # what stands in the prompt anyway is not recalled
    assert turns[2].notes.recalled == Recall(query="Otto")
    assert [t.notes.step.errors for t in turns[:-1]] == [(), ("no_update",), ("no_update",)]


@pytest.mark.parametrize("layout", ["shared", "paper"])
def test_prompts_have_their_blocks_in_order_and_share_what_they_can(layout):
    agent = ReMemR1(ReMemR1Config(layout=layout, example_query="LOUD"))
    rest = ["problem", "recalled_memory", "memory"]
    slots = [piece for piece, constant in agent.template("recall_update") if not constant]
    assert slots == {"shared": ["section", *rest], "paper": [*rest, "section"]}[layout]
    assert [p for p, constant in agent.template("recall_final") if not constant] == rest
    text = "".join(piece for piece, constant in agent.template("recall_update") if constant)
    for tag in ("thinking", "update", "recall"):
        assert text.count(f"<{tag}>") == text.count(f"</{tag}>") >= 1
    assert "<recall>LOUD</recall>" in text and "{example}" not in text


def test_templates_of_ones_own(tmp_path, codec):
    update, final = (tmp_path / f"recall_{name}.txt" for name in ("update", "final"))
    update.write_text("{prompt}|{recalled_memory}|{memory}|{chunk}|<update>")
    final.write_text("{prompt}|{recalled_memory}|{memory}|\\boxed{}")
    own = dict(templates=str(tmp_path))
    turns = drive(codec, ask("Otto."), ask("Ida."), ask("Max.", "Otto"), "x", **own)
    assert turns[-1].prompt.text == f"{TASK.question}|Otto.|Max.|\\boxed{{}}"
    for text, callback, refused in (
        ("{prompt} without a section", "learned", "section"),
        ("{chunk} {memory}", "learned", "recalled.memory"),
        ("{chunk} {memory}", "off", ""),
    ):
        update.write_text(text)
        if refused:
            with pytest.raises(UserError, match=refused):
                ReMemR1(replace(CONFIG, callback=callback, **own))
        else:
            ReMemR1(replace(CONFIG, callback=callback, **own))


@pytest.mark.parametrize("wrong", [
    {"callback": "always"}, {"retriever": "tfidf"}, {"query_tokens": 0}, {"recall_k": 0},
    {"step_tokens": -1},
    {"example_query": "{section}"}, {"example_query": "<update>"},
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        ReMemR1Config(**wrong)


def test_retrievers_and_several_hits_reach_the_prompt(codec):
    query = "who left Rome or Lima"
    answers = [ask("Anna left Rome."), ask("Otto left Lima."), ask("Ida left.", query), "x"]
    for retriever in ("word_recall", "bm25"):
        last = drive(codec, *answers, retriever=retriever, recall_k=2, **LONG)[-1]
        recalled = last.notes.recalled
        assert recalled.text == "Anna left Rome.\n\nOtto left Lima." in last.prompt.text
        assert {*recalled.steps} == {1, 2}, retriever
    nothing = [*answers[:2], ask("Ida left.", "Boris"), "x"]
    assert drive(codec, *nothing)[-1].notes.recalled == Recall(query="Boris")


def test_the_window_has_room_for_what_is_recalled(codec):
    agent = ReMemR1(ReMemR1Config(100, 20, 10, step_tokens=50, recall_k=2))
    assert agent.turn_tokens() == agent.window_needed() == 100 + 3 * 20 + 50 + 1024
    assert MemAgent(MemAgentConfig(100, 20, 10)).turn_tokens() == 100 + 20 + 20 + 1024
    shorter = agent.with_settings(step_tokens=None, query_tokens=7)
    assert shorter.turn_tokens() == 100 + 3 * 20 + 47 + 1024


# Equation 5: max_y recall(y, m_t) - max_y recall(y, m_t-1)
# Equation 6: max_y recall(y, E + m_t + c_t) - max_y recall(y, m_t + c_t)
# recall(y, x): the share of y's words that x has; m_0 is empty. Each line: the task, the memories
# after its sections with a query or none, and by hand (eq. 5, eq. 6) of each turn. The sections are
# FACTS; what is asked at a turn is looked for in the memories written by then. Other than in the
# printed equations, words of the question, yes and no are not looked for: then nothing is paid.
@pytest.mark.parametrize(("task", "memories", "paid"), [
    (("Is Otto in Lima?", "yes"), ("yes, Otto", "Ida", "yes"), [(0, 0)] * 3),
    (("Did Otto move?", "no"), ("no", ("Ida", "no"), ("Max", "no")), [(0, 0)] * 3),
    (("Who is older, Leo or Eva?", "Eva"), ("Eva", ("Ida", "Eva"), "Eva"), [(0, 0)] * 3),
    (("Who is older, Leo or Eva?", "Eva"), ("Eva", "Ida", ("Leo", "Eva")), [(0, 0)] * 3),
    (("Where is Fort Gray?", "Gray Bay"), ("Gray", "Gray Bay", "Bay"), [(0, 0), (1, 0), (0, 0)]),
    (("Where?", "Bay Hill", "Cape"), ("Bay", "Cape", "Bay Hill"), [(0.5, 0), (0.5, 0), (0, 0)]),
    (("Where?", "Bay Hill"), ("Bay", "Hill", ("Hill", "Bay")), [(0.5, 0), (0, 0), (0, 0.5)]),
    (("Yes or no?", "no", "Cape"), ("Cape", "no", "Ida"), [(1, 0), (-1, 0), (0, 0)]),
    (("Where is Otto?", "Lima"), (OTTO, OTTO, LEFT), [(1, 0), (0, 0), (-1, 0)]),
    (("Where is Otto?", "Lima"), (OTTO, LEFT, LOOKS), [(1, 0), (-1, 0), (0, 1)]),
    (("Where?", "Bay Hill", "yes"), ("Bays", "the HILL.", "Bay"), [(0, 0), (0.5, 0), (0, 0)]),
    # the answer in sight already, in section or memory: the look back has brought nothing
    (replace(TASK, text=sections(1, 2, 0)), (OTTO, LEFT, LOOKS), [(1, 0), (-1, 0), (0, 0)]),
    (("Where is Otto?", "Lima"), (OTTO, ("Lima, said Otto.", "Otto"), ("Max left.", "Otto came")),
     [(1, 0), (0, 0), (-1, 0)]),
    # at 2 the memory that it started from has it; what was recalled before is not in sight
    (replace(TASK, text=sections(0, 1, 2, 1)), (OTTO, LOOKS, LOOKS, LOOKS),
     [(1, 0), (-1, 0), (0, 1), (0, 1)]),
    (("Is it Lima or Rome, Otto?", "Lima"), (OTTO, LOOKS, LOOKS), [(0, 0)] * 3),
    # m_0 is empty: a gold word of the first memory's wording was not in sight when it came back
    (("Which?", "previous"), ("it is previous", NO_MEMORY, ("x", "previous")),
     [(1, 0), (-1, 0), (0, 1)]),
    (("Which?", "previous"), (NO_MEMORY, "x", "previous"), [(0, 0), (0, 0), (1, 0)]),
    (BOTH, (OTTO, LOOKS, "Lima, Rome."), [(0.5, 0), (-0.5, 0), (1, 0)]),
])  # fmt: skip
def test_golden_vectors_of_equations_5_and_6(codec, task, memories, paid):
    if isinstance(task, tuple):
        task = replace(TASK, question=task[0], answers=task[1:])
    responses = [ask(*(m if isinstance(m, tuple) else (m,))) for m in memories] + ["\\boxed{x}"]
    found = rewards(codec, responses, task, **LONG)
    assert [(s["memory"], s["callback"]) for s in found] == [*paid, (0, 0)]
    gains = [gain for gain, _ in paid]
    assert column("gain", found) == [*gains, 0]
    assert column("level", found) == [*accumulate(gains), 0]
    assert column("covered", found[:-1]) == [any(map(any, paid))] * len(paid)
    assert column("format", found) == [1] * len(found)
    leveled = rewards(codec, responses, task, memory_reward="level", **LONG)
    assert column("memory", leveled) == column("level", found)


def test_an_update_without_a_turn_after_it_has_added_nothing_yet(codec):
    """A trajectory that broke off: the memory is known to have been what the prompt shows."""
    turns = drive(codec, ask(OTTO), ask("Lima."), ask("Lima."), "x")
    assert [(s["gain"], s["level"]) for s in states(turns[:2])] == [(1, 1), (0, 1)]
    # one that failed has rewards for what it has
    turns[1] = replace(turns[1], finish=Finish.ERROR, notes=None, response=codec.text(""))
    assert column("sum", states(turns[:2])) == [2, 0]


@pytest.mark.parametrize(("response", "form", "paid"), [
    ("\\boxed{Lima}\n\\boxed{Rome}", "boxed", 1), ("\\boxed{ }", "boxed", 0),
    ("\\boxed{Lima", "boxed", 0),
    ("<think>\\boxed{Lima}</think>Lima", "boxed", 0),
    ("Therefore, the answer is Lima.", "sentence", 1),
    ("Lima", "plain", 1), (" ", "plain", 0),
])  # fmt: skip
def test_format_of_the_answer(codec, response, form, paid):
    assert rewards(codec, [ask("x")] * 3 + [response], form=form)[-1]["format"] == paid


def test_looks_back_are_counted(codec):
    four = replace(TASK, text=sections(0, 1, 2, 1))
    answers = [
        ask(OTTO, "Year!"),
        ask(*LOOKS),
        "<update>Max left.</update><recall>otto",
        ask("Anna " * 14, "the Otto"),
        "\\boxed{Lima}",
    ]
    n = counted(drive(codec, *answers, task=four, example_query="the year"), four)
    kept = [len(codec.encode(text)) for text in (OTTO, LEFT, LEFT)]
    assert {k: v for k, v in n.items() if v} == {
        **dict(updates=4, queries=3, hits=2, ages=1 + 3, sought=2, holds=2, evidence_sought=2),
        **dict(evidence=2, degenerate=2, unclosed_recall=1, stray_tag=1, memory_capped=1),
        "memory_length": sum(kept) + CONFIG.memory_tokens,
    }
    # what is counted is what the rates are made of
    assert {*n} | {*ERRORS} == {name for rate in ReMemR1.rates.values() for name in rate}
    yes = replace(four, answers=("yes",))
    answers = [ask(f"Otto {k}", "Otto") for k in range(4)] + ["x"]
    n = counted(drive(codec, *answers, task=yes, callback="question"), yes)
    # not looked for; not asked for
    assert (n["hits"], n["sought"], n["holds"], n["degenerate"]) == (3, 0, 0, 0)
    assert n["evidence_sought"] == 0
    n = counted(drive(codec, ask(OTTO), ask(*LOOKS), ask("x"), "x", task=BOTH), BOTH)
    assert (n["hits"], n["sought"], n["holds"]) == (1, 1, 0)


BRIDGE = Task(
    "b",
    "Where was the author of Heat born?",
    ("Lima",),
    pool=Pool(["Heat", "Ida Cole", "Rome"], ["By Ida Cole.", "Born in Lima.", "x"]),
    order=[2, 1, 0],
    gold=(2, 1),
)
COMPARED = replace(BRIDGE, question="Is Heat older than Rome?", answers=("no",), gold=(2, 0))
FACT = worlds.make_task(0, 2, "two_hop_reverse")


@pytest.mark.parametrize(("task", "text", "held"), [
    (BRIDGE, "Lima?", "answer"), (BRIDGE, "by ida cole", "evidence"),
    (BRIDGE, "Heat", "neither"),  # the question has it
    (COMPARED, "Heat, no", "unknown"), (BOTH, "Lima", "evidence"), (BOTH, "Rome, Lima", "answer"),
    (BOTH, "x", "neither"), (FACT, FACT.clues[0], "evidence"), (FACT, FACT.clues[1], "answer"),
])  # fmt: skip
def test_what_a_text_holds_of_the_evidence(task, text, held):
    assert EvidenceSearch(task).in_text(text) == held


def test_a_steps_metrics_are_means_of_what_its_turns_did(codec):
    trajectories = []
    for answers in (
        [ask(OTTO), ask(LEFT), ask(*LOOKS), "\\boxed{Lima}"],
        ["x", ask(*LOOKS), ask(OTTO), "Lima"],
        # over both caps
        [ask("Anna " * 14, "Karin " * 9) + "</update>", ask(*LOOKS), ask(OTTO), "x"],
    ):
        turns = drive(codec, *answers)
        paid = ReMemR1(CONFIG).turn_rewards(Trajectory(TASK, turns))
        for turn, turn_rewards in zip(turns, paid, strict=True):
            turn.rewards = turn_rewards
        trajectories.append(Trajectory(TASK, turns, len(trajectories)))
    m = describe_turns([Group(TASK, trajectories)], ReMemR1(CONFIG))
    written = [turn.prompt.memory for t in trajectories for turn in t.turns[1:]]
    wanted = {
        "answer_gain": 2 / 9, "answer_level": 3 / 9, "answer_covered": 1,
        "turn_reward_memory": 2 / 9, "turn_reward_callback": 1 / 9,
        "turn_reward_format": 7 / 9, "turn_reward_format_final": 1 / 3,
        "turn_groups_without_signal": 1 / 4, "format_no_update": 1 / 9, "format_stray_tag": 1 / 9,
        "recall_queries": 4 / 9, "recall_hits": 1 / 4, "recall_age": 2, "recall_holds": 1,
        "recall_evidence": 1, "memory_capped": 1 / 9, "query_capped": 1 / 9,
        "memory_length": sum(len(memory.ids) for memory in written) / 9,
    }  # fmt: skip
    assert {name: m[name] for name in wanted} == pytest.approx(wanted)
