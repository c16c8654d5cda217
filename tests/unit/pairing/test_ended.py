"""Pods that end before any reading of the record has shown what they were granted."""

from pathlib import Path

import anyio

from agent.holdings.holdings import HoldingsWatch
from agent.holdings.record import View
from agent.kit.tasks import Cell
from agent.kubelet.podresources import PodResources
from agent.model.holding import PairMember, Record
from agent.model.pod import VGPU, Container
from tests.component.kubelet_room.parts import eventually
from tests.pods import changed
from tests.unit.pairing.asking import first
from tests.unit.pairing.kubelet_model import KubeletModel, pod, share

WHOLE = Container("main", {VGPU.core: 100})


async def test_a_pod_that_ended_at_once_keeps_no_gpu_off_the_lists() -> None:
    kubelet = KubeletModel(gpus=1)
    short = pod("short", WHOLE)
    await kubelet.admit(short)
    assert kubelet.pairing.ledger.reservations
    # The API server shows its end before the record was read again.
    kubelet.cell.publish(Record((), (), frozenset({short.uid})))
    kubelet.shares.refresh()
    assert kubelet.pairing.ledger.reservations == ()


async def test_a_rejected_pods_promise_ends_with_its_status_though_the_kubelet_lists_it() -> None:
    # As kubelets before 1.34 do, which go on listing who was just rejected.
    kubelet = KubeletModel(gpus=1)
    rejected = pod("a", share("main", 60, 30))
    await first(kubelet, rejected, PairMember.CORE)
    kubelet.api[rejected.key] = changed(rejected, phase="Failed")
    await kubelet.admit(pod("b", share("main", 60, 30)))
    assert kubelet.gpus_of(("default", "b"), "main")


async def test_promises_to_pods_that_live_stay() -> None:
    kubelet = KubeletModel(gpus=2)
    await kubelet.admit(pod("lives", WHOLE))
    kubelet.cell.publish(Record((), (), frozenset({"another"})))
    kubelet.shares.refresh()
    assert [each.pod.name for each in kubelet.pairing.ledger.reservations] == ["lives"]


async def test_the_record_tells_of_every_pod_that_is_over() -> None:
    watch = HoldingsWatch(PodResources(Path("/nowhere")))
    watch.problem = None
    pods = {uid: pod(uid) for uid in ("finishes", "is-deleted", "lives")}
    watch.view = lambda: View(dict(pods), complete=True)
    watch.pod_changes = changes = Cell(0)
    async with anyio.create_task_group() as group:
        group.start_soon(watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        pods["finishes"] = pod("finishes", phase="Succeeded")
        del pods["is-deleted"]
        changes.publish(1)
        await eventually(lambda: watch.cell.value is not None)
        assert watch.cell.value is not None
        assert watch.cell.value.ended == {"finishes", "is-deleted"}
        group.cancel_scope.cancel()
