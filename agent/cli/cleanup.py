"""`gpu-node-agent cleanup ...`: for the chart's hook; `node` serves by hand, too.

Exit codes: 0 clean, 1 it failed, 2 bad arguments or configuration, 3 pods stand in the way.
"""

import argparse
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from agent.cleanup.request import CleanupFailed, CleanupRefused
from agent.cli.arguments import Commands, add_configuration, load, nvml_of
from agent.cli.running import until_interrupted
from agent.kit import logs
from agent.settings import Settings

if TYPE_CHECKING:
    from agent.cluster.reach import ClusterAccess


def add_commands(commands: Commands) -> None:
    cleanup = commands.add_parser("cleanup", help="take the agent's traces off nodes")
    parts = cleanup.add_subparsers(required=True, metavar="PART")

    node = parts.add_parser("node", help="this node; no agent may run on it")
    add_configuration(node)
    node.add_argument("--wait", type=float, default=60.0, help="seconds for an agent to leave (default: 60)")
    node.set_defaults(command=lambda options: _node(load(options), options.wait))

    cluster = parts.add_parser(  # without `help`, none lists it
        "cluster", description="All nodes: the first step of helm uninstall."
    )
    cluster.add_argument("--namespace", required=True, help="where the agents are")
    cluster.add_argument("--agents", required=True, metavar="SELECTOR", help="labels of the agents' pods")
    cluster.add_argument(
        "--release-record",
        default="",
        metavar="SECRET",
        help="helm's record of the release, marked as deployed so that helm upgrade works if this fails",
    )
    cluster.add_argument("--timeout", type=float, default=240.0, help="seconds (default: 240)")
    cluster.set_defaults(command=_cluster)


def _failed(error: CleanupFailed) -> int:
    print(error, file=sys.stderr)
    return 3 if isinstance(error, CleanupRefused) else 1


def _node(settings: Settings, wait: float) -> int:
    logs.configure(settings.logging.level, settings.logging.format)

    async def clean() -> CleanupFailed | None:
        from agent.cleanup import this_node  # noqa: PLC0415  loads the MPS room

        async with _cluster_access(settings) as access:
            try:
                async with this_node.without_agent(settings, wait):
                    users = await this_node.refuse_holders(settings, access.pods if access else None)
                    await this_node.leave_modes(settings, nvml_of(settings))
                    all_removed = await anyio.to_thread.run_sync(this_node.remove_files, settings, users)
                    if not all_removed:
                        print(
                            "the GPUs' CDI specification and its hook stay for containers that name them: "
                            f"{', '.join(sorted(users))}; run this again when these have ended"
                        )
                if access:
                    await this_node.forget_node(access.api, access.node.name)
            except CleanupFailed as error:
                return error
        return None

    if failure := anyio.run(clean):
        return _failed(failure)
    print("the node is clean")
    return 0


@asynccontextmanager
async def _cluster_access(settings: Settings) -> AsyncIterator["ClusterAccess | None"]:
    """None: the configuration knows no way to the API server. Raises FatalError."""
    from agent.cluster.reach import reach_cluster  # noqa: PLC0415  as above

    access = await reach_cluster(settings)
    if access is None:
        yield None
        return
    async with access.api, anyio.create_task_group() as group:
        group.start_soon(access.node.reflector.run)
        group.start_soon(access.pods.reflector.run)
        yield access
        group.cancel_scope.cancel()


def _cluster(options: argparse.Namespace) -> int:
    logs.configure("info", "json")

    async def clean() -> int:
        from agent.cleanup.cluster import ClusterCleanup, Release  # noqa: PLC0415  loads the API client
        from agent.cluster.api import connect  # noqa: PLC0415
        from agent.cluster.lean import NoClusterAccess  # noqa: PLC0415

        release = Release(options.namespace, options.agents, options.release_record)
        try:
            async with await connect(None) as api:
                return await ClusterCleanup(api, release).run(options.timeout)
        except NoClusterAccess as error:
            raise CleanupFailed(str(error)) from error

    try:
        count = anyio.run(unless_interrupted, clean)
    except CleanupFailed as error:
        return _failed(error)
    print(f"{count} node(s) are clean")
    return 0


async def unless_interrupted(act: Callable[[], Awaitable[int]]) -> int:
    """Run it until SIGTERM or SIGINT. Raises CleanupFailed."""
    result = await until_interrupted(act)
    if result is None:
        raise CleanupFailed("interrupted before the nodes were clean; the agents are back in service")
    return result
