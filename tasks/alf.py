"""ALFWorld (arXiv 2010.03768): household tasks in text, by actions such as "go to desk 1".

Holds: `ALFWorld`, `read`, `Game`, `write_own`. Leaves out: the process in which games run
(tasks/alf_worker.py), which imports the packages `alfworld` and `textworld`; the protocol
(tasks/environments.py).
Exercise it: `pytest tests/tasks/test_alf.py`. Read next: tasks/alf_worker.py.

The games are the user's, a folder of the tree json_2.1.1 that `alfworld-download` brings:
*/game.tw-pddl with traj_data.json beside it. Without one, the six of alf_own.json, one of each
type, are written with the package's own domain and grammar. A game is won when its goal holds;
there is no other reward.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, StringConstraints

from config.errors import UserError, clean, clip
from tasks.environments import Environment, Episode, Step, Text, Texts, Work, checked, fingerprint
from tasks.readers import read_json

SECONDS = 120.0  # to open a game (its rules are compiled), and of a step
STEPS = 30
SHOWN = 20_000  # characters of an observation
GAME, ABOUT = "game.tw-pddl", "traj_data.json"
OWN = Path(__file__).with_name("alf_own.json")
PACKAGES = ("alfworld", "textworld", "fast_downward")
INSTALL = "pip install -r requirements-environments.txt"
FORM = f"a game is two files as `alfworld-download` brings them, {GAME} and {ABOUT}"
ALWAYS = ("help", "inventory", "look")  # commands that are possible anywhere
INSTRUCTIONS = """\
You work on a task in a household, in text. Each of your responses is one action, on its last line,
such as: go to cabinet 1; open cabinet 1; take mug 1 from cabinet 1; move mug 1 to desk 1; clean,
heat or cool mug 1 with what does so; use desklamp 1; examine mug 1; look; inventory. After each you
are told what happened and which actions are possible then; any other action changes nothing. You
have {steps} actions in all."""

# ---------------------------------------------------------------- games and their files


class GameFiles(BaseModel):
    """What is read of the two files of a game; only our own have a solution."""

    pddl_problem: Annotated[
        str, StringConstraints(pattern=r"(?i)\(receptacleAtLocation\s+[\w-]+_bar_[\w-]+\s")
    ]
    grammar: Annotated[str, StringConstraints(pattern=r'"Your task is to: [^"]*"')]
    pddl_domain: Text
    task_type: Text
    solution: Texts = ()


@dataclass(frozen=True, slots=True)
class Game:
    """Hold one game as its files have it."""

    id: str  # its folder within the tree
    path: Path
    kind: str  # of the task
    intent: str  # description of the room and the task
    commands: tuple[str, ...]  # that are possible at first
    content: str  # fingerprint of what it is
    solution: tuple[str, ...] = ()


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
    places = _places(game.pddl_problem)
    task = re.search(r'"(Your task is to: [^"]*?)\s*"', game.grammar)[1]
    return Game(
        id,
        file,
        game.task_type,
        f"{_room(places)}\n{task}",
        (*(f"go to {place}" for place in places), *ALWAYS),
        fingerprint((game.pddl_problem, game.grammar, game.pddl_domain)),
        game.solution,
    )


def _places(problem: str) -> list[str]:
    """Return the receptacles of a problem by the names and in the order that the game has.

    The package numbers what is of one kind, its ids backwards, and lists by id.
    """
    ids = {*re.findall(r"[\w-]+_bar_[\w-]+", problem.lower())}
    left = Counter(map(_kind, ids))
    names = {}
    for id in sorted(ids):
        kind = _kind(id)
        names[id] = f"{kind} {left[kind]}"
        left[kind] -= 1
    found = re.findall(r"\(receptacleatlocation\s+([\w-]+_bar_[\w-]+)\s", problem.lower())
    return [names[id] for id in sorted(found)]


def _kind(id: str) -> str:
    return id.partition("_bar_")[0] + "basin" * ("basin" in id)


def _natural(name: str) -> tuple[str, int]:
    """Return what sorts names as people do: cabinet 2 before cabinet 10."""
    kind, _, number = name.rpartition(" ")
    return (kind, int(number)) if number.isdecimal() else (name, 0)


def _room(places: Sequence[str]) -> str:
    """Describe a room as the game does it."""
    *others, last = [f"a {place}" for place in places]
    seen = f"{', '.join(others)}, and {last}" if others else last
    return f"You are in the middle of a room. Looking quickly around you, you see {seen}."


def possible(commands: Sequence[str]) -> str:
    """Return the line that lists what can be done."""
    return f"Possible now: {'; '.join(sorted(commands, key=_natural))}."


def write_own(folder: Path, data: Path) -> None:
    """Write our six games as a tree. data: the folder of the package's domain and grammar."""
    domain, grammar = (
        (data / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2")
    )
    for game in json.loads(OWN.read_text(encoding="utf-8")):
        place = folder / game["kind"] / "own"
        place.mkdir(parents=True)
        fields = {
            "pddl_domain": domain,
            "grammar": grammar.replace("UNKNOWN GOAL", game["task"]),
            "pddl_problem": game["problem"],
            "solvable": True,
        }
        (place / GAME).write_text(json.dumps(fields), encoding="utf-8")
        about = {"task_type": game["kind"], "solution": game["solution"].split("; ")}
        (place / ABOUT).write_text(json.dumps(about), encoding="utf-8")


# ---------------------------------------------------------------- the environment


class ALFWorld(Environment):
    """Tasks in households. path: a folder of games; "" = our own six.

    UserError: the packages are missing or do not work, there is no game.
    """

    name, most_steps = "alfworld", STEPS
    instructions = INSTRUCTIONS.format(steps=STEPS)
    skipped_because = "have movable receptacles or slices, or no known solution"

    def __init__(self, path: str | Path = ""):
        data = _package_data()
        self._process: subprocess.Popen | None = None
        self._own = tempfile.TemporaryDirectory(prefix="alfworld-")
        try:
            if not path:
                write_own(Path(self._own.name), data)
            games, self.skipped = read(path or self._own.name)
            self._games = {game.id: game for game in games}
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start the process that starts games. UserError: it cannot import what it needs."""
        self._control, theirs = socket.socketpair()
        # where the package makes a folder when it is imported
        variables = os.environ | {"ALFWORLD_DATA": self._own.name}
        worker = str(Path(__file__).parent / "alf_worker.py")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=variables, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._control.settimeout(SECONDS)
        try:
            reply = self._control.recv(4096).decode(errors="replace")
        except OSError:
            reply = "no answer"
        if reply != "ready":
            reason = " ".join(reply.split())[:300].rstrip(". ") or "it ended"
            raise UserError(f"alfworld cannot be used here ({reason}): {INSTALL}.")

    def tasks(self) -> Sequence[Work]:
        """Return all games that are known to be solvable."""
        return [self._work(game) for game in self._games.values()]

    def _work(self, game: Game) -> Work:
        return Work(
            id=game.id,
            question=f"{game.intent}\n{possible(game.commands)}",
            answers=(),
            text="",
            kind=game.kind,
            dataset=self.name,
            environment=self,
            solution=game.solution,
            skills=(game.kind,),
            content=game.content,
        )

    def intent(self, id: str) -> str:
        """Return the description of the room and the task."""
        return self._games[id].intent

    def reset(self, id: str) -> Playing:
        """Begin a game in a process of its own."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"g"], [theirs.fileno()])
            except OSError:  # the process was ended, by a lack of memory for instance
                self._end()
                self._start()
                socket.send_fds(self._control, [b"g"], [theirs.fileno()])
        return Playing(self._games[id], ours)

    def _end(self) -> None:
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the process that starts games, and remove our own games; again is harmless."""
        self._end()
        self._own.cleanup()


class _Lost(Exception):
    """The process of a game has ended, or does not answer: the reason."""


class Playing(Episode):
    """One try of a game. UserError: it cannot be opened."""

    def __init__(self, game: Game, connection: socket.socket):
        self._steps, self._pid = 0, 0
        self._socket = connection
        self._socket.settimeout(SECONDS)
        self._lines = connection.makefile("rb")
        try:
            self._pid = self._reply()["pid"]
            first = self._ask(str(game.path.resolve()))
        except _Lost as lost:
            self.close()
            raise UserError(f"{game.path} cannot be played: {lost}.") from None
        # room and task, as `Game.intent` has them, without a line of welcome
        text = re.sub(r"\A-=.*=-\n", "", clean(first["text"]))
        lines = [line for line in text.splitlines() if line.strip()]
        self.observation = "\n".join([*lines, possible(first["commands"])])

    def _ask(self, what: str) -> dict:
        try:
            self._socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise _Lost(f"crashed: {type(error).__name__}") from None
        return self._reply()

    def _reply(self) -> dict:
        try:
            line = self._lines.readline()
        except TimeoutError:
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            raise _Lost("timed out") from None
        except OSError as error:
            raise _Lost(f"crashed: {type(error).__name__}") from None
        if not line:
            raise _Lost("crashed")
        reply = json.loads(line)
        if "error" in reply:
            raise _Lost(f"crashed: {reply['error'].rstrip('. ')}")
        return reply

    def step(self, action: str) -> Step:
        """Carry out the action on the last line of a response."""
        self._steps += 1
        try:
            reply = self._ask(command_of(action))
        except _Lost as lost:
            return Step("The game has ended.", True, -1.0, str(lost))
        text = clean(reply["text"]).strip()
        if reply["won"]:
            return Step(f"{text}\nThe task is done.", True, 1.0)
        if self._steps == STEPS:
            return Step(f"{text}\nThat was the last action.", True, -1.0, "steps")
        return Step(clip(f"{text}\n{possible(reply['commands'])}", SHOWN))

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def command_of(action: str) -> str:
    """Return the command of a response: its last line, without what some models put around it.

    >>> command_of("I need a mug.\\n> Go to  desk 1. -- It is there.")
    'go to desk 1'
    """
    lines = [line for line in action.splitlines() if line.strip("`*> ")] or [""]
    command = re.sub(r"^[\W_]*(action\W+)?", "", lines[-1].lower()).partition(" -- ")[0]
    return " ".join(command.strip("`*\"'.;> ").split())


def _package_data() -> Path:
    """Return the folder of the package's domain and grammar. UserError: a package is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"alfworld needs the package {missing[0]}: {INSTALL} (it compiles for minutes, with "
            "g++ and cmake)."
        )
    return Path(importlib.util.find_spec("alfworld").origin).parent / "data"
