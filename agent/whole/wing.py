"""The wing of pGPU: whole GPUs, or time slices of them. Nothing runs for it."""

from collections.abc import Sequence
from typing import ClassVar, Self

from agent.injection.inject import Injector
from agent.kubelet.plugin_types import ResourcePlugin
from agent.model.claim_device import ClaimedShare
from agent.model.holding import Holder
from agent.model.modes import Mode
from agent.modes.wing import Node, NotYet, Wing
from agent.whole.plugin import RESOURCE, SHARED_RESOURCE, PgpuPlugin


class WholeWing(Wing):
    mode: ClassVar[Mode] = Mode.PGPU

    def __init__(self, plugins: Sequence[PgpuPlugin], injector: Injector) -> None:
        self._plugins = plugins
        self._injector = injector

    @classmethod
    async def build(cls, node: Node) -> Self:
        slicing = node.settings.time_slicing
        resources = [(RESOURCE, True, not slicing.rename)]
        if slicing.rename:
            resources.append((SHARED_RESOURCE, False, True))
        return cls(
            [
                PgpuPlugin(
                    node.snapshot,
                    node.assignment,
                    node.holdings,
                    node.injector,
                    resource=resource,
                    whole=whole,
                    replicas=replicas,
                    refuse_more_than_one=slicing.refuse_more_than_one,
                )
                for resource, whole, replicas in resources
            ],
            node.injector,
        )

    def plugins(self) -> Sequence[ResourcePlugin]:
        """`nvidia.com/gpu`, and where slices are renamed a resource of their own for them."""
        return self._plugins

    def unclaimable(self) -> str:
        return self._injector.claim_problem

    def claimed(
        self,
        share: ClaimedShare,
        holders: Sequence[Holder],  # noqa: ARG002
        *,
        owned: bool,  # noqa: ARG002
    ) -> Sequence[str]:
        if why := self.unclaimable():
            raise NotYet(why)
        return (self._injector.claim_device(share.gpu),)
