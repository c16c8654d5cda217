"""`gpu-node-agent check nodes`: the findings of preflight DaemonSets' pods, node by node (`helm test`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import msgspec

from agent.check.pod_objects import ContainerEnd, ShownPod, ShownPods, reasons_of
from agent.cluster.api import ApiUnavailable, KubeApi
from agent.model.look import GOOD, NOT_SEEN, WRONG

Say = Callable[[str], None]

POLL_SECONDS = 1.0


class _Metadata(msgspec.Struct):
    uid: str = ""
    generation: int = 0


class _DaemonSetStatus(msgspec.Struct, rename="camel"):
    observed_generation: int = -1
    desired_number_scheduled: int = 0


class _DaemonSet(msgspec.Struct):
    metadata: _Metadata
    status: _DaemonSetStatus = msgspec.field(default_factory=_DaemonSetStatus)


@dataclass(frozen=True, slots=True)
class Round:
    wanted: int | None  # nodes that are to have one; None: not known yet
    ended: Mapping[str, ContainerEnd]  # by node
    waiting: Mapping[str, str]  # by node or pod: the reasons

    @property
    def complete(self) -> bool:
        """Whether every node has answered."""
        return self.wanted is not None and len(self.ended) >= self.wanted


async def collect(api: KubeApi, namespace: str, daemonsets: Sequence[str], seconds: float, say: Say) -> int:
    """Wait until each pod has looked at its node, and report all; the exit code. Raises ApiError.

    `daemonsets`: one for each pool of nodes; no node is of two.
    """
    found = Round(None, {}, {})
    with anyio.move_on_after(seconds):
        while not found.complete:
            try:
                found = await _look(api, namespace, daemonsets)
            except ApiUnavailable as error:
                say(f"asks again: {error}")
            if not found.complete:
                await anyio.sleep(POLL_SECONDS)
    for node, state in sorted(found.ended.items()):
        say(f"{node}:")
        for line in state.message.splitlines() or [f"exit code {state.exit_code}, and no message"]:
            say(f"  {line}")
    for node, reason in sorted(found.waiting.items()):
        say(f"{node}: has not answered within {seconds:g} s: {reason}")
    return _result(found, say)


def _result(found: Round, say: Say) -> int:
    if not found.wanted:
        say("no node is chosen for an agent: see nodeSelector and affinity, or label a node with a mode")
        return WRONG
    good = sum(state.exit_code == GOOD for state in found.ended.values())
    say(f"{good} of {found.wanted} nodes can offer their GPUs")
    if good >= found.wanted:
        return GOOD
    codes = {state.exit_code for state in found.ended.values()} - {GOOD}
    return NOT_SEEN if codes == {NOT_SEEN} and found.complete else WRONG


async def _look(api: KubeApi, namespace: str, daemonsets: Sequence[str]) -> Round:
    folder = f"/apis/apps/v1/namespaces/{namespace}/daemonsets"
    owners = [await api.read(f"{folder}/{each}", _DaemonSet) for each in daemonsets]
    uids = {each.metadata.uid for each in owners}
    query = {"labelSelector": "app.kubernetes.io/component=preflight"}
    pods = await api.read(f"/api/v1/namespaces/{namespace}/pods", ShownPods, query)
    ended: dict[str, ContainerEnd] = {}
    waiting: dict[str, str] = {}
    for pod in pods.items:
        # A DaemonSet of the same name before this one may still have pods.
        if uids.isdisjoint(each.uid for each in pod.metadata.owner_references):
            continue
        if state := _ended(pod):
            ended[pod.spec.node_name] = state
        else:
            waiting[pod.spec.node_name or pod.metadata.name] = reasons_of(pod.status)
    seen = all(each.status.observed_generation >= each.metadata.generation for each in owners)
    wanted = sum(each.status.desired_number_scheduled for each in owners)
    return Round(wanted if seen else None, ended, waiting)


def _ended(pod: ShownPod) -> ContainerEnd | None:
    """How the container ended; pods of a DaemonSet start theirs again and again."""
    for container in pod.status.container_statuses:
        return container.state.terminated or container.last_state.terminated
    return None
