"""The monitoring scenarios on the embedded kubelet, with both faces of its PodResources."""

import pytest

from tests.component.test_skeleton_scenarios import on_the_embedded_kubelet
from tests.scenarios import monitoring

pytestmark = pytest.mark.timeout(180)

for _scenario in monitoring.ALL:
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)


def test_every_scenario_is_run() -> None:
    assert len(monitoring.ALL) == len([name for name in vars(monitoring) if name.startswith("test_")])
