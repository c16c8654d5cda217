"""The document of `gpu-node-agent top`: the moving figures of GPUs and containers."""

from collections.abc import Mapping
from types import MappingProxyType

from agent.kit.tasks import Cell
from agent.model.holding import Place
from agent.model.modes import Mode
from agent.modes.planner import SwitchState
from agent.modes.wing import Document, Wing
from agent.telemetry.container_use import ContainerUse
from agent.telemetry.containers import Attribution
from agent.telemetry.sampler import TakenSample
from agent.telemetry.series import THROTTLE_REASONS, Reading, Sources
from agent.web.control import ControlServer

NOTHING: Mapping[Place, float] = MappingProxyType({})


def add_to(
    server: ControlServer, sources: Sources, switch: Cell[SwitchState], wings: Mapping[Mode, Wing]
) -> None:
    async def top(_: Mapping[str, object]) -> Document:
        modes = {each.uuid: each.active.mode.value for each in switch.value.gpus}
        allotted = {place: share for each in wings.values() for place, share in each.allotted().items()}
        return document(sources.read(), modes, allotted)

    server.add("top", top)


def document(
    reading: Reading, modes: Mapping[str, str], allotted: Mapping[Place, float] = NOTHING
) -> Document:
    """The newest sampling round. Figures that a GPU does not have, or that cannot be read now, are null."""
    return {
        "gpus": [
            {
                "index": state.gpu.index,
                "uuid": state.uuid,
                "model": state.gpu.product,
                "mode": modes.get(state.uuid, "off"),
                "health": state.health.state.value,
                "memoryTotalBytes": state.gpu.memory_bytes,
                **_figures(reading.samples.get(state.uuid)),
            }
            for state in reading.snapshot.gpus
        ],
        "containers": [_container(each, allotted) for each in reading.uses.containers],
    }


def _figures(taken: TakenSample | None) -> Document:
    if taken is None:
        return {"sampled": False}
    sample = taken.sample
    spans = {name: {"mean": span.mean, "max": span.most} for name, span in taken.spans.items()}
    throttle = sample.throttle or 0
    return {
        "sampled": True,
        "utilizationRatio": sample.gpu_utilization_ratio,
        "memoryUsedBytes": sample.memory_used_bytes,
        "powerWatts": sample.power_watts,
        "powerLimitWatts": sample.power_limit_watts,
        "temperatureCelsius": sample.temperature_celsius,
        "smClockMhz": sample.clocks_mhz.get("sm"),
        "throttledBy": [reason for bit, reason in THROTTLE_REASONS if throttle & bit],
        "processes": None if sample.processes is None else len(sample.processes),
        "window": spans,
    }


def _container(each: ContainerUse, allotted: Mapping[Place, float]) -> Document:
    use, share = each.use, each.use.share
    place = (share.namespace, share.pod, share.container, share.gpu)
    memory_known = use.memory_grade is not Attribution.ALLOCATED
    return {
        "namespace": share.namespace,
        "pod": share.pod,
        "container": share.container,
        "gpu": share.index,
        "mode": share.mode.value,
        "memoryUsedBytes": use.memory if memory_known else None,
        "memoryLimitBytes": share.memory_limit,
        "memoryAttribution": use.memory_grade.value,
        "utilizationRatio": None if use.utilization_grade is Attribution.ALLOCATED else use.utilization,
        "utilizationMaxRatio": each.utilization.most if each.utilization else None,
        "coreLimitRatio": share.core_limit,
        "coreAllottedRatio": allotted.get(place),  # of those that are held to compute
        "utilizationAttribution": use.utilization_grade.value,
        "processes": use.processes if memory_known else None,
    }
