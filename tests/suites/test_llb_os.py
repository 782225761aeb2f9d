"""LLB-OS: its file and its actions, with a scripted system; a real one is in real_llb_os.py."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from config.errors import UserError
from suites import llb_os
from suites.llb_os import Systems
from tasks.sandbox import Ran, fence


def item(instruction: str, begin: str, gold: str, check: str, *skills: str) -> dict:
    def command(script):
        return {"command_name": "bash", "script": script}

    evaluation = {
        "ground_truth_command_item": command(gold),
        "evaluation_command_item": command(check),
    }
    return {
        "instruction": instruction,
        "initialization_command_item": command(begin),
        "evaluation_info": evaluation,
        "skill_list": [*skills],
    }


ITEMS = {"1": item("Make x.", "begin", "make", "check", "touch"), "2": item("Y.", "", "a", "b")}
LOOK = "```bash\nls\n```"


class Scripted:
    """A system that notes its scripts; `codes` has the exit code of some, -1 = OSError."""

    def __init__(self, codes: dict):
        self.codes, self.ran, self.is_alive = codes, [], True

    def run(self, script: str, seconds: float) -> Ran:
        self.ran.append((script, seconds))
        code = self.codes.get(script, 0)
        if code == -1:
            raise OSError(11, "Resource temporarily unavailable")
        return Ran("", "", code, 1.0)

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Return what opens these items, in systems with these exit codes; `made` has the systems."""
    monkeypatch.setattr(llb_os, "lacking", lambda system: [("podman", "apt-get install podman")])
    (path := tmp_path / "os.json").write_text(json.dumps(ITEMS))
    with pytest.raises(UserError, match="llb-os needs podman: apt-get install podman"):
        Systems(path)
    monkeypatch.setattr(llb_os, "lacking", lambda system: [])

    def open_items(items: object = ITEMS, **codes: int | None) -> Systems:
        made = []
        monkeypatch.setattr(llb_os, "System", lambda: made.append(Scripted(codes)) or made[-1])
        path.write_text(items if isinstance(items, str) else json.dumps(items))
        environment = Systems(path)
        environment.made = made
        return environment

    return open_items


@pytest.mark.parametrize(("actions", "codes", "outcome", "said"), [
    (["finish"], {}, (True, 1.0, ""), "The task is solved."),
    (["So:\n\n  Finish.\n"], {}, (True, 1.0, ""), "solved"),
    (["finish"], {"check": 1}, (True, -1.0, ""), "not solved"),
    (["finish"], {"check": None}, (True, -1.0, "timed out"), "failed"),
    (["finish"], {"check": -1}, (True, -1.0, "crashed: Resource temporarily unavailable"), ""),
    ([f"{LOOK}\nfinish"], {}, (True, 1.0, ""), "(no output)"),
    ([LOOK], {}, (False, 0.0, ""), "(no output)"),
    ([LOOK], {"ls\n": 7}, (False, 0.0, ""), "exit code 7"),
    ([LOOK], {"ls\n": None}, (False, 0.0, ""), "The script was stopped"),
    ([LOOK], {"ls\n": -1}, (True, -1.0, "crashed: Resource temporarily unavailable"), ""),
    ([f"{LOOK}\n{LOOK}"], {}, (False, 0.0, ""), "there are 2 scripts"),
    (["```bash\n\n```"], {}, (False, 0.0, ""), "the script is empty"),
    (["```bash\necho \0\n```"], {}, (False, 0.0, ""), "no NUL"),
    ([fence("echo " + "x" * 100_000, "sh")], {}, (False, 0.0, ""), "at most 100,000 bytes"),
    (["Then I finish the task?"], {}, (True, 1.0, ""), "Nothing was run: there is neither"),
    (["```python\n1\n```"], {"check": 1}, (True, -1.0, "no action"), "neither one script"),
    ([""], {"check": 1}, (True, -1.0, "no action"), "a line that says finish."),
    ([LOOK] * 4, {"check": 1}, (False, 0.0, ""), ""),
    ([LOOK] * 5, {"check": 1}, (True, -1.0, "steps"), "The task has failed: steps."),
    ([LOOK] * 5, {}, (True, 1.0, ""), "solved"),
    ([fence("echo finish", "bash")], {}, (False, 0.0, ""), ""),
])  # fmt: skip
def test_what_a_response_does(opened, actions, codes, outcome, said):
    """However an episode ends, the system is checked, as in the release."""
    environment = opened(**codes)
    with closing(environment.reset("1")) as episode:
        *before, step = [episode.step(action) for action in actions]
    assert not any(step.done for step in before)
    assert (step.done, step.reward, step.failure) == outcome and said in step.observation
    assert [script for script, _ in environment.made[0].ran][:1] == ["begin"]
    assert not environment.made[0].is_alive


def test_output_is_clipped_and_a_system_that_has_ended_fails_the_task(opened):
    episode = opened().reset("1")
    episode.system.run = lambda script, seconds: Ran("x\033[2J" * 9000, "", 0, 1.0)
    shown = episode.step(LOOK).observation
    assert len(shown) < 5000 and "\033" not in shown
    episode.close()
    step = episode.step(LOOK)
    assert (step.done, step.failure) == (True, "the system has ended")


def test_time_is_that_of_a_script_and_of_all(opened):
    environment = opened(check=1)
    with closing(environment.reset("1")) as episode:
        episode.seconds_left = 1.5
        assert not episode.step(LOOK).done
        step = episode.step(f"{LOOK}\nfinish")
    assert (step.done, step.reward, step.failure) == (True, -1.0, "timed out")
    assert [seconds for _, seconds in environment.made[0].ran] == [25, 1.5, 0.5, 25]


def test_an_initialisation_without_end_is_refused_and_leaves_nothing(opened):
    environment = opened(begin=None)
    with pytest.raises(UserError, match="initialisation of 1"):
        environment.reset("1")
    assert not environment.made[0].is_alive
    episode = opened().reset("2")  # an empty one is none
    assert episode.system.ran == [] and episode.give_up("window").reward == 1.0


def test_tasks_carry_what_is_asked_and_a_fingerprint_of_the_check(opened):
    environment = opened()
    tasks = environment.tasks()
    assert [task.id for task in tasks] == [*ITEMS] and environment.most_steps == 5
    assert "at most 25 seconds" in environment.instructions
    assert tasks[0].question == tasks[0].intent == ITEMS["1"]["instruction"]
    assert (tasks[0].skills, tasks[0].dataset) == (("touch",), "llb-os")
    assert tasks[0].solution == ("```bash\nmake\n```\nfinish",)
    # of all versions: a stored row is found again by them
    assert [task.digest for task in tasks] == ["c365f1a7e73428db", "d93f3a45d0fb21d5"]
    others = json.loads(json.dumps(ITEMS))
    others["1"]["evaluation_info"]["evaluation_command_item"]["script"] += " "
    del others["2"]["initialization_command_item"], others["2"]["skill_list"]
    changed = opened(others).tasks()
    assert changed[0].digest != tasks[0].digest and changed[1].digest == tasks[1].digest


def broken(**fields) -> dict:
    return {"3": {**ITEMS["1"], **fields}}


def check(name: str, script: str) -> dict:
    """Make an item with another check."""
    command = {"evaluation_command_item": {"command_name": name, "script": script}}
    return broken(evaluation_info=ITEMS["1"]["evaluation_info"] | command)


@pytest.mark.parametrize(("content", "field"), [
    ("{", "JSON"), ("[" * 100_000, "JSON"), ([], ""), ({}, "empty"), ({"0": {}}, "item 0"),
    ({"3": 5}, "item 3"), (broken(instruction=" "), "item 3, instruction"),
    (broken(initialization_command_item="{'script': 'ls'}"), "initialization_command_item"),
    (broken(evaluation_info={}), "ground_truth_command_item"),
    (check("bash", ""), "evaluation_command_item"), (check("python", "1"), "command_name"),
    (check("bash", "x" * 100_001), "evaluation_command_item.script"),
    (check("bash", "x\0"), "evaluation_command_item.script"),
    (broken(skill_list="ls"), "skill_list"),
])  # fmt: skip
def test_a_file_that_is_wrong_is_one_sentence(opened, tmp_path, content, field):
    with pytest.raises(UserError) as caught:
        opened(content)
    assert str(tmp_path) in str(caught.value) and field in str(caught.value)
    assert "\n" not in str(caught.value)
