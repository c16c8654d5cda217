"""What /healthz and /readyz say."""

import anyio
import pytest

from agent.kit.supervise import Supervisor, TaskState
from agent.web.probes import Probes
from agent.web.server import HttpServer, Request

REQUEST = Request("/")


def states(*given: TaskState) -> Supervisor:
    return Supervisor(states={state.name: state for state in given})


async def test_healthy_while_all_tasks_run() -> None:
    supervisor = states(TaskState("inventory", fatal=True, running=True), TaskState("scanner", running=True))
    reply = await Probes(supervisor, list).health(REQUEST)
    assert (reply.status, reply.body) == (200, b"ok\n")


async def test_a_dead_fatal_task_is_unhealthy() -> None:
    supervisor = states(
        TaskState("inventory", fatal=True, last_error="ValueError: bad\nthing"),
        TaskState("scanner", running=True),
    )
    reply = await Probes(supervisor, list).health(REQUEST)
    assert (reply.status, reply.body) == (503, b"unhealthy\ntask inventory ended: ValueError: bad thing\n")


async def test_a_task_that_is_restarted_is_told_but_stays_healthy() -> None:
    supervisor = states(TaskState("scanner", restarts=3, last_error="OSError: no"))
    reply = await Probes(supervisor, list).health(REQUEST)
    assert (reply.status, reply.body.decode()) == (
        200,
        "ok\ntask scanner waits for its next try (restarts: 3): OSError: no\n",
    )


async def test_health_follows_a_real_supervisor() -> None:
    supervisor = Supervisor()
    probes = Probes(supervisor, list)
    running = anyio.Event()

    async def dies() -> None:
        running.set()
        await anyio.sleep(0.01)
        raise RuntimeError("out of luck")

    async def supervised() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.fatal, "inventory", dies)
            await running.wait()
            assert (await probes.health(REQUEST)).status == 200

    with pytest.raises(ExceptionGroup):
        await supervised()
    assert b"out of luck" in (await probes.health(REQUEST)).body


async def test_ready_only_without_blockers_and_every_blocker_on_its_own_line() -> None:
    blockers = ["NVML is not initialised yet", "nvidia.com/gpu is not registered\nwith the kubelet"]
    probes = Probes(Supervisor(), lambda: blockers)
    reply = await probes.ready(REQUEST)
    assert reply.status == 503
    assert reply.body.decode().splitlines() == [
        "NVML is not initialised yet",
        "nvidia.com/gpu is not registered with the kubelet",
    ]
    blockers.clear()
    reply = await probes.ready(REQUEST)
    assert (reply.status, reply.body) == (200, b"ready\n")


def test_both_routes_are_taken() -> None:
    server = HttpServer("127.0.0.1", 0)
    Probes(Supervisor(), list).add_to(server)
    for path in ("/healthz", "/readyz"):
        with pytest.raises(ValueError, match=path):
            server.add_route(path, Probes(Supervisor(), list).ready)
