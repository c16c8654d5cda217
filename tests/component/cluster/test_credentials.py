"""The service account's token, and places where there is no cluster."""

import os
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.cluster import lean
from agent.cluster.api import ApiUnavailable, KubeApi
from tests.component.cluster.server import FakeApi, objects


async def test_the_service_accounts_token_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are replaced hourly; the file may be missing for a moment."""
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    authority.write_text("unused")
    await anyio.to_thread.run_sync(lean._empty)
    from kubernetes_asyncio.config import incluster_config

    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    configured = await lean.configuration(None)
    assert configured.host == "https://127.0.0.1:6443"
    configured.ssl_ca_cert = None
    fake = FakeApi()
    fake.script("/x", objects({}))
    async with fake.serving():
        configured.host = fake.url
        api = KubeApi(configured, lean.rest_client(configured))
        loader = configured.refresh_api_key_hook.__closure__[0].cell_contents
        await api.get("/x")
        token.write_text("second")
        await api.get("/x")
        loader.token_expires_at = loader.token_expires_at.replace(year=2000)
        await api.get("/x")
        assert [one.headers["authorization"] for one in fake.asked] == [
            "Bearer first",
            "Bearer first",
            "Bearer second",
        ]
        token.unlink()
        loader.token_expires_at = loader.token_expires_at.replace(year=2000)
        with pytest.raises(ApiUnavailable, match="the credentials for the API server cannot be read"):
            await api.get("/x")
        await api.close()


async def test_where_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(lean.NoClusterAccess, match="KUBERNETES_SERVICE_HOST is not set"):
        await lean.configuration(None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    if not os.path.exists("/var/run/secrets/kubernetes.io"):  # noqa: ASYNC240, PTH110
        with pytest.raises(lean.NoClusterAccess, match="the pod's service account cannot be used"):
            await lean.configuration(None)
