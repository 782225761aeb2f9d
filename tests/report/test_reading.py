"""What is counted of a trajectory while it reads, by hand."""

import pytest

from data import Task
from memagent import Agent, Finish, Prompt, Turn
from report.reading import Reading, slim
from tokens.codec import Text


class Counting(Agent):
    def count(self, task, turn):
        return {"turns": 1, "memory_capped": turn.prompt.cut == 7}


def text(n, word="x"):
    return Text(word * n, tuple(range(n)))


def turn(section=0, memory=0, response="Lima", finish=Finish.STOP, **about):
    prompt = Prompt((("x", True),), 9, section=text(section), memory=text(memory), **about)
    return Turn(prompt, [1, 2, 3], [4, 5], [-0.5, -0.5], finish, Text(response, (4, 5)))


def test_a_reading_is_counted_turn_by_turn():
    first = turn(5, cut=7)
    again = turn(4, 1)
    turns = [
        turn(aside=True), first, again,
        turn(0, 9, " ", after=again),  # the second one of the second section
        turn(3, 2, finish=Finish.LENGTH, given="Lima"), turn(0, 4, "<think>no", final=True),
        turn(0, 6, frozen=True),
    ]  # fmt: skip
    reading = Reading(Task("a", "Where?", ("Lima",)), Counting())
    for each in turns:
        reading.add(each)
    assert reading.row() == {
        "sections": 3, "model_calls": 6, "tokens_read": 21, "tokens_written": 14,
        "document_tokens": 12, "cut": 7, "memory_cut": 2, "memory_empty": 1,
        "memory_tokens": pytest.approx((1 + 2 + 4) / 3, abs=0.01),
        "counts": {"turns": 7, "memory_capped": 1},
    }  # fmt: skip
    assert reading.memory == "xxxxxx"


@pytest.mark.parametrize(("final", "whole", "kept"), [
    (False, False, ("", "")), (False, True, ("xx", "Lima")), (True, False, ("xx", "Lima")),
])  # fmt: skip
def test_a_slim_turn_has_no_ids_and_its_texts_where_they_are_shown(final, whole, kept):
    found = slim(turn(3, 2, final=final), whole, text(2))
    assert (found.prompt.memory, found.response) == kept and found.prompt.section == "xx"
    assert not (found.prompt_ids or found.response_ids or found.logprobs or found.prompt.pieces)
    assert not hasattr(found.prompt.section, "ids")
