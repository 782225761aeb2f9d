"""Drive a headless Chromium over a pipe, by its DevTools protocol: JSON messages, ended by NUL."""

import json
import os
import select
import shutil
import subprocess
import time
from fcntl import F_DUPFD, fcntl
from itertools import count
from pathlib import Path

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
TIMEOUT_S = 60


class Chromium:
    """A browser with a profile of its own."""

    def __init__(self, profile: Path):
        flags = ["--headless=new", "--no-first-run", "--disable-gpu", "--hide-scrollbars",
                 "--remote-debugging-pipe"]  # fmt: skip
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # which Chromium demands of root
        (theirs_in, self.out), (self.inp, theirs_out) = os.pipe(), os.pipe()

        def attach() -> None:  # it reads from 3 and writes to 4
            a, b = (fcntl(end, F_DUPFD, 10) for end in (theirs_in, theirs_out))
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [BINARY, *flags, f"--user-data-dir={profile}", "about:blank"],
            close_fds=False, preexec_fn=attach, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.numbers, self.buffer, self.pages = count(1), b"", {}

    def call(self, method: str, session: str = "", **params) -> dict:
        """Call a method and return its result. Events that come meanwhile go to their pages."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        raw = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while raw:
            raw = raw[os.write(self.out, raw) :]
        while (answer := self.next()).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def next(self) -> dict:
        """Return the next message, after handing it to the page it is about."""
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self.buffer:
            if not select.select([self.inp], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium says nothing")
            if not (part := os.read(self.inp, 1 << 20)):
                raise EOFError("Chromium has ended")
            self.buffer += part
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(raw)
        if page := self.pages.get(message.get("sessionId")):
            page.hear(message.get("method"), message.get("params", {}))
        return message

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(TIMEOUT_S)
        os.close(self.inp)
        os.close(self.out)


class Page:
    """A tab."""

    def __init__(self, browser: Chromium, url: str, width: int = 1400, dark: bool = False):
        self.browser, self.problems, self.loaded = browser, [], False
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)
        self.session = attached["sessionId"]
        browser.pages[self.session] = self
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        while not self.loaded:
            browser.next()

    def call(self, method: str, **params) -> dict:
        return self.browser.call(method, self.session, **params)

    def hear(self, method: str | None, params: dict) -> None:
        """Note an event: that the page is loaded, or what its console shows as an error."""
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def run(self, expression: str):
        """Return the value of JavaScript, of a promise what it comes to."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
