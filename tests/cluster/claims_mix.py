"""Pods with claims by the hundred, on nodes that exist as objects only, with the slices of a real one."""

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

from tests.cluster import made_up
from tests.cluster.api import ApiError, Object
from tests.cluster.claims_exact import GpuUse, results_of, use
from tests.cluster.claims_node import DRIVER, ClaimsNode, claim_of, template
from tests.cluster.real_rig import RESOURCES

GIB = 1 << 30
NODES, GPUS = 4, 2  # GPUs of each node
CORES, MEMORY_GIB = 100, 43  # one GiB of a GPU is for the MPS server
SIZES = ((5, 4), (10, 8), (10, 20), (20, 10), (25, 11), (30, 5), (40, 20), (50, 22), (70, 10), (100, 43))
SETTLES_SECONDS = 90.0


class Mix:
    """Requests at random: whole GPUs, two at once, shares of ten sizes."""

    def __init__(self, node: ClaimsNode, seed: int) -> None:
        self._node = node
        self._cluster = node.cluster
        self._rng = random.Random(seed)
        self.made = 0
        self._kinds = {"whole-1": claim_of("whole"), "whole-2": claim_of("whole", count=2)}
        self._shares = {f"mps-{cores}-{gib}": claim_of("mps", cores, gib) for cores, gib in SIZES}

    def __enter__(self) -> Self:
        for number in range(NODES):
            made_up.node(self._cluster, f"made-up-{number}")
            for item in _copied(self._node.slices(), self._cluster.node, f"made-up-{number}"):
                self._cluster.apply(item)
        for name, spec in (self._kinds | self._shares).items():
            self._cluster.apply(template(name, spec))
        return self

    def __exit__(self, *_: object) -> None:
        self.delete([each["metadata"]["name"] for each in self._pods()])
        for number in range(NODES):
            self._cluster.delete("Node", f"made-up-{number}")
        for item in self._cluster.find_all("ResourceSlice", namespace=None, api_version=RESOURCES):
            if item["spec"]["nodeName"].startswith("made-up"):
                self._cluster.delete("ResourceSlice", item["metadata"]["name"], api_version=RESOURCES)
        for name in self._kinds | self._shares:
            self._cluster.delete("ResourceClaimTemplate", name, api_version=RESOURCES)

    def more(self, count: int) -> None:
        """Create so many pods."""
        for _ in range(count):
            kinds = [*self._kinds, self._rng.choice(sorted(self._shares))]
            (kind,) = self._rng.choices(kinds, [15, 5, 80])
            claims = [{"name": "gpu", "resourceClaimTemplateName": kind}]
            made_up.claiming_pod(self._cluster, f"{kind}.{self.made}", claims)
            self.made += 1

    def burst(self, quarters: int) -> int:
        """Delete so many quarters of the bound pods at once, by force; how many."""
        bound = sorted(each["metadata"]["name"] for each in self._pods() if each["spec"].get("nodeName"))
        self._rng.shuffle(bound)
        gone = bound[: len(bound) * quarters // 4 or 1]
        self.delete(gone)
        return len(gone)

    def delete(self, names: list[str]) -> None:
        """Delete pods by force."""
        for name in names:
            with suppress(ApiError):
                self._cluster.api.delete(
                    self._cluster.api.path("v1", "Pod", "default", name), grace_seconds=0
                )

    def settles(self) -> None:
        """Wait until no pod waits for what is free by what the claims say."""
        self._node.until(lambda: not self._starved(), "nobody waits for what is free", SETTLES_SECONDS)

    def _pods(self) -> list[Object]:
        return [each for each in self._cluster.find_all("Pod") if "." in each["metadata"]["name"]]

    def _starved(self) -> list[str]:
        pods = self._pods()
        claims = self._cluster.find_all("ResourceClaim", api_version=RESOURCES)
        used = use(each for claim in claims for each in results_of(claim))
        nodes = [
            [gpu for (pool, _), gpu in used.items() if pool == f"{DRIVER}/made-up-{number}"]
            for number in range(NODES)
        ]
        waiting = [each["metadata"]["name"] for each in pods if not each["spec"].get("nodeName")]
        return [name for name in waiting if any(_fits(name, gpus) for gpus in nodes)]


def _fits(name: str, busy: list[GpuUse]) -> bool:
    kind, *amounts = name.partition(".")[0].split("-")
    free = GPUS - len(busy)
    if kind == "whole":
        return free >= int(amounts[0])
    cores, gib = (int(amount) for amount in amounts)
    shared = [gpu for gpu in busy if gpu["mps"]]
    return free > 0 or any(
        gpu["cores"] + cores <= CORES and gpu["memory"] + gib * GIB <= MEMORY_GIB * GIB for gpu in shared
    )


def _copied(slices: list[Object], node: str, other: str) -> Iterator[Mapping[str, Any]]:
    """Slices of a node as another one would have them."""
    for item in slices:
        text = json.dumps(item["spec"]).replace(f'"{node}"', f'"{other}"')
        spec = json.loads(text.replace(f'"{DRIVER}/{node}"', f'"{DRIVER}/{other}"'))
        name = item["metadata"]["name"].replace(node, other)
        yield {"apiVersion": RESOURCES, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}
