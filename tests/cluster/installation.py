"""The chart on the real cluster: the image from the Dockerfile, installed by the real helm.

Beside the cluster there is only what a node brings along: NVML (simulated), device nodes, the toolkit's CDI
specification, and NVIDIA's real MPS control program.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agent.mps import processes
from agent.mps.processes import Process
from agent.node import conditions
from agent.simulator.machine import SimulatedMachine
from tests.chart import helm
from tests.cluster import toolkit
from tests.cluster.build import agent_image
from tests.cluster.build.cache import cache_root
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually
from tests.mps_binaries import SUITES, control_program
from tests.nvml_double.build import STATE_VARIABLE, build
from tests.pace import scaled

NAMESPACE, RELEASE = "gpu-agents", "gpu-node-agent"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
MODE_LABEL = "nvidia-device-enable"
# Of a machine with 8 GPUs.
MIXED = [
    {"gpus": ["0-1"], "mode": "pgpu"},
    {"gpus": ["2-3"], "mode": "vgpu"},
    {"gpus": ["4-5"], "mode": "mps"},
]
FOLDERS_ON_DISK = (Path("/var/lib/gpu-node-agent"), Path("/etc/cdi"))
"""Folders that the chart's pods make on the machine itself; the rest is in folders of the cluster's own."""


class Node:
    """Properties of a GPU node, for the cluster's one node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self.machine = SimulatedMachine.create("dgx-h200", folder / "machine")
        minors = {uuid: int(self.machine.gpu(uuid).minor) for uuid in self.machine.uuids}
        toolkit.make_device_nodes(folder, minors)
        toolkit.write_cdi_spec(cluster.cdi_dir, folder, minors)
        self.library = build(cache_root() / "nvml")
        self.mps_program = control_program(max(SUITES))

    def daemons(self) -> Mapping[str, tuple[Process, ...]]:
        """MPS control daemons of the agent's, by GPU."""
        run = Path("/run/gpu-node-agent/mps")  # as the daemons themselves know it
        found = {}
        for uuid in self.machine.uuids:
            pipe = run / uuid / "pipe"
            # They have a PID namespace and cgroups of their own.
            found[uuid] = (*processes.daemons(pipe), *processes.impostors(pipe))
        return {uuid: each for uuid, each in found.items() if each}


class Installation:
    """One release of the chart."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster = cluster
        self.node = node
        self._values = node.folder / "values.yaml"
        self._values.write_text(yaml.safe_dump(self.values()))
        self._made = [path for path in FOLDERS_ON_DISK if not path.exists()]

    def values(self) -> dict[str, Any]:
        """For this machine, where the pods are on the node's network and the driver is a simulated one."""
        repository, _, tag = agent_image.IMAGE.rpartition(":")
        machine = str(self.node.folder / "machine")
        return {
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "hostNetwork": True,
            "mps": {"enabled": True},
            "driver": {"source": "host"},
            "cleanup": {"timeoutSeconds": 90},
            "extraEnv": [{"name": STATE_VARIABLE, "value": machine}],
            "extraVolumes": [{"name": "machine", "hostPath": {"path": machine, "type": "File"}}],
            "extraVolumeMounts": [{"name": "machine", "mountPath": machine}],
            "config": {
                "layouts": {"mixed": MIXED},
                "driver": {"library": f"/host{self.node.library}"},
                "injection": {"strategy": "cdi"},
                "mps": {"controlProgram": f"/host{self.node.mps_program}", "prestartServer": False},
            },
        }

    def helm(self, *arguments: str, timeout: float = 150) -> str:
        """Run helm against the cluster. Raises HelmRefused."""
        home = self.node.folder / "helm"
        command = [helm.program(), *arguments, f"--namespace={NAMESPACE}"]
        done = subprocess.run(
            self.cluster.reaching_api(command),
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "KUBECONFIG": str(self.cluster.kubeconfig),
                "HELM_CACHE_HOME": str(home / "cache"),
                "HELM_CONFIG_HOME": str(home / "config"),
                "HELM_DATA_HOME": str(home / "data"),
            },
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise helm.HelmRefused(done.stderr)
        return done.stdout

    def install(self, *more: str, chart: str = "") -> str:
        """Install and wait; what helm says at the end. `more`: further arguments of helm."""
        patience = f"--timeout={scaled(60):.0f}s"
        arguments = ["--create-namespace", f"--values={self._values}", "--wait", patience, *more]
        return self.helm("install", RELEASE, chart or str(helm.CHART), *arguments)

    def label(self, value: str | None) -> None:
        """Label the node with a mode."""
        path = self.cluster.api.path("v1", "Node", None, self.cluster.node)
        self.cluster.api.merge_patch(path, {"metadata": {"labels": {MODE_LABEL: value}}})

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Pods of a part of the release: agent, cleanup, cleanup-node."""
        selector = f"app.kubernetes.io/component={component}"
        return self.cluster.find_all("Pod", namespace=NAMESPACE, labelSelector=selector)

    def ready_agent(self, other_than: str = "", timeout: float = 60) -> dict[str, Any]:
        """The node's agent, once it is ready; `other_than` is the UID of the one before."""

        def ready() -> dict[str, Any]:
            found = [each for each in self.pods("agent") if each["metadata"]["uid"] != other_than]
            if len(found) != 1:
                raise NotYet(f"{len(found)} pods")
            conditions = {each["type"]: each["status"] for each in found[0]["status"].get("conditions", [])}
            if conditions.get("Ready") != "True":
                status = json.dumps(found[0]["status"])[:1500]
                raise NotYet(lambda: status + self.agent_log())
            return found[0]

        return eventually(ready, timeout=timeout, what="the agent is ready", interval=0.2)

    def agent_log(self) -> str:
        """The end of the newest agent's log."""
        for pod in self.pods("agent"):
            try:
                return self.cluster.logs(pod["metadata"]["name"], "agent", namespace=NAMESPACE)[-3000:]
            except Exception as error:  # noqa: BLE001  only for messages of tests that failed anyway
                return f"(no log: {error})"
        return "(no agent)"

    def remove_traces(self) -> None:
        """After a test, whatever became of it: no release, no daemon, no folder, a node like a new one."""
        try:
            self.helm("uninstall", RELEASE, "--no-hooks", "--ignore-not-found", "--wait")
            self.cluster.delete("Namespace", NAMESPACE, timeout=60)
        finally:
            for found in self.node.daemons().values():
                for process in found:
                    process.send(signal.SIGKILL)
            for path in self._made:
                shutil.rmtree(path, ignore_errors=True)
            # It selects nodes for the chart, and an agent that is removed without its hook leaves it.
            node = self.cluster.api.path("v1", "Node", None, self.cluster.node)
            self.cluster.api.merge_patch(node, {"metadata": {"labels": {conditions.MODE_LABEL: None}}})
