"""docs/comparison.md: each cell has its source, each source is used."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
UNKNOWN = "not found out"


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its first two lines."""
    text = PAGE.read_text()
    section = text[text.index(f"## {heading}") :].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_cell_has_a_source_that_is_listed() -> None:
    listed = {key for key, _ in rows("Sources")}
    named: set[str] = {"O"}  # the operator has a sentence of its own
    for what, *cells in rows("What each does"):
        assert len(cells) == 7, what
        for cell in cells:
            keys = re.findall(r"\[(\w+)\]$", cell)
            assert keys or cell == UNKNOWN, f"{what}: {cell!r} has no source"
            named |= set(keys)
    assert named == listed


def test_what_we_lack_is_in_the_table() -> None:
    own = [cells[0] for _, *cells in rows("What each does")]
    assert sum(cell.startswith("**no") for cell in own) >= 4


# How the claims of the product suite, and of articles about it, begin in the page's table.
CLAIMS = (
    *("Full isolation of pGPU", "vGPU limits memory and compute", "MPS enforces limits"),
    *("MPS: fault isolation", "MPS: 30 to 50 % lower latency", "MPS: three times the queries"),
    *("Utilisation rises", "Few percent overhead", "NVLink and C2C aware", "NUMA binding"),
    *("IOMMU protection", "SR-IOV, PCIe passthrough", "VDI, remote desktops", "No additional agents"),
    *("Monitoring of all modes", "7 days of history", "Quota by team", "Switch of modes by a label"),
    *("CUDA up to 12.4 for vGPU", "AMD, Intel, FPGA", "`compatabilityPolicy=strict`"),
    *("PaddlePaddle needs `FLAGS_allocator_strategy", "`paddle.utils.run_check()`"),
    *("vLLM's `validate_environment`", "Driver and toolkit by `lspci`", "MPI jobs on one GPU"),
    *("kube-scheduler's file, `v1beta2`", "Installed from the console's catalog"),
    *("Root, CAP_SYS_MODULE", "Three DaemonSets", "Kubernetes 1.25, driver, toolkit", "Whole cards by 100"),
    *(
        "MPS from Volta",
        "Guaranteed units",
        "Time slices",
        "Results by `allocatable`",
        "Health from `nvidia-smi`",
    ),
    *("Driver not older", "CUDA version of an image", "Compute capabilities", "CUDA's errors"),
    *(
        "Custom devices by `cf-crl-*`",
        "Dashboards by node and pod",
        "Bills, quotas",
        "Alert `GPUAllocConflict`",
    ),
)


def test_every_claim_has_a_row() -> None:
    """With what is true here and on what it was tried, and no row that nobody listed."""
    found = rows("Claims, checked")
    for claim in CLAIMS:
        assert sum(row[0].startswith(claim) for row in found) == 1, claim
    assert len(found) == len(CLAIMS)
    assert all(len(row) == 3 and all(row) for row in found)


def test_what_users_of_others_ask_for_has_a_link_and_a_page() -> None:
    found = rows("What users of others ask for")
    assert len(found) >= 5
    for request, asked, here in found:
        assert re.search(r"\]\(https://github\.com/[\w./-]+/(issues|pull)/\d+\)", asked), request
        assert re.search(r"\]\([a-z]+\.md(#[\w-]+)?\)", here), request
