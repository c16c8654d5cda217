"""The documents' commands for kubectl and the agent's program, on a cluster with the chart."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.chart.documented import ROOT, How, pieces
from tests.cluster import manifests
from tests.cluster.build.parts import BUSYBOX_IMAGE
from tests.cluster.install_fixtures import (  # noqa: F401  fixtures
    audit,
    installation,
    open_cluster,
)
from tests.cluster.installation import NAMESPACE, Installation
from tests.cluster.rig import REPOSITORY
from tests.cluster.waiting import NotYet, eventually
from tests.pace import scaled

HOUR = ROOT / "docs" / "first-hour.md"
DEVELOPERS = ROOT / "docs" / "developers.md"
LIMIT = 240
"""Seconds for the body of one test (see conftest.py)."""
WAITS = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "waits"},
    "spec": {
        "nodeSelector": {"no": "node"},
        "containers": [
            {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": 1}}},
        ],
    },
}


def run(site: Installation, page: str, text: str, folder: Path) -> str:
    """One command as it stands, but for the names of NODE, POD and the namespace; what it writes."""
    said = text
    text = said.replace("-n gpu-node-agent ", f"-n {NAMESPACE} ")
    text = text.replace("--namespace gpu-node-agent", f"--namespace {NAMESPACE}")
    words = shlex.split(text)
    names = {"NODE": site.cluster.node, "N": site.cluster.node, "NAMESPACE/POD": "default/waits"}
    names["POD"], agent = "waits", ""
    if words[0] == "gpu-node-agent" or ("POD" in words and f"-n {NAMESPACE} " in text):
        names["POD"] = agent = site.ready_agent()["metadata"]["name"]
    words = [names.get(word, word).replace("=NODE", f"={site.cluster.node}") for word in words]
    kubectl = str(site.cluster.parts.program("kubectl"))
    if words[0] == "gpu-node-agent" and "explain" in words:
        words = [sys.executable, "-m", "agent", *words[1:]]
    elif words[0] == "gpu-node-agent":
        once = ["--once"] if "top" in words else []
        words = [kubectl, "-n", NAMESPACE, "exec", agent, "--", *words, *once]
    else:
        words[0] = kubectl
    environment = {**os.environ, "KUBECONFIG": str(site.cluster.kubeconfig), "HOME": str(folder)}
    done = subprocess.run(
        site.cluster.reaching_api(words),
        cwd=REPOSITORY if "config/" in text or words[0] == sys.executable else folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    # 1 and 3 of `check`: it found something in the way, or could not see it; what it found is on its output.
    codes = (0, 1, 3) if "check" in words and done.stdout else (0,)
    assert done.returncode in codes, f"{page}: {said}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wait_in_force(site: Installation, mode: str) -> None:
    """Until the node is in a mode, as a person would before going on."""

    def in_force() -> None:
        node = site.cluster.get("Node", site.cluster.node)
        if node["metadata"]["labels"].get("gpu-node-agent.io/mode") != mode:
            raise NotYet(str(node["status"]["conditions"][-1]))

    eventually(in_force, timeout=60, what=f"mode {mode} is in force", interval=0.2)


def choose_the_generation(site: Installation) -> None:
    """The affinity of docs/developers.md, by labels that the agent writes; a newer one keeps a pod away."""
    (block,) = re.findall(r"^```yaml\n(affinity:\n.*?)^```", DEVELOPERS.read_text(), re.MULTILINE | re.DOTALL)
    limits = manifests.container("main", limits={"nvidia.com/gpu": 1})
    cluster = site.cluster
    cluster.apply(manifests.pod("newer", limits, **yaml.safe_load(block)))
    cluster.wait_pod("newer", timeout=60)
    above = yaml.safe_load(block.replace('values: ["7"]', 'values: ["9"]'))  # the node's H200 are 9.0
    cluster.apply(manifests.pod("newest", limits, **above))

    def refused() -> None:
        if not any("didn't match Pod's node affinity" in event for event in cluster.events("newest")):
            raise NotYet(str(cluster.events("newest")))

    eventually(refused, timeout=60, what="the scheduler refuses the node", interval=0.2)
    for name in ("newer", "newest"):
        cluster.delete("Pod", name, grace_seconds=0)


def test_documented_commands_work(installation: Installation, tmp_path: Path) -> None:  # noqa: F811
    site = installation
    site.label("pgpu")
    site.install()
    site.ready_agent()
    choose_the_generation(site)
    site.cluster.apply(WAITS)
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_text("none")
    found = [each for each in pieces() if each.rule and each.rule.how is How.CLUSTER]
    for piece in found:
        if piece.text.startswith("kubectl label node") and "--overwrite" not in piece.text:
            key, given, _ = piece.text.split()[4].partition("=")
            if given:
                site.cluster.kubectl("label", "node", site.cluster.node, f"{key}-")  # as without it
        run(site, piece.page, piece.text, tmp_path)
        if mode := re.search(r"nvidia-device-enable=(pgpu|vgpu|mps)", piece.text):
            wait_in_force(site, mode[1])
        if piece.text.startswith("kubectl apply"):
            name = Path(piece.text.split()[-1]).stem
            site.cluster.delete("Pod", name, grace_seconds=0)
    print(f"{len(found)} documented commands executed")


STEP = re.compile(r"^((?: {4}\S[^\n]*\n)+)\n```text\n(.*?)```", re.MULTILINE | re.DOTALL)


def test_first_hour_is_true(installation: Installation, tmp_path: Path) -> None:  # noqa: F811
    """Each command of the page in its order; what is shown below it is what one sees."""
    site, text = installation, HOUR.read_text()
    site.install()
    for pod in (REPOSITORY / "config" / "examples" / "first-hour").glob("*.yaml"):
        (tmp_path / pod.name).write_text(re.sub(r"image: \S+", f"image: {BUSYBOX_IMAGE}", pod.read_text()))
    found = STEP.findall(text)
    assert sum(len(block.splitlines()) for block, _ in found) == len(re.findall(r"^    ", text, re.MULTILINE))
    for block, shown in found:
        commands = block.replace("config/examples/first-hour", str(tmp_path)).split("\n")[:-1]
        gaps = [re.escape(each.replace("NODE", site.cluster.node)) for each in shown.split("...")]
        expected = re.compile(".*".join(gaps), re.DOTALL)
        *before, last = [each.strip() for each in commands]
        seen = "".join(_lines(run(site, HOUR.name, each, tmp_path)) for each in before)
        deadline = time.monotonic() + scaled(10)
        while not expected.fullmatch(seen + (end := _lines(run(site, HOUR.name, last, tmp_path)))):
            # A pod is Ready before its container has written all that it has to say.
            assert last.startswith("kubectl logs"), f"{block}\n{seen}{end}"
            assert time.monotonic() < deadline, f"{block}\n{seen}{end}"
            time.sleep(0.5)


def _lines(text: str) -> str:
    return text.rstrip("\n") + "\n"
