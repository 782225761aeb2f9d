"""ALFWorld: files of games, the process they run in, our own six games in the real packages.

Where the packages are missing, a stand-in of twenty lines plays the games: what is tested with it
is the process and the protocol, not ALFWorld.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG_S, opened, until

from config.errors import UserError
from tasks import alf as module
from tasks.alf import STEPS, ALFWorld, _places, command_of, read, write_own

ROOT = Path(__file__).parents[2]
NEEDED = ("alfworld", "textworld", "fast_downward")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
real = pytest.mark.skipif(
    bool(missing), reason=f"no {', '.join(missing)}: pip install -r requirements-environments.txt"
)

STAND_IN = {
    "fast_downward/__init__.py": "",
    "alfworld/__init__.py": "",
    "alfworld/agents/__init__.py": "",
    "alfworld/agents/utils/__init__.py": "",
    "alfworld/agents/utils/misc.py": """
class Demangler:
    def __init__(self, game_infos, shuffle): pass
    def demangle_alfred_name(self, id): return id
""",
    "alfworld/data/alfred.pddl": "(define (domain alfred))",
    "alfworld/data/alfred.twl2": '{"rhs": "Your task is to: UNKNOWN GOAL."}',
    "textworld/__init__.py": "EnvInfos = dict",
    "textworld/envs/__init__.py": "",
    "textworld/envs/pddl.py": """
import json, os, time

class State(dict):
    feedback = ""

class PddlEnv:
    def __init__(self, infos): self._entity_infos, self.n = {}, 0
    def load(self, path):
        game = json.load(open(path))
        if game.get("damaged"): raise KeyError("damaged", "a\\nb")
    def reset(self): return self.state("-= Welcome! =-\\n\\nA room.\\n\\nA task.")
    def state(self, text, won=False):
        state = State(admissible_commands=["win", "die", "hang"], won=won)
        state.feedback = text
        return state
    def step(self, command):
        self.n += 1
        if command == "die": os._exit(3)
        if command == "hang": time.sleep(3600)
        if command == "raise": raise ValueError("a bug")
        print("noise")
        return self.state(f"{self.n}: {command}", command == "win"), 0, False
""",
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    site = tmp_path / "site"
    for name, text in STAND_IN.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(module, "SECONDS", HANG_S)
    return site


@pytest.fixture
def environment(stand_in):
    environment = ALFWorld()
    yield environment
    environment.close()


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


# ---------------------------------------------------------------- files


def test_a_tree_is_read_by_the_names_of_its_folders(tmp_path):
    folder = tree(tmp_path, b={}, a={"task_type": "look_at_obj_in_light"}, c_movable={},
                  d={"solvable": False}, e={"solvable": None}, f_Sliced={})  # fmt: skip
    games, left_out = read(folder)
    assert [(game.id, game.kind) for game in games] == [
        ("a/trial", "look_at_obj_in_light"), ("b/trial", "pick_and_place_simple"),
    ]  # fmt: skip
    assert left_out == 4
    assert games[0].intent == (
        "You are in the middle of a room. Looking quickly around you, you see a desk 1.\n"
        "Your task is to: put a mug on desk."
    )


def test_receptacles_are_named_as_the_package_names_them():
    text = """(objectAtLocation Mug_bar_1 loc_bar_2) (receptacleAtLocation Drawer_bar_b loc_bar_2)
      (ReceptacleAtLocation Drawer_bar_a loc_bar_1) (inReceptacle Mug_bar_1 Drawer_bar_b)
      (receptacleAtLocation Sink_bar__minus_1_bar_SinkBasin loc_bar_3)"""
    text += "".join(f" (receptacleAtLocation Cabinet_bar_{k:02} l)" for k in range(10))
    cabinets = [f"cabinet {k}" for k in range(10, 0, -1)]
    assert _places(text) == [*cabinets, "drawer 2", "drawer 1", "sinkbasin 1"]


@pytest.mark.parametrize("change, field", [
    ({"pddl_problem": None}, "pddl_problem"), ({"pddl_problem": "(none)"}, "pddl_problem"),
    ({"grammar": "{}"}, "grammar"), ({"grammar": 5}, "grammar"),
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


def test_there_is_a_game_of_our_own_of_each_type(tmp_path, stand_in):
    write_own(tmp_path / "own", stand_in / "alfworld/data")
    games, left_out = read(tmp_path / "own")
    assert len({game.kind for game in games}) == len(games) == 6
    assert left_out == 0 and all(game.solution for game in games)


@pytest.mark.parametrize("action, command", [
    ("go to desk 1", "go to desk 1"), ("Action: Go to  desk 1.\n", "go to desk 1"),
    ("Mug first.\n\n> take mug 1 from desk 1\n```", "take mug 1 from desk 1"),
    ("**Action:** `look`", "look"), ("> look -- tidy", "look"), ("", ""), ("\n", ""),
    ("go to desk 1\nlook", "look"),
])  # fmt: skip
def test_a_command_is_the_last_line_of_a_response(action, command):
    assert command_of(action) == command


# ---------------------------------------------------------------- what is missing


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch, name, stand_in):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else find(n))
    with pytest.raises(UserError, match=f"package {name}: {re.escape(module.INSTALL)}"):
        opened("alfworld")


def test_packages_that_cannot_be_imported_are_refused_before_the_first_task(stand_in):
    (stand_in / "textworld/__init__.py").write_text("raise ImportError('libGL.so\\nis missing')")
    with pytest.raises(
        UserError, match=r"used here \(ImportError: libGL.so is missing\): pip inst"
    ):
        opened("alfworld")
    (stand_in / "textworld/__init__.py").write_text("import os; os._exit(1)")
    with pytest.raises(UserError, match="it ended"):
        opened("alfworld")


# ---------------------------------------------------------------- the process


def test_games_of_one_task_share_nothing(environment):
    task = environment.tasks()[0]
    one, two = task.begin(), task.begin()
    assert one._pid != two._pid
    # the game's own, without its welcome
    assert one.observation == "A room.\nA task.\nPossible now: die; hang; win."
    assert one.step("x").observation.startswith("1: x\nPossible now: die; hang; win.")
    assert one.step("y").observation.startswith("2: y")
    assert two.step("z").observation.startswith("1: z")
    one.close()
    one.close()
    assert two.step("win") == module.Step("2: win\nThe task is done.", True, 1.0)
    two.close()
    until(lambda: gone(one._pid) and gone(two._pid))


def test_the_last_action_fails_the_task(environment):
    assert f"You\nhave {STEPS} actions" in environment.instructions and STEPS == 30
    assert environment.most_steps == STEPS
    game = environment.tasks()[0].begin()
    steps = [game.step("x") for _ in range(STEPS)]
    assert not any(step.done for step in steps[:-1])
    assert (steps[-1].done, steps[-1].reward, steps[-1].failure) == (True, -1.0, "steps")
    game.close()
    game = environment.tasks()[0].begin()  # won by the very last one
    steps = [game.step("x") for _ in range(STEPS - 1)]
    assert game.step("win").reward == 1.0
    game.close()


@pytest.mark.parametrize("action, failure", [
    ("die", "crashed"), ("hang", "timed out"), ("raise", "crashed: ValueError: a bug"),
])  # fmt: skip
def test_a_game_that_breaks_off_fails_the_task_alone(environment, monkeypatch, action, failure):
    task = environment.tasks()[0]
    other, game = task.begin(), task.begin()
    if action == "hang":
        game._socket.settimeout(1.0)
    step = game.step(action)
    assert (step.done, step.reward, step.failure) == (True, -1.0, failure)
    game.close()
    until(lambda: gone(game._pid))
    assert other.step("win").reward == 1.0
    other.close()


def test_a_damaged_game_cannot_be_begun(stand_in, tmp_path):
    folder = tree(tmp_path / "games", bad={"damaged": True}, good={})
    environment = ALFWorld(folder)
    bad, good = environment.tasks()
    with pytest.raises(UserError, match=r"bad/trial/.* cannot be played: crashed: KeyError"):
        bad.begin()
    game = good.begin()
    assert game.step("win").reward == 1.0
    game.close()
    environment.close()


def test_the_process_that_starts_games_is_started_anew(environment):
    task, first = environment.tasks()[0], environment._process.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: gone(first))
    game = task.begin()
    assert game.step("win").reward == 1.0 and environment._process.pid != first
    game.close()


def test_nothing_is_left_when_it_is_closed(stand_in):
    environment = ALFWorld()
    game = environment.tasks()[0].begin()
    worker, folder = environment._process.pid, Path(environment._own.name)
    assert folder.is_dir()
    game.close()
    environment.close()
    environment.close()
    until(lambda: gone(worker) and gone(game._pid) and not folder.exists())


def test_nothing_is_left_when_it_is_killed(stand_in):
    code = """import time
from tasks.alf import ALFWorld
environment = ALFWorld()
game = environment.tasks()[0].begin()
print(environment._process.pid, game._pid, environment._own.name, flush=True)
time.sleep(3600)"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        worker, game, folder = process.stdout.readline().split()
        process.kill()
    until(lambda: gone(int(worker)) and gone(int(game)))
    for path in sorted(Path(folder.decode()).rglob("*"), reverse=True):  # nobody could remove it
        path.rmdir() if path.is_dir() else path.unlink()
    Path(folder.decode()).rmdir()


# ---------------------------------------------------------------- the real packages


@pytest.fixture(scope="module")
def alfworld():
    environment = opened("alfworld")
    yield environment
    environment.close()


@real
def test_our_own_games_are_won_by_their_solutions(alfworld):
    for task in alfworld.tasks():
        game = task.begin()
        assert game.observation == task.question and task.intent in task.question
        for action in task.solution[:-1]:
            step = game.step(action)
            assert (step.done, step.reward) == (False, 0.0), (task.id, action, step)
            assert "Nothing happens" not in step.observation
        step = game.step(task.solution[-1])
        assert (step.done, step.reward, step.failure) == (True, 1.0, "")
        game.close()


@real
@pytest.mark.parametrize("kind, left_out", [
    ("clean", "clean plate"), ("heat", "heat egg"), ("cool", "cool apple"), ("two", "pencil 2"),
    ("simple", "move mug"), ("light", "use desklamp"),
])  # fmt: skip
def test_no_game_is_won_without_what_its_task_is_about(alfworld, kind, left_out):
    (task,) = [task for task in alfworld.tasks() if kind in task.kind]
    rest = [action for action in task.solution if left_out not in action]
    assert len(rest) < len(task.solution)
    game = task.begin()
    assert not any(game.step(action).done for action in rest)
    game.close()


@real
def test_an_impossible_action_changes_nothing_and_ends_nothing(alfworld):
    task = alfworld.tasks()[0]
    for action in ("fly to the moon", "", "go to desk 99", "x" * 10**6, "\0\ud800", '{"a": 1}'):
        game = task.begin()
        step = game.step(action)
        assert not step.done and step.observation.startswith("Nothing happens.\nPossible now:")
        game.close()
