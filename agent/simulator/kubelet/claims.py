"""The kubelet's DRA manager: claims are prepared before containers start, and unprepared after they ended.

Facts: kubelet 1.37, `pkg/kubelet/cm/dra/manager.go`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent._proto import v1

from . import claim_state
from .api_server import Api, Pod
from .claim_plugins import ClaimPlugins
from .claim_state import ClaimInfo, Claims
from .device_tables import CallFailed
from .pod_specs import ContainerSpec
from .resource_allocation import results
from .resource_objects import CLAIMS, WriteRefused

logger = structlog.get_logger()
RECONCILE_SECONDS = 60.0


class ClaimManager:
    """The claims of one life of the kubelet."""

    def __init__(self, root: Path, api: Api, plugins: ClaimPlugins) -> None:
        self._root = root
        self._api = api
        self._plugins = plugins
        self._claims: Claims = {}
        self._writing = anyio.Lock()

    async def load(self) -> None:
        """Read what the kubelet of before knew."""
        self._claims = await anyio.to_thread.run_sync(claim_state.read, self._root)

    def holds(self, uid: str) -> bool:
        """Whether a pod still refers to a claim."""
        return any(uid in info.pods for info in self._claims.values())

    async def prepare(self, pod: Pod) -> None:
        """Prepare all claims of a pod; what is prepared already is not asked for again. Raises CallFailed."""
        found = [self._fetch(pod, name) for name in pod.claims.values()]
        if not found:
            return
        for info in found:  # before anything is changed: the drivers have to be there
            for driver in info.drivers:
                self._plugins.plugin(driver)
        asked: dict[str, list[ClaimInfo]] = defaultdict(list)
        for new in found:
            info = self._claims.setdefault((new.namespace, new.name), new)
            if info.uid != new.uid:
                raise CallFailed(
                    f"old ResourceClaim with same name {info.name} and different UID {info.uid} still exists "
                    "(previous pod force-deleted?!)"
                )
            if info.unpreparing:
                raise CallFailed(f"ResourceClaim {info.name} is being unprepared")
            info.pods.add(pod.uid)
            if not info.prepared:
                for driver in info.drivers:
                    asked[driver].append(info)
        await self._save()
        for driver, infos in asked.items():
            await self._prepare(driver, infos)
        for infos in asked.values():
            for info in infos:
                info.prepared = True
        await self._save()

    def _fetch(self, pod: Pod, name: str) -> ClaimInfo:
        namespace, objects = pod.spec.namespace, self._api.resources
        try:
            if not self._api.reachable:
                raise WriteRefused(503, "the server is away")
            if objects.forbidden_reads:
                objects.forbidden_reads -= 1
                node = self._api.node_name
                raise WriteRefused(
                    403,
                    f'resourceclaims.resource.k8s.io "{name}" is forbidden: User "system:node:{node}" cannot '
                    f"get resource: no relationship found between node '{node}' and this object",
                )
            claim = objects.get(CLAIMS, (namespace, name))
        except WriteRefused as error:
            raise CallFailed(f"fetch ResourceClaim {name}: {error}") from error
        uid = claim["metadata"]["uid"]
        if all(each["uid"] != pod.uid for each in claim.get("status", {}).get("reservedFor", ())):
            raise CallFailed(
                f"pod {pod.spec.name} ({pod.uid}) is not allowed to use ResourceClaim {name} ({uid})"
            )
        drivers = dict.fromkeys(result["driver"] for result in results(claim))
        return ClaimInfo(uid, namespace, name, {driver: [] for driver in drivers})

    async def _prepare(self, driver: str, infos: list[ClaimInfo]) -> None:
        try:
            answers = await self._plugins.plugin(driver).prepare([info.message for info in infos])
        except CallFailed as error:
            raise CallFailed(f"NodePrepareResources: {error}") from error
        for info in infos:
            if (answer := answers.get(info.uid)) is None:
                raise CallFailed("NodePrepareResources skipped 1 ResourceClaims")
            if answer.error:
                raise CallFailed(f"NodePrepareResources failed for ResourceClaim {info.name}: {answer.error}")
            info.drivers[driver] = answer.devices

    async def unprepare(self, uid: str) -> None:
        """Unprepare the claims that no other pod refers to. Raises CallFailed."""
        asked: dict[str, list[ClaimInfo]] = defaultdict(list)
        last: list[ClaimInfo] = []
        for info in self._claims.values():
            if uid in info.pods and len(info.pods) > 1:
                info.pods.discard(uid)
            elif uid in info.pods:
                info.unpreparing = True
                last.append(info)
                for driver in info.drivers:
                    asked[driver].append(info)
        for driver, infos in asked.items():
            try:
                answers = await self._plugins.plugin(driver).unprepare([info.message for info in infos])
            except CallFailed as error:
                raise CallFailed(f"NodeUnprepareResources: {error}") from error
            for info in infos:
                if (answer := answers.get(info.uid)) is None:
                    raise CallFailed("NodeUnprepareResources skipped 1 ResourceClaims")
                if answer.error:
                    text = f"NodeUnprepareResources failed for ResourceClaim {info.name}: {answer.error}"
                    raise CallFailed(text)
        for info in last:
            self._claims.pop((info.namespace, info.name), None)
        await self._save()

    async def reconcile(self, active: Callable[[], Collection[str]], ready: Callable[[], bool]) -> None:
        """Unprepare, for ever, what only pods refer to that the kubelet knows no more.

        `ready`: whether it has heard of pods at all; until then it would take all for gone (`sourcesReady`).
        """
        while True:
            await anyio.sleep(RECONCILE_SECONDS)
            if not ready():
                continue
            for uid in {uid for info in self._claims.values() for uid in info.pods} - set(active()):
                try:
                    await self.unprepare(uid)
                except CallFailed as error:
                    logger.info("unprepare_failed", pod=uid, error=str(error))

    def cdi_devices(self, pod: Pod, container: ContainerSpec) -> list[str]:
        """CDI devices that the claims of a container stand for."""
        return [
            name
            for info in self._of(pod, container)
            for _, device in info.devices
            for name in device.cdi_device_ids
        ]

    def dynamic_resources(self, pod: Pod, container: ContainerSpec) -> list[v1.DynamicResource]:
        """A container's claims for PodResources; a device shows the CDI names of those before it, too."""
        found = []
        for info in self._of(pod, container):
            names: dict[str, list[v1.CdiDevice]] = defaultdict(list)
            devices = []
            for driver, device in info.devices:
                names[driver] += [v1.CdiDevice(name=each) for each in device.cdi_device_ids]
                devices.append(
                    v1.ClaimResource(
                        cdi_devices=list(names[driver]),
                        driver_name=driver,
                        pool_name=device.pool_name,
                        device_name=device.device_name,
                        share_id=device.share_id,
                    )
                )
            found.append(
                v1.DynamicResource(
                    claim_name=info.name, claim_namespace=info.namespace, claim_resources=devices
                )
            )
        return found

    def _of(self, pod: Pod, container: ContainerSpec) -> Iterator[ClaimInfo]:
        for name in container.claims:
            key = (pod.spec.namespace, pod.claims.get(name, ""))
            if info := self._claims.get(key):
                yield info

    async def _save(self) -> None:
        async with self._writing:
            content = claim_state.snapshot(self._claims)
            await anyio.to_thread.run_sync(claim_state.write, self._root, content)
