"""Facts that the driver's own fence takes: each of them alone keeps it from being armed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.injection.inject import InjectionChoice, Injector
from agent.injection.toolkit import Devices
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.model.gpu import Driver
from agent.settings import HostSettings, Injection, Settings
from agent.vgpu.driver import DriverFence
from agent.vgpu.limits import MEMORY_FILE
from tests.unit.pairing.kubelet_model import machine


class Node:
    """A node that serves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "cgroup.controllers").touch()
        self.snapshot = Cell(replace(machine(gpus=2, blocks=40), driver=Driver("615.43.02", "13", (13, 4))))
        self.uuids = [each.uuid for each in self.snapshot.value.gpus]
        names = frozenset(self.uuids)
        self.devices = Cell(Devices(names, limiting=names))
        settings = Settings(
            host=HostSettings(cgroups=str(root), cdi=str(root)), injection=Injection(strategy="cdi")
        )
        self.injector = Injector(settings, self.devices)
        self.fence = DriverFence(settings.host, self.snapshot, self.injector)

    def changed(self, **values: Any) -> None:
        """Each GPU is so."""
        now = self.snapshot.value
        gpus = tuple(replace(each, gpu=replace(each.gpu, **values)) for each in now.gpus)
        self.snapshot.publish(replace(now, gpus=gpus, by_uuid={each.uuid: each for each in gpus}))

    def emptied(self) -> None:
        self.snapshot.publish(replace(self.snapshot.value, gpus=(), by_uuid={}))

    def driven(self, version: str | None) -> None:
        driver = None if version is None else Driver(version, "13", (13, 4))
        self.snapshot.publish(replace(self.snapshot.value, driver=driver))


async def test_with_all_facts_it_is_armed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.fence.start()
    assert [node.fence.obstacle(uuid) for uuid in node.uuids] == [None, None]
    assert node.fence.holds
    assert (tmp_path / MEMORY_FILE).exists()


CHANGES: dict[str, tuple[Callable[[Node], object], str]] = {
    "MIG": (lambda node: node.changed(mig_enabled=True), "is in MIG mode"),
    "an older driver": (lambda node: node.driven("614.99.01"), "driver 614.99.01 has no memory limits"),
    "no version": (lambda node: node.driven("r615"), "driver r615 has no memory limits"),
    "no driver": (lambda node: node.driven(None), "driver that is not known"),
    "cgroup v1": (lambda node: (node.root / "cgroup.controllers").unlink(), "is not the root of cgroup v2"),
    "no hook": (lambda node: node.devices.publish(Devices(frozenset(node.uuids))), "without NVIDIA's hook"),
    "a variable": (
        lambda node: setattr(node.injector, "choice", InjectionChoice(False, "")),
        "without NVIDIA's hook",
    ),
    "no GPU": (
        lambda node: node.emptied(),
        "is not there",
    ),
    "a folder that cannot be": (lambda node: (node.root / MEMORY_FILE).mkdir(), "has not been written yet"),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_each_fact_alone_keeps_it_from_being_armed(tmp_path: Path, name: str) -> None:
    change, expected = CHANGES[name]
    node = Node(tmp_path)
    change(node)
    await node.fence.start()
    assert all(expected in (node.fence.obstacle(uuid) or "") for uuid in node.uuids)
    assert not node.fence.holds


async def test_without_a_driver_that_serves_the_folder_is_left_alone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.driven("580.95.05")
    await node.fence.start()
    assert not (tmp_path / MEMORY_FILE).exists()


def test_before_the_first_look_nothing_is_known(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.snapshot.publish(Snapshot())
    assert node.fence.obstacle(node.uuids[0])
    assert not node.fence.holds
