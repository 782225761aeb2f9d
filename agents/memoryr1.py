"""Memory-R1: a manager adds, updates, deletes or leaves memories; an answerer distils them.

arXiv 2508.19828, on MemUpdate's tools: ADD, UPDATE and NOOP are manage_memory, DELETE is
delete_memory. Both learn from the exact match of answers, in two stages: first the answerer, from
memories that are given (`--stage answerer`); then the manager, whose store the policy answers from
as it was before this training (`--stage manager`, with the answerer as --model). An answer is made
from the 60 memories that match best, equally many of each speaker: what helps is copied, then it
follows. Of the paper we could read the abstract; all this is second-hand, by a re-implementation
(david-courtis/Structured-Memory-R1 at f90e018), which gives the paper's learning rate, not group
and KL. Other than there, a session is read whole, not as facts that another model took from it, by
BM25.

Holds: what differs from agents/memupdate.py. Leaves out: store, tools, search, calls. No torch.
Exercise it: `python cli.py eval --data ledger --agents memoryr1 --n 8`. Read next: agents/pay.py.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from agents.memupdate import ANSWER, Answered, MemUpdate, MemUpdateConfig, entries_of
from agents.store import Entry, Snapshot, Store, number
from config.errors import UserError
from config.options import COUNT, NOT_NEGATIVE
from data import Task, exact_match, extract_answer
from memagent import Prompt, Trajectory, Turn, Wording

MANAGE = Wording(
    "You manage a store of memories about dated conversations, from which questions are answered "
    "later. Below are a part of a session, the tools, and the memories that are closest to it. For "
    "every fact of the session call one tool: create a memory of a new fact, update the memory "
    "that it completes or replaces, delete one that it makes wrong, noop if it is stored already.",
    ("tools", "section", "memory", "state", "results"),
    cue="Your calls:",
    needs=("section", "memory"),
)
DISTIL = Wording(
    "First copy the memories that help to solve the problem, word for word, one a line, and none "
    "of the others. Then solve it with these alone; they are dated. {answer}",
    ("memory", "problem"),
    needs=("memory",),
)


@dataclass(frozen=True, slots=True)
class MemoryR1Config(MemUpdateConfig):
    """How Memory-R1 manages its memories, and which half of it is trained."""

    stage: Literal["manager", "answerer"] = "manager"
    """what is trained: manager = the store's edits; answerer = the answers, from the memories that
    an episode comes with"""
    without: tuple[str, ...] = ("search_memory", "sample_memory", "merge_memory", "split_memory")
    """tools that there are not, such as delete_memory; update = no updates by manage_memory"""
    answer_k: Annotated[int, COUNT] = 60
    """entries that a question is answered from, an equal share of every speaker's"""
    max_turns: Annotated[int, COUNT] = 1
    """most turns in a session (refine: in all); the calls of the last one are executed"""
    max_calls: Annotated[int, COUNT] = 30
    """calls of one turn that are executed; further ones get an error each"""
    budget: Literal["soft", "hard", "none"] = "none"
    """what a store over its budget costs: soft = reward; hard = what would enlarge it fails"""
    format_weight: Annotated[float, NOT_NEGATIVE] = 0.0
    """weight of the share of calls that were valid; without a call it is 0"""
    compression_weight: Annotated[float, NOT_NEGATIVE] = 0.0
    """build: weight of 1 - tokens of the store / tokens of the source"""


PUBLISHED = {"grpo": dict(tasks_per_step=(128,), temperature=(1.0,), lr=1e-6),
             "agent": dict(call_tokens=2048, final_tokens=2048, answer_k=60)}  # fmt: skip


class MemoryR1(MemUpdate):
    """A store that a manager keeps by four operations, and answers from memories distilled."""

    Config, presets, demo = MemoryR1Config, {"memoryr1": PUBLISHED}, None
    prompts = MemUpdate.prompts | {"build": MANAGE, "answer": DISTIL}
    rates = MemUpdate.rates | {"distilled": ("copied", "shown")}

    def wording(self, name: str) -> Wording:
        """Ask for no copies where the whole response is the answer."""
        plain = name == "answer" and self.config.form == "plain"
        return ANSWER if plain else super().wording(name)

    def check(self, task: Task) -> None:
        """Refuse to train the answerer on a task without memories too."""
        if self._answers_train(task) and not task.memories:
            raise UserError(f"{task.id} gives the answerer no memories: train --stage manager.")
        super().check(task)

    def _answers_train(self, task: Task) -> bool:
        return self.config.stage == "answerer" and bool(task.probes)

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        if not self._answers_train(task):
            yield from super().run(task)
            return
        snapshot = Store(entries_of(task.memories)).snapshot()
        for probe in task.probes:
            self._answers.clear()  # each member of a group answers for itself
            steps = self._ask(snapshot, probe)
            turn = yield replace(next(steps), frozen=False, place=probe.id)
            with suppress(StopIteration):
                steps.send(turn)

    def context(self, snapshot: Snapshot, question: str) -> list[Entry]:
        """Return what a question is answered from: the best entries of each speaker, best first."""
        c, speakers = self.config, {entry.speaker for entry in snapshot.entries}
        if len(speakers) < 2 or c.answer_order != "best":
            return super().context(snapshot, question)
        found, share = [], max(1, c.answer_k // len(speakers))
        for speaker in speakers:
            found += self.searcher().top(
                snapshot.entries, question, share, lambda entry, who=speaker: entry.speaker == who
            )
        return [e for e, _ in sorted(found, key=lambda hit: (-hit[1], number(hit[0].id)))]

    def _score(self, task: Task, probe: object, answered: Answered) -> float:
        """Grade an answer by its exact match."""
        if self.config.pay == "likelihood":
            return super()._score(task, probe, answered)
        return exact_match(extract_answer(answered.response, self.config.form)[0], probe.answers)

    def turn_rewards(self, trajectory: Trajectory) -> list[dict[str, float]] | None:
        """Pay each answer of the answerer's training for itself."""
        task, turns = trajectory.task, trajectory.turns
        if not self._answers_train(task):
            return super().turn_rewards(trajectory)
        probes, rewards = {probe.id: probe for probe in task.probes}, []
        for turn in turns:
            answered = Answered(str(turn.response), ())
            rewards.append(
                {"right": self._score(task, probes[turn.notes.probe], answered)}
                if turn.notes
                else {}
            )
        return rewards

    def reward(self, trajectory: Trajectory, outcome: str = "exact") -> float:
        """Return the answerer's mean exact match; of a manager, what MemUpdate pays for, which is
        by how much the exact match is better than from the first store."""
        if not self._answers_train(trajectory.task):
            return super().reward(trajectory, outcome)
        right = [rewards.get("right", 0.0) for rewards in self.turn_rewards(trajectory)]
        return sum(right) / len(trajectory.task.probes)

    def count(self, task: Task, turn: Turn) -> Mapping[str, float]:
        """Count the memories that an answer was shown, and those that it copies."""
        counts = super().count(task, turn)
        if turn.notes is None or not turn.notes.found:
            return counts
        shown = turn.prompt.memory.splitlines()
        return {**counts, "shown": len(shown), "copied": sum(x in turn.response for x in shown)}
