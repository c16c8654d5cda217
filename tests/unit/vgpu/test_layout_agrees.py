"""`agent.vgpu.layout` and `clib/layout.h` are the same layouts: a C program reads what Python writes."""

import json
import subprocess
from pathlib import Path

import pytest

from agent.vgpu import layout
from agent.vgpu.layout import DeviceLimits
from clib.toolchain import compile_c

HEADER = Path(layout.__file__).parent / "clib" / "layout.h"
GPU = "GPU-11121314-2122-3132-4142-515253545556"
PROGRAM = r"""
#include <inttypes.h>
#include <stdio.h>
#include "layout.h"
static struct gna_usage usage;
static unsigned char limits[GNA_LIMITS_BYTES];
int main(void) {
    struct gna_limits_header *h = (void *)limits;
    struct gna_limit_record *r = (void *)(limits + GNA_LIMITS_RECORDS);
    if (fread(limits, 1, sizeof limits, stdin) != sizeof limits) return 1;
    if (fread(&usage, 1, sizeof usage, stdin) != sizeof usage) return 2;
    struct gna_limit *l = &r[1].copy[0];
    printf("{\"magic\":%d,\"layout\":%u,\"header\":%u,\"file\":%u,\"devices\":%u,\"container\":\"%s\",",
           h->magic == GNA_LIMITS_MAGIC, h->layout, h->header_bytes, h->file_bytes,
           h->device_count, h->container);
    printf("\"generation\":%" PRIu64 ",\"uuid\":\"%02x%02x\",\"memory\":%" PRIu64 ",\"request\":%" PRIu64 ",",
           l->generation, l->uuid[0], l->uuid[15], l->memory_bytes, l->request_bytes);
    printf("\"context\":%" PRIu64 ",\"unseen\":%" PRIu64 ",\"share\":%u,\"driver\":%u,\"flags\":%u,",
           l->context_bytes, l->unseen_bytes, l->core_share, l->driver_armed, l->flags);
    printf("\"rivals\":%u,\"forgiven\":%" PRIu64 ",", l->rivals, l->forgiven_bytes);
    printf("\"other\":%" PRIu64 ",", r[1].copy[1].generation);
    printf("\"usage\":%d,\"slots\":%u,\"slot\":%u,\"bytes\":%u,\"locks\":[%u,%u],\"kinds\":[%u,%u,%u]}\n",
           usage.header.magic == GNA_USAGE_MAGIC, usage.header.slots, usage.header.slot_bytes,
           usage.header.file_bytes, GNA_LOCK_KIND, GNA_LOCK_KIND_OFFSET,
           *(uint32_t *)(usage.header.lock_bytes + GNA_LOCK_KIND_OFFSET),
           *(uint32_t *)(usage.device[1].lock_bytes + GNA_LOCK_KIND_OFFSET),
           *(uint32_t *)(usage.device[2].lock_bytes + GNA_LOCK_KIND_OFFSET));
    usage.device[0].total = 11; usage.device[0].peak = 12; usage.device[0].refused = 13;
    usage.device[0].repaired = 14; usage.device[1].total = 21;
    fwrite(&usage, 1, sizeof usage, stderr);
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layout")
    (folder / "main.c").write_text(PROGRAM)
    compile_c(["-std=c11", "-Wall", "-Werror", f"-I{HEADER.parent}", "main.c", "-o", "main"], folder)
    return folder / "main"


@pytest.mark.timeout(600)  # the first run on a machine fetches the compiler
def test_both_sides_have_the_same_layout(program: Path) -> None:
    limits = layout.limit_file(
        "folder",
        [
            DeviceLimits(f"GPU-{'0' * 8}-0000-0000-0000-{'0' * 12}", 1),
            DeviceLimits(GPU, 1 << 40, 35, 77, True, True, rivals=1.5, forgiven_bytes=78),
        ],
    )
    head = layout.usage_head(2)
    usage = head + bytes(layout.USAGE_BYTES - len(head))
    ran = subprocess.run([program], input=limits + usage, capture_output=True, check=True, timeout=30)
    assert json.loads(ran.stdout) == {
        "magic": 1,
        "layout": layout.LAYOUT,
        "header": layout.RECORDS_AT,
        "file": layout.LIMITS_BYTES,
        "devices": 2,
        "container": "folder",
        "generation": 1,
        "uuid": "1156",
        "memory": 1 << 40,
        "request": 1 << 40,
        "context": 0,
        "unseen": 77,
        "share": 3500,
        "driver": 1,
        "flags": layout.STRICT,
        "rivals": 385,
        "forgiven": 78,
        "other": 0,
        "usage": 1,
        "slots": layout.SLOTS,
        "slot": layout.SLOT_BYTES,
        "bytes": layout.USAGE_BYTES,
        "locks": [layout.LOCK_KIND, layout.LOCK_KIND_AT],
        "kinds": [layout.LOCK_KIND, layout.LOCK_KIND, 0],
    }
    assert [each.rivals for each in layout.read_limits(limits)] == [None, 1.5]
    assert layout.read_usage(ran.stderr) == [
        layout.CountedUsage(11, 12, 13, 14),
        layout.CountedUsage(21, 0, 0, 0),
    ]
