"""The machines: what NVML says about them agrees with what their owners publish."""

from collections import Counter
from pathlib import Path

import pytest

from agent.nvml.port import LinkPeer, PcieLevel
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.simulator.profiles import PROFILES, profile_named

MIB = 1 << 20


def opened(profile: str) -> SimulatedNvml:
    nvml = SimulatedNvml(SimulatedMachine.create(profile))
    nvml.open()
    return nvml


@pytest.mark.parametrize(
    ("name", "count", "product", "mib", "capability", "numa"),
    [
        ("dgx-h200", 8, "NVIDIA H200", 143771, (9, 0), [0, 0, 0, 0, 1, 1, 1, 1]),
        ("dgx-a100", 8, "NVIDIA A100-SXM4-40GB", 40960, (8, 0), [3, 3, 1, 1, 7, 7, 5, 5]),
        ("dgx1-v100", 8, "Tesla V100-SXM2-32GB", 32768, (7, 0), [0, 0, 0, 0, 1, 1, 1, 1]),
        ("hgx-16", 16, "Tesla V100-SXM3-32GB", 32768, (7, 0), [0] * 8 + [1] * 8),
        ("pcie-8", 8, "NVIDIA A10", 23028, (8, 6), [0, 0, 0, 0, 1, 1, 1, 1]),
        ("t4-4", 4, "Tesla T4", 15360, (7, 5), [None] * 4),
        ("l40s-2", 2, "NVIDIA L40S", 46068, (8, 9), [0, 1]),
    ],
)
def test_identity_of_every_machine(
    name: str, count: int, product: str, mib: int, capability: tuple[int, int], numa: list[int | None]
) -> None:
    nvml = opened(name)
    gpus = [nvml.describe(index) for index in range(nvml.count())]
    assert len(gpus) == count
    assert {(gpu.product, gpu.memory_bytes, gpu.compute_capability) for gpu in gpus} == {
        (product, mib * MIB, capability)
    }
    assert [gpu.numa_node for gpu in gpus] == numa
    assert len({gpu.uuid for gpu in gpus}) == len({gpu.pci_bus_id for gpu in gpus}) == count
    assert [gpu.minor for gpu in gpus] == list(range(count))
    # NVML enumerates by PCI address.
    assert sorted(gpu.pci_bus_id for gpu in gpus) == [gpu.pci_bus_id for gpu in gpus]


def test_uuids_are_the_same_in_every_run_and_differ_between_machines() -> None:
    assert SimulatedMachine.create("t4-4").uuids == SimulatedMachine.create("t4-4").uuids
    everything = [profile.uuid_of(slot) for profile in PROFILES.values() for slot in range(16)]
    assert len(set(everything)) == len(everything)
    assert all(len(uuid) == 40 for uuid in everything)


@pytest.mark.parametrize("name", list(PROFILES))
def test_pcie_levels_are_symmetric(name: str) -> None:
    nvml = opened(name)
    uuids = [nvml.describe(index).uuid for index in range(nvml.count())]
    for one in uuids:
        for other in uuids:
            assert nvml.ancestor(one, other) is nvml.ancestor(other, one)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("dgx-a100", "INTERNAL MULTIPLE_SWITCHES SYSTEM SYSTEM SYSTEM SYSTEM SYSTEM SYSTEM"),
        ("dgx1-v100", "INTERNAL SINGLE_SWITCH HOST_BRIDGE HOST_BRIDGE SYSTEM SYSTEM SYSTEM SYSTEM"),
        ("pcie-8", "INTERNAL SINGLE_SWITCH MULTIPLE_SWITCHES MULTIPLE_SWITCHES SYSTEM SYSTEM SYSTEM SYSTEM"),
        ("t4-4", "INTERNAL HOST_BRIDGE HOST_BRIDGE HOST_BRIDGE"),
        ("l40s-2", "INTERNAL SYSTEM"),
    ],
)
def test_first_row_of_the_pcie_matrix(name: str, row: str) -> None:
    nvml = opened(name)
    uuids = [nvml.describe(index).uuid for index in range(nvml.count())]
    assert [nvml.ancestor(uuids[0], other) for other in uuids] == [PcieLevel[level] for level in row.split()]


def test_dgx1_is_a_hybrid_cube_mesh() -> None:
    nvml = opened("dgx1-v100")
    gpus = [nvml.describe(index) for index in range(8)]
    counts = [Counter(link.remote_bus_id for link in nvml.links(gpu.uuid)) for gpu in gpus]
    for one, row in zip(gpus, counts, strict=True):
        assert row.total() == 6  # every V100 has six links, and all are used
        for other, column in zip(gpus, counts, strict=True):
            assert row[other.pci_bus_id] == column[one.pci_bus_id]
    assert [counts[0][gpu.pci_bus_id] for gpu in gpus] == [0, 1, 1, 2, 2, 0, 0, 0]


@pytest.mark.parametrize(("name", "links", "switches"), [("dgx-h200", 18, 4), ("dgx-a100", 12, 6)])
def test_nvswitch_machines_join_all_gpus_over_the_same_switches(name: str, links: int, switches: int) -> None:
    nvml = opened(name)
    fabrics = [nvml.links(nvml.describe(index).uuid) for index in range(nvml.count())]
    assert all(len(fabric) == links for fabric in fabrics)
    assert {link.peer for fabric in fabrics for link in fabric} == {LinkPeer.SWITCH}
    assert len({link.remote_bus_id for link in fabrics[0]}) == switches
    assert len(set(fabrics)) == 1


def test_hgx_16_has_a_fabric_per_base_board() -> None:
    nvml = opened("hgx-16")
    fabrics = [
        frozenset(link.remote_bus_id for link in nvml.links(nvml.describe(index).uuid)) for index in range(16)
    ]
    assert set(fabrics[:8]) == {fabrics[0]}
    assert set(fabrics[8:]) == {fabrics[8]}
    assert not fabrics[0] & fabrics[8]


@pytest.mark.parametrize("name", ["t4-4", "l40s-2", "pcie-8"])
def test_pcie_machines_have_no_nvlink(name: str) -> None:
    nvml = opened(name)
    assert nvml.links(nvml.describe(0).uuid) == ()


def test_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'dgx-h300'; there are: dgx-h200, dgx-a100"):
        profile_named("dgx-h300")


def test_sysfs_follows_the_bus(tmp_path: Path) -> None:
    machine = SimulatedMachine.create("dgx-a100")
    devices = machine.write_sysfs(tmp_path) / "bus/pci/devices"
    assert (devices / "0000:07:00.0/numa_node").read_text() == "3\n"
    assert (devices / "0000:bd:00.0/local_cpulist").read_text() == "80-95,208-223\n"
    assert (devices / "0000:07:00.0/vendor").read_text() == "0x10de\n"
    machine.fall_off_bus(0)
    machine.hide(7)
    machine.write_sysfs(tmp_path)
    assert len(list(devices.iterdir())) == 6
    assert not (devices / "0000:07:00.0").exists()


def test_sysfs_of_a_machine_that_names_no_node(tmp_path: Path) -> None:
    SimulatedMachine.create("t4-4").write_sysfs(tmp_path)
    assert (tmp_path / "bus/pci/devices/0000:00:1b.0/numa_node").read_text() == "-1\n"
