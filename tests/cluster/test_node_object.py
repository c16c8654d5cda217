"""How a real API server takes what the agent writes to its own Node object."""

from collections.abc import Mapping, Sequence

import anyio
import anyio.to_thread
import pytest
from kubernetes_asyncio.config.kube_config import load_kube_config

from agent.cluster import lean
from agent.cluster.api import ApiRefused, KubeApi
from agent.cluster.node import OwnNode
from agent.node.capacity import EFFECT, TAINT
from tests.cluster.rig import Cluster

OURS, THEIRS = {"key": TAINT, "effect": EFFECT}, {"key": "example.com/a", "effect": "NoExecute", "value": "1"}


async def test_our_taint_stands_between_those_of_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []  # the status of each patch that was refused
    patch = KubeApi.json_patch

    async def counted(
        api: KubeApi, path: str, operations: Sequence[Mapping[str, object]], deadline: float = 5.0
    ) -> bytes:
        try:
            return await patch(api, path, operations, deadline)
        except ApiRefused as error:
            calls.append(error.status)
            raise

    monkeypatch.setattr(KubeApi, "json_patch", counted)
    node_path = cluster.api.path("v1", "Node", None, cluster.node)

    async def taints() -> list[dict[str, str]]:
        node = await anyio.to_thread.run_sync(cluster.api.get, node_path)
        return list(node["spec"].get("taints", []))

    async def foreign(*present: dict[str, str]) -> None:
        body = {"spec": {"taints": list(present) or None}}
        await anyio.to_thread.run_sync(cluster.api.merge_patch, node_path, body)

    # Not by `connect`, which reads the file on the loop: in the agent's start nothing else runs there yet.
    configured = await anyio.to_thread.run_sync(lean._empty)
    await load_kube_config(str(cluster.kubeconfig), client_configuration=configured)
    api = KubeApi(configured, lean.rest_client(configured))
    try:
        node = OwnNode(api, cluster.node)
        async with anyio.create_task_group() as group:
            group.start_soon(node.reflector.run)
            with anyio.fail_after(20):
                await node.reflector.items.wait_for(bool)
            # From here on it sees its own writes by their answers only.
            group.cancel_scope.cancel()
        await node.write_taint(TAINT, EFFECT, present=True)
        await node.write_taint(TAINT, EFFECT, present=True)
        assert await taints() == [OURS]
        await node.write_taint(TAINT, EFFECT, present=False)
        await node.write_taint(TAINT, EFFECT, present=False)
        assert (await taints(), calls) == ([], [])
        await foreign(THEIRS)
        await node.write_taint(TAINT, EFFECT, present=True)
        assert (await taints(), calls) == ([THEIRS, OURS], [422])
        await foreign(OURS)
        await node.write_taint(TAINT, EFFECT, present=False)
        assert (await taints(), calls) == ([], [422, 422])
    finally:
        await api.close()
        await foreign()
