"""Containers with shares of compute, for tests: a clock, and a stand-in for the library."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from agent.kit.tasks import Cell
from agent.vgpu import layout
from agent.vgpu.compute import Compute, ComputeRequest, MeasuredWork
from agent.vgpu.folders import About, LimitFolders, Place, key_of
from agent.vgpu.limits import ContainerLimits, Enforcement
from agent.vgpu.room import Isolation
from tests.unit.vgpu.made_up import GPU, about


def _place(pod: str) -> Place:
    return Place("default", pod, "main", GPU)


class Site:
    """Containers, a clock, and what happens while the room waits."""

    def __init__(self, folder: Path, *, soft: bool) -> None:
        self.folders = LimitFolders(folder)
        self.folders.prepare()
        self.isolation = Isolation(
            self.folders, folder / "none", folder, Enforcement.LIBRARY, Cell(None), compute=True
        )
        self.now = 1000.0
        self.requests: dict[str, ComputeRequest] = {}
        self.during: Callable[[], None] = lambda: None
        self.compute = Compute(
            self.isolation,
            lambda about: self.requests.get(about.pod, ComputeRequest()),
            soft=soft,
            clock=lambda: self.now,
            pause=self._pause,
        )
        self.held: dict[str, About] = {}

    def _pause(self, seconds: float) -> None:
        self.now += seconds
        self.during()

    def add(self, pod: str, cores: int, request: ComputeRequest | None = None) -> str:
        """A container; its folder."""
        made = about(pod, first=10 * len(self.held), cores=cores, build="b")
        self.held[pod] = msgspec.structs.replace(made, compute=True)
        self.requests[pod] = request or ComputeRequest()
        return self.folders.create(self.held[pod])

    def launch(self, pod: str, *, next_ns: int = 1, waited_ns: int = 0) -> None:
        """The library's entries when a container works."""
        path = self.folders.path(key_of(self.held[pod].ids), "usage")
        at = layout.USAGE_HEADER_BYTES + layout.SHARE_AT
        with path.open("r+b") as file:
            before = layout.SHARE.unpack_from(path.read_bytes(), at)
            file.seek(at)
            file.write(layout.SHARE.pack(before[0] + next_ns, before[1], before[2] + waited_ns))

    def turn(
        self,
        seconds: float = 1.0,
        *,
        others: bool = False,
        listed: Collection[str] | None = None,
        **percents: float,
    ) -> bool:
        """A turn later; what was measured, of one process of each container that it names.

        `listed`: containers that have a process on the GPU; all without it.
        """
        self.now += seconds
        containers = {key_of(each.ids): ContainerLimits(each) for each in self.held.values()}
        named = {_place(pod): 1 for pod, percent in percents.items() if percent}
        there = frozenset(_place(pod) for pod in (self.held if listed is None else listed))
        work = MeasuredWork(sum(percents.values()), named, others, there)
        return self.compute.turn(containers, {GPU: work} if percents else {})

    def limits(self, pod: str) -> layout.DeviceLimits:
        """In force."""
        return self.folders.limits(key_of(self.held[pod].ids))

    def shares(self) -> Mapping[str, float]:
        """In force, in percent."""
        return {pod: self.limits(pod).share / 100 for pod in self.held}
