"""Episodes: generated ledgers, conversations as training tasks, and their questions."""

import itertools
import json
from dataclasses import replace
from functools import cache

import pytest
from conftest import asked_of
from test_locomo import sample, write

from agents import find
from config.errors import UserError
from config.options import RunConfig, TrainConfig
from dev import keeper
from engines.scripted import ScriptedEngine
from rollout import rollout
from suites import ledger
from suites._conversations import ConversationTasks, conversations_of
from suites._training import training_tasks, validation_tasks
from suites.locomo import official_em, official_score
from tasks import worlds
from tasks.conversations import NOT_MENTIONED
from tokens.codec import Codec


def told(episode, person):
    """The places that the sessions say of a person, in their order."""
    facts = [m.text.rstrip(".").split() for m in episode.memories]
    return [f[2] for f in facts if f[0] == person and f[1] != "met"]


@pytest.mark.parametrize("split", worlds.SPLITS)
def test_a_ledger_asks_for_the_last_place_of_each_tracked_person_and_keeps_the_split(split):
    moved = again = 0
    for seed in range(40):
        episode = ledger.make_ledger(seed, 12, split)
        assert len(episode.sessions) == 12 and len(episode.memories) == 24
        assert ledger.make_ledger(seed, 12, split).digest == episode.digest
        people = [probe.question.split()[-1].rstrip("?") for probe in episode.probes]
        assert len({*people}) == 5
        for person, probe in zip(people, episode.probes, strict=True):
            places = told(episode, person)
            assert probe.answers == (places[-1],)
            assert {worlds.split_of(person, place) for place in places} == {split}
            told_so = [m.text for m in episode.memories if m.text.startswith(f"{person} ")]
            for one, next_one in itertools.pairwise(told_so):  # another place, or the same again
                assert one == next_one or one.split()[-1] != next_one.split()[-1]
            moved += len({*places}) > 1
            again += len({*places}) < len(places)
        chatter = {m.text.split()[0] for m in episode.memories if " met " in m.text}
        assert not chatter & {*people}  # nobody who is asked for does anything but arrive
    assert moved > 60 and again > 60


def test_every_session_is_dated_and_the_text_is_all_of_them():
    episode = ledger.make_ledger(0, 6)
    assert [s.date for s in episode.sessions][:2] == ["2024-01-01", "2024-01-02"]
    assert episode.text.count("2024-01-") == 6
    assert all(m.text in episode.text for m in episode.memories)
    with pytest.raises(UserError, match="between"):
        ledger.make_ledger(0, 4)


def test_training_grows_by_sessions_and_repeats_nothing():
    run = RunConfig(data="ledger", lengths=(6, 12), validation="ledger", validation_n=3)
    tasks = training_tasks(run, TrainConfig())
    assert tasks.levels == 1
    first = tasks.batch(0, 0, 4)
    assert [len(t.sessions) for t in first] == [6] * 4
    assert len(tasks.batch(0, 1, 1)[0].sessions) == 12
    assert {t.digest for t in first}.isdisjoint(t.digest for t in tasks.batch(1, 0, 4))
    assert [t.id.split("-")[1] for t in validation_tasks(run)] == ["dev"] * 3


def test_an_evaluation_asks_one_question_of_each_ledger():
    unit, columns = asked_of(data=("ledger",), lengths=(6, 12), n=5, split="test")
    assert unit == "sessions" and [c.length for c in columns] == [6, 12]
    tasks = columns[0].make()
    assert len({t.id for t in tasks}) == len({t.document_digest for t in tasks}) == 5
    for task in tasks:
        assert task.score(task.answers[0]) == 1 and task.score("nowhere") == task.score(None) == 0
        assert not task.probes and task.question and "test" in task.id and task.beside("x") == {}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "talks.json", [sample("conv-26"), sample("conv-30")])


def asked(path, n=1000, **settings):
    """Return the tasks of an evaluation by their ids."""
    (column,) = asked_of(lambda: None, suite="locomo", data=(str(path),), n=n, **settings)[1]
    return {task.id: task for task in column.make()}


def training(path, chosen="", lengths=(3,)):
    return ConversationTasks(f"locomo:{path}{'#' * bool(chosen)}{chosen}", lengths, seed=0)


@cache
def codec():
    return Codec(keeper.make_tokenizer())


def read(agent, task, answer):
    """Read a task with scripted answers: its last turn, and all prompts as they are shown."""
    prompts = []

    def script(prompt):
        prompts.append((prompt, "".join(str(piece) for piece, _ in prompt.pieces)))
        return answer(prompt)

    engine = ScriptedEngine(codec(), script)
    (done,) = rollout(engine, agent, [(task, 0)])
    assert not done.error
    return done.turns[-1], prompts


def test_the_choice_of_category_5_is_asked_and_plays_no_part_in_any_search(path):
    """What a store or a document is searched for is the question itself."""
    task = asked(path)["conv-26-q5"]
    assert task.question == task.probe.problem != task.probe.question
    assert "(b) " in task.question and task.probe.distractor == "plums"
    letter = f"({'ab'[task.probe.choices[1] == NOT_MENTIONED]})"
    assert task.score(letter) == 1 and task.score("plums") == task.score("(c)") == 0
    plain = replace(task, question=task.probe.question, probe=replace(task.probe, distractor=""))
    for agent in (find.make("facts", {}), find.make("bm25", {"chunk_tokens": 64, "top_k": 2})):
        found = []
        for one in (task, plain):
            _, [*_, (prompt, text)] = read(agent, one, lambda prompt: "(a)")
            assert ("\n(a) " in text) == (one is task)
            found.append(str(prompt.memory or prompt.section))
        assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["build", "refine"])
def test_the_policy_that_edits_sees_neither_a_question_nor_the_answers_to_choose_from(path, mode):
    """In an evaluation as in training."""
    task = asked(path)["conv-26-q5"]
    agent = find.make("memupdate", {"memory_budget": 2.0, "mode": mode})
    for one in (task, replace(task, question="", probe=None, probes=(task.probe,))):
        _, prompts = read(agent, one, lambda prompt: "(a)" if prompt.frozen else "")
        edits, answers = ([t for p, t in prompts if bool(p.frozen) == k] for k in (False, True))
        hidden = (task.probe.question, "Choose one of", NOT_MENTIONED, task.probe.choices[0])
        assert edits and not any(words in text for text in edits for words in hidden)
        assert answers and all(task.probe.problem in text for text in answers)


def test_a_suite_asks_every_question_and_grades_it_by_the_official_metric(path):
    tasks = asked(path).values()
    assert {t.kind[0] for t in tasks} == {*"12345"}
    for task in tasks:
        for said in (task.answers[0], "nothing of the kind", "Not mentioned"):
            assert task.score(said) == official_score(said, task.probe)
            assert task.beside(said) == {"official_em": official_em(said, task.probe)}
        assert task.beside(None) == {"official_em": 0.0}
    assert {task.kind.partition(", ")[2] for task in tasks} == {"official metric"}
    assert sum(task.score(task.answers[0]) == 1 for task in tasks) > len(tasks) / 2
    assert len(asked(path, n=1)) == 5  # one of each kind


def test_what_decides_a_score_decides_which_rows_are_found(path):
    """The evidence, and what a store begins with."""
    first, again, events = asked(path), asked(path), asked(path, source_split="events")
    for name, task in first.items():
        assert task.digest == again[name].digest != events[name].digest
        assert task.document_digest == events[name].document_digest
    samples = [sample("conv-26"), sample("conv-30")]
    samples[0]["qa"][0]["evidence"] = ["D1:2"]
    moved = asked(write(path, samples))
    assert [n for n in first if first[n].digest != moved[n].digest] == ["conv-26-q1"]


def test_a_store_that_was_built_is_compared_with_the_evidence_by_sessions(path):
    """What a policy writes carries its session, S1, and questions ask for turns, D1:1."""
    create = {"operation": "create", "content": "Asked in category: pears."}
    call = json.dumps({"name": "manage_memory", "arguments": create})
    agent = find.make("memupdate", {"chunk_tokens": 4096, "memory_budget": 2.0})
    found = []
    for task in [task for name, task in asked(path).items() if name.startswith("conv-26")]:
        # session 1, its end; 2; 10
        edits = iter([f"<tool_call>{call}</tool_call>", "", "", "Done."])
        last, _ = read(agent, task, lambda p, e=edits: "pears" if p.frozen else next(e))
        found.append(last.notes.recall)
    # evidence: D1:1 D2:2, D1:1, none, D10:4, D2:1, D1:1 D10:2 D2:3 D2:4, D2:9 D2:1, D1:2
    assert found == [1 / 2, 1, 1, 0, 0, 1 / 4, 0, 1]


def test_the_oracle_reads_the_lines_of_the_evidence_or_its_whole_session(path):
    task = asked(path)["conv-26-q1"]  # D1:1 and D2:2
    first, second, _ = task.sessions
    lines = [f"{s.when}\n{s.utterances[k].line}" for s, k in ((first, 0), (second, 1))]
    assert task.evidence == "\n".join(lines)
    task.probe = replace(task.probe, evidence=("S2", "lost"))
    assert [line in task.evidence for line in second.text.splitlines()] == [True] * 4
    assert first.when not in task.evidence


@pytest.mark.parametrize(("start", "turns"), [
    ("observations", ("D10:2", "D10:4")), ("summaries", ("S10",)),
])  # fmt: skip
def test_the_baseline_of_the_evidence_has_whole_sessions_where_entries_name_no_turn(
    path, start, turns
):
    agent, tasks = find.make("evidence", {}), asked(path, source_split=start)
    assert [entry.evidence for entry in agent.start(tasks["conv-26-q4"])] == [turns]
    assert agent.start(tasks["conv-26-q3"]) == []


def test_training_on_conversations_asks_only_about_the_sessions_that_are_read(path):
    (whole,) = training(path, "memory-r1/train/observations", (99,)).batch(0, 0, 1)
    assert len(whole.sessions) == 3  # all, where there are not so many
    tasks = training(path, "memory-r1/train/observations", (1, 2))
    for level, step in itertools.product((0, 1), range(6)):
        for task in tasks.batch(step, level, 3):
            assert "conv-26" in task.id and len(task.sessions) == level + 1
            shown = {session.number for session in task.sessions}
            assert task.probes and all({*p.sessions} <= shown for p in task.probes)
            assert not any(p.abstains for p in task.probes)
            assert all(m.session in shown for m in task.memories)


@pytest.mark.parametrize(("chosen", "without"), [  # after the part, without one, before the start
    ("memory-r1/train/adversarial", "memory-r1/train"), ("adversarial", ""),
    ("memory-r1/train/adversarial/events", "memory-r1/train/events"),
])  # fmt: skip
def test_training_pays_for_category_5_where_the_user_asks_for_it(path, chosen, without):
    def paid(chosen):
        tasks = training(path, chosen).batch(0, 0, 20)
        return {probe.category for task in tasks for probe in task.probes}

    def evaluated(chosen):
        return {task.probe.category for task in asked(path, source_split=chosen).values()}

    assert paid(chosen) == {1, 2, 4, 5} and paid(without) == {1, 2, 4}
    start = conversations_of(f"locomo:{path}#{chosen}").start
    assert start == ("events" if "events" in chosen else "observations")
    assert evaluated(chosen) == {1, 2, 3, 4, 5}
    if without:
        assert evaluated(without) == {1, 2, 3, 4}


@pytest.mark.parametrize(("chosen", "kinds"), [
    ("", "2 temporal, 3 open-domain, 5 adversarial"),
    ("memory-r1/train", "2 temporal, 3 open-domain"),
    ("memory-r1/train/adversarial", "2 temporal, 3 open-domain, 5 adversarial"),
])  # fmt: skip
def test_an_evaluation_says_which_categories_have_no_question(path, capsys, chosen, kinds):
    asked(path)
    assert not capsys.readouterr().out
    samples = [sample("conv-26"), sample("conv-30")]
    for made in samples:
        made["qa"] = [one for one in made["qa"] if one["category"] in (1, 4)]
    asked(write(path, samples), source_split=chosen)
    at = f"locomo:{path}#{chosen}" if chosen else f"locomo:{path}"
    said = f"{at}: no question of {kinds} is in it, none will be asked.\n"
    assert capsys.readouterr().out == said


def test_a_part_validates_by_an_episode_of_each_conversation_and_the_same_questions(path, capsys):
    def validation(chosen, n):
        return validation_tasks(
            RunConfig(data="ledger", validation=f"locomo:{path}{chosen}", validation_n=n)
        )

    (task,), (again,) = (validation("#memory-r1/validation", 3) for _ in range(2))
    assert task.id == "conv-30" and len(task.sessions) == 3 and len(task.probes) == 3
    assert again.probes == task.probes
    assert "no question of 3 open-domain is in it, none will be valid" in capsys.readouterr().out
    # not 5, nor what names no evidence
    both = [(task.id, len(task.probes)) for task in validation("", 64)]
    assert both == [("conv-26", 5), ("conv-30", 5)]
    (task,) = validation("#memory-r1/validation/adversarial", 9)
    assert sum(p.category == 5 for p in task.probes) == 2
    samples = [sample("a")]
    samples[0]["qa"] = [one for one in samples[0]["qa"] if one["category"] == 5]
    write(path, samples)
    with pytest.raises(UserError, match="no question that a validation could ask"):
        validation("", 64)


def test_categories_without_a_question_are_said_at_the_start(path, capsys):
    """Of two sessions there is a question of each category but 3, whose evidence is not named."""

    def said(lengths):
        training(path, lengths=lengths)
        return capsys.readouterr().out

    three = said((1, 3))
    assert three.startswith(f"locomo:{path}: no question of 3 open-domain is about 3 sessions in")
    assert three.count("\n") == 1
    assert "no question of 1 multi-hop, 3 open-domain is about 1 " in said((1,))
    samples = [sample("made-1"), sample("made-2")]
    for made, left_out in zip(
        samples, ("talks.json: 1 of 12 questions are left out.\n", ""), strict=True
    ):
        made["qa"][2]["evidence"] = ["D2:1"]
        write(path, samples)
        assert said((3,)).endswith(left_out) and bool(left_out) == bool(said((3,)))
    samples[0]["qa"][2]["evidence"] = []
    for made in samples:
        made["qa"] = [asked for asked in made["qa"] if asked["category"] in (3, 5)]
    del samples[1]["qa"][0]
    write(path, samples)
    with pytest.raises(UserError, match="no question is about 2 sessions in a row"):
        training(path, lengths=(2,))


@pytest.mark.parametrize("chosen", ["half/train", "memory-r1/dev", "memory-r1/a/b/c"])
def test_a_rule_or_part_that_there_is_not_is_refused(path, chosen):
    with pytest.raises(UserError, match="RULE/PART/adversarial/START"):
        conversations_of(f"locomo:{path}#{chosen}")
