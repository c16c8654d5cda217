"""Containers with cores that may run as root: the pods of the node as the API server has them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.kubelet.wire import Refused
from agent.model.holding import PairMember
from agent.model.pod import (
    MPS,
    ContainerSpec,
    Metadata,
    Pod,
    PodSpec,
    PodStatus,
    Requirements,
    SecurityContext,
)
from agent.mps.pods import RootCheck
from tests.unit.mps.test_plugin import Node

NOBODY = SecurityContext(run_as_user=65534)


def container(name: str, cores: int, user: SecurityContext | None = NOBODY) -> ContainerSpec:
    return ContainerSpec(name, Requirements({MPS.core: str(cores)}), security_context=user)


def pod(name: str, *init: ContainerSpec, main: ContainerSpec, phase: str = "Pending") -> Pod:
    spec = PodSpec([main], list(init))
    return Pod(Metadata(uid=name, name=name, namespace="default"), spec, PodStatus(phase=phase))


def check(*pods: Pod) -> RootCheck:
    by_name = {(each.metadata.namespace, each.metadata.name): each for each in pods}
    cache = SimpleNamespace(
        pods=lambda: {each.metadata.uid: each for each in pods},
        find=lambda namespace, name: by_name.get((namespace, name)),
    )
    return RootCheck(cast("Any", cache))


async def test_a_root_init_container_does_not_start_on_cores_that_its_successor_inherits() -> None:
    """The kubelet's records have the app container alone, which need not be root."""
    node = Node()
    node.lister.hold("p", node.uuids[0], range(10), range(2))
    core = node.plugins[PairMember.CORE]
    core._root_check = check(
        pod("p", container("prepare", 10, SecurityContext(run_as_user=0)), main=container("main", 10))
    )
    with pytest.raises(
        Refused, match=r"container prepare of the pod, whose cores it may have: runAsUser is 0"
    ):
        await core.pre_start([f"{node.uuids[0]}::sc{number}" for number in range(10)])
    # One that asks for no cores reaches no daemon.
    plain = ContainerSpec("prepare", security_context=SecurityContext(run_as_user=0))
    core._root_check = check(pod("p", plain, main=container("main", 10)))
    await core.pre_start([f"{node.uuids[0]}::sc{number}" for number in range(10)])


def test_a_named_container_is_looked_up() -> None:
    found = check(pod("p", container("load", 10, SecurityContext(run_as_user=0)), main=container("main", 10)))
    assert found.named("default", "p", "load") == "runAsUser is 0"
    assert "container load of the pod" in (found.named("default", "p", "main") or "")
    assert check(pod("p", main=container("main", 10))).named("default", "p", "main") is None
    assert found.named("default", "other", "main") == "its specification is not known yet"


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ((), "no container that asks for so many"),
        ((pod("p", container("load", 10), main=container("main", 5)),), None),
        (
            (
                pod("p", container("load", 10), main=container("main", 5)),
                pod("q", main=container("a", 10, None)),
            ),
            "container a of default/q may run as root",
        ),
        # Another number of cores, a finished pod, one whose holding is known: none of them can be it.
        (
            (
                pod("p", container("load", 10), main=container("main", 5)),
                pod("q", main=container("a", 11, None)),
                pod("r", main=container("a", 10, None), phase="Succeeded"),
                pod("known", main=container("main", 10, None)),
            ),
            None,
        ),
    ],
)
def test_an_unnamed_one_is_all_that_it_could_be(pods: tuple[Pod, ...], why: str | None) -> None:
    found = check(*pods).unnamed(10, {("default", "known", "main")})
    assert found is None if why is None else found is not None and why in found


def test_without_the_api_nothing_is_known() -> None:
    blind = RootCheck(None)
    for said in (blind.named("default", "p", "main"), blind.unnamed(10, set())):
        assert said == "its user is not known without the Kubernetes API"
