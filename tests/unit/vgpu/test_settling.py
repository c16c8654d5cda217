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
    printf("{\"took\":[%u,%u,%u,%u],", took[0], took[1], took[2], took[3]);
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
