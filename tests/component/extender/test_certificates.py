"""Who may call the extender by HTTPS: a certificate of the authority is not enough, its name counts."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest

from tests.cluster.pki import Authority
from tests.component.extender.api import ClusterApi, gpus
from tests.component.extender.replicas import Scheduler, leader

# As kubeadm signs them, all by one authority.
SCHEDULER = "/CN=system:kube-scheduler"
OTHERS = {
    "kubelet": "/O=system:nodes/CN=system:node:worker-7",
    "unnamed": "/O=system:kube-scheduler",
    "twice": "/CN=system:kube-scheduler/CN=system:node:worker-7",
    "longer": "/CN=system:kube-scheduler:x",
}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("extender") / "pki")
    authority.create()
    authority.sign("extender", "/CN=extender", usage="serverAuth", alternatives="IP:127.0.0.1")
    for name, subject in {"scheduler": SCHEDULER, "second": "/CN=second-scheduler", **OTHERS}.items():
        authority.sign(name, subject, usage="clientAuth")
    return authority


@asynccontextmanager
async def serving(pki: Authority, api: ClusterApi, **flags: Any) -> AsyncIterator[Scheduler]:
    files = {
        "tls.port": 0,
        "tls.certificate": pki.folder / "extender.crt",
        "tls.key": pki.folder / "extender.key",
        "tls.clientAuthority": pki.certificate,
        "http.verbs": "false",
    }
    async with api.serving(), leader(api, **files, **flags) as scheduler:
        yield scheduler


def _context(pki: Authority, name: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pki.certificate))
    if name:
        context.load_cert_chain(pki.folder / f"{name}.crt", pki.folder / f"{name}.key")
    return context


async def _bind(scheduler: Scheduler, pki: Authority, name: str | None, pod: str) -> tuple[int, str]:
    """Status and text of a binding that a caller with this certificate asks for."""
    assert scheduler.extender.https is not None
    url = f"https://127.0.0.1:{scheduler.extender.https.port}/scheduler/bind"
    body = {"PodName": pod, "PodNamespace": "ns", "PodUID": pod, "Node": "a"}
    context = await anyio.to_thread.run_sync(_context, pki, name)
    async with aiohttp.ClientSession() as http, http.post(url, json=body, ssl=context) as reply:
        return reply.status, await reply.text()


async def test_extender_refuses_other_certificates(pki: Authority, logs: list[Any]) -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.pod("p", 20, 10)
    async with serving(pki, api) as scheduler:
        for name in OTHERS:
            for _ in range(2):
                status, text = await _bind(scheduler, pki, name, "p")
                assert status == 403, name
                assert "tls.clientNames has system:kube-scheduler" in text
        with pytest.raises(aiohttp.ClientError):
            await _bind(scheduler, pki, None, "p")
        assert api.bindings == []
        status, text = await _bind(scheduler, pki, "scheduler", "p")
        assert (status, json.loads(text)) == (200, {"Error": ""})
    assert [binding["metadata"]["name"] for binding in api.bindings] == ["p"]
    refused = [each["name"] for each in logs if each["event"] == "client_certificate_refused"]
    assert len(refused) == len(OTHERS)  # each once


async def test_other_names_are_allowed_by_option(pki: Authority) -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.pod("p", 20, 10)
    async with serving(pki, api, **{"tls.clientNames": '["second-scheduler"]'}) as scheduler:
        assert (await _bind(scheduler, pki, "scheduler", "p"))[0] == 403
        assert (await _bind(scheduler, pki, "second", "p"))[0] == 200


async def test_who_may_only_ask_binds_nothing(pki: Authority) -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    pod = api.pod("p", 20, 10)
    async with serving(pki, api, **{"tls.simulateNames": '["second-scheduler"]'}) as scheduler:
        status, text = await _bind(scheduler, pki, "second", "p")
        assert status == 403
        assert "tls.clientNames has system:kube-scheduler" in text
        question = {"Pod": pod, "NodeNames": ["a"]}
        for name, expected in (("second", 200), ("scheduler", 200), (next(iter(OTHERS)), 403)):
            assert await _status(scheduler, pki, name, "simulate", question) == expected
        assert await _status(scheduler, pki, "second", "predicates", question) == 403
    assert api.bindings == []


async def _status(scheduler: Scheduler, pki: Authority, name: str, verb: str, body: object) -> int:
    assert scheduler.extender.https is not None
    url = f"https://127.0.0.1:{scheduler.extender.https.port}/scheduler/{verb}"
    context = await anyio.to_thread.run_sync(_context, pki, name)
    async with aiohttp.ClientSession() as http, http.post(url, json=body, ssl=context) as reply:
        return reply.status


async def test_a_handshake_that_is_never_finished_is_ended(
    pki: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.web.server.HEAD_SECONDS", 0.2)
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with serving(pki, api) as scheduler:
        assert scheduler.extender.https is not None
        async with await anyio.connect_tcp("127.0.0.1", scheduler.extender.https.port) as stream:
            await stream.send(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
            with anyio.fail_after(10), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        with anyio.fail_after(10):
            while len(scheduler.extender.https.connections):
                await anyio.sleep(0.01)
