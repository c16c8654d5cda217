"""Switching modes on the embedded kubelet; where pods end in mid-switch, with both faces of its PodResources.

The long scenario is cut short here: its thirty switches are made on the real cluster.
"""

import os
from collections.abc import Awaitable, Callable

import pytest

from agent._proto.v1beta1 import Device
from agent.model.modes import parse
from tests.component.embedded_rig import FACES, EmbeddedRig, Face, embedded_rig
from tests.scenarios import modes
from tests.scenarios.lists import WAYS
from tests.scenarios.rig import Rig

Scenario = Callable[[Rig], Awaitable[None]]
# Kubelets before 1.34 list finished pods, too: they must not be taken for holders.
BOTH_FACES = (
    modes.test_busy_gpus_drain_under_a_backlog,
    modes.test_kubelet_restart_in_mid_switch,
    modes.test_agent_kill_in_mid_switch,
    modes.test_no_admission_error_across_thirty_switches,
)
SHORT = 4  # switches
# Pods come and go for many ticks of the kubelet.
LONG = (
    modes.test_no_admission_error_across_thirty_switches,
    modes.test_agent_update_under_a_stream_of_pods,
)
# Under a stream of pods the kubelet's tick must be what it is: one that comes twice a second writes figures
# of old lists back at every moment of a switch.
PRODUCTION_TICK = (
    modes.test_no_admission_error_across_thirty_switches,
    modes.test_agent_update_under_a_stream_of_pods,
)


class Watch:
    """The kubelet's own view: the lists as they arrive, not as they were sent."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._ways: dict[str, dict[str, set[str]]] = {}

    def list_read(self, resource: str, devices: list[Device]) -> None:
        ways: dict[str, set[str]] = {}
        for device in devices:
            if device.health == "Healthy":
                found = parse(device.id)
                ways.setdefault(found.gpu, set()).add(WAYS[found.unit])
        self._ways[resource] = ways
        for gpu in ways:
            everywhere = {way for each in self._ways.values() for way in each.get(gpu, ())}
            if len(everywhere) > 1:
                self.faults.append(f"{gpu} is offered as {sorted(everywhere)}")

    def forget(self, rig: EmbeddedRig) -> None:
        """Lists of an agent that ended, or of a kubelet that was restarted, count no more."""
        for resource in tuple(self._ways):
            if not rig.kubelet.known_devices(resource):
                del self._ways[resource]


def on_the_embedded_kubelet(scenario: Scenario) -> Callable[[Face, pytest.MonkeyPatch], Awaitable[None]]:
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("face", FACES if scenario in BOTH_FACES else FACES[:1])
    async def test(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SWITCHES", os.environ.get("SWITCHES", str(SHORT)))
        tick = 10.0 if scenario in PRODUCTION_TICK else 0.5
        async with embedded_rig(face, tick) as rig:
            watch = Watch()

            def read(resource: str, devices: list[Device]) -> None:
                watch.forget(rig)
                watch.list_read(resource, devices)

            with rig.kubelet.observing_lists(read):
                await scenario(rig)
            assert not watch.faults, watch.faults[:5]

    return pytest.mark.long(test) if scenario in LONG else test


for _scenario in modes.ALL:
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)


def test_no_scenario_is_forgotten() -> None:
    assert len(modes.ALL) == len([name for name in vars(modes) if name.startswith("test_")])
