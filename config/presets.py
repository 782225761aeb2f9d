"""Presets that belong to no agent: several settings at once. An agent brings its own
(`Agent.presets`).

Holds: `PRESETS`: name -> section of the settings (grpo, agent, run) -> fields. Leaves out: the
look-up (agents/find.py). No torch.
Exercise it: `python cli.py train --preset demo --dry-run`. Read next: data.py.
"""

from __future__ import annotations

PRESETS: dict[str, dict[str, dict]] = {
    "default": {},
    # for the embedded policy, chosen on the dev split (dev/LESSONS.md). Hotter than evaluated:
    # a failure of probability p at temperature T has about p^T at 1; hotter as documents grow,
    # because failures, the signal, get rare
    "demo": {
        "grpo": dict(tasks_per_step=(8,), group_size=16, normalisation="mean",
                     temperature=(1.3, 1.6, 1.9, 2.2), lr=4e-4, decay_from=0.6,
                     turns_per_trajectory=5, micro_tokens=4096),
    },
}  # fmt: skip
