"""An agent whose memory is still empty at the end says that nothing was found."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from agents import find
from commands.sft import SFT, demonstration
from data import NOT_FOUND, Pool, Task, grade
from engines.scripted import ScriptedEngine
from memagent import MemAgent
from report.reading import Reading
from rollout import rollout

TASK = Task("t", "Where is Anna?", ("Lima",), text="One. Two. Three. Four.")


def read(codec, agent: str, script, **settings):
    sizes = dict(chunk_tokens=8, memory_tokens=16, final_tokens=16, form="plain")
    sizes |= {"not_found": "say"} | settings
    _, reader = find.resolve("default", "", {}, sizes, agent)
    (done,) = rollout(ScriptedEngine(codec, script), reader, [(TASK, 0)])
    return done


@pytest.mark.parametrize("agent", ["memagent", "rememr1", "memupdate"])
def test_an_empty_memory_is_said_to_be_empty_and_no_model_is_asked(codec, agent):
    asked = []

    def script(prompt):
        asked.append(prompt.final)
        return ""

    more = {"budget": "none"} if agent == "memupdate" else {}
    done = read(codec, agent, script, **more)
    assert not done.error and done.answer == NOT_FOUND and True not in asked
    last = done.turns[-1]
    assert last.prompt.final and last.response_ids == [] and not last.trained
    reading = Reading(TASK, MemAgent())  # no model is counted as called for it
    for turn in done.turns:
        reading.add(turn)
    assert reading.row()["model_calls"] == len(done.turns) - 1


@pytest.mark.parametrize("agent", ["full", "bm25", "none"])
def test_who_has_no_memory_cannot_say_so(codec, agent):
    done = read(codec, agent, lambda prompt: "Oslo")
    assert done.answer.strip() == "Oslo"


@pytest.mark.parametrize(("noted", "not_found"), [("", "guess"), ("Anna went.", "say")])
def test_an_agent_may_be_told_to_guess_and_one_that_noted_something_is_asked(
    codec, noted, not_found
):
    done = read(codec, "memagent", lambda p: "Oslo" if p.final else noted, not_found=not_found)
    assert done.answer.strip() == "Oslo"


@pytest.mark.parametrize(
    ("prediction", "answers", "right"),
    [
        (NOT_FOUND, ("document",), 0.0),  # a word of it is no answer
        (NOT_FOUND, (NOT_FOUND,), 1.0),
        ("Not found in the document.", (NOT_FOUND,), 1.0),
        ("the document", (NOT_FOUND,), 0.0),
    ],
)
def test_it_is_right_where_the_document_has_no_answer_and_nowhere_else(prediction, answers, right):
    scores = grade(prediction, answers, "plain")
    assert (scores.em, scores.f1, scores.sub_em, scores.reward) == (right,) * 4


def test_it_is_demonstrated_by_writing_nothing(codec):
    pool = Pool(["A", "B"], ["Anna joined Boris.", "Boris toured Oslo."])
    task = Task("t", "Where is Ida?", (NOT_FOUND,), pool=pool, order=(0, 1), kind="absent")
    sizes = dict(chunk_tokens=8, memory_tokens=16, final_tokens=16, form="plain", empty="keep")
    sizes |= {"not_found": "say"}
    _, reader = find.resolve("default", "", {}, sizes, "memagent")
    done = demonstration(reader.on(codec), task)
    assert done.answer == NOT_FOUND
    assert {str(turn.response) for turn in done.turns[:-1]} == {""}


def test_no_mistake_is_shown_of_it_and_it_is_none_itself():
    sft = SimpleNamespace(agents=["a"], shares=[1.0], config=SimpleNamespace(mistakes=1.0))
    absent, other = Task("a", "Who?", (NOT_FOUND,), text=""), Task("b", "Who?", ("Ida",), text="")
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("commands.sft.demonstration", lambda agent, task, mistake: mistake)
        shown = [
            SFT.demonstrate(sft, task, beside, random.Random(0))
            for task, beside in ((absent, other), (TASK, absent), (TASK, other))
        ]
    assert shown == ["", "", "Ida"]
