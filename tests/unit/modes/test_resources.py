"""Which plugins are registered, and that a resource is one plugin's."""

from typing import Any

import anyio
from structlog.testing import capture_logs

from agent.kit.tasks import Supervisor
from agent.model.modes import Mode
from agent.modes.resources import ResourceSet
from tests.scenarios.rig import GPU


class Plugin:
    resource = GPU

    def refresh(self) -> None:
        pass

    async def run(self) -> None:
        await anyio.sleep_forever()


class Served(Plugin):
    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin


async def test_a_plugin_whose_name_another_one_has_is_passed_over_and_told_once() -> None:
    """Instances by the name of whole GPUs, while pods of before hold whole ones."""
    whole: Any = Plugin()
    single: Any = Plugin()
    plugins: Any = {Mode.PGPU: lambda: [whole], Mode.MIG: lambda: [single]}
    endpoint_of: Any = Served
    async with anyio.create_task_group() as group:
        resources = ResourceSet(plugins, [], endpoint_of, Supervisor(), group)
        with capture_logs() as lines:
            resources.enable(Mode.PGPU)
            resources.enable(Mode.MIG)
            resources.refresh()  # both at once: one of them, not two that displace each other
            resources.look()
            await anyio.wait_all_tasks_blocked()
        assert [each.plugin.resource for each in resources.endpoints] == [GPU]
        told = [each["mode"] for each in lines if each["event"] == "resource_not_offered"]
        (served,) = [each.plugin for each in resources.endpoints]
        assert told == ["pgpu" if served is single else "mig"]
        group.cancel_scope.cancel()
