"""A kubelet with its files, and an agent that reads them beside the API server's word."""

import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.holdings.holdings import HoldingsWatch
from agent.holdings.record import FILE_NAME, View
from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.model.pod import Container, Pod, Stage
from tests.pods import a_pod

GPU = "nvidia.com/gpu"
Entry = tuple[str, str, str]  # pod UID, container, device ID


@dataclass
class Kubelet:
    """The answers of a kubelet, and its files."""

    folder: Path
    pods: dict[str, dict[str, str]] = field(default_factory=dict)  # listed: pod -> container -> ID, or empty

    def __post_init__(self) -> None:
        self.path = self.folder / "kubelet.sock"
        self.path.touch()

    async def list(self, deadline: float = 2.0) -> Record:
        containers = [("ns", pod, name) for pod, found in self.pods.items() for name in found]
        return Record(
            tuple(
                Holding("ns", p, c, GPU, (i,))
                for p, found in self.pods.items()
                for c, i in found.items()
                if i
            ),
            tuple(containers),
        )

    def keeping_connection(self) -> AbstractContextManager[None]:
        return nullcontext()

    def records(self, *entries: Entry) -> None:
        """Write the checkpoint."""
        found = [
            {"PodUID": uid, "ContainerName": name, "ResourceName": GPU, "DeviceIDs": {"-1": [device]}}
            for uid, name, device in entries
        ]
        text = json.dumps({"Data": {"PodDeviceEntries": found}, "Checksum": 0})
        (self.folder / "new").write_text(text)
        (self.folder / "new").rename(self.folder / FILE_NAME)

    def tear(self) -> None:
        (self.folder / FILE_NAME).write_text('{"Data": {"PodDev')

    def restart(self) -> None:
        """A kubelet that has heard of no pods yet."""
        self.path.rename(self.folder / "before")  # its number stays taken
        self.path.touch()
        self.pods = {}


class Node:
    """A kubelet, the API server's word on its pods, and an agent that reads both."""

    def __init__(self, folder: Path) -> None:
        self.kubelet = Kubelet(folder)
        self.pods: dict[str, Pod] = {}
        self.complete = True
        self.contested: frozenset[str] = frozenset()
        self.heard = -math.inf
        self.changes: Cell[Any] = Cell(None)
        self.start_agent()

    def start_agent(self) -> None:
        self.watch = HoldingsWatch(self.kubelet, self.kubelet.folder)  # type: ignore[arg-type]
        self.watch.view = lambda: View(dict(self.pods), self.complete, self.contested, self.heard)
        self.watch.pod_changes = self.changes

    def know(self, uid: str, name: str, *, finished: bool = False, hides: bool = False) -> None:
        """`hides`: its init containers ask for devices."""
        containers = [Container("prepare", {GPU: 1}, Stage.INIT)] if hides else []
        containers += [Container("main", {GPU: 1})] if name.startswith("train") else []
        self.pods[uid] = a_pod(
            "ns", name, tuple(containers), uid, phase="Succeeded" if finished else "Running"
        )
        self.changes.publish(None)

    async def held(self) -> set[tuple[str, str, str]] | None:
        """Pod, container and ID of everything that is held; None: it is not known."""
        found = await self.watch.refresh()
        return None if found is None else {(each.pod, each.container, each.ids[0]) for each in found.holdings}
