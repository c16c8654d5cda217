"""Simulated GPUs on a real node: one machine per node, never beside real GPUs, and faults from outside."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli.main import main
from agent.settings import Settings, load
from agent.simulator import events
from agent.simulator.events import EventReader
from agent.simulator.on_node import FILE, NotSimulated, attached, machine_of


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: the configuration is refused where the path of a socket would be too long."""
    with tempfile.TemporaryDirectory(prefix="gna-", dir="/tmp") as folder:
        yield Path(folder)


def _settings(folder: Path, profile: str | None = "dgx-h200", node: str = "a") -> Settings:
    flags = {
        "simulator.profile": profile or "null",
        "cluster.nodeName": node,
        **{f"host.{name}": str(folder / name) for name in ("run", "proc", "sysfs")},
    }
    return load(None, {}, [f"{key}={value}" for key, value in flags.items()])


def test_the_machine_stays_the_same_over_the_agents_life(tmp_path: Path) -> None:
    first = machine_of(_settings(tmp_path))
    first.load(0, utilization=77)
    again = machine_of(_settings(tmp_path))
    assert again.uuids == first.uuids
    assert again.gpu(0).gpu_utilization == 77
    assert len(first.uuids) == 8


def test_nodes_have_gpus_of_their_own(tmp_path: Path) -> None:
    one, other = (machine_of(_settings(tmp_path / name, node=name)) for name in ("a", "b"))
    assert not set(one.uuids) & set(other.uuids)


def test_another_profile_or_a_spoiled_file_makes_another_machine(tmp_path: Path) -> None:
    before = machine_of(_settings(tmp_path)).uuids
    assert len(machine_of(_settings(tmp_path, "dgx-a100")).uuids) == 8
    (tmp_path / "run" / FILE).write_bytes(b"spoiled")
    assert machine_of(_settings(tmp_path)).uuids == before


def test_gpus_lie_on_numa_nodes_that_the_machine_has(tmp_path: Path) -> None:
    (tmp_path / "sysfs/devices/system/node/node0").mkdir(parents=True)
    machine = machine_of(_settings(tmp_path))
    assert {machine.gpu(slot).numa_node for slot in machine.slots} == {0, -1}


def test_real_gpus_are_never_hidden(tmp_path: Path) -> None:
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.touch()
    with pytest.raises(NotSimulated, match=r"driver is loaded.*take simulator\.profile out"):
        machine_of(_settings(tmp_path))
    assert not (tmp_path / "run" / FILE).exists()


def test_an_unknown_profile_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotSimulated, match=r"dgx-h201; use one of .*dgx-h200"):
        machine_of(_settings(tmp_path, "dgx-h201"))


def _command(folder: Path, *arguments: str, profile: str = "dgx-h200") -> int:
    flags = [f"--set=simulator.profile={profile}", f"--set=host.run={folder}/run"]
    return main(["fault", *arguments, *flags])


def test_a_fault_reaches_the_agents_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = machine_of(_settings(tmp_path))
    reader = EventReader(machine.mapping)
    reader.register(0, events.XID)
    assert _command(tmp_path, "xid", "79", "--gpu=0") == 0
    event = reader.wait(5)
    assert event is not None
    assert (event.slot, event.data) == (0, 79)
    assert machine.uuid(0) in capsys.readouterr().out
    assert _command(tmp_path, "lose", f"--gpu={machine.uuid(1)}") == 0
    assert _command(tmp_path, "repair", "--gpu=1") == 0
    assert _command(tmp_path, "ecc", "--gpu=2") == 0


@pytest.mark.parametrize(
    ("profile", "gpu", "reason"),
    [
        ("null", "0", "the GPUs of this node are real"),
        ("dgx-h200", "99", "no GPU 99"),
        ("dgx-h200", "GPU-x", "no GPU 'GPU-x'"),
    ],
)
def test_what_cannot_fail_is_told(
    tmp_path: Path, profile: str, gpu: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_of(_settings(tmp_path))
    assert _command(tmp_path, "xid", "79", f"--gpu={gpu}", profile=profile) == 1
    assert reason in capsys.readouterr().err


def test_without_an_agent_there_is_nothing_to_fail(tmp_path: Path) -> None:
    with pytest.raises(NotSimulated, match="no agent simulates GPUs here"):
        attached(_settings(tmp_path))


def test_check_node_says_why_it_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "node", "--set=simulator.profile=toaster", f"--set=host.run={tmp_path}"]) == 1
    assert "toaster; use one of" in capsys.readouterr().err
