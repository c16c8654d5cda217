"""Whether a cluster can keep devices that exclude each other and are shared: version and feature gates."""

import re
from collections.abc import Mapping

import msgspec

from agent.cluster.api import ApiRefused, KubeApi
from agent.dra.slices import PATH, UNAVAILABLE, DeviceOffer, Document, contents, missing_gates, writes
from agent.model.gpu import Gpu
from agent.model.modes import SHARES, WHOLE_GPUS

# Below, the scheduler counts devices of two drivers under one pool's name together (kubernetes #140434).
LEAST = (1, 36, 5)
LEAST_KUBELET = (1, 36)
_PROBE = Gpu("GPU-00000000-0000-0000-0000-000000000000", 0, 0, "0000:00:00.0", "probe", 16 << 30, (9, 0))


class _Version(msgspec.Struct):
    version: str = msgspec.field(name="gitVersion", default="")


async def problem_of(api: KubeApi, node: str, kubelet: str) -> str:
    """Why the node cannot offer devices by DRA, with the remedy; empty: it can. Raises ApiError.

    Slices are sent as they will be, but for a trial (dryRun): a server drops fields of a gate that is off.
    """
    served = (await api.read("/version", _Version)).version
    for whose, version, least in (("API server", served, LEAST), ("kubelet", kubelet, LEAST_KUBELET)):
        found = parsed(version)
        if found and found < least:
            return f"the {whose} is {version}; DRA needs Kubernetes {'.'.join(map(str, least))} or newer"
    taints = dict.fromkeys((WHOLE_GPUS, SHARES), ((UNAVAILABLE, "probe"),))
    offer = DeviceOffer(_PROBE, (WHOLE_GPUS, SHARES), 1, taints=taints)
    gates: set[str] = set()
    for write in writes(node, None, _probes(node, offer), {}):
        try:
            answer = await api.post(PATH, write.body, query={"dryRun": "All"})
        except ApiRefused as error:
            if error.status == 404:
                return f"API server {served} has no resource.k8s.io/v1: turn the API group on"
            raise
        gates |= {*missing_gates(write.body["spec"], msgspec.json.decode(answer)["spec"])}
    if gates:
        return f"API server {served} drops what devices need: turn on {', '.join(sorted(gates))}"
    return ""


def _probes(node: str, offer: DeviceOffer) -> Mapping[str, Document]:
    """Slices by names that none has."""
    return {f"{name}-probe": content for name, content in contents(node, [offer], None).items()}


def parsed(version: str) -> tuple[int, ...]:
    """`v1.36.5-gke.1` as numbers; empty: it is no version."""
    found = re.match(r"v?(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?", version)
    return tuple(int(each or 0) for each in found.groups()) if found else ()
