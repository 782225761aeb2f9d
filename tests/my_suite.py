from dataclasses import dataclass

from data import Task
from suites import Column, Suite


@dataclass(frozen=True)
class MySuite(Suite):  # of a user's own: a setting, a unit, lengths and one kind of question
    goods: str = "pears"
    """what is counted"""

    unit, lengths = "lines", (2, 8)

    def columns(self, scope):
        def make(length):
            lines = [f"Day {k}: {k * 3} {self.goods}." for k in range(1, length + 1)]
            for k in range(1, min(scope.n, length) + 1):
                question = f"How many {self.goods} were there on day {k}?"
                yield Task(f"d{k}", question, (str(k * 3),), text=" ".join(lines))

        for n in scope.lengths:
            yield Column("day", n, lambda n=n: make(n))
