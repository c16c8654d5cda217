"""Calls about one GPU that hang leave the others theirs: each counts against the GPU that it is about."""

from pathlib import Path

import anyio
import pytest

from agent.mig import layouts
from agent.mig import wing as wing_module
from agent.model.modes import Assignment, GpuMode, Mode
from agent.nvml.event_watch import MOST_OF_ONE
from tests.pace import scaled
from tests.unit.mig.test_layouts import Rig, problem, running


async def test_an_instance_whose_making_hangs_stops_no_other_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is made on its own GPU meanwhile: a call more would hang as well."""
    monkeypatch.setattr(layouts, "CALL_SECONDS", call := min(scaled(0.1), 1.0))
    monkeypatch.setattr(layouts, "FIRST_RETRY_SECONDS", 0.05)
    rig = Rig(tmp_path)
    rig.machine.set_mig(1, enabled=True)
    rig.scan()
    hung, other = (state.uuid for state in rig.snapshot.value.gpus)
    rig.machine.hang("nvmlDeviceCreateGpuInstanceWithPlacement", 0)

    def want(*on_first: str) -> None:
        modes = {hung: on_first, other: ("3g.71gb",)}
        rig.assignment.publish(
            Assignment({uuid: GpuMode(Mode.MIG, instances=names) for uuid, names in modes.items()})
        )

    async with running(rig) as wing:
        want(*7 * ["1g.18gb"])
        with anyio.fail_after(10):
            while not any(each.used for each in rig.machine.gpu(1).instances):
                await anyio.sleep(0.01)
        await anyio.sleep(5 * call)  # more rounds of the first
        assert rig.calls.stuck == 1
        await problem(wing, hung, "1g.18gb at slice 0 cannot be made")
        for names in (["2g.35gb"], ["3g.71gb"], ["7g.141gb"], ["4g.71gb"], ["1g.35gb"]):
            want(*names)
            await anyio.sleep(3 * call)
        assert rig.calls.stuck <= MOST_OF_ONE
        assert (await rig.calls.run(rig.nvml.partition, other, deadline=10.0)).instances
        rig.machine.clear_faults()


async def test_instances_whose_memory_cannot_be_read_count_against_their_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wing_module, "MEASURE_SECONDS", 0.05)
    rig = Rig(tmp_path)
    rig.calls._deadline = 0.05
    rig.machine.set_mig(1, enabled=True)
    for _ in range(7):
        rig.machine.make_instance(0, "1g.18gb")
    rig.machine.make_instance(1, "1g.18gb")
    rig.scan()
    first, second = (state.gpu for state in rig.snapshot.value.gpus)
    rig.machine.hang("nvmlDeviceGetMemoryInfo", 0)
    rig.assignment.publish(Assignment({gpu.uuid: GpuMode(Mode.MIG) for gpu in (first, second)}))
    async with running(rig) as wing:
        with anyio.fail_after(10):
            while second.instances[0].uuid not in wing._used:
                await anyio.sleep(0.01)
        assert rig.calls.hangs(first.uuid)
        assert rig.calls.stuck == MOST_OF_ONE
        rig.machine.clear_faults()
