"""Simulated GPUs: nothing of a driver is asked of the node, and nothing that would keep the agent off it."""

from pathlib import Path

import pytest

from agent.settings import load
from tests.chart import helm
from tests.chart.test_privilege import agent

SIMULATED = ("simulator.enabled=true", 'simulator.profile="dgx-h200"')


def test_nothing_of_a_driver_is_mounted_or_asked_for() -> None:
    pod = agent(*SIMULATED, 'runtimeClassName="nvidia"', 'driver.source="host"')
    (container,) = pod["containers"]
    assert container["securityContext"]["privileged"] is False
    assert not {"driver", "driver-files"} & {each["name"] for each in container["volumeMounts"]}
    assert not {each["name"] for each in container["env"]} & {"NVIDIA_VISIBLE_DEVICES"}
    assert "runtimeClassName" not in pod
    assert "affinity" not in pod


def test_the_agent_is_told_and_offers_whole_gpus_without_a_label(tmp_path: Path) -> None:
    made = helm.template(settings=SIMULATED)
    (config,) = [each for each in made if "config.yaml" in each.get("data", {})]
    (tmp_path / "config.yaml").write_text(config["data"]["config.yaml"])
    loaded = load(tmp_path / "config.yaml", {})
    assert loaded.simulator.profile == "dgx-h200"
    assert loaded.default_mode == "pgpu"


def test_no_mps_is_simulated_on_a_node() -> None:
    with pytest.raises(helm.HelmRefused, match="no simulated MPS"):
        helm.template(settings=(*SIMULATED, "mps.enabled=true"))


def test_without_it_nothing_is_simulated(tmp_path: Path) -> None:
    made = helm.template()
    (config,) = [each for each in made if "config.yaml" in each.get("data", {})]
    (tmp_path / "config.yaml").write_text(config["data"]["config.yaml"])
    assert load(tmp_path / "config.yaml", {}).simulator.profile is None
