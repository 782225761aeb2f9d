"""Templates of prompts: constant pieces, which may hold special tokens, and slots for texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError

ANSWER_REQUESTS = {  # `ReadConfig.form` -> how an answer is asked for: {answer} in a wording
    "boxed": "Give the answer inside \\boxed{}.",
    "sentence": 'End with the sentence "Therefore, the answer is (...)".',
    "plain": "Give the answer alone.",
}
# slots of published templates: one that a prompt has no text for is refused, whoever the agent is
KNOWN_SLOTS = ("problem", "memory", "section", "recalled_memory")
ALIASES = {"prompt": "problem", "chunk": "section"}  # names that published templates use


@dataclass(frozen=True, slots=True)
class Wording:
    """A prompt of ours: a head, one block per slot, a cue.

    `{answer}` in the head is how the answer is asked for.
    """

    head: str
    slots: tuple[str, ...]  # in our order, the section first (`ReadConfig.layout`)
    cue: str = "Your answer:"
    needs: tuple[str, ...] = ()  # slots that a template of the user's must have
    whole: bool = False  # the head is the template as it stands

    def text(self, layout: str, form: str) -> str:
        """Assemble the template. layout: shared = as `slots` stand; paper = the section last."""
        head = self.head.replace("{answer}", ANSWER_REQUESTS[form])
        if self.whole:
            return head
        last = layout == "paper"
        slots = sorted(self.slots, key=lambda slot: (slot == "section") == last)
        blocks = "".join(f"<{slot}>\n{{{slot}}}\n</{slot}>\n\n" for slot in slots)
        return f"{head}\n\n{blocks}{self.cue}\n"


def wording_of(prompt: Wording | str) -> Wording:
    """Return an agent's prompt as a wording; a str is a template as it stands, with {slots}."""
    if isinstance(prompt, Wording):
        return prompt
    names = dict.fromkeys(re.findall(r"{([a-z_]\w*)}", prompt))
    return Wording(prompt, tuple(name for name in names if name != "answer"), whole=True)


def split_template(template: str, slots: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
    """Split a template at its slots into (piece, constant?) pairs; every other brace stands for
    itself.

    >>> split_template("Q: {problem} \\\\boxed{}", ("problem",))
    (('Q: ', True), ('problem', False), (' \\\\boxed{}', True))
    """
    names = [*slots, *(alias for alias, slot in ALIASES.items() if slot in slots)]
    parts = re.split(f"{{({'|'.join(map(re.escape, names))})}}", template) if names else [template]
    pieces = [
        (ALIASES.get(part, part), False) if k % 2 else (part, True) for k, part in enumerate(parts)
    ]
    return tuple(piece for piece in pieces if piece[0])


def read_template(
    path: Path, slots: tuple[str, ...], every: Iterable[str], needs: Iterable[str]
) -> tuple[tuple[str, bool], ...]:
    """Read a template of the user's, byte for byte; return its (piece, constant?) pairs.

    slots: that this prompt has. every: those that any prompt of the agent has. needs: those that
    must be there. UserError if one is missing, or one that this prompt has no text for is there.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The template {path} cannot be read as UTF-8 text ({error}).") from error
    pieces = split_template(text, tuple(sorted({*KNOWN_SLOTS, *every})))
    used = {piece for piece, constant in pieces if not constant}
    if missing := [slot for slot in needs if slot not in used]:
        raise UserError(f"The template {path} needs the slot {{{missing[0]}}}.")
    if extra := sorted(used - {*slots}):
        raise UserError(
            f"The template {path} has a slot for the {extra[0].replace('_', ' ')}, "
            "which this prompt is given none of."
        )
    return pieces
