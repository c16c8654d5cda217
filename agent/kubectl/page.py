"""The page: served on loopback with the viewer's own credentials, to the one who knows its random path."""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from agent.kubectl.cluster import cluster_view
from agent.kubectl.fit import fragments
from agent.kubectl.kube import Kubectl, KubectlFailed
from agent.kubectl.view import Document

NEWEST_SECONDS = 0.5  # several windows of one viewer ask the API server once
REST = 5  # times as long as asking took, the API server is left alone
PAGE_HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def policy(html: str) -> str:
    """The Content-Security-Policy: the page's own style and script by their hashes, and its own address."""

    def hashed(tag: str) -> str:
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{hashed('script')}'; style-src 'sha256-{hashed('style')}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Page:
    """Serves `ask` as long as its context is open; `address` is where."""

    def __init__(self, ask: Callable[[], Document], port: int = 0) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._body, self._until = b"", 0.0
        self.secret = secrets.token_urlsafe(24)
        page = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                page.answer(self)

            def log_message(self, *_: object) -> None:
                """Say nothing on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.address = f"http://127.0.0.1:{self.port}/{self.secret}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Only for who knows the path, and only by a name of this machine: other pages know neither."""
        hosts = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost")}
        if request.headers.get("Host") not in hosts:
            self._send(request, 421, b"asked for by a name that is not this machine's\n", "text/plain")
            return
        _, _, rest = request.path.partition("/")
        secret, _, name = rest.partition("/")
        if not hmac.compare_digest(secret.encode(), self.secret.encode()):
            self._send(request, 404, b"no such page\n", "text/plain")
        elif name == "":
            self._send(request, 200, PAGE_HTML.encode(), "text/html")
        elif name == "view":
            status, body = self._newest()
            self._send(request, status, body, "application/json")
        else:
            self._send(request, 404, b"no such page\n", "text/plain")

    def _newest(self) -> tuple[int, bytes]:
        with self._lock:
            began = time.monotonic()
            if began < self._until:
                return 200, self._body
            try:
                view = self._ask()
            except KubectlFailed as error:
                return 503, json.dumps({"error": str(error)}).encode()
            took = time.monotonic() - began
            for node in view["nodes"]:
                node["fragments"] = fragments(node)
                node.pop("labels", None)
            view["nextSeconds"] = max(1.0, REST * took)
            self._body = json.dumps(view).encode()
            self._until = time.monotonic() + NEWEST_SECONDS
            return 200, self._body

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy(PAGE_HTML),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        try:
            request.send_response(status)
            for key, value in headers.items():
                request.send_header(key, value)
            request.end_headers()
            request.wfile.write(body)
        except ConnectionError:
            request.close_connection = True  # the window was closed


def do_page(kubectl: Kubectl, options: argparse.Namespace) -> int:
    try:
        served = Page(lambda: cluster_view(kubectl.get, options.namespace), options.port)
    except (OSError, OverflowError) as error:
        raise KubectlFailed(f"port {options.port} cannot be served: {error}; choose another") from error
    with served as page:
        print(
            f"{page.address}\nSeen with your own rights, by this machine alone. Control-C ends it.",
            flush=True,
        )
        while True:
            time.sleep(3600)
