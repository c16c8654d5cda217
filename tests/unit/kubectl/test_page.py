"""The page of `kubectl gpu page`: who gets it, what it asks for, how long it takes to draw."""

import http.client
import re
from collections.abc import Callable
from typing import Any

import pytest

from agent.kubectl import page as page_module
from agent.kubectl.cluster import cluster_view
from agent.kubectl.kube import KubectlFailed
from agent.kubectl.page import PAGE_HTML, Page, policy
from agent.kubectl.view import HOLDERS
from tests.browser import browser, served
from tests.pace import scaled
from tests.unit.kubectl.clusters import gpu, node, pod, viewer

TILES = "[...document.querySelectorAll('.gpu')].map((one) => one.getAttribute('aria-label'))"
DRAWN = "document.body?.dataset.drawn"
FOCUSED = "document.activeElement.dataset.key"


def of(nodes: list[dict[str, Any]], pods: list[dict[str, Any]], own: str | None = None) -> Callable[[], Any]:
    get = viewer(nodes, pods, own)
    return lambda: cluster_view(get, own or "default")


def small() -> Callable[[], Any]:
    nodes = [node("a", gpu(0, ("team/mine", 30, 16), ("foe/secret", 60, 100)), gpu(1, bad="Xid 79"))]
    return of(nodes, [pod("team/mine", node="a"), pod("team/<b>waits</b>", 50, 16)], "team")


def fetched(page: Page, path: str, host: str = "") -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=scaled(10))
    try:
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{page.port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_only_who_knows_the_path_and_asks_this_machine_is_answered() -> None:
    with Page(small()) as page:
        whole = f"/{page.secret}/"
        assert len(page.secret) > 30
        status, headers, text = fetched(page, whole)
        assert (status, text) == (200, PAGE_HTML)
        assert headers["Content-Security-Policy"] == policy(PAGE_HTML)
        assert "foe" not in fetched(page, f"{whole}view", f"localhost:{page.port}")[2]
        for path in ("/", "/view", f"/{page.secret}x/view", f"{whole}../etc/passwd", "/%E2%82%AC/view"):
            assert fetched(page, path)[0] == 404, path
        for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1", f"127.0.0.1:{page.port + 1}"):
            assert fetched(page, f"{whole}view", host)[0] == 421, host


def test_the_policy_allows_nothing_else() -> None:
    found = policy(PAGE_HTML)
    assert "unsafe" not in found
    assert "default-src 'none'" in found
    assert not re.findall(r"(?:https?:)?//[a-z]", re.sub(r"<!--.*?-->", "", PAGE_HTML))
    assert not re.search(r"\s(?:style|on\w+)=|innerHTML|<img|<link|@import|url\(", PAGE_HTML)


async def test_page_has_no_external_request() -> None:
    """And nothing in it runs that others wrote; by keyboard and by a screen reader all can be reached."""
    async with served(small()) as page, browser(dark=True) as tab:
        await tab.open(page.address)
        await tab.until(DRAWN)
        tiles = await tab.value(TILES)
        assert tiles == [
            "GPU 0, mode vgpu, healthy, 90 of 100 used, held by team/mine, 1 other",
            "GPU 1, mode vgpu, unhealthy: Xid 79, 0 of 100 used, free",
        ]
        shown = await tab.value("document.body.innerText")
        assert "team/<b>waits</b>" in shown
        assert "missing right: list pods in the whole cluster" in shown
        assert await tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        await tab.press("Tab")
        assert await tab.value(FOCUSED) == "GPU-a-0"
        await tab.press("ArrowRight")
        assert await tab.value(FOCUSED) == "GPU-a-1"
        await tab.until(f"document.querySelectorAll('.gpu').length && {FOCUSED} === 'GPU-a-1'")
        assert await tab.value("document.getElementById('state').getAttribute('role')") == "status"
        assert tab.requests
        foreign = [each for each in tab.requests if not each.startswith(page.address)]
        assert [each for each in foreign if not each.endswith("/favicon.ico")] == []
        complaints = [each for each in tab.complaints if "favicon" not in each and "404" not in each]
        assert complaints == []


async def test_page_100_nodes() -> None:
    """100 nodes of 8 GPUs are drawn in less than a second of the browser's own time."""
    nodes = [
        node(f"n{at:03}", *(gpu(each, (f"team/p{at}", 30, 16), node=f"n{at}") for each in range(8)))
        for at in range(100)
    ]
    ask = of(nodes, [pod(f"team/p{at}", node=f"n{at:03}") for at in range(100)])
    async with served(ask) as page, browser() as tab:
        await tab.open(page.address)
        await tab.until(DRAWN)
        assert await tab.value("document.querySelectorAll('.gpu').length") == 800
        assert float(await tab.value("document.body.dataset.drawnMilliseconds")) < scaled(1000)


async def test_what_cannot_be_read_now_stays_as_last_known() -> None:
    away = False
    usual = small()

    def ask() -> Any:
        if away:
            raise KubectlFailed("the server is away")
        return usual()

    async with served(ask) as page, browser() as tab:
        await tab.open(page.address)
        await tab.until(DRAWN)
        away = True
        await tab.until("document.getElementById('state').textContent.startsWith('as last known, of 20')")
        assert "the server is away" in await tab.value("document.body.innerText")
        assert await tab.value("document.querySelectorAll('.gpu').length") == 2
        away = False
        await tab.until("document.getElementById('state').textContent.startsWith('1 nodes')")


async def test_the_page_calls_no_gpu_free_whose_holders_are_not_known() -> None:
    old = node("a", gpu(0))
    del old["metadata"]["annotations"][HOLDERS]
    async with served(of([old], [])) as page, browser() as tab:
        await tab.open(page.address)
        await tab.until(DRAWN)
        assert await tab.value(TILES) == ["GPU 0, mode vgpu, healthy, holders not known"]


def test_windows_share_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "NEWEST_SECONDS", 60.0)  # for as long as a busy machine needs
    count = 0

    def ask() -> Any:
        nonlocal count
        count += 1
        return {"nodes": []}

    with Page(ask) as page:
        for _ in range(5):
            assert fetched(page, f"/{page.secret}/view")[0] == 200
    assert count == 1


@pytest.mark.parametrize("colour", ["light", "dark"])
def test_both_colour_schemes_have_every_colour(colour: str) -> None:
    light, dark = re.findall(r":root \{([^}]*)\}", PAGE_HTML)
    names = set(re.findall(r"--[\w]+(?=:)", light if colour == "light" else dark))
    assert names == set(re.findall(r"var\((--\w+)\)", PAGE_HTML))
