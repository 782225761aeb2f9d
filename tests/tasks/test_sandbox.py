"""Sandboxes, as far as no sandbox is needed: filters, what is missing, a clock, code in responses.

What programs and systems try is in real_sandbox.py.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct

import pytest
from conftest import HANG_S
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from tasks import sandbox
from tasks.sandbox import CLONE, KEYS, PROCESSOR, SOCKET, UNSHARE, fence, fenced, lacking

NONE, WELL = 0x00050000 | errno.ENOSYS, 0x7FFF0000
CLONE3, URING, NEW_USER, VSOCK, INET = 435, 425, 0x10000000, 40, 2


def answer(call: int, first: int, processor: int) -> int:
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


@pytest.mark.parametrize(
    ("call", "first", "said"),
    [
        *((call, 0, NONE) for call in (KEYS, KEYS + 1, KEYS + 2, URING, CLONE3)),
        *((call, NEW_USER | more, NONE) for call in (CLONE, UNSHARE) for more in (0, 17, 1 << 32)),
        (SOCKET, VSOCK, NONE), (SOCKET, VSOCK | 1 << 32, NONE),
        (CLONE, 0x20011, WELL), (UNSHARE, 0x20011, WELL), (SOCKET, INET, WELL),
        (0, VSOCK, WELL), (0, NEW_USER, WELL), (URING - 1, 0, WELL),
    ],
)  # fmt: skip
def test_the_filter_answers_as_a_kernel_without_such_calls(call, first, said):
    """Those of other processors too, and those of 32 bits, under which the same calls go."""
    assert answer(call, first, PROCESSOR) == said
    assert answer(call, first, 0x40000003) == answer(call | 1 << 30, first, PROCESSOR) == NONE


def test_podmans_profile_is_narrowed(tmp_path, monkeypatch):
    given = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "archMap": [{"architecture": "A", "subArchitectures": ["B"]}],
        "syscalls": [
            {"names": ["read", "keyctl", "clone"], "action": "SCMP_ACT_ALLOW", "args": []},
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": []},
        ],
    }
    (path := tmp_path / "seccomp.json").write_text(json.dumps(given))
    monkeypatch.setattr(sandbox, "PROFILE", path)
    found = json.loads(sandbox.profile())
    assert found["archMap"] == [{"architecture": "A", "subArchitectures": []}]
    allowed = [
        (*rule["names"], *(a["valueTwo"] for a in rule["args"])) for rule in found["syscalls"]
    ]
    assert allowed == [("read",), ("socket", 1), ("socket", 2), ("socket", 10), ("socket", 16),
                       ("clone", 0)]  # fmt: skip
    masks = {rule["args"][0]["value"] for rule in found["syscalls"] if rule["args"]}
    assert masks == {0xFFFFFFFF, 0x7E020080}  # all namespaces, time's too


@pytest.mark.parametrize(("system", "user", "there", "missing"), [
    (False, 0, "", "bwrap choom perl prlimit setpriv"), (True, 0, "", "podman runc unshare"),
    (True, 1000, "podman runc unshare", "root"), (True, 0, "podman unshare", "runc"),
])  # fmt: skip
def test_each_missing_part_comes_with_its_command(monkeypatch, system, user, there, missing):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: name in there.split() or None)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = lacking(system)
    assert [what for what, _ in found] == missing.split() and all(command for _, command in found)
    with pytest.raises(UserError, match=f"^it needs {missing.split()[0]}") as refused:
        sandbox.require("it", found)
    assert str(refused.value).count("apt-get install") == (missing != "root")
    sandbox.require("it", [])


def test_a_kernel_that_refuses_is_told_and_a_program_begins_with_a_keyring(monkeypatch):
    """What the kernel looks up in the caller's is answered by no filter."""
    monkeypatch.setattr(sandbox, "_missing", lambda *names: [])
    ran = []
    refusal = sandbox.Ran("", "bwrap: No permissions.\n", 1, 0.0)
    monkeypatch.setattr(sandbox, "run", lambda argv, *_, **__: ran.append(argv) or refusal)
    ((what, command),) = lacking()
    assert "bwrap: No permissions" in what and "sysctl" in command
    assert tuple(ran[0][: len(sandbox.JOIN)]) == sandbox.JOIN


@pytest.mark.parametrize(("words", "stdin", "apart", "output", "errors", "code"), [
    (["head", "-c", "5"], b"x" * 3_000_000, False, "xxxxx", "", 0),
    (["wc", "-c"], b"x" * 3_000_000, False, "3000000\n", "", 0),
    (["head", "-c", "3000000", "/dev/zero"], b"", False, "\0" * sandbox.OUTPUT, "", 0),
    (["sh", "-c", "echo out; echo err >&2; kill -9 $$"], b"", True, "out\n", "err\n", -9),
    (["sh", "-c", "echo out; echo err >&2"], b"", False, "out\nerr\n", "", 0),
    (["sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 7"], b"", False, "", "", 7),
    (["sh", "-c", "pwd; umask; env | sort"], b"", False,
     f"/\n0022\nHOME=/root\nPATH={sandbox.ENVIRONMENT['PATH']}\nPWD=/\nTERM=dumb\n", "", 0),
    (["printf", r"\377"], b"", False, "�", "", 0),
])  # fmt: skip
def test_what_a_program_leaves(words, stdin, apart, output, errors, code):
    ran = sandbox.run(words, HANG_S, stdin, apart)
    assert (ran.output, ran.errors, ran.code) == (output, errors, code)


def test_a_program_is_ended_at_its_limit():
    ran = sandbox.run(["sh", "-c", "echo first; sleep 3600 & wait"], 1.0)
    assert (ran.output, ran.code) == ("first\n", None) and ran.seconds >= 1


@pytest.mark.parametrize(("response", "blocks"), [
    ("Say:\n```bash\nls\n```\nand\n```\nid\n```\n", ["ls\n", "id\n"]),
    ("```BASH\nls\n```", ["ls\n"]), ("```python\nx\n```", []), ("```bash\nls", []),
])  # fmt: skip
def test_blocks_of_a_response(response, blocks):
    assert fenced(response, "bash") == blocks


@given(st.text(st.sampled_from("a`~# \n"), min_size=1))
def test_a_fence_holds_any_code(text):
    code = f"a{text}".rstrip()  # it begins with no mark of its own
    assert fenced(f"so\n{fence(code, 'bash')}\n", "bash") == [code + "\n"]
