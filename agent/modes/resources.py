"""All resources of the node: which are registered, and their lists as one."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.kit.tasks import Supervisor, follow
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.wire import ResourcePlugin
from agent.model.modes import Assignment, Mode

log = structlog.get_logger()


class ResourceSet:
    """Registers the resources of a mode when the mode is first used, and keeps them registered for life.

    A resource that stays registered can be switched on and off by its list alone, within milliseconds
    and with no stream broken.
    """

    def __init__(
        self,
        plugins: Mapping[Mode, Callable[[], Sequence[ResourcePlugin]]],
        endpoints: list[Endpoint],
        endpoint_of: Callable[[ResourcePlugin], Endpoint],
        supervisor: Supervisor,
        group: TaskGroup,
        before_first: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Of a mode the `plugins` may become more.

        `before_first` is done before a resource appears on the node; it must end, and raise nothing.
        """
        self._plugins = plugins
        self._endpoint_of = endpoint_of
        self._supervisor = supervisor
        self._group = group
        self._enabled: set[Mode] = set()
        self._pending: set[Mode] = set()
        self._passed_over: set[tuple[str, Mode]] = set()
        self._grown = anyio.Event()
        self._before_first = before_first
        self.endpoints = endpoints  # grows as modes are first used

    @property
    def names(self) -> frozenset[str]:
        """All resources that this agent may ever offer, in use or not."""
        return frozenset(plugin.resource for plugins in self._plugins.values() for plugin in plugins())

    def enable(self, mode: Mode) -> None:
        """Have the resources of a mode registered; their first list goes out with the next `refresh`."""
        if mode not in self._enabled:
            self._pending.add(mode)

    def refresh(self) -> None:
        """Bring all lists up to date with the assignment; then let newly enabled resources appear.

        In that order: the first list that the kubelet reads of a resource is already the true one.
        """
        for plugins in self._plugins.values():
            for plugin in plugins():
                plugin.refresh()
        self._enabled |= self._pending
        self._pending.clear()
        self.look()

    def look(self) -> None:
        """Let resources of the modes in use appear that are new."""
        known = {endpoint.plugin.resource: endpoint.plugin for endpoint in self.endpoints}
        new: list[Endpoint] = []
        for mode in self._enabled:
            for plugin in self._plugins[mode]() if mode in self._plugins else ():
                served = known.get(plugin.resource)
                if served is None:
                    known[plugin.resource] = plugin
                    new.append(self._endpoint_of(plugin))
                    self._group.start_soon(
                        self._supervisor.restarting, f"plugin {plugin.resource}", plugin.run
                    )
                elif served is not plugin:
                    self._pass_over(plugin, mode)
        if new:
            self.endpoints += new
            self._group.start_soon(self._appear, new)
            grown, self._grown = self._grown, anyio.Event()
            grown.set()

    def _pass_over(self, plugin: ResourcePlugin, mode: Mode) -> None:
        """Tell it once: a resource is one plugin's, and the kubelet takes the later one for both."""
        if (plugin.resource, mode) not in self._passed_over:
            self._passed_over.add((plugin.resource, mode))
            reason = "another mode has this resource: end the pods that hold it there, then restart the agent"
            log.warning("resource_not_offered", resource=plugin.resource, mode=mode.value, reason=reason)

    async def _appear(self, endpoints: Sequence[Endpoint]) -> None:
        if self._before_first:
            await self._before_first()
        for endpoint in endpoints:
            name = f"endpoint {endpoint.plugin.resource}"
            self._group.start_soon(self._supervisor.restarting, name, endpoint.run)

    def send_again(self) -> None:
        """Send a list as it is: the kubelet writes its checkpoint with each."""
        for endpoint in self.endpoints[:1]:
            endpoint.plugin.lists.publish(endpoint.plugin.lists.value)

    async def follow_lists(self, action: Callable[[], None]) -> None:
        """Call `action` whenever a list has changed or the kubelet came or went, for ever."""
        async with anyio.create_task_group() as group:
            followed = 0
            while True:
                for endpoint in self.endpoints[followed:]:
                    group.start_soon(follow, action, endpoint.plugin.lists, endpoint.service.streams)
                followed = len(self.endpoints)
                await self._grown.wait()

    async def delivered(self) -> None:
        """Return when all lists as they are now have left on every open stream."""
        async with anyio.create_task_group() as group:
            for endpoint in self.endpoints:
                group.start_soon(endpoint.service.delivered)

    def register_again(self, names: frozenset[str]) -> None:
        """Have the kubelet register these resources again."""
        for endpoint in self.endpoints:
            if endpoint.plugin.resource in names:
                endpoint.register_again()

    def granted_lately(self) -> frozenset[str]:
        """Device IDs that are being handed out, or were and stand in no reading of the record yet."""
        return frozenset().union(*(endpoint.service.granted_lately() for endpoint in self.endpoints))

    def figures(self, assignment: Assignment) -> dict[str, tuple[int, int]]:
        """Capacity and allocatable of each resource that the kubelet listens to, under an assignment."""
        return {
            endpoint.plugin.resource: endpoint.plugin.figures(assignment)
            for endpoint in self.endpoints
            if endpoint.registered
        }
