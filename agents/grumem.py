"""GRU-Mem: MemAgent whose turn says whether it updates the memory and whether it stops reading.

arXiv 2602.10560 (ICML 2026). Of the paper we could read the abstract and the start of its project
page; there was no code. By the notes of two of its readers, who agree and whom we could not check:
a turn writes an update gate, a candidate memory and an exit gate; r_update is 1 or -1 in each turn,
by whether the gate is open where the section has evidence; r_exit is 0 at the section with the last
evidence, -0.75 before it, -0.5 after it; r_format is 1 where every turn has the form; outcome,
r_exit and r_format weigh alpha = 0.9, r_update 1 - alpha, each less the group's mean.

Other than there a closed gate writes no candidate, tags and wording are ours, and evidence that the
memory has is no reason to update. The answer is a reading's only reward; r_exit and r_format are
compared as r_update is, turn by turn among the readings that came as far. At alpha = 0.5 and a
ninth of r_update the weights are theirs. Not known to us: learning rate, batch, KL, and what is
right where the evidence is cut by a section's end or missing: here that is reading to the end.

Holds: everything of this agent. Leaves out: MemAgent and its demonstrations (memagent.py).
Exercise it: `python cli.py eval --agents grumem,memagent --n 8`. Read next: agents/infmem.py.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

import memagent
from data import Task, places, stands_in, strip_thinking
from memagent import NO_MEMORY, Prompt, Trajectory, Turn, Wording
from memory import overwrite

GATE = Wording(
    "Read the next section of a long document. If it adds nothing to the memory that helps to "
    "solve the problem, write no, else the memory anew with what it adds, as <update>...</update>. "
    "Then, if nothing is missing any more, write STOP.",
    ("section", "problem", "memory"),
    cue="Updated memory:",
    needs=("section", "memory"),
)
FORM = re.compile(
    r"\s*(?:no\.?|<update>((?:(?!</?update>).)*)</update>)\s*(STOP\.?)?\s*", re.DOTALL | re.I
)
UPDATE, EARLY, LATE = 1 / 9, -0.75, -0.5  # rewards


@dataclass(frozen=True, slots=True)
class GRUMemConfig(memagent.MemAgentConfig):
    """How GRU-Mem reads. What a turn's gates take is part of its memory_tokens."""

    exit_gate: bool = True
    """stop reading where the exit gate opens; false: read on, for what has evidence everywhere"""


PUBLISHED = {"grpo": dict(group_size=16),
             "agent": dict(chunk_tokens=5000, memory_tokens=1024, final_tokens=1024)}  # fmt: skip


@dataclass(slots=True)
class GateNotes:
    """What is kept of a turn. None: it is not known what is right, or said in other turns."""

    counts: dict[str, float] = field(default_factory=dict)
    update: float | None = None  # reward of the turn's own gate
    exit: float | None = None  # of the reading's end, in the final turn


class GRUMem(memagent.MemAgent):
    """MemAgent with an update gate and an exit gate, which are open where a turn says so."""

    Config, presets = GRUMemConfig, {"grumem": PUBLISHED}
    training = {"alpha": 0.5, "normalisation": "mean"}
    prompts = {"gate": GATE, "final": memagent.FINAL}
    rates = {"writes": ("writes", "updates"), "malformed": ("malformed", "updates"),
             "updates_right": ("updates_right", "updates_known"),
             "exits_early": ("early", "exits_known"), "exits_late": ("late", "exits_known"),
             "sections_unread": ("unread", "to_read"), "stopped": ("stopped", "ends"),
             "tokens_saved": ("saved", "ends")}  # fmt: skip

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        c, codec, sections = self.config, self.codec, self.sections(task)
        n, read, late = len(sections), 0, False  # late: all evidence stood in earlier sections
        missing, known = [*task.notes], bool(task.notes or task.absent)
        base = dict(problem=task.question, cut=sections.left_out, memory=codec.text(NO_MEMORY))
        for section in sections:
            turn = yield self.prompt("gate", c.memory_tokens, section=section, **base)
            late, read, old = not (missing or task.absent), read + 1, base["memory"]
            missing = [note for note in missing if not stands_in(*note, section)]
            new, stop, formed = read_gates(codec.after_thinking(turn.response))
            if new is not None:
                base["memory"] = overwrite(old, codec.text(new), NO_MEMORY, c.empty)
            counts = dict(updates=1, malformed=not formed, writes=base["memory"] != old)
            turn.notes = notes = GateNotes(counts)
            if known:
                adds = super().demonstrate(task, turn.prompt) not in ("", old)
                counts |= dict(updates_known=1, updates_right=adds == (new is not None))
                notes.update = UPDATE if counts["updates_right"] else -UPDATE
            if stop and c.exit_gate:
                break
        turn = yield self.prompt("final", c.final_tokens, final=True, **base)
        saved = len(sections.ids[read * c.chunk_tokens :])
        ends = dict(ends=1, stopped=read < n, to_read=n, unread=n - read, saved=saved)
        turn.notes = notes = GateNotes(ends)
        if known and c.exit_gate:
            early = read < n and bool(missing or task.absent)
            notes.exit = EARLY if early else LATE if late else 0.0
            ends |= dict(exits_known=1, early=early, late=late)

    def turn_rewards(self, trajectory: Trajectory) -> list[dict[str, float]]:
        """Reward each turn for its update gate, and for exit and form of the whole reading.

        update  a ninth, or less than nothing by as much: the gate is open if and only if the
                section has evidence that the memory lacks
        exit    0 at the section with the last evidence, EARLY before it, LATE after it
        format  1 if every turn that reads has the form, else 0

        The first two are not given where the evidence is not known.
        """
        notes = [turn.notes or GateNotes() for turn in trajectory.turns]
        whole = {"format": float(not any(n.counts.get("malformed") for n in notes))}
        if notes and notes[-1].exit is not None:
            whole["exit"] = notes[-1].exit
        return [whole if n.update is None else whole | {"update": n.update} for n in notes]

    def demonstrate(self, task: Task, prompt: Prompt) -> str | None:
        """Write what MemAgent does where that changes the memory, and stop once all is noted."""
        text = super().demonstrate(task, prompt)
        if prompt.final or text is None:
            return text
        opened = text not in ("", prompt.memory)
        memory = text if opened else prompt.memory
        done = task.notes and all(any(places(words, memory)) for words, _ in task.notes)
        return (f"<update>{text}</update>" if opened else "no") + " STOP" * bool(done)

    def count(self, task: Task, turn: Turn) -> Mapping[str, float]:
        return turn.notes.counts if turn.notes else {}

    def memory_after(self, turn: dict) -> str:
        old, (new, *_) = turn["memory"], read_gates(strip_thinking(turn["response"]))
        return old if new is None else overwrite(old, new, NO_MEMORY, self.config.empty)


def read_gates(response: str) -> tuple[str | None, bool, bool]:
    """Return the new memory (None: the update gate is closed), whether the exit gate is open, and
    whether the response has the form; one that has not leaves both gates closed.

    >>> read_gates("<update>Otto reached Lima.</update> STOP"), read_gates("no"), read_gates("STOP")
    (('Otto reached Lima.', True, True), (None, False, True), (None, False, False))
    """
    found = FORM.fullmatch(response)
    return (found[1], bool(found[2]), True) if found else (None, False, False)
