"""ALFWorld (arXiv 2010.03768): household tasks in text, by actions such as "go to desk 1".

The games are the user's, a folder of the tree json_2.1.1 that `alfworld-download` brings:
*/game.tw-pddl with traj_data.json beside it. A game is played by the packages `alfworld` and
`textworld`, in a process of its own (suites/_alf_worker.py). It is won when its goal holds; there
is no other reward.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, StringConstraints

from config.errors import UserError, clean, clip
from suites import Scope, Suite
from tasks.environments import Environment, Episode, Step, Text, Work, checked, fingerprint
from tasks.readers import read_json

SECONDS = 120.0  # to open a game (its rules are compiled), and of a step
STEPS = 30
SHOWN = 20_000  # characters of an observation
GAME, ABOUT = "game.tw-pddl", "traj_data.json"
WORKER = Path(__file__).with_name("_alf_worker.py")
PACKAGES = ("alfworld", "textworld", "fast_downward")
INSTALL = "pip install -r requirements-environments.txt"
FORM = f"a game is two files as `alfworld-download` brings them, {GAME} and {ABOUT}"
ALWAYS = ("help", "inventory", "look")  # commands that are possible anywhere
INSTRUCTIONS = f"""\
You work on a task in a household, in text. Each of your responses is one action, on its last line,
such as: go to cabinet 1; open cabinet 1; take mug 1 from cabinet 1; move mug 1 to desk 1; clean,
heat or cool mug 1 with what does so; use desklamp 1; examine mug 1; look; inventory. After each you
are told what happened and which actions are possible then; any other action changes nothing. You
have {STEPS} actions in all."""

# ---------------------------------------------------------------- games and their files


class GameFiles(BaseModel):
    """What is read of the two files of a game."""

    pddl_problem: Annotated[
        str, StringConstraints(pattern=r"(?i)\(receptacleAtLocation\s+[\w-]+_bar_[\w-]+\s")
    ]
    grammar: Annotated[str, StringConstraints(pattern=r'"Your task is to: [^"]*"')]
    pddl_domain: Text
    task_type: Text


@dataclass(frozen=True, slots=True)
class Game:
    """Hold one game as its files have it."""

    id: str  # its folder within the tree
    path: Path
    kind: str  # of the task
    intent: str  # description of the room and the task
    commands: tuple[str, ...]  # that are possible at first
    content: str  # fingerprint of what it is


def read(path: str | Path) -> tuple[list[Game], int]:
    """Read the games of a tree, by the names of their folders, and how many are left out.

    As the package does it, games are left out that are not known to be solvable, and those with
    movable receptacles or slices. UserError: there is no game, or one is of another form.
    """
    root = Path(path).expanduser()
    files = sorted(root.rglob(GAME)) if root.is_dir() else []
    games = [game for file in files if (game := _game(root, file)) is not None]
    if not games:
        raise UserError(
            f"{path} holds no game ({GAME}) that is known to be solvable: give a folder of the "
            "tree json_2.1.1 that `alfworld-download` brings, such as json_2.1.1/train."
        )
    return games, len(files) - len(games)


def _game(root: Path, file: Path) -> Game | None:
    id = file.parent.relative_to(root).as_posix()
    if "movable" in id or "Sliced" in id:
        return None
    fields, about = (
        checked(dict, read_json(path), path, FORM) for path in (file, file.with_name(ABOUT))
    )
    if fields.get("solvable") is not True:
        return None
    game = checked(GameFiles, fields | about, file, FORM)
    places = receptacles(game.pddl_problem)
    *others, last = [f"a {place}" for place in places]
    seen = f"{', '.join(others)}, and {last}" if others else last
    task = re.search(r'"(Your task is to: [^"]*?)\s*"', game.grammar)[1]
    return Game(
        id,
        file,
        game.task_type,
        f"You are in the middle of a room. Looking quickly around you, you see {seen}.\n{task}",
        (*(f"go to {place}" for place in places), *ALWAYS),
        fingerprint((game.pddl_problem, game.grammar, game.pddl_domain)),
    )


def receptacles(problem: str) -> list[str]:
    """Return the receptacles of a problem by the names and in the order that the game has.

    The package numbers what is of one kind, its ids backwards, and lists by id.
    """

    def kind(id: str) -> str:
        return id.partition("_bar_")[0] + "basin" * ("basin" in id)

    ids = {*re.findall(r"[\w-]+_bar_[\w-]+", problem.lower())}
    left = Counter(map(kind, ids))
    names = {}
    for id in sorted(ids):
        names[id] = f"{kind(id)} {left[kind(id)]}"
        left[kind(id)] -= 1
    found = re.findall(r"\(receptacleatlocation\s+([\w-]+_bar_[\w-]+)\s", problem.lower())
    return [names[id] for id in sorted(found)]


def _natural(name: str) -> tuple[str, int]:
    """Return what sorts names as people do: cabinet 2 before cabinet 10."""
    kind, _, number = name.rpartition(" ")
    return (kind, int(number)) if number.isdecimal() else (name, 0)


def possible(commands: Sequence[str]) -> str:
    """Return the line that lists what can be done."""
    return f"Possible now: {'; '.join(sorted(commands, key=_natural))}."


def command_of(action: str) -> str:
    """Return the command of a response: its last line, without what some models put around it."""
    lines = [line for line in action.splitlines() if line.strip("`*> ")] or [""]
    command = re.sub(r"^[\W_]*(action\W+)?", "", lines[-1].lower()).partition(" -- ")[0]
    return " ".join(command.strip("`*\"'.;> ").split())


# ---------------------------------------------------------------- one game


class Lost(Exception):
    """The process of a game has ended, or does not answer: the reason."""


class Player:
    """A process that plays one game; without a game it says whether it could."""

    def __init__(self, *game: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-P", WORKER, *game],
            # where the package makes a folder when it is imported
            env=os.environ | {"ALFWORLD_DATA": tempfile.gettempdir()},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, command: str) -> dict:
        """Return what a command brings; `Lost` as `reply`."""
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        return self.reply()

    def reply(self) -> dict:
        """Return the next reply; Lost: there is none within `SECONDS`, or it is an error."""
        begin, clock = time.monotonic(), threading.Timer(SECONDS, self.process.kill)
        clock.start()
        line = self.process.stdout.readline()
        clock.cancel()
        if not line:
            raise Lost("crashed" if time.monotonic() - begin < SECONDS else "timed out")
        reply = json.loads(line)
        if "error" in reply:
            raise Lost(f"crashed: {reply['error'].rstrip('. ')}")
        return reply

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Playing(Episode):
    """One try of a game. UserError: it cannot be opened."""

    def __init__(self, game: Game):
        self._steps = 0
        self._player = Player(game.path.resolve())
        try:
            first = self._player.reply()
        except Lost as lost:
            self.close()
            raise UserError(f"{game.path} cannot be played: {lost}.") from None
        # room and task, as `Game.intent` has them, without a line of welcome
        text = re.sub(r"\A-=.*=-\n", "", clean(first["text"]))
        lines = [line for line in text.splitlines() if line.strip()]
        self.observation = "\n".join([*lines, possible(first["commands"])])

    def step(self, action: str) -> Step:
        """Carry out the action on the last line of a response."""
        self._steps += 1
        try:
            reply = self._player.ask(command_of(action))
        except Lost as lost:
            return Step("The game has ended.", True, -1.0, str(lost))
        text = clean(reply["text"]).strip()
        if reply["won"]:
            return Step(f"{text}\nThe task is done.", True, 1.0)
        if self._steps == STEPS:
            return Step(f"{text}\nThat was the last action.", True, -1.0, "steps")
        return Step(clip(f"{text}\n{possible(reply['commands'])}", SHOWN))

    def close(self) -> None:
        self._player.close()


# ---------------------------------------------------------------- the suite


class Households(Environment):
    """Games of a folder. UserError: the packages are missing or do not work, there is no game."""

    name, instructions, most_steps = "alfworld", INSTRUCTIONS, STEPS
    skipped_because = "have movable receptacles or slices, or no known solution"

    def __init__(self, path: str | Path):
        with closing(Player()) as player:
            try:
                player.reply()
            except Lost as lost:
                why = "it compiles for minutes, with g++ and cmake"
                raise UserError(f"alfworld cannot be used ({lost}): {INSTALL} ({why}).") from None
        games, self.skipped = read(path)
        self._games = {game.id: game for game in games}

    def tasks(self) -> Sequence[Work]:
        return [
            Work(
                game.id, f"{game.intent}\n{possible(game.commands)}", (), text="", kind=game.kind,
                dataset=self.name, environment=self, skills=(game.kind,), content=game.content,
            )
            for game in self._games.values()
        ]  # fmt: skip

    def intent(self, id: str) -> str:
        return self._games[id].intent

    def reset(self, id: str) -> Playing:
        return Playing(self._games[id])


class ALFWorld(Suite):
    """Games of a folder."""

    unit, metric = "steps", "reward"

    def environment(self, scope: Scope) -> Households:
        return Households(self.file_in(scope))
