"""Labels that describe driver and GPUs, for people's node selectors."""

import re
from collections.abc import Mapping

from agent.inventory.snapshot import Snapshot
from agent.model.modes import Assignment
from agent.node.instance_labels import instance_labels, stale

MIB = 1 << 20
# GPU Feature Discovery sets this one with all of its labels: where it runs, its labels are its own.
GFD_MARK = "nvidia.com/gfd.timestamp"
# Set where the GPUs are simulated.
SIMULATED_LABEL = "gpu-node-agent.io/simulated"


def labels_of(
    snapshot: Snapshot, assignment: Assignment, present: Mapping[str, str], strategy: str | None = None
) -> dict[str, str | None]:
    """CUDA labels, and GPU labels unless GPU Feature Discovery sets those. Empty while there is no driver.

    `present`: the labels that the node has now; GPU Feature Discovery may come and go at any time.
    `strategy`: by which instances are offered. None for a label that is to go.
    """
    if snapshot.driver is None or not snapshot.gpus:
        return {}
    major, minor = snapshot.driver.cuda_version
    labels = {"cuda-major-version": str(major), "cuda-minor-version": str(minor)}
    if GFD_MARK in present:
        return {**labels}
    gpus = [each.gpu for each in snapshot.gpus]
    first = gpus[0]
    # Of the GPU with the most time slices. OpenCost believes `count` where it is there.
    slices = [assignment.of(each.uuid).replicas for each in gpus if not each.mig_enabled]
    labels |= {
        "nvidia.com/gpu.product": first.product,
        "nvidia.com/gpu.count": str(len(gpus)),
        "nvidia.com/gpu.replicas": str(max(slices, default=0)),
        "nvidia.com/gpu.memory": str(first.memory_bytes // MIB),
        "nvidia.com/gpu.compute.major": str(first.compute_capability[0]),
        "nvidia.com/gpu.compute.minor": str(first.compute_capability[1]),
        **instance_labels(gpus, strategy),
    }
    return {key: label_value(text) for key, text in labels.items()} | dict.fromkeys(stale(present, labels))


def label_value(text: str) -> str:
    """Text as a label's value: letters, digits, dash, dot, underscore; 63 at most (Kubernetes' labels)."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-._")
