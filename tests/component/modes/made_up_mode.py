"""A mode that the product does not have: each GPU as two halves, `example.com/half-gpu`.

`test_new_mode_is_one_file` makes it a wing of a copy of the agent.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

from agent.kit.tasks import Cell, follow
from agent.kubelet import wire
from agent.kubelet.wire import Allocation, PreferenceRequest, Refused, ResourcePlugin
from agent.model.modes import Assignment, BadDeviceId, DeviceId, Mode, parse
from agent.modes.wing import Node, Wing

HALVES = 2


class HalfPlugin:
    """Two devices for each GPU."""

    offers_preference = False
    needs_pre_start = False

    def __init__(self, node: Node) -> None:
        self._node = node
        (self.resource,), (self._unit,) = Half.mode.resources, Half.mode.units
        self.lists: Cell[bytes] = Cell(b"")

    async def run(self) -> None:
        await follow(self.refresh, self._node.snapshot, self._node.assignment, self._node.holdings.cell)

    def refresh(self) -> None:
        parts = (wire.devices(ids, healthy) for ids, healthy in self._devices(self._node.assignment.value))
        encoded = b"".join(parts)
        if encoded != self.lists.value:
            self.lists.publish(encoded)

    def figures(self, assignment: Assignment) -> tuple[int, int]:
        devices = list(self._devices(assignment))
        return sum(len(ids) for ids, _ in devices), sum(len(ids) for ids, healthy in devices if healthy)

    def _devices(self, assignment: Assignment) -> Iterator[tuple[list[str], bool]]:
        record = self._node.holdings.cell.value
        held = {each for holding in record.holdings for each in holding.ids} if record else set()
        for state in self._node.snapshot.value.gpus:
            mode = assignment.of(state.uuid)
            if mode.mode is Half.mode:
                ids = [str(DeviceId(state.uuid, self._unit, number)) for number in range(HALVES)]
                stays = ids if mode.offered or mode.leaving else [each for each in ids if each in held]
                yield stays, mode.offered and state.healthy

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        raise Refused("not asked for")

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        try:
            gpus = {parse(each).gpu for each in ids}
        except BadDeviceId as error:
            raise Refused(str(error)) from error
        by_uuid = self._node.snapshot.value.by_uuid
        return self._node.injector.allocation([by_uuid[uuid].gpu for uuid in sorted(gpus)])

    async def pre_start(self, ids: Sequence[str]) -> None:
        raise Refused("not asked for")


class Half(Wing):
    mode: ClassVar[Mode] = Mode("half")

    def __init__(self, plugin: HalfPlugin) -> None:
        self._plugin = plugin

    @classmethod
    async def build(cls, node: Node) -> Self:
        return cls(HalfPlugin(node))

    def plugins(self) -> Sequence[ResourcePlugin]:
        return [self._plugin]
