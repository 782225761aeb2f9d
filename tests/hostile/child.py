"""What is hostile is met in a forked child, whose memory and processor time are limited: where a
guard is missing it is ended, on any machine, and nothing here looks at a clock."""

import faulthandler
import gc
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from conftest import HANG_S

from config.errors import UserError
from config.options import EMBEDDED

LIGHT, HEAVY = 1 << 30, 8 << 30  # bytes of address space; libraries of models reserve gigabytes


@pytest.fixture(scope="module", autouse=True)
def imported(tried_here):
    """What models need is imported here, once; each child would import it anew."""
    from models.load import load_model
    from tokens.codec import Codec

    Codec.load(EMBEDDED)
    load_model(EMBEDDED, "float32", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tried_here.items():
            patch.setattr(f"tokens.chat_templates.{name}", value)
        yield


@pytest.fixture
def a_second(monkeypatch):
    """Let what costs much take a second of a processor: it would take any other time, too."""
    monkeypatch.setattr("tokens.chat_templates.SECONDS", 1)


def in_child(function: Callable[[], str], memory: int = LIGHT, seconds: int = 120) -> str:
    """Return what a function returns in a child, which may take so many bytes more than it begins
    with, and so many seconds of a processor; its exception, as Python writes it; "" if it was
    ended."""
    begun = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(read)
            faulthandler.disable()  # what ends here is meant to
            gc.disable()  # nothing is ended that waits for a thread, which a child does not have
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(HANG_S))  # ends what waits for ever, and judges no speed
            resource.setrlimit(resource.RLIMIT_AS, (begun + memory, begun + memory))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            answer = function() or "nothing is said"
        except BaseException as error:
            answer = repr(error)[:300]
        with os.fdopen(write, "wb") as pipe:
            pipe.write(answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def sentences(
    function: Callable[[str], object], paths: Mapping[str, Path], memory: int = LIGHT, seconds=60
) -> dict[str, str]:
    """Return what is said of each path, by its name: the sentence of a UserError, else "taken"."""

    def tell() -> str:
        found = {}
        for name, path in paths.items():
            try:
                function(str(path))
                found[name] = "taken"
            except UserError as error:
                found[name] = str(error)
        return json.dumps(found)

    answer = in_child(tell, memory, seconds)
    assert answer.startswith("{"), f"the child has ended: {answer}"
    return json.loads(answer)


def refused(
    function: Callable[[str], object], paths: Mapping[str, Path], words: str = "", *limits: int
) -> dict[str, str]:
    """Check that each path is refused by one sentence, which names it and holds the words."""
    found = sentences(function, paths, *limits)
    for name, sentence in found.items():
        assert str(paths[name]) in sentence and words in sentence, (name, sentence)
        assert sentence.endswith(".") and "\n" not in sentence, (name, sentence)
    return found


def written(folder: Path, files: Mapping[str, str | bytes], ending: str) -> dict[str, Path]:
    """Write files; return their paths by name."""
    paths = {}
    for name, content in files.items():
        paths[name] = folder / f"{name.replace(' ', '-')}{ending}"
        paths[name].write_bytes(content.encode() if isinstance(content, str) else content)
    return paths
