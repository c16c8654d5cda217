"""Every value that a figure of the node's status takes, by a watch: a poll would miss short dips."""

import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio.to_thread

from tests.cluster.api import Object
from tests.cluster.rig_node import RigNode

CATCH_UP_SECONDS = 5.0


class _Recorder:
    def __init__(self, cluster: RigNode, part: str, resource: str) -> None:
        self._cluster = cluster
        self._part, self._resource = part, resource
        self._node = cluster.api.path("v1", "Node", None, cluster.node)
        self.values: list[int | None] = []
        first = cluster.api.get(self._node)
        self._seen = self._version(first)
        self._record(first)
        self._watch = cluster.api.watch(
            cluster.api.path("v1", "Node", None),
            first["metadata"]["resourceVersion"],
            fieldSelector=f"metadata.name={cluster.node}",
        )
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="node watch")
        self._thread.start()

    @staticmethod
    def _version(node: Object) -> int:
        # Resource versions of one resource may be compared since Kubernetes 1.35; etcd's always grew.
        return int(node["metadata"]["resourceVersion"])

    def _record(self, node: Object) -> None:
        text = node["status"].get(self._part, {}).get(self._resource)
        value = None if text is None else int(text)
        if not self.values or self.values[-1] != value:
            self.values.append(value)

    def _follow(self) -> None:
        try:
            for _, node in self._watch:
                self._record(node)
                self._seen = self._version(node)
        except Exception as error:  # noqa: BLE001 - passed to the test, which waits in another thread
            self._failure = error

    def close(self) -> None:
        """Wait until everything up to now has been seen, then end."""
        try:
            now = self._version(self._cluster.api.get(self._node))
            deadline = time.monotonic() + CATCH_UP_SECONDS
            while self._seen < now and self._thread.is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)
            behind = self._seen < now
        finally:
            self._watch.close()
            self._thread.join(10)
        if self._failure is not None or behind:
            raise RuntimeError(f"the node watch missed events: {self._failure or 'it fell behind'}")


@asynccontextmanager
async def watching(cluster: RigNode, part: str, resource: str) -> AsyncIterator[Sequence[int | None]]:
    """Values of `status.<part>[resource]`, the present one first, each change once; None: no such key."""
    recorder = await anyio.to_thread.run_sync(partial(_Recorder, cluster, part, resource))
    try:
        yield recorder.values
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(recorder.close)
