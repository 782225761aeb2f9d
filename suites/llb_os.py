"""LifelongAgentBench's shell tasks: scripts in a fresh Debian system, judged by a check script.

The file is a JSON object, id -> item, with instruction, initialization_command_item and
evaluation_info {ground_truth_command_item, evaluation_command_item}; a command is {command_name:
"bash", script}. It is the user's: no licence of its data is known. Initialisation, actions and
check run in one system; the task is solved if the check ends with exit code 0. Who acts is root
there, and can deceive the check: the reward is a measurement and no proof.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasPath, BaseModel, Field

from config.errors import UserError, clean, clip
from suites import Scope, Suite
from tasks.environments import Environment, Episode, Step, Text, Texts, Work, fingerprint, items
from tasks.readers import read_json
from tasks.sandbox import BLOCK, Ran, System, fence, fenced, lacking, require

SCRIPT_SECONDS, ITEM_SECONDS = 25, 120
SHOWN = 4000  # characters of a script's output
LONGEST = 100_000  # bytes of a script; the kernel takes 131,072 as one argument
STEPS = 5  # max_round of configs/components/tasks/os_interaction.yaml
FORM = (
    "llb-os reads the release's os_interaction_runtime_learning_data.json, "
    "os_interaction_train.json and os_interaction_val.json (os_interaction_data.json is broken)"
)
INSTRUCTIONS = f"""\
You are root of a Debian 12 system without network. Do what the task says by bash scripts. Write one
script in a fenced block; it runs without input, for at most {SCRIPT_SECONDS} seconds, and you see \
its
output. Each script is a new shell; files, users and processes stay. When all is done, write a line
with the single word finish, alone or after the last script. Then the system is checked.
You have {STEPS} responses, after which it is checked as it is, or at once where one has \
neither script nor finish."""

# ---------------------------------------------------------------- items and their file


def fault_of(script: str) -> str:
    """Return why the kernel does not take a script as an argument, "" if it does."""
    takes = "\0" not in script and len(script.encode(errors="replace")) <= LONGEST
    return "" if takes else f"a script has at most {LONGEST:,} bytes, and no NUL"


def _runnable(script: str) -> str:
    if fault := fault_of(script):
        raise ValueError(fault)
    return script


class Command(BaseModel):
    """A script as the file has it."""

    command_name: Literal["bash"]
    script: Annotated[str, AfterValidator(_runnable)]


class Filled(Command):
    script: Annotated[Text, AfterValidator(_runnable)]


class Item(BaseModel):
    """One task as the file has it."""

    instruction: Text
    begin: Command | None = Field(None, validation_alias="initialization_command_item")
    gold: Filled = Field(validation_alias=AliasPath("evaluation_info", "ground_truth_command_item"))
    check: Filled = Field(validation_alias=AliasPath("evaluation_info", "evaluation_command_item"))
    skills: Texts | None = Field(None, validation_alias="skill_list")


# ---------------------------------------------------------------- episodes


class Shell(Episode):
    """One try of a task, in a system of its own. UserError: it, or its initialisation, failed."""

    def __init__(self, id: str, item: Item):
        self.observation, self.check = item.instruction, item.check.script
        self.steps_left, self.seconds_left = STEPS, float(ITEM_SECONDS)
        try:
            self.system = System()
        except OSError as error:
            raise UserError(f"No system can be started for {id} ({error.strerror}).") from error
        try:
            # its exit code says nothing: that of the last command, which may have had nothing to do
            if item.begin and item.begin.script and self._run(item.begin.script).code is None:
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
        lines = []
        if scripts:
            try:
                lines = [self._act(scripts)]
            except OSError as error:
                return self._failed(lines, f"crashed: {error.strerror}")
        elif not finished:
            lines = ["Nothing was run: there is neither one script in a fenced block nor a line "
                     "that says finish."]  # fmt: skip
        ends = {
            "timed out": self.seconds_left <= 0, "": finished, "no action": not scripts,
            "steps": not self.steps_left, "the system has ended": not self.system.is_alive,
        }  # fmt: skip
        why = next((why for why, is_so in ends.items() if is_so), None)
        return Step("\n".join(lines)) if why is None else self.give_up(why, lines)

    def give_up(self, failure: str, lines: Sequence[str] = ()) -> Step:
        """Check the system as it is, however the episode has ended, as the release does.

        failure: why nothing more was done, unless that solves the task; "" = it is done.
        """
        if not self.system.is_alive:
            return self._failed(lines, "the system has ended")
        try:  # what is left of the time may be none
            code = self.system.run(self.check, SCRIPT_SECONDS).code
        except OSError as error:
            return self._failed(lines, f"crashed: {error.strerror}")
        if code == 0:
            return Step("\n".join([*lines, "The task is solved."]), done=True, reward=1.0)
        if failure or code is None:
            return self._failed(lines, failure or "timed out")
        return Step("\n".join([*lines, "The task is not solved."]), done=True, reward=-1.0)

    def _act(self, scripts: list[str]) -> str:
        """Return what is shown of a response's script."""
        (script, *others) = scripts
        if others:
            return f"Nothing was run: there are {len(scripts)} scripts, and only one can be run."
        if fault := fault_of(script) or ("" if script.strip() else "the script is empty"):
            return f"Nothing was run: {fault}."
        ran = self._run(script)
        shown = clip(clean(ran.output.rstrip()), SHOWN) or "(no output)"
        if ran.code is None:
            return f"{shown}\nThe script was stopped: its time was over."
        return shown if ran.code == 0 else f"{shown}\nexit code {ran.code}"

    def _failed(self, lines: Sequence[str], why: str) -> Step:
        observation = "\n".join([*lines, f"The task has failed: {why}."])
        return Step(observation, done=True, reward=-1.0, failure=why)

    def close(self) -> None:
        self.system.close()


# ---------------------------------------------------------------- the suite


class Systems(Environment):
    """Tasks of a Debian system. UserError: the file is not as it must be, or a part is missing."""

    name, instructions, most_steps = "llb-os", INSTRUCTIONS, STEPS

    def __init__(self, path: str | Path):
        self._items: dict[str, Item] = items(Item, read_json(path), path, FORM)
        require(self.name, lacking(system=True))
        self._tasks = [self._work(id, item) for id, item in self._items.items()]

    def _work(self, id: str, item: Item) -> Work:
        begin = item.begin.script if item.begin else ""
        return Work(
            id, item.instruction, (), dataset=self.name, environment=self,
            solution=(f"{fence(item.gold.script, 'bash')}\nfinish",), skills=item.skills or (),
            content=fingerprint((begin, item.check.script, STEPS)),
        )  # fmt: skip

    def tasks(self) -> Sequence[Work]:
        return self._tasks

    def intent(self, id: str) -> str:
        return self._items[id].instruction

    def reset(self, id: str) -> Shell:
        return Shell(id, self._items[id])


class LLBOS(Suite):
    """Shells."""

    unit, metric = "steps", "reward"

    def environment(self, scope: Scope) -> Systems:
        return Systems(self.file_in(scope))
