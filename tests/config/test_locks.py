"""A run, a store or a bank has one writer, however that one ends."""

import errno
import os
import signal
from contextlib import contextmanager

import pytest
from conftest import HANG_S

from config.errors import UserError
from config.locks import is_written, writing


@contextmanager
def writer(path, inside=lambda: None):
    """A process that writes a path until it is killed or the block ends."""
    held, ending = os.pipe(), os.pipe()
    if not (child := os.fork()):
        try:
            os.close(ending[1])
            with writing(path, "The run a"):
                inside()
                os.write(held[1], b"x")
                os.read(ending[0], 1)
        finally:
            os._exit(0)
    os.close(held[1])
    assert os.read(held[0], 1)
    try:
        yield child
    finally:
        os.close(ending[1])


def refuse(path, pid):
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
    with writer(path) as child:
        refuse(other, child)
        refuse(other, child)  # whoever was refused has taken nothing away
        assert is_written(other) and not is_written(tmp_path / "c")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert not is_written(other)
        with writing(other, "The run a"):
            refuse(path, os.getpid())  # so is a second writer of the same process
    assert {each.name for each in tmp_path.iterdir()} <= {"a", "b"}  # and nothing stays behind


def test_an_error_ends_it_and_leaves_no_folder_where_nothing_was_written(tmp_path):
    with pytest.raises(KeyError), writing(tmp_path / "runs/b/a", "The run a"):
        os.close(os.open(tmp_path / "runs/b/.a.writing", os.O_RDONLY))  # as one who copies it
        refuse(tmp_path / "runs/b/a", os.getpid())
        with writing(tmp_path / "runs/b/c", "Another"):  # another path is another's
            raise KeyError
    assert not [*tmp_path.iterdir()]
    with writing(tmp_path / "runs/a", "The run a"):
        (tmp_path / "runs/a").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_a_forked_child_neither_keeps_it_nor_ends_it(tmp_path):
    said = os.pipe()

    def leave():  # a child leaves the block, and another one stays in it
        for stays in (False, True):
            if not (child := os.fork()):
                if stays:
                    signal.alarm(int(HANG_S))  # nothing is left behind where this test fails
                    os.write(said[1], os.getpid().to_bytes(8))
                    signal.pause()
                raise SystemExit
            if not stays:
                os.waitpid(child, 0)

    with writer(tmp_path / "a", leave) as child:
        refuse(tmp_path / "a", child)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with writing(tmp_path / "a", "The run a"):
            os.kill(int.from_bytes(os.read(said[0], 8)), signal.SIGKILL)


def test_where_files_cannot_be_locked_a_line_says_so(tmp_path, monkeypatch, capsys):
    def unlocked(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

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
