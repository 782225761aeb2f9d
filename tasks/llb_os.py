"""LLB-OS: what is asked for is done by bash scripts in a Debian system, and checked by a script.

Holds: `LLBOS`, `read`. Leaves out: the system (tasks/sandbox.py).
Exercise it: `pytest tests/tasks/test_llb_os.py`. Read next: tasks/bcb.py.

The form is that of LifelongAgentBench's operating-system tasks: a JSON object, id -> item, with
instruction, initialization_command_item and evaluation_info {ground_truth_command_item,
evaluation_command_item}; a command is {command_name: "bash", script}. The file is the user's: no
licence of its data is known. Initialisation, actions and check run in one system; the task is
solved if the check ends with exit code 0. Who acts is root there, and can deceive the check: the
reward is a measurement and no proof.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from config.errors import UserError, clean, clip
from config.foreign import from_json, read_data
from tasks.environments import Environment, Episode, Step, Work
from tasks.sandbox import BLOCK, Ran, System, fence, fenced, lacking, require

SCRIPT_SECONDS, ITEM_SECONDS = 25, 120
SHOWN = 4000  # characters of a script's output
LONGEST = 100_000  # bytes of a script; the kernel takes 131,072 as one argument
GOOD = "os_interaction_runtime_learning_data.json, os_interaction_train.json or _val.json"
INSTRUCTIONS = """\
You are root of a Debian 12 system without network. Do what the task says by bash scripts. Write one
script in a fenced block; it runs without input, for at most {seconds} seconds, and you see its
output. Each script is a new shell; files, users and processes stay. When all is done, write a line
with the single word finish, alone or after the last script. Then the system is checked.
You have {steps} responses, after which it is checked as it is{ends}."""
STEPS = {"own": 15, "released": 5}  # max_round of configs/components/tasks/os_interaction.yaml


class LLBOS(Environment):
    """Tasks of a Debian system. UserError: the file is not as it must be, or a part is missing."""

    name = "llb-os"
    style: Literal["agent"] = "agent"

    def __init__(
        self,
        path: str | Path,
        rules: Literal["own", "released"] = "own",
        most_steps: int | None = None,
    ):
        self.rules, self.most_steps = rules, most_steps or STEPS[rules]
        self.instructions = INSTRUCTIONS.format(
            seconds=SCRIPT_SECONDS,
            steps=self.most_steps,
            ends=", or at once where one has neither script nor finish" * (rules == "released"),
        )
        self._items = read(Path(path))
        require(self.name, lacking(system=True))
        self._tasks = [self._work(id, item) for id, item in self._items.items()]

    def _work(self, id: str, item: dict) -> Work:
        gold = f"{fence(item['gold'], 'bash')}\nfinish"
        content = blake2b(repr((item["begin"], item["check"])).encode(), digest_size=8).hexdigest()
        content += self.rules.removeprefix("own")
        return Work(
            id, item["instruction"], (), dataset=self.name, environment=self, solution=(gold,),
            skills=item["skills"], content=content, kind=f"{self.rules} rules",
        )  # fmt: skip

    def tasks(self) -> Sequence[Work]:
        """Return all tasks, in the order of the file."""
        return self._tasks

    def intent(self, id: str) -> str:
        """Return what the task says."""
        return self._items[id]["instruction"]

    def reset(self, id: str) -> Shell:
        """Begin a task in a new system. UserError: that, or its initialisation, has failed."""
        return Shell(id, self._items[id], self.most_steps, self.rules == "released")

    def close(self) -> None:
        """Do nothing: episodes share nothing."""


class Shell(Episode):
    """One try of a task, in a system of its own."""

    def __init__(self, id: str, item: dict, most_steps: int, released: bool):
        self.observation = item["instruction"]
        self.check = item["check"]
        self.steps_left, self.released = most_steps, released
        self.seconds_left = float(ITEM_SECONDS)
        try:
            self.system = System()
        except OSError as error:
            raise UserError(f"No system can be started for {id} ({error.strerror}).") from error
        try:
            # Its exit code says nothing: that of the last command, which may have had nothing to do
            if item["begin"] and self._run(item["begin"]).code is None:
                raise UserError(f"The initialisation of {id} took over {SCRIPT_SECONDS} s.")
        except BaseException:
            self.close()
            raise

    def _run(self, script: str) -> Ran:
        """Run a script within what is left of the time."""
        ran = self.system.run(script, min(SCRIPT_SECONDS, self.seconds_left))
        self.seconds_left -= ran.seconds
        return ran

    def step(self, action: str) -> Step:
        """Run the script of a response; check the system if it says finish, or was the last."""
        self.steps_left -= 1
        scripts = fenced(action, "bash", "sh", "shell")
        finished = bool(re.search(r"^[ \t]*finish[ \t.]*$", BLOCK.sub("", action), re.I | re.M))
        said, why = [], ""
        if scripts:
            try:
                said.append(self._act(scripts))
            except OSError as error:
                return self._failed(said, f"crashed: {error.strerror}")
        elif not finished:
            said.append("Nothing was run: there is neither one script in a fenced block nor a line "
                        "that says finish.")  # fmt: skip
        if self.seconds_left <= 0:
            why = "timed out"
        elif not finished and not scripts and self.released:
            why = "no action"
        elif not finished and not self.steps_left:
            why = "steps"
        elif not finished and self.system.is_alive:
            return Step("\n".join(said))
        return self.give_up(why, said)

    def give_up(self, failure: str, said: Sequence[str] = ()) -> Step:
        """Check the system as it is, however the episode has ended, as the release does.

        failure: why nothing more was done, unless that solves the task; "" = it is done.
        """
        try:
            if not self.system.is_alive:
                return self._failed(said, "the system has ended")
            # What is left of the time may be none
            code = self.system.run(self.check, SCRIPT_SECONDS).code
        except OSError as error:
            return self._failed(said, f"crashed: {error.strerror}")
        if code == 0:
            return Step("\n".join([*said, "The task is solved."]), done=True, reward=1.0)
        if failure or code is None:
            return self._failed(said, failure or "timed out")
        return Step("\n".join([*said, "The task is not solved."]), done=True, reward=-1.0)

    def _act(self, scripts: list[str]) -> str:
        """Return what is shown of a response's script."""
        (script, *others) = scripts
        if others:
            return f"Nothing was run: there are {len(scripts)} scripts, and only one can be run."
        if "\0" in script or len(script.encode(errors="replace")) > LONGEST:
            return f"Nothing was run: a script has at most {LONGEST:,} bytes, and no NUL."
        if not script.strip():
            return "Nothing was run: the script is empty."
        ran = self._run(script)
        shown = clip(clean(ran.output.rstrip()), SHOWN) or "(no output)"
        if ran.code is None:
            return f"{shown}\nThe script was stopped: its time was over."
        return shown if ran.code == 0 else f"{shown}\nexit code {ran.code}"

    def _failed(self, said: Sequence[str], why: str) -> Step:
        observation = "\n".join([*said, f"The task has failed: {why}."])
        return Step(observation, done=True, reward=-1.0, failure=why)

    def close(self) -> None:
        """End the system; again is harmless."""
        self.system.close()


# ---------------------------------------------------------------- the file


def read(path: Path) -> dict[str, dict]:
    """Read a file: id -> instruction, begin, gold, check (scripts; begin may be ""), skills.

    UserError names the file, the item and what is wrong with it.
    """
    try:
        items = from_json(read_data(path))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}: it must be one of LLB-OS, {GOOD}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no JSON file: {clip(str(error), 200)}.") from error
    if not isinstance(items, dict) or not items:
        raise UserError(f"{path} must be a JSON object of items by id, as {GOOD} are.")
    return {id: _Item(path, id, item).parsed() for id, item in items.items()}


class _Item:
    """Access the fields of an item; UserError names the file and the item."""

    def __init__(self, path: Path, id: str, fields: object):
        self.where, self.fields = f"{path}, item {id}", fields
        if not isinstance(fields, dict):
            raise UserError(f"{self.where} must be an object.")

    def parsed(self) -> dict:
        evaluation = self.object("evaluation_info", self.fields)
        skills = self.fields.get("skill_list") or []
        if not isinstance(skills, list) or not all(isinstance(skill, str) for skill in skills):
            raise UserError(f"{self.where}: 'skill_list' must be a list of names.")
        return {
            "instruction": self.text("instruction", self.fields),
            "begin": self.script("initialization_command_item", self.fields, required=False),
            "gold": self.script("ground_truth_command_item", evaluation),
            "check": self.script("evaluation_command_item", evaluation),
            "skills": tuple(skills),
        }

    def object(self, name: str, fields: dict) -> dict:
        value = fields.get(name)
        if isinstance(value, str) and _is_repr(value):
            raise UserError(
                f"{self.where}: '{name}' is the text of a Python object, as in the broken "
                f"os_interaction_data.json of the release; take {GOOD} instead."
            )
        if not isinstance(value, dict):
            raise UserError(f"{self.where}: '{name}' must be an object.")
        return value

    def text(self, name: str, fields: dict) -> str:
        value = fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{self.where}: '{name}' must be a text that is not empty.")
        return value

    def script(self, name: str, fields: dict, required: bool = True) -> str:
        if not required and fields.get(name) is None:
            return ""
        command = self.object(name, fields)
        if (kind := command.get("command_name")) != "bash":
            raise UserError(f"{self.where}: '{name}' must be a command of bash, not of {kind!r}.")
        if not required and command.get("script") == "":
            return ""
        script = self.text("script", command)
        if "\0" in script or len(script.encode(errors="replace")) > LONGEST:
            raise UserError(f"{self.where}: the script of '{name}' has over {LONGEST:,} bytes.")
        return script


def _is_repr(text: str) -> bool:
    try:
        return isinstance(ast.literal_eval(text), dict)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
