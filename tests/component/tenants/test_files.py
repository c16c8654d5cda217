"""Tenants and the files that the agent gives their containers: nobody else is held up, nor is the agent.

Each container has a mount namespace, as a runtime makes it; the agent is the project's own room of limits.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from agent.isolation.clib.build_library import cached
from agent.isolation.folders import About, LimitFolders
from agent.isolation.library import PRELOAD_IN_CONTAINER
from agent.isolation.limits import Admission, Policy
from agent.isolation.room import Isolation
from agent.kit.cell import Cell
from agent.kubelet.podresources import Holding, PodList
from agent.model.demand import VGPU
from tests.cuda_double.program import Program, commanded
from tests.unit.isolation.made_up import BLOCK, GPU, units

pytestmark = pytest.mark.timeout(300)

TENANT = Path(__file__).with_name("tenant.py")
# As containerd gives them to a container: CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID
# SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE.
DEFAULT, NONE = 0xA80425FB, 0
SOON = 5.0  # seconds, on a busy machine; a lease is waited for up to 45 s


class Host:
    """A node with two containers, and agents one after the other."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._containers = {name: about(name, number) for number, name in enumerate(("tenant", "neighbour"))}
        held = tuple(
            Holding("default", name, "main", VGPU.memory, each.ids) for name, each in self._containers.items()
        )
        names = tuple(("default", name, "main") for name in self._containers)
        self._record: Cell[PodList | None] = Cell(PodList(held, names))
        self.agent = self._started()

    def _started(self) -> Isolation:
        folders, state = LimitFolders(self._root / "run"), self._root / "state"
        agent = Isolation(folders, cached(), state, Policy.LIBRARY, self._record, compute=True)
        anyio.run(agent.start)
        return agent

    def admit(self, name: str) -> Admission:
        return anyio.run(self.agent.admit, self._containers[name])

    def leave(self) -> None:
        """The agent is killed."""
        self.agent.close()

    def come_back(self) -> None:
        """Another one starts."""
        self.agent = self._started()
        anyio.run(self.agent.tidy)


def about(pod: str, number: int) -> About:
    ids = units(4 * number)
    return About(f"uid-{pod}", "default", pod, "main", GPU, ids, len(ids) * BLOCK, 30)


class Containers:
    """Containers of a host, each with a process to command."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, admission: Admission, capabilities: int = DEFAULT) -> Program:
        mounts = {each.container_path: (each.host_path, each.read_only) for each in admission.mounts}
        words = [sys.executable, "-I", "-S", str(TENANT), json.dumps(mounts), f"{capabilities:x}"]
        return self._stack.enter_context(commanded(words))


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    with ExitStack() as stack:
        yield Containers(stack)


@pytest.mark.parametrize("agent", ["serves", "is down"])
def test_lease_on_preload_stalls_nobody(tmp_path: Path, containers: Containers, agent: str) -> None:
    """Root of a container, without any capability, asks for a write lease on what the loader opens."""
    host = Host(tmp_path)
    tenant = containers.start(host.admit("tenant"), NONE)
    neighbour = containers.start(host.admit("neighbour"))
    assert neighbour("start()") < SOON
    if agent == "is down":
        host.leave()
    had = tenant(f"write_lease({PRELOAD_IN_CONTAINER!r})")
    assert had is (agent == "is down")
    assert neighbour("start()") < SOON
    host.come_back()
    assert neighbour("start()") < SOON


def test_nobody_sees_the_program_starts_of_others(tmp_path: Path, containers: Containers) -> None:
    host = Host(tmp_path)
    tenant = containers.start(host.admit("tenant"), NONE)
    neighbour = containers.start(host.admit("neighbour"))
    watched = tenant(f"watch({PRELOAD_IN_CONTAINER!r})")
    neighbour("start()")
    assert tenant(f"seen({watched})") == 0
    tenant("start()")
    assert tenant(f"seen({watched})") > 0
