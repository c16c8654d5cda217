"""Loading the library, each case in a process of its own: nvidia-ml-py loads once per process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent.simulator.machine import SimulatedMachine
from tests.nvml_double.build import STATE_VARIABLE, BuildError, build

REPOSITORY = Path(__file__).parents[3]

PROLOGUE = """
import shutil, sys
from pathlib import Path
from agent.nvml.binding import NvmlBinding
from agent.nvml.port import *
library, folder = Path(sys.argv[1]), Path(sys.argv[2])
def refused(binding):
    try:
        binding.open()
    except NvmlError as error:
        return error
    raise AssertionError("opened")
"""


@pytest.fixture
def in_a_process(tmp_path: Path) -> "InAProcess":
    SimulatedMachine.create("t4-4", tmp_path / "machine")
    return InAProcess(tmp_path)


class InAProcess:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, library: Path, text: str) -> None:
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROLOGUE + text, str(library), str(self._folder)],
            env=os.environ | {STATE_VARIABLE: str(self._folder / "machine")},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr


def test_a_library_that_appears_later(nvml_library: Path, in_a_process: InAProcess) -> None:
    in_a_process(
        nvml_library,
        """
path = folder / "libnvidia-ml.so.1"
binding = NvmlBinding(path)
for _ in range(2):
    error = refused(binding)
    assert isinstance(error, NvmlLibraryMissing) and str(path) in str(error), error
shutil.copy(library, path)
assert binding.open().version == "535.54.03"
assert binding.count() == 4
""",
    )


def test_a_driver_root_that_is_mounted_later(nvml_library: Path, in_a_process: InAProcess) -> None:
    in_a_process(
        nvml_library,
        """
binding = NvmlBinding(roots=(folder / "driver",))
error = refused(binding)
assert isinstance(error, NvmlLibraryMissing) and "mount its root" in str(error), error
target = folder / "driver/usr/lib64"
target.mkdir(parents=True)
shutil.copy(library, target / "libnvidia-ml.so.535.54.03")
(target / "libnvidia-ml.so.1").symlink_to("/usr/lib64/libnvidia-ml.so.535.54.03")
assert binding.open().cuda_version == (12, 2)
""",
    )


def test_a_driver_replaced_under_the_process(nvml_library: Path, in_a_process: InAProcess) -> None:
    in_a_process(
        nvml_library,
        """
root = folder / "usr/lib64"
root.mkdir(parents=True)
link = root / "libnvidia-ml.so.1"
for version in ("535", "580"):
    shutil.copy(library, root / f"libnvidia-ml.so.{version}")
link.symlink_to("libnvidia-ml.so.535")
binding = NvmlBinding(roots=(folder,))
binding.open()
binding.close()
link.unlink()
link.symlink_to("libnvidia-ml.so.580")
error = refused(binding)
assert isinstance(error, NvmlDriverMismatch) and "restart the process" in str(error), error
import pynvml
try:
    pynvml.nvmlDeviceGetCount()
    raise AssertionError("left open")
except pynvml.NVMLError_Uninitialized:
    pass
""",
    )


def test_an_old_driver_without_the_newer_functions(in_a_process: InAProcess) -> None:
    without = [
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlDeviceGetMinorNumber",
    ]
    in_a_process(
        build(without=without),
        """
binding = NvmlBinding(library)
binding.open()
gpus = [binding.describe(index) for index in range(binding.count())]
assert [gpu.minor for gpu in gpus] == [0, 1, 2, 3]
assert not gpus[0].mig_enabled and gpus[0].memory_bytes == 15360 << 20
probe = binding.probe(gpus[0].uuid)
assert probe.ecc_uncorrected is None and probe.retirement_pending is None
assert probe.memory_used_bytes == 450 << 20  # the old answer counts what the driver keeps
sample = binding.sample(gpus[0].uuid)
assert sample.memory_used_bytes == probe.memory_used_bytes and sample.temperature_celsius == 28
assert binding.links(gpus[0].uuid) == ()
try:
    binding.watch(gpus[0].uuid)
    raise AssertionError("watched")
except NvmlNotSupported as error:
    assert error.code == NvmlCode.FUNCTION_NOT_FOUND
""",
    )


def test_a_driver_without_the_older_temperature(in_a_process: InAProcess) -> None:
    in_a_process(
        build(without=["nvmlDeviceGetTemperature"]),
        """
binding = NvmlBinding(library)
binding.open()
assert binding.sample(binding.describe(0).uuid).temperature_celsius == 28
""",
    )


def test_a_state_of_another_build_is_refused(nvml_library: Path, tmp_path: Path) -> None:
    SimulatedMachine.create("t4-4", tmp_path / "machine").mapping.state.version += 1
    InAProcess(tmp_path)(
        nvml_library,
        """
assert refused(NvmlBinding(library)).code == NvmlCode.UNKNOWN
(folder / "machine").write_bytes(b"short")
assert refused(NvmlBinding(library)).code == NvmlCode.UNKNOWN
(folder / "machine").unlink()
assert refused(NvmlBinding(library)).code == NvmlCode.DRIVER_NOT_LOADED
""",
    )


def test_a_build_is_made_once(tmp_path: Path) -> None:
    library = build(tmp_path)
    before = library.stat()
    assert build(tmp_path) == library
    assert library.stat().st_mtime_ns == before.st_mtime_ns
    assert build(tmp_path, without=["nvmlDeviceGetName"]) != library
    assert sorted(path.name for path in library.parent.iterdir()) == ["libnvidia-ml.so.1"]


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match="no C compiler 'no-such-compiler'"):
        build(tmp_path)


def test_exports_are_nvml_functions_only(nvml_library: Path) -> None:
    assert shutil.which("nm"), "binutils come with the C compiler"
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(nvml_library)], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert len(names) > 60
    assert all(name.startswith("nvml") for name in names)
