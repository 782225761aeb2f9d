"""What is shut in finds no key, no way to the host and no memory without bounds."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import escapes
import pytest
from conftest import HANG_S, until

from tasks import sandbox

ROOT = Path(__file__).parents[2]
lacks = {
    kind: "; ".join(" ".join(pair) for pair in sandbox.lacking(kind == "system"))
    for kind in ("program", "system")
}
needs = {kind: pytest.mark.skipif(bool(why), reason=why) for kind, why in lacks.items()}
BOTH = [pytest.param(kind, marks=needs[kind]) for kind in lacks]


def run(kind: str, *codes: str) -> list[str]:
    """Run Perl codes in a sandbox, a system's one after the other in the same one."""
    if kind == "program":
        return [sandbox.confine(["perl", "-e", code], HANG_S).output for code in codes]
    with closing(sandbox.System()) as system:
        return [system.run(f"perl -e '{code}'", HANG_S).output for code in codes]


@pytest.mark.parametrize("kind", BOTH)
def test_no_key_of_the_caller_is_seen_or_read(kind):
    """By a process that has one; where the kernel has no keys there is nothing to be read."""
    code = f"""
{escapes.give_a_secret()}
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
import escapes, json
from test_escapes import run
print(json.dumps([joined, key, *run({kind!r}, escapes.read_keys(key))]))
"""
    words = [sys.executable, "-c", code]
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    joined, key, said = json.loads(done.stdout.splitlines()[-1])
    if joined < 0 or key < 0:
        pytest.skip("this kernel gives nobody a key")
    assert said == "nothing\n"


def test_the_keyring_that_a_sandbox_begins_with_is_its_own():
    """Also for what the kernel itself looks up in it, which no filter of calls answers."""
    code = f"""
{escapes.give_a_secret()}
import subprocess, sys
sys.path[:0] = [{str(ROOT)!r}]
from tasks.sandbox import _EXEC, _JOIN, PERL
for first in ("", _JOIN):
    words = [*PERL, first + _EXEC, "--", "perl", "-e", {escapes.read_keys(0)!r}]
    print(b"found" in subprocess.check_output(words))
print(joined, key)
"""
    said = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    if "-1" in said:
        pytest.skip("this kernel gives nobody a key")
    assert said[:2] == ["True", "False"]


def answer(call: int, first: int = 0, processor: int = sandbox.PROCESSOR) -> int:
    """Return what the filter answers to a call and its first argument, as the kernel runs it."""
    data, value, at = struct.pack("=IIQQ", call, processor, 0, first), 0, 0
    lines = [*struct.iter_unpack("=HBBI", sandbox._filter())]
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand}[code]
            at += yes if holds else no


def test_the_filter_answers_as_a_kernel_without_such_calls():
    """Those of other processors too, and those of 32 bits, under which the same calls go."""
    none, all_well = 0x00050000 | errno.ENOSYS, 0x7FFF0000
    clone3, user_namespace, vsock = 435, 0x10000000, 40
    for call in (*range(sandbox.KEYS, sandbox.KEYS + 3), 425, clone3):
        assert answer(call) == none
    for call in (sandbox.CLONE, sandbox.UNSHARE):
        for flags in (user_namespace, user_namespace | 0x20011, user_namespace | 1 << 32):
            assert answer(call, flags) == none
        assert answer(call, 0x20011) == all_well
    for family in (vsock, vsock | 1 << 32):
        assert answer(sandbox.SOCKET, family) == none
    for call, first in ((0, vsock), (0, user_namespace), (sandbox.SOCKET, 2), (424, 0)):
        assert answer(call, first) == all_well
        assert answer(call, first, processor=0x40000003) == none
        assert answer(call | 1 << 30, first) == none


@pytest.mark.parametrize("kind", BOTH)
def test_what_no_namespace_keeps_apart_is_not_there(kind):
    codes = escapes.SOCKETS_TO_THE_HOST, escapes.RINGS, escapes.NAMESPACES
    assert run(kind, *codes) == ["nothing\n"] * 3


@needs["system"]
def test_all_that_a_system_keeps_in_memory_is_256_mb():
    with closing(sandbox.System()) as system:
        *said, size = system.run(escapes.FILL_MEMORY, HANG_S).output.split()
        assert not said and int(size) <= 256 << 20


@needs["system"]
def test_a_system_has_so_many_files_and_no_more():
    with closing(sandbox.System()) as system:
        assert int(system.run(escapes.FILL_INODES, HANG_S).output.split()[-1]) < 103_000


@needs["system"]
def test_programs_that_a_model_has_replaced_run_with_no_right_of_ours():
    with closing(sandbox.System()) as system:
        assert system.run(escapes.REPLACE_PROGRAMS, HANG_S).output == "replaced\n"
        assert system.run("echo on; perl; setpriv", HANG_S).output.count("mounted") == 0
        lines = system.run("cat /proc/[0-9]*/status", HANG_S).output.splitlines()
        rights = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
        assert len(rights) > 1 and not any(right >> 21 & 1 for right in rights)
        assert {line[-1] for line in lines if line.startswith("Seccomp:")} == {"2"}  # pid 1's too
        adjusted = system.run("cat /proc/self/oom_score_adj", HANG_S).output
        assert adjusted == "1000\n"  # the kernel takes it first


@needs["system"]
def test_what_enters_a_system_is_held_by_nobody_in_it():
    """It has rights in the system until it is the model's program, which a loop waits for."""
    with closing(sandbox.System()) as system:
        system.run(f"perl -e '{escapes.HUNTER}' > /dev/null 2>&1 & disown", HANG_S)
        until(lambda: system.run("test -e /tmp/ready", HANG_S).code == 0)
        for _ in range(20):
            system.run("true", HANG_S)
        until(lambda: system.run("touch /tmp/over", HANG_S).code == 0)
        until(lambda: (found := system.run("cat /tmp/found", HANG_S)).code == 0 and found.output)
        assert system.run("cat /tmp/found", HANG_S).output == "nothing\n"
