"""ALFWorld (arXiv 2010.03768): household tasks in text, by actions such as "go to desk 1".

Holds: `ALFWorld`, `read`, `Game`, `write_own` (six games of ours, one of each type). Leaves out:
the process in which games run (tasks/alf_worker.py), which imports the packages `alfworld` and
`textworld`; the protocol (tasks/environments.py).
Exercise it: `pytest tests/tasks/test_alf.py`. Read next: tasks/alf_worker.py.

The games are the user's, a folder of the tree json_2.1.1 that `alfworld-download` brings:
*/game.tw-pddl with traj_data.json beside it. Without one, six are written of the package's own
domain and grammar. A game is won when its goal holds; there is no other reward.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from config.errors import UserError, clean, clip
from tasks.alf_examples import read_examples, shown_examples
from tasks.environments import Environment, Episode, Step, Work
from tasks.readers import Record, read_json

SECONDS = 120.0  # to open a game (its rules are compiled), and of a step
STEPS = 30
SHOWN = 20_000  # characters of an observation
GAME, ABOUT = "game.tw-pddl", "traj_data.json"
PACKAGES = ("alfworld", "textworld", "fast_downward")
INSTALL = "pip install -r requirements-environments.txt"
INSTRUCTIONS = """\
You work on a task in a household, in text. Each of your responses is one action, on its last line,
such as: go to cabinet 1; open cabinet 1; take mug 1 from cabinet 1; move mug 1 to desk 1; clean,
heat or cool mug 1 with what does so; use desklamp 1; examine mug 1; look; inventory. After each you
are told what happened and which actions are possible then; any other action changes nothing. You
have {steps} actions in all."""

# ---------------------------------------------------------------- games and their files


@dataclass(frozen=True, slots=True)
class Game:
    """Hold one game as its files have it."""

    id: str  # its folder within the tree
    path: Path
    kind: str  # of the task
    room: str
    task: str
    commands: tuple[str, ...]  # that are possible at first
    content: str  # fingerprint of what it is
    solution: tuple[str, ...] = ()

    @property
    def intent(self) -> str:
        """Return the description of the room and the task."""
        return f"{self.room}\n{self.task}"


def read(path: str | Path) -> tuple[list[Game], int]:
    """Read the games of a tree, by the names of their folders, and how many are left out.

    As the package does it, games are left out that are not known to be solvable, and those with
    movable receptacles or slices. UserError: there is no game, or one is of another form.
    """
    root = Path(path).expanduser()
    files = sorted(root.rglob(GAME)) if root.is_dir() else []
    if not files:
        raise UserError(
            f"{path} holds no game ({GAME}): give a folder of the tree json_2.1.1 that "
            "`alfworld-download` brings, such as json_2.1.1/train."
        )
    games = [game for file in files if (game := _game(root, file)) is not None]
    if not games:
        raise UserError(f"No game of {path} is known to be solvable.")
    return games, len(files) - len(games)


def _game(root: Path, file: Path) -> Game | None:
    id = file.parent.relative_to(root).as_posix()
    if "movable" in id or "Sliced" in id:
        return None
    record, about = _record(file), _record(file.parent / ABOUT)
    if record.fields.get("solvable") is not True:
        return None
    problem, grammar = record.text("pddl_problem"), record.text("grammar")
    domain = record.text("pddl_domain")
    task = re.search(r'"(Your task is to: [^"]*?)\s*"', grammar)
    if not task:
        raise record.error("'grammar' does not say 'Your task is to: ...'")
    places = _places(problem)
    if not places:
        raise record.error("'pddl_problem' has no (receptacleAtLocation ..)")
    content = _fingerprint(problem, grammar, domain)
    known = about.maybe("solution", list)
    return Game(
        id, file, about.text("task_type"), _room(places), task[1],
        (*(f"go to {place}" for place in places), *ALWAYS), content,
        about.texts("solution") if known else (),
    )  # fmt: skip


def _fingerprint(*parts: str) -> str:
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


ALWAYS = ("help", "inventory", "look")  # possible anywhere


def _record(file: Path) -> Record:
    fields = read_json(file)
    if not isinstance(fields, dict):
        raise UserError(f"{file} must hold a JSON object.")
    return Record(file, "", 0, fields)


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


# ---------------------------------------------------------------- the environment


class ALFWorld(Environment):
    """Tasks in households. path: a folder of games; "" = our own six.

    few_shot: a file of dialogues (tasks/alf_examples.py); "" = none. UserError: the packages are
    missing or do not work, there is no game, the dialogues are of another form.
    """

    name, most_steps = "alfworld", STEPS
    style: Literal["agent"] = "agent"
    instructions = INSTRUCTIONS.format(steps=STEPS)

    skipped_because = "have movable receptacles or slices, or no known solution"

    def __init__(self, path: str | Path = "", few_shot: str | Path = ""):
        self._own: tempfile.TemporaryDirectory | None = None
        self._process: subprocess.Popen | None = None
        self._examples = read_examples(few_shot) if few_shot else {}
        data = _package_data()
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
            said = self._control.recv(4096).decode(errors="replace")
        except OSError:
            said = "no answer"
        if said != "ready":
            reason = " ".join(said.split())[:300].rstrip(". ") or "it ended"
            raise UserError(f"alfworld cannot be used here ({reason}): {INSTALL}.")

    def tasks(self) -> Sequence[Work]:
        """Return all games that are known to be solvable."""
        return [self._work(game) for game in self._games.values()]

    def _work(self, game: Game) -> Work:
        example = shown_examples(self._examples.get(game.kind, ()), game.intent)
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
            content=_fingerprint(game.content, example) if example else game.content,
            example=example,
        )

    def intent(self, id: str) -> str:
        """Return the description of the room and the task."""
        return self._games[id].intent

    def reset(self, id: str) -> Playing:
        """Begin a game in a process of its own."""
        ours, theirs = socket.socketpair()
        with theirs:
            for last in (False, True):
                try:
                    socket.send_fds(self._control, [b"g"], [theirs.fileno()])
                    break
                except OSError:  # it was ended, by a lack of memory for instance
                    if last:
                        ours.close()
                        raise UserError("The process of ALFWorld's games does not stay.") from None
                    self._end()
                    self._start()
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
        if self._own is not None:
            self._own.cleanup()
            self._own = None


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
        said = re.sub(r"\A-=.*=-\n", "", clean(first["text"]))
        lines = [line for line in said.splitlines() if line.strip()]
        self.observation = "\n".join([*lines, possible(first["commands"])])

    def plan(self) -> list[str]:
        """Return the planner's commands that win from here; it sees what is behind doors too.

        UserError: it finds none, or the game has broken off.
        """
        try:
            return [*(self._ask(None)["plan"] or ())]
        except _Lost as lost:
            raise UserError(f"The planner has no answer: {lost}.") from None

    def _ask(self, what: str | None) -> dict:
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


# ---------------------------------------------------------------- our own games

KITCHEN = {"countertop 1": "", "fridge 1": "", "microwave 1": "", "sinkbasin 1": ""}
OPENABLE = {"fridge", "microwave", "drawer", "cabinet"}
TYPES = {
    "countertop": "CounterTop", "sinkbasin": "SinkBasin", "desklamp": "DeskLamp",
    "butterknife": "ButterKnife",
}  # fmt: skip
NAMED_BY_DOMAIN = (("sinkbasin", "microwave", "fridge"), ("knife", "butterknife"))


@dataclass(frozen=True, slots=True)
class Own:
    """Describe one of our own games."""

    kind: str
    task: str
    places: Mapping[str, str]  # receptacle -> what is in it
    goal: str
    solution: str


def _put(thing: str, place: str, also: str = "") -> str:
    return (
        f"(exists (?o - object ?r - receptacle) (and {also} (objectType ?o {_type(thing)})"
        f" (receptacleType ?r {_type(place)}) (inReceptacle ?o ?r)))"
    )


def _type(kind: str) -> str:
    return TYPES.get(kind, kind.capitalize()) + "Type"


OWN = (
    Own(
        "pick_and_place_simple",
        "put some mug on the desk",
        {"desk 1": "", "shelf 1": "mug 1", "shelf 2": "book 1", "drawer 1": "pencil 1"},
        _put("mug", "desk"),
        "go to shelf 1; take mug 1 from shelf 1; go to desk 1; move mug 1 to desk 1",
    ),
    Own(
        "look_at_obj_in_light",
        "look at the book under the desklamp",
        {"desk 1": "desklamp 1, pencil 1", "shelf 1": "", "drawer 1": "book 1"},
        """(and (exists (?a - agent ?o - object) (and (objectType ?o BookType) (holds ?a ?o)))
   (exists (?a - agent ?o - object ?r - receptacle ?l - location) (and (objectType ?o DeskLampType)
   (isToggled ?o) (inReceptacle ?o ?r) (receptacleAtLocation ?r ?l) (atLocation ?a ?l))))""",
        "go to drawer 1; open drawer 1; take book 1 from drawer 1; go to desk 1; use desklamp 1",
    ),
    Own(
        "pick_clean_then_place_in_recep",
        "put a clean plate in the cabinet",
        {**KITCHEN, "countertop 1": "plate 1, egg 1", "cabinet 1": ""},
        _put("plate", "cabinet", "(isClean ?o)"),
        "go to countertop 1; take plate 1 from countertop 1; go to sinkbasin 1; clean plate 1 with "
        "sinkbasin 1; go to cabinet 1; open cabinet 1; move plate 1 to cabinet 1",
    ),
    Own(
        "pick_heat_then_place_in_recep",
        "put a hot egg on the countertop",
        {**KITCHEN, "fridge 1": "egg 1, apple 1"},
        _put("egg", "countertop", "(isHot ?o)"),
        "go to fridge 1; open fridge 1; take egg 1 from fridge 1; go to microwave 1; heat egg 1 "
        "with microwave 1; go to countertop 1; move egg 1 to countertop 1",
    ),
    Own(
        "pick_cool_then_place_in_recep",
        "put a cool apple on the shelf",
        {**KITCHEN, "countertop 1": "apple 1, knife 1", "shelf 1": "mug 1"},
        _put("apple", "shelf", "(isCool ?o)"),
        "go to countertop 1; take apple 1 from countertop 1; go to fridge 1; cool apple 1 with "
        "fridge 1; go to shelf 1; move apple 1 to shelf 1",
    ),
    Own(
        "pick_two_obj_and_place",
        "find two pencils and put them in the drawer",
        {"desk 1": "pencil 1", "shelf 1": "pencil 2, book 1", "drawer 1": "mug 1"},
        """(exists (?r - receptacle ?o ?p - object) (and (receptacleType ?r DrawerType)
   (objectType ?o PencilType) (objectType ?p PencilType) (not (= ?o ?p)) (inReceptacle ?o ?r)
   (inReceptacle ?p ?r)))""",
        "go to desk 1; take pencil 1 from desk 1; go to drawer 1; open drawer 1; move pencil 1 to "
        "drawer 1; go to shelf 1; take pencil 2 from shelf 1; go to drawer 1; move pencil 2 to "
        "drawer 1",
    ),
)  # fmt: skip


def problem(own: Own) -> str:
    """Return a game of ours in PDDL, for the package's domain."""
    things = {
        name: place for place, names in own.places.items() for name in names.split(", ") if name
    }
    kinds = [
        sorted({_type(name.split()[0]) for name in names} | {*map(_type, always)})
        for names, always in zip((own.places, things), NAMED_BY_DOMAIN, strict=True)
    ]
    lines = ["(atLocation agent1 middle)", "(= (total-cost) 0)"]
    for place in own.places:
        kind, id = place.split()[0], _id(place)
        lines.append(f"(receptacleType {id} {_type(kind)}) (receptacleAtLocation {id} at_{id})")
        lines += [f"(openable {id})"] * (kind in OPENABLE)
    for name, place in things.items():
        kind, id = name.split()[0], _id(name)
        can = ("toggleable",) if kind == "desklamp" else (
            "pickupable", "moveable", "cleanable", "heatable", "coolable")  # fmt: skip
        lines.append(f"(objectType {id} {_type(kind)}) (inReceptacle {id} {_id(place)})")
        lines.append(f"(objectAtLocation {id} at_{_id(place)})")
        lines.append(" ".join(f"({word} {id})" for word in can))
    lines += [" ".join(f"(canContain {rtype} {otype})" for otype in kinds[1]) for rtype in kinds[0]]
    init = "\n  ".join(lines)
    return f"""\
(define (problem own)
 (:domain alfred)
 (:objects
  agent1 - agent
  middle {" ".join(f"at_{_id(place)}" for place in own.places)} - location
  {" ".join(map(_id, own.places))} - receptacle
  {" ".join(map(_id, things))} - object
  {" ".join(kinds[0])} - rtype
  {" ".join(kinds[1])} - otype)
 (:init
  {init})
 (:goal {own.goal})
 (:metric minimize (total-cost)))
"""


def _id(name: str) -> str:
    """Return the id that the game shows by this name: it numbers ids backwards."""
    kind, number = name.split()
    id = f"{kind.removesuffix('basin')}_bar_{9 - int(number)}"
    return f"{id}_bar_{kind}" if kind.endswith("basin") else id


def write_own(folder: Path, data: Path) -> None:
    """Write our six games as a tree. data: the folder of the package's domain and grammar."""
    domain, grammar = (
        (data / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2")
    )
    for own in OWN:
        place = folder / own.kind / "own"
        place.mkdir(parents=True)
        game = {
            "pddl_domain": domain,
            "grammar": grammar.replace("UNKNOWN GOAL", own.task),
            "pddl_problem": problem(own),
            "solvable": True,
        }
        (place / GAME).write_text(json.dumps(game), encoding="utf-8")
        about = {"task_type": own.kind, "solution": own.solution.split("; ")}
        (place / ABOUT).write_text(json.dumps(about), encoding="utf-8")
