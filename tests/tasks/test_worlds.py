import random

import pytest

from dev import base
from embedded import tiny
from tasks import worlds


@pytest.mark.parametrize("kind", worlds.KINDS)
@pytest.mark.parametrize("split", worlds.SPLITS)
def test_the_evidence_answers_the_question_and_nothing_else_does(kind, split):
    for task in worlds.make_tasks(0, 40, 5, kind, split):
        facts = base.parse_facts(task.document)
        assert len(facts) == 5 * worlds.FACTS_PER_SECTION
        evidence = [facts[i] for i in task.gold]
        assert task.question == f"Where is {evidence[0][0]}?" and task.answers == (evidence[-1][2],)
        assert [f[0] for f in evidence] == (
            [evidence[0][0]] if kind == "one_fact" else [evidence[0][0], evidence[0][2]]
        )
        for fact in evidence:  # its subject is the subject of nothing else
            assert [f for f in facts if f[0] == fact[0]] == [fact]
        assert list(task.gold) == sorted(task.gold, reverse=kind == "two_hop_reverse")
        assert base.chain(task.question, facts) == evidence
        assert {worlds.split_of(f[0], f[2]) for f in evidence} == {split}


def test_facts_of_the_test_and_dev_splits_stand_in_no_training_document():
    seen = {
        (f[0], f[2])
        for kind in worlds.KINDS
        for t in worlds.make_tasks(1, 300, 16, kind)
        for f in base.parse_facts(t.document)
    }
    assert len(seen) > 4000
    assert {worlds.split_of(*pair) for pair in seen} == {"train"}
    filler = [
        f
        for t in worlds.make_tasks(1, 50, 16, "two_hop", "test")
        for i, f in enumerate(base.parse_facts(t.document))
        if i not in t.gold
    ]
    assert {worlds.split_of(f[0], f[2]) for f in filler} == {"train"}


def test_there_are_more_than_a_hundred_entities_each_a_word_of_its_own():
    assert len({*worlds.PEOPLE, *worlds.PLACES}) == 128


def test_equal_seeds_make_equal_tasks_and_others_other_ones():
    a, b, c = (
        worlds.make_task("1.2", 4, "two_hop"),
        worlds.make_task("1.2", 4, "two_hop"),
        worlds.make_task("1.3", 4, "two_hop"),
    )
    assert a == b != c
    assert len({t.document for t in worlds.make_tasks(0, 50, 2, "one_fact")}) == 50


def test_evidence_is_anywhere():
    places = [t.gold[0] for t in worlds.make_tasks(2, 600, 4, "one_fact")]
    counts = [places.count(i) for i in range(24)]
    assert min(counts) > 5 and max(counts) < 55  # 25 expected


def test_answers_are_balanced():
    """Always naming the commonest place is right less than one time in twenty."""
    answers = [t.answers[0] for t in worlds.make_tasks(3, 800, 2, "two_hop", "test")]
    assert max(answers.count(a) for a in set(answers)) < 40


def test_sections_are_whole_sentences(codec):
    task = worlds.make_task(random.random(), 7, "two_hop")
    sections = codec.cut(task.document, tiny.agent().config.chunk_tokens)
    assert len(sections) == 7
    assert all(len(base.parse_facts(s)) == worlds.FACTS_PER_SECTION for s in sections)
