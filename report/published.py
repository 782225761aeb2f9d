"""Published numbers of other models on other questions: marks to compare with, at a distance.

Holds: MemAgent's tables (arXiv 2507.02259v1, and the two rows that v2 has changed), ReMemR1's
(arXiv 2509.23040). Leaves out: ours. No torch.
Exercise it: `python cli.py eval --suite ruler-hqa`. Read next: report/page.py.

v1's Table 2 and Figure 6a agree with the pictures in MemAgent's repository (Figure 6b is not among
them). v2 (2026, as at ICLR) was not read: its rows are second-hand, from public notes of several of
its readers, who agree and quote the other models of that table unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DOCUMENTS = tuple(50 * 2**i for i in range(10))
TOKENS = tuple(8192 * 2**i for i in range(7))


@dataclass(frozen=True, slots=True)
class Published:
    """One published table: shares from 0 to 1 by model and length."""

    source: str
    metric: str
    unit: str  # of the lengths: documents or tokens
    question: str  # the data set of RULER-HQA, a task of RULER, or "mean of ..."
    rows: dict[str, dict[int, float]]
    second_hand: bool = False  # quoted by others, not read in the paper itself


def _rows(
    lengths: Sequence[int], percent: dict[str, Sequence[float]]
) -> dict[str, dict[int, float]]:
    """Return shares by model and length; a model may have been measured at the first few only."""
    return {
        model: {n: round(x / 100, 4) for n, x in zip(lengths, row, strict=False)}
        for model, row in percent.items()
    }


RULER_HQA = Published(
    "MemAgent, arXiv 2507.02259v1, Table 2", "sub_em_upstream",
    "documents", "hotpotqa",
    _rows(DOCUMENTS, {
        "RL-MemAgent-14B": (83.59, 82.03, 84.38, 80.47, 76.56, 81.25, 75.00, 77.34, 76.56, 78.12),
        "RL-MemAgent-7B":  (82.03, 79.69, 78.91, 77.34, 79.69, 72.66, 74.22, 76.56, 75.78, 71.09),
        "QwenLong-L1-32B": (72.66, 75.00, 72.66, 60.94, 31.25, 17.19, 13.28, 11.72),
        "Qwen2.5-14B-1M":  (60.16, 60.94, 50.00, 57.03, 50.00, 37.50,  8.59,  0.00),
        "Qwen2.5-7B-1M":   (61.72, 56.25, 53.91, 55.47, 51.56, 33.59, 12.50,  0.00),
        "DS-Distill-32B":  (70.31, 66.41, 65.62, 46.88, 23.44, 13.28,  7.81,  7.03),
        "DS-Distill-14B":  (64.06, 64.84, 57.03, 40.62, 14.84,  8.59,  3.12,  6.25),
        "DS-Distill-7B":   (30.47, 12.50,  3.12,  0.00,  0.00,  0.78,  0.00,  0.00),
    }),
)  # fmt: skip
RULER_HQA_V2 = Published(
    "MemAgent, arXiv 2507.02259v2, Table 1", "sub_em_upstream",
    "documents", "hotpotqa",
    _rows(DOCUMENTS, {
        "RL-MemAgent-14B": (80.47, 82.03, 82.03, 83.59, 81.25, 77.34, 79.69, 75.78, 78.91, 71.09),
        "RL-MemAgent-7B":  (81.25, 81.25, 82.03, 80.47, 79.69, 75.78, 76.56, 74.22, 77.34, 71.88),
    }),
    second_hand=True,
)  # fmt: skip
REMEMR1_HOTPOTQA = Published(
    "ReMemR1, arXiv 2509.23040, Tables 1 and 5", "accuracy, probably sub_em_upstream",
    "documents", "hotpotqa",
    _rows(DOCUMENTS, {
        "ReMemR1-7B":              (82.3, 82.8, 81.1, 78.9, 82.0, 79.7, 80.0, 80.8),
        "ReMemR1-3B":              (70.9, 71.7, 63.8, 74.0, 65.4, 65.0, 65.4, 66.1),
        "MemAgent-3B":             (70.3, 69.4, 60.9, 68.8, 60.9, 60.2, 59.4, 58.8),
        "Qwen3-4B":                (75.0, 75.8, 69.5, 63.3, 60.2, 21.9, 18.8, 18.8),
        "Qwen3-8B":                (81.3, 78.9, 71.9, 70.3, 74.2, 33.6, 23.4, 19.5),
        "MemAgent-7B":             (81.8, 78.9, 78.9, 77.0, 79.7, 72.1, 74.0, 75.8),
        "QwenLong-L1-32B":         (83.6, 85.2, 74.2, 73.4, 57.8, 45.3, 38.9, 38.3),
        "Qwen2.5-1M-14B":          (78.1, 83.6, 76.6, 73.4, 70.3, 60.9, 42.2,  0.0),
        "Qwen2.5-1M-7B":           (75.8, 71.9, 68.0, 67.2, 69.5, 54.7, 22.7,  0.0),
        "R1-Distill-14B":          (79.7, 76.6, 64.1, 57.8, 40.6, 33.6, 20.3, 31.3),
        "R1-Distill-7B":           (40.6, 25.8, 10.2,  0.8,  1.6,  2.3,  1.5,  3.1),
        "Qwen2.5-7B":              (70.3, 75.0),
        "Qwen2.5-3B":              (59.4, 57.0),
        "ReMemR1 without RL, 3B":  (35.4, 40.9, 31.5, 25.2, 26.0, 24.4, 16.5, 20.5),
        "MemAgent without RL, 3B": (60.2, 47.7, 35.9, 28.9, 24.2, 23.4, 14.8, 14.1),
    }),
)  # fmt: skip
REMEMR1_2WIKI = Published(
    "ReMemR1, arXiv 2509.23040, Tables 1 and 5", "accuracy, probably sub_em_upstream",
    "documents", "2wikimultihopqa",
    _rows(DOCUMENTS, {
        "ReMemR1-7B":              (63.9, 63.1, 55.6, 54.5, 54.7, 45.4, 48.9, 50.3),
        "MemAgent-7B":             (61.7, 57.8, 50.8, 47.6, 50.7, 44.5, 46.9, 44.7),
        "ReMemR1-3B":              (53.5, 50.4, 42.5, 41.7, 37.0, 36.2, 35.4, 37.8),
        "MemAgent-3B":             (41.4, 45.3, 40.2, 39.4, 36.3, 28.9, 26.7, 25.9),
        "Qwen3-4B":                (67.2, 60.9, 53.1, 43.0, 32.0, 25.0, 21.1, 25.8),
        "Qwen3-8B":                (67.2, 60.9, 57.0, 51.6, 49.2, 25.8, 26.6, 31.3),
        "Qwen2.5-1M-7B":           (62.5, 59.4, 57.8, 47.7, 46.1, 45.3, 25.8,  0.0),
        "Qwen2.5-1M-14B":          (58.6, 56.3, 56.3, 49.2, 47.7, 45.3, 34.4,  0.0),
        "QwenLong-L1-32B":         (74.2, 69.5, 65.6, 58.6, 38.3, 28.1, 24.6, 29.9),
        "R1-Distill-14B":          (71.9, 57.8, 52.3, 42.2, 28.1, 29.7, 28.1, 32.0),
        "R1-Distill-7B":           (36.7, 29.7, 25.8,  0.0,  0.8,  2.3,  2.3,  0.8),
        "Qwen2.5-7B":              (53.9, 49.2, 61.1),
        "Qwen2.5-3B":              (39.8, 39.1, 39.0),
        "ReMemR1 without RL, 3B":  (26.0, 25.2, 26.8, 18.9, 16.5, 17.3, 22.8, 22.0),
        "MemAgent without RL, 3B": (37.5, 30.5, 32.0, 22.7, 16.4, 16.4, 16.4, 15.6),
    }),
)  # fmt: skip
RULER_TEN = Published(
    "MemAgent, arXiv 2507.02259v1, Figure 6a", "RULER's match",
    "tokens", "mean of ten tasks: 8 NIAH, VT, FWE",
    _rows(TOKENS, {
        "RL-MemAgent-14B":          (97.45, 96.97, 97.46, 97.85, 96.08, 96.24, 95.40),
        "RL-MemAgent-7B":           (93.03, 92.03, 91.33, 88.83, 86.92, 83.70, 81.91),
        "MemAgent without RL, 32B": (99.04, 96.59, 94.61, 91.85, 86.56, 83.57, 81.51),
        "MemAgent without RL, 14B": (97.95, 90.22, 87.43, 80.30, 67.97, 58.88, 46.18),
        "MemAgent without RL, 7B":  (92.56, 92.47, 90.52, 88.36, 84.46, 80.05, 73.48),
        "QwenLong-L1-32B":          (92.00, 91.23, 91.40, 77.39, 41.66, 23.22, 14.78),
        "Qwen2.5-14B-1M":           (98.34, 97.31, 93.47, 90.50, 89.95, 83.91, 62.34),
        "Qwen2.5-7B-1M":            (90.28, 89.57, 88.56, 87.37, 85.11, 78.14, 39.21),
        "DS-Distill-32B":           (97.28, 97.54, 95.21, 76.63, 40.11, 24.09, 15.73),
        "DS-Distill-14B":           (95.33, 95.06, 89.89, 64.50, 28.65, 17.59, 12.40),
        "DS-Distill-7B":            (53.96, 14.77,  1.45,  0.03,   0.0,   0.0,   0.0),
        "Qwen2.5 32B":              (97.23, 94.42, 91.59, 91.34, 79.95, 44.74, 27.01),
        "Qwen2.5 14B":              (90.91, 86.65, 83.05, 79.16, 69.39, 39.22, 24.87),
        "Qwen2.5 7B":               (58.53, 48.10, 45.48, 54.37, 38.01, 25.69, 17.05),
    }),
)  # fmt: skip
RULER_QA1 = Published(
    "MemAgent, arXiv 2507.02259v1, Figure 6b", "sub_em_upstream",
    "tokens", "qa_1",
    _rows(TOKENS, {
        "RL-MemAgent-14B": (77.34, 76.56, 79.69, 77.34, 78.12, 77.34),
        "RL-MemAgent-7B":  (81.25, 81.25, 82.03, 76.56, 79.69, 81.25),
    }),
)  # fmt: skip
# percent at 8K and at 512K, the two ends of the curves in appendix B, of each of these models
_ENDS_OF = ("RL-MemAgent-14B", "RL-MemAgent-7B", "MemAgent without RL, 7B")
_ENDS = {
    "niah_single_1":   (  100,   100,    100, 98.44,  98.44, 92.19),
    "niah_single_2":   (  100,   100,    100, 85.94,    100, 89.06),
    "niah_single_3":   (99.22, 98.44,  99.22, 90.62,  99.22, 84.38),
    "niah_multikey_1": (  100, 98.44,  99.22, 95.31,  96.09, 86.72),
    "niah_multikey_2": (  100, 85.94,  99.22, 49.22,  96.88, 32.03),
    "niah_multikey_3": (92.97, 78.91,  99.22, 94.53,  96.09, 53.12),
    "niah_multiquery": (99.80, 99.61,  99.22, 75.39,  77.73, 87.79),
    "niah_multivalue": (95.12, 98.63,  93.16, 73.83,  89.26, 78.12),
    "fwe":             (90.72, 94.84,  67.65, 69.84,  81.69, 63.39),
    "vt":              (96.72, 99.22,  73.44, 85.94,  90.16, 68.05),
}  # fmt: skip
RULER_TASKS = [
    Published(
        "MemAgent, arXiv 2507.02259v1, appendix B",
        "RULER's match",
        "tokens",
        task,
        {
            model: {
                TOKENS[0]: round(ends[2 * i] / 100, 4),
                TOKENS[-1]: round(ends[2 * i + 1] / 100, 4),
            }
            for i, model in enumerate(_ENDS_OF)
        },
    )
    for task, ends in _ENDS.items()
]
TEN = tuple(_ENDS)
"""The ten tasks of RULER over which Figure 6a takes the mean."""
TABLES = (
    RULER_HQA,
    RULER_HQA_V2,
    REMEMR1_HOTPOTQA,
    REMEMR1_2WIKI,
    RULER_TEN,
    RULER_QA1,
    *RULER_TASKS,
)
