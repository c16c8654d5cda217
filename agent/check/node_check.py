"""`gpu-node-agent check node`: obstacles to offering this node's GPUs, with the remedies."""

from collections.abc import Iterator
from dataclasses import dataclass

from agent.app.wings import WINGS
from agent.check.claims import ClaimSupport, claim_support, look_at_claims
from agent.check.driver_check import look_at_machine
from agent.check.host import HostFiles
from agent.check.injection import look_at_injection, way_of
from agent.check.kubelet import look_at_kernel, look_at_kubelet
from agent.check.own_specification import Own, look_at_specification, own_specification
from agent.check.software import CheckedNode, NodeNotRead, node_facts
from agent.model.look import Look
from agent.nvml.port import NvmlPort
from agent.settings import Settings


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
