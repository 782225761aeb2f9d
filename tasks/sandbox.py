"""Sandboxes: one program shut in by bubblewrap, or a throw-away Debian system by podman.

They keep mistakes in, and what a model tries without knowing where it is: no network, no file,
process, key or setting of the machine can be reached, and nothing is left over. They are no prison
for an attacker, who has the kernel before him as any local user has.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from config.errors import UserError, clip
from config.realmodels import cache_folder

MEGABYTE = 1 << 20
OUTPUT = MEGABYTE  # bytes that are kept of what a program says
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "TERM": "dumb",
}
PACKAGES = {  # of Debian; util-linux for all others
    "bwrap": "bubblewrap", "mmdebstrap": "mmdebstrap", "perl": "perl-base", "podman": "podman",
    "runc": "runc",
}  # fmt: skip

# ---------------------------------------------------------------- a program under a clock


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program has left: what it said, its exit code, the seconds it took."""

    output: str  # standard output, and unless `apart` standard error
    errors: str
    code: int | None  # None: killed at the limit; negative: by a signal
    seconds: float


def run(
    argv: Sequence[str | bytes],
    seconds: float,
    stdin: bytes = b"",
    apart: bool = False,
    pass_fds: Sequence[int] = (),
) -> Ran:
    """Run a program in a process group of its own, which is killed after so many seconds.

    What is said beyond `OUTPUT` bytes is read and forgotten. apart: standard error does not join
    the output.
    """
    begin = time.monotonic()
    process = _start(
        argv,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        pass_fds=pass_fds,
    )
    kept = [bytearray() for pipe in (process.stdout, process.stderr) if pipe]
    threads = [
        threading.Thread(target=_read, args=pair, daemon=True)
        for pair in zip((process.stdout, process.stderr), kept, strict=False)
    ]
    if stdin:
        threads.append(threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True))
    for thread in threads:
        thread.start()
    is_over = False
    try:
        is_over = _has_ended(process.pid, begin + seconds - time.monotonic())
    finally:
        if not is_over:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for thread in threads:  # bwrap's processes end with it, podman's have other pipes
            thread.join()
    output, errors = [*(text.decode(errors="replace") for text in kept), ""][:2]
    return Ran(output, errors, code if is_over else None, time.monotonic() - begin)


def _start(argv: Sequence[str | bytes], **pipes: object) -> subprocess.Popen:
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd="/",
        umask=0o022,
        start_new_session=True,
        **pipes,
    )


def _read(pipe: IO[bytes], kept: bytearray) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), MEGABYTE):
            kept += data[: OUTPUT - len(kept)]


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), pipe:  # it ended before it had read all
        pipe.write(data)


def _has_ended(pid: int, seconds: float) -> bool:
    """Tell whether a child ends within so many seconds."""
    ended = os.pidfd_open(pid)
    try:
        waiting = select.poll()  # select() takes no descriptor over 1023
        waiting.register(ended, select.POLLIN)
        return bool(waiting.poll(max(0, 1000 * seconds)))
    finally:
        os.close(ended)


# ---------------------------------------------------------------- one program, by bubblewrap

# As the processor numbers add_key and the two calls behind it, clone, unshare, socket; its name
CALLS = {
    "x86_64": (248, 56, 272, 41, 0xC000003E),
    "aarch64": (217, 220, 97, 198, 0xC00000B7),
    "riscv64": (217, 220, 97, 198, 0xC00000F3),
}
KEYS, CLONE, UNSHARE, SOCKET, PROCESSOR = CALLS.get(os.uname().machine, (0,) * 5)
# Begins a session keyring of its own, for the caller's has secrets, which the kernel itself may
# look up. Nothing is said where the kernel knows no keys, or gives them to nobody
JOIN = ("perl", "-MErrno", "-e", rf"""
syscall({KEYS + 2}, 1, 0) >= 0 || $!{{ENOSYS}} || $!{{EPERM}} or die "no keyring: $!\n";
exec {{$ARGV[0]}} @ARGV or die "$ARGV[0]: $!\n";""", "--")  # fmt: skip


def _filter() -> bytes:
    """Return the program of seccomp(2) that answers, as a kernel without them, calls for what no
    namespace keeps apart: keyrings, sockets to the machine's host, io_uring, which could make such,
    and a user namespace, whose root could mount without bounds."""
    load, equal, least, has, end = 0x20, 0x15, 0x35, 0x45, 0x06
    io_uring_setup, clone3, user_namespace, vsock = 425, 435, 1 << 28, 40
    forbidden = (KEYS, KEYS + 1, KEYS + 2, io_uring_setup, clone3)
    lines = [
        (load, 4, 0, 0), (equal, PROCESSOR, 0, "no"),
        (load, 0, 0, 0), (least, 1 << 30, "no", 0),  # other numbers for the same calls
        *((equal, number, "no", 0) for number in forbidden),
        (equal, CLONE, "flags", 0), (equal, UNSHARE, "flags", 0), (equal, SOCKET, 0, "yes"),
        (load, 16, 0, 0), (equal, vsock, "no", "yes"),
        (load, 16, 0, 0), (has, user_namespace, "no", "yes"),
        (end, 0x7FFF0000, 0, 0), (end, 0x00050000 | errno.ENOSYS, 0, 0),
    ]  # fmt: skip
    places = {"flags": len(lines) - 4, "yes": len(lines) - 2, "no": len(lines) - 1}
    return b"".join(
        struct.pack("=HBBI", code, *(places[x] - at - 1 if x else 0 for x in jumps), operand)
        for at, (code, operand, *jumps) in enumerate(lines)
    )


def confine(
    argv: Sequence[str],
    seconds: float,
    stdin: bytes = b"",
    folders: Sequence[Path] = (),
    memory: int = 4 << 30,
    variables: Mapping[str, str] | None = None,
) -> Ran:
    """Run a program that sees /usr and `folders`, read-only, and writes to 64 MB of /tmp.

    memory: bytes that a process can fill. It has no network, at most 64 processes, and no file
    of more than 64 MB. When it ends all its processes end. Its errors are apart.
    """
    links = ["--dir", "/etc"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if (path := Path("/", name)).is_symlink():
            links += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            links += ["--ro-bind", str(path), str(path)]
    for path in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"):
        links += ["--ro-bind-try", path, path]
    for folder in folders:
        # Folders that bwrap makes on the way to a target would be closed to others
        for parent in reversed(folder.parents[:-1]):
            links += ["--dir", str(parent)]
        links += ["--ro-bind", str(folder), str(folder)]
    if Path("/proc/keys").exists():  # names of keys, which the kernel lists to a user's processes
        links += ["--ro-bind", "/dev/null", "/proc/keys"]
    given = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp",
             "USER": "nobody", "LANG": "C.UTF-8", **(variables or {})}  # fmt: skip
    names = [word for name, value in given.items() for word in ("--setenv", name, value)]
    limits = ["prlimit", "--core=0", "--nproc=64", f"--fsize={64 * MEGABYTE}",
              f"--data={memory}", f"--as={2 * memory}"]  # fmt: skip
    if os.geteuid():
        spaces, dropped = ["--unshare-user", "--disable-userns"], []
    else:
        # Only root could bind folders below /root. A process of uid 0 could write /proc/sys, in
        # bwrap too: the program itself has a uid that nobody has
        uid = str(0x70000000 + secrets.randbelow(1 << 24))
        spaces = []
        dropped = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--inh-caps=-all",
                   "--bounding-set=-all", "--no-new-privs"]  # fmt: skip
    with tempfile.TemporaryFile() as seccomp:
        seccomp.write(_filter())
        seccomp.seek(0)
        return run(
            [
                *JOIN, "choom", "--adjust", "1000", "--",  # the kernel takes it first
                "bwrap", *spaces, "--unshare-pid", "--unshare-net", "--unshare-ipc",
                "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--hostname", "box",
                "--perms", "1777", "--size", str(64 * MEGABYTE), "--tmpfs", "/tmp",
                "--ro-bind", "/usr", "/usr", "--proc", "/proc", *links,
                "--dev", "/dev",
                "--perms", "1777", "--size", str(16 * MEGABYTE), "--tmpfs", "/dev/shm",
                # what would be writable without a bound is read-only
                "--remount-ro", "/dev", "--remount-ro", "/",
                "--seccomp", str(seccomp.fileno()), "--chdir", "/tmp", "--clearenv", *names, "--",
                *limits, *dropped, *argv,
            ],
            seconds, stdin, apart=True, pass_fds=[seccomp.fileno()],
        )  # fmt: skip


# ---------------------------------------------------------------- a whole system, by podman

IDS = 0x60000000  # the first of 65,536 uids and gids of a system, which nobody else has
DISK, MEMORY, PROCESSES = 256 * MEGABYTE, "512m", 128
PODMAN = ["podman", "--runtime", "runc", "--storage-driver", "overlay"]
PROFILE = Path("/usr/share/containers/seccomp.json")  # podman's own, of its package
DENIED = set(
    "add_key request_key keyctl unshare setns clone clone3 ptrace process_vm_readv "
    "process_vm_writev socket socketcall io_uring_setup io_uring_enter io_uring_register bpf "
    "perf_event_open userfaultfd mount umount umount2".split()
)
# In mounts of its own, which end with the last process in it: a disk of bounded size in memory, a
# layer of it over the tree, and what podman would keep on the machine's own disk
DISK_SCRIPT = f"""set -e
disk=$1 tree=$2
shift 2
mount -t tmpfs -o size={DISK},nr_inodes=100k,mode=755 tmpfs "$disk"
cd "$disk"
mkdir upper work root shm
echo box > hostname
touch containerenv
chmod 1777 shm
chown {IDS}:{IDS} upper shm hostname containerenv
mount -t overlay -o "lowerdir=$tree,upperdir=upper,workdir=work" overlay root
exec "$@"
"""
# Pid 1: cannot be killed from inside, takes the orphans, and ends when nobody holds its input
FIRST = '$SIG{CHLD} = "IGNORE"; $| = 1; print "ready\\n"; 1 while <STDIN>'
SUITE = "bookworm"
INCLUDE = "procps,vim-tiny,sudo,cron,zip,unzip,bc"
GET_SYSTEM = "python cli.py data get os-root"


def profile() -> str:
    """Return podman's seccomp profile, narrowed: no keys, no namespaces, sockets of four families,
    no 32-bit calls. Of an argument the lower half counts, as for the kernel."""
    given = json.loads(PROFILE.read_text())

    def allowed(call: str, mask: int, value: int) -> dict:
        argument = {"index": 0, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
        return {"names": [call], "action": "SCMP_ACT_ALLOW", "args": [argument]}

    rules = [rule | {"names": [*filter(lambda name: name not in DENIED, rule["names"])]}
             for rule in given["syscalls"]]  # fmt: skip
    families = (1, 2, 10, 16)  # unix, IPv4, IPv6, netlink
    rules = [rule for rule in rules if rule["names"]]
    rules += [allowed("socket", 0xFFFFFFFF, family) for family in families]
    rules.append(allowed("clone", 0x7E020080, 0))  # without a new namespace
    processors = [entry | {"subArchitectures": []} for entry in given["archMap"]]
    return json.dumps(given | {"archMap": processors, "syscalls": rules})


class System:
    """A Debian system of one's own: what root does in it lasts until `close`, and no longer.

    tree: what `make_system` has made. UserError: it cannot be started.
    """

    def __init__(self, tree: Path | None = None):
        tree = tree or system_folder()
        self.name = f"memagent-{os.getpid()}-{secrets.token_hex(4)}"
        self._folder = tempfile.TemporaryDirectory(prefix="memagent-")
        folder = Path(self._folder.name)
        folder.chmod(0o711)  # the system's root is not ours
        (disk := folder / "disk").mkdir()
        (disk / "root").mkdir()  # beneath the mount: runc enters a folder of this name
        (folder / "seccomp.json").write_text(profile())
        options = [
            "--rm", "-i", "--name", self.name, "--log-driver", "none", "--network", "none",
            "--no-hosts", "--hostname", "box", "--ipc", "private",
            "--memory", MEMORY, "--memory-swap", MEMORY, "--pids-limit", str(PROCESSES),
            "--oom-score-adj", "1000",  # the kernel takes it first
            "--cap-drop", "all",
            "--cap-add", "CHOWN,DAC_OVERRIDE,FOWNER,FSETID,SETUID,SETGID,KILL",
            "--security-opt", "mask=/sys:/proc/kallsyms",
            "--security-opt", f"seccomp={folder / 'seccomp.json'}",
            "--uidmap", f"0:{IDS}:65536", "--gidmap", f"0:{IDS}:65536",
            "--ulimit", "nofile=4096:8192", "--ulimit", "nproc=4096:4096", "--ulimit", "core=0",
            "--ulimit", f"fsize={DISK}",
            "--volume", f"{disk}/shm:/dev/shm", "--volume", f"{disk}/hostname:/etc/hostname",
            "--volume", f"{disk}/containerenv:/run/.containerenv",
        ]  # fmt: skip
        for name, value in ENVIRONMENT.items():
            options += ["--env", f"{name}={value}"]
        self.holder = _start(
            ["unshare", "--mount", "sh", "-c", DISK_SCRIPT, "-", disk, tree,
             *PODMAN, "run", *options, "--rootfs", disk / "root", "perl", "-e", FIRST],
            stdin=subprocess.PIPE,  # its end is ours: the system ends with this process
            stderr=subprocess.PIPE,
        )  # fmt: skip
        clock = threading.Timer(60, os.killpg, (self.holder.pid, signal.SIGKILL))
        clock.start()
        first_line = self.holder.stdout.readline()
        clock.cancel()
        if first_line != b"ready\n":
            self.holder.kill()
            reason = " ".join(self.holder.stderr.read().decode(errors="replace").split())
            self.close()
            reason = clip(reason or "no answer", 300)
            raise UserError(f"No system can be started from {tree} ({reason}).")

    @property
    def is_alive(self) -> bool:
        return self.holder.poll() is None

    def run(self, script: str, seconds: float) -> Ran:
        """Run a bash script of at most 100,000 bytes as root of the system, without input."""
        # a client that is killed leaves the script behind: hence the clock inside
        shell = ["timeout", "-s", "KILL", str(seconds), "bash", "-c"]
        code = script.encode(errors="replace")
        ran = run([*PODMAN, "exec", self.name, *shell, code], seconds + 20)
        if ran.code == 128 + signal.SIGKILL and ran.seconds >= seconds:
            return Ran(ran.output, ran.errors, None, ran.seconds)
        return ran

    def close(self) -> None:
        """End all of the system's processes and wait until they have ended; again is harmless."""
        self.holder.stdin.close()
        try:
            self.holder.wait(20)
        except subprocess.TimeoutExpired:
            _podman("rm", "--force", "--time", "0", self.name)
            self.holder.kill()
            self.holder.wait()
        self.holder.stdout.close()
        self.holder.stderr.close()
        self._folder.cleanup()


def _podman(*words: str) -> str:
    """Return what a command of podman says."""
    return run([*PODMAN, *words], 60, apart=True).output


def system_folder() -> Path:
    """Return the folder of the Debian tree; it need not be there."""
    return cache_folder() / "os-root"


def make_system(say: Callable[[str], None] = print) -> Path:
    """Make the Debian tree that systems are laid over, in the user's cache; return its folder.

    Takes a minute or two, 190 MB and Debian's package servers. One that is there is left as it is.
    UserError: a program or right is missing, the servers cannot be reached, no room.
    """
    from filelock import FileLock, Timeout

    tree = system_folder()
    if tree.exists():
        say(f"{tree} is there.")
        return tree
    require("Making the Debian tree", _programs("mmdebstrap") + _beside_tree())
    new = tree.with_name(f".{tree.name}.new")
    try:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(tree.with_name(f".{tree.name}.lock"), timeout=0):
            say(f"Debian {SUITE} with {INCLUDE} goes to {tree}; this takes a minute or two.")
            shutil.rmtree(new, ignore_errors=True)
            ran = run(
                ["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={INCLUDE}",
                 '--customize-hook=echo box > "$1/etc/hostname"',
                 '--customize-hook=echo 127.0.0.1 localhost box > "$1/etc/hosts"',
                 SUITE, str(new)],
                3600,
            )  # fmt: skip
            if ran.code:
                shutil.rmtree(new, ignore_errors=True)
                lines = ran.output.strip().split("\n")
                errors = [line for line in lines if line.startswith("E:")] or lines[-3:]
                reason = clip(" ".join(errors).strip(" ."), 300)
                raise UserError(f"The Debian tree cannot be made ({reason}).")
            (new / "etc/resolv.conf").unlink(missing_ok=True)
            # its nodes are this machine's, and mounted until mmdebstrap ends
            shutil.rmtree(new / "dev", ignore_errors=True)
            (new / "dev").mkdir()
            _shift(new)
            new.rename(tree)
    except Timeout:
        raise UserError("The Debian tree is being made already: wait until it is there.") from None
    except OSError as error:
        raise UserError(f"The Debian tree cannot be kept in {tree} ({error.strerror}).") from error
    return tree


def _shift(tree: Path) -> None:
    """Give a tree's files to the users of systems, 0 to `IDS` and so on."""
    for path in (tree, *tree.rglob("*")):
        found = path.lstat()
        if found.st_uid < IDS:  # a file of two names is met twice
            os.lchown(path, IDS + found.st_uid, IDS + found.st_gid)
            if not stat.S_ISLNK(found.st_mode):
                path.chmod(stat.S_IMODE(found.st_mode))


# ---------------------------------------------------------------- what is missing


def lacking(system: bool = False) -> list[tuple[str, str]]:
    """Return what is missing to confine programs, or to run systems, and what brings each.

    Both are tried where their parts are there: a kernel or a container may forbid them. [] = ready.
    """
    if sys.platform != "linux":
        return [("Linux", "use a Linux machine")]
    if (
        found := _beside_tree()
        if system
        else _programs("bwrap", "choom", "perl", "prlimit", "setpriv")
    ):
        return found
    try:
        if not system:
            ran = confine(["true"], 10)
            reason = ran.errors if ran.code else ""
        elif not (tree := system_folder()).exists():
            return [("a Debian tree", GET_SYSTEM)]
        elif (owner := tree.stat().st_uid) != IDS:
            what = f"a Debian tree of its own (it is that of uid {owner})"
            return [(what, f"rm -rf {tree} && {GET_SYSTEM}")]
        else:
            System().close()
            reason = ""
    except UserError as error:
        reason = str(error)
    reason = clip(" ".join(reason.split()).strip(" ."), 300)
    allow = (
        "allow user namespaces (sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 "
        "kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000), use another machine, "
        "or docker run --privileged"
    )
    return [(f"namespaces and mounts, which are refused here ({reason})", allow)] if reason else []


def require(what: str, found: Sequence[tuple[str, str]]) -> None:
    """Raise a UserError that tells all that was found missing and what brings it."""
    if found:
        things = ", ".join(thing for thing, _ in found)
        commands = "; ".join(dict.fromkeys(command for _, command in found))
        raise UserError(f"{what} needs {things}: {commands}.")


def _beside_tree() -> list[tuple[str, str]]:
    """Return what systems lack but for their tree. Rootless podman has no limits of memory and
    processes where cgroups are not delegated, so that a system is root's."""
    root = [] if os.geteuid() == 0 else [("root", "use sudo, or a machine where you are root")]
    return _programs("podman", "runc", "unshare") + root


def _programs(*names: str) -> list[tuple[str, str]]:
    missing = [name for name in names if not shutil.which(name, path=ENVIRONMENT["PATH"])]
    packages = " ".join(dict.fromkeys(PACKAGES.get(name, "util-linux") for name in missing))
    return [(name, f"apt-get install --no-install-recommends {packages}") for name in missing]


# ---------------------------------------------------------------- code in a response

BLOCK = re.compile(r"^(`{3,})[ \t]*(\w*)[ \t]*\n(.*?)^\1`*[ \t]*$", re.M | re.S)


def fenced(response: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a response that name one of these languages or none."""
    blocks = BLOCK.finditer(response)
    return [match[3] for match in blocks if match[2].lower() in ("", *languages)]


def fence(code: str, language: str) -> str:
    """Write code as a block that `fenced` returns as it was."""
    longest = max(map(len, re.findall(r"^`{3,}", code, re.M)), default=2)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{code.rstrip()}\n{marks}"
