"""A recorder that remembers, and the kubelet's calls for single members."""

import random
from collections.abc import Sequence
from typing import Any

from agent.model.holding import PairMember
from agent.model.pod import Pod
from agent.pairing.pairing import Recorder
from tests.unit.pairing.kubelet_model import Admission, KubeletModel


class Told(Recorder):
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, str]] = []
        self.ignored: list[tuple[str, str]] = []
        self.choices: list[tuple[str, str, list[int]]] = []

    def refused(self, pod: Pod, message: str) -> None:
        self.refusals.append((pod.name, message))

    def hint_ignored(self, pod: Pod, message: str) -> None:
        self.ignored.append((pod.name, message))

    def chosen(self, pod: Pod, container: str, indices: Sequence[int], *, last: bool) -> None:
        self.choices.append((pod.name, container, list(indices)))


def told(kubelet: KubeletModel) -> Told:
    recorder = Told()
    kubelet.pairing._recorder = recorder
    return recorder


def index(kubelet: KubeletModel, key: tuple[str, str], container: str = "main") -> list[int]:
    pools = kubelet.pairing.ledger.pools
    return sorted(pools[gpu].index for gpu in kubelet.gpus_of(key, container))


async def first_member(kubelet: KubeletModel, member: PairMember, size: int) -> list[str]:
    """The kubelet's two calls for one member, for whatever pod is taken up."""
    free = kubelet.listed(member) - kubelet.in_use(member)
    ids = list(await kubelet.pairing.prefer(member, size, sorted(free)))
    await kubelet.pairing.allocate(member, ids)
    return ids


async def first(kubelet: KubeletModel, new: Pod, member: PairMember) -> None:
    """Take a pod up and make the calls for one member of its only container."""
    kubelet.api[new.key] = new
    kubelet.taken_up[new.key] = Admission(new)
    await first_member(kubelet, member, new.containers[0].limits[kubelet.pair.core])


class InOrder(random.Random):
    """The order of members of one container after the other; of all else what chance brings."""

    def __init__(self, *orders: list[PairMember]) -> None:
        super().__init__(0)
        self._left = list(orders)

    def sample(self, population: Any, k: int, **named: Any) -> list[Any]:
        return self._left.pop(0) if population == list(PairMember) else super().sample(population, k, **named)
