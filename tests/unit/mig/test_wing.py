"""The wing of MIG offers instances that are there, refuses others, and names what stands in the way."""

import ast
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest

import agent
from agent._proto import v1beta1
from agent.app.wings import WINGS
from agent.injection.inject import Injector
from agent.injection.toolkit import Devices
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.configuration import ConfigurationError
from agent.kit.tasks import Cell
from agent.kubelet.wire import PreferenceRequest, Refused
from agent.mig.plugin import LINGER_SECONDS, resource_of
from agent.mig.wing import MigWing
from agent.model.gpu import Driver, Gpu, Instance
from agent.model.health import HEALTHY, HealthState
from agent.model.holding import Holding, Record
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.model.node_inventory import everywhere
from agent.modes.desired import Desired
from agent.modes.planner import MIG_REASON, plan
from agent.modes.wing import Machine, Wing
from agent.settings import HostSettings, Injection, Mig, Settings, load
from agent.telemetry import definitions as d
from tests.wing_node import wing_node

MIB = 1 << 20


def instance(gpu: int, number: int, profile: str = "1g.18gb") -> Instance:
    return Instance(f"MIG-{gpu}-{number}", number, 0, profile, 17971 * MIB, 16)


def parted(index: int, *instances: Instance, mig: bool = True) -> Gpu:
    bus = f"0000:{index:02x}:00.0"
    return Gpu(f"GPU-{index}", index, index, bus, "NVIDIA H200", 2**37, (9, 0), mig, instances=instances)


def snapshot_of(*gpus: Gpu) -> Snapshot:
    states = tuple(GpuState(gpu) for gpu in gpus)
    return Snapshot(problem=None, gpus=states, by_uuid={state.uuid: state for state in states})


class Bench:
    def __init__(
        self,
        *gpus: Gpu,
        proc: Path = Path("/proc"),
        strategy: Literal["envvar", "cdi"] = "envvar",
        own: Cell[Devices] | None = None,
        **settings: Any,
    ) -> None:
        self.snapshot = Cell(snapshot_of(*gpus))
        self.assignment = Cell(Assignment({gpu.uuid: GpuMode(Mode.MIG) for gpu in gpus}))
        host = HostSettings(proc=str(proc))
        injection = Injection(strategy=strategy, device_nodes=strategy == "envvar")
        made = Settings(injection=injection, host=host, **settings)
        self.node = wing_node(
            made, snapshot=self.snapshot, assignment=self.assignment, injector=Injector(made, own)
        )
        self.wing = MigWing(self.node)

    def plugin(self, resource: str) -> Any:
        return next(each for each in self.wing.plugins() if each.resource == resource)

    def listed(self, resource: str) -> dict[str, str]:
        plugin = self.plugin(resource)
        plugin.refresh()
        return {one.id: one.health for one in v1beta1.ListAndWatchResponse.parse(plugin.lists.value).devices}

    def hold(self, resource: str, *ids: str) -> None:
        held = Holding("ns", "p", "c", resource, ids)
        self.node.holdings.cell.publish(Record((held,), (("ns", "p", "c"),), began=1.0))


SMALL, MEDIUM = resource_of("1g.18gb"), resource_of("3g.71gb")


def test_names_are_nvidias() -> None:
    assert resource_of("1g.18gb+me") == "nvidia.com/mig-1g.18gb.me"
    assert resource_of("1c.3g.71gb") == "nvidia.com/mig-1c.3g.71gb"


def test_each_profile_has_a_resource_and_new_ones_come_live() -> None:
    bench = Bench(parted(0, instance(0, 1), instance(0, 2, "3g.71gb")), parted(1, instance(1, 1)))
    assert [each.resource for each in bench.wing.plugins()] == [SMALL, MEDIUM]
    assert bench.listed(SMALL) == {"MIG-0-1": "Healthy", "MIG-1-1": "Healthy"}
    assert bench.listed(MEDIUM) == {"MIG-0-2": "Healthy"}
    bench.snapshot.publish(snapshot_of(parted(0, instance(0, 1), instance(0, 3, "2g.35gb")), parted(1)))
    assert resource_of("2g.35gb") in [each.resource for each in bench.wing.plugins()]
    # One that somebody destroyed leaves the list a while later, and while it is held not at all.
    assert bench.listed(SMALL) == {"MIG-0-1": "Healthy", "MIG-1-1": "Unhealthy"}


def test_one_that_was_destroyed_stays_listed_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(parted(0, instance(0, 1), instance(0, 2)))
    assert len(bench.listed(SMALL)) == 2
    bench.hold(SMALL, "MIG-0-1")
    bench.snapshot.publish(snapshot_of(parted(0)))
    monkeypatch.setattr("agent.mig.plugin.LINGER_SECONDS", -1)
    assert bench.listed(SMALL) == {"MIG-0-1": "Unhealthy"}
    bench.node.holdings.cell.publish(Record((), (), began=2.0))
    assert bench.listed(SMALL) == {}


def test_one_that_was_destroyed_stays_listed_for_a_while_from_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nobody had looked before: the kubelet may be allocating it at that moment."""
    now = [100.0]
    monkeypatch.setattr("agent.mig.plugin.monotonic", lambda: now[0])
    bench = Bench(parted(0, instance(0, 1)))
    assert bench.listed(SMALL) == {"MIG-0-1": "Healthy"}
    now[0] += 3600
    bench.snapshot.publish(snapshot_of(parted(0)))
    assert bench.listed(SMALL) == {"MIG-0-1": "Unhealthy"}
    now[0] += LINGER_SECONDS
    assert bench.listed(SMALL) == {"MIG-0-1": "Unhealthy"}
    now[0] += 1
    assert bench.listed(SMALL) == {}


@pytest.mark.parametrize("mode", [GpuMode(Mode.MIG, Offering.CLOSED), GpuMode(), GpuMode(Mode.PGPU)])
def test_one_that_was_destroyed_stays_listed_though_its_gpu_leaves_the_mode(
    mode: GpuMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing to wait for it does so at once, and the kubelet may be allocating it still."""
    now = [100.0]
    monkeypatch.setattr("agent.mig.plugin.monotonic", lambda: now[0])
    bench = Bench(parted(0, instance(0, 1), instance(0, 2)))
    assert len(bench.listed(SMALL)) == 2
    bench.snapshot.publish(snapshot_of(parted(0, instance(0, 2))))
    bench.assignment.publish(Assignment({"GPU-0": mode}))
    assert bench.listed(SMALL) == {"MIG-0-1": "Unhealthy"}
    now[0] += LINGER_SECONDS + 1
    assert bench.listed(SMALL) == {}
    # One that was off the list already does not come back for its end.
    bench.snapshot.publish(snapshot_of(parted(0)))
    assert mode.mode is Mode.MIG or bench.listed(SMALL) == {}


async def test_it_leaves_the_list_though_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.mig.plugin.LINGER_SECONDS", 0.1)
    bench = Bench(parted(0, instance(0, 1)))
    plugin = bench.plugin(SMALL)
    async with anyio.create_task_group() as group:
        group.start_soon(plugin.run)
        bench.assignment.publish(Assignment({"GPU-0": GpuMode()}))
        bench.snapshot.publish(snapshot_of(parted(0)))
        with anyio.fail_after(10):
            await plugin.lists.wait_for(lambda content: b"MIG-0-1" in content)
            await plugin.lists.wait_for(lambda content: b"MIG-0-1" not in content)
        group.cancel_scope.cancel()


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """With the driver's list of device nodes for instances."""
    caps = tmp_path / "driver/nvidia-caps"
    caps.mkdir(parents=True)
    (caps / "mig-minors").write_text(
        "config 1\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi2/access 21\n"
    )
    return tmp_path


async def test_an_instance_is_handed_out_by_its_uuid_and_with_its_nodes(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(parted(0, instance(0, 1), instance(0, 2)), proc=proc)
    await anyio.to_thread.run_sync(bench.node.injector.look, None)
    monkeypatch.setattr("agent.injection.inject.OPTIONAL_NODES", ())
    given = await bench.plugin(SMALL).allocate(("MIG-0-1",))
    assert given.environment == {"NVIDIA_VISIBLE_DEVICES": "MIG-0-1"}
    paths = [each.container_path for each in given.device_nodes]
    assert paths[:1] == ["/dev/nvidia0"]
    assert {"/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"} <= set(paths)
    assert "/dev/nvidia-caps/nvidia-cap21" not in paths


async def test_an_instance_waits_for_its_cdi_device() -> None:
    own: Cell[Devices] = Cell(Devices(frozenset({"MIG-0-1"})))
    bench = Bench(parted(0, instance(0, 1), instance(0, 2)), strategy="cdi", own=own)
    assert bench.listed(SMALL) == {"MIG-0-1": "Healthy", "MIG-0-2": "Unhealthy"}
    given = await bench.plugin(SMALL).allocate(("MIG-0-1",))
    assert given.cdi_devices == ("gpu-node-agent.io/gpu=MIG-0-1",)
    with pytest.raises(Refused, match="no CDI specification names it yet"):
        await bench.plugin(SMALL).allocate(("MIG-0-2",))
    own.publish(Devices(frozenset({"MIG-0-1", "MIG-0-2"})))
    assert bench.listed(SMALL) == {"MIG-0-1": "Healthy", "MIG-0-2": "Healthy"}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("MIG-9-9", "names no instance of this node"),
        ("GPU-0", "names no instance of this node"),
        ("MIG-0-2", "is not offered as nvidia.com/mig-1g.18gb now"),
        ("", "names no instance"),
    ],
)
async def test_what_is_not_to_be_had_is_refused(asked: str, says: str) -> None:
    bench = Bench(parted(0, instance(0, 1), instance(0, 2, "3g.71gb")))
    with pytest.raises(Refused, match=says):
        await bench.plugin(SMALL).allocate((asked,))


async def test_a_gpu_that_is_in_another_mode_hands_out_nothing() -> None:
    bench = Bench(parted(0, instance(0, 1)))
    plugin = bench.plugin(SMALL)
    bench.assignment.publish(Assignment({"GPU-0": GpuMode(reason="no mode is set for this GPU")}))
    with pytest.raises(Refused, match="no mode is set"):
        await plugin.allocate(("MIG-0-1",))
    assert bench.listed(SMALL) == {}


async def test_gpus_that_nobody_uses_are_kept_so() -> None:
    bench = Bench(
        parted(0, instance(0, 1), instance(0, 2), instance(0, 3)), parted(1, instance(1, 1), instance(1, 2))
    )
    plugin = bench.plugin(SMALL)
    free = ("MIG-0-1", "MIG-0-2", "MIG-0-3", "MIG-1-2")
    assert await plugin.prefer(PreferenceRequest(free, (), 2)) == ["MIG-1-2", "MIG-0-1"]
    assert await plugin.prefer(PreferenceRequest(free, ("MIG-0-3",), 1)) == ["MIG-0-3"]


async def test_one_that_is_to_be_destroyed_is_not_preferred() -> None:
    """It has been marked while the kubelet was asked who holds what."""
    bench = Bench(parted(0, instance(0, 1), instance(0, 2)))
    plugin = bench.plugin(SMALL)
    bench.hold(SMALL, "MIG-0-1")

    async def meanwhile(_: float) -> Record:
        bench.wing._layouts.leaving["MIG-0-1"] = "no place for it"
        return Record(began=2.0)

    bench.node.holdings.look = meanwhile  # type: ignore[method-assign,assignment]
    assert await plugin.prefer(PreferenceRequest(("MIG-0-1", "MIG-0-2"), (), 1)) == ["MIG-0-2"]


async def test_trouble_of_an_instance_is_its_own() -> None:
    bench = Bench(parted(0, instance(0, 1), instance(0, 2)))
    state = bench.snapshot.value.gpus[0]
    sick = replace(HEALTHY, state=HealthState.UNHEALTHY, cause="Xid 95: uncontained memory error")
    ill = replace(state, sick={"MIG-0-1": sick})
    bench.snapshot.publish(replace(bench.snapshot.value, gpus=(ill,), by_uuid={"GPU-0": ill}))
    assert bench.listed(SMALL) == {"MIG-0-1": "Unhealthy", "MIG-0-2": "Healthy"}
    with pytest.raises(Refused, match="is unhealthy: Xid 95"):
        await bench.plugin(SMALL).allocate(("MIG-0-1",))
    facts = bench.wing.gpu_facts("GPU-0")["instances"]
    assert [(each["uuid"], each["cause"]) for each in facts] == [
        ("MIG-0-1", "Xid 95: uncontained memory error"),
        ("MIG-0-2", ""),
    ]
    healthy = {labels[2]: value for what, value, labels in bench.wing.metrics() if what is d.INSTANCE_HEALTHY}
    assert healthy == {"MIG-0-1": 0.0, "MIG-0-2": 1.0}


def test_what_nobody_can_ask_for_is_told() -> None:
    bench = Bench(parted(0), parted(1, instance(1, 1, "")))
    assert [each.resource for each in bench.wing.plugins()] == []
    empty, unnamed = bench.wing.remarks()
    assert "GPU 0 is in MIG mode and has no instance" in empty
    assert "-cgi" in empty
    assert unnamed == "the driver names no profile of MIG-1-1: not offered"
    looks = list(MigWing.checks(Settings(), Machine(None, (parted(0), parted(1, instance(1, 1))), Path("/"))))
    assert ["no instance" in each.text for each in looks] == [True, False]


def test_a_node_where_no_instance_can_be_made_is_told(tmp_path: Path) -> None:
    manages, able = Settings(mig=Mig(manage=True)), parted(0, instance(0, 1))

    def looks(settings: Settings, *gpus: Gpu, cuda: tuple[int, int] = (12, 4), unseen: bool = False) -> str:
        driver = Driver("535.12", "12.535.12", cuda)
        machine = Machine(driver, gpus, tmp_path, None if unseen else tmp_path)
        return " ".join(
            each.text for each in MigWing.checks(settings, machine) if each.subject == "MIG layouts"
        )

    assert looks(manages, able, cuda=(11, 0)).endswith("take 470 or later, or set mig.manage: false")
    assert looks(manages, able).startswith("/dev/nvidia-caps/nvidia-cap1 is missing")
    assert "nvidia-modprobe" in looks(manages, replace(parted(0, mig=False), mig_switch="reset"))
    # Nothing where it does not matter, or cannot be seen.
    assert not looks(Settings(), able)
    assert not looks(manages, parted(0, mig=False))
    assert not looks(manages, able, unseen=True)
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text("config 7\nmonitor 8\n")
    assert looks(manages, able).startswith("/dev/nvidia-caps/nvidia-cap7 is missing")
    (tmp_path / "dev/nvidia-caps").mkdir(parents=True)
    (tmp_path / "dev/nvidia-caps/nvidia-cap7").touch()
    assert not looks(manages, able)


def test_single_offers_all_as_gpus_where_they_are_alike() -> None:
    bench = Bench(parted(0, instance(0, 1)), parted(1, instance(1, 1)), mig=Mig(strategy="single"))
    assert bench.listed("nvidia.com/gpu") == {"MIG-0-1": "Healthy", "MIG-1-1": "Healthy"}
    assert bench.wing.obstacle(bench.snapshot.value.gpus[0]) == ""
    bench.snapshot.publish(snapshot_of(parted(0, instance(0, 1)), parted(1, instance(1, 1, "3g.71gb"))))
    assert "here are 1g.18gb, 3g.71gb" in bench.wing.obstacle(bench.snapshot.value.gpus[0])


def test_single_and_whole_gpus_do_not_go_together() -> None:
    with pytest.raises(ConfigurationError, match="offers instances by the name of whole GPUs"):
        load(flags=["mig.strategy=single"])
    load(flags=["mig.strategy=single", "modes.pgpu=false"])
    load(flags=["mig.strategy=single", "modes.mig=false"])


@pytest.mark.parametrize(
    ("entry", "flags", "says"),
    [
        ({"mode": "mig", "mig": ["1g.18gb"]}, (), "only with mig.manage: true"),
        ({"mode": "pgpu", "mig": ["1g.18gb"]}, ("mig.manage=true",), "mig is for mode mig, not pgpu"),
        ({"mode": "mig", "mig": ["1g.18gb "]}, ("mig.manage=true",), "mig"),
        ({"mode": "mig", "mig": ["; rm"]}, ("mig.manage=true",), "mig"),
        ({"mode": "mig", "mig": ["1g.18gb"] * 9}, ("mig.manage=true",), "mig"),
        (
            {"mode": "mig", "mig": ["1g.18gb", "3g.71gb"]},
            ("mig.manage=true", "mig.strategy=single", "modes.pgpu=false"),
            "single offers one profile",
        ),
    ],
)
def test_layouts_that_no_node_can_have_are_refused(
    entry: dict[str, Any], flags: tuple[str, ...], says: str
) -> None:
    layouts = json.dumps({"parted": [{"gpus": [0], **entry}]})
    with pytest.raises(ConfigurationError, match=says):
        load(flags=[f"layouts={layouts}", *flags])
    good = json.dumps(
        {"parted": [{"gpus": [0], "mode": "mig", "mig": ["3g.71gb", "1g.18gb+me", "1g.24gb-me"]}]}
    )
    assert load(flags=[f"layouts={good}", "mig.manage=true"]).layouts["parted"][0].mig[1] == "1g.18gb+me"


@pytest.mark.parametrize("mode", [Mode.PGPU, Mode.VGPU, Mode.MPS, Mode.MIG])
def test_gpus_in_mig_mode_are_for_mode_mig_alone(mode: Mode) -> None:
    bench = Bench(parted(0, instance(0, 1)), parted(1, mig=False))
    desired = Desired(mode.value, everywhere(mode))
    targets = plan(bench.snapshot.value, desired, {Mode.MIG: bench.wing})
    mine, other = targets["GPU-0"], targets["GPU-1"]
    if mode is Mode.MIG:
        assert mine == GpuMode(Mode.MIG)
        assert "nvidia-smi -i 1 -mig 1" in other.reason
    else:
        assert (mine.mode, mine.reason) == (Mode.OFF, MIG_REASON)
        assert other.mode is mode


def test_mig_wing_is_one_folder() -> None:
    """One folder, one row of the table, one name in the tuple of wings, and no wing knows it."""
    folder = Path(agent.__file__).parent
    lines = sum(len(file.read_text().splitlines()) for file in (folder / "mig").glob("*.py"))
    assert lines <= 1200
    assert MigWing in WINGS
    importers = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agent.mig"):
                importers.add(file.relative_to(folder).as_posix())
    assert {each for each in importers if not each.startswith("mig/")} == {"app/wings.py"}
    known = {name for name, _ in inspect.getmembers(Wing) if not name.startswith("_")}
    assert {name for name in vars(MigWing) if not name.startswith("_")} <= {*known, "mode"}
