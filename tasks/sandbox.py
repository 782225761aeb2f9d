"""Sandboxes: one program shut in, or a whole throw-away Debian system, for what models write.

Holds: `run`, `confine`, `System`, `make_system`, `lacking`, `require`, `fenced`, `fence`.
Leaves out: the tasks (tasks/llb_os.py, tasks/bcb.py).
Exercise it: `pytest tests/tasks/test_sandbox.py`. Read next: tasks/llb_os.py.

Both are made from programs that Debian ships: bubblewrap, perl, uidmap and util-linux. They keep
mistakes in, and what a model tries without knowing where it is: no network, no file, process, key
or setting of the machine can be reached, and nothing is left over. They are no prison for an
attacker, who has the kernel before him as any local user has.

`confine` runs one program with /usr read-only and 64 MB of /tmp. `System` is an overlay of 256 MB
over a Debian tree, with root and 65,536 users of its own:

    [setpriv: an ordinary user]  unshare: his range of ids, root is himself
        mount: tmpfs, overlay    unshare: the same ids again, processes counted here
            bwrap: pid 1         perl: one script after the other

A process of uid 0 could write /proc/sys, in bwrap too. Started by root, a program is therefore run
as a uid that nobody has, a system as the user `memagent-sandbox`. The memory of one process is
limited, and what files may hold; that of all together is not (a program's inodes, memfd, shared
memory): the kernel is told to take them first when it runs out.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import secrets
import select
import selectors
import shutil
import signal
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

USER = "memagent-sandbox"  # as whom root starts systems
MEGABYTE = 1 << 20
OUTPUT = MEGABYTE  # bytes that are kept of what a program says
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "TERM": "dumb",
}
PROGRAM = ("bwrap", "choom", "perl", "prlimit", "setpriv")  # what each takes
SYSTEM = (*PROGRAM, "newuidmap", "newgidmap", "unshare")
PACKAGES = {  # of Debian; util-linux for all others
    "bwrap": "bubblewrap", "newuidmap": "uidmap", "newgidmap": "uidmap", "mmdebstrap": "mmdebstrap",
    "perl": "perl-base",
}  # fmt: skip
# As the processor numbers add_key and the two calls behind it, clone, unshare, socket, setns,
# prctl; its name
CALLS = {
    "x86_64": (248, 56, 272, 41, 308, 157, 0xC000003E),
    "aarch64": (217, 220, 97, 198, 268, 167, 0xC00000B7),
    "riscv64": (217, 220, 97, 198, 268, 167, 0xC00000F3),
}
KEYS, CLONE, UNSHARE, SOCKET, SETNS, PRCTL, PROCESSOR = CALLS.get(os.uname().machine, (0,) * 7)


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


# A session keyring of its own, for the caller's has secrets. It goes first; nothing is said where
# the kernel knows no keys, or gives them to nobody
_JOIN = rf"""
syscall({KEYS + 2}, 1, 0) >= 0 || $!{{ENOSYS}} || $!{{EPERM}} or die "no keyring: $!\n";"""
_NARROW = rf"""
my $filter = pack "H*", "{_filter().hex()}";
my $program = pack "Sx![P]P", length($filter) / 8, $filter;
syscall({PRCTL}, 22, 2, $program) == 0 or die "no filter: $!\n";"""  # PR_SET_SECCOMP
_EXEC = r"""
exec {$ARGV[0]} @ARGV or die "$ARGV[0]: $!\n";"""
PERL = ("perl", "-MErrno", "-e")
# Of bwrap: the names of keys, which the kernel lists to all of a user's processes
PROC = ["--proc", "/proc"]
if Path("/proc/keys").exists():
    PROC += ["--ro-bind", "/dev/null", "/proc/keys"]
_ROOT_INSIDE = ("unshare", "--map-auto", "--map-root-user")
SUITE = "bookworm"
INCLUDE = "procps,vim-tiny,sudo,cron,zip,unzip,bc"
GET_SYSTEM = "python cli.py data get os-root"
ADD_IDS = (
    f"useradd --system --no-create-home --shell /usr/sbin/nologin {USER}, if you are root; then "
    "usermod --add-subuids 1000000-1065535 --add-subgids 1000000-1065535 that user"
)
ALLOW = (
    "allow user namespaces (sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 "
    "kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000), use another machine, or "
    "docker run --privileged"
)


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
    limit: int = OUTPUT,
    apart: bool = False,
) -> Ran:
    """Run a program in a process group of its own, which is killed after so many seconds.

    The call returns when the first process ends: others may go on, and keep the pipes open. What is
    said beyond `limit` bytes is read and forgotten. apart: standard error does not join the output.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        env=ENVIRONMENT,
        cwd="/",
        umask=0o022,
        start_new_session=True,
    )
    pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe]
    outputs = {pipe.fileno(): bytearray() for pipe in pipes}
    is_over = False
    try:
        if stdin:
            threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True).start()
        is_over = _listen(process.pid, outputs, begin + seconds, limit)
    finally:
        if not is_over:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in pipes:
            pipe.close()
    output, errors = [*(text.decode(errors="replace") for text in outputs.values()), ""][:2]
    return Ran(output, errors, code if is_over else None, time.monotonic() - begin)


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), pipe:  # it ended before it had read all
        pipe.write(data)


def _listen(pid: int, outputs: dict[int, bytearray], until: float, limit: int) -> bool:
    """Collect what a process writes to these descriptors; tell whether it ended in time."""
    ended = os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as waiting:
            for pipe in (ended, *outputs):
                waiting.register(pipe, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0:
                ready = {key.fd for key, _ in waiting.select(left)}
                for pipe in outputs.keys() & ready:
                    if not _take(pipe, outputs[pipe], limit):
                        waiting.unregister(pipe)
                if ended in ready:
                    for pipe in outputs:  # what is still in the pipe; it holds no more than 1 MB
                        os.set_blocking(pipe, False)
                        with suppress(BlockingIOError):
                            _take(pipe, outputs[pipe], limit)
                    return True
        return False
    finally:
        os.close(ended)


def _take(pipe: int, output: bytearray, limit: int) -> bool:
    """Read from a pipe once, and keep up to `limit` bytes of all; tell whether it is still open."""
    data = os.read(pipe, MEGABYTE)
    output += data[: limit - len(output)]
    return bool(data)


def _has_ended(process: int, seconds: float = 0) -> bool:
    """Tell whether the process of a descriptor ends within so many seconds."""
    waiting = select.poll()  # select() takes no descriptor over 1023
    waiting.register(process, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


# ---------------------------------------------------------------- one program shut in


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
    given = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp",
             "USER": "nobody", "LANG": "C.UTF-8", **(variables or {})}  # fmt: skip
    names = [word for name, value in given.items() for word in ("--setenv", name, value)]
    limits = ["prlimit", "--core=0", "--nproc=64", f"--fsize={64 * MEGABYTE}",
              f"--data={memory}", f"--as={2 * memory}"]  # fmt: skip
    if os.geteuid():
        spaces, dropped = ["--unshare-user", "--disable-userns"], []
    else:
        # Only root could bind folders below /root; the program itself has a uid that nobody has
        uid = str(0x70000000 + secrets.randbelow(1 << 24))
        spaces = []
        dropped = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--inh-caps=-all",
                   "--bounding-set=-all", "--no-new-privs"]  # fmt: skip
    return run(
        [
            *PERL, _JOIN + _EXEC, "--", "choom", "--adjust", "1000", "--",
            "bwrap", *spaces, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
            "--unshare-cgroup-try", "--die-with-parent", "--hostname", "sandbox",
            "--perms", "1777", "--size", str(64 * MEGABYTE), "--tmpfs", "/tmp",
            "--ro-bind", "/usr", "/usr", *links, *PROC,
            "--dev", "/dev", "--perms", "1777", "--size", str(16 * MEGABYTE), "--tmpfs", "/dev/shm",
            # what would be writable without a bound is read-only
            "--remount-ro", "/dev", "--remount-ro", "/",
            "--chdir", "/tmp", "--clearenv", *names, "--",
            *limits, *dropped, *PERL, _NARROW + _EXEC, "--", *argv,
        ],
        seconds, stdin, apart=True,
    )  # fmt: skip


# ---------------------------------------------------------------- a whole system

# In the first namespaces, in the folder of the tree: "$@" is the second half of the pipeline
_START = """set -e
mount -t tmpfs -o size=256m,nr_inodes=100k,mode=755 tmpfs /media
mkdir /media/upper /media/work /media/root
mkdir -m 1777 /media/shm
layers=lowerdir=.,upperdir=/media/upper,workdir=/media/work
mount -t overlay -o "userxattr,$layers" overlay /media/root
mkfifo /media/up /media/go
prlimit --pid $$ --nproc="$1"
shift
unshare --user true
unshare --user sh -c 'echo > /media/up; read -r _ < /media/go; exec "$@"' - "$@" 3>&1 < /dev/null &
read -r _ < /media/up
printf '0 0 1\\n1 1 65535\\n' > /proc/$!/uid_map
printf '0 0 1\\n1 1 65535\\n' > /proc/$!/gid_map
echo 1 > /proc/sys/user/max_user_namespaces
echo > /media/go
read -r _ || kill -9 $!  # no line: our process has ended
wait
"""
# Joins the namespaces of a process as their root, who cannot mount: there is no further tmpfs. All
# that is run before that is the machine's, for the system's own programs are a model's to replace
_ENTER = rf"""{_JOIN}
my $pid = shift;
my @spaces = map {{
    open(my $space, "<", "/proc/$pid/ns/$_") or die "$_: $!\n"; $space
}} qw(user ipc uts net cgroup pid mnt);
for (@spaces) {{ syscall({SETNS}, fileno($_), 0) == 0 or die "setns: $!\n" }}
chdir "/";
$( = $) = "0 0"; $< = $> = 0;
{_NARROW}
syscall({PRCTL}, 24, 21, 0, 0, 0) == 0 or die "prctl: $!\n";  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
# Until the child is the model's program, no other may trace it, or read its memory and descriptors
syscall({PRCTL}, 4, 0, 0, 0, 0) == 0 or die "prctl: $!\n";  # PR_SET_DUMPABLE
my $child = fork // die "fork: $!\n";
if (!$child) {{ {_EXEC} }}
waitpid $child, 0;
kill $? & 127, $$ if $? & 127;
exit $? >> 8;
"""
# Pid 1: cannot be killed from inside, and takes the orphans
_FIRST = '$SIG{CHLD} = "IGNORE"; print "ready\\n"; close STDOUT; sleep while 1'


class System:
    """A Debian system of one's own: what root does in it lasts until `close`, and no longer.

    `tree` is what `make_system` has made. UserError: it cannot be started.
    """

    def __init__(self, tree: Path | None = None, processes: int = 128):
        tree = tree or system_folder()
        bwrap = [
            "bwrap", "--as-pid-1", "--die-with-parent", "--unshare-pid", "--unshare-net",
            "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", "--hostname", "sandbox",
            "--bind", "/media/root", "/", *PROC, "--dev", "/dev",
            "--bind", "/media/shm", "/dev/shm", "--remount-ro", "/dev",
            "--cap-drop", "CAP_SYS_ADMIN", "--chdir", "/", "--clearenv",
            "--info-fd", "3", "--", *PERL, _NARROW + _FIRST,
        ]  # fmt: skip
        self.closed = False
        self.limits = ["prlimit", "--core=0", f"--nproc={processes}", f"--as={1 << 30}",
                       f"--fsize={256 * MEGABYTE}"]  # fmt: skip
        self.holder = subprocess.Popen(
            [*_drop(), *PERL, _JOIN + _EXEC, "--", "choom", "--adjust", "1000", "--",
             *_ROOT_INSIDE, "--mount",
             "sh", "-c", _START, "-", str(processes), *bwrap],
            stdin=subprocess.PIPE,  # its end is ours: the system ends with this process
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd=tree,  # root's folders may be closed to an ordinary user, who can be in them
            umask=0o022,
            start_new_session=True,
            bufsize=0,
        )  # fmt: skip
        first_lines = self._until_ready()
        if not first_lines.endswith("ready\n"):
            os.killpg(self.holder.pid, signal.SIGKILL)
            reason = " ".join(self.holder.stderr.read().decode(errors="replace").split())
            self._release()
            raise UserError(f"No system can be started from {tree} ({reason or 'no answer'}).")
        self.pid = json.loads(first_lines.removesuffix("ready\n"))["child-pid"]
        self.first = os.pidfd_open(self.pid)

    def _until_ready(self, seconds: float = 20) -> str:
        """Read what bwrap and pid 1 say at the start; what ends too early or late is not ready."""
        clock = threading.Timer(seconds, os.killpg, (self.holder.pid, signal.SIGKILL))
        clock.start()
        try:
            lines = []
            for line in self.holder.stdout:
                lines.append(line.decode(errors="replace"))
                if line == b"ready\n":
                    break
            return "".join(lines)
        finally:
            clock.cancel()

    @property
    def is_alive(self) -> bool:
        return not self.closed and not _has_ended(self.first)

    def run(self, script: str, seconds: float) -> Ran:
        """Run a bash script of at most 100,000 bytes as root of the system, without input."""
        enter = ["choom", "--adjust", "1000", "--", *PERL, _ENTER, "--"]
        shell = ["/bin/bash", "-c", script.encode(errors="replace")]
        return run([*_drop(), *self.limits, *enter, str(self.pid), *shell], seconds)

    def close(self) -> None:
        """End all of the system's processes and wait until they have ended; again is harmless."""
        if self.closed:
            return
        self.closed = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.first, signal.SIGKILL)
        _has_ended(self.first, 10)
        os.close(self.first)
        with suppress(BrokenPipeError):
            self.holder.stdin.write(b"\n")
        try:  # each process takes the exit code of its child: none is left to a far parent
            self.holder.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.holder.pid, signal.SIGKILL)
        self._release()

    def _release(self) -> None:
        self.holder.wait()
        for pipe in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
            pipe.close()


def _drop() -> list[str]:
    """Return the words that make root an ordinary user; none for an ordinary user."""
    if os.geteuid():
        return []
    return ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", "--inh-caps=-all"]


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
    from filelock import FileLock, Timeout

    beside_tree = [part for part in lacking(system=True) if part[1] != GET_SYSTEM]
    require("Making the Debian tree", _programs("mmdebstrap") + beside_tree)
    try:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(tree.with_name(f".{tree.name}.lock"), timeout=0):
            say(f"Debian {SUITE} with {INCLUDE} goes to {tree}; this takes a minute or two.")
            _remove(new := tree.with_name(f".{tree.name}.new"))
            if reason := _unpack(new):
                _remove(new)
                raise UserError(f"The Debian tree cannot be made ({reason}).")
            new.rename(tree)
    except Timeout:
        raise UserError("The Debian tree is being made already: wait until it is there.") from None
    except OSError as error:
        raise UserError(f"The Debian tree cannot be kept in {tree} ({error.strerror}).") from error
    return tree


def _unpack(folder: Path) -> str:
    """Make a folder with the tree in it; return why it could not be done, "" if it was."""
    fetch = [
        "mmdebstrap", "--mode=unshare", "--variant=minbase", f"--include={INCLUDE}",
        "--format=tar", '--customize-hook=echo sandbox > "$1/etc/hostname"',
        '--customize-hook=echo 127.0.0.1 localhost sandbox > "$1/etc/hosts"',
        '--customize-hook=rm -f "$1/etc/resolv.conf"', SUITE, "-",
    ]  # fmt: skip
    unpack = ["tar", "--extract", "--preserve-permissions", "--numeric-owner", "--exclude=./dev/*"]
    environment = {**os.environ, **ENVIRONMENT, "HOME": "/tmp"}
    folder.mkdir()
    if not os.geteuid():
        environment["TMPDIR"] = "/tmp"  # root's own may be closed to others
        shutil.chown(folder, USER, pwd.getpwnam(USER).pw_gid)
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            [*_drop(), *fetch], stdout=subprocess.PIPE, stderr=errors, env=environment, cwd="/"
        ) as fetching:
            unpacking = subprocess.run(
                [*_drop(), *_ROOT_INSIDE, *unpack],
                stdin=fetching.stdout, stderr=errors, env=ENVIRONMENT, cwd=folder, check=False,
            )  # fmt: skip
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().split("\n")
    if not (fetching.returncode or unpacking.returncode):
        return ""
    errors = [line for line in lines if line.startswith(("E:", "tar:", "unshare:"))]
    return clip(" ".join(errors or lines[-3:]).strip(" ."), 300)


def _remove(tree: Path) -> None:
    """Remove a tree whose files belong to users that only its owner's namespace knows."""
    if tree.exists():
        empty = [*_drop(), *_ROOT_INSIDE, "find", ".", "-mindepth", "1", "-delete"]
        subprocess.run(empty, cwd=tree, env=ENVIRONMENT, check=False)
        tree.rmdir()


# ---------------------------------------------------------------- what is missing


def lacking(system: bool = False) -> list[tuple[str, str]]:
    """Return what is missing to confine programs, or to run systems, and what brings each.

    Both are tried where their parts are there: a kernel or a container may forbid them. [] = ready.
    """
    if sys.platform != "linux":
        return [("Linux", "use a Linux machine")]
    found = _programs(*(SYSTEM if system else PROGRAM))
    if system and not _has_ids():
        found.append((f"a user {_user()} with 65,536 ids in /etc/subuid and /etc/subgid", ADD_IDS))
    if found:
        return found
    try:
        ran = confine(["true"], 10)
        reason = ran.errors if ran.code else ""
        if system and not reason:
            if not (tree := system_folder()).exists():
                return [("a Debian tree", GET_SYSTEM)]
            if (owner := tree.stat().st_uid) != pwd.getpwnam(_user()).pw_uid:
                what = f"a Debian tree of this user (it is that of uid {owner})"
                return [(what, f"rm -rf {tree} && {GET_SYSTEM}")]
            System().close()
    except UserError as error:
        reason = str(error)
    reason = clip(" ".join(reason.split()).strip(" ."), 300)
    return [(f"namespaces and mounts, which are refused here ({reason})", ALLOW)] if reason else []


def require(what: str, found: Sequence[tuple[str, str]]) -> None:
    """Raise a UserError that tells all that was found missing and what brings it."""
    if found:
        things = ", ".join(thing for thing, _ in found)
        commands = "; ".join(dict.fromkeys(command for _, command in found))
        raise UserError(f"{what} needs {things}: {commands}.")


def _programs(*names: str) -> list[tuple[str, str]]:
    missing = [name for name in names if not shutil.which(name, path=ENVIRONMENT["PATH"])]
    packages = " ".join(dict.fromkeys(PACKAGES.get(name, "util-linux") for name in missing))
    return [(name, f"apt-get install --no-install-recommends {packages}") for name in missing]


def _user() -> str:
    """Return the name of the user as whom systems run; the number of one without a name."""
    if not os.geteuid():
        return USER
    with suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


def _has_ids() -> bool:
    """Tell whether the user as whom systems run is there, and has a range of 65,536 ids."""
    try:
        names = (_user(), str(pwd.getpwnam(_user()).pw_uid))
        files = [Path(f"/etc/sub{kind}").read_text().split("\n") for kind in ("uid", "gid")]
    except (KeyError, OSError):
        return False

    def is_range(line: str) -> bool:
        parts = line.strip().split(":")
        return len(parts) == 3 and parts[0] in names and int(parts[2]) >= 65535

    return all(any(map(is_range, lines)) for lines in files)


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
