"""Settings that come with data: model folders and runs of strangers, made by functions.

Each names code that leaves a mark when it is imported, or an address that notes who asks.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from config.options import EMBEDDED

CODE = """\
import pathlib
pathlib.Path({mark!r}).write_text("run")
from agents.baselines import Full
from lightning.pytorch.loggers import CSVLogger
from tasks import worlds


class Mine(Full):
    pass


AGENT = Mine


class Logger(CSVLogger):
    pass


def reward(trajectory):
    return 1.0


def tasks():
    return [worlds.make_task(k, 2, "one_fact") for k in range(4)]
"""


def code(path: Path) -> Path:
    """Write a Python file that any place for code would take; return the mark that it leaves."""
    mark = path.absolute().with_suffix(".mark")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CODE.format(mark=str(mark)))
    return mark


def model(folder: Path, **sections: dict) -> Path:
    """Make a model's folder whose agent.yaml has these sections, with the embedded weights."""
    shutil.copytree(EMBEDDED, folder)
    settings = yaml.safe_load((folder / "agent.yaml").read_text())
    for name, fields in sections.items():
        settings[name] = settings.get(name, {}) | fields
    (folder / "agent.yaml").write_text(yaml.safe_dump(settings))
    return folder


def run(folder: Path, **sections: dict) -> Path:
    """Make a run's folder with a checkpoint, as far as settings are read before it."""
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    return folder


@contextmanager
def listener():
    """Listen on an address; yield its URL and the list of keys that it was asked with."""
    keys: list[str | None] = []

    class Asked(BaseHTTPRequestHandler):
        def do_GET(self):
            keys.append(self.headers["Authorization"])
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", keys
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
