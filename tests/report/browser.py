"""Chromium without a window, driven over a pipe: what a page draws, says and does.

with Browser() as browser:
    page = browser.open(path.as_uri(), width=390, dark=True)
    page.ask("document.title")
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"
)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "about:blank"),
)
# The browser reads commands from descriptor 3 and answers on 4.
_AS_3_AND_4 = """
import fcntl, os, sys
high = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 50) for each in sys.argv[1:3]]
for source, target in zip(high, (3, 4)):
    os.dup2(source, target, inheritable=True)
    os.close(source)
os.execv(sys.argv[3], sys.argv[3:])
"""
_SECONDS = 60.0


class Browser:
    """One browser process, with a new profile."""

    def __enter__(self) -> "Browser":
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        own_read, its_write = os.pipe()
        its_read, own_write = os.pipe()
        command = [sys.executable, "-c", _AS_3_AND_4, str(its_read), str(its_write), str(CHROMIUM)]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}", *_FLAGS],
            pass_fds=(its_read, its_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_read)
        os.close(its_write)
        self._read, self._write = own_read, own_write
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {} if session is None else {"sessionId": session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _SECONDS
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._read, 2**20)
            assert got, "the browser has ended"
            self._rest += got
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=address)
        page.wait("document.readyState === 'complete' && document.querySelector('h1, h2') !== null")
        page.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        return page


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def ask(self, expression: str) -> Any:
        """The value of an expression, or of its promise."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not self.ask(f"Boolean({expression})"):
            assert time.monotonic() < end, f"not in {seconds} s: {expression}"
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.ask(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)"
        )
        return found

    def point(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """A place on an element, scrolled into view."""
        box = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x, b.y, b.width, b.height]; })()"
        )
        return box[0] + across * box[2], box[1] + down * box[3]

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def errors(self) -> list[str]:
        """What the console says is wrong, with exceptions."""
        self.ask("1")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params, method = event.get("params", {}), event.get("method")
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
        return found

    def picture(self, path: Path) -> None:
        """The whole page."""
        data = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, format="png", clip=self._whole()
        )
        path.write_bytes(base64.b64decode(data["data"]))

    def _whole(self) -> dict[str, Any]:
        width, height = self.ask(
            "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        return {"x": 0, "y": 0, "width": width, "height": min(height, 16000), "scale": 1}


def measure(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start
