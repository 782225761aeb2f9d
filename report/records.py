"""Trajectories as plain data, a line of JSON each; report/transcripts.py shows them."""

from __future__ import annotations

import io
import mmap
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from config.errors import UserError, first_line
from config.foreign import from_json, unpacked
from memagent import Agent, Finish, Trajectory, Turn

# finish reasons of turns that leave the memory as it was
WITHOUT_RESPONSE = (Finish.FULL, Finish.ERROR)


def record(
    trajectory: Trajectory,
    agent: Agent,
    step: int | None = None,
    temperature: float | None = None,
) -> dict:
    """Return a trajectory as JSON types: enough to show it, to quote it and to replay the loss.

    A last turn that does not answer leaves a memory which no later prompt shows: the agent tells
    it.
    """
    task, turns = trajectory.task, [record_turn(turn) for turn in trajectory.turns]
    last = next((turn for turn in turns[::-1] if not turn.get("aside")), {"final": True})
    if not last["final"] and last["finish"] not in WITHOUT_RESPONSE:
        last["memory_after"] = agent.memory_after(last)
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
        "turns": turns,
    }


def record_turn(turn: Turn) -> dict:
    plain = {
        "final": turn.prompt.final,
        "section": turn.prompt.section,
        "memory": turn.prompt.memory,
        "response": str(turn.response),
        "finish": str(turn.finish),
        "prompt_ids": turn.prompt_ids,
        "response_ids": turn.response_ids,
        "logprobs": [round(x, 7) for x in turn.logprobs],
    }
    for name in ("frozen", "aside"):
        if getattr(turn.prompt, name):
            plain[name] = True
    if is_dataclass(turn.notes):
        plain["notes"] = asdict(turn.notes)
    if turn.rewards:
        plain["rewards"] = turn.rewards
    return plain


# ---------------------------------------------------------------- reading them back

# required fields of a record, of its turns, and of the cell of its evaluation
RECORD = {
    "id", "step", "sample", "question", "answers", "kind", "reward", "answer", "error", "turns",
}  # fmt: skip
TURN = {"final", "section", "memory", "response", "finish"}
CELL = {"agent", "question", "temperature", "length"}


def is_record(value: object) -> bool:
    if not isinstance(value, dict) or not RECORD <= value.keys():
        return False
    turns = value["turns"]
    return isinstance(turns, list) and all(
        isinstance(turn, dict) and TURN <= turn.keys() for turn in turns
    )


def is_wrong(record: dict) -> bool:
    """Tell whether nothing of a record's answer was right; what `ask` reads has no right answer."""
    asked = not record["answers"] and record["step"] is None and "cell" not in record
    return record["reward"] is not None and not asked and record["reward"] <= 0


def read_records(path: Path) -> list[dict]:
    """Read the records of a run's folder (of its training, else of its evaluation) or of a file.

    A compressed file that breaks off gives the lines before the break. UserError for other damage.
    """
    if path.is_dir():
        files = path / "trajectories.jsonl.gz", path / "transcripts.jsonl"
        if not (there := [file for file in files if file.exists()]):
            raise UserError(f"{path} has neither {files[0].name} nor {files[1].name}.")
        path = there[0]
    records: list[dict] = []
    try:
        with path.open("rb") as file:
            for line in unpacked(file, path):
                records.append(from_json(line))
                if not is_record(records[-1]):
                    raise UserError(f"{path}, line {len(records)} is no reading.")
    except EOFError:  # the run goes on, or was killed
        pass
    except (OSError, ValueError, zlib.error) as error:
        where = f"{path}, line {len(records) + 1}"
        raise UserError(f"{where} cannot be read: {first_line(error)}.") from error
    return records


# ---------------------------------------------------------------- the ends of a long file

MEMBER = b"\x1f\x8b\x08\0\0\0\0\0"  # how a gzip member without a time begins
LOOKED_AT = 200  # members, counted from the end; a step has one of each rank


def step_records(folder: Path, last: bool = False) -> list[dict]:
    """Return the records of the first step of a training, or of the last one, that was recorded.

    Only these are read, however many lie between. A file that is missing, empty or damaged gives
    what can be read.
    """
    path = folder / "trajectories.jsonl.gz"
    if not path.exists() or not path.stat().st_size:
        return []
    with path.open("rb") as file:
        return _last_step(file, path) if last else _first_step(file, path)


def _first_step(file: BinaryIO, path: Path) -> list[dict]:
    found: list[dict] = []
    for record in _until_damage(file, path):
        if found and record["step"] != found[0]["step"]:
            break
        found.append(record)
    return found


def _last_step(file: BinaryIO, path: Path) -> list[dict]:
    found: list[dict] = []
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = end = len(data)
        for _ in range(LOOKED_AT):
            if (at := data.rfind(MEMBER, 0, at)) < 0:
                break
            # nothing, where it is torn or looks like the start of a member by chance
            if records := [*_until_damage(io.BytesIO(data[at:end]), path)]:
                step, end = (found or records)[-1]["step"], at
                found = [record for record in records if record["step"] == step] + found
                if records[0]["step"] != step:
                    break
    return found


def _until_damage(file: BinaryIO, path: Path) -> Iterator[dict]:
    with suppress(EOFError, OSError, ValueError, zlib.error):
        yield from takewhile(is_record, map(from_json, unpacked(file, path)))
