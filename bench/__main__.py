"""All benchmarks one after the other, each in a process of its own, and one table of the outcome.

Holds: the order, bench/results/table.md. Leaves out: the measurements; gpu.py, which needs a GPU.
Exercise it: `make bench`, or `python -m bench update step` for some of them. Read next: update.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from bench.common import RESULTS, machine

ORDER = ("update", "step", "rollout", "length")


def run(name: str) -> dict:
    """Run a benchmark and return its result; of a failed one, the end of its error."""
    done = subprocess.run([sys.executable, "-m", f"bench.{name}"], capture_output=True, text=True)
    out = done.stdout.splitlines()
    print("\n".join(out[:-1] if done.returncode == 0 else out), flush=True)
    if done.returncode == 0:
        return json.loads(out[-1])
    error = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
    failure = {"what": name, "measured": f"failed: {error[0]}", "bar": "", "met": False}
    result = {"benchmark": name, "lines": [failure], "machine": machine()}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(done.stderr[-2000:], flush=True)
    return result


def markdown(results: list[dict]) -> str:
    """Format the lines of all results as one table, under the machine and commits."""
    where = results[-1]["machine"]
    # several commits, if only some benchmarks were run again
    commits = ", ".join(sorted({r["machine"]["commit"] for r in results}))
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items())
    head = [
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, one thread each; "
        f"{versions}; commit {commits}",
        "",
        "| measured | value | asked | |",
        "|---|---|---|---|",
    ]
    rows = [
        f"| {x['what']} | {x['measured']} | {x['bar']} | {'' if x['met'] else 'missed'} |"
        for r in results
        for x in r["lines"]
    ]
    return "\n".join(head + rows)


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    names, start = sys.argv[1:] or ORDER, time.perf_counter()
    for name in names:
        began = time.perf_counter()
        run(name)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    paths = (RESULTS / f"{name}.json" for name in ORDER)
    results = [json.loads(path.read_text()) for path in paths if path.exists()]
    text = markdown(results)
    (RESULTS / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    print(f"{time.perf_counter() - start:.0f} s in all")
    if any(x["measured"].startswith("failed") for r in results for x in r["lines"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
