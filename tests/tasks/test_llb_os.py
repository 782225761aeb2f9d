"""LLB-OS: the file, the actions, and three tasks of our own in a real system."""

from __future__ import annotations

import gzip
import json
from contextlib import closing

import pytest
from conftest import HANG_S
from tasks.llb_os import LLBOS, read

from config.errors import UserError
from tasks import llb_os, sandbox
from tasks.sandbox import Ran, fence, lacking

LACKS = "; ".join(f"{what}: {command}" for what, command in lacking(True))
needs_system = pytest.mark.skipif(bool(LACKS), reason=LACKS)


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


ITEMS = {
    "1": item(
        "Create the user mira with the home folder /srv/mira and bash as login shell, and make "
        "her a member of the group gardeners, which exists.",
        "groupadd gardeners",
        "useradd --create-home --home-dir /srv/mira --shell /bin/bash --groups gardeners mira",
        """
        [ "$(getent passwd mira | cut -d: -f6,7)" = /srv/mira:/bin/bash ] || exit 1
        [ "$(stat -c %F:%U /srv/mira)" = directory:mira ] && id -nG mira | grep -qw gardeners
        """,
        "useradd", "usermod",
    ),
    "2": item(
        "Make the folder /srv/reports belong to the group editors: its members may read, write and "
        "enter it, others may not, and what is created in it shall belong to that group as well.",
        "groupadd editors; useradd -G editors ed; useradd outsider; mkdir -m 755 /srv/reports",
        "chgrp editors /srv/reports && chmod 2770 /srv/reports",
        """
        su ed -c 'umask 002; touch /srv/reports/a' || exit 1
        [ "$(stat -c %G /srv/reports/a)" = editors ] || exit 2
        ! su outsider -c 'ls /srv/reports' 2> /dev/null
        """,
        "chgrp", "chmod",
    ),
    "5": item(
        "A process whose number is in /run/worker.pid writes to /var/spool/worker. End it, and "
        "remove the file that holds its number.",
        """
        nohup sh -c 'while :; do date >> /var/spool/worker; sleep .1; done' > /dev/null 2>&1 &
        echo $! > /run/worker.pid
        cp /run/worker.pid /var/spool/worker.number
        """,
        "kill $(cat /run/worker.pid) && rm /run/worker.pid",
        """
        [ ! -e /run/worker.pid ] || exit 1
        while kill -0 "$(cat /var/spool/worker.number)" 2> /dev/null; do  # a signal takes its time
            sleep .1
        done
        """,
        "kill", "rm",
    ),
}  # fmt: skip


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(llb_os, "SCRIPT_SECONDS", HANG_S)
    monkeypatch.setattr(llb_os, "ITEM_SECONDS", HANG_S)
    (path := tmp_path / "os.json").write_text(json.dumps(ITEMS))
    return path


def solved(environment: LLBOS, id: str, *actions: str) -> list:
    episode = environment.reset(id)
    try:
        return [episode.step(action) for action in actions]
    finally:
        episode.close()


# ---------------------------------------------------------------- in a system


@needs_system
@pytest.mark.parametrize("id", ITEMS)
def test_gold_solves_each_of_our_own_tasks_and_nothing_does_not(path, id):
    environment = LLBOS(path)
    (task,) = [task for task in environment.tasks() if task.id == id]
    (step,) = solved(environment, id, *task.solution)
    assert (step.done, step.reward, step.failure) == (True, 1.0, ""), step
    (step,) = solved(environment, id, "finish")
    assert (step.done, step.reward, step.failure) == (True, -1.0, ""), step


@needs_system
def test_actions_run_in_one_system_and_their_output_is_shown(path):
    first, second, third, last = solved(
        LLBOS(path), "1",
        "I look first.\n```bash\ngetent group gardeners; false\n```\n",
        "```bash\necho kept > /tmp/x\n```",
        "```sh\ncat /tmp/x\n```",
        "```\nuseradd -md /srv/mira -s /bin/bash -G gardeners mira\n```\n\nFinish.\n",
    )  # fmt: skip
    assert "gardeners:x:1000" in first.observation and "exit code 1" in first.observation
    assert (second.observation, third.observation) == ("(no output)", "kept")
    assert not third.done and last.done and last.reward == 1.0


@needs_system
@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("```bash\nls\n```\n```bash\nid\n```", "there are 2 scripts"),
        ("```bash\n\n```", "the script is empty"),
        ("```bash\necho \0\n```", "no NUL"),
        (fence("echo " + "x" * 100_000, "bash"), "at most 100,000 bytes"),
        (fence("echo \ud800; if", "bash"), "syntax error"),
        (fence("echo finish\nno-such-command", "bash"), "exit code 127"),
        (fence("yes", "bash"), "The script was stopped"),
        (fence("head -c 90000 /dev/zero | tr '\\0' x; printf '\\e[2J'", "bash"), "left out"),
    ],
)
def test_what_cannot_be_done_is_an_answer_and_the_task_goes_on(path, monkeypatch, action, said):
    environment = LLBOS(path)
    with closing(environment.reset("1")) as episode:
        with monkeypatch.context() as patch:
            if said == "The script was stopped":
                patch.setattr(llb_os, "SCRIPT_SECONDS", 1)
            step = episode.step(action)
        last = episode.step(environment.tasks()[0].solution[0])
    assert said in step.observation and not step.done and len(step.observation) < 5000
    assert "\033" not in step.observation
    assert last.reward == 1.0


@needs_system
@pytest.mark.parametrize(
    "action",
    ["", "I do not know. Then I finish the task?", "```python\nprint(1)\n```", "```bash\nls"],
)
def test_a_response_without_an_action_ends_the_task(path, action):
    environment = LLBOS(path)
    (step,) = solved(environment, "1", action)
    assert step.observation.startswith("Nothing was run: there is neither")
    assert (step.done, step.reward, step.failure) == (True, -1.0, "no action")
    script = environment.tasks()[0].solution[0].removesuffix("finish")
    one, step = solved(environment, "1", script, action)
    assert not one.done and (step.done, step.reward, step.failure) == (True, 1.0, "")


@needs_system
def test_the_limit_of_responses_is_the_one_that_is_told(path):
    environment = LLBOS(path)
    assert "You have 5 responses" in environment.instructions and environment.most_steps == 5
    *others, last = solved(environment, "1", *["```bash\nls\n```"] * 5)
    assert not any(step.done for step in others)
    assert (last.done, last.reward, last.failure) == (True, -1.0, "steps")
    gold = environment.tasks()[0].solution[0]
    *_, last = solved(environment, "1", *["```bash\nls\n```"] * 4, gold)
    assert last.reward == 1.0


@needs_system
def test_without_finish_the_system_is_checked_all_the_same(path):
    """As in the release, whose check runs however an episode has ended."""
    environment = LLBOS(path)
    script = environment.tasks()[0].solution[0].removesuffix("finish")
    one, *_, last = solved(environment, "1", script, *["```bash\nls\n```"] * 4)
    assert not one.done and (last.done, last.reward, last.failure) == (True, 1.0, "")
    for begun, outcome in ((script, (True, 1.0, "")), ("", (True, -1.0, "window"))):
        episode = environment.reset("1")  # ended by who acts
        if begun:
            episode.step(begun)
        step = episode.give_up("window")
        episode.close()
        assert (step.done, step.reward, step.failure) == outcome


@needs_system
def test_a_script_beyond_the_time_leaves_what_was_done(path):
    environment = LLBOS(path)
    with closing(environment.reset("1")) as episode:
        assert not episode.step(environment.tasks()[0].solution[0].removesuffix("finish")).done
        episode.seconds_left = 1.0
        step = episode.step("```bash\nsleep 3600\n```")
    assert (step.done, step.reward, step.failure) == (True, 1.0, "")


@needs_system
def test_time_over_fails_the_task(path):
    with closing(LLBOS(path).reset("1")) as episode:
        episode.seconds_left = 1.0
        step = episode.step("```bash\nsleep 3600\n```\nfinish")
    assert (step.done, step.reward, step.failure) == (True, -1.0, "timed out")


@needs_system
def test_a_system_that_has_ended_fails_the_task(path):
    episode = LLBOS(path).reset("1")
    episode.system.close()
    step = episode.step("```bash\nls\n```")
    assert (step.done, step.failure) == (True, "the system has ended")
    episode.close()


@needs_system
def test_an_initialisation_without_end_is_refused_and_leaves_nothing(path, monkeypatch):
    monkeypatch.setattr(llb_os, "SCRIPT_SECONDS", 0.5)
    environment = LLBOS(path)
    environment._items["1"].begin.script = "sleep 3600"
    made = []
    monkeypatch.setattr(llb_os, "System", lambda: made.append(sandbox.System()) or made[-1])
    with pytest.raises(UserError, match="initialisation of 1"):
        environment.reset("1")
    assert not made[0].is_alive


@needs_system
def test_a_check_without_end_is_a_failure(path, monkeypatch):
    environment = LLBOS(path)
    environment._items["1"].check.script = "sleep 3600"
    with closing(environment.reset("1")) as episode:
        monkeypatch.setattr(llb_os, "SCRIPT_SECONDS", 0.5)
        step = episode.step("finish")
    assert (step.done, step.reward, step.failure) == (True, -1.0, "timed out")


@needs_system
def test_episodes_of_one_task_share_nothing(path):
    environment = LLBOS(path)
    one, other = environment.reset("1"), environment.reset("1")
    try:
        assert one.step(environment.tasks()[0].solution[0]).reward == 1.0
        assert other.step("finish").reward == -1.0
    finally:
        one.close()
        other.close()
        other.close()


# ---------------------------------------------------------------- the file, the parts


def test_tasks_carry_what_is_asked_and_a_fingerprint_of_the_check(path, monkeypatch):
    monkeypatch.setattr(llb_os, "lacking", lambda system: [])
    environment = LLBOS(path)
    tasks = environment.tasks()
    assert [task.id for task in tasks] == [*ITEMS]
    assert tasks[0].question == tasks[0].intent == ITEMS["1"]["instruction"]
    assert tasks[0].skills == ("useradd", "usermod") and tasks[0].dataset == "llb-os"
    others = json.loads(json.dumps(ITEMS))
    others["1"]["evaluation_info"]["evaluation_command_item"]["script"] += " "
    path.write_text(json.dumps(others))
    digests = [task.digest for task in LLBOS(path).tasks()]
    changed = [new != old.digest for new, old in zip(digests, tasks, strict=True)]
    assert changed == [True, False, False]


def test_a_compressed_file_and_one_without_initialisation(tmp_path):
    items = {"7": item("Do it.", "", "true", "true")}
    path = tmp_path / "os.json.gz"
    path.write_bytes(gzip.compress(json.dumps(items).encode()))
    assert read(path)["7"].begin.script == ""
    del items["7"]["initialization_command_item"], items["7"]["skill_list"]
    path.write_bytes(gzip.compress(json.dumps(items).encode()))
    assert read(path)["7"].begin is None and read(path)["7"].skills is None


def broken(**fields) -> dict:
    return {"3": {**ITEMS["1"], **fields}}


def info(name: str, script: str) -> dict:
    """Make an item with another check."""
    check = {"evaluation_command_item": {"command_name": name, "script": script}}
    return broken(evaluation_info=ITEMS["1"]["evaluation_info"] | check)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (None, "No file"),
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ([], "os_interaction_train.json"),
        ({}, "os_interaction_train.json"),
        ({"3": 5}, "item 3"),
        (broken(instruction=" "), "item 3, instruction"),
        (broken(evaluation_info="{'ground_truth_command_item': {}}"), "evaluation_info"),
        (broken(initialization_command_item="{'script': 'ls'}"), "initialization_command_item"),
        (broken(evaluation_info={}), "ground_truth_command_item"),
        (info("bash", ""), "evaluation_command_item"),
        (info("python", "1"), "evaluation_command_item.command_name"),
        (info("bash", "x" * 100_001), "evaluation_command_item.script"),
        (info("bash", "x\0"), "evaluation_command_item.script"),
        (broken(skill_list="ls"), "skill_list"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(tmp_path, content, field):
    path = tmp_path / "os.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError) as caught:
        LLBOS(path)
    assert str(path) in str(caught.value) and field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_told_before_the_first_task(path, monkeypatch):
    monkeypatch.setattr(llb_os, "lacking", lambda system: [("bwrap", "apt-get install bubblewrap")])
    with pytest.raises(UserError, match="llb-os needs bwrap: apt-get install bubblewrap"):
        LLBOS(path)


def test_an_error_of_the_machine_in_an_action_is_a_failure(path, monkeypatch):
    """Without a system: what a full process table does."""

    class Full:
        is_alive = True
        calls = 0

        def run(self, script, seconds):
            self.calls += 1
            if self.calls > 1:
                raise OSError(11, "Resource temporarily unavailable")
            return Ran("", "", 0, 0.1)

        def close(self):
            pass

    monkeypatch.setattr(llb_os, "lacking", lambda system: [])
    monkeypatch.setattr(llb_os, "System", Full)
    (step,) = solved(LLBOS(path), "1", "```bash\nls\n```")
    assert (step.done, step.reward) == (True, -1.0)
    assert step.failure == "crashed: Resource temporarily unavailable"
