"""A DRA driver of tests: it serves a kubelet from the test's own event loop and writes down its calls."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agent._proto import pluginregistration
from agent._proto.k8s.io.kubelet.pkg.apis.dra.v1 import (
    Claim,
    DraPluginBase,
    PreparedClaim,
    PreparedDevice,
    PrepareRequest,
    PrepareResponse,
    UnpreparedClaim,
    UnprepareRequest,
    UnprepareResponse,
)
from agent.simulator.kubelet.grpc_peer import serving
from tests.scenarios.rig import Rig

DRIVER = "claims.example.com"
COUNTER, WHOLE, SHARED = "gpu", "gpu-whole", "gpu-shared"
SHARES = 4


class ClaimDriver(DraPluginBase):
    """Prepares every claim at once, or answers `error`. `calls`: what was asked for which claim, by UID."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.calls: list[tuple[str, str]] = []
        self.error = ""
        self.registered = anyio.Event()

    async def node_prepare_resources(self, message: PrepareRequest) -> PrepareResponse:
        """Named devices of each claim, by its allocation."""
        self.calls += [("prepare", claim.uid) for claim in message.claims]
        if self.error:
            return PrepareResponse(
                claims={claim.uid: PreparedClaim(error=self.error) for claim in message.claims}
            )
        return PrepareResponse(claims={claim.uid: await self._prepared(claim) for claim in message.claims})

    async def _prepared(self, claim: Claim) -> PreparedClaim:
        (found,) = [
            each
            for each in await self._rig.resources("ResourceClaim")
            if each["metadata"]["uid"] == claim.uid
        ]
        return PreparedClaim(
            devices=[
                PreparedDevice(
                    request_names=[result["request"]],
                    pool_name=result["pool"],
                    device_name=result["device"],
                    cdi_device_ids=[f"{DRIVER}/gpu={result['device']}"],
                    share_id=result.get("shareID"),
                )
                for result in found["status"]["allocation"]["devices"]["results"]
            ]
        )

    async def node_unprepare_resources(self, message: UnprepareRequest) -> UnprepareResponse:
        """Nothing has to be undone."""
        self.calls += [("unprepare", claim.uid) for claim in message.claims]
        return UnprepareResponse(claims={claim.uid: UnpreparedClaim() for claim in message.claims})

    def count(self, call: str) -> int:
        """How often something was asked."""
        return sum(each == call for each, _ in self.calls)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Registered with the kubelet while the context is open."""
        folder = self._rig.kubelet_root / "plugins" / DRIVER
        socket, registry = folder / "dra.sock", self._rig.kubelet_root / "plugins_registry" / "claims.sock"
        await anyio.to_thread.run_sync(lambda: folder.mkdir(parents=True, exist_ok=True))
        self.registered = anyio.Event()
        try:
            async with serving(socket, self), serving(registry, _Registration(socket, self.registered)):
                with anyio.fail_after(30):
                    await self.registered.wait()
                yield
        finally:
            for path in (registry, socket):
                path.unlink(missing_ok=True)


class _Registration(pluginregistration.RegistrationBase):
    def __init__(self, socket: Path, registered: anyio.Event) -> None:
        self._socket = socket
        self._registered = registered

    async def get_info(self, message: pluginregistration.InfoRequest) -> pluginregistration.PluginInfo:
        return pluginregistration.PluginInfo(
            type="DRAPlugin",
            name=DRIVER,
            endpoint=str(self._socket),
            supported_versions=["v1.DRAPlugin"],
        )

    async def notify_registration_status(
        self, message: pluginregistration.RegistrationStatus
    ) -> pluginregistration.RegistrationStatusResponse:
        assert message.plugin_registered, message.error
        self._registered.set()
        return pluginregistration.RegistrationStatusResponse()


def slices(node: str) -> list[dict[str, Any]]:
    """One GPU, as a whole or in shares: the devices exclude each other by a counter."""

    def one(name: str, **content: object) -> dict[str, Any]:
        pool = {"name": f"{DRIVER}/{node}", "generation": 1, "resourceSliceCount": 2}
        spec = {"driver": DRIVER, "nodeName": node, "pool": pool, **content}
        return {"metadata": {"name": f"{node}-{DRIVER}-{name}"}, "spec": spec}

    def device(name: str, **content: object) -> dict[str, Any]:
        consumes = [{"counterSet": "gpus", "counters": {COUNTER: {"value": "1"}}}]
        return {
            "name": name, "attributes": {"kind": {"string": name}}, "consumesCounters": consumes, **content,
        }  # fmt: skip

    policy = {"default": "1", "validRange": {"min": "1", "step": "1"}}
    capacity = {"shares": {"value": str(SHARES), "requestPolicy": policy}}
    return [
        one("counters", sharedCounters=[{"name": "gpus", "counters": {COUNTER: {"value": "1"}}}]),
        one("devices", devices=[
            device(SHARED, allowMultipleAllocations=True, capacity=capacity), device(WHOLE),
        ]),
    ]  # fmt: skip


def device_class(device: str) -> dict[str, Any]:
    """The class of one of the two devices, named like it."""
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].kind == '{device}'"
    return {"metadata": {"name": device}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}


def claim_spec(device: str, shares: int = 0) -> dict[str, Any]:
    """A claim of a whole GPU, or of some shares of one."""
    exactly: dict[str, Any] = {"deviceClassName": device}
    if shares:
        exactly["capacity"] = {"requests": {"shares": str(shares)}}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


def write_cdi(folder: Path) -> None:
    """Give containers a variable of each device. Blocks."""

    def device(name: str) -> Mapping[str, object]:
        return {"name": name, "containerEdits": {"env": [f"CLAIMED={name}"]}}

    spec = {"cdiVersion": "0.6.0", "kind": f"{DRIVER}/gpu", "devices": [device(WHOLE), device(SHARED)]}
    draft = folder / ".claims.draft"
    draft.write_text(json.dumps(spec))
    draft.rename(folder / "claims.json")
