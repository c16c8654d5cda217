"""Where libnvidia-ml.so.1 is looked for."""

from pathlib import Path

import pytest

from agent.nvml import binding
from agent.nvml.port import NvmlLibraryMissing


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"library")
    return path


def test_the_first_root_that_has_it_wins(tmp_path: Path) -> None:
    put(tmp_path / "late/usr/lib64/libnvidia-ml.so.1")
    early = put(tmp_path / "early/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")
    roots = (tmp_path / "absent", tmp_path / "early", tmp_path / "late")
    assert binding.find(roots) == early


def test_no_root_has_it(tmp_path: Path) -> None:
    assert binding.find(()) is None
    assert binding.find((tmp_path,)) is None


def test_links_stay_inside_their_root(tmp_path: Path) -> None:
    real = put(tmp_path / "root/opt/nvidia/libnvidia-ml.so.580.95.05")
    folder = tmp_path / "root/usr/lib64"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.580").symlink_to("/opt/nvidia/libnvidia-ml.so.580.95.05")
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580")
    assert binding.find((tmp_path / "root",)) == real


def test_dangling_and_endless_links_are_no_library(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib64"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.1").symlink_to("/nowhere")
    assert binding.find((tmp_path,)) is None
    (folder / "libnvidia-ml.so.1").unlink()
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.1")
    assert binding.find((tmp_path,)) is None


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = put(tmp_path / "libnvidia-ml.so.1")
    with pytest.raises(NvmlLibraryMissing, match=r"cannot load NVML from .*: .*correct the driver root"):
        binding.preload(path)
