"""The actor: publishes changes only, in order, and logs transitions."""

from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from agent.inventory.actor import Inventory
from agent.inventory.reducer import Scanned, Unavailable
from agent.inventory.snapshot import Snapshot, Unreadable
from tests.unit.inventory.test_reducer import DRIVER, gpu, scanned

Logs = list[MutableMapping[str, Any]]


@asynccontextmanager
async def running() -> AsyncIterator[Inventory]:
    inventory = Inventory()
    async with anyio.create_task_group() as group:
        group.start_soon(inventory.run)
        yield inventory
        group.cancel_scope.cancel()


async def wait(inventory: Inventory, generation: int) -> Snapshot:
    with anyio.fail_after(5):
        return await inventory.snapshot.wait_for(lambda snapshot: snapshot.generation >= generation)


async def test_messages_become_snapshots_in_order() -> None:
    async with running() as inventory:
        for numbers in ((0,), (0, 1), (0, 1, 2)):
            await inventory.mailbox.post(scanned(*numbers))
        snapshot = await wait(inventory, 3)
    assert [state.uuid for state in snapshot.gpus] == ["GPU-0", "GPU-1", "GPU-2"]


async def test_what_changes_nothing_is_not_published() -> None:
    async with running() as inventory:
        for _ in range(5):
            await inventory.mailbox.post(scanned(0))
        await inventory.mailbox.post(scanned(0, 1))
        snapshot = await wait(inventory, 2)
        assert (snapshot.generation, inventory.snapshot.version) == (2, 2)


async def test_transitions_are_logged_once(logs: Logs) -> None:
    async with running() as inventory:
        for message in (
            scanned(0, 1),
            scanned(0, 1),
            Scanned(DRIVER, (gpu(0), gpu(1)), (Unreadable(2, "mute"),)),
            Unavailable("gone"),
            Unavailable("gone"),
            scanned(0, 1),
            scanned(0),
            scanned(0),
        ):
            await inventory.mailbox.post(message)
        await wait(inventory, 5)
        await anyio.wait_all_tasks_blocked()
    # Changes of a GPU's health are logged elsewhere.
    told = [(event["event"], event.get("gpu")) for event in logs if "health" not in event["event"]]
    assert [one for one in told if one[0] != "gpu_recovered"] == [
        ("nvml_ready", None),
        ("gpu_found", "GPU-0"),
        ("gpu_found", "GPU-1"),
        ("gpu_unreadable", None),
        ("nvml_unavailable", None),
        ("nvml_ready", None),
    ]
