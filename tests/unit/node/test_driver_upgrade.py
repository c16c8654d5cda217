"""When the agent lets go of the driver for the GPU operator, and when it takes it up again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import anyio
import pytest

from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.model.modes import GpuMode, Mode
from agent.modes.planner import STARTING, GpuSwitch, Phase, SwitchState
from agent.modes.withholding import Cordon, Cordons
from agent.node import driver_upgrade
from agent.node.driver_upgrade import PATIENCE_SECONDS, RELEASE_SECONDS, STATE_LABEL, DriverUpgrade, stage_of
from agent.node.driver_upgrade import UpgradeStage as Stage
from tests.unit.modes.nodes import gpu, snapshot_of
from tests.unit.node.test_telling import OwnNode
from tests.virtual_time import in_virtual_time

PAUSED = {"nvidia.com/gpu.deploy.dcgm": "paused-for-driver-upgrade"}
GPUS = (gpu(0).uuid, gpu(1).uuid)


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        ("upgrade-required", Stage.NONE),
        ("cordon-required", Stage.NONE),
        ("wait-for-jobs-required", Stage.NONE),  # jobs go on, perhaps for hours
        ("pod-deletion-required", Stage.DRAIN),
        ("drain-required", Stage.DRAIN),
        ("node-maintenance-required", Stage.DRAIN),
        ("pod-restart-required", Stage.RELEASE),
        ("post-maintenance-required", Stage.RELEASE),
        ("validation-required", Stage.NONE),  # the validator wants a device plugin that serves
        ("uncordon-required", Stage.NONE),
        ("upgrade-done", Stage.NONE),
        ("upgrade-failed", Stage.NONE),
        ("", Stage.NONE),
        ("a state of a later operator", Stage.NONE),
    ],
)
def test_each_state_of_the_upgrade_controller(state: str, stage: Stage) -> None:
    assert stage_of({STATE_LABEL: state})[0] is stage


def test_paused_operands_ask_for_a_release_whatever_the_state_says() -> None:
    assert stage_of({STATE_LABEL: "upgrade-done", **PAUSED}) == (
        Stage.RELEASE,
        "nvidia.com/gpu.deploy.dcgm=paused-for-driver-upgrade",
    )
    assert stage_of({"nvidia.com/gpu.deploy.client": "paused-for-mig-change"})[0] is Stage.RELEASE
    # Taken off the node by an administrator, or there without a driver container: nothing is exchanged.
    others = {"nvidia.com/gpu.deploy.device-plugin": "false", "nvidia.com/gpu.deploy.driver": "pre-installed"}
    assert stage_of(others) == (Stage.NONE, "")


@dataclass
class Nvml:
    """Stands for the inventory: publishes what follows from a release."""

    inventory: Cell[Snapshot]
    calls: list[str] = field(default_factory=list)
    answers: bool = True  # NVML opens again

    def release(self, seconds: float, why: str = "") -> None:
        self.calls.append(f"release {seconds:g}")
        until = anyio.current_time() + seconds
        self.inventory.publish(replace(self.inventory.value, problem=why or "by hand", released_until=until))

    def end_release(self) -> None:
        self.calls.append("end")
        problem = None if self.answers else "no driver"
        self.inventory.publish(replace(self.inventory.value, problem=problem, released_until=None))


class World:
    """A node with two GPUs in mode mps, and the follower."""

    def __init__(self) -> None:
        self.inventory = Cell(snapshot_of(gpu(0), gpu(1)))
        self.node = OwnNode()
        self.nvml = Nvml(self.inventory)
        self.by_hand: Cell[Cordons] = Cell({})
        self.cordons: Cell[Cordons] = Cell({})
        self.switch = Cell(self.modes(Mode.MPS))
        self.upgrade = DriverUpgrade(
            self.node, cast("GpuMonitor", self.nvml), self.inventory, self.switch, self.by_hand, self.cordons
        )

    @staticmethod
    def modes(mode: Mode, waiting_for: tuple[str, ...] = ()) -> SwitchState:
        entries = tuple(
            GpuSwitch(index, uuid, GpuMode(mode), GpuMode(), waiting_for) for index, uuid in enumerate(GPUS)
        )
        return SwitchState(Phase.SWITCHING, "mps", "", entries, "mps")

    async def label(self, **labels: str | None) -> None:
        """Give the node these labels instead of those before."""
        self.node.known = {key: value for key, value in labels.items() if value is not None}
        self.node.changes.publish(object())
        await anyio.sleep(0.01)

    async def state(self, value: str) -> None:
        await self.label(**{STATE_LABEL: value})

    def closed(self) -> bool:
        return self.inventory.value.released_until is not None


@asynccontextmanager
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(driver_upgrade, "boot_seconds", anyio.current_time)
    world = World()
    async with anyio.create_task_group() as group:
        group.start_soon(world.upgrade.run)
        await anyio.sleep(0.01)
        yield world
        group.cancel_scope.cancel()


@in_virtual_time
async def test_gpus_drain_then_nvml_is_closed_then_all_is_taken_back() -> None:
    with pytest.MonkeyPatch.context() as patching:
        async with followed(patching) as world:
            await world.state("drain-required")
            assert set(world.cordons.value) == set(GPUS)
            assert "drain-required" in world.cordons.value[GPUS[0]].words
            await anyio.sleep(3600)
            assert world.nvml.calls == []
            since = world.cordons.value[GPUS[0]].since
            await world.state("pod-restart-required")
            assert not world.closed()  # the daemons are on their way out
            world.switch.publish(world.modes(Mode.OFF))
            await anyio.sleep(0.01)
            assert world.closed()
            assert world.cordons.value[GPUS[0]].since == since
            assert "pod-restart-required" in str(world.inventory.value.problem)
            await world.state("validation-required")
            assert (world.closed(), world.cordons.value, world.upgrade.stage) == (
                False,
                {},
                Stage.NONE,
            )


@in_virtual_time
async def test_a_daemon_that_does_not_end_and_pods_that_stay_hold_up_no_release() -> None:
    with pytest.MonkeyPatch.context() as patching:
        async with followed(patching) as world:
            await world.label(**PAUSED)
            await anyio.sleep(PATIENCE_SECONDS - 1)
            assert not world.closed()
            await anyio.sleep(2)
            assert world.closed()
        async with followed(patching) as world:
            world.switch.publish(world.modes(Mode.MPS, ("default/daemonset-pod",)))
            await world.label(**PAUSED)
            assert world.closed()
        async with followed(patching) as world:  # an agent that has just started knows no mode of any GPU yet
            world.switch.publish(STARTING)
            await world.label(**PAUSED)
            assert not world.closed()


@in_virtual_time
async def test_a_long_exchange_is_one_release_that_ends_soon_after_a_killed_agent() -> None:
    with pytest.MonkeyPatch.context() as patching:
        async with followed(patching) as world:
            world.switch.publish(world.modes(Mode.OFF))
            await world.state("pod-restart-required")
            versions = world.cordons.version
            for _ in range(40):
                await anyio.sleep(60)
                left = (world.inventory.value.released_until or 0) - anyio.current_time()
                assert 60 < left <= 180
            assert world.cordons.version == versions
            assert "end" not in world.nvml.calls


@in_virtual_time
async def test_a_release_that_ran_out_was_ended_by_nobody() -> None:
    """The Node object is not known for a while, and the exchange goes on: NVML is closed again."""
    with pytest.MonkeyPatch.context() as patching:
        async with followed(patching) as world:
            world.switch.publish(world.modes(Mode.OFF))
            await world.state("pod-restart-required")
            known, world.node.known = world.node.known, None
            await anyio.sleep(RELEASE_SECONDS + 1)
            world.inventory.publish(replace(world.inventory.value, problem=None, released_until=None))
            await anyio.sleep(10)
            world.node.known = known
            world.node.changes.publish(object())
            await anyio.sleep(0.01)
            assert (world.closed(), world.upgrade.stage) == (True, Stage.RELEASE)


@in_virtual_time
async def test_modes_come_back_when_nvml_answers_and_not_before() -> None:
    with pytest.MonkeyPatch.context() as patching:
        async with followed(patching) as world:
            world.switch.publish(world.modes(Mode.OFF))
            world.nvml.answers = False
            await world.state("pod-restart-required")
            await world.state("validation-required")
            assert set(world.cordons.value) == set(GPUS)
            assert "pod-restart-required" in world.cordons.value[GPUS[0]].words
            world.inventory.publish(replace(world.inventory.value, problem=None))
            await anyio.sleep(0.01)
            assert world.cordons.value == {}


@in_virtual_time
async def test_people_have_the_last_word() -> None:
    with pytest.MonkeyPatch.context() as patching:
        async with followed(patching) as world:
            world.switch.publish(world.modes(Mode.OFF))
            # release --end in the middle of it: not closed again before the next exchange.
            await world.state("pod-restart-required")
            world.nvml.end_release()
            await anyio.sleep(600)
            assert (world.closed(), world.cordons.value, world.upgrade.stage) == (
                False,
                {},
                Stage.NONE,
            )
            await world.state("upgrade-done")
            await world.state("pod-restart-required")
            assert world.closed()
            await world.state("upgrade-done")
            # release --for 2h before it: lasts as long as was asked for.
            world.nvml.release(7200)
            until = world.inventory.value.released_until
            await world.state("pod-restart-required")
            await world.state("upgrade-done")
            assert world.inventory.value.released_until == until


@in_virtual_time
async def test_cordons_by_hand_stay_what_they_are() -> None:
    with pytest.MonkeyPatch.context() as patching:
        async with followed(patching) as world:
            noisy: Cordons = {GPUS[0]: Cordon("the fan is noisy", "2026-11-22T10:00:00Z")}
            world.by_hand.publish(noisy)
            await anyio.sleep(0.01)
            assert world.cordons.value == noisy
            await world.state("drain-required")
            assert world.cordons.value[GPUS[0]] == noisy[GPUS[0]]
            assert "the driver is exchanged" in world.cordons.value[GPUS[1]].words
            await world.state("upgrade-done")
            assert world.cordons.value == noisy
            # Without NVML, too, a cordon by hand is taken up.
            world.inventory.publish(replace(world.inventory.value, problem="no driver"))
            world.by_hand.publish({})
            await anyio.sleep(0.01)
            assert world.cordons.value == {}
