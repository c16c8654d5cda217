"""Requests of a ResourceClaim, checked: the devices of ours that it has, or why it is refused. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from agent.model.modes import SHARES, units
from agent.model.pod import CORES, Pod
from agent.model.resource_claim import (
    DRIVER,
    AskedDevice,
    ClaimedShare,
    DeviceConfiguration,
    DeviceResult,
    HeldClaim,
    ResourceClaim,
    parse_device,
)

# The opaque configuration of a class or a claim: strict, so that nothing meant is passed over. Pure.

API_VERSION = "gpu-node-agent.io/v1"
KIND = "ShareConfiguration"


class BadConfiguration(Exception):
    """Parameters that are not understood; the text says what is wrong, and what is right."""


class ShareConfiguration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the devices of a request."""

    # The order of the slices is that of binpack. Which device it is kube-scheduler says: no other can be had.
    placement: Literal["binpack"] = "binpack"
    # Among MPS shares of one GPU: kernels of low ones give way (CUDA_MPS_CLIENT_PRIORITY).
    priority: Literal["normal", "low"] = "normal"


def parse(parameters: object) -> ShareConfiguration:
    """Raises BadConfiguration."""
    if not isinstance(parameters, dict):
        raise BadConfiguration("it is no object")
    given = {**parameters}
    version, kind = given.pop("apiVersion", None), given.pop("kind", None)
    if (version, kind) != (API_VERSION, KIND):
        text = f"apiVersion {version!r} and kind {kind!r}"[:200]
        raise BadConfiguration(f"it has {text}; known is {API_VERSION}, {KIND}")
    try:
        return msgspec.convert(given, ShareConfiguration)
    except msgspec.ValidationError as error:
        raise BadConfiguration(
            f"{str(error)[:200]}; keys are placement (binpack) and priority (normal, low)"
        ) from error


GIB = 1 << 30


class ClaimRefused(Exception):
    """A claim that is not prepared; the text names object, cause and remedy."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a GPU of this node that is known: the most that a share may be."""

    uuid: str
    gibibytes: int


def asked(claim: ResourceClaim, uid: str, pool: str, gpus: Mapping[str, Bounds]) -> HeldClaim:
    """The devices of ours that are allocated to a claim. `gpus`: by their UUIDs in lower case.

    Raises ClaimRefused: nothing of such a claim is prepared.
    """
    where = f"claim {claim.metadata.namespace}/{claim.metadata.name}"
    if claim.metadata.uid != uid:
        raise ClaimRefused(f"{where} is another one now: its UID is not {uid}; delete the pod")
    if claim.status.allocation is None:
        raise ClaimRefused(f"{where} is not allocated: nothing is known to prepare")
    found = claim.status.allocation.devices
    ours = [each for each in found.results if each.driver == DRIVER]
    if not ours:
        raise ClaimRefused(f"{where} has no device of driver {DRIVER}")
    devices = [_asked(where, each, found.config, pool, gpus) for each in ours]
    held = [each.device for each in devices if each.share.mode is not SHARES]
    if len(set(held)) < len(held):
        raise ClaimRefused(f"{where} has a whole GPU twice")
    return HeldClaim(uid, claim.metadata.namespace, claim.metadata.name, tuple(devices))


def _asked(
    where: str,
    result: DeviceResult,
    configurations: Iterable[DeviceConfiguration],
    pool: str,
    gpus: Mapping[str, Bounds],
) -> AskedDevice:
    parsed = parse_device(result.device)
    bounds = gpus.get(parsed[0]) if parsed else None
    if result.pool != pool or parsed is None or bounds is None:
        raise ClaimRefused(
            f"{where} has device {result.pool}/{result.device}, which this node does not have: delete the "
            "pod and the claim"
        )
    if result.admin_access:
        raise ClaimRefused(
            f"{where} asks for {result.device} with adminAccess, which chooses no mode of a GPU: nothing is "
            "prepared; read figures by the agent's metrics"
        )
    mode, share_id = parsed[1], result.share_id
    chosen = _configured(where, result.request, configurations)
    name = where.rpartition("/")[2]
    if mode is not SHARES:
        if share_id or chosen.priority != "normal":
            raise ClaimRefused(f"{where} has the whole GPU {result.device}, of which there are no shares")
        return AskedDevice(result.request, pool, result.device, ClaimedShare(bounds.uuid, mode, claim=name))
    cores, gib = _amounts(where, result, bounds)
    low = chosen.priority == "low"
    share = ClaimedShare(bounds.uuid, mode, cores, gib, name, share_id, low)
    return AskedDevice(result.request, pool, result.device, share)


def _amounts(where: str, result: DeviceResult, bounds: Bounds) -> tuple[int, int]:
    """Cores and GiB of a share. Raises ClaimRefused where they are not what the slices allow."""
    got = result.consumed_capacity
    try:
        cores, memory, clients = units(got["cores"]), units(got["memory"]), units(got["clients"])
    except (KeyError, ValueError) as error:
        raise ClaimRefused(
            f"{where} has a share of {result.device} without cores, memory and clients: does the scheduler "
            f"have the gate DRAConsumableCapacity? ({error})"
        ) from error
    gib, rest = divmod(memory, GIB)
    fits = 1 <= cores <= CORES and 1 <= gib <= bounds.gibibytes and not rest and clients == 1
    if not result.share_id or not fits:
        raise ClaimRefused(
            f"{where} has {cores} cores, {got['memory']} of memory and {clients} clients of {result.device}: "
            f"a share is 1 to {CORES} cores, 1 to {bounds.gibibytes} GiB in whole ones, and 1 client"
        )
    return cores, gib


def _configured(
    where: str, request: str, configurations: Iterable[DeviceConfiguration]
) -> ShareConfiguration:
    """The last one that is for us and for a request; a claim's own stand behind its class's."""
    chosen = ShareConfiguration()
    for each in configurations:
        of_it = not each.requests or {request, request.partition("/")[0]} & {*each.requests}
        if each.opaque and each.opaque.driver == DRIVER and of_it:
            try:
                chosen = parse(each.opaque.parameters)
            except BadConfiguration as error:
                raise ClaimRefused(f"{where} has a configuration that is not understood: {error}") from error
    return chosen


def check_containers(pod: Pod, claims: Sequence[HeldClaim]) -> None:
    """Refuse what a container cannot use: shares of two GPUs, or one beside a whole GPU. Raises ClaimRefused.

    Variables carry the limits of a share, and those of two overwrite each other.
    """
    by_name = {each.name: each for each in claims}
    for container, devices in devices_of(pod, by_name).items():
        shares = [each for each in devices if each.share.mode is SHARES]
        if shares and len(devices) > 1:
            raise ClaimRefused(
                f"container {container} of pod {pod.namespace}/{pod.name} would have {len(shares)} MPS "
                f"share(s) and {len(devices) - len(shares)} whole GPU(s), whose variables overwrite each "
                "other: one share for a container, and no GPU beside it"
            )


def devices_of(pod: Pod, claims: Mapping[str, HeldClaim]) -> dict[str, list[AskedDevice]]:
    """The devices of each container of a pod, by the claims' names."""
    found: dict[str, list[AskedDevice]] = {}
    for container, name, request in pod.claimed_devices():
        for device in claims[name].devices if name in claims else ():
            if not request or request in (device.request, device.request.partition("/")[0]):
                found.setdefault(container, []).append(device)
    return found
