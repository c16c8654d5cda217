"""Levels of enforcement, of the node and of namespaces, and the limits of a container."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import structlog

from agent.vgpu.folders import About

if TYPE_CHECKING:
    from agent.cluster.pods import NamespaceLabels

log = structlog.get_logger()


class Enforcement(Enum):
    """Levels of enforcement of memory; each includes the ones before it."""

    OFF = "off"
    REPORT = "report"  # containers that use more than their cap are reported
    LIBRARY = "library"  # the enforcement library refuses allocations, where it can be shown
    STRICT = "strict"  # no container starts without it, and what it does not know is refused

    @property
    def enforces(self) -> bool:
        """Whether containers are held to their cap, and not only measured."""
        return self in (Enforcement.LIBRARY, Enforcement.STRICT)


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """Limits of a running container.

    `injected` None: no process of it was seen on the GPU yet. `limited`: what the driver says of a container
    that it is to hold to its cap; None: it was not asked yet.
    """

    about: About
    injected: bool | None = None
    limited: bool | None = None

    @property
    def memory_bytes(self) -> int:
        """The cap."""
        return self.about.memory_bytes


class NamespaceEnforcement:
    """The settings of namespaces, by their labels."""

    def __init__(self, labels: "NamespaceLabels | None") -> None:
        """None: the API server is not used, so there are none."""
        self._labels = labels
        self._reported: dict[str, str] = {}

    async def known(self) -> None:
        """Return once the labels have been seen, or could have been."""
        if self._labels:
            await self._labels.known()

    def of(self, namespace: str) -> Enforcement | None:
        """The setting of a namespace; None: that of the node holds.

        A label that cannot be understood is left out, and logged once.
        """
        if self._labels is None or (value := self._labels.of(namespace)) is None:
            return None
        try:
            return Enforcement(value)
        except ValueError:
            if self._reported.get(namespace) != value:
                self._reported[namespace] = value
                log.warning(
                    "namespace_label_ignored",
                    namespace=namespace,
                    label=self._labels.label,
                    value=value,
                    known=", ".join(each.value for each in Enforcement),
                )
            return None
