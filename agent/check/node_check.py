"""`gpu-node-agent check node`: obstacles to offering this node's GPUs, with the remedies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.app.wings import WINGS
from agent.check.claims import ClaimSupport, claim_support, look_at_claims
from agent.check.host import HostFiles
from agent.check.injection import Own, look_at_injection, look_at_specification, own_specification, way_of
from agent.check.kubelet import CheckedNode, NodeNotRead, look_at_kernel, look_at_kubelet, node_facts
from agent.model.cuda import dotted
from agent.model.look import Look
from agent.modes.wing import Machine
from agent.nvml.port import NvmlError, NvmlPort
from agent.settings import Settings

# Looks at the driver and its GPUs.


def look_at_machine(nvml: NvmlPort, state: Path, root: Path | None = None) -> tuple[Machine, Sequence[Look]]:
    """Ask NVML once. `state`, `root`: see Machine. Blocks."""
    try:
        driver = nvml.open()
    except NvmlError as error:
        return Machine(None, (), state, root), (Look.failed("driver", f"{error}"),)
    looks = [Look.ok("driver", f"{driver.version}, serves CUDA {dotted(driver.cuda_version)}")]
    gpus = []
    try:
        for index in range(nvml.count()):
            try:
                gpus.append(nvml.describe(index))
            except NvmlError as error:
                looks.append(Look.warning("GPUs", f"GPU {index} cannot be described: {error}"))
    except NvmlError as error:
        looks.append(Look.failed("GPUs", f"the driver does not say how many there are: {error}"))
        return Machine(driver, (), state, root), looks
    finally:
        nvml.close()
    if gpus:
        products = ", ".join(sorted({gpu.product for gpu in gpus}))
        looks.append(Look.ok("GPUs", f"{len(gpus)} x {products}"))
    else:
        looks.append(Look.failed("GPUs", "the driver knows no GPU; see dmesg and nvidia-smi"))
    return Machine(driver, tuple(gpus), state, root), looks


@dataclass(frozen=True, slots=True)
class Observation:
    host: HostFiles
    own: Own
    facts: CheckedNode | None
    unread: str = ""  # why there are no facts
    claims: ClaimSupport | None = None  # None: no GPU is offered by claims


async def observe(settings: Settings, host: HostFiles) -> Observation:
    own = await own_specification(settings, host)
    facts, unread = None, ""
    try:
        facts = await node_facts(settings.cluster)
    except NodeNotRead as error:
        unread = str(error)
    return Observation(host, own, facts, unread, await claim_support(settings, facts))


def look(settings: Settings, nvml: NvmlPort, seen: Observation) -> Iterator[Look]:
    """Look at everything, one after the other. Blocks."""
    machine, looks = look_at_machine(nvml, seen.host.folder(settings.host.state), seen.host.root)
    yield from looks
    for wing in WINGS:
        yield from wing.checks(settings, machine)
    way = way_of(settings, seen.host, seen.facts, seen.own, driver=machine.driver is not None)
    yield from look_at_injection(way)
    yield from look_at_specification(settings, seen.host, seen.own, machine, needed=way.by_own_alone)
    yield from look_at_claims(settings, seen.host, seen.claims, by_cdi=way.by_cdi)
    yield from look_at_kubelet(settings, seen.host, seen.facts, seen.unread)
    yield from look_at_kernel(settings, seen.host)
