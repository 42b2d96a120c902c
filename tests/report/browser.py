"""Headless Chromium over its debugging pipe: open a page, ask it questions, take pictures. Standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 60.0


def find() -> str | None:
    """The browser's path, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page. Events that it sends are kept in `events`."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process, self._to, self._back = process, to, back
        self._number, self._rest, self.events = 0, b"", []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(time.monotonic() + LIMIT_S)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.send(method, self.session, **parameters)

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._back, 1 << 20)
            assert piece, f"the browser ended with {self.process.poll()}"
            self._rest += piece
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, file: Path, *, width: int, height: int = 844, dark: bool = False) -> None:
        """Loads a file at a width in CSS pixels, on a light or dark system."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2,
                 mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=file.resolve().as_uri())
        end = time.monotonic() + LIMIT_S
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read(end)

    def evaluate(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors and warnings of its console."""
        found = [e["params"]["entry"]["text"] for e in self.events if e["method"] == "Log.entryAdded"]
        found += [str(e["params"]) for e in self.events
                  if e["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")]  # fmt: skip
        return found

    def picture(self, file: Path) -> Path:
        """The whole page as a PNG."""
        answer = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))
        return file


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, ended and removed afterwards."""
    path = find()
    assert path is not None
    read_commands, to = os.pipe()
    back, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ridgeline-browser-", ignore_cleanup_errors=True) as profile:
        command = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
                   f"--user-data-dir={profile}", "--remote-debugging-pipe"]  # fmt: skip
        process = subprocess.Popen(
            # the protocol is spoken over file descriptors 3 and 4
            ["bash", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_answers}', "bash", *command],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Browser(process, to, back)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to)
            os.close(back)
