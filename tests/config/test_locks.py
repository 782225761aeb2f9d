"""A run, a store or a bank has one writer, however that one ends."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from config.errors import UserError
from config.locks import writing

WRITER = (
    "import os, sys; from pathlib import Path; from config.locks import writing\n"
    "with writing(Path({!r}), 'The run a'):\n"
    "    {}\n"
    "    print('held', flush=True); sys.stdin.read()"
)


def writer(path, more="pass"):
    """Start a process that writes a path until it is killed or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER.format(str(path), more)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout.readline() == b"held\n"
    return process


def refused(path, pid):
    words = f"The run a is being written by process {pid} on "
    with pytest.raises(UserError, match=words), writing(path, "The run a"):
        raise AssertionError("two writers")


@pytest.mark.parametrize("there", ["folder", "file", "nothing", "link"])
def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path, there):
    path = other = tmp_path / "a"
    if there == "folder":
        path.mkdir()
    elif there == "file":
        path.touch()
    elif there == "link":  # by whatever name
        other = tmp_path / "b"
        other.symlink_to(path)
    with writer(path) as process:
        refused(other, process.pid)
        refused(other, process.pid)  # whoever was refused has taken nothing away
        process.send_signal(signal.SIGKILL)
        process.wait()
        with writing(other, "The run a"):
            refused(path, os.getpid())  # so is a second writer of the same process
    assert {each.name for each in tmp_path.iterdir()} <= {"a", "b"}  # and nothing stays behind


def test_an_error_ends_it_and_leaves_no_folder_where_nothing_was_written(tmp_path):
    with pytest.raises(KeyError), writing(tmp_path / "runs/b/a", "The run a"):
        os.close(os.open(tmp_path / "runs/b/.a.writing", os.O_RDONLY))  # as one who copies it
        refused(tmp_path / "runs/b/a", os.getpid())
        with writing(tmp_path / "runs/b/c", "Another"):  # another path is another's
            raise KeyError
    assert not [*tmp_path.iterdir()]
    with writing(tmp_path / "runs/a", "The run a"):
        (tmp_path / "runs/a").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_a_child_neither_keeps_it_nor_ends_it(tmp_path):
    left = "if not os.fork(): sys.exit()\n    os.wait()"  # the child has left the block
    with writer(tmp_path / "a", left) as process:
        refused(tmp_path / "a", process.pid)
        process.stdin.close()
    waits = "if os.fork(): signal.pause()"  # and the child says that it is there
    with writer(tmp_path / "a", f"import signal\n    {waits}") as process:
        process.kill()
        os.waitpid(process.pid, 0)
        with writing(tmp_path / "a", "The run a"):
            process.stdin.close()  # it ends now


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_where_files_cannot_be_locked_that_is_said(tmp_path, monkeypatch, capsys, number):
    def unlocked(fd, how):
        raise OSError(number, "No locks available")

    monkeypatch.setattr("fcntl.flock", unlocked)
    with writing(tmp_path / "a", "The run a"):
        (tmp_path / "a").touch()
    assert "No locks available" in capsys.readouterr().out and (tmp_path / "a").exists()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / ".a.writing").symlink_to(tmp_path / "notes")
    with pytest.raises(OSError), writing(tmp_path / "a", "The run a"):
        pass
    assert (tmp_path / "notes").read_text() == "mine"
