"""Requests of containers and pods for a pair: every rule, with its sentence."""

import pytest

from agent.model.modes import ResourcePair, units
from agent.model.pod import MPS, VGPU, Container, Demand, Impossible, Stage, demand_of, init_group_of
from tests.pods import a_pod


def ask(
    cores: int, blocks: int, stage: Stage = Stage.APP, pair: ResourcePair = VGPU, name: str = "main"
) -> Container:
    return Container(name, {pair.core: cores, pair.memory: blocks}, stage)


@pytest.mark.parametrize(
    ("cores", "blocks", "expected"),
    [
        (1, 1, Demand(1, 1)),
        (99, 400, Demand(99, 400)),
        (100, 0, Demand(100, 0, whole=1)),
        (100, 7, Demand(100, 7, whole=1)),
        (300, 7, Demand(300, 7, whole=3)),
        (0, 4, Demand(0, 4)),
    ],
)
def test_vgpu_demands(cores: int, blocks: int, expected: Demand) -> None:
    assert demand_of(VGPU, ask(cores, blocks)) == expected


def test_a_container_that_asks_for_nothing_has_no_demand() -> None:
    assert demand_of(VGPU, Container("main", {"cpu": 2})) is None


@pytest.mark.parametrize(
    ("pair", "cores", "blocks", "sentence"),
    [
        (VGPU, 150, 4, "must be a multiple of 100"),
        (VGPU, 30, 0, "add tencent.com/vcuda-memory to its limits, or ask for 100 cores"),
        (MPS, 30, 0, "add nvidia.com/mps-memory to its limits"),
        (MPS, 0, 3, "add nvidia.com/mps-core to its limits"),
        (MPS, 101, 3, "a share lies on one GPU"),
        (MPS, 200, 3, "a share lies on one GPU"),
    ],
)
def test_impossible_demands_name_rule_and_remedy(
    pair: ResourcePair, cores: int, blocks: int, sentence: str
) -> None:
    with pytest.raises(Impossible, match=sentence):
        demand_of(pair, ask(cores, blocks, pair=pair))


def test_all_cores_of_an_mps_gpu_are_a_share() -> None:
    assert demand_of(MPS, ask(100, 3, pair=MPS)) == Demand(100, 3)


@pytest.mark.parametrize(
    ("pair", "memory_bytes", "blocks"),
    [
        (VGPU, 143771 << 20, 561),
        (VGPU, (256 << 20) - 1, 0),
        (MPS, 81559 << 20, 78),
        (MPS, (1 << 30) - 1, 0),
        (MPS, 0, 0),
    ],
)
def test_blocks_are_whole_and_leave_the_reserve(pair: ResourcePair, memory_bytes: int, blocks: int) -> None:
    assert pair.blocks(memory_bytes) == blocks


def test_pods_without_asking_init_containers_tie_nothing() -> None:
    pod = a_pod("d", "p", (Container("setup", {}, Stage.INIT), ask(20, 2), ask(30, 3, name="b")))
    assert init_group_of(VGPU, pod.containers) is None


def test_an_init_containers_heirs_share_its_gpu_up_to_their_peak() -> None:
    pod = a_pod(
        "d",
        "p",
        (
            ask(30, 40, Stage.INIT, name="init"),
            ask(20, 20, name="first"),
            ask(20, 20, name="second"),
            ask(5, 5, name="third"),
        ),
    )
    group = init_group_of(VGPU, pod.containers)
    assert group is not None
    assert group.containers == {"init", "first", "second"}
    assert group.peak == Demand(40, 40)


def test_sidecars_inherit_and_keep() -> None:
    sidecar = ask(10, 10, Stage.SIDECAR, name="sidecar")
    pod = a_pod("d", "p", (ask(30, 30, Stage.INIT, name="init"), sidecar, ask(30, 30)))
    group = init_group_of(VGPU, pod.containers)
    assert group is not None
    assert group.peak == Demand(40, 40)
    assert group.containers == {"init", "sidecar", "main"}


def test_a_whole_gpu_after_a_share_is_that_gpu() -> None:
    group = init_group_of(VGPU, (ask(30, 3, Stage.INIT, name="init"), ask(100, 0)))
    assert group is not None
    assert group.peak.whole == 1
    assert group.peak.cores == 100


def test_a_share_out_of_several_whole_gpus_is_impossible() -> None:
    pod = a_pod("d", "p", (ask(200, 0, Stage.INIT, name="init"), ask(50, 5)))
    with pytest.raises(Impossible, match="inherit units of 2 GPUs"):
        init_group_of(VGPU, pod.containers)


def test_more_cores_than_the_inherited_gpus_have_are_impossible() -> None:
    containers = (ask(30, 3, Stage.INIT, name="init"), ask(20, 3, name="first"), ask(100, 3, name="second"))
    with pytest.raises(Impossible, match="of which 100 exist"):
        init_group_of(VGPU, containers)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("4", 4), ("0", 0), ("+4", 4), ("4.0", 4), ("2000m", 2), ("1.5k", 1500), (".5k", 500)),
        *(("1k", 1000), ("3M", 3 * 10**6), ("1T", 10**12), ("2P", 2 * 10**15), ("2E", 2 * 10**18)),
        *(("2Ki", 2048), ("1Mi", 1 << 20), ("1Ti", 1 << 40), ("1Ei", 1 << 60)),
        *(("1e1", 10), ("1e3", 1000), ("2E+6", 2 * 10**6), ("2000e-3", 2), ("1.5e3", 1500)),
    ],
)
def test_quantities_in_every_form(text: str, count: int) -> None:
    assert units(text) == count


@pytest.mark.parametrize(
    "text", ["", ".", "-4", "1.5", "100m", "4Xi", "4ki", "1e-3", "1e", "1e999", "\u0664", "4 "]
)
def test_bad_quantities(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        units(text)
