"""The rig of the GPU tier without a GPU: a fake CUDA library, a stand-in server, the real control daemon.

What a GPU does is not shown here; that the rig starts, asks, caps and clears up as it means to is.
"""

import os
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from agent.model.cuda import limits
from agent.model.gpu import Gpu
from agent.mps.binary import CONTROL, SERVER
from agent.mps.directories import Directories
from tests.component.mps import fake_cuda
from tests.component.mps.conftest import STAND_IN_SERVER
from tests.component.mps.keeping import UUID
from tests.gpu import kernels, programs, table
from tests.gpu import rig as rig_module
from tests.gpu.cuda import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from tests.gpu.rig import Rig
from tests.mps_binaries import SUITES, control_program

GPU = Gpu(UUID, 0, 0, "0000:1b:00.0", "fake", 8 << 30, (9, 0))


@pytest.fixture
def rig(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig whose programs are laid out: it takes them for those of the driver."""
    # The stand-in leaves at a signal only, after all the time that clients are given: none.
    monkeypatch.setattr(rig_module, "OPTIONS", replace(rig_module.OPTIONS, quit_seconds=0))
    laid_out = run_folder / "programs"
    laid_out.mkdir()
    (laid_out / CONTROL).symlink_to(control_program(max(SUITES)))
    (laid_out / SERVER).write_text(STAND_IN_SERVER)
    (laid_out / SERVER).chmod(0o755)
    return Rig(GPU, "550.0", run_folder, str(fake_cuda.build(tmp_path)))


async def test_clients_are_started_capped_and_ended(rig: Rig) -> None:
    async with rig.serving() as daemon:
        assert daemon.folders == Directories.of(rig.folder, UUID)
        assert daemon.status.value.server is not None
        async with rig.client("look", caps=limits(50, 2)) as client:
            await client.ready()
            found = await client.result()
            assert found["multiprocessors"] == fake_cuda.MULTIPROCESSORS
            assert found["used"] == [0, 1, 2, 3]
            assert found["total"] > found["free"]
            # As in a container, its /dev/shm is the daemon's.
            seen = anyio.Path(f"/proc/{client.pid}/root/dev/shm")
            assert await seen.samefile(daemon.folders.shm)
            pipe = f"/proc/{client.pid}/root{daemon.folders.pipe}"
            assert os.statvfs(pipe).f_flag & os.ST_RDONLY
        assert client.process.returncode == 0


async def test_memory_is_taken_to_the_last_piece(rig: Rig) -> None:
    async with rig.serving():
        async with rig.client("allocate", 64, 8192, caps=limits(100, 2)) as client:
            await client.ready()
            assert await client.result() == {"mebibytes": 2048 - fake_cuda.CONTEXT_MIB, "code": OUT_OF_MEMORY}
        async with rig.client("allocate", 64, 1024) as client:
            await client.ready()
            assert await client.result() == {"mebibytes": 1024, "code": 0}


async def test_a_fault_is_told_and_the_context_kept(rig: Rig) -> None:
    async with rig.client("fault") as client:
        await client.ready()
        assert await client.result() == {"code": ILLEGAL_ADDRESS}
        assert client.process.returncode is None


async def test_the_table_has_a_row_for_each_measurement(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SECONDS", 0)
    monkeypatch.setattr(table, "CLIENTS", (1, 2))
    once = {"runs": 3, "seconds": 0.5, "p50": 0.1, "p99": 0.2, "code": 0}
    # Of no seconds there are no runs: that the clients ran is asserted, their figures are made up.
    seen: list[dict[str, object]] = []

    def counted(kernel: str, mode: str, results: list[dict[str, object]]) -> table.Row:
        seen.extend(results)
        return table.Row(kernel, len(results), mode, 6.0, 0.1, 0.2)

    whole = table.row("work", "MPS", [once, once])
    assert (whole.per_second, whole.p50, whole.p99, whole.clients) == (12.0, 0.1, 0.2, 2)
    with pytest.raises(ValueError, match="a client says"):
        table.row("work", "MPS", [once, {"code": 805}])
    monkeypatch.setattr(table, "row", counted)
    rows = await table.measured(rig)
    assert len(rows) == 2 * 2 * 3
    assert [result["code"] for result in seen] == [0] * (2 * 3 * (1 + 2))
    page = table.render(rows, "one fake")
    assert page.count("+0 %") == 2 * len(rows)
    assert page.count("\n| ") == len(rows) + 2 * 2


async def test_where_no_server_starts_it_is_said_once_and_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine whose driver and programs do not fit: the other tests wait for nothing."""
    monkeypatch.setattr(Rig, "hopeless", {})
    await anyio.Path(rig.folder / "programs" / SERVER).write_text("#!/bin/sh\nexit 1\n")
    # The daemon names a server from its fork on: one that is slow to die would be taken for one that serves.
    control = anyio.Path(rig.folder / "programs" / CONTROL)
    real = await control.readlink()
    await control.unlink()
    await control.write_text(
        f'#!/bin/sh\ncase "$1" in -d) exec {real} "$@";; esac\n{real} | sed "/^[0-9]*$/d"\n'
    )
    await control.chmod(0o755)
    with pytest.RaisesGroup(
        pytest.RaisesExc(AssertionError, match=r"does not start[\s\S]*needs a plain Linux")
    ):
        async with rig.serving():
            pass
    monkeypatch.setattr(rig, "_program", None)
    with pytest.raises(AssertionError, match=r"does not start[\s\S]*GPU_TEST_MPS"):
        async with rig.serving():
            pass


def test_programs_are_laid_out_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brought, laid_out = tmp_path / "brought", tmp_path / "laid out"
    for folder in (brought, laid_out):
        folder.mkdir()
    for name in ("nvidia-cuda-mps-control", SERVER):
        (brought / name).write_text("#!/bin/sh\necho $LD_LIBRARY_PATH\n")
        (brought / name).chmod(0o755)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(programs, "DRIVER_FOLDERS", "/nonexistent")
    monkeypatch.setenv(programs.VARIABLE, str(brought))
    control = programs.lay_out(laid_out, Path("/opt/driver/libcuda.so.580"))
    assert control.resolve() == (brought / "nvidia-cuda-mps-control").resolve()
    wrapper = (laid_out / SERVER).read_text()
    assert f'exec "{brought / SERVER}"' in wrapper
    assert 'LD_LIBRARY_PATH="/opt/driver' in wrapper


@pytest.mark.parametrize("name", ["WORK", "STREAM", "WHERE", "POKE"])
def test_kernels_declare_what_the_launcher_passes(name: str) -> None:
    text = getattr(kernels, name)
    assert f".visible .entry {name.lower()}(.param .u64 address, .param .u32 number)" in text
    assert text.count("{") == text.count("}") == 1
