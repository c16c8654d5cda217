"""The embedded kubelet and its scheduler with claims; `tests/cluster/test_claims.py` has the real ones."""

from collections.abc import Awaitable, Callable

from tests.component.embedded_rig import embedded_rig
from tests.scenarios import claims
from tests.scenarios.rig import Rig

Scenario = Callable[[Rig], Awaitable[None]]


def on_the_embedded_kubelet(scenario: Scenario) -> Callable[[], Awaitable[None]]:
    async def test() -> None:
        async with embedded_rig("1.37") as rig:
            await scenario(rig)

    return test


for _scenario in claims.ALL:
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)


def test_no_scenario_is_forgotten() -> None:
    assert len(claims.ALL) == len([name for name in vars(claims) if name.startswith("test_")])
