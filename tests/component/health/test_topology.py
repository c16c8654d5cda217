"""Links as the scanner reads them from simulated machines, against what `nvidia-smi topo -m` shows there."""

import pytest

from tests.component.health.bench import watching
from tests.unit.model.topo_matrices import machine as measured


@pytest.mark.usefixtures("face")
@pytest.mark.parametrize(
    ("profile", "matrix"),
    [
        ("dgx-h200", "dgx-h100"),
        ("dgx-a100", "dgx-a100"),
        ("dgx1-v100", "dgx1-v100"),
        ("pcie-8", "pcie-8"),
        ("t4-4", "t4-4"),
        ("hgx-16", "hgx-16"),
    ],
)
async def test_the_scores_of_a_machine_are_those_of_its_matrix(profile: str, matrix: str) -> None:
    async with watching(profile) as watched:
        assert watched.snapshot.topology.gpus == watched.machine.uuids
        assert watched.snapshot.topology.scores == measured(matrix).scores


async def test_the_links_are_read_anew_when_the_set_of_gpus_changes() -> None:
    async with watching("dgx1-v100") as watched:
        before = watched.snapshot.topology
        watched.machine.hide(0)
        await watched.settled(lambda now: len(now.topology.gpus) == 7)
        watched.machine.add(0)
        await watched.settled(lambda now: now.topology == before)
