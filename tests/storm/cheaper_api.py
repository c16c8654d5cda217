"""Stand-ins for what the API server and the scheduler work out again at every change of anything.

The object of a pod is made again where the pod has changed, and a pod's requests are added up once: specs
never change. The objects of two moments share what is the same in both; nobody changes one.
"""

import msgspec

from agent.simulator.kubelet import http_api
from agent.simulator.kubelet.api_server import Pod
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.kubelet.http_objects import Object
from agent.simulator.kubelet.pod_specs import PodSpec

MOST_PODS = 64  # of which the objects are kept
_pod_object, _request = HttpApi.pod_object, PodSpec.request
_objects: dict[int, tuple[Pod, object, Object]] = {}
_requests: dict[int, tuple[PodSpec, dict[str, int]]] = {}


def _object(self: HttpApi, pod: Pod) -> Object:
    """See `HttpApi.pod_object`."""
    now = (pod.node_name, pod.phase, pod.reason, pod.message, pod.deleting, dict(pod.written))
    known = _objects.get(id(pod))
    if known is None or known[0] is not pod or known[1] != now:
        if len(_objects) >= MOST_PODS:
            _objects.clear()
        known = _objects[id(pod)] = pod, now, _pod_object(self, pod)
    item = known[2]
    return {**item, "metadata": {**item["metadata"], "resourceVersion": self._version}}


def _requested(self: PodSpec, resource: str) -> int:
    """See `PodSpec.request`."""
    known = _requests.get(id(self))
    if known is None or known[0] is not self:
        if len(_requests) >= MOST_PODS:
            _requests.clear()
        known = _requests[id(self)] = self, {}
    if (count := known[1].get(resource)) is None:
        count = known[1][resource] = _request(self, resource)
    return count


def _line(event: Object) -> bytes:
    """See `http_objects.line`."""
    return msgspec.json.encode(event) + b"\n"


def forget() -> None:
    """Keep nothing of a storm that is over."""
    _objects.clear()
    _requests.clear()


def install() -> None:
    """Put them in place, for this process."""
    forget()
    HttpApi.pod_object = _object  # type: ignore[method-assign]
    PodSpec.request = _requested  # type: ignore[method-assign]
    http_api.line = _line  # type: ignore[attr-defined]
