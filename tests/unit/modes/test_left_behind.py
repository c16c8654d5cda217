"""A process of a pod on a GPU that it got between the last reading that showed the pod and its end."""

from collections.abc import Collection, Mapping
from pathlib import Path

import anyio
import pytest

from agent.model.cgroup import ContainerRef
from agent.modes.withholding import MOST_LEFT, Lingering
from tests.unit.holdings.record_node import Node

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"


class Host(Node):
    """With a process of one pod on the second GPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kubelet.records()
        self.given: frozenset[str] = frozenset()
        self.watch.given.append(lambda: self.given)
        self.pids: dict[str, Collection[int]] = {A: (), B: (7,)}
        self.lingering = Lingering(
            self.watch.gpus_by_pod,
            self._processes,
            lambda pids: {pid: ContainerRef("u", "") for pid in pids},
            self.watch.holders,
            left_behind=self.watch.left_behind,
        )

    async def _processes(self, gpus: Collection[str]) -> Mapping[str, Collection[int]]:
        await anyio.lowlevel.checkpoint()
        return {gpu: self.pids[gpu] for gpu in gpus if gpu in self.pids}

    async def looked(self) -> Collection[str]:
        """GPUs that are withheld by the record and the processes of now."""
        await self.held()
        await self.lingering.look()
        return self.lingering.found.keys()


@pytest.fixture
async def host(tmp_path: Path) -> Host:
    """The first container's GPU stands in the record, the second's has just been handed out."""
    host = Host(tmp_path)
    host.kubelet.pods = {"trains": {"main": A}}
    host.kubelet.records(("u", "main", A))
    assert not await host.looked()
    host.given = frozenset({B})
    return host


async def test_what_a_pod_got_between_two_readings_is_withheld_while_its_process_stays(host: Host) -> None:
    host.kubelet.pods = {}
    host.kubelet.records()
    assert await host.looked() == {B}
    host.given = frozenset()  # the reading would have shown it
    assert await host.looked() == {B}
    host.pids[B] = ()
    assert not await host.looked()
    assert not host.lingering.unsettled


async def test_so_it_is_where_the_api_server_says_first_that_the_pod_has_gone(host: Host) -> None:
    host.know("u", "trains")
    async with anyio.create_task_group() as group:
        group.start_soon(host.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        del host.pods["u"]
        host.changes.publish(None)
        await anyio.wait_all_tasks_blocked()
        assert not host.watch.left_behind  # the kubelet lists it still
        host.kubelet.pods = {}
        host.kubelet.records()
        assert await host.looked() == {B}
        group.cancel_scope.cancel()


@pytest.mark.parametrize("odd", [f"{B}::3", "vcuda-core-17", "GPU-x::::", ""])
async def test_an_id_of_another_plugin_ends_no_reading(host: Host, odd: str) -> None:
    host.given |= {odd}
    host.watch.gpus = lambda: (A, B)
    host.kubelet.pods = {}
    host.kubelet.records()
    assert await host.looked() == {B}


async def test_what_another_has_by_the_same_reading_was_not_got_by_one_that_goes(host: Host) -> None:
    del host.pids[B]  # of which the driver says nothing now
    host.kubelet.pods = {"next": {"main": B}}
    host.kubelet.records(("v", "main", B))
    assert not await host.looked()
    assert not host.lingering.unsettled


async def test_what_a_pod_had_between_two_looks_is_withheld_while_its_process_stays(host: Host) -> None:
    """A look may take as long as a driver that hangs: two readings come in its course."""
    host.given = frozenset()
    host.kubelet.pods = {"trains": {"main": A, "second": B}}
    host.kubelet.records(("u", "main", A), ("u", "second", B))
    await host.held()
    host.kubelet.pods = {}
    host.kubelet.records()
    await host.held()
    assert host.lingering.unsettled == {A, B}
    assert host.lingering.ended(B) == {"u"}
    assert await host.looked() == {B}


async def test_a_pod_that_goes_while_nothing_is_handed_out_leaves_nothing_behind(host: Host) -> None:
    host.given = frozenset()
    host.kubelet.pods = {}
    host.kubelet.records()
    assert not await host.looked()


async def test_many_of_them_cost_bounded_memory_while_the_gpu_cannot_be_read(host: Host) -> None:
    del host.pids[B]
    left = {f"uid-{number}": frozenset({B}) for number in range(3 * MOST_LEFT)}
    host.watch.left_behind.update(left)
    assert await host.looked() == {B}
    assert len(host.lingering.ended(B)) == MOST_LEFT
