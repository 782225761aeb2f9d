"""Sandboxes: what programs and systems try stays inside. Run by `make test-sandbox`, as root.

Nothing here is skipped: where a sandbox cannot be had, these tests fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import closing, suppress
from dataclasses import astuple
from pathlib import Path

import pytest
from conftest import HANG_S, until

from config.errors import UserError
from tasks import sandbox
from tasks.sandbox import Ran, System, confine

sys.path.append(str(Path(__file__).parents[1] / "hostile"))
import escapes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def ready():
    """Both sandboxes can be had here, and no system is left when all is over."""
    assert os.geteuid() == 0, "these tests want root"
    sandbox.make_system()
    assert sandbox.lacking() == sandbox.lacking(system=True) == []
    yield
    assert "memagent-" not in names()


def names() -> str:
    """Return the names of all that podman runs."""
    return sandbox.run([*sandbox.PODMAN, "ps", "--all", "--format", "{{.Names}}"], HANG_S).output


class Inside:
    """Run bash codes in a program or in a system, in a child that is root's or nobody's."""

    def __init__(self, kind: str, who: str):
        self.kind, self.who, self.mark = kind, who, uuid.uuid4().hex

    def start(self, *codes: str, seconds: float = HANG_S, stays: bool = False):
        """Return the child's pid, and a pipe for what the codes have left."""
        read, write = os.pipe()
        if pid := os.fork():
            os.close(write)
            return pid, os.fdopen(read)
        try:
            os.close(read)
            if self.who == "nobody":
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            found = self._found([f"{code}\n# {self.mark}" for code in codes], seconds, stays, write)
            os.write(write, found)
        finally:
            os._exit(0)

    def _found(self, codes: list[str], seconds: float, stays: bool, write: int) -> bytes:
        if self.kind == "program":
            ran = [confine(["bash", "-c", code], seconds) for code in codes]
            return json.dumps([astuple(one) for one in ran]).encode()
        with closing(System()) as system:
            ran = [system.run(code, seconds) for code in codes]
            if stays:
                os.write(write, b"ran\n")
                time.sleep(3600)
        return json.dumps([astuple(one) for one in ran]).encode()

    def run(self, *codes: str, seconds: float = HANG_S) -> list[Ran]:
        pid, pipe = self.start(*codes, seconds=seconds)
        with pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        return [Ran(*fields) for fields in json.loads(said)]

    def left(self) -> list[str]:
        """Return the processes that carry our mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (folder / "cmdline").read_bytes():
                    found.append(folder.name)
        return found


def outside() -> dict:
    """Return what a sandbox must not change."""
    names = ("kernel/panic", "kernel/core_pattern", "vm/overcommit_memory", "kernel/hostname")
    etc = [(str(path), path.lstat().st_mtime_ns) for path in sorted(Path("/etc").rglob("*"))]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    tree = sandbox.system_folder()
    return {
        "settings": [Path("/proc/sys", name).read_text() for name in names],
        "mounts": [line for line in mounts if "/containers/" not in line],
        "etc": hashlib.sha256(repr(etc).encode()).hexdigest(),
        "root": sorted(Path("/").iterdir()),
        "tree": [(path.name, path.lstat().st_mtime_ns) for path in sorted(tree.glob("*"))],
        "folders": sorted(Path("/tmp").glob("memagent-*")),
    }


@pytest.fixture
def inside(kind, who):
    """Yield a sandbox; then nothing outside has changed, and no process is left."""
    before, clocks = outside(), time.time() - time.monotonic()
    it = Inside(kind, who)
    yield it
    assert abs(time.time() - time.monotonic() - clocks) < 60
    assert outside() == before
    until(lambda: not it.left(), 0.05)


hostile = pytest.mark.parametrize(
    ("kind", "who"), [("program", "root"), ("program", "nobody"), ("system", "root")]
)


def perl(code: str) -> str:
    return f"perl -e '{code}'"


@hostile
def test_nothing_is_got_hold_of(inside):
    """Sockets to the host, io_uring, namespaces, other processes, mounts, settings, devices."""
    tried = {
        "sockets": perl(escapes.HOST_SOCKETS),
        "rings": perl(escapes.RINGS),
        "namespaces": perl(escapes.NAMESPACES),
        "mounts": escapes.MOUNTS,
        "settings": escapes.SETTINGS,
    }
    if inside.kind == "system":  # of a program its own child is all that could be traced
        tried["traces"] = perl(escapes.TRACES)
    found = inside.run(*tried.values(), f"{perl(escapes.OTHER_NUMBERS)}; echo $?")
    said = dict(zip(tried, (ran.output for ran in found), strict=False))
    assert said == dict.fromkeys(tried, "nothing\n")
    assert not re.search(r"called \d", found[-1].output)  # it was refused, or ended the process


@pytest.mark.parametrize("kind", ["program", "system"])
def test_no_key_of_the_caller_is_seen_or_read(kind):
    """By a process that has one; where the kernel has no keys there is nothing to be read."""
    code = f"""
{escapes.give_a_secret()}
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "hostile")!r}]
import escapes, json, subprocess
from tasks.sandbox import JOIN, System, confine
code = escapes.read_keys(key)
if {kind!r} == "program":
    said = confine(["perl", "-e", code], 60).output
    # also what the kernel itself would look up, which no filter of calls answers
    words = ["perl", "-e", escapes.read_keys(0)]
    found = [b"found" in subprocess.check_output([*first, *words]) for first in ([], JOIN)]
else:
    system, found = System(), [True, False]
    said = system.run(f"perl -e '{{code}}'; cat /proc/keys", 60).output
    system.close()
print(json.dumps([joined, key, said, found]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    joined, key, said, found = json.loads(done.stdout.splitlines()[-1])
    assert said == "nothing\n"
    assert found == [True, False] or min(joined, key) < 0


@hostile
def test_there_is_no_network(inside):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.2)
        (ran,) = inside.run(
            f"(echo > /dev/tcp/127.0.0.1/{port}) 2> /dev/null || echo refused\n"
            "tail -n +3 /proc/net/dev | cut -d: -f1"
        )
        assert ran.output.split() == ["refused", "lo"] and ran.code == 0
        with pytest.raises(TimeoutError):
            server.accept()


@hostile
def test_files_outside_can_neither_be_read_nor_written(inside):
    canary, probe = Path("/tmp", f"canary-{inside.mark}"), f"/probe-{inside.mark}"
    canary.write_text("mine")
    canary.chmod(0o666)
    try:
        read, removed = inside.run(
            f"""
for path in {canary} {ROOT}/README.md /proc/1/root{canary} /sys/kernel \
    /var/lib/containers /run/podman/podman.sock; do
    [ ! -r $path ] || echo seen $path
done
echo theirs > {canary}; touch {probe} /usr{probe} /tmp{probe} /etc{probe} 2> /dev/null
cat /tmp/canary*""",
            "timeout 5 rm -rf --no-preserve-root / 2> /dev/null; echo over",
        )
        assert read.output == "theirs\n" and removed.output == "over\n"
        assert canary.read_text() == "mine"
        assert not any(Path(f"{folder}{probe}").exists() for folder in ("", "/usr", "/tmp", "/etc"))
        assert Path("/usr/bin/perl").exists() and (ROOT / "README.md").exists()
        assert (sandbox.system_folder() / "usr/bin/bash").exists()
    finally:
        canary.unlink()


@hostile
def test_other_processes_are_neither_seen_nor_ended(inside):
    with subprocess.Popen(["sleep", "3600"]) as other:
        try:
            *_, last = inside.run(
                f"ls /proc | grep -c '^[0-9]'\n"
                f"for pid in {other.pid} {os.getpid()}; do kill -9 $pid && echo killed; done",
                "kill -9 1; kill -HUP 1; kill -9 -1",
                "ls /proc | grep -c '^[0-9]'",
            )
            assert last.code == 0 and int(last.output) < 8
            assert other.poll() is None
        finally:
            other.kill()


@hostile
def test_a_fork_bomb_ends_at_so_many_processes(inside):
    """Of all users together: the children of a system's root change their uid."""
    counted, bomb, after = (
        inside.run(code, seconds=seconds)[0]
        for code, seconds in ((f"exec {perl(escapes.FORKS)}", HANG_S), (escapes.BOMB, 3),
                              ("echo on", HANG_S))
    )  # fmt: skip
    assert 32 <= int(counted.output) <= 128
    assert bomb.code is None and after.output == "on\n"


@hostile
def test_disk_and_memory_end(inside):
    disk, memory, after = inside.run(escapes.FILL_DISK, escapes.FILL_MEMORY, "echo on")
    most = (65 + 16) << 20 if inside.kind == "program" else sandbox.DISK + (65 << 20)
    assert 0 < int(disk.output) <= most
    lines = memory.output.splitlines()
    assert "over" in lines and "taken" not in lines  # podman joins what is said in any order
    assert after.output == "on\n"


def test_a_systems_files_end_too():
    with closing(System()) as system:
        assert int(system.run(escapes.FILL_INODES, HANG_S).output.split()[-1]) < 103_000
        assert system.run("echo on", HANG_S).code == 0


@hostile
@pytest.mark.parametrize(("code", "output"), [
    ("yes spam", ("spam\n" * sandbox.OUTPUT)[: sandbox.OUTPUT]),
    ("trap '' TERM INT HUP; echo first; sleep 3600", "first\n"),
])  # fmt: skip
def test_what_has_no_end_is_ended_and_its_output_is_cut(inside, code, output):
    for seconds in (2, 20, 200):  # for longer where the machine has not got as far
        (ran,) = inside.run(code, seconds=seconds)
        assert ran.code is None and ran.seconds >= seconds
        if ran.output == output:
            break
    assert ran.output == output


@hostile
def test_a_daemon_that_is_left_over_keeps_nobody_waiting_and_ends(inside):
    (ran,) = inside.run(f"setsid perl -e 'sleep 3600' {inside.mark} & echo started; exit 3")
    assert (ran.output, ran.code) == ("started\n", 3)


def test_a_system_is_root_with_users_of_its_own_and_keeps_what_is_done():
    with closing(System()) as one, closing(System()) as other:
        said = one.run("useradd ada; echo 1 > /srv/x; su ada -c 'sudo -n id || id -un'", HANG_S)
        # what sudo complains of may come before or after: podman promises no order
        assert said.code == 0 and "ada" in said.output.splitlines()
        assert one.run("kill -9 -1; kill -9 1", HANG_S).code == 137
        assert one.run("id ada && cat /srv/x", HANG_S).code == 0
        assert other.run("id ada || cat /srv/x", HANG_S).code != 0
        assert one.is_alive and other.is_alive
    one.close()
    assert not one.is_alive


def test_a_script_beyond_its_time_does_not_go_on():
    with closing(System()) as system:
        assert system.run("sleep 3600 & sleep 3600; echo on", 1).code is None
        assert system.run("pgrep sleep", HANG_S).code == 1
        assert system.run("kill -9 $$", HANG_S).code == 137  # which no clock has done


def test_programs_that_a_model_has_replaced_run_with_no_right_of_ours():
    with closing(System()) as system:
        assert system.run(escapes.REPLACE_PROGRAMS, HANG_S).output == "replaced\n"
        assert "mounted" not in system.run("echo on; perl; setpriv", HANG_S).output
        lines = system.run("cat /proc/[0-9]*/status", HANG_S).output.splitlines()
        rights = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
        assert len(rights) > 1 and not any(right >> 21 & 1 for right in rights)
        assert {line[-1] for line in lines if line.startswith("Seccomp:")} == {"2"}  # pid 1's too
        adjusted = system.run("cat /proc/self/oom_score_adj", HANG_S).output
        assert adjusted == "1000\n"  # the kernel takes it first


@pytest.mark.parametrize(("kind", "who"), [("system", "root")])
def test_a_system_ends_with_the_process_that_holds_it(inside):
    code = f"for n in 1 2 3; do setsid perl -e 'sleep 3600' {inside.mark} & done"
    holder, pipe = inside.start(code, stays=True)
    with pipe:
        assert pipe.readline() == "ran\n"
        until(inside.left)  # what was put in the background may not have begun yet
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    until(lambda: not inside.left(), 0.05)
    for folder in Path("/tmp").glob("memagent-*/disk"):
        shutil.rmtree(folder.parent)


def test_a_system_ends_with_its_podman_too():
    system = System()
    assert system.name in names()
    os.killpg(system.holder.pid, signal.SIGKILL)
    until(lambda: system.name not in names(), 0.05)
    system.close()
    assert not system.is_alive


def test_a_tree_that_is_none_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="No system can be started") as caught:
        System(tmp_path)
    assert "\n" not in str(caught.value)


FAKE = """#!/bin/sh
for tree; do :; done
mkdir -p "$tree/etc" && echo made > "$tree/etc/a" && ln "$tree/etc/a" "$tree/b" && ln -s b "$tree/c"
chgrp 42 "$tree/b"; chmod 4751 "$tree/b"
{end}
"""


def test_a_tree_is_its_systems_own_and_one_that_cannot_be_made_leaves_nothing(
    monkeypatch, tmp_path
):
    """With a fake of mmdebstrap, which asks Debian's servers."""
    monkeypatch.setenv("MEMAGENT_CACHE", str(cache := tmp_path / "cache"))
    monkeypatch.setitem(sandbox.ENVIRONMENT, "PATH", f"{tmp_path}:{sandbox.ENVIRONMENT['PATH']}")
    program = tmp_path / "mmdebstrap"
    program.write_text(FAKE.format(end="echo E: no server; exit 1"))
    program.chmod(0o755)
    with pytest.raises(UserError, match=r"cannot be made \(E: no server\)"):
        sandbox.make_system(lambda line: None)
    ((_, command),) = sandbox.lacking(True)
    assert not [*cache.iterdir()] and sandbox.GET_SYSTEM in command
    program.write_text(FAKE.format(end=""))
    said = []
    tree = sandbox.make_system(said.append)
    assert sandbox.make_system(said.append) == tree and said[1] == f"{tree} is there."
    first = sandbox.IDS
    for name, group in (("b", 42), ("etc/a", 42), ("c", 0), ("etc", 0), (".", 0)):
        found = (tree / name).lstat()
        assert (found.st_uid, found.st_gid) == (first, first + group), name
    assert (tree / "b").stat().st_mode & 0o7777 == 0o4751
    os.chown(tree, 0, 0)  # as an earlier version has made it
    assert sandbox.GET_SYSTEM in sandbox.lacking(True)[0][1]


def test_descriptors_beyond_1023_do():
    """Many episodes side by side, in a process that has much open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert confine(["/bin/echo", "yes"], HANG_S).output == "yes\n"
        with closing(System()) as system:
            assert system.run("echo yes", HANG_S).output == "yes\n" and system.is_alive
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
