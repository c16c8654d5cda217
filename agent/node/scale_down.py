"""Keeps cluster-autoscaler from removing the node while pods hold its GPUs in a mode that it cannot see.

It knows `nvidia.com/gpu` alone: a node of a GPU group that lists none is unready to it, and never in use.
"""

from collections.abc import Mapping

from agent.model.holding import Record

ANNOTATION = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
# Beside it where the agent has set it. One that a person set is left alone.
MARK = "gpu-node-agent.io/scale-down-disabled"
SEEN = "nvidia.com/gpu"


def holds_unseen(record: Record | None) -> bool | None:
    """Whether units are held that are not `nvidia.com/gpu`; None: nobody knows who holds what."""
    if record is None:
        return None
    return any(each.holding.resource != SEEN for holders in record.by_gpu.values() for each in holders)


def wanted(present: Mapping[str, str], held: bool | None) -> Mapping[str, str | None]:
    """Changes of a node's annotations; None removes one."""
    ours = MARK in present
    if held is None or (held and not ours and ANNOTATION in present):
        return {}
    if held:
        return {ANNOTATION: "true", MARK: "true"}
    return {ANNOTATION: None, MARK: None} if ours else {}
