"""Keep of a trajectory what its row and its transcript need, turn by turn."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from agents.rewards import reward_of
from config.errors import clip
from config.gone import as_before
from config.options import settings_of_rows
from config.plugins import is_path
from data import Task, grade, strip_thinking
from memagent import Agent, Finish, Trajectory, Turn
from report.rows import Cell
from rollout import Sampling

EDGE = 32  # turns at either end of a trajectory whose sections a transcript keeps as text
SECTION_CHARACTERS = 20_000  # of a section in a transcript
# of what a row keeps as text, to be searched and shown
WORDING_CHARACTERS, MEMORY_CHARACTERS = 500, 2000


COUNTED = (  # fields of a row; cut: tokens of the document that the agent never read
    "sections", "model_calls", "tokens_read", "tokens_written", "document_tokens", "cut",
    "memory_cut", "memory_empty",
)  # fmt: skip


def begins(turn: Turn, section: str | None) -> bool:
    """Tell whether a turn reads another section than the one before it, not only an equal one."""
    prompt = turn.prompt
    if prompt.final or prompt.aside or prompt.frozen:
        return False
    return prompt.section is not section if prompt.section else prompt.after is None


class Reading:
    """Running statistics of one trajectory, so that its document is not held a second time."""

    def __init__(self, task: Task, agent: Agent):
        self.task, self.agent = task, agent
        self.section = None  # the latest one
        self.memory = ""  # the latest one
        self.memory_tokens: list[int] = []  # after each section
        self.counts: Counter[str] = Counter()  # of `Agent.count`
        self.n = dict.fromkeys(COUNTED, 0)

    def add(self, turn: Turn) -> None:
        """Count a turn."""
        prompt, n = turn.prompt, self.n
        counts = self.agent.count(self.task, turn)
        for name, value in counts.items():
            self.counts[name] += value
        n["model_calls"] += prompt.given is None
        n["tokens_read"] += len(turn.prompt_ids)
        n["tokens_written"] += len(turn.response_ids)
        n["document_tokens"] += len(getattr(prompt.section, "ids", ()))
        n["cut"] = max(n["cut"], prompt.cut)
        if n["sections"]:
            self.memory = prompt.memory
            if not prompt.frozen:  # a question to the untrained policy is shown what it needs
                del self.memory_tokens[n["sections"] - 1 :]  # of a turn before, after this section
                self.memory_tokens.append(len(getattr(prompt.memory, "ids", ())))
        if begins(turn, self.section):
            n["sections"] += 1
            self.section = prompt.section
        if not (prompt.final or prompt.aside):
            n["memory_cut"] += turn.finish is Finish.LENGTH or bool(counts.get("memory_capped"))
            n["memory_empty"] += not strip_thinking(turn.response).strip()

    def row(self) -> dict:
        """Return the fields of the trajectory's row that come from reading."""
        memory_tokens = round(fmean(self.memory_tokens or [0]), 2)
        counts = {"counts": dict(self.counts)} if self.counts else {}
        return {**self.n, "memory_tokens": memory_tokens, **counts}


def slim(turn: Turn, whole: bool = False, section: str = "") -> Turn:
    """Drop a turn's text, token ids and log-probs.

    Memory, response and notes stay in the final turn and, if `whole`, in any. section: what of its
    section stays.
    """
    ids = dict(prompt_ids=[], response_ids=[], logprobs=[])
    # a section that is no plain text has its token ids
    prompt = replace(turn.prompt, pieces=(), section=str(section), tools=(), after=None)
    if whole or prompt.final:
        return replace(turn, prompt=prompt, **ids)
    return replace(turn, prompt=replace(prompt, memory=""), response="", notes=None, **ids)


def thin(record: dict) -> dict:
    """Return a record as a transcript: no token ids or log-probs, long sections clipped."""
    dropped = ("prompt_ids", "response_ids", "logprobs")
    turns = [
        {name: value for name, value in turn.items() if name not in dropped}
        | {"section": clip(turn["section"], SECTION_CHARACTERS)}
        for turn in record["turns"]
    ]
    return record | {"turns": turns}


def row_of(
    trajectory: Trajectory, cell: Cell, agent: Agent, reading: Reading | None = None
) -> dict:
    """Return a trajectory's row; a failed trajectory is graded as having no answer.

    reading: of its turns, where they were slimmed; else computed here.
    """
    task, turns = trajectory.task, trajectory.turns
    if reading is None:
        reading = Reading(task, agent)
        for turn in turns:
            reading.add(turn)
    reward = reward_of(agent, trajectory)
    answer = "" if trajectory.error else trajectory.answer
    scores = grade(answer, task.answers, agent.config.form, task.asks_for_all)
    return (
        asdict(cell)
        | {
            "id": task.id,
            "sample": trajectory.sample,
            "wording": clip(task.question, WORDING_CHARACTERS),
            "memory": clip(reading.memory, MEMORY_CHARACTERS),  # that the last prompt showed
            "response": trajectory.answer,
            # None: nothing of the required form; what was answered instead is the response
            "prediction": scores.pred,
            "answers": list(task.answers),
            "asked": task.question_digest,  # by which dev/reader.py knows it again
            "finish": str(turns[-1].finish) if turns else "",
            "error": trajectory.error,  # after the reward was given, which may have failed
            "reward": 0.0 if trajectory.error else reward,
            "em": scores.em,
            "f1": scores.f1,
            "sub_em": scores.sub_em,
            "sub_em_upstream": scores.sub_em_upstream,
            # from first prompt to answer, beside the others in flight
            "seconds": round(trajectory.seconds, 4),
        }
        | task.beside(scores.pred)
        | reading.row()
    )


def settings_of_row(
    cell: Cell, agent: Agent, told_date: str, sampling: Sampling, seed: int, model: str
) -> str:
    """Hash everything that a row depends on beside the task, a user's file of the agent included.

    told_date: what the codec tells the model. model: a fingerprint of what answers.
    """
    reading = as_before(agent.had, settings_of_rows(agent.config, told_date))
    if not agent.by_section:  # cut to the engine's window, which therefore counts
        reading["window"] = agent.window
    templates = [agent.template(name) for name in agent.prompts]
    if is_path(agent.name):
        reading["code"] = hashlib.blake2b(Path(agent.name).read_bytes()).hexdigest()
    parts = asdict(cell), agent.name, reading, templates, asdict(sampling), seed, model
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
