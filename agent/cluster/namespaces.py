"""Settings of namespaces for limits: the label `gpu-node-agent.io/enforcement`."""

from collections.abc import Mapping
from types import MappingProxyType

import anyio
import structlog

from agent.cluster.api import KubeApi
from agent.cluster.reflector import PartialObject, Reflector

log = structlog.get_logger()

LABEL = "gpu-node-agent.io/enforcement"
# The first copy takes some milliseconds where the API server answers. Where it does not, pods that the agent
# knows are admitted all the same, so this is waited for once in the agent's life and not for each of them.
FIRST_COPY_SECONDS = 1.0


class NamespaceLabels:
    """The namespaces that carry the label; others are not even listed."""

    label = LABEL

    def __init__(self, api: KubeApi) -> None:
        self.reflector = Reflector(
            api, "/api/v1/namespaces", {"labelSelector": LABEL}, PartialObject, "namespaces"
        )
        self._seen: Mapping[str, PartialObject] = {}
        self._labels: Mapping[str, str] = MappingProxyType({})
        self._until: float | None = None  # on anyio's clock; all who ask wait until then

    async def known(self) -> None:
        """Return once the labels have been seen, or `FIRST_COPY_SECONDS` after the first call of all."""
        items = self.reflector.items
        if items.version:  # what is published first is complete
            return
        now = anyio.current_time()
        first = self._until is None
        self._until = now + FIRST_COPY_SECONDS if self._until is None else self._until
        with anyio.move_on_after(max(0.0, self._until - now)):
            await items.wait_change(0)
            return
        if first:
            log.warning(
                "namespace_labels_unknown",
                waited_seconds=FIRST_COPY_SECONDS,
                action="until they are, the node's vgpu.enforcement holds in every namespace",
                problem=self.reflector.problem,
            )

    def of(self, namespace: str) -> str | None:
        """The label's value, as last seen; None: the namespace has none."""
        items = self.reflector.items.value
        if items is not self._seen:
            self._seen = items
            self._labels = {each.metadata.name: each.metadata.labels[LABEL] for each in items.values()}
        return self._labels.get(namespace)
