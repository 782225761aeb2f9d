"""Benchmarks, run from the repository root by `python -m bench.NAME`: a table, then a JSON line."""

import os

os.environ.update(  # before torch is imported: one thread, no network
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    TRL_EXPERIMENTAL_SILENCE="1",
)
