"""Escapes of a tenant on a real driver; the library is in /etc/ld.so.preload, as in containers."""

import shutil
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.gpu import built, limits
from tests.gpu.cuda import OUT_OF_MEMORY
from tests.gpu.escapes import PIECE_MIB, PLACE, WAYS, contained, etc
from tests.gpu.limits import MIB, Capped
from tests.gpu.rig import Rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

CAP = 2048  # MiB
CONTEXT = 1024
MOST = 2 * CAP // PIECE_MIB


def granted(rig: Rig, container: Capped, way: list[str], preloaded: str = limits.NAME) -> tuple[int, int]:
    """MiB that a program gets which is started in this way, and the driver's last answer. Blocks."""
    shutil.copy(built.program(built.GREEDY), container.folder)
    command = [*way, str(PLACE / built.GREEDY), rig.library_path(), str(MOST)]
    own = etc(rig.folder / "etc", preloaded)
    said = contained(command, container.folder, own, environment={"CUDA_VISIBLE_DEVICES": rig.gpu.uuid})
    pieces, code = map(int, said.split())
    return pieces * PIECE_MIB, code


@pytest.mark.parametrize("way", WAYS)
async def test_escape(rig: Rig, way: str) -> None:
    if "loader" in way:
        # The loader takes no program by its name alone.
        assert await anyio.Path(WAYS[way][0]).exists()
    container = await rig.container(CAP)
    got, code = await anyio.to_thread.run_sync(granted, rig, container, WAYS[way])
    assert code == OUT_OF_MEMORY
    assert CAP - CONTEXT <= got <= CAP
    assert container.usage.peak_bytes <= CAP * MIB


async def test_the_trial_itself_is_without_a_cap(rig: Rig) -> None:
    container = await rig.container(CAP)
    nothing = Path(limits.NAME).with_suffix(".none").name
    got, code = await anyio.to_thread.run_sync(granted, rig, container, ["env"], nothing)
    assert (got, code) == (2 * CAP, 0)
