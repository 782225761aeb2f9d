"""Run folders: what a run leaves behind, written so that a run killed at any moment can go on from its last checkpoint.

Holds: `record` (a trajectory as plain data), `Writer` (trajectories.jsonl.gz), `StepCSV` (metrics.csv), `Checkpoints`.
Leaves out: what is trained (grpo.py), what is measured (eval.py).
Exercise it: `python cli.py train --help`. Read next: cli.py.

    runs/NAME/config.yaml          resolved settings; `--config` replays it
              metrics.csv          one line per training step; tensorboard/ beside it
              checkpoints/last.ckpt  weights, optimizer, counters, positions in the files beside it
              trajectories.jsonl.gz  every trajectory of training, one JSON object a line
              model/               the export: loads with from_pretrained
              rows.jsonl, summary.json, report.html   from the evaluation (eval.py, report.py)
"""

from __future__ import annotations

from memagent import Trajectory


def record(trajectory: Trajectory, step: int | None = None) -> dict:
    """A trajectory as JSON-able data: what `show` prints, the report quotes, and a replay of the loss needs."""
    task = trajectory.task
    return {
        "id": task.id,
        "step": step,
        "sample": trajectory.sample,
        "question": task.question,
        "answers": list(task.answers),
        "kind": task.kind,
        "reward": trajectory.reward,
        "answer": trajectory.answer,
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
            for turn in trajectory.turns
        ],
    }
