"""Hundreds of nodes, one of which has room: the real kube-scheduler shows it to the extender at once.

Nodes exist as objects only; all but one are too fragmented for the pod, and have enough by their totals.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import extender_process, made_up
from tests.cluster.build import Parts
from tests.cluster.made_up import GPUS
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually

NODES = 500
HOLDER, WANTED = 60, 60  # of each GPU; four remainders of 40 are 160 by totals


@pytest.fixture(scope="module")
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster with that many nodes and the shipped profiles."""
    with extender_process.directed(parts, port, queries_per_second=500) as running:
        for number in range(NODES):
            made_up.node(running, f"made-up-{number}")
        yield running


def test_one_fit_among_many_nodes(directed: Cluster, port: int, tmp_path: Path) -> None:
    for node in range(NODES - 1):
        for gpu in range(GPUS):
            made_up.holder(directed, f"held-{node}-{gpu}", HOLDER, f"made-up-{node}", gpu)
    with extender_process.serving(directed, port, tmp_path / "extender.log"):
        made_up.pod(directed, "wants", WANTED, schedulerName="gpu-scheduler")

        def bound() -> str:
            node = directed.get("Pod", "wants")["spec"].get("nodeName")
            if not node:
                raise NotYet("it has no node")
            return str(node)

        assert eventually(bound, timeout=30, what="the pod is bound", interval=0.3) == f"made-up-{NODES - 1}"
        # At the first attempt: nothing was said of it before.
        said = [each for each in directed.find_all("Event") if each["involvedObject"].get("name") == "wants"]
        assert "FailedScheduling" not in {each["reason"] for each in said}
