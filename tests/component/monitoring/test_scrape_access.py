"""Metrics over HTTPS, for tokens that an API server reviews: over real sockets."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import anyio
import anyio.to_thread
import pytest
from aiohttp import web

from agent.cluster.reviews import ACCESS, TOKENS, Reviews
from agent.kit.tasks import FatalError
from agent.telemetry.access import PATH, ScraperAdmission
from agent.web import certificates
from agent.web.certificates import Certificates, Files
from agent.web.server import HttpRequest, HttpServer, Reply
from tests.cluster.pki import Authority
from tests.component.cluster.server import FakeApi, client, status

HANG_SECONDS = 60.0  # ends a test that hangs: a busy machine needs more than the product waits
USER = {"username": "prometheus", "uid": "u", "groups": ["g"], "extra": {"e": ["x"]}}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("agent") / "pki")
    authority.create()
    for name in ("agent", "renewed"):
        authority.sign(name, f"/CN={name}", usage="serverAuth", alternatives="IP:127.0.0.1")
    return authority


async def reviewed(request: web.Request) -> web.StreamResponse:
    token = (await request.json())["spec"]["token"]
    known = token in ("good", "other")
    return web.json_response(
        {"status": {"authenticated": known, "user": USER if known else {}, "error": "no"}}
    )


async def judged(request: web.Request) -> web.StreamResponse:
    spec = (await request.json())["spec"]
    assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
    assert {"username": spec["user"], **{key: spec[key] for key in ("uid", "groups", "extra")}} == USER
    return web.json_response({"status": {"allowed": True}})


@asynccontextmanager
async def serving(api: FakeApi, files: Files) -> AsyncIterator[tuple[str, Certificates]]:
    """The address of a page behind the API server's word."""
    held = await anyio.to_thread.run_sync(Certificates, files, "no remedy")

    async def page(_: HttpRequest) -> Reply:
        return Reply.text("figures of pods")

    async with api.serving(), client(api.url) as connected, anyio.create_task_group() as group:
        server = HttpServer("127.0.0.1", 0, held.context)
        admission = ScraperAdmission(Reviews(connected, PATH, HANG_SECONDS).review, anyio.current_time)
        server.add_route("/metrics", admission.guarded(page))
        port = await group.start(server.serve)
        group.start_soon(held.follow)
        yield f"https://127.0.0.1:{port}/metrics", held
        group.cancel_scope.cancel()


async def get(url: str, pki: Authority, token: str | None) -> tuple[int, str]:
    """Status and text."""
    context = await anyio.to_thread.run_sync(lambda: ssl.create_default_context(cafile=str(pki.certificate)))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers, ssl=context) as reply:
        return reply.status, await reply.text()


async def shown(url: str) -> str:
    """The certificate that the server shows."""
    port = int(url.rpartition(":")[2].partition("/")[0])
    return await anyio.to_thread.run_sync(ssl.get_server_certificate, ("127.0.0.1", port))


async def test_a_token_is_reviewed_with_all_that_the_api_server_knows_of_its_holder(pki: Authority) -> None:
    api = FakeApi()
    api.script(TOKENS, reviewed)
    api.script(ACCESS, judged)
    async with serving(api, Files(str(pki.folder / "agent.crt"), str(pki.folder / "agent.key"))) as (url, _):
        assert (await get(url, pki, None))[0] == 401
        assert api.asked == []
        assert await get(url, pki, "good") == (200, "figures of pods\n")
        code, text = await get(url, pki, "forged")
        assert (code, "figures" in text) == (401, False)
        assert len(api.of(ACCESS)) == 1
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.get(url.replace("https", "http")):
                pass


@pytest.mark.parametrize("broken", [TOKENS, ACCESS])
async def test_without_an_answer_nobody_new_is_admitted(pki: Authority, broken: str) -> None:
    async def nonsense(_: web.Request) -> web.StreamResponse:
        return web.json_response({"status": {"allowed": "yes", "authenticated": "yes"}})

    api = FakeApi()
    api.script(TOKENS, *([status(403, "no right"), nonsense] if broken == TOKENS else [reviewed]))
    api.script(ACCESS, *([status(500, "broken"), nonsense] if broken == ACCESS else [judged]))
    async with serving(api, Files(str(pki.folder / "agent.crt"), str(pki.folder / "agent.key"))) as (url, _):
        for _ in range(2):
            code, text = await get(url, pki, "good")
            assert code == 503
            assert "does not say whether the token is good" in text


async def test_a_renewed_certificate_is_taken_up(
    pki: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.05)
    folder = tmp_path_factory.mktemp("secret")

    def put(name: str) -> None:
        for kind in ("crt", "key"):
            (folder / f"new.{kind}").write_bytes((pki.folder / f"{name}.{kind}").read_bytes())
            (folder / f"new.{kind}").replace(folder / f"tls.{kind}")

    await anyio.to_thread.run_sync(put, "agent")
    async with serving(FakeApi(), Files(str(folder / "tls.crt"), str(folder / "tls.key"))) as (url, _):
        before = await shown(url)
        await anyio.to_thread.run_sync(put, "renewed")
        with anyio.fail_after(10):
            while await shown(url) == before:
                await anyio.sleep(0.05)
        assert (await get(url, pki, None))[0] == 401


async def test_a_certificate_that_is_not_there_is_named_with_the_remedy() -> None:
    files = Files("/nowhere/tls.crt", "/nowhere/tls.key")
    with pytest.raises(FatalError, match=r"/nowhere/tls\.crt and /nowhere/tls\.key .* set https\.port: null"):
        await anyio.to_thread.run_sync(Certificates, files, "set https.port: null")
