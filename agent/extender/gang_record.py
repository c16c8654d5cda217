"""GPUs that are kept for members of gangs, written where the next leader finds them: a ConfigMap of our own.

A Binding carries its choice; what is kept before lies in one replica's memory alone, and a gang whose other
members were bound already would be left half bound by a change of leader. Filter answers once it is written.
"""

import re
from collections.abc import Callable, Mapping

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.extender.pod_demand import Chosen
from agent.extender.times import BIND_SECONDS

log = structlog.get_logger()

MISSING = 404
# Nothing that a next attempt would change: rights or object are missing, or the object is too large.
FINAL = frozenset({403, MISSING, 413, 422})
MOST_BYTES = 800_000  # of a ConfigMap's 1 MiB; some 8,000 members
TIDY_SECONDS = 2.0
RETRY_SECONDS = 1.0
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")


class KeptChoice(msgspec.Struct, frozen=True):
    """A node, and GPUs by index for each slot of the pod's demand; None: on a node without an inventory."""

    node: str
    chosen: Chosen | None = None


class _ConfigMap(msgspec.Struct, frozen=True):
    data: dict[str, str] | None = None


class NotRecorded(Exception):
    """The record could not be written; the text says why."""


class GangRecord:
    """The ConfigMap of one leader. Another may have written it before, none does meanwhile."""

    def __init__(self, api: KubeApi, namespace: str, name: str, holds: Callable[[], bool]) -> None:
        """`holds`: whether nobody else can lead now."""
        self._api = api
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self._name = name
        self._holds = holds
        self._written: dict[str, str] = {}  # as the API server has it; empty text: nobody knows
        self._lock = anyio.Lock()
        self._warned = False
        self.problem: str | None = "the record of GPUs that are kept for gangs was not read yet"

    async def read(self) -> Mapping[str, KeptChoice]:
        """The former leader's choices, by UID. Waits until the API server has answered."""
        while True:
            try:
                found = await self._get()
            except (ApiError, msgspec.DecodeError) as error:
                self.problem = f"the record of GPUs that are kept for gangs cannot be read: {error}"
                await anyio.sleep(RETRY_SECONDS)
                continue
            self.problem = None
            self._written = dict(found)
            return {uid: kept for uid, text in found.items() if (kept := _decoded(text))}

    async def write(self, kept: Callable[[], Mapping[str, KeptChoice]]) -> None:
        """Let the record be as `kept` says, or warn where it never can. Raises NotRecorded."""
        async with self._lock:
            changes = self._changes(kept())
            if not changes:
                return
            if not self._holds():
                raise NotRecorded("this extender is not the leader any more")
            # Until the answer is here, and where none comes, it may have been done or not.
            self._written |= dict.fromkeys(changes, "")
            try:
                await self._api.merge_patch(f"{self._folder}/{self._name}", {"data": changes}, BIND_SECONDS)
            except ApiRefused as error:
                if error.status == MISSING and await self._created():
                    self._written.clear()
                    raise NotRecorded("somebody had deleted the record; it was made again") from error
                if error.status not in FINAL:
                    raise NotRecorded(str(error)) from error
                self._warn(str(error))
            except ApiError as error:
                raise NotRecorded(str(error)) from error
            # Written after the lease was given up, the next leader might have read before.
            if not self._holds():
                raise NotRecorded("this extender is not the leader any more")
            for uid, text in changes.items():
                if text is None:
                    self._written.pop(uid, None)
                else:
                    self._written[uid] = text

    async def tidy(self, kept: Callable[[], Mapping[str, KeptChoice]]) -> None:
        """Take out what is kept no longer, until cancelled."""
        while True:
            await anyio.sleep(TIDY_SECONDS)
            try:
                await self.write(kept)
            except NotRecorded as error:
                log.debug("gang_record_not_tidied", problem=str(error))

    def _changes(self, kept: Mapping[str, KeptChoice]) -> dict[str, str | None]:
        wanted: dict[str, str] = {}
        size = 0
        for uid, each in kept.items():
            text = msgspec.json.encode(each).decode()
            size += len(uid) + len(text)
            if size > MOST_BYTES:
                self._warn(f"only {len(wanted)} of {len(kept)} members of gangs have room in it")
                break
            if _KEY.fullmatch(uid):
                wanted[uid] = text
        gone: dict[str, str | None] = dict.fromkeys(self._written.keys() - wanted.keys())
        return gone | {uid: text for uid, text in wanted.items() if self._written.get(uid) != text}

    async def _get(self) -> Mapping[str, str]:
        try:
            raw = await self._api.get(f"{self._folder}/{self._name}", deadline=BIND_SECONDS)
            return msgspec.json.decode(raw, type=_ConfigMap).data or {}
        except ApiRefused as error:
            if error.status == MISSING:
                await self._created()
            elif error.status in FINAL:
                self._warn(str(error))
            else:
                raise
        return {}

    async def _created(self) -> bool:
        """Whether it could be made. The chart makes it; without the chart, the account may have the right."""
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": self._name}}
        try:
            await self._api.post(self._folder, body, BIND_SECONDS)
        except ApiRefused as error:
            self._warn(str(error))
            return False
        return True

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("gang_choices_not_recorded", config_map=self._name, problem=problem)


def _decoded(text: str) -> KeptChoice | None:
    """None: nothing that a leader wrote."""
    try:
        return msgspec.json.decode(text, type=KeptChoice)
    except msgspec.DecodeError:
        return None
