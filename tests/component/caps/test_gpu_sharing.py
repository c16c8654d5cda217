"""The GPU tier's measurement of shares, whole: a simulated GPU in real time, MPS without a server's work.

What is shown is that all of it runs, by the programs that run on hardware, and that its figures are called
what they are.
"""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from agent.mps.binary import CONTROL, SERVER
from tests.component.caps import tier
from tests.component.mps.conftest import STAND_IN_SERVER, run_folder, seen_by_host
from tests.cuda_double.layout_time import ClockMode
from tests.gpu import programs, sharing, sharing_page
from tests.gpu import rig as rig_module
from tests.gpu.rig import Rig
from tests.gpu.sharing import Case, Failed, Tenant
from tests.gpu.sharing_page import ALONE, MPS, Report, Row
from tests.mps_binaries import SUITES, control_program
from tests.pace import scaled

__all__ = ["run_folder", "seen_by_host"]


@pytest.fixture
def rig(
    tmp_path: Path, run_folder: Path, driver: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> Rig:
    """A rig with the real control daemon and a stand-in for its server."""
    monkeypatch.setattr(rig_module, "OPTIONS", replace(rig_module.OPTIONS, quit_seconds=0))
    made = tier.doubles(tmp_path, monkeypatch, library, ClockMode.WALL)
    monkeypatch.setattr(programs, "binding", made.binding)
    laid_out = run_folder / "programs"
    laid_out.mkdir()
    (laid_out / CONTROL).symlink_to(control_program(max(SUITES)))
    (laid_out / SERVER).write_text(STAND_IN_SERVER)
    (laid_out / SERVER).chmod(0o755)
    return tier.rig(run_folder, driver, made)


async def test_the_whole_measurement_runs_and_is_called_a_simulation(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "WARM", 0.2)
    small, large, seconds = 0.0, 0.0, 0.8
    while True:
        monkeypatch.setattr(sharing, "SECONDS", seconds)
        report = await sharing.measured(rig)
        rows = {(row.mode, row.load, row.share): row for rows in report.cases for row in rows}
        if not report.missing:
            small, large = (rows["shares", "decode", share].per_second for share in (10, 90))
        if small < large or seconds > 1:
            break
        seconds = scaled(3.0)  # on a busy machine a load may not have its turn before
    assert report.simulated
    assert not report.missing
    assert small < large
    assert [tuple(row.load for row in rows) for rows in report.cases] == [
        tuple(tenant.load for tenant in case.tenants) for case in sharing.CASES
    ]
    # Kernels are timers here, and cannot end early.
    assert report.kernels["weights_200us"] >= 199
    file = tmp_path / "docs" / "vgpu-on-hardware.md"
    written = sharing_page.write(report, file)
    assert not file.exists()
    assert written.name == "simulation-vgpu-on-hardware.md"
    page = written.read_text()
    assert page.startswith("# Simulation")
    assert "on hardware" not in page.replace("a claim about hardware", "")
    assert json.loads(written.with_suffix(".json").read_text())["simulated"] is True


def test_a_page_of_hardware_is_written_under_its_name(tmp_path: Path) -> None:
    base = Row(ALONE, "decode", None, 100.0, 0.010, 0.011, None)
    half = replace(base, mode="shares", share=50, per_second=49.0, factor=1.25)
    report = Report(
        "one H200", False, 10, {"weights_200us": 201.0}, ((base,), (half, half)), ("MPS: no server",)
    )
    written = sharing_page.write(report, tmp_path / "vgpu-on-hardware.md")
    assert written == tmp_path / "vgpu-on-hardware.md"
    page = written.read_text()
    assert page.startswith("# vGPU on hardware\n")
    assert "Simulat" not in page
    assert page.count("| shares | decode | 50 % | 49.0 | 49.0 % | 10.00 | 11.00 | 1.25 |") == 2
    assert "Not measured: MPS: no server" in page


async def test_a_case_that_fails_leaves_the_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "WARM", 0)
    monkeypatch.setattr(sharing, "SECONDS", min(scaled(0.2), 3.0))
    monkeypatch.setattr(rig, "_program", None)
    cases = (
        Case(ALONE, (Tenant("decode"),)),
        Case("shares", (Tenant("decode", 50), Tenant("nonsense", 50))),
        Case(MPS, (Tenant("decode"),)),
    )
    report = await sharing.measured(rig, cases)
    assert [[row.mode for row in rows] for rows in report.cases] == [[ALONE]]
    assert len(report.missing) == 2
    assert "no such load" in report.missing[0]
    assert report.missing[1].startswith("MPS: ")


async def test_what_was_taken_under_a_server_that_fell_is_refused(rig: Rig) -> None:
    case = Case(MPS, (Tenant("decode"),))

    async def take(_: Case) -> None:
        assert rig.daemon
        server = rig.daemon.status.value.server
        assert server
        os.kill(server, signal.SIGKILL)
        with anyio.fail_after(60):
            await rig.daemon.status.wait_for(lambda status: not status.serving or status.server != server)

    with pytest.RaisesGroup(pytest.RaisesExc(Failed, match="did not stay")):
        await sharing.under_mps(rig, (case,), take)


def test_a_load_that_ran_nothing_is_no_row() -> None:
    with pytest.raises(ValueError, match="nothing ran"):
        Row.of(ALONE, "decode", None, {"runs": 0, "seconds": 1.0}, None)
