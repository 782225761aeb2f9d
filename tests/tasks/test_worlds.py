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
        x, _, y = evidence[0]
        subjects = {"one_fact": [x], "changed": [x, x]}.get(kind, [x, y])
        assert [fact[0] for fact in evidence] == subjects
        # nothing else is said of them
        assert [f for f in facts if f[0] in subjects] == [facts[i] for i in sorted(task.gold)]
        assert list(task.gold) == sorted(task.gold, reverse=kind == "two_hop_reverse")
        if kind == "changed":
            assert y in worlds.PLACES and task.answers != (y,)
        else:
            assert base.chain(task.question, facts) == evidence
        assert {worlds.split_of(f[0], f[2]) for f in evidence} == {split}


def test_facts_of_the_test_and_dev_splits_stand_in_no_training_document():
    def facts(seed, n, kind, split, gold=True):
        for task in worlds.make_tasks(seed, n, 16, kind, split):
            for i, (subject, _, obj) in enumerate(base.parse_facts(task.document)):
                if gold or i not in task.gold:
                    yield subject, obj

    seen = {pair for kind in worlds.KINDS for pair in facts(1, 300, kind, "train")}
    assert len(seen) > 4000
    for pairs in (seen, facts(1, 50, "two_hop", "test", gold=False)):
        assert {worlds.split_of(*pair) for pair in pairs} == {"train"}


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_between_the_facts_stand_the_sentences_of_a_text(kind):
    filler = [f"It was day {k}." for k in range(7)]
    bare = worlds.make_task("s", 9, kind, "dev", filler[:0])
    task = worlds.make_task("s", 9, kind, "dev", filler)
    texts = [task.pool.texts[k] for k in task.order]
    assert len(bare.order) == 6 * 9 and len(texts) == 2 * 9
    first = filler.index(texts[1])
    assert texts[1::2] == [filler[(first + k) % 7] for k in range(9)]
    notes = [texts[k] for k in task.gold]
    assert all(text.split()[1] in worlds.TO_PLACE + worlds.TO_PERSON for text in texts[::2])
    assert task.question == f"Where is {notes[0].split()[0]}?"
    assert task.answers == (notes[-1].split()[2].rstrip("."),)
    assert worlds.make_task("s", 1, kind, "dev", filler).n_documents == 1  # with both its facts


def test_equal_seeds_make_equal_tasks_and_others_other_ones():
    a, b, c = (worlds.make_task(seed, 4, "two_hop") for seed in ("1.2", "1.2", "1.3"))
    assert a == b != c and len({*worlds.PEOPLE, *worlds.PLACES}) == 128
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
