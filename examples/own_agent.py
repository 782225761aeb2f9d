"""An agent of your own, complete: its setting, its prompts, a reward of single turns and a count.

Copy this file, change it, and give its path to any command. The embedded policy does not know these
prompts and never answers right: `sft` warms it up, and then rewards can teach it.

    python cli.py ask notes.txt "Where is Anna?" --agent examples/own_agent.py
    python cli.py sft --agent examples/own_agent.py --steps 60 --name notes-warm
    python cli.py train --agent examples/own_agent.py --model runs/notes-warm/model --preset demo \
        --steps 25 --name notes
    python cli.py eval --agents examples/own_agent.py,full --model runs/notes/model --name notes-all

Right of 512 questions (one or two facts, 4 or 16 sections, temperature 1, one seed): 0 untrained,
477 after `sft`, 497 after `train`, which took 50 and 125 seconds of one core.

The only subclass of `Agent` in the file is the agent. No other file of the repository knows it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from data import Task
from memagent import Agent, Prompt, ReadConfig, Trajectory, Turn


@dataclass(frozen=True)
class Config(ReadConfig):
    """Each field is a flag of `ask`, `train` and `eval`; the docstring below it is the help."""

    focus: str = "names and places"
    """what the notes are about"""
    short_tokens: int = 20
    """most tokens of a response that earns the reward for being short"""


class Notes(Agent):
    """Keep one line of notes, rewritten after every section."""

    Config = Config
    # {answer} becomes a sentence that asks for the form of answer the grader expects
    prompts: ClassVar = {
        "update": (
            "{section}\n\nQuestion: {problem}\nNotes so far: {memory}\n\n"
            "Rewrite the notes in one line, with what this section says about {focus}:\n"
        ),
        "final": "Question: {problem}\nNotes: {memory}\n\n{answer}\n",
    }
    # a column of metrics.csv and of the report: the share of updates that left the notes empty
    rates: ClassVar = {"notes_empty": ("empty", "updates")}

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        """Yield the prompts of one trajectory; each yield returns the turn that answered it."""
        config, notes = self.config, ""
        for section in self.sections(task):
            turn = yield self.prompt(
                "update",
                config.memory_tokens,
                problem=task.question,
                section=section,
                memory=notes,
                focus=config.focus,
            )
            notes = turn.response  # as it is: a copy that is edited would lose its token ids
        yield self.prompt(
            "final", config.final_tokens, final=True, problem=task.question, memory=notes
        )

    def demonstrate(self, task: Task, prompt: Prompt) -> str | None:
        """Write what a careful reader would answer, which `sft` teaches a policy that has never
        seen these prompts; the answer to the last one is demonstrated already."""
        if prompt.final:
            return super().demonstrate(task, prompt)
        read = prompt.memory + prompt.section
        return " ".join(words for words, _ in task.notes if words in read)

    def turn_rewards(self, trajectory: Trajectory) -> list[dict[str, float]]:
        """Return one dict per turn, by name; their sum is that turn's own reward.

        The graded answer is the reward of the whole trajectory and needs no code here.
        """
        most = self.config.short_tokens
        return [{"short": float(len(turn.response_ids) <= most)} for turn in trajectory.turns]

    def count(self, task: Task, turn: Turn) -> dict[str, float]:
        """Return the numbers of one turn that are summed over a step or an evaluation."""
        if turn.prompt.final:
            return {}
        return {"updates": 1, "empty": float(not turn.response.strip())}
