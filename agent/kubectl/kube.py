"""The API server by way of kubectl, so that every login of kubectl works: `get --raw`, `label`, `annotate`.

Only `try` also creates a pod and deletes it. Never `exec`: on a privileged agent that is root of the node.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

COMPLETION_SECONDS = 5.0  # a login that takes longer must not hold up a shell
CALL_SECONDS = 60.0
LOGIN_SECONDS = 300.0  # where a login has said something: a person types, or opens a page
PASS_ON_SECONDS = 0.3
LOOK_SECONDS = 0.1
FORBIDDEN = re.compile(
    r'cannot (\w+) resource "([^"]+)" in API group "[^"]*"'
    r'(?: in the namespace "([^"]+)"| at the cluster scope)'
)

_READ = frozenset({("get", "nodes"), ("list", "nodes")})
# Rights in the chart's templates/kubectl.yaml.
ROLES = {
    "gpu-viewer": _READ,
    "gpu-operator": _READ
    | {
        ("patch", "nodes"),
        ("get", "pods"),
        ("list", "pods"),
        ("list", "events"),
        *((verb, "resourceclaims") for verb in ("get", "list")),
    },
}

Get = Callable[[str], Any]  # the object at a path of the API server; raises KubectlFailed


class KubectlFailed(Exception):
    """kubectl could not do it; the text is its own, in one line."""


class NotFound(KubectlFailed):
    """There is no such object."""


class Conflict(KubectlFailed):
    """The object has changed since it was read."""


class MissingRight(KubectlFailed):
    """The one right that is missing."""

    def __init__(self, verb: str, resource: str, namespace: str) -> None:
        self.verb, self.resource, self.namespace = verb, resource, namespace
        where = f"in namespace {namespace}" if namespace else "in the whole cluster"
        roles = [name for name, rights in ROLES.items() if (verb, resource) in rights]
        named = f"; the chart's ClusterRole {' or '.join(roles)} has it" if roles else ""
        super().__init__(f"missing right: {verb} {resource} {where}{named}")


class Kubectl:
    def __init__(self, flags: Sequence[str] = (), program: str = "", *, asks: bool = True) -> None:
        """`asks`: whether a login may ask something on the terminal."""
        self._command = [program or os.environ.get("KUBECTL", "kubectl"), *flags]
        self._asks = asks

    def get(self, path: str) -> Any:  # noqa: ANN401  a value of JSON
        """The object at a path. Raises KubectlFailed."""
        text = self.run("get", "--raw", path)
        try:
            return json.loads(text)
        except ValueError as error:
            raise KubectlFailed(f"the API server's answer for {path} is no JSON: {error}") from error

    def run(self, *arguments: str) -> str:
        """Run it; its output. Raises KubectlFailed.

        It has the terminal to read from, where there is one, since its login may be a program that asks.
        """
        terminal = self._asks and sys.stdin is not None and sys.stdin.isatty()
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    [*self._command, *arguments],
                    stdin=None if terminal else subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.PIPE,
                )
            except FileNotFoundError as error:
                raise KubectlFailed(f"{self._command[0]} is not in PATH: install kubectl") from error
            except OSError as error:
                raise KubectlFailed(f"{self._command[0]} cannot be run: {error}") from error
            with process:
                try:
                    said = self._heard(process, arguments[0])
                except BaseException:
                    process.kill()
                    raise
            output.seek(0)
            if process.returncode:
                raise failure(said)
            return output.read().decode(errors="replace")

    def _heard(self, process: subprocess.Popen[bytes], command: str) -> str:
        """Its standard error until it ends, less what was passed on. Raises KubectlFailed if it does not end.

        What stands there while kubectl goes on is a question of a login, or a page to open: it is passed on.
        What comes just before the end is an error, which the caller says in its own words.
        """
        assert process.stderr is not None
        began, said, shown, fresh, open_ = time.monotonic(), b"", 0, 0.0, True
        while process.poll() is None or (open_ and _readable(process.stderr, 0.0)):
            now = time.monotonic()
            longest = LOGIN_SECONDS if shown else CALL_SECONDS if self._asks else COMPLETION_SECONDS
            if now - began > longest:
                words = " ".join(said.decode(errors="replace").split())
                raise KubectlFailed(
                    f"kubectl {command} did not end within {now - began:.0f} s"
                    + (f"; it said: {words} (log in first, with any command of kubectl)" if words else "")
                )
            if self._asks and len(said) > shown and now - fresh > PASS_ON_SECONDS:
                sys.stderr.write(said[shown:].decode(errors="replace"))
                sys.stderr.flush()
                shown = len(said)
            if not open_:
                time.sleep(LOOK_SECONDS)
            elif _readable(process.stderr, LOOK_SECONDS):
                part = os.read(process.stderr.fileno(), 1 << 16)
                fresh = now if len(said) == shown else fresh
                said, open_ = said + part, bool(part)
        rest = said[shown:].strip()
        return (rest or said).decode(errors="replace")

    def namespace(self) -> str:
        """The namespace of the context, from the kubeconfig alone."""
        try:
            return self.run("config", "view", "--minify", "-o", "jsonpath={..namespace}").strip() or "default"
        except KubectlFailed:
            return "default"  # no context, as in a pod


def _readable(stream: IO[bytes], seconds: float) -> bool:
    return bool(select.select([stream], [], [], seconds)[0])


def failure(said: str) -> KubectlFailed:
    """The error in what kubectl wrote to its standard error."""
    if found := FORBIDDEN.search(said):
        return MissingRight(found[1], found[2], found[3] or "")
    lines = [line for line in said.splitlines() if line.strip()]
    words = lines[-1] if lines else "kubectl failed and did not say why"
    if "(Conflict)" in words:
        return Conflict(words)
    return NotFound(words) if "NotFound" in words else KubectlFailed(words)
