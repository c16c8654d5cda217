"""Events that a seed chooses: what users do, and what goes wrong. Each is one step."""

from tests.storm import lingering, seams
from tests.storm.acts import agents, api, claims, extenders, gpus, kubelets, mps, parted, tenants, users
from tests.storm.acts.family import Act, Family
from tests.storm.world import Shape, World

USERS = Family("users", {users.create_pod: 40, users.delete_pod: 25})
# Of users, too, where the node's GPUs may be devices of DRA.
CLAIMS = Family("claims", {claims.create: 40, claims.share: 15, claims.drop: 4, claims.delete: 25})
MEDDLED_CLAIMS = Family("claims meddled with", {claims.wipe: 3, claims.intrude: 1, claims.forbid: 3})
# Of every storm, whatever its shape.
FAULTS = (
    Family("labels", {users.label: 8}),
    Family("forgeries", {users.forge_annotation: 6}),
    Family("static pods", {users.static_pod: 4}),
    Family("gpus", {gpus.xid: 4, gpus.fall_off: 2, gpus.plug: 2}),
    Family("nvml", {gpus.nvml_fault: 3}),
    Family("agent killed", {agents.kill: 3}),
    Family("agent terminated", {agents.terminate: 3}),
    Family("agent updated", {agents.update: 2}),
    Family("files torn", {agents.tear_state: 2, kubelets.tear_checkpoint: 3}),
    Family("kubelet", {kubelets.restart: 4, kubelets.slow: 2, kubelets.forget: 2}),
    Family("reboots", {kubelets.reboot: 1}),
    Family("api away", {api.away: 4}),
    Family("api refuses", {api.refuses: 5, api.lost_answer: 2}),
    Family("api slow", {api.slow: 3}),
    Family("api silent", {api.silence: 3, api.mute_switch: 1}),
)
MPS_FAULTS = (Family("mps daemons", {mps.die: 4, mps.hang: 3, mps.refuse: 2, mps.forge: 2, mps.meddle: 2}),)
LOST_RECORDS = Family("kubelet records", {kubelets.amnesia: 1, kubelets.late_pods: 2, kubelets.records: 3})
MPS_CLIENTS = Family("mps clients", {mps.join: 10, mps.leave: 4, mps.die_under_clients: 2})
EXTENDER_FAULTS = (
    Family("extender ended", {extenders.end: 4}),
    Family("extender away", {extenders.away: 3, extenders.slow: 3}),
    Family("pods without extender", {extenders.place_without: 10}),
)
DROPPED_STREAMS = Family("streams dropped", {kubelets.drop_stream: 4})
TENANTS = Family(
    "tenants", {tenants.twins: 20, tenants.with_neighbour: 16, tenants.again: 12, tenants.linger: 16}
)
BLIND = Family("kubelet blind", {kubelets.blind: 2})
SLOW_RECORDS = Family("records slow", {kubelets.slow_records: 4})
CLOCK_STEPS = Family("clock set", {agents.step_clock: 3})
OUTAGES = Family("api outages", {api.outage: 1})
LATEST = (TENANTS, BLIND, SLOW_RECORDS, CLOCK_STEPS, OUTAGES)
HUNG_PROCESSES = Family("processes hang", {tenants.outlive: 8})
RESIZES = Family("resizes", {users.resize: 12})
INSTANCES = (
    Family("instances", {parted.label: 8, parted.make: 5, parted.destroy: 3, parted.stray: 3}),
    Family("instance faults", {parted.refuse: 4, parted.reset: 2, parted.xid: 2}),
)


def families(shape: Shape) -> tuple[Family, ...]:
    """Faults that a world of this shape can have."""
    return (
        *FAULTS,
        *(MPS_FAULTS if shape.mps else ()),
        *((RESIZES,) if shape.resize else ()),
    )


def later_families(shape: Shape) -> tuple[Family, ...]:
    """Those that came later: each has a draw of its own, so that seeds stay what they were."""
    return (
        LOST_RECORDS,
        *((MPS_CLIENTS,) if shape.mps else ()),
        *(EXTENDER_FAULTS if shape.extender else ()),
        DROPPED_STREAMS,
        *LATEST,
        HUNG_PROCESSES,
        *(INSTANCES if shape.mig else ()),
        *((CLAIMS, MEDDLED_CLAIMS) if shape.claims else ()),
    )


def name_of(act: Act) -> str:
    """The name by which a plan knows an act."""
    return f"{act.__module__.rpartition('.')[2]}.{act.__name__}"


ACTS = {
    name_of(act): act
    for family in (
        USERS,
        *FAULTS,
        *MPS_FAULTS,
        RESIZES,
        LOST_RECORDS,
        MPS_CLIENTS,
        *EXTENDER_FAULTS,
        DROPPED_STREAMS,
        *LATEST,
        HUNG_PROCESSES,
        *INSTANCES,
        CLAIMS,
        MEDDLED_CLAIMS,
    )
    for act in family.weights
}


async def calm(world: World) -> None:
    """All faults end."""
    world.clear_nvml_faults()
    for slot in sorted(world.lost):
        world.machine.restore(slot)
    world.lost.clear()
    world.http.reachable = True
    world.http.silent = set()
    world.api_faults.clear()
    world.api_delay, world.lost_answers = 0.0, 0
    world.kubelet_delay[0] = 0.0
    world.daemons.refuses = False
    for daemon in world.daemons.daemons:
        daemon.hangs = False
        if daemon.forged:
            world.daemons.end(daemon.process.pid)
    mps.reap(world)
    if world.parts.strays:
        world.parts.strays = 0
        world.machine.processes.stop(parted.STRAY)
    for pid in tuple(world.outliving):
        lingering.end(world, pid)
    for daemon in world.daemons.daemons:
        for pid in tuple(daemon.clients):
            daemon.leave(pid)
    kubelets.mend_checkpoint(world)
    seams.KUBELET.calm()
    world.kubelet.api.resources.forbidden_reads = 0
    world.neighbour.calm()
    if world.shape.extender:
        await world.extenders.calm()
    await world.kubelet_up.wait()
    await world.start_agent()


__all__ = [
    "ACTS",
    "CLAIMS",
    "FAULTS",
    "USERS",
    "Act",
    "Family",
    "calm",
    "families",
    "later_families",
    "name_of",
]
