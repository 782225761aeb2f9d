"""LLB-OS in real systems: three tasks of our own. Run by `make test-sandbox`, as root."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from conftest import HANG_S
from test_llb_os import item

from suites import llb_os
from suites.llb_os import Systems
from tasks.sandbox import fence

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
    ),
}


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setattr(llb_os, "SCRIPT_SECONDS", HANG_S)
    monkeypatch.setattr(llb_os, "ITEM_SECONDS", HANG_S)
    (path := tmp_path / "os.json").write_text(json.dumps(ITEMS))
    return Systems(path)


@pytest.mark.parametrize("id", ITEMS)
def test_gold_solves_each_of_our_own_tasks_and_nothing_does_not(environment, id):
    (task,) = [task for task in environment.tasks() if task.id == id]
    with closing(task.begin()) as solved, closing(task.begin()) as idle:  # they share nothing
        step = solved.step(task.solution[0])
        assert (step.done, step.reward, step.failure) == (True, 1.0, ""), step
        step = idle.step("finish")
        assert (step.done, step.reward, step.failure) == (True, -1.0, ""), step


def test_actions_run_in_one_system_and_their_output_is_shown(environment, monkeypatch):
    with closing(environment.reset("1")) as episode:
        first = episode.step("I look first.\n```bash\ngetent group gardeners; false\n```\n")
        assert "gardeners:x:1000" in first.observation and "exit code 1" in first.observation
        assert episode.step("```bash\necho kept > /tmp/x\n```").observation == "(no output)"
        assert episode.step("```sh\ncat /tmp/x\n```").observation == "kept"
        odd = episode.step(fence("echo \ud800; if", "bash"))
        assert "syntax error" in odd.observation and "exit code 2" in odd.observation
        last = episode.step("```\nuseradd -md /srv/mira -s /bin/bash -G gardeners mira\n```")
    assert (last.done, last.reward) == (True, 1.0)
    monkeypatch.setattr(llb_os, "SCRIPT_SECONDS", 1)
    with closing(environment.reset("1")) as episode:
        assert "The script was stopped" in episode.step(fence("sleep 3600", "bash")).observation
