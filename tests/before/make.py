"""Make small folders as earlier versions left them: runs, an export, an adapter, a bank, a store.

`cd CHECKOUT && python PATH/make.py OUT` with a checkout of the tag `with-upstream` writes the file
OUT/made.tar.xz. The one beside this script is read by test_before.py with the code of today.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

SMALL = "--lengths 2 --chunk-tokens 48 --memory-tokens 8 --final-tokens 8 --dtype float32"
STEP = "--tasks-per-step 1 --group-size 2 --dtype float32"
COMMANDS = (
    f"train --name full --model small {SMALL} {STEP} --steps 1",
    f"train --name lora --model small {SMALL} {STEP} --steps 2 --save-every 1 --lora-rank 2",
    f"train --name rememr1 --model small --agent rememr1 {SMALL} {STEP} --steps 1 "
    "--keep-checkpoints 0",
    f"train --name memupdate --model keeper --agent memupdate --data ledger --lengths 6 {STEP} "
    "--steps 1 --keep-checkpoints 0",
    "export runs/full --out exported",
    f"eval --name evaluated --model runs/full/model --agents memagent,full,rememr1 {SMALL} "
    "--n 2 --temperatures 0",
    "eval --name stores --model keeper --agents memupdate --data ledger --n 2 --lengths 6 "
    "--temperatures 0 --dtype float32",
    "stream --name streamed --suite bandit --n 3 --epochs 1 --arms memrl",
)
LEFT_OUT = ("report.html", "machine.json", "events.out.tfevents", ".running")


def make(checkout: Path, out: Path) -> None:
    """Write the folders with the code of a checkout."""
    sys.path[:0] = [str(checkout), str(checkout / "tests")]
    from conftest import random_policy

    from agents.store import Entry, Store
    from embedded import tiny
    from tokens.codec import Codec

    tokenizer = tiny.make_tokenizer()
    policy = random_policy(
        Codec(tokenizer), 1024, hidden_size=16, num_attention_heads=2, intermediate_size=16
    )
    policy.save_pretrained(out / "small")
    tokenizer.save_pretrained(out / "small")
    shutil.copytree(checkout / "embedded" / "keeper_weights", out / "keeper")
    for command in COMMANDS:
        words = [sys.executable, str(checkout / "cli.py"), *command.split()]
        subprocess.run(words, cwd=out, check=True)
    store = Store([Entry("m1", "It rains.", speaker="Ann", date="2023-05-08")])
    store.record("add_memory", {}, "added", after=[Entry("m2", "It snows.", date="2023-05-09")])
    store.to_jsonl(out / "store.jsonl")
    for path in out.rglob("adapter_config.json"):  # peft writes where the base lay
        path.write_text(path.read_text(encoding="utf-8").replace(f"{out}/", ""), encoding="utf-8")
    with tarfile.open(out / "made.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(out.rglob("*")):
            where = path.relative_to(out)
            if path.is_file() and where.parts[0] in ("runs", "small", "exported", "store.jsonl"):
                if not path.name.startswith(LEFT_OUT):
                    archive.add(path, where, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member that tells nothing of who made it and when."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    make(Path.cwd(), Path(sys.argv[1]).absolute())
