"""`kubectl gpu` on a real API server, with the rights of a tenant and of an operator."""

import http.client
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml

from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from tests.chart import helm
from tests.cluster.accounts import RBAC, acting_as
from tests.cluster.api import ApiClient
from tests.cluster.real_rig import RealRig
from tests.cluster.rig import Cluster
from tests.scenarios.mode_node import mode_node
from tests.scenarios.rig import GPU

FOREIGN = "default"
SECONDS = 60.0


def holder(name: str, namespace: str, gpus: int = 1) -> PodSpec:
    return PodSpec(name, (ContainerSpec("main", {GPU: gpus}),), namespace=namespace)


class Person:
    """A service account, and the plugin as the chart brings it, with that account's rights."""

    def __init__(self, cluster: Cluster, folder: Path, space: str, name: str, file: str) -> None:
        self.cluster, self.space, self.name = cluster, space, name
        cluster.apply(self._of("v1", "ServiceAccount", space))
        self.client: ApiClient = acting_as(cluster, space, name)
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": []},
        }
        path = f"/api/v1/namespaces/{space}/serviceaccounts/{name}/token"
        token = cluster.api.request("POST", path, request)["status"]["token"]
        document = yaml.safe_load(cluster.kubeconfig.read_text())
        document["users"] = [{**each, "user": {"token": token}} for each in document["users"]]
        self._config, self._plugin = folder / f"{name}.kubeconfig", folder / "kubectl-gpu"
        self._config.write_text(yaml.safe_dump(document))
        self._plugin.write_text(file)

    def _of(self, version: str, kind: str, namespace: str | None = None) -> dict[str, Any]:
        metadata = {"name": self.name, **({"namespace": namespace} if namespace else {})}
        return {"apiVersion": version, "kind": kind, "metadata": metadata}

    def grant(self, role: str, namespace: str | None = None) -> None:
        """A ClusterRole, in a namespace or everywhere."""
        made = self._of(f"{RBAC}/v1", "RoleBinding" if namespace else "ClusterRoleBinding", namespace)
        subject = {"kind": "ServiceAccount", "name": self.name, "namespace": self.space}
        reference = {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}
        self.cluster.apply({**made, "roleRef": reference, "subjects": [subject]})

    def started(self, *words: str) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "KUBECONFIG": str(self._config),
            "KUBECTL": str(self.cluster.parts.program("kubectl")),
        }
        return subprocess.Popen(
            self.cluster.reaching_api([sys.executable, str(self._plugin), *words]),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    async def gpu(self, *words: str) -> tuple[int, str]:
        """Run `kubectl gpu`; exit code and output."""

        def run() -> tuple[int, str]:
            with self.started(*words) as process:
                text, _ = process.communicate(timeout=SECONDS)
                return process.returncode, text

        return await anyio.to_thread.run_sync(run)

    async def says(self, wanted: Sequence[str], *words: str) -> str:
        """Run it again until it says all that is wanted: roles and annotations take a moment."""
        text = ""
        with anyio.move_on_after(SECONDS):
            while True:
                _, text = await self.gpu(*words)
                if all(each in text for each in wanted):
                    return text
                await anyio.sleep(0.5)
        raise AssertionError(f"not {wanted} in:\n{text}")


@pytest.fixture
def people(cluster: Cluster, tmp_path: Path) -> Iterator[tuple[Person, Person, dict[str, str]]]:
    """A tenant with the usual rights in a namespace, an operator of the chart, names of the chart's roles."""
    made = helm.template()
    roles = {name: helm.one(made, "ClusterRole", f"-gpu-{name}") for name in ("viewer", "operator")}
    file = helm.one(made, "ConfigMap", "-kubectl")["data"]["kubectl-gpu"]
    space = f"team-{secrets.token_hex(3)}"  # the one before is gone only after a while
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    try:
        for role in roles.values():
            cluster.apply(role)
        tenant, operator = (Person(cluster, tmp_path, space, name, file) for name in ("tenant", "operator"))
        tenant.grant("view", space)
        names = {name: role["metadata"]["name"] for name, role in roles.items()}
        operator.grant(names["operator"])
        yield tenant, operator, names
    finally:
        wide = [f"clusterrolebinding/{name}" for name in ("tenant", "operator")]
        own = [f"clusterrole/{role['metadata']['name']}" for role in roles.values()]
        cluster.kubectl("delete", *wide, *own, "--ignore-not-found")
        cluster.kubectl("delete", "namespace", space, "--wait=false")


@pytest.fixture
async def serving(rig: RealRig) -> RealRig:
    """The node offers 8 whole GPUs; 7 are held by a pod in another namespace than the tenant's."""
    await rig.start_agent({"health.kernelLog": None, **await rig.api_access()})
    await rig.wait_allocatable(8)
    foreign = holder("foreign-secret", FOREIGN, 7)
    await rig.create_pod(foreign)
    await rig.wait_running(foreign, "main")
    return rig


async def test_kubectl_gpu_explain_as_a_tenant(
    serving: RealRig, people: tuple[Person, Person, dict[str, str]]
) -> None:
    """With own rights as far as they go, and then the one missing right; with it, what each node lacks."""
    tenant, _, names = people
    waits = holder("waits", tenant.space, 2)
    await serving.create_pod(waits)
    text = await tenant.says(
        ["missing right: list nodes in the whole cluster"], "explain", f"{tenant.space}/waits"
    )
    assert f"pod {tenant.space}/waits waits" in text
    await anyio.to_thread.run_sync(tenant.grant, names["viewer"])
    text = await tenant.says(["1 of 2 GPUs free in mode pgpu"], "explain", f"{tenant.space}/waits")
    assert "it fits on none of 1 nodes" in text
    assert "foreign-secret" not in text
    mine = holder("mine", tenant.space)
    await serving.create_pod(mine)
    await serving.wait_running(mine, "main")
    text = await tenant.says(["a whole GPU"], "explain", "mine", "-n", tenant.space)
    assert f"pod {tenant.space}/mine is bound to node" in text


async def test_page_shows_no_foreign_names(
    serving: RealRig, people: tuple[Person, Person, dict[str, str]]
) -> None:
    tenant, _, names = people
    await anyio.to_thread.run_sync(tenant.grant, names["viewer"])
    mine = holder("mine", tenant.space)
    await serving.create_pod(mine)
    await serving.wait_running(mine, "main")
    await tenant.says([f"{tenant.space}/mine", "1 other"], "top", "--once", "-n", tenant.space)
    body = await anyio.to_thread.run_sync(partial(_page, tenant))
    assert f"{tenant.space}/mine" in body
    assert "foreign-secret" not in body


def _page(person: Person) -> str:
    """The document behind the page, as a browser gets it."""
    with _serving_page(person) as address:
        _, _, host, secret, _ = address.split("/")
        connection = http.client.HTTPConnection(host, timeout=30)
        try:
            connection.request("GET", f"/{secret}/view")
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read().decode()
        finally:
            connection.close()


@contextmanager
def _serving_page(person: Person) -> Iterator[str]:
    process = person.started("page", "-n", person.space)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=30)


async def test_kubectl_gpu_needs_no_exec(
    serving: RealRig, cluster: Cluster, people: tuple[Person, Person, dict[str, str]]
) -> None:
    """Every command that looks or writes works for an account that may not run anything in a pod."""
    _, operator, _ = people
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"verb": "create", "resource": "pods", "subresource": "exec"}},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = await anyio.to_thread.run_sync(operator.client.request, "POST", path, review)
    assert answer["status"]["allowed"] is False
    await operator.says([cluster.node, "1 GPUs"])
    await operator.says([f"{FOREIGN}/foreign-secret"], "top", "--once")
    await operator.says(["a whole GPU"], "explain", f"{FOREIGN}/foreign-secret")
    code, text = await operator.gpu("switch", cluster.node, "vgpu", "--dry-run")
    assert code == 0, text
    assert f"drains until these end: {FOREIGN}/foreign-secret" in text
    code, text = await operator.gpu("cordon", f"{cluster.node}/0", "--reason", "fan")
    assert code == 0, text
    await operator.says(["1 cordoned"])
    code, text = await operator.gpu("uncordon", f"{cluster.node}/0")
    assert code == 0, text


async def test_kubectl_gpu_switch_waits(
    rig: RealRig, cluster: Cluster, people: tuple[Person, Person, dict[str, str]]
) -> None:
    """It says what drains, goes on until the mode is in force, and ends with 0."""
    _, operator, _ = people
    async with mode_node(rig) as node:
        await node.want("pgpu")
        await node.reach("applied", "pgpu")
        (pod,) = await node.run("pgpu", "holds")
        await operator.says([f"{pod.namespace}/holds"], "top", "--once")
        ended: list[tuple[int, str]] = []

        async def switch() -> None:
            ended.append(await operator.gpu("switch", cluster.node, "vgpu", "--wait", "--timeout", "50s"))

        async with anyio.create_task_group() as group:
            group.start_soon(switch)
            await node.reach("switching", "vgpu")
            await anyio.sleep(2)
            assert not ended, ended
            await rig.delete_pod(pod)
        ((code, text),) = ended
        assert code == 0, text
        assert f"drains until these end: {pod.namespace}/holds" in text
        assert f"mode vgpu is in force on node {cluster.node}" in text
        assert (await node.state())["state"] == "applied"
