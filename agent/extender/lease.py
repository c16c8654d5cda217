"""Which replica serves: a Lease of the API server, held as other Kubernetes components hold theirs.

After client-go's leader election: clocks are never compared, a foreign lease is taken over when it has not
changed for its duration by the own clock. Every write carries the version that was read.

The Service finds the leader by a label on its pod, while all replicas are Ready: if the others were not,
`helm --wait`, rolling updates and PodDisruptionBudgets would wait without end.
"""

import datetime as dt
import os
import secrets
from collections.abc import Awaitable, Callable

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.cluster.reflector import PartialObject
from agent.extender.settings import Lease as LeaseSettings
from agent.extender.settings import Serving
from agent.kit.tasks import Cell
from agent.model.pod import Metadata

log = structlog.get_logger()

CONFLICT, MISSING = 409, 404
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
LABEL = "gpu-node-agent.io/extender-serving"
LOOK_SECONDS = 10.0  # how long a label that somebody changed stays so
LABEL_RETRY_SECONDS = 1.0
WITHDRAW_SECONDS = 1.0


class _Spec(msgspec.Struct, rename="camel", omit_defaults=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None


class _Lease(msgspec.Struct):
    metadata: Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


class Election:
    """Tries to be leader until cancelled. `leading` follows; `holds` is what to ask before each write."""

    def __init__(self, api: KubeApi, settings: LeaseSettings, namespace: str) -> None:
        self._api = api
        self._settings = settings
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._folder}/{settings.name}"
        self.identity = settings.identity or f"{os.uname().nodename}-{secrets.token_hex(4)}"
        self.leading: Cell[bool] = Cell(False)
        self.holder = ""  # as last seen
        self.problem: str | None = None
        self.answered: float | None = None  # when the API server last answered, on the clock; None: never
        self._seen: tuple[str, float] = ("", float("-inf"))  # version of the lease, and since when
        self._until = float("-inf")

    @property
    def holds(self) -> bool:
        """Whether nobody else can be leader now. It ends by itself when renewals fail."""
        return anyio.current_time() < self._until

    def stalled(self) -> str:
        """Why this replica could not take over now; empty: it takes part in the election."""
        if self.answered is None:
            return self.problem or "the API server has not answered yet"
        age = anyio.current_time() - self.answered
        if age <= self._settings.duration_seconds:
            return ""
        return f"the election has stood still for {age:.0f} s: {self.problem or 'no attempt was made'}"

    async def run(self) -> None:
        """Take or renew the lease until cancelled, and give it up on the way out."""
        try:
            while True:
                await self._step()
                if self.holds != self.leading.value:
                    log.info("leader_changed", leading=self.holds, identity=self.identity, holder=self.holder)
                    self.leading.publish(self.holds)
                await anyio.sleep(self._settings.retry_seconds)
        finally:
            if self.holds:
                with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
                    await self._release()

    async def _step(self) -> None:
        # Counted from before the write: it may be in force long before its answer is here.
        started = anyio.current_time()
        try:
            with anyio.move_on_after(max(1.0, self._settings.renew_seconds / 2)) as scope:
                if await self._hold():
                    self._until = started + self._settings.renew_seconds
                else:
                    self._until = float("-inf")
            if scope.cancelled_caught:
                self.problem = "the API server did not answer in time"
            else:
                self.problem = None
                self.answered = anyio.current_time()
        except ApiError as error:
            if self.problem is None:
                log.warning("lease_not_renewed", problem=str(error))
            self.problem = str(error)

    async def _hold(self) -> bool:
        found = await self._read()
        if found is None:
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            body = {**lease, "metadata": {"name": self._settings.name}, "spec": self._spec(None)}
            return await self._written(self._api.post(self._folder, body))
        self.holder = found.spec.holder_identity or ""
        if self._seen[0] != found.metadata.resource_version:
            self._seen = (found.metadata.resource_version, anyio.current_time())
        duration = found.spec.lease_duration_seconds or self._settings.duration_seconds
        if self.holder not in ("", self.identity) and anyio.current_time() < self._seen[1] + duration:
            return False
        return await self._written(self._patch(found, self._spec(found.spec)))

    async def _read(self) -> _Lease | None:
        try:
            return await self._api.read(self._path, _Lease)
        except ApiRefused as error:
            if error.status == MISSING:
                return None
            raise

    async def _patch(self, found: _Lease, spec: object) -> bytes:
        version = {"resourceVersion": found.metadata.resource_version}
        return await self._api.merge_patch(self._path, {"metadata": version, "spec": spec})

    async def _written(self, write: Awaitable[bytes]) -> bool:
        try:
            await write
        except ApiRefused as error:
            if error.status == CONFLICT:  # somebody else was faster
                return False
            raise
        self.holder = self.identity
        return True

    def _spec(self, former: _Spec | None) -> object:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = _Spec(self.identity, self._settings.duration_seconds, renew_time=now)
        if former is None or former.holder_identity != self.identity:
            spec.acquire_time = now
            spec.lease_transitions = (former.lease_transitions or 0) + 1 if former else 0
        return msgspec.to_builtins(spec)

    async def _release(self) -> None:
        """Nobody holds it: the next replica need not wait for the duration."""
        self._until = float("-inf")
        try:
            found = await self._read()
            if found and found.spec.holder_identity == self.identity:
                await self._patch(found, {"holderIdentity": "", "leaseDurationSeconds": 1})
        except ApiError as error:
            log.info("lease_not_released", problem=str(error))


class _Pods(msgspec.Struct):
    items: list[PartialObject] = msgspec.field(default_factory=list)


class ServingLabel:
    """Keeps the label while this replica leads."""

    def __init__(
        self, api: KubeApi, settings: Serving, pod: str, namespace: str, leads: Callable[[], bool]
    ) -> None:
        """`pod`: the own one, in `namespace`. `leads`: whether nobody else can lead now."""
        self._api = api
        self._leads = leads
        self._pod = pod
        self._folder = f"/api/v1/namespaces/{namespace}/pods"
        self._selector = ",".join(part for part in (settings.selector, f"{LABEL}=true") if part)
        self.problem = ""  # why the label could not be written last

    async def keep(self, complete: Cell[bool]) -> None:
        """Until cancelled: no other replica has the label, this one has it while `complete`.

        A former leader may be dead and keep its label: its successor takes it away before it has it itself.
        """
        try:
            while True:
                seen = complete.version
                # A leader that has just lost its lease must not take the label from its successor.
                done = await self._try(serving=complete.value, others=self._leads())
                with anyio.move_on_after(LOOK_SECONDS if done else LABEL_RETRY_SECONDS):
                    await complete.wait_change(seen)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(WITHDRAW_SECONDS):
                await self._try(serving=False, others=False)

    async def _try(self, *, serving: bool, others: bool) -> bool:
        try:
            if others:
                await self._apply(serving)
            else:
                await self._write(self._pod, None)
        except ApiError as error:
            if not self.problem:
                log.warning("serving_label_not_written", pod=self._pod, problem=str(error))
            self.problem = str(error)
            return False
        self.problem = ""
        return True

    async def _apply(self, serving: bool) -> None:
        query = {"labelSelector": self._selector}
        found = await self._api.read(self._folder, _Pods, query)
        labelled = {pod.metadata.name for pod in found.items}
        for name in sorted(labelled - {self._pod}):
            await self._write(name, None)
            log.info("serving_label_taken_away", pod=name)
        if serving != (self._pod in labelled):
            await self._write(self._pod, "true" if serving else None)

    async def _write(self, pod: str, value: str | None) -> None:
        await self._api.merge_patch(f"{self._folder}/{pod}", {"metadata": {"labels": {LABEL: value}}})
