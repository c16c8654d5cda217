"""Keeps the ResourceSlices of the node true: one writer, which puts back what somebody takes away.

A device that is allocated never leaves its list, nor does its counter change: the scheduler would give its
GPU away a second time (kubernetes #140802). So a GPU that is to leave is tainted, and its devices go once no
claim has them any more.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.cluster.reflector import Reflector
from agent.dra import support
from agent.dra.offers import Offers
from agent.dra.slices import (
    PATH,
    UNAVAILABLE,
    Document,
    Published,
    Write,
    contents,
    differences,
    gpus_of,
    missing_gates,
    rewrites,
    writes,
)
from agent.kit.tasks import Backoff, Cell, follow
from agent.model.resource_claim import DRIVER, GROUP, ResourceClaim, pool_of

log = structlog.get_logger()

# A pod that the scheduler was placing when a taint was written is allocated within this time, if at all.
SETTLED_SECONDS = 3.0
WRITTEN_LOOK_SECONDS = 2.0
# Each look is a list of the cluster's claims, by any number of nodes: none before what leaves has settled.
LEAVING_LOOK_SECONDS = SETTLED_SECONDS + 0.5
LEAVING_LONGEST_SECONDS = 60.0
LEAVING_JITTER = 0.1
SHOWN_SECONDS = 2.0  # for the watch to show a new slice
REFUSED_LOOK_SECONDS = 60.0
IDLE_SECONDS = 300.0
OTHERS = ("gpu.nvidia.com",)  # drivers that offer the same GPUs
CLAIMS = f"/apis/{GROUP}/resourceclaims"
CLAIMS_PER_PAGE = 500


class SlicePublisher:
    """`listed`: GPUs of which the scheduler may know devices."""

    def __init__(
        self,
        api: KubeApi,
        node: str,
        node_facts: Callable[[], tuple[str | None, str]],
        offers: Offers,
        listed: Cell[frozenset[str]],
        registered: Cell[bool],
        event: Callable[[str, str], None],
        sysfs: Path,
    ) -> None:
        """`node_facts`: the Node object's UID and the kubelet's version, as far as they are known."""
        self._api = api
        self._node = node
        self._node_facts = node_facts
        self._offers = offers
        self._listed = listed
        self._registered = registered
        self._event = event
        self._sysfs = sysfs
        selector = {"fieldSelector": f"spec.nodeName={node}"}
        self.reflector = Reflector(api, PATH, selector, Published, "slices")
        self._answers: dict[str, tuple[Document, Document]] = {}  # what was sent last, and what came of it
        self._devices: dict[str, Document] = {}  # as published last, by name
        self._leaving: dict[str, float] = {}  # since when GPUs are tainted because they leave
        self._supported = False
        self._told: set[str] = set()  # UIDs of others' slices that are being deleted
        self._wake = Cell(None)
        self._looks = Backoff(LEAVING_LOOK_SECONDS, LEAVING_LONGEST_SECONDS, jitter=LEAVING_JITTER)
        self.problem = "it has not been looked at yet whether the cluster has what DRA needs"
        self.writes = 0
        self.failures = 0

    @property
    def open(self) -> bool:
        """Whether slices are as they are wanted, as far as is known."""
        return not self.problem

    def remarks(self) -> list[str]:
        found = [f"GPUs are not offered by DRA as they should be: {self.problem}"] if self.problem else []
        others = {each.spec.get("driver") for each in self.reflector.items.value.values()} & {*OTHERS}
        return found + [
            f"driver {each} has ResourceSlices of this node: two drivers offer its GPUs; turn one of them off"
            for each in sorted(map(str, others))
            if self._listed.value
        ]

    async def run(self) -> None:
        """Write what differs, for ever."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.reflector.run)
            cells: list[Cell[Any]] = [self.reflector.items, self._registered, *self._offers.cells]
            group.start_soon(partial(follow, lambda: self._wake.publish(None), *cells))
            backoff = Backoff(first=0.2, longest=30.0, jitter=0.3)
            while True:
                seen = self._wake.version
                try:
                    pause = await self._round()
                    backoff.reset()
                except (ApiError, msgspec.DecodeError, KeyError) as error:
                    self.failures += 1
                    self._hindered(str(error))
                    await anyio.sleep(backoff.next())
                    continue
                with anyio.move_on_after(pause):
                    await self._wake.wait_change(seen)
                    self._looks.reset()

    async def wait_listed(self, seconds: float) -> None:
        """Wait for a bounded time until it is known what slices of before list."""
        with anyio.move_on_after(seconds):
            await self.reflector.items.wait_for(lambda _: self.reflector.synced)
            self._list(frozenset())

    async def tainted(self, seconds: float) -> None:
        """Wait for a bounded time until all devices keep claims away, as they do once the agent stops."""
        with anyio.move_on_after(seconds):
            await self.reflector.items.wait_for(
                lambda _: all(dev.get("taints") for each in self._found()[0].values() for dev in each.devices)
            )

    def _hindered(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("slices_not_as_wanted", problem=problem)
        self.problem = problem

    async def _round(self) -> float:
        """One look, and the writes that follow from it; how long to wait unless something changes."""
        if not self.reflector.synced:
            return WRITTEN_LOOK_SECONDS
        if not self._supported and not await self._look_at_support():
            return REFUSED_LOOK_SECONDS
        ours, foreign = self._found()
        self._told &= {each.metadata.uid for each in foreign}
        for each in foreign:
            await self._replace(each)
        await self._offers.look(self._sysfs)
        offered = self._offers.now()
        staying = {each.gpu.uuid for each in offered}
        # Those of a GPU that leaves are put back, too, where somebody takes the slices away.
        self._devices |= {device["name"]: device for each in ours.values() for device in each.devices}
        left = [each for each in self._devices.values() if not gpus_of([each]) <= staying]
        kept = await self._kept(left)
        self._devices = {each["name"]: each for each in self._devices.values() if each not in left}
        self._devices |= {each["name"]: each for each in kept}
        wanted = contents(self._node, offered, self._offers.driver(), kept)
        self._list(frozenset(staying) | gpus_of(kept))
        uid, _ = self._node_facts()
        due = [each for each in writes(self._node, uid, wanted, ours) if self._differs(each, ours)]
        if not self._registered.value:
            # A pod whose claim no driver prepares is tried again after a minute or more only.
            due = rewrites(due)
        for write in due:
            await self._write(write)
        for name in ours.keys() - wanted.keys():
            await self._delete(name)
        if not due:
            self._list(frozenset(staying) | gpus_of(kept), shrink=True)
            absent = wanted.keys() - ours.keys()
            if self.problem and not absent:
                log.info("slices_as_wanted", slices=len(wanted))
            self.problem = "the kubelet has not registered the driver" if absent else ""
        return WRITTEN_LOOK_SECONDS if due else self._looks.next() if kept else IDLE_SECONDS

    async def _look_at_support(self) -> bool:
        problem = await support.problem_of(self._api, self._node, self._node_facts()[1])
        if problem and problem != self.problem:
            self._event("DRARefused", problem)
        if problem:
            self._hindered(problem)
            for name in self._found()[0]:  # without the fields that keep devices apart
                await self._delete(name)
            self._list(frozenset(), shrink=True)
        self._supported = not problem
        return self._supported

    def _found(self) -> tuple[dict[str, Published], list[Published]]:
        """Our slices by name, and others that say to be our driver's."""
        ours: dict[str, Published] = {}
        foreign = []
        for each in self.reflector.items.value.values():
            name, pool = each.metadata.name, each.spec.get("pool", {}).get("name")
            if each.spec.get("driver") == DRIVER:
                if self._offers.is_ours(name) and pool == pool_of(self._node):
                    ours[name] = each
                else:
                    foreign.append(each)
        return ours, foreign

    async def _replace(self, foreign: Published) -> None:
        name, uid = foreign.metadata.name, foreign.metadata.uid
        if uid not in self._told:
            self._told.add(uid)
            log.warning("foreign_slice", slice=name, pool=foreign.spec.get("pool"))
            self._event(
                "ForeignSlice", f"ResourceSlice {name} says to be this driver's, and is not: it is deleted"
            )
        await self._delete(name)

    def _differs(self, write: Write, ours: Mapping[str, Published]) -> bool:
        """Whether a write would change something: a field that the server does not take is sent once."""
        sent, got = self._answers.get(write.name, ({}, {}))
        there = ours.get(write.name)
        return there is None or sent != _plain(write.body["spec"]) or got != _plain(there.spec)

    async def _write(self, write: Write) -> None:
        body = write.body
        if write.version:
            body = {**body, "metadata": {**body["metadata"], "resourceVersion": write.version}}
            answer = await self._api.put(f"{PATH}/{write.name}", body)
        else:
            answer = await self._api.post(PATH, body)
        self.writes += 1
        item = msgspec.json.decode(answer, type=Published)
        self._answers[write.name] = (_plain(write.body["spec"]), _plain(item.spec))
        self.reflector.answered(item)
        with anyio.move_on_after(SHOWN_SECONDS):  # else it would be created once more
            await self.reflector.items.wait_for(lambda items: item.metadata.uid in items)
        if dropped := differences(write.body["spec"], item.spec):
            gates = missing_gates(write.body["spec"], item.spec)
            self._supported = not gates  # looked at again, and reported, with the next round
            log.warning("slice_read_back_otherwise", slice=write.name, fields=dropped[:10], gates=gates)

    async def _delete(self, name: str) -> None:
        with suppress(ApiRefused):
            await self._api.delete(f"{PATH}/{name}")
        self._answers.pop(name, None)

    async def _kept(self, devices: Sequence[Document]) -> list[Document]:
        """Devices of GPUs that leave, tainted, until no claim has them any more."""
        gpus, now = gpus_of(devices), anyio.current_time()
        self._leaving = {uuid: self._leaving.get(uuid, now) for uuid in gpus}
        taint = {"key": UNAVAILABLE, "value": "leaving", "effect": "NoSchedule"}
        tainted = [{**each, "taints": [taint]} for each in devices]
        settled = {uuid for uuid, since in self._leaving.items() if now - since >= SETTLED_SECONDS}
        for each in devices:
            if not _has(each, taint):
                settled -= gpus_of([each])
        if not settled:
            return tainted
        allocated = await self._allocated()
        free = settled - {uuid for each in devices if each["name"] in allocated for uuid in gpus_of([each])}
        return [each for each in tainted if not gpus_of([each]) <= free]

    async def _allocated(self) -> frozenset[str]:
        """Devices of this node that claims have, whether they are prepared or not."""
        pool, found = pool_of(self._node), set[str]()
        async for page in self._api.pages(CLAIMS, {"limit": str(CLAIMS_PER_PAGE)}):
            for raw in page.items:
                status = msgspec.json.decode(raw, type=ResourceClaim).status
                results = status.allocation.devices.results if status.allocation else ()
                found |= {each.device for each in results if (each.driver, each.pool) == (DRIVER, pool)}
        return frozenset(found)

    def _list(self, more: frozenset[str], *, shrink: bool = False) -> None:
        """Publish of which GPUs there are devices, or will be with the next write."""
        ours, _ = self._found()
        there = gpus_of([device for each in ours.values() for device in each.devices]) | more
        there |= frozenset() if shrink else self._listed.value
        if there != self._listed.value:
            self._listed.publish(there)


def _has(device: Document, taint: Document) -> bool:
    return any(
        (each["key"], each.get("value")) == (taint["key"], taint["value"])
        for each in device.get("taints") or ()
    )


def _plain(spec: Document) -> Document:
    """Without what the server adds to taints: by value, as `Write` has it."""
    copied: Document = msgspec.json.decode(msgspec.json.encode(spec))
    for device in copied.get("devices") or ():
        for taint in device.get("taints") or ():
            taint.pop("timeAdded", None)
    return copied
