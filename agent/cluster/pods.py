"""The pods of this node, as the API server shows them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import anyio
import msgspec

from agent.cluster.api import ApiError, ApiRefused, KubeApi, Query
from agent.cluster.cgroup_uids import CgroupUids, cgroup_uids
from agent.cluster.reflector import Reflector
from agent.model.pod import Pod

MISS_SECONDS = 1.0  # a GET in the middle of an admission, which holds up all pods of the node

Read = TypeVar("Read")


class _PodList(msgspec.Struct):
    kind: Literal["PodList"]
    items: list[Pod]


class PodCache:
    """Pods bound to one node, as `reflector` keeps them."""

    def __init__(self, api: KubeApi, node: str, node_uid: Callable[[], str | None] = lambda: None) -> None:
        """`node_uid`: the UID of the Node object; None: not known yet."""
        self._api = api
        self._node = node
        self._node_uid = node_uid
        self._by_cgroup: tuple[object, str | None, CgroupUids[Pod]] = (None, None, CgroupUids({}))
        self._selector = {"fieldSelector": f"spec.nodeName={node}"}
        self.reflector = Reflector(api, "/api/v1/pods", self._selector, Pod, "pods")

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
        return await self.fetch(namespace, name)

    async def fetch(self, namespace: str, name: str) -> Pod | None:
        """A pod by one GET within a second, whatever the copy shows. Raises ApiError."""
        try:
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
            pod = await self._read(path, Pod, f"pod {namespace}/{name}")
        except ApiRefused as error:
            if error.misses("pods", name):
                return None
            raise
        if pod.key != (namespace, name) or not pod.uid:
            raise ApiError(f"the answer for pod {namespace}/{name} is another object; is a proxy in between?")
        return pod

    async def list_now(self) -> Sequence[Pod]:
        """All pods of the node by one list within a second, of now: no version is named. Raises ApiError."""
        found = await self._read("/api/v1/pods", _PodList, "the list of the node's pods", self._selector)
        return found.items

    async def _read(self, path: str, kind: type[Read], what: str, query: Query = None) -> Read:
        try:
            with anyio.fail_after(MISS_SECONDS):
                data = await self._api.get(path, query, deadline=MISS_SECONDS)
        except TimeoutError as error:
            raise ApiError(f"{what} could not be read within {MISS_SECONDS:g} s") from error
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise ApiError(f"{what} cannot be understood: {error}") from error
