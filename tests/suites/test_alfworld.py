"""ALFWorld: files of games, the process that plays one, by a stand-in of the packages.

They compile for minutes and are not installed here: what is tested is the process and the
protocol, not ALFWorld.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from conftest import HANG_S, opened, until

from config.errors import UserError
from suites import alfworld as module
from suites.alfworld import PACKAGES, STEPS, command_of, read, receptacles
from tasks.environments import Step

ROOT = Path(__file__).parents[2]
STAND_IN = {
    "fast_downward/__init__.py": "",
    "alfworld/__init__.py": "",
    "alfworld/agents/__init__.py": "",
    "alfworld/agents/utils/__init__.py": "",
    "alfworld/agents/utils/misc.py": """
class Demangler:
    def __init__(self, game_infos, shuffle): self.given = game_infos
    def demangle_alfred_name(self, id): return f"demangled {id}"
""",
    "textworld/__init__.py": "EnvInfos = dict",
    "textworld/envs/__init__.py": "",
    "textworld/envs/pddl.py": """
import json, os, time

class State(dict):
    feedback = ""

class Info:
    id = name = "mug"

class PddlEnv:
    def __init__(self, infos): self._entity_infos, self.n = {"mug": Info()}, 0
    def load(self, path):
        game = json.load(open(path))
        if game.get("damaged"): raise KeyError("damaged", "a\\nb")
    def reset(self): return self.state("-= Welcome! =-\\n\\nA room.\\n\\nA task.")
    def state(self, text, won=False):
        name = self._entity_infos["mug"].name
        state = State(admissible_commands=["win", "go 10", "go 9", name], won=won)
        state.feedback = text
        return state
    def step(self, command):
        self.n += 1
        if command == "die": os._exit(3)
        if command == "hang": time.sleep(3600)
        if command == "raise": raise ValueError("a bug")
        if command == "long": return self.state("x\\x1b[2J" * 9000), 0, False
        print("noise")
        return self.state(f"{self.n}: {command} {os.environ['ALFWORLD_DATA']}",
                          command == "win"), 0, False
""",
}
POSSIBLE = "Possible now: demangled mug; go 9; go 10; win."


@pytest.fixture
def site(tmp_path, monkeypatch):
    site = tmp_path / "site"
    for name, text in STAND_IN.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(module, "SECONDS", HANG_S)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    return site


@pytest.fixture
def environment(site, tmp_path):
    with closing(
        opened("alfworld", str(tree(tmp_path / "games", a={}, bad={"damaged": True})))
    ) as it:
        yield it


def tree(folder: Path, **games: dict) -> Path:
    """Write games, each with these changes to a good one; None leaves its key out."""
    for name, change in games.items():
        game = {
            "pddl_domain": "(d)", "grammar": '"rhs": "Your task is to: put a mug on desk."',
            "pddl_problem": "(receptacleAtLocation Desk_bar_1 loc1)", "solvable": True,
            "task_type": "pick_and_place_simple",
        } | change  # fmt: skip
        game = {key: value for key, value in game.items() if value is not None}
        about = {"task_type": game.pop("task_type", None)}
        place = folder / name / "trial"
        place.mkdir(parents=True)
        (place / "game.tw-pddl").write_text(json.dumps(game))
        (place / "traj_data.json").write_text(json.dumps(about))
    return folder


def gone(pid: int) -> bool:
    """Return whether a process has ended; zombies have."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or read
        return True


def test_a_tree_is_read_by_the_names_of_its_folders(tmp_path):
    two = "(receptacleAtLocation Desk_bar_1 l) (receptacleAtLocation Bed_bar_1 l)"
    folder = tree(
        tmp_path, b={"pddl_problem": two}, a={"task_type": "look_at_obj_in_light"}, c_movable={},
        d={"solvable": False}, e={"solvable": None}, f_Sliced={},
    )  # fmt: skip
    (one, other), left_out = read(folder)
    assert (one.id, one.kind) == ("a/trial", "look_at_obj_in_light") and left_out == 4
    assert (other.id, other.kind) == ("b/trial", "pick_and_place_simple")
    assert one.content == "016d3f611cb25cd4"  # of all versions
    assert "you see a bed 1, and a desk 1.\n" in other.intent
    assert one.intent == (
        "You are in the middle of a room. Looking quickly around you, you see a desk 1.\n"
        "Your task is to: put a mug on desk."
    )


def test_receptacles_are_named_as_the_package_names_them():
    text = """(objectAtLocation Mug_bar_1 loc_bar_2) (receptacleAtLocation Drawer_bar_b loc_bar_2)
      (ReceptacleAtLocation Drawer_bar_a loc_bar_1) (inReceptacle Mug_bar_1 Drawer_bar_b)
      (receptacleAtLocation Sink_bar__minus_1_bar_SinkBasin loc_bar_3)"""
    text += "".join(f" (receptacleAtLocation Cabinet_bar_{k:02} l)" for k in range(10))
    cabinets = [f"cabinet {k}" for k in range(10, 0, -1)]
    assert receptacles(text) == [*cabinets, "drawer 2", "drawer 1", "sinkbasin 1"]


@pytest.mark.parametrize("change, field", [
    ({"pddl_problem": None}, "pddl_problem"), ({"pddl_problem": "(none)"}, "pddl_problem"),
    ({"grammar": "{}"}, "grammar"), ({"grammar": 5}, "grammar"), ({"pddl_domain": " "}, "domain"),
    ({"task_type": None}, "task_type"), ({"solvable": False}, "known to be solvable"),
    ("{", "JSON"), ("[]", "dictionary"), (None, "traj_data.json"), ("none", "alfworld-download"),
])  # fmt: skip
def test_another_form_is_one_sentence(tmp_path, change, field):
    folder = tree(tmp_path, g=change if isinstance(change, dict) else {})
    if change is None:
        (folder / "g/trial/traj_data.json").unlink()
    elif change == "none":
        folder = tmp_path / "none"
    elif isinstance(change, str):
        (folder / "g/trial/game.tw-pddl").write_text(change)
    with pytest.raises(UserError) as error:
        read(folder)
    assert str(folder) in str(error.value) and field in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("action, command", [
    ("go to desk 1", "go to desk 1"), ("Action: Go to  desk 1.\n", "go to desk 1"),
    ("Mug first.\n\n> take mug 1 from desk 1\n```", "take mug 1 from desk 1"),
    ("**Action:** `look`", "look"), ("> look -- tidy", "look"), ("", ""), ("\n", ""),
    ("go to desk 1\nlook", "look"),
])  # fmt: skip
def test_a_command_is_the_last_line_of_a_response(action, command):
    assert command_of(action) == command


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(("code", "reason"), [
    ("raise ModuleNotFoundError('No\\nmodule')", r"\(crashed: ModuleNot.*: No module\)"),
    ("import os; os._exit(1)", r"\(crashed\)"),
])  # fmt: skip
def test_a_package_that_cannot_be_imported_is_told_before_the_first_task(site, name, code, reason):
    (site / name / "__init__.py").write_text(code)
    with pytest.raises(UserError, match=f"{reason}: {re.escape(module.INSTALL)}"):
        opened("alfworld", "x")


def test_games_of_one_task_share_nothing(environment):
    task = environment.tasks()[0]
    assert "have 30 actions" in environment.instructions and environment.most_steps == STEPS
    assert task.question == f"{task.intent}\nPossible now: go to desk 1; help; inventory; look."
    with closing(task.begin()) as one, closing(task.begin()) as two:
        # the game's own, without its welcome
        assert one.observation == f"A room.\nA task.\n{POSSIBLE}"
        assert one.step("x") == Step(f"1: x /tmp\n{POSSIBLE}")
        assert one.step("y").observation.startswith("2: y")
        assert two.step("z").observation.startswith("1: z")
        assert two.step("win") == Step("2: win /tmp\nThe task is done.", True, 1.0)
        shown = one.step("long").observation
        assert len(shown) < 21_000 and "\033" not in shown
        pids = [one._player.process.pid, two._player.process.pid]
    one.close()
    until(lambda: all(map(gone, pids)))


@pytest.mark.parametrize(("last", "outcome"), [("x", (-1.0, "steps")), ("win", (1.0, ""))])
def test_the_last_action_ends_the_task(environment, last, outcome):
    with closing(environment.tasks()[0].begin()) as game:
        assert not any(game.step("x").done for _ in range(STEPS - 1))
        step = game.step(last)
    assert step.done and (step.reward, step.failure) == outcome


@pytest.mark.parametrize("action, failure", [
    ("die", "crashed"), ("hang", "timed out"), ("raise", "crashed: ValueError: a bug"),
])  # fmt: skip
def test_a_game_that_breaks_off_fails_the_task_alone(environment, monkeypatch, action, failure):
    task = environment.tasks()[0]
    with closing(task.begin()) as other, closing(task.begin()) as game:
        with monkeypatch.context() as patch:
            if action == "hang":
                patch.setattr(module, "SECONDS", 0.2)
            assert game.step(action) == Step("The game has ended.", True, -1.0, failure)
        assert game.step("x").failure == "crashed"  # and so it stays
        assert other.step("win").reward == 1.0
    with pytest.raises(UserError, match=r"bad/trial/.* cannot be played: crashed: KeyError"):
        environment.tasks()[1].begin()


def test_a_game_ends_with_the_process_that_plays_it(site, tmp_path):
    code = f"""import time
from suites.alfworld import Households
game = Households({str(tree(tmp_path / "games", a={}))!r}).tasks()[0].begin()
print(game._player.process.pid, flush=True)
time.sleep(3600)"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        game = int(process.stdout.readline())
        process.kill()
    until(lambda: gone(game))
