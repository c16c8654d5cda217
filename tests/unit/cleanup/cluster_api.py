"""An API server in a dictionary: nodes with annotations, whose agents answer requests as the test says."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from agent.cleanup.cluster import Release
from agent.cleanup.request import REPORT, REQUEST, CleanupReport, CleanupRequest, CleanupState
from agent.cluster.api import ApiRefused, ApiUnavailable, KubeApi

RECORD = "sh.helm.release.v1.agents.v3"
RELEASE = Release("gpu", "app=agents", RECORD)
NOW = datetime(2026, 11, 22, 8, tzinfo=UTC)


def holder(name: str, node: str = "node1", phase: str = "Running") -> dict[str, Any]:
    """A pod with an MPS share."""
    limits = {"nvidia.com/mps-core": "20", "nvidia.com/mps-memory": "1"}
    return {
        "metadata": {"name": name, "namespace": "team", "uid": name},
        "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": phase},
    }


class Cluster(KubeApi):
    """`nodes` have agents, which answer `clean` unless `answers` says otherwise (None: no answer)."""

    def __init__(self, *nodes: str) -> None:
        super().__init__(None, None)
        self.annotations: dict[str, dict[str, str]] = {node: {} for node in nodes}
        self.agents = list(nodes)  # nodes with an agent's pod
        self.answers: dict[str, tuple[CleanupState, str] | None] = {}
        self.users: list[dict[str, Any]] = []
        self.record: dict[str, str] | None = {"status": "uninstalling"}
        self.refusing: dict[str, int] = {}  # part of a path: status
        self.silent = 0  # so many patches arrive, and their answer is lost
        self.requests: list[tuple[str, CleanupRequest]] = []

    async def get(self, path: str, query: Mapping[str, str] | None = None, deadline: float = 5.0) -> bytes:
        """Nodes by name, pods of the namespace by label, all pods."""
        self._refuse("GET", path)
        if path == "/api/v1/pods":
            return self._page(self.users, query or {})
        if path.startswith("/api/v1/nodes/"):
            name = path.rpartition("/")[2]
            if name not in self.annotations:
                raise ApiRefused(404, f"GET {path}: 404 not found")
            return json.dumps({"metadata": {"name": name, "annotations": self.annotations[name]}}).encode()
        assert path == "/api/v1/namespaces/gpu/pods"
        assert query
        assert query["labelSelector"] == RELEASE.agents
        found = [
            {"metadata": {"name": f"agent-{node}"}, "spec": {"nodeName": node}, "status": {}}
            for node in self.agents
        ]
        return self._page(found, query)

    async def merge_patch(self, path: str, body: object, deadline: float = 5.0) -> bytes:
        """Annotations of nodes, labels of the release's record."""
        self._refuse("PATCH", path)
        assert isinstance(body, dict)
        name = path.rpartition("/")[2]
        if "/secrets/" in path:
            if name != RECORD or self.record is None:
                raise ApiRefused(404, f"PATCH {path}: 404 not found")
            self.record |= body["metadata"]["labels"]
            return b"{}"
        if name not in self.annotations:
            raise ApiRefused(404, f"PATCH {path}: 404 not found")
        (kind,) = body["metadata"]
        assert kind == "annotations"
        merged = {**self.annotations[name], **body["metadata"][kind]}
        self.annotations[name] = {key: value for key, value in merged.items() if value is not None}
        self._answer(name)
        if self.silent:
            self.silent -= 1
            raise ApiUnavailable(f"the API server did not answer {path} in time")
        return b"{}"

    def in_force(self) -> set[str]:
        """Nodes with a request that has not ended."""
        return {
            node
            for node, annotations in self.annotations.items()
            if REQUEST in annotations
            and msgspec.json.decode(annotations[REQUEST], type=CleanupRequest).seconds_left(NOW) > 0
        }

    def _answer(self, name: str) -> None:
        text = self.annotations[name].get(REQUEST)
        if text is None:
            return
        request = msgspec.json.decode(text, type=CleanupRequest)
        self.requests.append((name, request))
        answer = self.answers.get(name, (CleanupState.CLEAN, ""))
        if request.seconds_left(NOW) > 0 and answer:
            report = CleanupReport(request.id, *answer)
            self.annotations[name][REPORT] = msgspec.json.encode(report).decode()

    def _refuse(self, method: str, path: str) -> None:
        for part, status in self.refusing.items():
            if part in f"{method} {path}":
                raise ApiRefused(status, f"{method} {path}: {status}")

    def _page(self, items: list[dict[str, Any]], query: Mapping[str, str]) -> bytes:
        # Pages of one, so that every test with two pods proves that all pages are read.
        start = int(query.get("continue", "0"))
        more = {"continue": str(start + 1)} if start + 1 < len(items) else {}
        return json.dumps({"items": items[start : start + 1], "metadata": more}).encode()
