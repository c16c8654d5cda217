"""An API server that is silent, refuses or is slow: no taint stays, and no figure without a list.

How long each step may take is asserted in virtual time: `tests/unit/node`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.to_thread
import pytest
from aiohttp import web

from agent._proto.v1beta1 import Device
from agent.model.pod import VGPU
from agent.node.capacity import TAINT, WRITE_SECONDS
from agent.simulator.kubelet.http_api import Handler
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.component.embedded_rig import QUICK, EmbeddedRig, embedded_rig
from tests.pace import scaled
from tests.scenarios.rig import GPU

GRACE_SECONDS = 10.0  # the chart's terminationGracePeriodSeconds
PRODUCTION_TICK = 10.0
LONGEST_SECONDS = 60.0
ONE_GPU = (ContainerSpec("main", {GPU: 1}),)


@asynccontextmanager
async def serving(watch: float = QUICK.watch) -> AsyncIterator[EmbeddedRig]:
    """An agent that offers eight GPUs; `watch`: seconds until the kubelet hears of a pod."""
    async with embedded_rig(status_tick=PRODUCTION_TICK, timings=replace(QUICK, watch=watch)) as rig:
        await want(rig, "pgpu")
        await rig.start_agent({**await rig.api_access(), "modeFile": str(rig.agent.log.parent / "mode")})
        await rig.wait_allocatable(8, GPU, LONGEST_SECONDS)
        # Labels, annotation and condition are written, too.
        await until(lambda: "GPUModeReady" in rig.http.conditions, rig)
        yield rig


async def want(rig: EmbeddedRig, mode: str) -> None:
    """As an administrator without the API does."""
    await anyio.to_thread.run_sync((rig.agent.log.parent / "mode").write_text, mode)


async def until(reached: Callable[[], bool], rig: EmbeddedRig) -> None:
    """Wait, with the end of the agent's log when it is in vain."""
    with anyio.move_on_after(scaled(LONGEST_SECONDS)):
        while not reached():
            rig.agent.assert_not_crashed()
            await anyio.sleep(0.01)
        return
    raise TimeoutError(rig.agent.log_tail())


def tainted(rig: EmbeddedRig) -> bool:
    return any(each["key"] == TAINT for each in rig.kubelet.api.taints)


def offered(rig: EmbeddedRig) -> dict[str, int]:
    return {name: count for name, count in rig.kubelet.api.allocatable.items() if count}


class Patches:
    """The writes to the node and its status, as they begin."""

    def __init__(self, rig: EmbeddedRig) -> None:
        self.begun: list[tuple[float, str]] = []
        self.figures: list[str] = []  # as they were sent
        rig.http.interfere = self.interfere

    def of(self, what: str) -> list[float]:
        """When those of one kind began."""
        return [at for at, kind in self.begun if kind == what]

    async def interfere(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "PATCH" and "/nodes/" in request.path:
            self.begun.append((anyio.current_time(), kind := await _kind(request)))
            if kind == "figures":
                self.figures.append(await request.text())
        return await self.answer(request, handler)

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        return await handler(request)


async def _kind(request: web.Request) -> str:
    text = await request.text()
    if request.path.endswith("/status"):
        return "figures" if "allocatable" in json.loads(text)["status"] else "condition"
    if not isinstance(body := json.loads(text), list):
        return "metadata"
    return "taint" if any(each["key"] == TAINT for each in body[-1]["value"]) else "untaint"


# A watch that does not tell what was written


async def _switches_and_is_quiet(rig: EmbeddedRig, patches: Patches) -> None:
    await want(rig, "vgpu")
    vgpu = {VGPU.core: 800, VGPU.memory: 4488}
    await until(lambda: offered(rig) == vgpu and not tainted(rig), rig)
    assert len(patches.of("taint")) == len(patches.of("untaint")) == 1
    await anyio.sleep(3)
    assert not tainted(rig)
    # What was patched successfully is not patched again, also where the kubelet's own figures came first.
    # Two writes for what goes, and one for each list of the pair that a busy kubelet takes in by itself.
    assert len(set(patches.figures)) == len(patches.figures) <= 4


@pytest.mark.timeout(240)
async def test_silent_watch_leaves_no_taint() -> None:
    async with serving() as rig:
        patches = Patches(rig)
        rig.http.silent = {"nodes"}
        await _switches_and_is_quiet(rig, patches)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("status", [429, 403])
async def test_refused_watch_leaves_no_taint(status: int) -> None:
    class Refusing(Patches):
        async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path == "/api/v1/nodes" and request.query.get("watch"):
                return web.json_response({"kind": "Status", "code": status, "message": "no"}, status=status)
            return await handler(request)

    async with serving() as rig:
        # Open watches end, and are not to be had again; all else is well.
        rig.http.reachable = False
        patches = Refusing(rig)
        await anyio.sleep(0.1)
        rig.http.reachable = True
        await until(lambda: "watch_interrupted" in rig.agent.log_tail(), rig)
        await _switches_and_is_quiet(rig, patches)


# An agent that stops


@asynccontextmanager
async def stopping(rig: EmbeddedRig) -> AsyncIterator[list[float]]:
    """SIGTERM comes inside; afterwards: when the lists went down."""
    down: list[float] = []

    def read(resource: str, devices: list[Device]) -> None:
        if resource == GPU and not any(each.health == "Healthy" for each in devices) and not down:
            down.append(anyio.current_time())

    with rig.kubelet.observing_lists(read):
        yield down


@pytest.mark.timeout(240)
async def test_sigterm_with_an_unserved_pod() -> None:
    async with serving(watch=3600.0) as rig:
        stuck = PodSpec("stuck", ONE_GPU)
        await rig.create_pod(stuck)
        await until(lambda: rig.kubelet.pod(stuck).node_name is not None, rig)
        async with stopping(rig) as down:
            assert await rig.stop_agent(GRACE_SECONDS) == 0
        assert down
        assert (tainted(rig), offered(rig)) == (False, {})
        later = PodSpec("later", ONE_GPU)
        await rig.create_pod(later)
        await anyio.sleep(0.5)
        assert rig.kubelet.pod(later).node_name is None
        assert rig.kubelet.pod(later).phase is Phase.PENDING


class Slow(Patches):
    """Answers every call but watches late, and carries it out then, whether or not somebody still waits."""

    def __init__(self, rig: EmbeddedRig, seconds: float) -> None:
        super().__init__(rig)
        self._seconds = seconds
        self._late: set[asyncio.Future[web.StreamResponse]] = set()
        self.now = anyio.Event()  # all that is late is carried out

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.query.get("watch"):
            return await handler(request)
        await request.read()
        late = asyncio.ensure_future(self._carry_out(handler(request)))
        self._late.add(late)
        return await asyncio.shield(late)

    async def _carry_out(self, handling: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        with anyio.move_on_after(self._seconds):
            await self.now.wait()
        return await handling

    async def done(self) -> None:
        """Carry out what is late."""
        self.now.set()
        await asyncio.gather(*self._late, return_exceptions=True)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", [0.1, 1, 2])
async def test_sigterm_with_a_slow_api_server(seconds: float) -> None:
    async with serving() as rig:
        slow = Slow(rig, seconds)
        async with stopping(rig) as down:
            assert await rig.stop_agent(GRACE_SECONDS) == 0
        assert down
        assert (tainted(rig), offered(rig)) == (False, {})
        await slow.done()
        assert (tainted(rig), offered(rig)) == (False, {})


@pytest.mark.timeout(240)
async def test_sigterm_with_a_slow_api_server_that_does_not_answer_in_time() -> None:
    async with serving() as rig:
        slow = Slow(rig, 3600)
        async with stopping(rig) as down:
            assert await rig.stop_agent(GRACE_SECONDS) == 0
            ended = anyio.current_time()
        # Before any answer of the API server was given up: that they take less than 0.1 s from the signal on
        # is asserted in virtual time (`tests/unit/node/test_withdrawal_stop.py`).
        (asked,) = slow.of("taint")
        print(f"lists Unhealthy {(down[0] - asked) * 1000:.0f} ms after the taint was asked for")
        assert down[0] < asked + WRITE_SECONDS
        # One write that sets the taint, begun when there was time to take it back.
        assert ended - asked > 7
        patches = Patches(rig)
        await slow.done()
        await rig.start_agent({**await rig.api_access(), "modeFile": str(rig.agent.log.parent / "mode")})
        await rig.wait_allocatable(8, GPU, LONGEST_SECONDS)
        await until(lambda: not tainted(rig), rig)
        assert patches.of("taint") == []
