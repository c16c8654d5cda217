"""`check compat`, and `check` alone, on the command line."""

from pathlib import Path

import pytest

from agent.cli.main import main


def test_compat_without_a_driver_asks_for_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = f"driver.library={tmp_path}/none.so"
    assert main(["check", "compat", "--runtime", "12.4", "--set", missing]) == 2
    assert "--driver" in capsys.readouterr().err


@pytest.mark.parametrize(("runtime", "code"), [("12.4", 0), ("12.6", 3), ("13.0", 1)])
def test_compat_tells_by_its_exit_code(runtime: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "compat", "--runtime", runtime, "--driver", "550.144.03"]) == code
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith({0: "allowed", 3: "unstable", 1: "blocked"}[code])


@pytest.mark.parametrize(("enforcement", "code"), [("off", 0), ("report", 0), ("library", 1), ("strict", 1)])
def test_compat_holds_vgpu_to_the_baseline_where_another_library_is_loaded(
    enforcement: str, code: int
) -> None:
    asked = ["check", "compat", "--runtime", "12.6", "--driver", "12.8", "--mode", "vgpu"]
    asked.append(f"--set=vgpu.enforcement={enforcement}")
    assert main([*asked, "--set=vgpu.library=/opt/libcuda-control.so"]) == code
    assert main(asked) == 0, "the agent's own library knows CUDA 11.8, 12 and 13"


def test_check_alone_is_still_about_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("defaultMode: pgpu\n")
    assert main(["check", "--config", str(file)]) == 0
    file.write_text("defaultMode: none of these\n")
    assert main(["check", "--config", str(file)]) == 2
