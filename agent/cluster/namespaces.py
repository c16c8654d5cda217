"""Settings of namespaces for limits: the label `gpu-node-agent.io/enforcement`."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from agent.cluster.api import KubeApi
from agent.cluster.reflector import Metadata, Reflector

LABEL = "gpu-node-agent.io/enforcement"


class Namespace(msgspec.Struct, frozen=True):
    metadata: Metadata


class NamespaceLabels:
    """The namespaces that carry the label; others are not even listed."""

    def __init__(self, api: KubeApi) -> None:
        self.reflector = Reflector(
            api, "/api/v1/namespaces", {"labelSelector": LABEL}, Namespace, "namespaces"
        )
        self._seen: Mapping[str, Namespace] = {}
        self._labels: Mapping[str, str] = MappingProxyType({})

    def of(self, namespace: str) -> str | None:
        """The label's value, as last seen; None: the namespace has none."""
        items = self.reflector.items.value
        if items is not self._seen:
            self._seen = items
            self._labels = {each.metadata.name: each.metadata.labels[LABEL] for each in items.values()}
        return self._labels.get(namespace)
