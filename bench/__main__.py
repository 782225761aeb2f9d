"""All benchmarks that need no GPU, each in a process of its own, and one table of their results."""

import json
import subprocess
import sys

from bench.common import RESULTS, markdown

ORDER = ("update", "step", "rollout", "length")


def main() -> int:
    """Run the named benchmarks, or all of them; return 1 if one has failed."""
    commands = [[sys.executable, "-m", f"bench.{name}"] for name in sys.argv[1:] or ORDER]
    failed = [command[-1] for command in commands if subprocess.run(command).returncode]
    paths = [RESULTS / f"{name}.json" for name in ORDER]
    text = markdown([json.loads(path.read_text()) for path in paths if path.exists()])
    (RESULTS / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text, *(f"{name} failed: its figures are of before." for name in failed), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
