"""An answer that is no list of pods is no proof that there are none: the hook fails."""

import json
from collections.abc import Mapping

import anyio
import pytest

from agent.cleanup.cluster import ClusterCleanup
from agent.cleanup.request import CleanupFailed, CleanupRefused
from tests.unit.cleanup.cluster_api import NOW, RELEASE, Cluster, holder

pytestmark = pytest.mark.anyio


class Odd(Cluster):
    async def get(self, path: str, query: Mapping[str, str] | None = None, deadline: float = 5.0) -> bytes:
        if path == "/api/v1/pods":
            return b'{"kind": "Status", "status": "Success"}'
        return await super().get(path, query, deadline)


async def test_no_list_is_not_an_empty_list() -> None:
    cluster = Odd("node1")
    cluster.users.append(holder("model"))
    with anyio.fail_after(5), pytest.raises((CleanupFailed, CleanupRefused)):
        await ClusterCleanup(cluster, RELEASE, lambda: NOW).run(2.0)


async def test_no_list_of_agents_is_not_an_empty_list() -> None:
    class NoAgents(Cluster):
        async def get(
            self, path: str, query: Mapping[str, str] | None = None, deadline: float = 5.0
        ) -> bytes:
            if path == "/api/v1/namespaces/gpu/pods":
                return json.dumps({"kind": "Status"}).encode()
            return await super().get(path, query, deadline)

    with anyio.fail_after(8), pytest.raises((CleanupFailed, CleanupRefused)):
        await ClusterCleanup(NoAgents("node1"), RELEASE, lambda: NOW).run(1.0)
