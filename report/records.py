"""A trajectory as plain data: written as JSON lines, read back, checked.

Holds: `record`, `read_records`, `is_record`. Leaves out: how it is shown (report/transcripts.py).
Exercise it: `python cli.py show RUN`. Read next: report/transcripts.py.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import asdict, is_dataclass
from pathlib import Path

from config.errors import UserError
from memagent import Agent, Trajectory, Turn


def record(
    trajectory: Trajectory,
    agent: Agent,
    step: int | None = None,
    temperature: float | None = None,
) -> dict:
    """Describe a trajectory as JSON can hold it: enough to show it, to quote it and to replay the loss.

    agent: that made it; its name is kept, by which its turns are shown, and the form of its answers.
    temperature: that it was sampled at.
    """
    task = trajectory.task
    return {
        "id": task.id,
        "agent": agent.name,
        "step": step,
        "sample": trajectory.sample,
        "question": task.question,
        "answers": list(task.answers),
        "kind": task.kind,
        "reward": trajectory.reward,
        "answer": trajectory.answer,
        "form": agent.config.form,
        "temperature": temperature,
        "error": trajectory.error,
        "seconds": round(trajectory.seconds, 4),
        "turns": [record_turn(turn) for turn in trajectory.turns],
    }


def record_turn(turn: Turn) -> dict:
    """Describe a turn as JSON can hold it, with the agent's notes and rewards where there are such."""
    described = {
        "final": turn.prompt.final,
        "section": turn.prompt.section,
        "memory": turn.prompt.memory,
        "response": str(turn.response),
        "finish": str(turn.finish),
        "prompt_ids": turn.prompt_ids,
        "response_ids": turn.response_ids,
        "logprobs": [round(x, 7) for x in turn.logprobs],
    }
    if is_dataclass(turn.notes):
        described["notes"] = asdict(turn.notes)
    if turn.rewards:
        described["rewards"] = turn.rewards
    return described


# what is needed of a trajectory that was kept (`rollout.record`), of its turns, and of the cell that it belongs to
RECORD = {
    "id",
    "step",
    "sample",
    "question",
    "answers",
    "kind",
    "reward",
    "answer",
    "error",
    "turns",
}
TURN = {"final", "section", "memory", "response", "finish"}
CELL = {"agent", "question", "temperature", "length"}


def is_record(value: object) -> bool:
    if not (
        isinstance(value, dict) and RECORD <= value.keys() and isinstance(value["turns"], list)
    ):
        return False
    return all(isinstance(turn, dict) and TURN <= turn.keys() for turn in value["turns"])


# ---------------------------------------------------------------- trajectories


def read_records(path: Path) -> list[dict]:
    """Trajectories of a run's folder (training's, else the evaluation's) or of a file of them."""
    if path.is_dir():
        found = [
            path / name
            for name in ("trajectories.jsonl.gz", "transcripts.jsonl")
            if (path / name).exists()
        ]
        if not found:
            raise UserError(f"{path} has neither trajectories.jsonl.gz nor transcripts.jsonl.")
        path = found[0]
    from report.records import is_record

    records, number = [], 0
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as file
        ):
            for number, line in enumerate(file, 1):
                record = json.loads(line)
                if not is_record(record):
                    raise UserError(f"{path}, line {number} is no trajectory.")
                records.append(record)
    except EOFError:  # the run is being written or was killed: what is whole is shown
        pass
    except (OSError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read past line {number}: {reason}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number} cannot be read: {error}.") from error
    return records
