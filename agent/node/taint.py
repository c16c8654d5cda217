"""Keeps the scheduler from sending pods to this node while what it sells is changing: by a taint.

Figures in node.status cannot do that. The kubelet goes by them, too, so that a pod which was bound a moment
before they shrank is refused although its devices are there; and a tick of the kubelet may write them back.
A taint NoSchedule stops the scheduler alone: kubelet 1.36 (`lifecycle/predicate.go`, generalFilter) looks at
NoExecute only.
"""

from typing import Any, Protocol

import anyio
import structlog

from agent.kit.cell import Cell

log = structlog.get_logger()

TAINT = "gpu-node-agent.io/switching"
EFFECT = "NoSchedule"
# What the scheduler may still bind after it could have seen the taint; on a busy machine twice as long as it
# took until we saw it ourselves.
BINDING_SECONDS = 0.1
SEEN_SECONDS = 2.0  # a watch that is mute shall not hold up a switch


class HoldFailed(Exception):
    """The taint could not be written; the text says why."""


class TaintPort(Protocol):
    """The own node's taint."""

    @property
    def changes(self) -> Cell[Any]:
        """Published whenever the node changed."""

    def held(self) -> bool:
        """Whether the node carries our taint, as last seen."""

    async def hold(self, *, held: bool) -> None:
        """Set or remove it. Raises HoldFailed."""


class SchedulingHold:
    """The taint, taken and let go."""

    def __init__(self, node: TaintPort) -> None:
        self._node = node
        self._writing = anyio.Lock()
        self.wanted = False
        self.patches = 0
        self.failures = 0
        self.problem: str | None = None  # why the taint could not be written last

    @property
    def present(self) -> bool:
        """Whether the node carries the taint, as last seen: perhaps from an agent before this one."""
        return self._node.held()

    async def take(self) -> bool:
        """Taint the node, and return once the scheduler has seen it, too; False: that cannot be done."""
        self.wanted = True
        began = anyio.current_time()
        if not await self._write(held=True):
            self.wanted = False
            return False
        await self._seen(held=True)
        await anyio.sleep(max(BINDING_SECONDS, 2 * (anyio.current_time() - began)))
        return True

    async def release(self) -> bool:
        """Remove the taint; False: it could not be done now, and shall be tried again."""
        self.wanted = False
        if not await self._write(held=False):
            return False
        await self._seen(held=False)
        return True

    async def _seen(self, *, held: bool) -> None:
        with anyio.move_on_after(SEEN_SECONDS):
            while self._node.held() is not held and self.wanted is held:
                with anyio.move_on_after(0.2):
                    await self._node.changes.wait_change(self._node.changes.version)

    async def _write(self, *, held: bool) -> bool:
        async with self._writing:
            if self.wanted is not held:
                return True  # whoever came later has the say
            try:
                await self._node.hold(held=held)
            except HoldFailed as error:
                if self.problem is None:
                    log.warning(
                        "scheduling_not_held" if held else "scheduling_not_released", problem=str(error)
                    )
                self.problem = str(error)
                self.failures += 1
                return False
            self.patches += 1
            self.problem = None
            return True
