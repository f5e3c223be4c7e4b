"""Headless Chromium, spoken to over a pipe in its DevTools protocol: no driver and no library are needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXECUTABLE = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MISSING = "there is no Chromium: install the Debian package 'chromium' (apt-get install chromium)"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "about:blank",
)
SECONDS = 30.0
"""How long to wait for anything: a machine may be slow, and a page must not hang."""


# The browser reads from file descriptor 3, and writes to 4.
_REDIRECT = """
import fcntl, os, sys
source, target = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(source, 3), os.dup2(target, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab. `evaluate` runs JavaScript in it; `problems` has what it wrote to the console, threw, or asked of the
    network."""

    def __init__(self, folder: Path) -> None:
        assert EXECUTABLE is not None, MISSING
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        command = [EXECUTABLE, *FLAGS[:-1], f"--user-data-dir={folder}", FLAGS[-1]]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _REDIRECT, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._rest = b""
        self._session = ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)  # it ends when its pipe does
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    # ---- the protocol

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:2000])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("file:", "data:", "blob:")):
                self.problems.append(f"it asked for {params['request']['url']}")

    # ---- a page

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("document.body && document.body.dataset.ready")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            value = self.evaluate(f"((value) => value instanceof Node ? true : value)({expression})")
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"never true: {expression}; {self.problems}")

    def click(self, selector: str) -> None:
        self.evaluate(
            f"document.querySelector({json.dumps(selector)}).dispatchEvent(new MouseEvent('click', {{bubbles: true}}))"
        )

    def type(self, selector: str, text: str) -> None:
        """Put text into a field, as if it had been typed."""
        self._fill(selector, text, "input")

    def choose(self, selector: str, value: str) -> None:
        """Choose from a list, or fill in a field and leave it."""
        self._fill(selector, value, "change")

    def _fill(self, selector: str, value: str, event: str) -> None:
        field = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('{event}'))")

    def size(self, width: int, height: int, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
