"""Simulated GPUs on a real node: the agent, the kubelet and the API server are real, NVML is not.

The machine's state lies in a file below host.run, where `gpu-node-agent fault` finds it.
"""

from pathlib import Path

from agent.settings import Settings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.mapping import MappingError
from agent.simulator.profiles import PROFILES

FILE = "simulated-machine"
DRIVER = "driver/nvidia/version"  # below /proc, while the kernel module is loaded


class NotSimulated(Exception):
    """The node's GPUs are not simulated, or cannot be; the text names the remedy."""


def machine_of(settings: Settings) -> SimulatedMachine:
    """The node's machine, made on the first call and after a change of the profile. Blocks.

    Raises NotSimulated, also where NVIDIA's driver is loaded: simulated GPUs would hide the real ones.
    """
    name = settings.simulator.profile
    if name not in PROFILES:
        raise NotSimulated(f"simulator.profile is {name}; use one of {', '.join(sorted(PROFILES))}")
    driver = Path(settings.host.proc) / DRIVER
    if driver.exists():
        raise NotSimulated(
            f"simulator.profile is {name}, but NVIDIA's driver is loaded on this node ({driver}): take "
            "simulator.profile out here, or keep the agent with it to nodes without GPUs"
        )
    file = _file(settings)
    try:
        found = SimulatedMachine.attach(file)
        if found.mapping.state.profile.decode() == name:
            return found
    except (FileNotFoundError, MappingError):
        pass  # none yet, or of another version of the agent
    file.parent.mkdir(parents=True, exist_ok=True)
    made = SimulatedMachine.create(name, file, node=settings.cluster.own_node)
    sysfs = Path(settings.host.sysfs)
    for slot in made.slots:
        gpu = made.mapping.gpu(slot)
        if not (sysfs / f"devices/system/node/node{gpu.numa_node}").exists():
            gpu.numa_node = -1  # the kubelet knows no such node
    return made


def attached(settings: Settings) -> SimulatedMachine:
    """The machine that the node's agent runs on. Blocks. Raises NotSimulated."""
    if settings.simulator.profile is None:
        raise NotSimulated(
            "the GPUs of this node are real: faults are for simulated ones (simulator.profile)"
        )
    try:
        return SimulatedMachine.attach(_file(settings))
    except FileNotFoundError as error:
        raise NotSimulated(f"{error.filename} is not there: no agent simulates GPUs here") from error
    except MappingError as error:
        raise NotSimulated(str(error)) from error


def _file(settings: Settings) -> Path:
    return Path(settings.host.run) / FILE
