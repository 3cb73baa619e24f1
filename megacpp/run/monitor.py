"""Health endpoint of a run: `/status` as JSON and `/metrics` for Prometheus, from rank 0.

It listens on the loopback address unless `run.monitor` names another one. Then each request needs
the token in RUN/monitor.token: `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megacpp.config.checks.every import monitor_address
from megacpp.errors import config_error
from megacpp.run.vitals import prometheus, vitals

TOKEN = "monitor.token"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PATIENCE_S = 10.0  # for one request


def serve(text: str, folder: Path) -> ThreadingHTTPServer:
    """Serve the state of a run from threads of this process, until it ends.

    Args:
        text: `run.monitor`.
        folder: folder of the run.

    Raises:
        ConfigError: nothing can listen there.
    """
    host, port = monitor_address(text)
    token = "" if host in LOOPBACK else _token(folder)

    class Handler(BaseHTTPRequestHandler):
        """Answers for one run."""

        timeout = PATIENCE_S
        server_version, sys_version = "megacpp", ""

        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token and not hmac.compare_digest(given.encode(), token.encode()):
                return self._answer(401, "text/plain", "the token is in monitor.token\n")
            if self.path == "/status":
                found = vitals(folder)
                return self._answer(200, "application/json", json.dumps(found) + "\n")
            if self.path == "/metrics":
                return self._answer(200, "text/plain; version=0.0.4", prometheus(vitals(folder)))
            self._answer(404, "text/plain", "/status or /metrics\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        rule = f"nothing can listen there ({error.strerror})"
        raise config_error("run.monitor", text, rule, "choose another port") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True, name="monitor").start()
    where = f"http://{host}:{server.server_address[1]}"
    print(f"monitor: {where}/status and /metrics" + (f", token in {folder / TOKEN}" * bool(token)))
    return server


def _token(folder: Path) -> str:
    """Write a new token that only this user can read."""
    token, path = secrets.token_urlsafe(24), folder / TOKEN
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(token + "\n")
    return token
