"""Trajectories as plain data, stored as JSON lines.

Holds: `record`, `read_records`, `step_records`, `is_record`, `is_wrong`. Leaves out: how a record
is shown (report/transcripts.py).
Exercise it: `python cli.py show RUN`. Read next: report/transcripts.py.
"""

from __future__ import annotations

import io
import mmap
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path

from config.errors import UserError
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

    agent: the one that ran; the record has its name, by which its turns are shown, the form of its
    answers, and the memory that a last turn leaves which does not answer: it depends on settings,
    and no later prompt shows it. step: of training. temperature: of sampling.
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
    """Return a turn as JSON types, with the agent's notes and rewards if it has any."""
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

# required fields: of a record, of its turns, and of the cell of an evaluation that it belongs to
RECORD = {
    "id", "step", "sample", "question", "answers", "kind", "reward", "answer", "error", "turns",
}  # fmt: skip
TURN = {"final", "section", "memory", "response", "finish"}
CELL = {"agent", "question", "temperature", "length"}


def is_record(value: object) -> bool:
    """Tell whether a JSON value has the fields of a record."""
    if not isinstance(value, dict) or not RECORD <= value.keys():
        return False
    turns = value["turns"]
    return isinstance(turns, list) and all(
        isinstance(turn, dict) and TURN <= turn.keys() for turn in turns
    )


def is_graded(record: dict) -> bool:
    """Tell whether a record's reward says how good it is; to what `ask` reads there is no right
    answer."""
    asked = not record["answers"] and record["step"] is None and "cell" not in record
    return record["reward"] is not None and not asked


def is_wrong(record: dict) -> bool:
    """Tell whether nothing of a record's answer was right."""
    return is_graded(record) and record["reward"] <= 0


def read_records(path: Path) -> list[dict]:
    """Read the records of a run's folder (of its training, else of its evaluation) or of a file.

    A compressed file that breaks off gives the lines before the break. UserError for other damage.
    """
    if path.is_dir():
        path = _file_in(path)
    records: list[dict] = []
    try:
        with path.open("rb") as file:
            lines = unpacked(file, path) if path.suffix == ".gz" else file
            for line in lines:
                record = from_json(line)
                if not is_record(record):
                    raise UserError(f"{path}, line {len(records) + 1} is no reading.")
                records.append(record)
    except EOFError:  # the run is in progress or was killed
        pass
    except (OSError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read past line {len(records)}: {reason}.") from error
    except ValueError as error:
        raise UserError(f"{path}, line {len(records) + 1} cannot be read: {error}.") from error
    return records


def _file_in(folder: Path) -> Path:
    """Return the file of records in a run's folder."""
    for name in ("trajectories.jsonl.gz", "transcripts.jsonl"):
        if (folder / name).exists():
            return folder / name
    raise UserError(f"{folder} has neither trajectories.jsonl.gz nor transcripts.jsonl.")


# ---------------------------------------------------------------- parts of a long file

MEMBER = b"\x1f\x8b\x08\0\0\0\0\0"  # how a gzip member without a time begins
BROKEN = (EOFError, OSError, ValueError, zlib.error)  # of a member that is torn, or is none
LOOKED_AT = 200  # starts of gzip members that cannot be read, after which no other is looked for


def step_records(folder: Path, last: bool = False) -> Iterator[dict]:
    """Yield the records of the first step of a training, or of the last one, that was recorded.

    Only these are read, however many lie between: each step is some gzip members. A file that is
    missing, empty or damaged gives what can be read.
    """
    path, found = folder / "trajectories.jsonl.gz", []
    if last:
        for records in _backwards(path):
            step = (found or records)[0]["step"]
            found += [record for record in records if record["step"] == step]
            if records[-1]["step"] != step:
                break
        yield from reversed(found)
    elif path.exists():
        with path.open("rb") as raw, suppress(*BROKEN):
            step = None
            for line in unpacked(raw, path):
                record = from_json(line)
                if not is_record(record) or step not in (None, record["step"]):
                    return
                step = record["step"]
                yield record


def _backwards(path: Path) -> Iterator[list[dict]]:
    """Yield the records of each member of a file of gzip members, from its end, as far as they can
    be read, the last one first.

    What cannot be read, torn or the start of a member by chance, is passed over.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = end = len(data)
        unread = 0
        while unread < LOOKED_AT and (at := data.rfind(MEMBER, 0, at)) >= 0:
            records = []
            with suppress(*BROKEN):
                records.extend(map(from_json, unpacked(io.BytesIO(data[at:end]), path)))
            if records := [record for record in reversed(records) if is_record(record)]:
                end, unread = at, 0
                yield records
            else:
                unread += 1
