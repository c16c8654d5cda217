"""Which GPUs are devices, and the taints that keep claims away; the door's place in the house."""

import re
from pathlib import Path

import pytest

import agent.dra
from agent.dra.offers import Offers, word_of
from agent.dra.slices import RESERVED, UNAVAILABLE, UNHEALTHY
from agent.inventory.snapshot import GpuState, Snapshot, pcie_root
from agent.kit.tasks import Cell
from agent.model.gpu import Gpu
from agent.model.modes import SHARES, UNCLAIMED, WHOLE_GPUS, Assignment, GpuMode, Mode, Offering
from agent.modes.desired import ClaimRequests
from agent.modes.planner import GpuSwitch, Phase, SwitchState
from agent.modes.wing import Wing

DEVICE = GpuMode(UNCLAIMED, dra=True)


class MadeUpWing:
    """A mode with an obstacle, or none."""

    def __init__(self, why: str = "") -> None:
        self.why = why

    def obstacle(self, state: GpuState) -> str:
        return ""

    def unclaimable(self) -> str:
        return self.why


def gpu(index: int) -> Gpu:
    uuid = f"GPU-{index:08d}-86f3-7a43-b711-4771313afc50"
    return Gpu(uuid, index, index, f"0000:{index:02x}:00.0", "NVIDIA H200", 143771 << 20, (9, 0))


def offers(
    modes: list[GpuMode],
    wanted: list[GpuMode] | None = None,
    *,
    reserve: int = 0,
    why: str = "",
    blocked: str = "",
) -> Offers:
    states = tuple(GpuState(gpu(index), blocked=blocked) for index in range(len(modes)))
    snapshot = Snapshot(gpus=states, by_uuid={each.uuid: each for each in states})
    assignment = Assignment({each.uuid: mode for each, mode in zip(states, modes, strict=True)})
    switches = tuple(
        GpuSwitch(at, each.uuid, modes[at], (wanted or modes)[at]) for at, each in enumerate(states)
    )
    wings: dict[Mode, Wing] = {WHOLE_GPUS: MadeUpWing(), SHARES: MadeUpWing(why)}  # type: ignore[dict-item]
    return Offers(
        "n1",
        Cell(snapshot),
        Cell(assignment),
        Cell(SwitchState(Phase.APPLIED, "dra", "", switches)),
        ClaimRequests((WHOLE_GPUS, SHARES)),
        wings,
        reserve,
        None,
        Cell(None),
    )


def test_gpus_of_plugins_and_those_that_leave_are_no_devices() -> None:
    leaving = GpuMode(SHARES, Offering.CLOSED, "changing", dra=True)
    found = offers([DEVICE, GpuMode(SHARES), leaving], [DEVICE, GpuMode(SHARES), GpuMode(WHOLE_GPUS)]).now()
    assert [each.gpu.index for each in found] == [0]
    assert found[0].taints == {WHOLE_GPUS: (), SHARES: ()}


@pytest.mark.parametrize(
    ("made", "whole", "shares"),
    [
        (offers([DEVICE], blocked="NVML is closed"), [(UNHEALTHY, "blocked")], [(UNHEALTHY, "blocked")]),
        (
            offers([GpuMode(SHARES, Offering.CLOSED, "cordoned: fan", dra=True)]),
            [(UNAVAILABLE, "cordoned")],
            [(UNAVAILABLE, "cordoned")],
        ),
        (offers([GpuMode(UNCLAIMED, reason="no program", dra=True)]), [], [(UNAVAILABLE, "failed")]),
        (offers([DEVICE], why="no CDI"), [], [(UNAVAILABLE, "impossible")]),
        (offers([DEVICE], reserve=1), [], [(RESERVED, "whole")]),
    ],
)
def test_taints(made: Offers, whole: list[tuple[str, str]], shares: list[tuple[str, str]]) -> None:
    (offer,) = made.now()
    assert (list(offer.taints[WHOLE_GPUS]), list(offer.taints[SHARES])) == (whole, shares)


def test_the_last_gpus_are_reserved() -> None:
    found = offers([DEVICE] * 4, reserve=2).now()
    assert [bool(each.taints[SHARES]) for each in found] == [False, False, True, True]
    assert all(each.taints[SHARES] for each in offers([DEVICE] * 5, reserve=7).now())


def test_a_device_that_no_claim_can_have_is_a_remark() -> None:
    assert offers([DEVICE] * 2, why="no CDI").remarks() == ["no claim gets a GPU as mps: no CDI"]
    assert offers([GpuMode(SHARES)], why="no CDI").remarks() == []


@pytest.mark.parametrize(
    "reason", ["", "cordoned since now: fan", "the agent is stopping", "5 ../etc", "x" * 99]
)
def test_any_reason_makes_a_value_of_a_taint(reason: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", word_of(reason))


def test_the_root_complex_of_a_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "bus/pci/devices"
    folder.mkdir(parents=True)
    (folder / "0000:1b:00.0").symlink_to("../../../devices/pci0000:15/0000:15:01.0/0000:1b:00.0")
    assert pcie_root(tmp_path, "0000:1b:00.0") == "pci0000:15"
    assert pcie_root(tmp_path, "0000:99:00.0") == ""


def test_the_door_is_small_and_knows_no_device_plugin() -> None:
    files = sorted(Path(agent.dra.__file__).parent.glob("*.py"))
    texts = [each.read_text() for each in files]
    assert sum(text.count("\n") for text in texts) <= 1800
    assert not any(re.search(r"v1beta1|kubelet\.wire|agent\.(whole|vgpu|mps)\b", text) for text in texts)
