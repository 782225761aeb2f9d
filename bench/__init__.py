"""Benchmarks, run from the repository root: `python -m bench.NAME`.

Each prints a table and ends with one line of JSON.

Holds: what has to be set before torch is imported: one thread, no network.
Leaves out: what the scripts share (common.py).
Exercise it: `python -m bench.update`. Read next: common.py.
"""

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1",
)
