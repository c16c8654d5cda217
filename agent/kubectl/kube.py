"""The API server by way of kubectl, so that every login of kubectl works: `get --raw`, `label`, `annotate`.

Only `try` also creates a pod and deletes it. Never `exec`: on a privileged agent that is root of the node.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

CALL_SECONDS = 60.0
FORBIDDEN = re.compile(
    r'cannot (\w+) resource "([^"]+)" in API group "[^"]*"'
    r'(?: in the namespace "([^"]+)"| at the cluster scope)'
)

_READ = frozenset({("get", "nodes"), ("list", "nodes")})
# Rights in the chart's templates/kubectl.yaml.
ROLES = {
    "gpu-viewer": _READ,
    "gpu-operator": _READ | {("patch", "nodes"), ("get", "pods"), ("list", "pods"), ("list", "events")},
}

Get = Callable[[str], Any]  # the object at a path of the API server; raises KubectlFailed


class KubectlFailed(Exception):
    """kubectl could not do it; the text is its own, in one line."""


class NotFound(KubectlFailed):
    """There is no such object."""


class MissingRight(KubectlFailed):
    """The one right that is missing."""

    def __init__(self, verb: str, resource: str, namespace: str) -> None:
        self.verb, self.resource, self.namespace = verb, resource, namespace
        where = f"in namespace {namespace}" if namespace else "in the whole cluster"
        roles = [name for name, rights in ROLES.items() if (verb, resource) in rights]
        named = f"; the chart's ClusterRole {' or '.join(roles)} has it" if roles else ""
        super().__init__(f"missing right: {verb} {resource} {where}{named}")


class Kubectl:
    def __init__(self, flags: Sequence[str] = (), program: str = "") -> None:
        self._command = [program or os.environ.get("KUBECTL", "kubectl"), *flags]

    def get(self, path: str) -> Any:  # noqa: ANN401  a value of JSON
        """The object at a path. Raises KubectlFailed."""
        text = self.run("get", "--raw", path)
        try:
            return json.loads(text)
        except ValueError as error:
            raise KubectlFailed(f"the API server's answer for {path} is no JSON: {error}") from error

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Run it; its output. Raises KubectlFailed."""
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                input=stdin,
                stdin=None if stdin is not None else subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CALL_SECONDS,
                check=False,
            )
        except FileNotFoundError as error:
            raise KubectlFailed(f"{self._command[0]} is not in PATH: install kubectl") from error
        except OSError as error:
            raise KubectlFailed(f"{self._command[0]} cannot be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            # A login may have asked for something, such as to open a page.
            said = " ".join((error.stderr or b"").decode(errors="replace").split())
            raise KubectlFailed(
                f"kubectl {arguments[0]} did not end within {CALL_SECONDS:g} s"
                + (f"; it said: {said} (log in first, with any command of kubectl)" if said else "")
            ) from error
        if done.returncode:
            raise failure(done.stderr)
        return done.stdout

    def namespace(self) -> str:
        """The namespace of the context, from the kubeconfig alone."""
        try:
            return self.run("config", "view", "--minify", "-o", "jsonpath={..namespace}").strip() or "default"
        except KubectlFailed:
            return "default"  # no context, as in a pod


def failure(said: str) -> KubectlFailed:
    """The error in what kubectl wrote to its standard error."""
    if found := FORBIDDEN.search(said):
        return MissingRight(found[1], found[2], found[3] or "")
    lines = [line for line in said.splitlines() if line.strip()]
    words = lines[-1] if lines else "kubectl failed and did not say why"
    return NotFound(words) if "NotFound" in words else KubectlFailed(words)
