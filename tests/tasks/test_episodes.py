"""Episodes: generated ledgers, conversations as training tasks, and their questions."""

import pytest
from test_locomo import sample, write

from config.errors import UserError
from config.options import EvalConfig, RunConfig, TrainConfig
from tasks import episodes, ledger, worlds
from tasks.conversations import Probe
from tasks.locomo_score import official_score
from tasks.sources import training_tasks, validation_tasks
from tasks.suites import columns_of


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
    config = EvalConfig(data=("ledger",), lengths=(6, 12), n=5, split="test")
    unit, columns = columns_of(config, lambda: None)
    assert unit == "sessions" and [c.length for c in columns] == [6, 12]
    tasks = columns[0].make()
    assert len({t.id for t in tasks}) == len({t.document_digest for t in tasks}) == 5
    for task in tasks:
        assert task.score(task.answers[0]) == 1 and task.score("nowhere") == task.score(None) == 0
        assert not task.probes and task.question and "test" in task.id


# ---------------------------------------------------------------- conversations


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "talks.json", [sample("conv-26"), sample("conv-30")])


def test_a_suite_asks_every_question_and_grades_it_by_the_official_metric(path):
    config = EvalConfig(suite="locomo", data=(str(path),), n=1000)
    unit, (column,) = columns_of(config, lambda: None)
    tasks = column.make()
    assert unit == "sessions" and {t.kind[0] for t in tasks} == {*"12345"}
    for task in tasks:
        for said in (task.answers[0], "nothing of the kind", "Not mentioned"):
            assert task.score(said) == official_score(said, task.asked)
    assert sum(task.score(task.answers[0]) == 1 for task in tasks) > len(tasks) / 2
    few = columns_of(EvalConfig(suite="locomo", data=(str(path),), n=1), lambda: None)[1]
    assert len(few[0].make()) == 5  # one of each kind


def test_training_on_conversations_asks_only_about_the_sessions_that_are_read(path):
    source = f"locomo:{path}#memory-r1/train/observations"
    tasks = episodes.ConversationTasks(source, (1, 2), seed=0)
    for level, n in ((0, 1), (1, 2)):
        for step in range(6):
            for task in tasks.batch(step, level, 3):
                assert "conv-26" in task.id and len(task.sessions) == n
                shown = {session.number for session in task.sessions}
                assert task.probes and all({*p.sessions} <= shown for p in task.probes)
                assert not any(p.abstains for p in task.probes)
                assert all(m.session in shown for m in task.memories)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [("#half/train", "RULE/PART/START"), ("#memory-r1/dev", "RULE"), ("#memory-r1/a/b/c", "RULE")],
)
def test_a_rule_or_part_that_there_is_not_is_refused(path, chosen, said):
    with pytest.raises(UserError, match=said):
        episodes.conversations_of(f"locomo:{path}{chosen}")


def test_more_sessions_than_any_conversation_has_are_all_of_them(path):
    tasks = episodes.ConversationTasks(f"locomo:{path}", (99,), seed=0)
    (task,) = tasks.batch(0, 0, 1)
    assert len(task.sessions) == max(p for q in task.probes for p in q.sessions) or task.sessions


def test_the_words_of_an_answer_and_of_a_refusal():
    asked = Probe("q", "Who?", ("Ada Lovelace",), 0)
    assert episodes.word_f1("Ada", asked) == pytest.approx(2 / 3)
    nothing = Probe("q", "Who?", ("-",), 0, abstains=True)
    assert episodes.word_f1("It is not mentioned.", nothing) == 1
    assert episodes.word_f1("Ada", nothing) == 0
