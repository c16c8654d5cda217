"""The pods of this node: what their containers ask for, as the API server shows it."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress

import anyio
import msgspec

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.cluster.cgroup_uids import CgroupUids, cgroup_uids
from agent.cluster.reflector import Metadata, Reflector
from agent.model import demand

FINISHED = ("Succeeded", "Failed")
MISS_SECONDS = 1.0  # a GET in the middle of an admission, which holds up all pods of the node


class Resources(msgspec.Struct, frozen=True):
    """ResourceRequirements; quantities as text."""

    limits: dict[str, str] = msgspec.field(default_factory=dict)


class Capabilities(msgspec.Struct, frozen=True):
    """Beyond those that the container runtime gives everybody."""

    add: list[str] = msgspec.field(default_factory=list)


class SecurityContext(msgspec.Struct, rename="camel", frozen=True):
    """SecurityContext of a pod or of a container; the container's wins."""

    run_as_user: int | None = None
    run_as_non_root: bool | None = None
    privileged: bool | None = None
    capabilities: Capabilities | None = None


class VolumeMount(msgspec.Struct, rename="camel", frozen=True):
    name: str
    mount_path: str


class HostPath(msgspec.Struct, frozen=True):
    path: str


class Volume(msgspec.Struct, rename="camel", frozen=True):
    """A volume of a pod; of other kinds nothing is read."""

    name: str
    host_path: HostPath | None = None


class Container(msgspec.Struct, rename="camel", frozen=True):
    name: str
    resources: Resources = Resources()
    restart_policy: str | None = None  # "Always" makes an init container a sidecar
    security_context: SecurityContext | None = None
    volume_mounts: list[VolumeMount] = msgspec.field(default_factory=list)


class PodSpec(msgspec.Struct, rename="camel", frozen=True):
    containers: list[Container] = msgspec.field(default_factory=list)
    init_containers: list[Container] = msgspec.field(default_factory=list)
    node_name: str = ""
    security_context: SecurityContext | None = None
    volumes: list[Volume] = msgspec.field(default_factory=list)
    host_pid: bool = msgspec.field(default=False, name="hostPID")


class ContainerStatus(msgspec.Struct, frozen=True):
    """A container that was created; `container_id` with its runtime's scheme, `containerd://...`."""

    name: str
    container_id: str = msgspec.field(default="", name="containerID")


class ExtendedResourceRequest(msgspec.Struct, rename="camel", frozen=True):
    """A resource of a container that a DRA driver provides: the kubelet asks no device plugin for it."""

    container_name: str
    resource_name: str


class ExtendedResourceClaim(msgspec.Struct, rename="camel", frozen=True):
    """PodExtendedResourceClaimStatus, Kubernetes 1.34 and later."""

    request_mappings: list[ExtendedResourceRequest] = msgspec.field(default_factory=list)


class PodStatus(msgspec.Struct, rename="camel", frozen=True):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    start_time: str | None = None
    container_statuses: list[ContainerStatus] = msgspec.field(default_factory=list)
    init_container_statuses: list[ContainerStatus] = msgspec.field(default_factory=list)
    extended_resource_claim_status: ExtendedResourceClaim | None = None


class Pod(msgspec.Struct, frozen=True):
    """A pod; fields that are not named here are skipped while decoding."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def pending(self) -> bool:
        """Whether it still waits to be admitted or started."""
        return self.status.phase == "Pending" and not self.metadata.deletion_timestamp

    @property
    def container_names(self) -> dict[str, str]:
        """Names of its containers by ID, without the runtime's scheme."""
        status = self.status
        return {
            each.container_id.rpartition("://")[2]: each.name
            for each in (*status.container_statuses, *status.init_container_statuses)
            if each.container_id
        }

    @property
    def finished(self) -> bool:
        """Whether it runs no more, and so holds nothing."""
        return self.status.phase in FINISHED

    def may_run_as_root(self, container: str) -> str | None:
        """Why a container may run as root, in words; None: its security context rules it out."""
        pod = self.spec.security_context
        both = (*self.spec.containers, *self.spec.init_containers)
        own = next((each.security_context for each in both if each.name == container), None)
        user = next((s.run_as_user for s in (own, pod) if s and s.run_as_user is not None), None)
        if user is not None:
            return None if user else "runAsUser is 0"
        refused = next((s.run_as_non_root for s in (own, pod) if s and s.run_as_non_root is not None), None)
        return None if refused else "its user is the image's choice"

    def lacks(self, resources: AbstractSet[str], held: AbstractSet[tuple[str, str]]) -> bool:
        """Whether it asks for any of `resources` that it does not hold: (container, resource).

        One half of a pair is not enough. Plain init containers hold nothing by the kubelet's records once
        they have ended, so that their requests count only where the pod holds nothing at all.
        """
        if not held:
            return self.asks_for(resources)
        return any(
            (each.name, resource) not in held
            for each in self.spec.containers
            for resource in resources & self.asked_of(each).keys()
        )

    def asks_for(self, resources: AbstractSet[str]) -> bool:
        """Whether any of its containers asks the kubelet for one of `resources`."""
        spec = self.spec
        return any(
            resources & self.asked_of(each).keys() for each in (*spec.containers, *spec.init_containers)
        )

    def asked_of(self, container: Container) -> dict[str, int]:
        """Whole units of extended resources for which the kubelet asks device plugins.

        A limit of 0 asks for nothing. Left out is what is no whole number of units, and what comes by DRA.
        """
        limits, claim = container.resources.limits, self.status.extended_resource_claim_status
        given = claim.request_mappings if claim and limits else ()
        by_dra = {each.resource_name for each in given if each.container_name == container.name}
        found: dict[str, int] = {}
        for resource, quantity in limits.items():
            if "/" in resource and resource not in by_dra:  # extended resources alone count whole units
                with suppress(ValueError):
                    found[resource] = demand.units(quantity)
        return {resource: count for resource, count in found.items() if count}


def convert(pod: Pod) -> demand.Pod:
    """The API's pod as the model knows it; limits that are not whole numbers of units are left out."""
    spec = pod.spec
    containers = [
        demand.Container(
            each.name,
            pod.asked_of(each),
            demand.Stage.SIDECAR if each.restart_policy == "Always" else demand.Stage.INIT,
        )
        for each in spec.init_containers
    ]
    containers += [demand.Container(each.name, pod.asked_of(each)) for each in spec.containers]
    return demand.Pod(
        pod.metadata.namespace,
        pod.metadata.name,
        tuple(containers),
        pod.metadata.uid,
        pod.metadata.annotations,
        pod.status.phase,
        pod.metadata.deletion_timestamp is not None,
        pod.status.start_time is not None,
    )


class PodCache:
    """Pods bound to one node, as `reflector` keeps them."""

    def __init__(self, api: KubeApi, node: str, node_uid: Callable[[], str | None] = lambda: None) -> None:
        """`node_uid`: the UID of the Node object; None: not known yet."""
        self._api = api
        self._node = node
        self._node_uid = node_uid
        self._by_cgroup: tuple[object, str | None, CgroupUids[Pod]] = (None, None, CgroupUids({}))
        self.reflector = Reflector(
            api, "/api/v1/pods", {"fieldSelector": f"spec.nodeName={node}"}, Pod, "pods"
        )

    def pods(self) -> Mapping[str, Pod]:
        """The pods as last seen, by UID."""
        return self.reflector.items.value

    def cgroup_uids(self) -> CgroupUids[Pod]:
        """The pods as last seen by their cgroups' UIDs, with the UIDs that more than one pod claims."""
        pods, uid = self.pods(), self._node_uid()
        if self._by_cgroup[0] is not pods or self._by_cgroup[1] != uid:
            self._by_cgroup = (pods, uid, cgroup_uids(pods, self._node, uid))
        return self._by_cgroup[2]

    def find(self, namespace: str, name: str) -> Pod | None:
        for pod in self.pods().values():
            if pod.metadata.name == name and pod.metadata.namespace == namespace:
                return pod
        return None

    async def get(self, namespace: str, name: str) -> Pod | None:
        """A pod from the copy, or by one GET within a second; None: there is no such pod. Raises ApiError.

        A copy that is ending may have a namesake that the watch has not shown yet: ask then, too.
        """
        pod = self.find(namespace, name)
        if pod and not pod.metadata.deletion_timestamp and not pod.finished:
            return pod
        try:
            with anyio.fail_after(MISS_SECONDS):
                data = await self._api.get(
                    f"/api/v1/namespaces/{namespace}/pods/{name}", deadline=MISS_SECONDS
                )
        except ApiRefused as error:
            if error.status == 404:
                return None
            raise
        except TimeoutError as error:
            raise ApiError(f"pod {namespace}/{name} could not be read within {MISS_SECONDS:g} s") from error
        try:
            return msgspec.json.decode(data, type=Pod)
        except msgspec.DecodeError as error:
            raise ApiError(f"pod {namespace}/{name} cannot be understood: {error}") from error
