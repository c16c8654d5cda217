"""Answers of /healthz and /readyz."""

import time

import anyio
import pytest

from agent.kit.tasks import Supervisor, TaskState
from agent.model.pod import without_pods
from agent.web.probes import Probes
from agent.web.server import HttpRequest, HttpServer

REQUEST = HttpRequest("/")


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


async def test_the_agent_is_ready_on_a_node_that_is_not() -> None:
    node, agent = ["libnvidia-ml.so.1 is not found"], ["nvidia.com/gpu is not registered with the kubelet"]
    probes = Probes(Supervisor(), lambda: agent + node, shortcomings=lambda: agent)
    assert (await probes.agent_ready(REQUEST)).status == 503
    agent.clear()
    assert (await probes.ready(REQUEST)).status == 503
    reply = await probes.agent_ready(REQUEST)
    assert (reply.status, reply.body) == (200, b"ready\nlibnvidia-ml.so.1 is not found\n")


async def test_without_a_difference_every_blocker_is_the_agents() -> None:
    """As of the extender, and of an agent that is out of service."""
    reply = await Probes(Supervisor(), lambda: ["it is cleaned up"]).agent_ready(REQUEST)
    assert (reply.status, reply.body) == (503, b"it is cleaned up\n")


def test_all_routes_are_taken() -> None:
    server = HttpServer("127.0.0.1", 0)
    Probes(Supervisor(), list).add_to(server)
    for path in ("/healthz", "/readyz", "/readyz/agent"):
        with pytest.raises(ValueError, match=path):
            server.add_route(path, Probes(Supervisor(), list).ready)


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [
        (
            "nothing is there yet: waiting for 2 pod(s) to end: team-a/train-0, b/c.d-1 and 3 more; label",
            "nothing is there yet: waiting for 2 pod(s) to end: <pod>, <pod> and 3 more; label",
        ),
        ("GPUs are in use by team-a/x; end these pods", "GPUs are in use by <pod>; end these pods"),
        ("PATCH /api/v1/namespaces/team-a/pods/train-0: 403", "PATCH /api/v1/namespaces/<pod>: 403"),
        ("PATCH /api/v1/nodes/n1/status: 403 no; see https://x.test/a/b", None),
        ("GPU 3 (GPU-1-2): /var/lib/gpu-node-agent/x is no folder, resource nvidia.com/gpu.shared", None),
    ],
)
async def test_probes_name_no_pods(sentence: str, answer: str | None) -> None:
    supervisor = Supervisor()
    supervisor.states["t"] = TaskState("t", last_error=sentence)
    probes = Probes(supervisor, lambda: [sentence], lambda: [sentence], list)
    shown = answer or sentence
    assert (await probes.ready(REQUEST)).body.decode() == f"{shown}\n"
    assert (await probes.agent_ready(REQUEST)).body.decode() == "ready\n" + f"{shown}\n"
    assert shown in (await probes.health(REQUEST)).body.decode()


def test_a_long_sentence_is_searched_in_no_time() -> None:
    began = time.perf_counter()
    for each in ("a" * 100_000, "a-" * 50_000, "a/" * 50_000, "a/a." * 25_000, "-" * 100_000):
        without_pods(each)
    assert time.perf_counter() - began < 5
