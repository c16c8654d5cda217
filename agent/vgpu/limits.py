"""Levels of enforcement, of the node and of namespaces, of a container, and the cost of a context."""

import json
import re
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median_low
from typing import Final

import structlog

from agent.cluster.pods import NamespaceLabels
from agent.injection.toolkit import VENDOR
from agent.kit import files
from agent.model.pod import VGPU
from agent.vgpu.folders import About

# The cost of one CUDA context on this node's GPUs, learned from containers that run.
#
# A context takes hundreds of MiB by its existence, no call says how many, and they differ by GPU and driver.
# Of a container with a single process they are what the driver measures beyond what the library counts there.
# The library charges the figure ahead for each context, so that a cap holds from a program's first moment on;
# until there is a figure a table by product counts, whether anybody measures or not.
#
# What the library counts its container may write, and what it does not count (code, calls past it) looks like
# a context, so that a figure is no more than a hint. Of each namespace the least counts, of several
# namespaces the one in the middle, or below it; where fewer than three have one, nobody is charged more than
# the table says, or than contexts take on GPUs of today, and nobody ever more than half of its cap. Nor is a
# figure taken from a container that is above its cap.

# So many readings in a row have to be the very same: two moments are compared.
STABLE_READINGS = 3
LEAST_BYTES, MOST_BYTES = 16 << 20, 4 << 30
MOST_OF_A_CAP = 2
# Namespaces of which no single one sets a price, and the most that fewer may set.
AGREEING = 3
MOST_OF_FEW = 600 << 20

# The cost of a context on a GPU that nobody has measured yet is not documented. Measured by others, as what
# a first context takes from cuMemGetInfo with drivers of CUDA 13: 555 MiB on an RTX PRO 6000 Blackwell (188
# multiprocessors of 1,536 threads) and 107 MiB on an RTX 4060 Ti (34 of 1,536),
# github.com/ggml-org/llama.cpp/pull/23604; 300 to 400 MiB on a V100 (80 of 2,048) with modules of the
# program, github.com/pytorch/pytorch/issues/20532. These are about 2 KiB for each thread that the GPU can
# hold (CUDA C++ Programming Guide, technical specifications per compute capability). The table is made by
# that: an assumption that only hardware can settle. Driver branches before 535 (CUDA 12.2) load all of a
# program's code with its context, unless asked not to, and so take more. They are charged the same; what
# lies above counts once it is measured.
_THREAD_BYTES: Final = 2 << 10
_STEP: Final = 2 << 20
# Name of the product, by a word of its own -> multiprocessors, and threads that each can hold.
_GPUS: Final = {
    "V100": (80, 2048),
    "T4": (40, 1024),
    "A100": (108, 2048),
    "A30": (56, 2048),
    "A10": (72, 1536),
    "A10G": (80, 1536),
    "A16": (10, 1536),
    "A2": (10, 1536),
    "A40": (84, 1536),
    "L4": (58, 1536),
    "L20": (92, 1536),
    "L40": (142, 1536),
    "L40S": (142, 1536),
    "H100": (114, 2048),  # of the PCIe card, the smallest
    "H20": (78, 2048),
    "H800": (114, 2048),
    "H200": (132, 2048),
    "B200": (148, 2048),
    "B300": (148, 2048),
}


class Contexts:
    """Figures by GPU; one that has none yet takes that of the others, since a node's GPUs are alike."""

    def __init__(self, expected: Callable[[str], int] = lambda _: 0) -> None:
        """`expected`: bytes of a context on a GPU by its model; 0: the model is not known."""
        self._expected = expected
        self._readings: dict[str, deque[tuple[int, ...]]] = {}  # by folder
        self._learned: dict[str, tuple[str, str, int]] = {}  # GPU, namespace and bytes, by folder
        self._figures: dict[str, int] = {}  # by GPU; the last one stays when its containers are gone

    def of(self, gpu: str, cap_bytes: int) -> int:
        """The charge for each context of a container, in bytes; 0: not known yet."""
        expected = self._expected(gpu)
        figure = self._figures.get(gpu) or expected or min(self._figures.values(), default=0)
        return min(figure, cap_bytes // MOST_OF_A_CAP)

    def measured(
        self,
        key: str,
        place: tuple[str, str],
        memory_bytes: int,
        sole: tuple[int, int] | None,
        cap_bytes: int,
    ) -> None:
        """Take in a reading: what the driver measures, and what the library charged the `sole` process.

        Of that the first figure is all of it, the second what is for contexts. `place`: GPU and namespace of
        the container.
        """
        if sole is None or memory_bytes > cap_bytes:
            self._readings.pop(key, None)
            return
        readings = self._readings.setdefault(key, deque(maxlen=STABLE_READINGS))
        readings.append((memory_bytes, *sole))
        charged, of_contexts = sole
        found = memory_bytes - (charged - of_contexts)
        if (
            len(readings) == STABLE_READINGS
            and len(set(readings)) == 1
            and LEAST_BYTES <= found <= MOST_BYTES
        ):
            self._learn(key, place, found)

    def remembered(self, key: str, place: tuple[str, str], context_bytes: int, cap_bytes: int) -> None:
        """Take in what a container is charged that an earlier agent started."""
        if LEAST_BYTES <= context_bytes < min(cap_bytes // MOST_OF_A_CAP, MOST_BYTES):
            self._learn(key, place, context_bytes)

    def keep(self, keys: Collection[str]) -> None:
        """Forget containers that are not among these."""
        for gone in self._readings.keys() - set(keys):
            del self._readings[gone]
        for gone in self._learned.keys() - set(keys):
            del self._learned[gone]

    def _learn(self, key: str, place: tuple[str, str], found: int) -> None:
        gpu = place[0]
        self._learned[key] = (*place, found)
        least: dict[str, int] = {}
        for where, namespace, figure in self._learned.values():
            if where == gpu:
                least[namespace] = min(figure, least.get(namespace, figure))
        figure = median_low(least.values())
        self._figures[gpu] = (
            figure if len(least) >= AGREEING else min(figure, self._expected(gpu) or MOST_OF_FEW)
        )


def context_bytes(product: str) -> int:
    """By the name that NVML gives a GPU, such as `NVIDIA A100-SXM4-80GB`; 0: it is not in the table."""
    for word in re.split(r"[\s-]+", product):
        if found := _GPUS.get(word):
            return found[0] * found[1] * _THREAD_BYTES // _STEP * _STEP
    return 0


# CDI devices that have the driver itself limit a container's memory: one for each number of vGPU units.
#
# NVIDIA's hook `apply-cuda-memory-limits` reads two variables of the container's OCI configuration, in MiB,
# when the container is created, and sets the driver's limits for its cgroup (container toolkit 1.20.1, PR
# 2075; without them it does nothing). CDI edits come after the pod's own environment, so that a pod's own
# values do not count. The soft limit is set to 0 beside the limit: the hook would make it equal to the limit,
# and memory would be reserved. An error of the hook keeps the container from starting.

MEMORY_KIND = f"{VENDOR}/memory"
MEMORY_FILE = "gpu-node-agent-memory.json"
CDI_VERSION = "0.5.0"  # nothing newer is used, and old runtimes refuse newer files
LIMIT_VARIABLE, REQUEST_VARIABLE = "NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"
MEBIBYTES = VGPU.block_bytes >> 20


def memory_device(units: int) -> str:
    """The qualified name of the device that limits a container to so many units."""
    return f"{MEMORY_KIND}={units}"


def write_memory_devices(folder: Path, most_units: int) -> None:
    """Put the file in place in one step, with devices of 1 to `most_units`. Blocks. Raises OSError."""
    devices = [
        {
            "name": f"{units}",
            "containerEdits": {"env": [f"{LIMIT_VARIABLE}={units * MEBIBYTES}", f"{REQUEST_VARIABLE}=0"]},
        }
        for units in range(1, most_units + 1)
    ]
    content = {"cdiVersion": CDI_VERSION, "kind": MEMORY_KIND, "devices": devices}
    files.write(folder, MEMORY_FILE, json.dumps(content, separators=(",", ":")).encode())


# Levels of enforcement, of the node and of namespaces, and the limits of a container.

log = structlog.get_logger()


class Enforcement(Enum):
    """Levels of enforcement of memory; each includes the ones before it."""

    OFF = "off"
    REPORT = "report"  # containers that use more than their cap are reported
    LIBRARY = "library"  # the enforcement library refuses allocations, where it can be shown
    STRICT = "strict"  # no container starts without it, and what it does not know is refused

    @property
    def enforces(self) -> bool:
        """Whether containers are held to their cap, and not only measured."""
        return self in (Enforcement.LIBRARY, Enforcement.STRICT)


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """Limits of a running container.

    `injected` None: no process of it was seen on the GPU yet. `limited`: what the driver says of a container
    that it is to hold to its cap; None: it was not asked yet.
    """

    about: About
    injected: bool | None = None
    limited: bool | None = None

    @property
    def memory_bytes(self) -> int:
        """The cap."""
        return self.about.memory_bytes


class NamespaceEnforcement:
    """The settings of namespaces, by their labels."""

    def __init__(self, labels: NamespaceLabels | None) -> None:
        """None: the API server is not used, so there are none."""
        self._labels = labels
        self._reported: dict[str, str] = {}

    async def known(self) -> None:
        """Return once the labels have been seen, or could have been."""
        if self._labels:
            await self._labels.known()

    def of(self, namespace: str) -> Enforcement | None:
        """The setting of a namespace; None: that of the node holds.

        A label that cannot be understood is left out, and logged once.
        """
        if self._labels is None or (value := self._labels.of(namespace)) is None:
            return None
        try:
            return Enforcement(value)
        except ValueError:
            if self._reported.get(namespace) != value:
                known = self._reported.items()
                self._reported = {each: old for each, old in known if self._labels.of(each) == old}
                self._reported[namespace] = value
                log.warning(
                    "namespace_label_ignored",
                    namespace=namespace,
                    label=self._labels.label,
                    value=value,
                    known=", ".join(each.value for each in Enforcement),
                )
            return None
