"""Measured launches settle what others paid: the C files of prices by themselves, without a GPU."""

import json
import subprocess

import pytest

from clib import headers
from clib.build_library import CLOCK, HEADERS, generate
from clib.rules import SOURCES
from clib.toolchain import compile_c

PROGRAM = r"""
#include "caps.h"
#include <inttypes.h>
#include <stdio.h>
static uint32_t took[4];
/* The price after `count` times of `us` microseconds, and after that of other ones. */
static uint64_t price(struct gna_readings *readings, unsigned count, uint64_t us, uint32_t rivals) {
    uint64_t found = 0;
    for (unsigned number = 0; number < count; number++) {
        found = gna_reading_add(readings, us * 1000, rivals);
    }
    return found / 1000;
}

static void prices(void) {
    struct gna_readings always = {0}, unknown = {0}, comes = {0}, brief = {0};
    printf("\"always\":%" PRIu64 ",", price(&always, 16, 14500, 256));
    printf("\"unknown\":%" PRIu64 ",", price(&unknown, 16, 14500, 255));
    uint64_t before = price(&comes, 16, 7740, 0);
    uint64_t first = price(&comes, 1, 14500, 256), later = price(&comes, 15, 14500, 256);
    uint64_t gone = price(&comes, 3, 7740, 0);
    printf("\"comes\":[%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 "],", before, first, later, gone);
    price(&brief, 8, 1000, 256);
    printf("\"brief\":%" PRIu64 ",", price(&brief, 8, 2900, 256));
}

int main(void) {
    struct gna_sampling sampling;
    gna_sampling_reset(&sampling);
    gna_sampling_took(&sampling, 10);
    took[0] = gna_sampling_took(&sampling, 12);
    took[1] = gna_sampling_took(&sampling, 11); /* of a thread that was overtaken on its way to the lock */
    gna_sampling_took(&sampling, 5000);
    gna_sampling_reset(&sampling);
    gna_sampling_took(&sampling, 5000); /* of a thread that had its number before the reset */
    took[2] = gna_sampling_took(&sampling, 1);
    took[3] = gna_sampling_took(&sampling, 4);
    printf("{");
    prices();
    printf("\"took\":[%u,%u,%u,%u],", took[0], took[1], took[2], took[3]);
    printf("\"back\":%" PRId64 ",", gna_reading_owed(20000, 1000000000, 1));
    printf("\"many\":[%" PRId64 ",%" PRId64 "]}\n", gna_reading_owed(20000, 1000000, 1000),
           gna_reading_owed(1000000, 20000, 1000));
    return 0;
}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("settling")
    generate(folder)
    (folder / "main.c").write_text(PROGRAM)
    sources = [str(SOURCES / "readings.c"), str(SOURCES / "sampling.c"), str(CLOCK), "main.c"]
    includes = [f"-I{folder}", f"-I{SOURCES}", f"-isystem{headers.include(HEADERS)}"]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Werror", "-fsanitize=undefined", "-fsanitize-trap=all"]
    compile_c([*flags, *includes, *sources, "-o", "main"], folder)
    done = subprocess.run([folder / "main"], capture_output=True, check=True, timeout=10)
    return dict(json.loads(done.stdout))


@pytest.mark.timeout(600)  # the first run on a machine fetches the compiler
def test_a_launch_that_was_overtaken_stands_for_none(found: dict[str, object]) -> None:
    assert found["took"] == [2, 0, 0, 3]


@pytest.mark.timeout(600)
def test_a_measured_launch_gets_back_all_that_it_paid_too_much(found: dict[str, object]) -> None:
    assert found["back"] == 20_000 - 1_000_000_000
    # The others for which it stands are an estimate, and bounded.
    assert found["many"] == [-250_000_000, 250_000_000]


@pytest.mark.timeout(600)
def test_a_launch_that_rivals_always_interrupt_is_taken_for_its_own_time(found: dict[str, object]) -> None:
    """A graph of 7.74 ms on an H200 beside one that always had work: no launch of it was left alone."""
    assert found["always"] == pytest.approx(7740, rel=0.03)
    assert found["unknown"] == 14500
    # Times count by who was there when they were taken: nothing changes as rivals come and go.
    assert found["comes"] == [7740, 7740, pytest.approx(7740, rel=0.03), pytest.approx(7740, rel=0.03)]
    # Short launches are left alone often enough.
    assert found["brief"] == 1000
