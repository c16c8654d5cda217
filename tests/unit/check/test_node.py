"""`check node` on simulated machines with files as real nodes have them."""

import json
import os
import socket
from pathlib import Path

import anyio
import pytest

from agent.check.claims import SUBJECT as CLAIMS
from agent.check.claims import ClaimSupport, claim_support
from agent.check.host import HostFiles
from agent.check.injection import Own, own_specification
from agent.check.kubelet import CheckedNode
from agent.check.node_check import Observation, look
from agent.cli.main import main
from agent.cluster.node import NodeInfo
from agent.injection.toolkit import FILE, KIND, Devices
from agent.model.look import GOOD, NOT_SEEN, WRONG, Look, Severity, verdict
from agent.settings import Settings, load
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.unit.check.conftest import CONTAINERD, written

GOOD_NODE = CheckedNode(NodeInfo("v1.36.3", "containerd://2.4.2"))
WITHOUT_CDI = CheckedNode(NodeInfo("v1.36.3", "containerd://1.7.27"))
NOTHING_MADE = Own(wanted=True, devices=Devices(problem="nvidia-ctk is missing"))
UNSEEN = "the API server cannot be reached"


def settings(root: Path, *more: str) -> Settings:
    return load(None, {}, [f"driver.root={root}", *more])


class Node:
    """One machine and its files; changed by a test, then looked at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.machine = SimulatedMachine.create("dgx-h200")
        self.own = Own(wanted=True, devices=Devices(frozenset(self.machine.uuids)))
        self.host = HostFiles(root, named=True)
        self.facts: CheckedNode | None = GOOD_NODE
        self.claims: ClaimSupport | None = None

    def looks(self, *more: str) -> list[Look]:
        unread = "" if self.facts else UNSEEN
        seen = Observation(self.host, self.own, self.facts, unread, self.claims)
        return list(look(settings(self.root, *more), SimulatedNvml(self.machine), seen))

    def faults(self, *more: str) -> dict[str, str]:
        return {each.subject: each.text for each in self.looks(*more) if each.grade is Severity.FAILED}

    def grades(self, *more: str) -> dict[str, Severity]:
        return {each.subject: each.grade for each in self.looks(*more)}

    def of(self, what: str, *more: str) -> Look:
        (one,) = [each for each in self.looks(*more) if each.subject == what]
        return one


@pytest.fixture
def node(root: Path) -> Node:
    return Node(root)


def test_a_good_node_has_no_fault(node: Node) -> None:
    looks = node.looks()
    assert {each.grade for each in looks} == {Severity.OK}, [each.line() for each in looks]
    assert verdict(looks).text == "this node can offer its GPUs"
    assert verdict(looks).code == GOOD
    assert node.of("cgroups").text == "version 2"
    assert "8 x NVIDIA H200" in node.of("GPUs").text
    assert "with 8 GPUs" in node.of("GPU specification").text


def test_nothing_of_nvidia_but_the_driver_is_needed_with_cdi(node: Node) -> None:
    (node.root / "etc/containerd/config.toml").unlink()
    assert not node.faults()
    assert "not needed" in node.of("toolkit").text
    assert "not needed" in node.of("default runtime").text


@pytest.mark.parametrize("wanted", [True, False])
def test_without_any_specification_runtime_and_toolkit_are_needed(node: Node, wanted: bool) -> None:
    node.own = NOTHING_MADE if wanted else Own(wanted=False)
    written(node.root, {"/etc/containerd/config.toml": CONTAINERD.format(runtime="runc")})
    faults = node.faults()
    assert set(faults) == {"toolkit", "default runtime", *(["GPU specification"] if wanted else [])}
    assert "nvidia-ctk runtime configure" in faults["default runtime"]
    assert node.grades()["CDI"] is Severity.WARNING
    assert not node.faults("injection.deviceNodes=true")
    assert set(node.faults("injection.strategy=cdi")) >= {"CDI"}


def test_old_versions_are_found(node: Node) -> None:
    node.facts = CheckedNode(NodeInfo("v1.24.17", "containerd://1.6.20"))
    assert "1.25" in node.faults()["kubelet"]
    assert node.grades()["CDI"] is Severity.WARNING


def test_docker_s_runtime_is_not_taken_for_containerd_s(node: Node) -> None:
    node.own = Own(wanted=False)
    (node.root / "etc/containerd/config.toml").unlink()
    written(node.root, {"/etc/docker/daemon.json": '{"default-runtime": "nvidia"}'})
    assert "runc by its defaults" in node.faults()["default runtime"]


def test_devices_beside_gpus_are_looked_for_where_they_are_wanted(node: Node) -> None:
    subject = "devices beside GPUs"
    assert subject not in node.grades()
    root = node.root / "beside"
    wanted = ("injection.gdrcopy=true", f"injection.driverRoot={root}")
    for name in ("nvidiactl", "gdrdrv"):
        (root / "dev").mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    assert node.grades(*wanted)[subject] is Severity.OK
    (root / "dev" / "gdrdrv").unlink()
    assert "no /dev/gdrdrv" in node.faults(*wanted)[subject]


def test_nvidia_s_runtime_has_another_name_on_aks(node: Node) -> None:
    node.own = Own(wanted=False)
    aks = {"/etc/containerd/config.toml": CONTAINERD.format(runtime="nvidia-container-runtime")}
    written(node.root, aks)
    assert "default runtime" not in node.faults()


@pytest.mark.parametrize("cdi", [True, False])
def test_a_configuration_that_cannot_be_read_is_no_pass(node: Node, cdi: bool) -> None:
    if not cdi:
        node.own = Own(wanted=False)
    imports = 'imports = ["/etc/containerd/conf.d/*.toml"]\n' + CONTAINERD.format(runtime="nvidia")
    written(
        node.root, {"/etc/containerd/config.toml": imports, "/etc/containerd/conf.d/9.toml": "enable_cdi = ["}
    )
    assert "/etc/containerd/conf.d/9.toml" in node.of("CDI").text
    assert node.grades()["CDI"] is Severity.UNKNOWN
    assert node.grades()["default runtime"] is (Severity.OK if cdi else Severity.UNKNOWN)
    assert verdict(node.looks()).code == (NOT_SEEN if cdi else WRONG)


SWITCH = '[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = {value}\n'
FOLDERS = '[plugins."io.containerd.cri.v1.runtime"]\ncdi_spec_dirs = {value}\n'


def test_cdi_that_is_switched_off_is_found(node: Node) -> None:
    written(node.root, {"/etc/containerd/config.toml": SWITCH.format(value="false")})
    faults = node.faults()
    assert "enable_cdi = true" in faults["CDI"]
    # The agent itself does not see the switch, so nothing else would help.
    assert set(faults) == {"CDI", "toolkit", "default runtime"}


@pytest.mark.parametrize(
    ("strategy", "value", "grade"),
    [
        ("auto", "true", Severity.WARNING),
        ("auto", "false", Severity.FAILED),
        ("cdi", "true", Severity.OK),
        ("cdi", "false", Severity.FAILED),
        ("envvar", "false", Severity.OK),
    ],
)
def test_a_runtime_of_a_version_without_cdi_may_have_it_switched_on(
    node: Node, strategy: str, value: str, grade: Severity
) -> None:
    node.facts = WITHOUT_CDI
    written(node.root, {"/etc/containerd/config.toml": SWITCH.format(value=value)})
    assert node.grades(f"injection.strategy={strategy}")["CDI"] is grade


def test_cdi_without_a_switch_in_an_old_runtime_is_refused_by_strategy_only(node: Node) -> None:
    node.facts = WITHOUT_CDI
    assert node.grades()["CDI"] is Severity.WARNING
    assert "enable_cdi = true" in node.faults("injection.strategy=cdi")["CDI"]


@pytest.mark.parametrize(("folders", "good"), [('["/etc/cdi"]', False), ('["/etc/cdi", "/run/cdi"]', True)])
def test_a_runtime_that_looks_elsewhere_is_found(node: Node, folders: str, good: bool) -> None:
    written(node.root, {"/etc/containerd/config.toml": FOLDERS.format(value=folders)})
    assert ("CDI" in node.faults()) is not good


def test_what_cannot_be_seen_is_no_pass(node: Node, tmp_path: Path) -> None:
    node.facts, node.host = None, HostFiles(None)
    node.own = Own(wanted=False)
    folder = tmp_path / "empty"
    looks = node.looks(f"kubelet.root={tmp_path}/var/lib/kubelet", f"host.cgroups={folder}")
    unknown = {each.subject for each in looks if each.grade is Severity.UNKNOWN}
    rest = {"kubelet", "other agents", "Topology Manager", "cgroups"}
    assert unknown == {"toolkit", "default runtime", "CDI"} | rest
    result = verdict(looks)
    assert result.code == NOT_SEEN
    assert "can offer" not in result.text
    for what in unknown:
        assert what in result.text
    assert UNSEEN in next(each.text for each in looks if each.subject == "kubelet")
    assert verdict([*looks, Look("x", Severity.FAILED, "")]).code == WRONG


def test_a_missing_kubelet_is_found(node: Node) -> None:
    (node.root / "var/lib/kubelet/pod-resources/kubelet.sock").unlink()
    assert "kubelet.root" in node.faults()["kubelet's folders"]


def test_a_missing_driver_is_all_that_is_said_of_it(node: Node) -> None:
    node.machine.library_missing()
    node.own = NOTHING_MADE  # as nothing can be made without a driver
    assert set(node.faults()) == {"driver"}
    assert "GPUs" not in node.grades()


def test_mps_program_is_missed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.root / "usr/bin/nvidia-cuda-mps-control").unlink()
    monkeypatch.setenv("PATH", str(node.root))
    assert set(node.faults()) == {"MPS program"}
    assert not [what for what in node.grades("modes.mps=false") if "MPS" in what]


def test_numa_without_a_policy_is_a_warning(node: Node) -> None:
    written(node.root, {"/var/lib/kubelet/config.yaml": "kind: KubeletConfiguration\n"})
    found = node.of("Topology Manager")
    assert found.grade is Severity.WARNING
    assert "best-effort" in found.text
    assert verdict(node.looks()).code == GOOD


def test_a_gpu_that_the_specification_lacks_is_found(node: Node) -> None:
    first, *rest = sorted(node.own.devices.names)
    node.own = Own(wanted=True, devices=Devices(frozenset(rest)))
    assert first in node.faults()["GPU specification"]


def test_a_specification_that_stands_is_read(node: Node) -> None:
    devices = [{"name": name, "containerEdits": {}} for name in sorted(node.own.devices.names)]
    text = json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": devices})
    written(node.root, {f"/run/cdi/{FILE}": text})
    node.own = anyio.run(own_specification, settings(node.root), node.host)
    assert f"{FILE} names 8 GPUs" in node.of("GPU specification").text
    written(node.root, {f"/run/cdi/{FILE}": "{}"})
    node.own = anyio.run(own_specification, settings(node.root), node.host)
    assert node.grades()["GPU specification"] is Severity.WARNING  # NVIDIA's runtime is the default one
    assert FILE in node.of("GPU specification").text


def test_programs_that_the_image_lacks_are_named(node: Node) -> None:
    missing = settings(node.root, f"injection.toolkit={node.root}/none")
    made = anyio.run(own_specification, missing, node.host)
    assert "nvidia-ctk" in str(made.devices.problem)


@pytest.mark.parametrize("what", ["vGPU limits", "GPU specification"])
def test_a_state_folder_without_execution_is_found(
    node: Node, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "vgpu.enforcement=library"
    assert node.of(what, limits).grade is Severity.OK

    class NoExec:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda _: NoExec())
    assert "mounted noexec" in node.faults(limits)[what]


def test_other_agents_are_named_by_their_sockets(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    path = node.root / "var/lib/kubelet/device-plugins/vcore.sock"
    monkeypatch.chdir(path.parent)  # a socket's path may be 107 bytes long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
        server.listen()
        assert "gpu-manager" in node.faults()["other agents"]
    # A process that was killed leaves it behind.
    found = node.of("other agents")
    assert found.grade is Severity.WARNING
    assert "nobody listens" in found.text


@pytest.mark.parametrize(("mode", "bad"), [(None, True), ("none", True), ("pgpu", False)])
def test_other_agents_are_named_by_what_is_on_offer(node: Node, mode: str | None, bad: bool) -> None:
    labels = {"gpu-node-agent.io/mode": mode} if mode else {}
    node.facts = CheckedNode(GOOD_NODE.software, labels, ("nvidia.com/gpu",))
    assert ("nvidia.com/gpu" in node.faults().get("other agents", "")) is bad


def test_a_node_of_the_dra_driver_is_named(node: Node) -> None:
    node.facts = CheckedNode(GOOD_NODE.software, {"nvidia-device-enable": "pgpu-dra"})
    assert "DRA" in node.faults()["other agents"]


def test_a_simulated_node_needs_no_runtime(node: Node) -> None:
    (node.root / "etc/containerd/config.toml").unlink()
    node.own = Own(wanted=False)
    looks = node.looks("simulator.profile=dgx-h200")
    assert verdict(looks).code == GOOD
    assert "simulated" in node.of("container runtime", "simulator.profile=dgx-h200").text


def test_kernels_too_old_for_mps_are_found(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    own = list(os.uname())
    own[2] = "5.4.0-216-generic"
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(own))
    assert "5.10" in node.of("kernel for MPS").text
    assert node.grades()["kernel"] is Severity.OK
    assert "kernel for MPS" not in node.grades("modes.mps=false")
    monkeypatch.setattr("agent.mps.wing.kernel_problem", lambda: "Linux 4.18 has none")
    assert "modes.mps: false" in node.faults()["kernel for MPS"]


def test_cgroups_of_version_1_are_a_warning(node: Node) -> None:
    (node.root / "sys/fs/cgroup/cgroup.controllers").unlink()
    assert node.grades()["cgroups"] is Severity.UNKNOWN
    (node.root / "sys/fs/cgroup/memory").mkdir()
    assert node.grades()["cgroups"] is Severity.WARNING


def test_by_command_line_the_root_must_be_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "node", "--set", "cluster.access=off", "--host-root", str(root / "run")]) == 2
    assert "--host-root" in capsys.readouterr().err


def test_the_summary_holds_what_is_not_ok(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = root / "summary"
    library = f"driver.library={root}/none.so"
    options = [f"--host-root={root}", f"--summary={file}", f"--set={library}", "--set=cluster.access=off"]
    assert main(["check", "node", *options]) == WRONG
    lines = file.read_text().splitlines()
    assert lines[-1] == capsys.readouterr().out.splitlines()[-1]
    assert "driver" in lines[-1]
    assert lines[0].startswith("failed   driver")
    assert not [line for line in lines[:-1] if line.startswith("ok ")]


def of_claims(node: Node) -> list[tuple[Severity, str]]:
    return [(each.grade, each.text) for each in node.looks() if each.subject == CLAIMS]


def test_what_claims_need_is_looked_at_where_they_are_wanted(node: Node) -> None:
    assert not of_claims(node)
    node.claims = ClaimSupport()
    assert {grade for grade, _ in of_claims(node)} == {Severity.OK}
    node.claims = ClaimSupport(problem="turn on DRAConsumableCapacity")
    assert of_claims(node)[0] == (Severity.FAILED, "turn on DRAConsumableCapacity")
    node.claims = ClaimSupport(unread=UNSEEN)
    assert of_claims(node)[0][0] is Severity.UNKNOWN
    record = node.root / "var/lib/kubelet/dra_manager_state"
    record.write_text("{")
    assert any(grade is Severity.FAILED and str(record) in text for grade, text in of_claims(node))


def test_claims_bring_gpus_by_cdi_alone(node: Node) -> None:
    node.claims, node.facts = ClaimSupport(), WITHOUT_CDI
    assert any("by CDI alone" in text for grade, text in of_claims(node) if grade is Severity.FAILED)


def test_a_driver_of_claims_that_has_ended_is_found(node: Node) -> None:
    node.claims = ClaimSupport()
    folder = node.root / "var/lib/kubelet/plugins_registry"
    with socket.socket(socket.AF_UNIX) as server:
        descriptor = os.open(folder, os.O_PATH)
        server.bind(f"/proc/self/fd/{descriptor}/gna-dra.sock")
        os.close(descriptor)
        server.listen()
        assert {grade for grade, _ in of_claims(node)} == {Severity.OK}
    assert any(grade is Severity.WARNING and "nobody listens" in text for grade, text in of_claims(node))


def test_whether_the_cluster_has_what_claims_need_is_asked_where_they_are_wanted(tmp_path: Path) -> None:
    async def asked(*more: str) -> ClaimSupport | None:
        return await claim_support(load(None, {}, ["cluster.nodeName=n", *more]), None)

    assert anyio.run(asked) is None
    off = anyio.run(asked, "dra.enabled=true", "cluster.access=off")
    assert off
    assert "cluster.access is off" in off.problem
    nowhere = anyio.run(asked, "dra.enabled=true", f"cluster.kubeconfig={tmp_path / 'none'}")
    assert nowhere
    assert nowhere.unread
