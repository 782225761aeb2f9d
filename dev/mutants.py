"""Mutants: how many small changes of the code its own tests notice.

`pip install cosmic-ray==8.7.0 pytest-cov`, then `python dev/mutants.py --n 20` in a clone: the tree
is changed while a mutant is tried, and put back. A mutant is one operator, number or condition of
one module changed by cosmic-ray's operators. The sample depends on the code and the seed alone. The
tests of a module are the files of its own room that name it. One run of all of them under coverage
tells which test reaches which line: a mutant is tried on the tests that reach its lines, or on all
tests of the module if none does, and is caught if one of them fails, or is not done in time.

What the coverage told is kept beside the results (OUT.plan.json.gz), so that a later call begins
without it; `--part 0/2` and `1/2` share the mutants between two calls, each in a clone of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

HERE = Path.cwd()  # the clone whose tests are tried
MODULES = (
    "*.py", "tokens/*.py", "engines/hf.py", "models/logprobs.py", "agents/*.py", "suites/*.py",
    "tasks/*.py", "commands/*.py", "report/*.py", "config/*.py",
)  # fmt: skip
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
# `int | None` is an annotation, which is never evaluated; the last two take arguments
LEFT_OUT = re.compile("BinaryOperator_BitOr|RemoveDecorator|VariableInserter|VariableReplacer")


def mutants() -> dict[tuple[str, str, int], list[str]]:
    """Map every place that can change, (module, what stands there, occurrence), to the operators
    that change it: == has nine of them and a number two, and each place counts once."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    found: dict[tuple[str, str, int], list[str]] = {}
    for path in sorted(p for pattern in MODULES for p in HERE.glob(pattern)):
        nodes = [*ast_nodes(get_ast(path.read_text(encoding="utf-8")))]
        for name in sorted(plugins.operator_names()):
            if not LEFT_OUT.search(name):
                operator = plugins.get_operator(name)()
                n = sum(len([*operator.mutation_positions(node)]) for node in nodes)
                for k in range(n):
                    place = str(path.relative_to(HERE)), name.rsplit("_", 1)[0], k
                    found.setdefault(place, []).append(name)
    return found


def tests_of(module: str) -> list[str]:
    """Return the test files of a module: in the folder of its room, or of the root, those that
    import it; all of that folder if none does."""
    path = Path(module)
    room, name = path.parent, path.stem
    files = sorted((HERE / "tests" / room).glob("test_*.py"))
    dotted = ".".join([*room.parts, name])
    pattern = re.compile(
        rf"\b{re.escape(dotted)}\b|from {'.'.join(room.parts) or '.'} import .*\b{name}\b"
    )
    naming = [f for f in files if f.stem == f"test_{name}" or pattern.search(f.read_text())]
    naming.sort(key=lambda f: f.stem != f"test_{name}")  # its own first: the first failure ends it
    return [str(f.relative_to(HERE)) for f in naming or files]


def reach(data: Path) -> dict[str, dict[int, list[str]]]:
    """Return the tests that reach each line of each module, by one run of them all under coverage,
    which is kept in the file data. Ends the program if one fails: it would catch any mutant."""
    from coverage import CoverageData

    if not data.exists():
        modules = sorted(str(p.relative_to(HERE)) for m in MODULES for p in HERE.glob(m))
        files = sorted({file for module in modules for file in tests_of(module)})
        done = subprocess.run(
            [*PYTEST, "-n", "2", "--cov=.", "--cov-context=test", "--cov-report=", *files],
            cwd=HERE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(data)},
        )
        if done.returncode:
            data.unlink(missing_ok=True)
            sys.exit("Tests fail without a mutant: mend them first.")
    measured = CoverageData(str(data))
    measured.read()
    return {
        str(Path(file).relative_to(HERE)): {
            line: sorted({c.rsplit("|", 1)[0] for c in contexts if c})
            for line, contexts in measured.contexts_by_lineno(file).items()
        }
        for file in measured.measured_files()
        if Path(file).is_relative_to(HERE)
    }


def plan_of(sample: list[tuple[str, str, int]], data: Path) -> list[dict]:
    """Return each mutant with the tests that reach its lines, and the test files of its module."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    reached, plan = reach(data), []
    for module, operator, occurrence in sample:
        old, files = (HERE / module).read_text(encoding="utf-8"), tests_of(module)
        new = mutate_code(old, plugins.get_operator(operator)(), occurrence)
        pairs = zip(old.split("\n"), (new or old).split("\n"), strict=False)
        changed = [k for k, pair in enumerate(pairs, 1) if len({*pair}) > 1]
        tests = {test for k in changed for test in reached.get(module, {}).get(k, [])}
        tests = [t for file in files for t in sorted(tests) if t.split("::")[0] == file]
        plan.append({"mutant": [module, operator, occurrence], "tests": tests, "files": files})
    return plan


def is_caught(mutant: list, tests: list[str], files: list[str], seconds: int) -> bool | None:
    """Try one mutant on the tests that reach its lines. None: there is no change to be made.
    seconds: of processor time, which does not depend on what else the machine does."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import use_mutation

    module, operator, occurrence = mutant
    with use_mutation(HERE / module, plugins.get_operator(operator)(), occurrence) as (_, new):
        if new is None:
            return None
        for chosen in [tests, files] if tests else [files]:
            try:
                done = subprocess.run(
                    [*PYTEST, "-x", *chosen],
                    cwd=HERE,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                    capture_output=True,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds)),
                    timeout=10 * seconds,
                )
            except subprocess.TimeoutExpired:  # it waits for something that never comes
                return True
            if done.returncode != pytest.ExitCode.USAGE_ERROR:  # a name that the mutant changes
                break
        return done.returncode != 0


def main(
    n: Annotated[int, typer.Option(help="how many mutants")] = 200,
    seed: Annotated[int, typer.Option(help="of the sample")] = 46,
    seconds: Annotated[int, typer.Option(help="most processor time of the tests of one")] = 600,
    out: Annotated[Path, typer.Option(help="file of one line a mutant; goes on where it stops")] = (
        Path("mutants.jsonl")
    ),
    part: Annotated[str, typer.Option(help="K/N: every N-th mutant from the K-th on")] = "0/1",
) -> None:
    """Try a sample of mutants, and print the share that the tests catch."""
    kept = out.with_suffix(".plan.json.gz")
    if not kept.exists():
        everything, rng = mutants(), random.Random(seed)
        places = rng.sample([*everything], min(n, len(everything)))
        sample = [(place[0], rng.choice(everything[place]), place[2]) for place in places]
        plan = plan_of(sample, out.resolve().with_suffix(".coverage"))
        kept.write_bytes(gzip.compress(json.dumps(plan).encode(), mtime=0))
    plan = json.loads(gzip.decompress(kept.read_bytes()))
    first, step = map(int, part.split("/"))
    files = out.parent.glob(f"{out.stem}*.jsonl")
    known = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    outcomes = {tuple(line["mutant"]): line["caught"] for line in known}
    with out.open("a") as file:
        for each in plan[first::step]:
            if (mutant := tuple(each["mutant"])) not in outcomes:
                outcomes[mutant] = is_caught(**each, seconds=seconds)
                print(json.dumps({"mutant": mutant, "caught": outcomes[mutant]}), file=file)
                file.flush()
    tried = [caught for caught in outcomes.values() if caught is not None]
    typer.echo(f"{sum(tried)} of {len(tried)} caught, {sum(tried) / len(tried):.1%}")


if __name__ == "__main__":
    typer.run(main)
