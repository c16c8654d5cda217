"""An API server in a dictionary, with DaemonSets whose pods follow their node selectors at once."""

import json
from collections.abc import Mapping
from typing import Any

from agent.cleanup.cluster import AWAY, Release
from agent.cluster.api import ApiRefused, KubeApi

RELEASE = Release("gpu", "agents", "cleaners")


def holder(name: str, node: str = "node1", phase: str = "Running") -> dict[str, Any]:
    """A pod with an MPS share."""
    limits = {"nvidia.com/mps-core": "20", "nvidia.com/mps-memory": "1"}
    return {
        "metadata": {"name": name, "namespace": "team", "uid": name},
        "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": phase},
    }


class Cluster(KubeApi):
    """`nodes` have agents; a cleaner succeeds unless `failing` has its node (exit code, message)."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        super().__init__(None, None)
        self.nodes = nodes
        self.away = {RELEASE.agents: False, RELEASE.cleaners: True}
        self.users: list[dict[str, Any]] = []
        self.failing: dict[str, tuple[int, str]] = {}
        self.staying: set[str] = set()  # nodes whose agent does not end
        self.generation = 1
        self.refusing: str | None = None
        self.history: list[tuple[str, bool]] = []

    async def get(self, path: str, query: Mapping[str, str] | None = None, deadline: float = 5.0) -> bytes:
        """Daemon sets by name, pods of the namespace by label, all pods."""
        if self.refusing and self.refusing in path:
            raise ApiRefused(403, f"GET {path}: 403 forbidden")
        if "/daemonsets/" in path:
            return json.dumps(self._daemon_set(path.rpartition("/")[2])).encode()
        if path == "/api/v1/pods":
            return self._page(query or {})
        selector = (query or {})["labelSelector"]
        return json.dumps({"items": self._pods(selector.partition("=")[2])}).encode()

    async def merge_patch(self, path: str, body: object, deadline: float = 5.0) -> bytes:
        """Node selectors of daemon sets."""
        assert isinstance(body, dict)
        away = body["spec"]["template"]["spec"]["nodeSelector"][AWAY] == "true"
        name = path.rpartition("/")[2]
        self.away[name] = away
        self.history.append((name, away))
        self.generation += 1
        return b"{}"

    def _page(self, query: Mapping[str, str]) -> bytes:
        # Pages of one, so that every test with two pods proves that all pages are read.
        start = int(query.get("continue", "0"))
        more = {"continue": str(start + 1)} if start + 1 < len(self.users) else {}
        return json.dumps({"items": self.users[start : start + 1], "metadata": more}).encode()

    def _daemon_set(self, name: str) -> dict[str, Any]:
        wanted = [] if self.away[name] else list(self.nodes)
        ready = [node for node in wanted if node not in self.failing]
        status = {
            "observedGeneration": self.generation,
            "desiredNumberScheduled": len(wanted),
            "numberReady": len(ready),
        }
        return {
            "metadata": {"generation": self.generation},
            "spec": {"selector": {"matchLabels": {"app": name}}},
            "status": status,
        }

    def _pods(self, name: str) -> list[dict[str, Any]]:
        there = self.staying if self.away[name] else self.nodes
        found = []
        for node in sorted(there):
            code, message = self.failing.get(node, (0, ""))
            ended = {"terminated": {"exitCode": code, "message": message}}
            status = {"initContainerStatuses": [{"state": {"waiting": {}}, "lastState": ended}]}
            found.append({"spec": {"nodeName": node}, "status": status})
        return found
