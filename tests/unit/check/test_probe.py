"""A container's report of its share: by the agent's program, and by any shell."""

import os
import subprocess
from pathlib import Path

import pytest

from agent.check.probe import SCRIPT, seen
from agent.vgpu.layout import DeviceLimits, limit_file

UUID = "GPU-00000000-0000-0000-0000-000000000001"


def program(folder: Path, code: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '| NVIDIA-SMI |'\nexit {code}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize("code", [0, 9])
def test_the_agent_s_program(tmp_path: Path, code: int) -> None:
    (tmp_path / "dev").mkdir()
    os.mknod(tmp_path / "dev/nvidia3", 0o600 | 0o020000, os.makedev(1, 3))
    (tmp_path / "dev/nvidia-caps").mkdir()
    caps = tmp_path / "usr/lib/gpu-node-agent"
    caps.mkdir(parents=True)
    (caps / "limits").write_bytes(limit_file("x", [DeviceLimits(UUID, 2 << 30)]))
    program(tmp_path / "usr/bin", code)
    environment = {"PATH": "/nowhere", "CUDA_X": "1", "NVIDIA_Y": "2", "SECRET": "3"}
    assert list(seen(environment, tmp_path)) == [
        "device: /dev/nvidia3",
        "variable: CUDA_X=1",
        "variable: NVIDIA_Y=2",
        f"cap: 2048 MiB of {UUID}",
        "| NVIDIA-SMI |",
        f"nvidia-smi: ended with {code}",
    ]


def test_a_container_without_anything(tmp_path: Path) -> None:
    assert list(seen({"PATH": str(tmp_path)}, tmp_path)) == ["nvidia-smi: not there"]


@pytest.mark.parametrize("code", [0, 9, None])
def test_a_shell(tmp_path: Path, code: int | None) -> None:
    if code is not None:
        program(tmp_path / "usr/bin", code)
    environment = {"PATH": f"{tmp_path}/usr/bin", "CUDA_X": "1 2", "NVIDIA_Y": "2", "SECRET": "3"}
    said = subprocess.run(
        ["/bin/sh", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert not said.stderr
    lines = [line for line in said.stdout.splitlines() if not line.startswith("device: ")]
    assert [line.replace("'", "").replace('"', "") for line in lines[:2]] == [
        "variable: CUDA_X=1 2",
        "variable: NVIDIA_Y=2",
    ]
    assert lines[2:] == (
        ["nvidia-smi: not there"] if code is None else ["| NVIDIA-SMI |", f"nvidia-smi: ended with {code}"]
    )
