"""Events on pods that were bound to this node and that its kubelet refused.

The kubelet's own words stand in the pod's status alone. A pod whose request the agent refused has its event
already, under the same key: there is one for each pod.
"""

from collections.abc import Mapping

from agent.cluster.event_recorder import Event, EventRecorder, Regarding
from agent.kit.tasks import Cell
from agent.model.modes import is_offered
from agent.model.pod import Pod

REASON, KEY = "AllocationRefused", "refused"
ADMISSION, OUT_OF = "UnexpectedAdmissionError", "OutOf"
LONGEST = 700  # characters of the kubelet's message: the remedy stands behind it


async def follow(pods: Cell[Mapping[str, Pod]], events: EventRecorder) -> None:
    """Watch the pods of this node, for ever."""
    known: frozenset[str] = frozenset()
    async for found in pods.values():
        refused = {uid: pod for uid, pod in found.items() if is_refused(pod)}
        for uid in refused.keys() - known:
            events.emit(event_of(refused[uid]))
        known = frozenset(refused)


def is_refused(pod: Pod) -> bool:
    """Whether the kubelet refused it over GPUs, so that no container of it ever ran."""
    status = pod.status
    if status.phase != "Failed" or status.container_statuses:
        return False
    both = (*pod.spec.containers, *pod.spec.init_containers)
    asked = {name for each in both for name in pod.asked_of(each) if is_offered(name)}
    return bool(asked) and (status.reason == ADMISSION or is_offered(status.reason.removeprefix(OUT_OF)))


def event_of(pod: Pod) -> Event:
    meta, status = pod.metadata, pod.status
    owner = next(iter(meta.owner_references), None)
    then = f"its {owner.kind} {owner.name} creates another one" if owner else "delete it and create it again"
    said = " ".join(status.message.split())[:LONGEST] or "the kubelet gave no message"
    text = f"{status.reason}: {said}; the pod stays Failed: {then}"
    return Event(Regarding("Pod", meta.name, meta.namespace, meta.uid), REASON, text, warning=True, key=KEY)
