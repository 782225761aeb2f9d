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
        argv, stderr=subprocess.PIPE if apart else subprocess.STDOUT, pass_fds=pass_fds
    )
    pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe]
    kept = [bytearray() for _ in pipes]
    readers = [threading.Thread(target=_read, args=pair) for pair in zip(pipes, kept, strict=True)]
    feeder = threading.Thread(target=_feed, args=(process.stdin, stdin))
    threads = [*readers, feeder]
    code = None
    try:
        for thread in threads:
            thread.daemon = True
            thread.start()
        for thread in readers:  # bwrap's processes end with it, podman's have other pipes
            thread.join(begin + seconds - time.monotonic())
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(max(0, begin + seconds - time.monotonic()))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for thread in threads:
            thread.join()
    output, errors = [*(text.decode(errors="replace") for text in kept), ""][:2]
    return Ran(output, errors, code, time.monotonic() - begin)


def _start(argv: Sequence[str | bytes], **pipes: object) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | pipes
    place = {"env": ENVIRONMENT, "cwd": "/", "umask": 0o022, "start_new_session": True}
    return subprocess.Popen(argv, **place, **pipes)


def _read(pipe: IO[bytes], kept: bytearray) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), MEGABYTE):
            kept += data[: OUTPUT - len(kept)]


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), pipe:  # it ended before it had read all
        pipe.write(data)


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
    variables: Mapping[str, str] = {},
) -> Ran:
    """Run a program that sees /usr and `folders`, read-only, and writes to 64 MB of /tmp.

    It has no network, at most 64 processes of 4 GB each, and no file of more than 64 MB. When it
    ends all its processes end. Its errors are apart.
    """
    seen = ["--ro-bind", "/usr", "/usr", "--dir", "/etc"]
    for path in (Path("/", name) for name in ("bin", "sbin", "lib", "lib32", "lib64")):
        if path.is_symlink():
            seen += ["--symlink", path.readlink(), path]
        else:
            seen += ["--ro-bind-try", path, path]
    for path in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"):
        seen += ["--ro-bind-try", path, path]
    for folder in folders:
        # folders that bwrap makes on the way to a target would be closed to others
        seen += [word for parent in reversed(folder.parents[:-1]) for word in ("--dir", parent)]
        seen += ["--ro-bind", folder, folder]
    if Path("/proc/keys").exists():  # names of keys, which the kernel lists to a user's processes
        seen += ["--ro-bind", "/dev/null", "/proc/keys"]
    names = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp",
             "USER": "nobody", "LANG": "C.UTF-8", **variables}  # fmt: skip
    given = [word for name, value in names.items() for word in ("--setenv", name, value)]
    limits = ["prlimit", "--core=0", "--nproc=64", f"--fsize={64 * MEGABYTE}",
              f"--data={4 << 30}", f"--as={8 << 30}"]  # fmt: skip
    spaces, dropped = ["--unshare-user", "--disable-userns"], []
    if os.geteuid() == 0:
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
                "--proc", "/proc", *seen, "--dev", "/dev",
                "--perms", "1777", "--size", str(16 * MEGABYTE), "--tmpfs", "/dev/shm",
                # what would be writable without a bound is read-only
                "--remount-ro", "/dev", "--remount-ro", "/",
                "--seccomp", str(seccomp.fileno()), "--chdir", "/tmp", "--clearenv", *given, "--",
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
OPTIONS = f"""
--rm -i --log-driver none --network none --no-hosts --hostname box --ipc private
--memory {MEMORY} --memory-swap {MEMORY} --pids-limit {PROCESSES} --oom-score-adj 1000
--cap-drop all --cap-add CHOWN,DAC_OVERRIDE,FOWNER,FSETID,SETUID,SETGID,KILL
--security-opt mask=/sys:/proc/kallsyms --uidmap 0:{IDS}:65536 --gidmap 0:{IDS}:65536
--ulimit nofile=4096:8192 --ulimit nproc=4096:4096 --ulimit core=0 --ulimit fsize={DISK}
""".split()
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
        disk, seccomp = folder / "disk", folder / "seccomp.json"
        (disk / "root").mkdir(parents=True)  # beneath the mount: runc enters a folder of this name
        seccomp.write_text(profile())
        options = [*OPTIONS, "--name", self.name, "--security-opt", f"seccomp={seccomp}"]
        for made, place in (
            ("shm", "/dev/shm"), ("hostname", "/etc/hostname"),
            ("containerenv", "/run/.containerenv"),
        ):  # fmt: skip
            options += ["--volume", f"{disk}/{made}:{place}"]
        for name, value in ENVIRONMENT.items():
            options += ["--env", f"{name}={value}"]
        self.holder = _start(  # the end of its input is ours: the system ends with this process
            ["unshare", "--mount", "sh", "-c", DISK_SCRIPT, "-", disk, tree,
             *PODMAN, "run", *options, "--rootfs", disk / "root", "perl", "-e", FIRST],
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
            run([*PODMAN, "rm", "--force", "--time", "0", self.name], 60)
            self.holder.kill()
            self.holder.wait()
        self.holder.stdout.close()
        self.holder.stderr.close()
        self._folder.cleanup()


def system_folder() -> Path:
    """Return the folder of the Debian tree; it need not be there."""
    return cache_folder() / "os-root"


def make_system(say: Callable[[str], None] = print) -> Path:
    """Make the Debian tree that systems are laid over, in the user's cache; return its folder.

    Takes a minute or two, 190 MB and Debian's package servers. One that is there is left as it is.
    UserError: a program or right is missing, the servers cannot be reached, no room.
    """
    tree = system_folder()
    if tree.exists():
        say(f"{tree} is there.")
        return tree
    require("Making the Debian tree", _missing("mmdebstrap", *BESIDE_TREE) + _root())
    say(f"Debian {SUITE} with {INCLUDE} goes to {tree}; this takes a minute or two.")
    try:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent, prefix=".os-root-") as folder:
            Path(folder).chmod(0o755)  # apt has a user of its own
            new = Path(folder, "root")
            ran = run(
                ["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={INCLUDE}",
                 '--customize-hook=echo box > "$1/etc/hostname"',
                 '--customize-hook=echo 127.0.0.1 localhost box > "$1/etc/hosts"', SUITE, new],
                3600,
            )  # fmt: skip
            if ran.code:
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

BESIDE_TREE = ("podman", "runc", "unshare")


def lacking(system: bool = False) -> list[tuple[str, str]]:
    """Return what is missing to confine programs, or to run systems, and what brings each.

    Both are tried where their parts are there: a kernel or a container may forbid them. [] = ready.
    """
    if sys.platform != "linux":
        return [("Linux", "use a Linux machine")]
    if system:
        found, tree = _missing(*BESIDE_TREE) + _root(), system_folder()
        if not found and not (tree.exists() and tree.stat().st_uid == IDS):
            found = [("a Debian tree of its own", f"rm -rf {tree} && {GET_SYSTEM}")]
    else:
        found = _missing("bwrap", "choom", "perl", "prlimit", "setpriv")
    if found:
        return found
    try:
        if system:
            System().close()
            return []
        ran = confine(["true"], 10)
        reason = ran.errors if ran.code else ""
    except UserError as error:
        reason = str(error)
    reason = clip(" ".join(reason.split()).strip(" ."), 300)
    allow = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or use another machine"
    return [(f"namespaces and mounts, which are refused here ({reason})", allow)] if reason else []


def require(what: str, found: Sequence[tuple[str, str]]) -> None:
    """Raise a UserError that tells all that was found missing and what brings it."""
    if found:
        things = ", ".join(thing for thing, _ in found)
        commands = "; ".join(dict.fromkeys(command for _, command in found))
        raise UserError(f"{what} needs {things}: {commands}.")


def _root() -> list[tuple[str, str]]:
    # rootless podman has no limits of memory and processes where cgroups are not delegated
    return [("root", "use sudo, or a machine where you are root")] if os.geteuid() else []


def _missing(*programs: str) -> list[tuple[str, str]]:
    """Return those programs that are not there, with the command that brings them."""
    missing = [name for name in programs if not shutil.which(name, path=ENVIRONMENT["PATH"])]
    packages = {"bwrap": "bubblewrap", "perl": "perl-base"}
    packages |= {name: name for name in ("mmdebstrap", "podman", "runc")}
    wanted = " ".join(dict.fromkeys(packages.get(name, "util-linux") for name in missing))
    return [(name, f"apt-get install --no-install-recommends {wanted}") for name in missing]


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
