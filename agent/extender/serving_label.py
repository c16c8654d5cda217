"""The label by which the Service finds the one replica that serves, while all replicas are Ready.

If the others were not Ready, `helm --wait`, rolling updates and PodDisruptionBudgets would wait for ever.
"""

from collections.abc import Callable

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, KubeApi
from agent.cluster.reflector import PartialObject
from agent.extender.settings import Serving
from agent.kit.cell import Cell

log = structlog.get_logger()

LABEL = "gpu-node-agent.io/extender-serving"
LOOK_SECONDS = 10.0  # how long a label that somebody changed stays so
RETRY_SECONDS = 1.0
WITHDRAW_SECONDS = 1.0


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
                with anyio.move_on_after(LOOK_SECONDS if done else RETRY_SECONDS):
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
        except (ApiError, msgspec.DecodeError) as error:
            if not self.problem:
                log.warning("serving_label_not_written", pod=self._pod, problem=str(error))
            self.problem = str(error)
            return False
        self.problem = ""
        return True

    async def _apply(self, serving: bool) -> None:
        query = {"labelSelector": self._selector}
        found = msgspec.json.decode(await self._api.get(self._folder, query), type=_Pods)
        labelled = {pod.metadata.name for pod in found.items}
        for name in sorted(labelled - {self._pod}):
            await self._write(name, None)
            log.info("serving_label_taken_away", pod=name)
        if serving != (self._pod in labelled):
            await self._write(self._pod, "true" if serving else None)

    async def _write(self, pod: str, value: str | None) -> None:
        await self._api.merge_patch(f"{self._folder}/{pod}", {"metadata": {"labels": {LABEL: value}}})
