"""Settings of namespaces for limits: the label `gpu-node-agent.io/enforcement`."""

from collections.abc import Mapping
from types import MappingProxyType

from agent.cluster.api import KubeApi
from agent.cluster.reflector import PartialObject, Reflector

LABEL = "gpu-node-agent.io/enforcement"


class NamespaceLabels:
    """The namespaces that carry the label; others are not even listed."""

    def __init__(self, api: KubeApi) -> None:
        self.reflector = Reflector(
            api, "/api/v1/namespaces", {"labelSelector": LABEL}, PartialObject, "namespaces"
        )
        self._seen: Mapping[str, PartialObject] = {}
        self._labels: Mapping[str, str] = MappingProxyType({})

    def of(self, namespace: str) -> str | None:
        """The label's value, as last seen; None: the namespace has none."""
        items = self.reflector.items.value
        if items is not self._seen:
            self._seen = items
            self._labels = {each.metadata.name: each.metadata.labels[LABEL] for each in items.values()}
        return self._labels.get(namespace)
