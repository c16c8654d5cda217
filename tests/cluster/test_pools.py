"""A release over its life: pools of nodes, a newer build, and the end, which leaves nothing."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.mps.launch import CGROUP
from tests.chart import helm
from tests.cluster import made_up
from tests.cluster.build import agent_image
from tests.cluster.install_fixtures import audit, installation, open_cluster
from tests.cluster.installation import NAMESPACE, RELEASE, Installation
from tests.cluster.rig import REPOSITORY, Cluster
from tests.cluster.test_install import (
    SHARES,
    UPGRADE,
    allocatable,
    assert_nothing_is_left,
    containers,
    start_pods,
    wait_sold,
)
from tests.cluster.waiting import NotYet, eventually

__all__ = ["audit", "installation", "open_cluster"]

POOL = "gpu-node-agent.io/pool"
KIND = "test/kind"
POOLS = [
    {"name": name, "preset": "host", "nodeSelector": {KIND: name}, "config": {"defaultMode": mode}}
    for name, mode in (("first", "pgpu"), ("second", "vgpu"))
]


def label(installation: Installation, value: str | None, key: str = KIND, node: str = "") -> None:
    """Give a node a label, or take it away."""
    cluster = installation.cluster
    path = cluster.api.path("v1", "Node", None, node or cluster.node)
    cluster.api.merge_patch(path, {"metadata": {"labels": {key: value}}})


def served_by(installation: Installation, pool: str | None, mode: str) -> dict[str, Any]:
    """The node's agent once it is the one of a pool, alone there, and its mode is in force."""
    node = installation.cluster.node

    def there() -> dict[str, Any]:
        found = [each for each in installation.pods("agent") if each["spec"].get("nodeName") == node]
        labels = installation.cluster.get("Node", node)["metadata"]["labels"]
        pools = [each["metadata"]["labels"].get(POOL) for each in found]
        if pools != [pool] or labels.get("gpu-node-agent.io/mode") != mode:
            raise NotYet(f"agents of pools {pools}, {labels}; {installation.agent_log()}")
        (status,) = found[0]["status"]["containerStatuses"]
        # None of them ran beside another, or it would have given up.
        assert status["restartCount"] == 0
        return found[0]

    return eventually(there, timeout=60, what=f"pool {pool} in mode {mode}", interval=0.2)


def test_two_pools_one_release(installation: Installation) -> None:
    """A release that gets pools keeps its DaemonSet; nodes come, go, and change; pods with GPUs run on."""
    cluster = installation.cluster
    installation.install("--set-json=affinity=null", "--set=config.defaultMode=pgpu")
    served_by(installation, None, "pgpu")
    wait_sold(cluster, "nvidia.com/gpu")
    start_pods(cluster, "whole")
    before = containers(cluster)
    uid = daemonsets(cluster)[RELEASE]

    installation.helm(*UPGRADE, f"--set-json=pools={json.dumps(POOLS)}", "--wait")
    assert daemonsets(cluster)[RELEASE] == uid
    assert len(daemonsets(cluster)) == 3
    served_by(installation, None, "pgpu")

    label(installation, "first")
    served_by(installation, "first", "pgpu")
    label(installation, "second")
    # The pod's GPU waits for its end; the node says what it waits for.
    served_by(installation, "second", "switching")
    made_up.node(cluster, "node2")
    try:
        label(installation, "first", node="node2")
        eventually(lambda: bound(installation, "node2", ["first"]), timeout=30, what="the node that joined")
        label(installation, None, node="node2")
        eventually(lambda: bound(installation, "node2", [None]), timeout=30, what="the node of no pool")
    finally:
        cluster.delete("Node", "node2")
        for pod in installation.pods("agent"):
            if pod["spec"].get("nodeName") == "node2":
                cluster.delete("Pod", pod["metadata"]["name"], namespace=NAMESPACE, grace_seconds=0)
    label(installation, None)
    served_by(installation, None, "pgpu")
    assert containers(cluster) == before

    installation.helm("uninstall", RELEASE, "--wait", "--timeout=100s")
    assert_nothing_is_left(installation)


def daemonsets(cluster: Cluster) -> Mapping[str, str]:
    """UIDs of the release's DaemonSets, by name."""
    found = cluster.find_all("DaemonSet", namespace=NAMESPACE, api_version="apps/v1")
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}


def bound(installation: Installation, node: str, wanted: list[str | None]) -> None:
    """Raise NotYet unless the pods for a node without a kubelet are of these pools."""
    pools = []
    for pod in installation.pods("agent"):
        if pod["spec"].get("nodeName") == node:
            if "deletionTimestamp" in pod["metadata"]:  # nobody ends it there
                name = pod["metadata"]["name"]
                installation.cluster.delete("Pod", name, namespace=NAMESPACE, grace_seconds=0)
            pools.append(pod["metadata"]["labels"].get(POOL))
    if pools != wanted:
        raise NotYet(str(pools))


def chart_of(version: str, folder: Path) -> str:
    """The chart as a build of that version has it (`.ci/release chart`)."""
    versions = (f"--version={version}", f"--app-version={version}")
    helm.run("package", str(helm.CHART), *versions, f"--destination={folder}")
    return str(folder / f"gpu-node-agent-{version}.tgz")


def test_upgrade_from_last_build_rolls(installation: Installation, tmp_path: Path) -> None:
    """By `helm upgrade` alone: neither tag nor digest is named, and nodes pull only what they lack."""
    cluster = installation.cluster
    release = REPOSITORY / ".ci" / "release"
    now = subprocess.run([str(release), "version"], capture_output=True, text=True, check=True, timeout=60)
    before, after = "0.3.0-dev.1.g0000000", now.stdout.strip()
    assert before != after
    repository = agent_image.IMAGE.rpartition(":")[0]
    with tags(cluster, f"{repository}:{before}", f"{repository}:{after}"):
        fixed = ("--set=image.tag=", "--set=image.pullPolicy=IfNotPresent")
        installation.install(*fixed, chart=chart_of(before, tmp_path))
        installation.label("pgpu")
        first = installation.ready_agent()
        wait_sold(cluster, "nvidia.com/gpu")
        start_pods(cluster, "whole")
        running = containers(cluster)

        upgrade = ("upgrade", RELEASE, chart_of(after, tmp_path), "--reset-then-reuse-values", "--wait")
        installation.helm(*upgrade)
        second = installation.ready_agent(other_than=first["metadata"]["uid"])
        assert second["spec"]["containers"][0]["image"] == f"{repository}:{after}"
        assert second["metadata"]["labels"]["app.kubernetes.io/version"] == after
        installation.helm(*upgrade)  # the same once more rolls nothing
        assert installation.ready_agent()["metadata"]["uid"] == second["metadata"]["uid"]
        assert containers(cluster) == running


@contextmanager
def tags(cluster: Cluster, *names: str) -> Iterator[None]:
    """Further names of the agent's image on the node."""
    ctr = [*cluster._ctr, "--namespace=k8s.io", "images"]
    for name in names:
        cluster.namespace.run([*ctr, "tag", "--force", agent_image.IMAGE, name])
    try:
        yield
    finally:
        cluster.namespace.run([*ctr, "rm", *names])


LEFT = {
    "/run/gpu-node-agent": "dir",
    "/run/gpu-node-agent/agent.lock": "file",
    "/var/lib/gpu-node-agent": "dir",
    "/etc/cdi": "dir",
}
"""No pod can remove what it has mounted: docs/install.md names the same."""
MADE = {
    "/run/gpu-node-agent",
    "/run/cdi",
    "/var/lib/gpu-node-agent",
    "/var/lib/kubelet/plugins_registry",
    "/etc/cdi",
}
"""Folders of the host below which the agent makes everything that it makes: docs/install.md names them."""
LOOKED_AT = (*MADE, "/run", "/usr/local/nvidia", "/var/lib/kubelet/device-plugins")
"""Where the agent's pods may write; the rest of the machine has other users, too."""
OTHERS = (
    *("/run/containerd", "/run/netns", "/run/cni", "/run/runc", "/run/nri"),
    "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
)
"""Every container brings these about; the last one the kubelet, with the first device of any plugin."""


def host(cluster: Cluster) -> dict[str, str]:
    """Kind of each file of the node, and the agent's mounts, as the node itself sees them."""
    listing = 'find "$@" -xdev -printf "%y %p\\n" 2>/dev/null; cat /proc/self/mountinfo'
    found: dict[str, str] = {}
    for line in cluster.namespace.run(["sh", "-c", listing, "sh", *LOOKED_AT], timeout=60).splitlines():
        kind, _, path = line.partition(" ")
        if len(kind) > 1 or kind.isdigit():
            target = line.split()[4]
            # The node's folders have another path beside, on this machine.
            found |= {f"mount {target}": "mount"} if target.startswith(tuple(MADE)) else {}
        elif not path.startswith(OTHERS):
            found[path] = {"d": "dir", "f": "file"}.get(kind, kind)
    return found


# What agents write on their node.
AGENTS = ("annotations gpu-node-agent.io/", "condition GPUModeReady", "labels cuda-", "labels nvidia.com/")


def objects(cluster: Cluster) -> set[str]:
    """All objects of all kinds that a release makes, and what is said of the node."""
    listed = cluster.kubectl("api-resources", "--verbs=list", "--output=name").split()
    passing = ("events", "leases", "endpoints", "pods.metrics", "componentstatuses", "controllerrevisions")
    kinds = ",".join(kind for kind in listed if not kind.startswith(passing))
    named = cluster.kubectl(
        "get", kinds, "--all-namespaces", "--output=name", "--ignore-not-found", timeout=60
    )
    node = cluster.get("Node", cluster.node)
    of_node = [
        f"{part} {key}" for part in ("labels", "annotations") for key in node["metadata"].get(part, {})
    ]
    of_node += [f"condition {each['type']}" for each in node["status"]["conditions"]]
    of_node += [f"taint {each['key']}" for each in node["spec"].get("taints", [])]
    return {*named.split("\n"), *of_node, *(f"{name} {n}" for name, n in allocatable(cluster).items() if n)}


def test_uninstall_leaves_the_host_as_it_was(installation: Installation) -> None:
    """By lists of every path and object before, during and after; all modes were used meanwhile."""
    cluster = installation.cluster
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    eventually(lambda: has_account(cluster), timeout=30, what="the namespace's own objects")
    before, known = host(cluster), objects(cluster)

    installation.install()
    installation.label("mixed")
    installation.ready_agent()
    wait_sold(cluster, *(resource for limits in SHARES.values() for resource in limits))
    start_pods(cluster, *SHARES)
    during = host(cluster)
    made = {path.removeprefix("mount ") for path in during.keys() - before.keys()}
    assert {path for path in made if not path.startswith(tuple(MADE))} == set()
    for name in SHARES:
        cluster.delete("Pod", name, grace_seconds=1)

    installation.helm("uninstall", RELEASE, "--wait", "--timeout=100s")
    installation.label(None)
    assert_nothing_is_left(installation)
    after = host(cluster)
    # On a machine that had an agent before, nothing at all is new.
    left = {path: kind for path, kind in LEFT.items() if path not in before}
    assert {path: kind for path, kind in after.items() if path not in before} == left
    # What an agent of before had left there is cleaned up, too.
    gone = {path.removeprefix("mount ") for path in before if path not in after}
    assert {path for path in gone if not path.startswith(tuple(MADE))} == set()
    eventually(lambda: same(known, objects(cluster)), timeout=30, what="the objects of before")
    cgroup = Path("/sys/fs/cgroup") / CGROUP
    # Daemons of another cluster of this machine may be in it.
    assert not cgroup.exists() or (cgroup / "cgroup.procs").read_text()


def has_account(cluster: Cluster) -> None:
    if cluster.find("ServiceAccount", "default", namespace=NAMESPACE) is None:
        raise NotYet("no account")
    if cluster.find("ConfigMap", "kube-root-ca.crt", namespace=NAMESPACE) is None:
        raise NotYet("no certificate")


def same(before: set[str], after: set[str]) -> None:
    """Remains of an agent of before may go: they are cleaned up, too."""
    less = {each for each in before - after if not each.startswith(AGENTS)}
    if less or after - before:
        raise NotYet(f"more: {sorted(after - before)}; less: {sorted(less)}")


def test_the_documents_name_every_path() -> None:
    page = (REPOSITORY / "docs" / "install.md").read_text()
    table = page.split("| on the node | after the uninstall |")[1].split("\n\n")[0]
    for path in (*MADE, "agent.lock"):
        assert path.replace("/run/cdi", "/var/run/cdi") in table
