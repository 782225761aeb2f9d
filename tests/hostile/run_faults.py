"""What befalls a run: a second writer, signals, a disk that is full.

A training is a command in a forked child, as small as it can be.
"""

import os
import time
from contextlib import contextmanager

import pytest
from conftest import forked

from commands import train

SMALL = (
    "train --tasks-per-step 2 --group-size 2 --lengths 1 --chunk-tokens 30 --memory-tokens 8 "
    "--final-tokens 4 --in-flight 4 --lr 0.01"
).split()
SMALL_SFT = "sft --tasks-per-step 2 --lengths 1 --chunk-tokens 30".split()


@contextmanager
def doing(act, steps=0, owner=train.TrainingProgress, place="on_train_batch_end"):
    """Let a training do something when so many steps are done, by the callback after all others;
    or another class where it does something, before it."""
    real = getattr(owner, place)

    def then(self, *rest, **more):
        if not steps:
            act()
        found = real(self, *rest, **more)
        if steps and rest[1].done_steps == steps:
            act()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, place, then)
        yield


@contextmanager
def halted(words, *where, **how):
    """Yield a command in a process of its own that waits for ever at one place, as in `doing`."""
    ours, theirs = os.pipe()

    def halt():
        os.write(theirs, b"here")
        while True:
            time.sleep(1)

    with doing(halt, *where):
        process = forked(words, **how)
    assert os.read(ours, 4) == b"here"
    try:
        yield process
    finally:
        process.kill()
        process.join()
        os.close(ours)
        os.close(theirs)


def tree(folder):
    """Return what a folder holds: path -> bytes.

    TensorBoard's files are left out: a thread writes them, also while its process is halted.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "tensorboard"
    }
