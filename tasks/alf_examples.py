"""Examples for ALFWorld: dialogues of solved games, from a file, shown to tasks of their kind.

Holds: `read_examples`, `shown_examples`. Leaves out: games (tasks/alf.py).
Exercise it: `pytest tests/tasks/test_alf_examples.py`. Read next: tasks/alf.py.

A file is a JSON list of {kind, dialogue: [{role, content}, ...]}: a kind is one of ALFWorld's six,
the user's messages are what the game says, the assistant's what was answered. The names task and
example, and the short names of kinds, which other files of such dialogues have, are read as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, Field

from tasks.environments import Text, checked
from tasks.readers import read_json

KINDS = {  # short name -> kind
    "put": "pick_and_place_simple",
    "examine": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "puttwo": "pick_two_obj_and_place",
}
TITLE = "A task of this kind that was solved in another room, what was answered behind >:"
Dialogue = tuple[str, ...]  # what the game said, what was answered, in turn


class Message(BaseModel):
    """What the game or the one who plays it said."""

    role: Literal["user", "assistant"]
    content: Text


def _in_turn(messages: list[Message]) -> list[Message]:
    if any(m.role != ("user", "assistant")[k % 2] for k, m in enumerate(messages)):
        raise ValueError("user and assistant take turns, the user first")
    return messages


class Example(BaseModel):
    """A dialogue of a file."""

    kind: Literal[(*KINDS, *KINDS.values())] = Field(validation_alias=AliasChoices("task", "kind"))
    dialogue: Annotated[list[Message], AfterValidator(_in_turn)] = Field(
        min_length=2, fail_fast=True, validation_alias=AliasChoices("example", "dialogue")
    )


def read_examples(path: str | Path) -> dict[str, list[Dialogue]]:
    """Read a file: kind -> its dialogues, in the file's order.

    UserError names the file, the place and what is wrong with it.
    """
    path = Path(path).expanduser()
    form = "a file of dialogues is a list of {kind, dialogue: [{role, content}, ...]}"
    examples = Annotated[list[Example], Field(min_length=1, fail_fast=True)]
    found: dict[str, list[Dialogue]] = {}
    for example in checked(examples, read_json(path), path, form):
        dialogue = tuple(message.content.strip() for message in example.dialogue)
        found.setdefault(KINDS.get(example.kind, example.kind), []).append(dialogue)
    return found


def shown_examples(dialogues: Sequence[Dialogue], intent: str) -> str:
    """Compose the examples of a task, "" without any.

    One that begins as the task itself does is left out: it would tell what is to be done.
    """
    itself = " ".join(intent.split())
    return "\n\n".join(
        "\n".join([TITLE, *(f"> {text}" if k % 2 else text for k, text in enumerate(dialogue))])
        for dialogue in dialogues
        if itself not in " ".join(dialogue[0].split())
    )
