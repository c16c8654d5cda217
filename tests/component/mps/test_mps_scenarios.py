"""The MPS scenarios on the embedded kubelet, with both faces of its PodResources."""

from tests.component.test_skeleton_scenarios import on_the_embedded_kubelet
from tests.scenarios import mps

for _scenario in mps.ALL:
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)


def test_every_scenario_is_run() -> None:
    assert len(mps.ALL) == len([name for name in vars(mps) if name.startswith("test_")])
