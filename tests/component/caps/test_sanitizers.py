"""Threads, forks and processes that race for memory, with the library under the sanitizers of gcc."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from agent.vgpu import layout
from tests.component.caps.conftest import CACHE, MakeContainer
from tests.component.caps.container import CHEAP_MIB, Container
from tests.component.caps.sanitized import ENVIRONMENT, FOUND, SANITIZERS, Sanitized
from tests.cuda_double.machine import MIB, CudaMachine

CAP: Final = 640
# What is broken on purpose: file, text, what stands there instead, and how the sanitizer names it.
FAULTS: Final = {
    "a lock that locks nothing": (
        "thread",
        "private.c",
        "void gna_enter(struct gna_mutex *mutex) {",
        "void gna_enter(struct gna_mutex *mutex) {\n    if (mutex != NULL) {\n        return;\n    }",
        "WARNING: ThreadSanitizer: data race",
    ),
    "a figure that two threads write": (
        "thread",
        "ledger.c",
        "!gna_lock_shared(&device->lock, &died)",
        "(died = false)",
        "WARNING: ThreadSanitizer: ",
    ),
    "a child that clears too much": (
        "address",
        "graphs.c",
        "memset(charged, 0, sizeof(charged));",
        "memset(charged, 0, sizeof(charged) + (generation[0] | 1));",
        "ERROR: AddressSanitizer: global-buffer-overflow",
    ),
    "a shift that is too far": (
        "address",
        "private.c",
        "kind << 56",
        "kind << (56 + kind)",
        "runtime error: shift exponent",
    ),
}


def built(sanitizer: str) -> Sanitized:
    return Sanitized.cached(CACHE, sanitizer, Path(__file__).with_name("race.c"))


def race(
    program: Sanitized, made: Container, machine: CudaMachine, driver: Path, *arguments: int
) -> subprocess.CompletedProcess[str]:
    # Its files are those beside the library, which it is itself.
    shutil.copy(program.program, made.folder)
    descriptor = os.open(made.limits, os.O_RDWR)
    try:
        (limits,) = layout.read_limits(made.limits.read_bytes())
        # Launches are priced and wait for their share, too.
        layout.write_limits(descriptor, 0, replace(limits, compute=True, share=5000))
    finally:
        os.close(descriptor)
    # The thread sanitizer of older gcc does not bear all of the kernel's randomness.
    command = ["setarch", "--addr-no-randomize", made.folder / program.program.name, driver]
    return subprocess.run(
        [*map(str, command), *map(str, arguments)],
        env={**machine.environment, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_memory_race_under_a_sanitizer(
    sanitizer: str, container: MakeContainer, gpu: CudaMachine, driver: Path
) -> None:
    made = container(CAP, context=CHEAP_MIB)
    done = race(built(sanitizer), made, gpu, driver, 4, 6, 400, 7)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (usage,) = layout.read_usage(made.usage.read_bytes())
    print(sanitizer, usage, f"peak {gpu.peak() / MIB} of {CAP} MiB")
    assert usage.refused > 20, "the cap was reached"
    assert usage.next_ns > 0, "launches were paid for"
    assert (CAP - 64) * MIB < gpu.peak() <= usage.peak_bytes <= CAP * MIB
    assert gpu.used() == made.charged() == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_sanitizers_find_what_is_broken_on_purpose(
    fault: str,
    container: MakeContainer,
    gpu: CudaMachine,
    driver: Path,
    tmp_path: Path,
) -> None:
    sanitizer, name, before, after, message = FAULTS[fault]
    broken = built(sanitizer).with_fault(tmp_path / "broken", name, before, after)
    done = race(broken, container(CAP, context=CHEAP_MIB), gpu, driver, 1, 6, 400, 7)
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
    assert f"ended with {FOUND << 8:#x}" in done.stderr
