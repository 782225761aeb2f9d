"""Published numbers of other models on other questions, of all suites: marks, at a distance.

Holds: `TABLES`, `TEN`. Leaves out: the numbers (suites/*.yaml), ours. No torch.
Exercise it: `python cli.py eval --suite ruler-hqa`. Read next: report/page.py.
"""

from suites import Published, kinds

__all__ = ["TABLES", "TEN", "Published"]

TABLES = tuple(table for kind in kinds() for table in kind.published())
TEN = tuple(table.question for table in TABLES if table.source.endswith("appendix B"))
"""The ten tasks of RULER over which Figure 6a takes the mean."""
