"""Labels of namespaces: the first admission waits for them, and an API server that is away costs it once."""

from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from structlog.testing import capture_logs

from agent.cluster.pods import LABEL, NamespaceLabels
from agent.cluster.reflector import PartialObject
from agent.kubelet.wire import Allocation
from agent.model.holding import PairMember
from agent.model.pod import Metadata
from agent.vgpu.folders import About
from agent.vgpu.limits import Enforcement, NamespaceEnforcement
from agent.vgpu.wing import NodeLimits


def _labels() -> NamespaceLabels:
    return NamespaceLabels(cast("Any", None))


class Admissions:
    """Stands for the limits' room: notes the label that each admission went by."""

    def __init__(self, labels: NamespaceLabels) -> None:
        self._labels = labels
        self.seen: list[str | None] = []

    def policy(self, namespace: str) -> Enforcement:
        self.seen.append(self._labels.of(namespace))
        return Enforcement.OFF

    async def admit(self, _request: About) -> Allocation:
        return Allocation()


async def test_the_first_admission_waits_for_the_labels() -> None:
    labels = _labels()
    isolation = Admissions(labels)
    seen = isolation.seen
    parts: Any = SimpleNamespace(
        isolation=isolation,
        _driver=SimpleNamespace(obstacle=lambda _: None),
        _namespaces=NamespaceEnforcement(labels),
    )
    grant: Any = SimpleNamespace(
        pod=SimpleNamespace(namespace="team", uid="u", name="p"),
        container="main",
        gpus=("GPU-1",),
        ids=("GPU-1::m1",),
        demand=SimpleNamespace(whole=False, cores=10),
    )

    async def admitted() -> None:
        await NodeLimits.additions(parts, PairMember.MEMORY, grant)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(admitted)
            await anyio.wait_all_tasks_blocked()
            assert seen == []
            team = PartialObject(metadata=Metadata(name="team", uid="1", labels={LABEL: "strict"}))
            labels.reflector.items.publish(MappingProxyType({"1": team}))
    assert seen == ["strict"]


async def test_a_server_that_is_away_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.cluster.pods.FIRST_COPY_SECONDS", 0.05)
    labels = _labels()
    with capture_logs() as logs, anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(labels.known)
        monkeypatch.setattr("agent.cluster.pods.FIRST_COPY_SECONDS", 3600.0)
        await labels.known()  # or the test is ended by its deadline
    assert [each["event"] for each in logs] == ["namespace_labels_unknown"]
    assert labels.of("team") is None


def test_labels_of_namespaces_that_are_gone_are_not_kept() -> None:
    labels = _labels()
    enforcement = NamespaceEnforcement(labels)
    with capture_logs() as logs:
        for number in range(100):
            name = f"team-{number}"
            team = PartialObject(metadata=Metadata(name=name, uid=name, labels={LABEL: "strikt"}))
            labels.reflector.items.publish(MappingProxyType({name: team}))
            for _ in range(2):
                assert enforcement.of(name) is None
    assert len(logs) == 100
    assert enforcement._reported == {"team-99": "strikt"}
