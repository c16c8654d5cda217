"""Processes of nested PID namespaces: their pids mean nothing to others; what the dead had is free again."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import Container
from tests.cuda_double import program as programs_of_double
from tests.cuda_double.machine import MIB, CudaMachine
from tests.cuda_double.program import Program, commanded
from tests.pace import scaled

CLIENT = Path(programs_of_double.__file__).with_name("client.py")
NESTED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
CAP, CONTEXT = 1024, 300


@contextmanager
def nested(container: Container, machine: CudaMachine, driver: Path, *commands: str) -> Iterator[Program]:
    """A program in a PID namespace of its own, where it is the first process."""
    argv = ["env", *(f"{key}={value}" for key, value in machine.environment.items())]
    argv += [f"{key}={value}" for key, value in container.environment.items()]
    with commanded([*argv, *NESTED, sys.executable, "-I", "-S", str(CLIENT), str(driver)]) as started:
        started(*commands)
        yield started


def free(container: Container, program: Program, expected: int) -> None:
    """Wait until the program sees so many free MiB; the kernel takes a moment to end a namespace."""
    end = time.monotonic() + scaled(30)
    while program("memory()")[0] != expected * MIB:
        assert time.monotonic() < end, (program("memory()"), container.slots())
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_memory_of_dead_processes_of_other_pid_namespaces_is_free_again(
    container: MakeContainer, machine: CudaMachine, programs: Programs, driver: Path
) -> None:
    made = container(CAP)
    with nested(made, machine, driver, "init()", "alloc(400)") as inner:
        outer = programs(made, "init()")
        assert outer("memory()")[0] == (CAP - 2 * CONTEXT - 400) * MIB
        # It lives, though its pid is nobody's here, or somebody else's.
        time.sleep(0.1)
        assert outer("memory()")[0] == (CAP - 2 * CONTEXT - 400) * MIB
        inner.kill()
        free(made, outer, CAP - CONTEXT)
        assert len(made.slots()) == 1
    # The same the other way round: the inner one cannot see the outer one at all.
    with nested(made, machine, driver, "init()") as inner:
        assert inner("memory()")[0] == (CAP - 2 * CONTEXT) * MIB
        outer.kill(SIGKILL)
        free(made, inner, CAP - CONTEXT)


@pytest.mark.timeout(120)
def test_a_process_that_closes_all_its_descriptors_is_not_taken_for_dead(
    container: MakeContainer, machine: CudaMachine, programs: Programs, driver: Path
) -> None:
    made = container(CAP)
    with nested(made, machine, driver, "init()", "alloc(400)") as inner:
        inner("import os; os.closerange(3, 1024)")
        outer = programs(made, "init()")
        for _ in range(20):
            assert outer("memory()")[0] == (CAP - 2 * CONTEXT - 400) * MIB
            time.sleep(0.005)
        inner.kill()
        free(made, outer, CAP - CONTEXT)


@pytest.mark.timeout(120)
def test_a_child_does_not_hold_for_its_dead_parent(
    container: MakeContainer, machine: CudaMachine, programs: Programs, driver: Path
) -> None:
    made = container(CAP)
    with nested(made, machine, driver) as first:
        # The second process of the namespace has memory and a child of its own; it ends, its child lives on.
        first("import os; child = fork('init(); alloc(400); os.fork() or time.sleep(600)')")
        assert first("os.waitpid(child, 0)[1]") == 0
        outer = programs(made, "init()")
        free(made, outer, CAP - CONTEXT)
