"""The scenarios of health on the embedded kubelet."""

from collections.abc import Awaitable, Callable

from tests.component.embedded_rig import embedded_rig
from tests.scenarios import health
from tests.scenarios.rig import Rig


def on_the_embedded_kubelet(scenario: Callable[[Rig], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    # No fixture: the kubelet's task group must open and close in the test's own task.
    async def test() -> None:
        async with embedded_rig() as rig:
            await scenario(rig)

    return test


for _scenario in health.ALL:
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)
