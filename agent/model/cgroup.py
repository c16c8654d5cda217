"""From a process's cgroup to its pod and container: pure.

Kubelets write the pod's UID and the container's ID into cgroup paths, in one of two styles (cgroupfs:
`/kubepods/burstable/pod<uid>/<id>`, systemd: `/kubepods.slice/.../kubepods-burstable-pod<uid>.slice/
cri-containerd-<id>.scope`), on v1 once per controller and on v2 once.
"""

import re
from dataclasses import dataclass

MPS_CGROUP = "gpu-node-agent-mps"  # of the agent's MPS daemons and their servers
# The kubelet names a static pod by a hash of its manifest, the API server all others by a UUID.
STATIC_UID = re.compile(r"[0-9a-f]{32}")
_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD = re.compile(rf"(?:^|[/-])pod({_UID})(?:\.slice)?(?=/|:|$)")
_UPWARDS = re.compile(r"^(/\.\.)+")
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container by the names that its cgroup carries. Static pods have a UID without dashes."""

    pod_uid: str
    container_id: str


def container_of(cgroups: str) -> ContainerRef | None:
    """The container that the text of `/proc/<pid>/cgroup` names; None: it is in no pod."""
    for line in cgroups.split("\n"):  # a cgroup's name may hold other ends of lines
        path = line.split(":", 2)[-1]
        pod = _POD.search(path)
        if pod is None:
            continue
        container = _CONTAINER.search(path, pod.end(1))
        return ContainerRef(pod[1].replace("_", "-"), container[1] if container else "")
    return None


def kubelet_of(cgroups: str) -> str | None:
    """The place of the kubelet whose pod a process is in, the same for all of its pods; None: in no pod.

    A host may have several, each of kind's nodes its own. From a cgroup namespace paths begin with `/..`.
    """
    for line in cgroups.split("\n"):
        path = line.split(":", 2)[-1]
        if (pod := _POD.search(path)) is not None:
            root = path.find("kubepods", 0, pod.start())
            place = path[: pod.start() if root < 0 else root]
            return _UPWARDS.sub("", place).rstrip("/")
    return None


def started_by_agent(cgroups: str, own: str) -> bool:
    """Whether `/proc/<pid>/cgroup` belongs to a process that the agent started.

    The daemons' own cgroup stands at the root of a hierarchy, where no pod can put a process. On v1 one
    hierarchy is enough: an older agent may have been unable to join another, and left its daemon in its own
    pod's there. `own` is the agent's: a daemon that could get no cgroup of its own stays in that.
    """
    if cgroups == own:
        return True
    # A cgroup's name may hold other ends of lines.
    lines = (line for line in cgroups.split("\n") if line.endswith(f"/{MPS_CGROUP}"))
    return any(container_of(line) is None for line in lines)
