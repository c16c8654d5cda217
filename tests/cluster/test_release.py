"""The parts of a release: workflows, bill of materials, and an installation from a registry by README."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.build import release_tools
from tests.cluster.installation import MODE_LABEL, Node
from tests.cluster.oci_registry import registry
from tests.cluster.options import Options
from tests.cluster.rig import REPOSITORY, Cluster, logs_folder
from tests.cluster.waiting import NotYet, RigError, eventually
from tests.nvml_double.build import STATE_VARIABLE
from tests.pace import scaled

NAMESPACE = "gpu-node-agent"
PLACEHOLDER = "registry.example.com/gpu/"
VERBS = ("make image", ".ci/release ", "helm ", "kubectl ")
LIMIT = 300
"""Seconds for the body of one test (see conftest.py): `make image`, then an installation and its end."""


@pytest.fixture(scope="module")
def linter() -> Path:
    """Built if missing, which takes minutes: a fixture's time is not the test's."""
    return release_tools.program(release_tools.ACTIONLINT)


@pytest.fixture(scope="module")
def registry_program() -> Path:
    """The same of the registry."""
    return release_tools.program(release_tools.REGISTRY)


def test_workflows_are_valid(linter: Path) -> None:
    """By actionlint, which knows the syntax, the contexts and the inputs of well-known actions."""
    files = sorted((REPOSITORY / ".github" / "workflows").glob("*.yaml"))
    assert {file.name for file in files} >= {"test.yaml", "release.yaml"}
    argv = [str(linter), "-no-color", *map(str, files)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_bill_of_materials_names_what_the_image_holds(archive: Path) -> None:
    argv = [str(REPOSITORY / ".ci" / "sbom"), str(archive)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    urls = [each["purl"] for each in bill["components"]]
    assert len(urls) == len(set(urls))
    lock = (REPOSITORY / "requirements.lock").read_text()
    pinned = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    locked = {f"pkg:pypi/{name.lower()}@{version}" for name, version in pinned}
    assert {url for url in urls if url.startswith("pkg:pypi/")} == locked
    debian = {url.split("/")[-1].split("@")[0] for url in urls if url.startswith("pkg:deb/")}
    assert debian >= {"libc6", "libssl3", "ca-certificates"}
    assert any(url.startswith("pkg:golang/github.com/NVIDIA/nvidia-container-toolkit@v") for url in urls)


def documented_commands() -> list[str]:
    """Commands of README's section Install, in order, continued lines joined and comments cut."""
    text = (REPOSITORY / "README.md").read_text()
    section = re.search(r"^## Install$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    joined = re.sub(r"\\\n\s*", " ", section[1])
    lines = [line.strip().split("  #")[0].rstrip() for line in joined.splitlines()]
    return [line for line in lines if line.startswith(VERBS)]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One that has no image of the agent."""
    made = Cluster(request.getfixturevalue("parts"), Options(private_network=True))
    try:
        made.up()
    except RigError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        yield made
    finally:
        if request.session.testsfailed:
            made.save_logs(logs_folder())
        made.down()


def test_documented_install_commands_work_from_a_registry(
    cluster: Cluster, registry_program: Path, archive: Path
) -> None:
    """As they stand, with the registry's name replaced.

    The rig adds values for its simulated driver, and that its registry has no TLS.
    """
    commands = documented_commands()
    kinds = [command.split()[0] for command in commands]
    assert kinds.index("make") < kinds.index(".ci/release") < kinds.index("helm") < kinds.index("kubectl")
    seen: set[str] = set()
    with (
        tempfile.TemporaryDirectory(prefix="rel-", dir=cluster.layout.root) as name,
        registry(cluster, registry_program) as address,
    ):
        folder = Path(name)
        values = rig_values(Node(cluster, folder), folder)
        for command in commands:
            words = command.replace(PLACEHOLDER, f"{address}/gpu/").replace("NODE", cluster.node)
            assert "example" not in words, f"{command!r} holds another placeholder"
            if words.startswith("helm install"):
                words += f" --values={values} --plain-http --wait --timeout={scaled(60):.0f}s"
            if " POD" in words:
                words = words.replace(" POD", f" {agents(cluster)[0]['metadata']['name']}")
            run(cluster, folder, words)
            if words.startswith("kubectl label"):
                wait_offered(cluster)
            seen |= {pod["spec"]["containers"][0]["image"] for pod in agents(cluster)}
    (image,) = seen
    assert image.startswith(f"{address}/gpu/gpu-node-agent:")


def rig_values(node: Node, folder: Path) -> Path:
    """Needs of this machine beside the documented values: a simulated driver, the node's network."""
    machine = str(folder / "machine")
    values = {
        "hostNetwork": True,
        "driver": {"source": "host"},
        "cleanup": {"timeoutSeconds": 90},
        "extraEnv": [{"name": STATE_VARIABLE, "value": machine}],
        "extraVolumes": [{"name": "machine", "hostPath": {"path": machine, "type": "File"}}],
        "extraVolumeMounts": [{"name": "machine", "mountPath": machine}],
        "config": {"driver": {"library": f"/host{node.library}"}, "injection": {"strategy": "cdi"}},
    }
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def run(cluster: Cluster, folder: Path, command: str) -> None:
    """A documented command, by a shell in the repository, with the cluster as the user's own."""
    home = folder / "home"
    beside = REPOSITORY / ".venv" / "bin"
    environment = {
        "PATH": f"{beside}:{cluster.parts.search_path}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/root"),
        "KUBECONFIG": str(cluster.kubeconfig),
        "REGISTRY_OPTIONS": "plain-http",
        "HELM_CACHE_HOME": str(home / "cache"),
        "HELM_CONFIG_HOME": str(home / "config"),
        "HELM_DATA_HOME": str(home / "data"),
    }
    # The image is built on the machine's own network.
    argv = ["bash", "-c", command]
    done = subprocess.run(
        argv if command.startswith("make") else cluster.reaching_api(argv),
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def agents(cluster: Cluster) -> list[dict[str, Any]]:
    """The agent's pods."""
    selector = "app.kubernetes.io/component=agent"
    return cluster.find_all("Pod", namespace=NAMESPACE, labelSelector=selector)


def wait_offered(cluster: Cluster) -> None:
    """Until the node offers what the mode of the documented label offers."""

    def offered() -> None:
        node = cluster.get("Node", cluster.node)
        found = [
            name for name, amount in node["status"]["allocatable"].items() if "/" in name and amount != "0"
        ]
        if not found:
            raise NotYet(f"{node['metadata']['labels'].get(MODE_LABEL)}: {agents(cluster)}"[:2000])

    eventually(offered, timeout=90, what="the node offers GPUs", interval=0.2)
