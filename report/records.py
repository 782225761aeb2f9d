"""A trajectory as plain data: written as JSON lines, read back, checked.

Holds: `record`, `read_records`, `is_record`. Leaves out: how it is shown (report/transcripts.py).
Exercise it: `python cli.py show RUN`. Read next: report/transcripts.py.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

from agents.rememr1 import Sought
from config.errors import UserError
from memagent import Trajectory, Turn


def record(
    trajectory: Trajectory,
    step: int | None = None,
    form: str = "",
    temperature: float | None = None,
) -> dict:
    """A trajectory as JSON-able data: what `show` prints, the report quotes, and a replay of the loss needs. form: that the answer was asked
    for in (`AgentConfig.form`); temperature: that it was sampled at."""
    task, sought = trajectory.task, Sought(trajectory.task)
    return {
        "id": task.id,
        "step": step,
        "sample": trajectory.sample,
        "question": task.question,
        "answers": list(task.answers),
        "kind": task.kind,
        "reward": trajectory.reward,
        "answer": trajectory.answer,
        "form": form,
        "temperature": temperature,
        "error": trajectory.error,
        "seconds": round(trajectory.seconds, 4),
        "turns": [
            {
                "final": turn.prompt.final,
                "section": turn.prompt.section,
                "memory": turn.prompt.memory,
                "response": str(turn.response),
                "finish": str(turn.finish),
                "prompt_ids": turn.prompt_ids,
                "response_ids": turn.response_ids,
                "logprobs": [round(x, 7) for x in turn.logprobs],
            }
            | looking_back(turn, sought)
            | ({"rewards": trajectory.states[k]} if trajectory.states else {})
            for k, turn in enumerate(trajectory.turns)
        ],
    }


def looking_back(turn: Turn, sought: Sought) -> dict:
    """What a record keeps of a turn of an agent that looks back: what had been recalled for it and whether that held evidence, what it asks
    for, what was wrong with its form."""
    recalled, step = turn.prompt.recalled, turn.step
    if recalled is None:
        return {}
    shown = {
        "text": recalled.text,
        "query": recalled.query,
        "from": list(recalled.steps),
        "score": round(recalled.score, 4),
    }
    shown |= {"held": sought.held(recalled.text)} if recalled.steps else {}
    if turn.prompt.final:
        return {"recalled": shown}
    said = {
        "update": (step and step.memory) or turn.prompt.memory,
        "query": (step and step.query) or "",
    }
    errors = [*step.errors, *(["stray_tag"] if step.stray else [])] if step else []
    return {"recalled": shown, "errors": errors} | said


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
