"""Modules that the lean client imports: in a fresh interpreter, since tests have imported many more."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROBE = """
import asyncio, json, sys
import aiohttp, anyio.to_thread, ssl, yaml, six, dateutil.parser  # counted elsewhere

def private():
    text = open("/proc/self/smaps_rollup").read()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty"))

from agent.cluster import api, lean
before = private()

async def main():
    for _ in range(2):  # a second time must do no harm
        made = await lean.configuration({kubeconfig})
    connection = api.KubeApi(made, lean.rest_client(made))
    await connection.close()
    return made

made = asyncio.run(main())
names = sorted(name for name in sys.modules if name.startswith("kubernetes_asyncio"))
late = [name for name in sys.modules if name.startswith("urllib3")]
found = dict(names=names, late=late, kib=private() - before, host=made.host, token=made.api_key)
made.username, made.password = "somebody", "secret"
print(json.dumps(dict(found, basic=made.get_basic_auth_token())))
"""
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: k, user: u}}]
clusters: [{name: k, cluster: {server: "https://192.0.2.1:6443"}}]
users: [{name: u, user: {token: secret}}]
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("lean") / "kubeconfig"
    file.write_text(KUBECONFIG)
    code = PROBE.replace("{kubeconfig}", f"__import__('pathlib').Path({str(file)!r})")
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_few_modules_and_no_model(probed: dict[str, Any]) -> None:
    assert len(probed["names"]) < 15
    assert not [name for name in probed["names"] if name.startswith("kubernetes_asyncio.client.models")]
    assert not [name for name in probed["names"] if name.startswith("kubernetes_asyncio.client.api")]


def test_urllib3_is_loaded_only_when_it_is_used(probed: dict[str, Any]) -> None:
    assert probed["late"] == []
    assert probed["basic"].startswith("Basic ")


def test_little_memory(probed: dict[str, Any]) -> None:
    assert probed["kib"] < 8 * 1024


def test_a_kubeconfig_is_read(probed: dict[str, Any]) -> None:
    assert probed["host"] == "https://192.0.2.1:6443"
    assert probed["token"] == {"BearerToken": "Bearer secret"}


def test_a_kubeconfig_that_is_none(tmp_path: Path) -> None:
    code = (
        "import asyncio, pathlib; from agent.cluster import lean\n"
        "try: asyncio.run(lean.configuration(pathlib.Path('/nonexistent/config')))\n"
        "except lean.NoClusterAccess as error: print(error)"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("kubeconfig /nonexistent/config cannot be used: [Errno 2]")
