"""docs/developers.md: its manifests ask for what a node can grant, in each of the three modes."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from agent.model.cuda import MEMORY_LIMIT, THREAD_PERCENTAGE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "developers.md"
ASKED = (
    {"nvidia.com/gpu"},
    {"tencent.com/vcuda-core", "tencent.com/vcuda-memory"},
    {"nvidia.com/mps-core", "nvidia.com/mps-memory"},
)


def manifests() -> list[dict[str, Any]]:
    files = sorted((PAGE.parents[1] / "config" / "examples" / "work").glob("*.yaml"))
    assert not [each.name for each in files if f"`{each.name}`" not in PAGE.read_text()]
    return [yaml.safe_load(each.read_text()) for each in files]


def limits(value: Any) -> Iterator[Mapping[str, int]]:
    """Everything under a key `limits`, without the host's memory."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "limits":
                yield {name: amount for name, amount in inner.items() if "/" in name}
            else:
                yield from limits(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from limits(inner)


def test_each_workload_asks_for_one_mode_and_for_both_halves_of_a_share() -> None:
    found = [asked for each in manifests() for asked in limits(each)]
    assert len(found) == len(manifests()) == 6
    modes = [ASKED.index(set(asked)) for asked in found]
    assert set(modes) == {0, 1, 2}
    for asked in found:
        for name, amount in asked.items():
            assert isinstance(amount, int)
            assert 1 <= amount <= (100 if name.endswith("core") else 640)


def test_the_ranks_of_the_mpi_example_have_one_share_together() -> None:
    """MPS holds each process to its caps, not the container."""
    file = "config/examples/mpi/ranks.yaml"
    job = yaml.safe_load((PAGE.parents[1] / file).read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    ranks = int(container["command"][container["command"].index("-np") + 1])
    words = container["args"][-1]
    caps = [int(re.findall(rf"{name}=(?:0=)?(\d+)", words)[0]) for name in (THREAD_PERCENTAGE, MEMORY_LIMIT)]
    assert [ranks * each for each in caps] == list(container["resources"]["limits"].values())
    assert set(container["resources"]["limits"]) == ASKED[2]
    assert file in PAGE.read_text()


def test_the_workloads_that_people_ask_for_are_there() -> None:
    text = PAGE.read_text()
    for word in (
        "vLLM",
        "PyTorch",
        "Triton",
        "KServe",
        "Notebooks",
        "TensorFlow",
        "JAX",
        "PaddlePaddle",
        "NCCL",
        "MPIJob",
    ):
        assert word in text
    rows = re.findall(
        r"^\| [\d, ]*\| `[^|]+\| [^|]+\| (1\. [^|]+2\. [^|]+3\. [^|]+)\| [^|]+\|$", text, re.MULTILINE
    )
    assert len(rows) >= 15, "each error has a cause, three checks and a remedy"
    for code in (2, 35, 46, 100, 209, 222, 700, 802, 803, 804, 805, 807, 999):
        assert re.search(rf"^\| (\d+, )?{code}[ ,]", text, re.MULTILINE), code
