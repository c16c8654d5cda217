"""Labels that describe driver, GPUs and their instances, for people's node selectors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agent.inventory.snapshot import Snapshot
from agent.model.gpu import Gpu, Instance
from agent.model.modes import OFFERED_MODES, Assignment

MIB = 1 << 20
# GPU Feature Discovery sets this one with all of its labels: where it runs, its labels are its own.
GFD_MARK = "nvidia.com/gfd.timestamp"
# Set where the GPUs are simulated.
SIMULATED_LABEL = "gpu-node-agent.io/simulated"
GPU: Final = "nvidia.com/gpu"
PREFIX = next(mode.row.prefix for mode in OFFERED_MODES if mode.row.partitioned)
CAPABLE, STRATEGY = "nvidia.com/mig.capable", "nvidia.com/mig.strategy"
_ENGINES = ("copy", "decoder", "encoder", "jpeg", "ofa")
ATTRIBUTES = ("multiprocessors", "slices.gi", "slices.ci", *(f"engines.{each}" for each in _ENGINES))
_PARTS = ("product", "count", "replicas", "memory", *ATTRIBUTES)
OWN = (CAPABLE, STRATEGY, *(f"{GPU}.{each}" for each in ATTRIBUTES))


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
        **_instance_labels(gpus, strategy),
    }
    return {key: label_value(text) for key, text in labels.items()} | dict.fromkeys(_stale(present, labels))


def label_value(text: str) -> str:
    """Text as a label's value: letters, digits, dash, dot, underscore; 63 at most (Kubernetes' labels)."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-._")


def _instance_labels(gpus: Sequence[Gpu], strategy: str | None) -> Mapping[str, str]:
    """`strategy`: mixed or single; None: instances are not offered."""
    labels = {CAPABLE: str(any(each.mig_switch for each in gpus)).lower()}
    if strategy is None:
        return labels
    labels[STRATEGY] = strategy
    parted = [each for each in gpus if each.mig_enabled]
    first: dict[str, tuple[Gpu, Instance]] = {}
    counts: dict[str, int] = {}
    for gpu in parted:
        for instance in gpu.instances:
            if instance.profile:
                profile = instance.profile.replace("+", ".")
                first.setdefault(profile, (gpu, instance))
                counts[profile] = counts.get(profile, 0) + 1
    if strategy == "mixed":
        for profile, (gpu, instance) in first.items():
            name = f"{PREFIX}{profile}"
            labels |= _described(name, gpu, instance, profile, counts[profile])
    elif parted:
        alike = len(first) == 1 and all(each.instances for each in gpus)
        if alike:
            ((profile, (gpu, instance)),) = first.items()
            labels |= _described(GPU, gpu, instance, profile, counts[profile])
        else:
            labels[f"{GPU}.product"] = f"{parted[0].product}-MIG-INVALID"
            labels |= dict.fromkeys((f"{GPU}.{part}" for part in ("count", "replicas", "memory")), "0")
    return labels


def _stale(present: Mapping[str, str], labels: Mapping[str, str]) -> Iterator[str]:
    """Labels of profiles that the node has no instance of any more."""
    return (key for key in present if key not in labels and of_instances(key))


def of_instances(key: str) -> bool:
    """Whether GPU Feature Discovery, or this agent, describes instances by that label."""
    if key in OWN:
        return True
    return key.startswith(PREFIX) and key.endswith(tuple(f".{part}" for part in _PARTS))


def _described(
    name: str, gpu: Gpu, instance: Instance, profile: str, count: int
) -> Iterator[tuple[str, str]]:
    yield f"{name}.product", f"{gpu.product}-MIG-{profile}"
    yield f"{name}.count", str(count)
    yield f"{name}.replicas", "1"
    yield f"{name}.memory", str(instance.memory_bytes // MIB)
    figures = (instance.multiprocessors, instance.slices, instance.compute_slices, *instance.engines)
    yield from ((f"{name}.{part}", str(value)) for part, value in zip(ATTRIBUTES, figures, strict=False))
