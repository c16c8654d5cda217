"""Requests to the extender, from kube-scheduler or an impostor: nothing is bound or assumed."""

import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from agent.cluster.api import ApiRefused, KubeApi
from agent.extender import gangs
from agent.extender.binder import Binder
from agent.extender.fleet import Fleet, LedgerNode
from agent.extender.gangs import Member
from agent.extender.handlers import FOLDER, ServingState, Verbs
from agent.extender.metrics import ExtenderMetrics
from agent.extender.objects import GROUP_LABEL
from agent.extender.pod_demand import pod_demand
from agent.extender.verdicts import Verdicts
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.placement import HINT, POLICY, PlacementPolicy
from agent.model.pod import VGPU, Container
from agent.web.server import HttpRequest, HttpServer
from tests.fuzz.campaign import Campaign
from tests.pods import a_pod


class NoPods:
    """An API server that has no pods; it writes down what it is asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def get(self, path: str, _: Mapping[str, str] | None = None, deadline: float = 0) -> bytes:
        self.paths.append(path)
        raise ApiRefused(404, "there is no such pod")

    async def post(self, path: str, body: object, deadline: float = 0) -> bytes:
        raise AssertionError(f"something is written: {path} {body}")


LIMITS = {VGPU.core: "20", VGPU.memory: "4"}
ANNOTATIONS = {POLICY: "spread", f"{HINT}0": "1"}
POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": ANNOTATIONS},
    "spec": {"containers": [{"name": "main", "resources": {"limits": LIMITS}}]},
}
# A gang's member by its own word, which no watch shows.
SPEC = {**POD["spec"], "schedulingGroup": {"podGroupName": "gang"}}
MEMBER = {"metadata": {**POD["metadata"], "labels": {GROUP_LABEL: "gang"}}, "spec": SPEC}
NODES = {"items": [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]}
VICTIMS = {"Pods": [{"UID": "v"}], "NumPDBViolations": 1}
BODIES: tuple[tuple[str, Any], ...] = (
    ("predicates", {"Pod": POD, "Nodes": None, "NodeNames": ["a", "b", "c"]}),
    ("predicates", {"Pod": POD, "Nodes": NODES}),
    ("simulate", {"Pod": POD, "Nodes": NODES}),
    ("predicates", {"Pod": MEMBER, "Nodes": None, "NodeNames": ["a", "b"]}),
    ("priorities", {"Pod": POD, "NodeNames": ["a", "b"]}),
    (
        "preempt",
        {"Pod": POD, "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "v"}], "NumPDBViolations": 1}}},
    ),
    ("bind", {"PodName": "p", "PodNamespace": "ns", "PodUID": "u", "Node": "a"}),
)


async def test_extender_requests(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "SHOWN_SECONDS", 0.0)
    fleet, api, server = Fleet(), NoPods(), HttpServer("127.0.0.1", 0)
    for name in ("a", "b"):
        gpus = tuple(GpuEntry(f"GPU-{name}{index}", index, Mode.VGPU, 81920) for index in range(4))
        fleet.set_node(LedgerNode(name, NodeInventory(gpus), {}))
    binder = Binder(cast("KubeApi", api), fleet, PlacementPolicy.FRAGMENTATION, 30, lambda: True)
    shown = Member(
        "ns/gang", pod_demand(a_pod("ns", "q", (Container("main", {VGPU.core: 20, VGPU.memory: 4}),)))
    )
    binder.gangs.show("another UID", shown)
    serving = ServingState(Verdicts(fleet), binder)
    Verbs(lambda: serving, ExtenderMetrics()).add_to(server, 1 << 20)
    before = fleet.allocated()

    async def act(data: bytes) -> str:
        verb, _, body = data.partition(b" ")
        path = f"{FOLDER}/{verb.decode(errors='replace')}"
        handler = server._routes.get(path) or server._routes[f"{FOLDER}/bind"]
        reply = await handler(HttpRequest(path, body=body))
        assert reply.status in (200, 400)
        if reply.status == 200:
            json.loads(reply.body)
        assert (fleet.allocated(), fleet.waiting, fleet.pods) == (before, 0, 0)
        while api.paths:
            # No name leads the request of the extender's account elsewhere.
            parts = api.paths.pop().split("/")
            assert parts[:4] == ["", "api", "v1", "namespaces"]
            assert parts[5] == "pods"
            assert len(parts) == 7
            assert not {"", ".", ".."} & {parts[4], parts[6]}
        return f"answered {reply.status}"

    samples = [f"{verb} {json.dumps(body)}".encode() for verb, body in BODIES]
    words = (b'"Pod":', b'"PodName":', b'"NodeNames":[', b'"items":', b'"limits":{', b"predicates ", b"bind ")
    gang_words = (b'"labels":{"scheduling.x-k8s.io/pod-group":"gang"}', b'"schedulingGroup":', b'"uid":"u"')
    await campaign.run_async(act, samples, (*words, *gang_words), callers=1)
