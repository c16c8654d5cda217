"""Caps under load: never a byte over, and never a refusal that was not due."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.native import program
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.gpu.filling import FILL, HELPERS, PIECES

CONTEXT: Final = 4
CAP: Final = 3072


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    return program(tmp_path_factory.mktemp("storm"), "storm")


def run(storm: Path, driver: Path, environment: Mapping[str, str], *arguments: int) -> dict[str, Any]:
    command = [str(storm), str(driver), *map(str, arguments)]
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=110, check=True
    )
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.timeout(120)
def test_memory_storm_never_over(
    tmp_path: Path, storm: Path, driver: Path, container: MakeContainer, programs: Programs
) -> None:
    machine = CudaMachine.create(tmp_path / "gpu", [CudaGpu(context_bytes=CONTEXT * MIB)])
    made = container(CAP, context=CONTEXT)
    happened = run(storm, driver, {**machine.environment, **made.environment}, 300, 100, 7)
    print(happened, f"peak {machine.peak() / MIB} of {CAP} MiB")
    assert happened["errors"] == 0, happened["first_error"]
    assert happened["kills"] == 100
    assert happened["stops"] > 20
    assert all(granted > 0 for granted, _ in happened["classes"].values())
    assert sum(refused for _, refused in happened["classes"].values()) > 100, "the cap was reached"
    assert machine.peak() <= CAP * MIB
    assert machine.peak() > (CAP - 128) * MIB, "the storm was one"
    assert machine.used() == 0
    programs.machine = machine
    after = programs(made, "init()")
    assert after("memory()") == [(CAP - CONTEXT) * MIB, CAP * MIB]
    assert made.charged() == machine.used() == CONTEXT * MIB


@pytest.mark.parametrize("kind", FILL)
def test_no_false_out_of_memory(
    kind: str, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    room = 1024  # MiB beside the context; the cap leaves 64 MiB more
    made = container(300 + room + 64)
    count = PIECES.get(kind, room // 8)
    take, give = FILL[kind]
    app = programs(made, HELPERS, "init()")
    for _ in range(3):
        app(f"held = [{take} for _ in range({count})]")
        assert (300 + room) * MIB <= machine.used() <= made.charged() <= (300 + room + 64) * MIB
        app(f"[{give} for one in held]", "tidy()")
        assert machine.used() == made.charged() == 300 * MIB
    assert machine.peak() <= (300 + room + 64) * MIB
