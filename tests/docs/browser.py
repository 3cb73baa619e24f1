"""Headless Chromium over the DevTools protocol, without a library: open pages, run JavaScript.

    python -m tests.docs.browser

Prints a line where there is no Chromium: `make site-check` ends with it.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

ABSENT = "NO PAGE WAS LOOKED AT: this machine has no Chromium"


class Browser:
    """Drives one tab of a browser; `errors` lists console errors and exceptions of its pages."""

    def __enter__(self) -> Browser:
        assert BROWSER
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command = [BROWSER, *flags, f"--user-data-dir={self.folder.name}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
        told = Path(self.folder.name) / "DevToolsActivePort"
        deadline = time.monotonic() + 120
        while not (told.exists() and "\n" in told.read_text()):
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.1)
        port = int(told.read_text().split()[0])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            tab = next(one for one in json.load(answer) if one["type"] == "page")
        path = tab["webSocketDebuggerUrl"].split(str(port))[1]
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.stream = self.socket.makefile("rb")
        while self.stream.readline() != b"\r\n":
            pass
        self.numbers, self.errors, self.events = itertools.count(1), [], []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a DevTools method."""
        number = next(self.numbers)
        self._send(json.dumps({"id": number, "method": method, "params": params}))
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path | str, width: int, scheme: str = "light") -> None:
        """Open a file or an address in a window of this width, and wait until it is loaded."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        while "Page.loadEventFired" not in self.events:
            self._next()

    def run(self, code: str) -> Any:
        """Return the value of a JavaScript expression."""
        given = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=code, **given)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """Return a PNG of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def press(self, key: str) -> None:
        """Press a key on what has the focus."""
        codes = {"ArrowRight": 39, "End": 35, "Home": 36, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            names = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            self.call("Input.dispatchKeyEvent", type=kind, **names)

    def overflow(self) -> int:
        """Return the pixels by which the page is wider than its window."""
        wider = "document.documentElement.scrollWidth - window.innerWidth"
        drawn = f"new Promise(r => requestAnimationFrame(() => setTimeout(() => r({wider}))))"
        return self.run(drawn)  # once the page is laid out

    def _send(self, text: str) -> None:
        data = text.encode()
        size = len(data)
        head = struct.pack("!BB", 0x81, 0x80 | size) if size < 126 else None
        head = head or struct.pack("!BBH", 0x81, 0xFE, size)  # masked with zeros
        self.socket.sendall(head + bytes(4) + data)

    def _next(self) -> dict[str, Any]:
        """Return the next message; note errors of the page, and events by name."""
        data = b""
        while True:
            first, size = self.stream.read(2)
            if size == 126:
                (size,) = struct.unpack("!H", self.stream.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self.stream.read(8))
            data += self.stream.read(size)
            if first & 0x80:
                break
        message = json.loads(data)
        name, given = message.get("method", ""), message.get("params", {})
        self.events.append(name)
        wrong = (
            name == "Runtime.exceptionThrown",
            name == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"),
            name == "Log.entryAdded" and given["entry"]["level"] == "error",
        )
        if any(wrong):
            self.errors.append(str(given))
        return message


if __name__ == "__main__" and not BROWSER:
    print(f"\n{ABSENT}")
