"""Before pods come: `check node` names what a node lacks, and `try` shows that a share arrives."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from agent.check.host import HostFiles
from agent.check.injection import own_specification
from agent.check.kubelet import facts_of
from agent.check.node_check import Observation, look
from agent.cluster.node import ApiNode
from agent.model.look import GOOD, NOT_SEEN, WRONG, Look, NodeVerdict, Severity, verdict
from agent.settings import load
from agent.simulator.nvml import SimulatedNvml
from tests.cluster.bare_node import Bare, bare, images, thread
from tests.cluster.build.libc_images import GLIBC_IMAGE
from tests.cluster.rig import REPOSITORY
from tests.nvml_double.build import STATE_VARIABLE

__all__ = ["bare", "images"]

CAN = "this node can offer its GPUs"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The whole program."""
    return subprocess.run(
        [sys.executable, "-m", "agent", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


class Round:
    """The result of one look at the node."""

    def __init__(self, looks: list[Look]) -> None:
        self.looks = looks
        self.verdict: NodeVerdict = verdict(looks)

    def text(self, what: str, grade: Severity) -> str:
        """Of the only look of that name and grade."""
        found = [each.text for each in self.looks if (each.subject, each.grade) == (what, grade)]
        assert len(found) == 1, "\n".join(each.line() for each in self.looks)
        return found[0]

    def failed(self) -> dict[str, str]:
        """The obstacle, and the remedy."""
        assert self.verdict.code == WRONG
        assert CAN not in self.verdict.text
        found = {each.subject: each.text for each in self.looks if each.grade is Severity.FAILED}
        assert all(what in self.verdict.text for what in found)
        return found


class Preflight:
    """Looks at the rig's node from outside of it, by its mounts and its processes."""

    def __init__(self, bare: Bare, settings: Mapping[str, object]) -> None:
        self.bare = bare
        self.root = Path(f"/proc/{bare.cluster.namespace.init.pid}/root")
        self._settings = {**bare.rig._settings(), **settings, "modes.mps": False}

    def flags(self, changes: Mapping[str, object]) -> list[str]:
        merged = {**self._settings, **changes}
        return [f"{key}={json.dumps(value)}" for key, value in merged.items()]

    async def look(self, changes: Mapping[str, object] | None = None) -> Round:
        settings = await thread(load, None, {}, self.flags(changes or {}))
        host = HostFiles(self.root, named=True)
        # Commands for people may read a kubeconfig by blocking calls, tests not.
        node = await thread(self.bare.cluster.get, "Node", self.bare.cluster.node)
        facts = facts_of(msgspec.convert(node, ApiNode))
        seen = Observation(host, await own_specification(settings, host), facts)
        return Round(await thread(lambda: list(look(settings, SimulatedNvml(self.bare.rig.machine), seen))))

    def run(self, **changes: object) -> subprocess.CompletedProcess[str]:
        """The whole program."""
        words = [word for flag in self.flags(changes) for word in ("--set", flag)]
        return command("check", "node", f"--host-root={self.root}", *words)


@contextmanager
def changed(file: Path, old: str, new: str) -> Iterator[None]:
    """A file of the node, otherwise for a moment; nothing that runs reads it again."""
    before = file.read_text()
    assert old in before
    file.write_text(before.replace(old, new))
    try:
        yield
    finally:
        file.write_text(before)


@contextmanager
def away(file: Path) -> Iterator[None]:
    """A file that is missing for a moment."""
    hidden = file.with_name(f".{file.name}.away")
    file.rename(hidden)
    try:
        yield
    finally:
        hidden.rename(file)


async def test_preflight_names_each_missing_part(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(bare.folder / "machine"))
    preflight = Preflight(bare, await bare.settings())
    cluster, layout = bare.cluster, bare.cluster.layout
    containerd, kubelet = layout.containerd / "config.toml", layout.root / "kubelet.json"

    # Nothing is missing, though the agent has never run here and nothing of NVIDIA's but the driver is there.
    good = await preflight.look()
    assert good.verdict == NodeVerdict(CAN, GOOD), "\n".join(each.line() for each in good.looks)
    assert "can make one, with 8 GPUs" in good.text("GPU specification", Severity.OK)
    assert f"policy none, by {kubelet}" in good.text("Topology Manager", Severity.WARNING)
    assert cluster.parts.kubernetes_version in good.text("kubelet", Severity.OK)
    assert os.uname().release in good.text("kernel", Severity.OK)
    done = await thread(preflight.run)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, CAN), done

    # The driver; its files; a folder in which the hook may not be run.
    bare.rig.machine.library_missing()
    assert set((await preflight.look()).failed()) == {"driver"}
    bare.rig.machine.library_missing(missing=False)
    with away(bare.folder / "usr/lib"):
        found = (await preflight.look()).failed()
    assert "nvidia-ctk" in found["GPU specification"]
    assert found.keys() == {"GPU specification", "toolkit", "default runtime"}

    # The runtime: its switch, its folders, and NVIDIA's in its place.
    section = '[plugins."io.containerd.cri.v1.runtime"]\n'
    with changed(containerd, section, f"{section}  enable_cdi = false\n"):
        assert "enable_cdi = true" in (await preflight.look()).failed()["CDI"]
    with changed(containerd, f'["{layout.cdi}"]', '["/etc/cdi"]'):
        assert "cdi_spec_dirs" in (await preflight.look()).failed()["CDI"]
    found = (await preflight.look({"injection.strategy": "envvar"})).failed()
    assert f"runc by {containerd}" in found["default runtime"]
    with changed(containerd, ".containerd.runtimes.runc]", ".containerd.runtimes.nvidia]"):
        named = await preflight.look({"injection.strategy": "envvar"})
    assert "RuntimeClass" in named.text("default runtime", Severity.WARNING)

    # The kubelet: its folders, its Node object, its configuration.
    elsewhere = {"kubelet.root": "/var/lib/elsewhere"}
    assert "kubelet.root" in (await preflight.look(elsewhere)).failed()["kubelet's folders"]
    for unread, words in (
        ({"cluster.nodeName": "other"}, "there is no node other"),
        ({"cluster.access": "off"}, "cluster.access is off"),
    ):
        done = await thread(lambda changes=unread: preflight.run(**changes))
        *lines, last = done.stdout.splitlines()
        assert (done.returncode, CAN in last) == (NOT_SEEN, False), done
        assert "kubelet, other agents" in last
        assert any(line.startswith("unknown  kubelet ") and words in line for line in lines), done
    with away(kubelet):
        unseen = await preflight.look()
    assert unseen.text("Topology Manager", Severity.UNKNOWN)
    assert (unseen.verdict.code, CAN in unseen.verdict.text) == (NOT_SEEN, False)
    with changed(kubelet, '"cgroupRoot"', '"topologyManagerPolicy": "best-effort", "cgroupRoot"'):
        assert "best-effort" in (await preflight.look()).text("Topology Manager", Severity.OK)

    # Another agent, while it runs; what mode mps needs.
    path = cluster.kubelet_root / "device-plugins" / "nvidia-gpu.sock"
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            assert "NVIDIA's device plugin" in (await preflight.look()).failed()["other agents"]
        assert "nobody listens" in (await preflight.look()).text("other agents", Severity.WARNING)
    finally:
        path.unlink(missing_ok=True)
    assert "nvidia-cuda-mps-control" in (await preflight.look({"modes.mps": True})).failed()["MPS program"]

    done = await thread(lambda: preflight.run(**{"driver.library": "/nonexistent.so"}))
    assert (done.returncode, CAN in done.stdout) == (1, False), done


SMI = "#!/bin/sh\necho 'a program that came with the driver'\n"


async def test_try_runs_a_share(bare: Bare) -> None:
    """Two modes on one node, by the program as a person runs it; each pod is gone afterwards."""
    program = bare.folder / "usr/bin/nvidia-smi"
    program.parent.mkdir(parents=True)
    program.write_text(SMI)
    program.chmod(0o755)
    settings = {
        "defaultMode": "mixed",
        "layouts": {"mixed": [{"gpus": ["0-3"], "mode": "pgpu"}, {"gpus": ["rest"], "mode": "vgpu"}]},
    }
    await bare.rig.start_agent({**await bare.settings(), **settings})
    await bare.rig.wait_allocatable(4)
    await bare.rig.wait_allocatable(400, "tencent.com/vcuda-core")

    def attempt(mode: str, *more: str) -> subprocess.CompletedProcess[str]:
        config = f"--kubeconfig={bare.cluster.kubeconfig}"
        return command("try", f"--mode={mode}", f"--image={GLIBC_IMAGE}", config, "--timeout=30s", *more)

    for mode, asked in (("pgpu", "nvidia.com/gpu: 1"), ("vgpu", "tencent.com/vcuda-memory: 8")):
        done = await thread(attempt, mode, f"--node={bare.cluster.node}")
        assert done.returncode == 0, done
        lines = done.stdout.splitlines()
        assert asked in lines[0]
        assert "  variable: NVIDIA_VISIBLE_DEVICES='void'" in lines  # as the specification has it
        assert "  a program that came with the driver" in lines, done
        assert lines[-1] == f"the share was given on node {bare.cluster.node}: 3 devices, and nvidia-smi ran"
    assert any("annotation: tencent.com/predicate-gpu-idx-0" in line for line in lines)

    done = await thread(attempt, "mps")
    assert done.returncode == 1
    assert "nvidia.com/mps-core" in done.stderr
    selector = "app.kubernetes.io/name=gpu-node-agent-try"
    assert not await thread(lambda: bare.cluster.find_all("Pod", labelSelector=selector))
