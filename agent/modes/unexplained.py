"""Processes on GPUs that the record of holders does not explain: a host's monitor, a pod with all devices.

They are reported and change nothing, unless the configuration is strict: their GPU is withheld then until
they have gone.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import anyio
import anyio.to_thread
import structlog

from agent.holdings.holdings import HoldingsWatch
from agent.kit.tasks import Cell
from agent.model.modes import Mode
from agent.modes.planner import GpuSwitch, SwitchState
from agent.modes.withholding import Lingering, Withheld

log = structlog.get_logger()

LOOK_SECONDS = 5.0
# A pod may be on its GPU before the record of holders names it, and after it does so no more.
STEADY_SECONDS = 10.0
MOST_NAMED = 5  # any number of processes may be on a GPU
REASON = (
    "processes that no record explains use it (gpu-node-agent status names them); it is offered when they "
    "have ended (unexplainedProcesses: strict)"
)

# By GPU, of those whose processes can be read at this moment.
Processes = Callable[[], Mapping[str, Collection[int]]]
# The UID of each process's pod, empty for none; our own processes, and those that have ended, are left out.
# None: the process IDs that are read are not the host's.
Owners = Callable[[Iterable[int]], Mapping[int, str] | None]


class Unexplained:
    """Looks at the processes of the GPUs that a mode is wanted for."""

    def __init__(
        self,
        record: HoldingsWatch,
        processes: Processes,
        owners: Owners,
        switch: Cell[SwitchState],
        lingering: Lingering,
        *,
        strict: bool,
    ) -> None:
        """`owners` blocks. Processes of pods that have just ended are left to `lingering`."""
        self._record = record
        self._processes = processes
        self._owners = owners
        self._switch = switch
        self._lingering = lingering
        self._since: dict[str, dict[tuple[int, str], float]] = {}  # when they were seen first, by GPU
        self.strict = strict  # may change with the configuration
        self.found: Mapping[str, Mapping[int, str]] = {}  # UIDs of their pods, empty for none, by GPU
        self.counts: Mapping[str, int] = {}  # by GPU, of those whose processes are known now
        self.withheld: Cell[Withheld] = Cell({})

    async def run(self) -> None:
        while True:
            await self.look()
            await anyio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        wanted = {gpu.uuid for gpu in self._switch.value.gpus if self._is_wanted(gpu)}
        listed = {gpu: pids for gpu, pids in self._processes().items() if gpu in wanted}
        every = {pid for pids in listed.values() for pid in pids}
        owners = await anyio.to_thread.run_sync(self._owners, every)
        if owners is None or self._record.problem:
            listed = {}  # a GPU of which nothing is known now stays as it was seen last
        if owners is None:
            wanted = set()
        by_pod, nameless = self._record.gpus_by_pod(), self._record.nameless_gpus()
        for gpu, pids in listed.items():
            explained = {uid for uid, gpus in by_pod.items() if gpu in gpus} | self._lingering.ended(gpu)
            self._see(gpu, pids, owners or {}, None if gpu in nameless else explained)
        for gpu in self._since.keys() - wanted:
            del self._since[gpu]
        self._publish({gpu: found for gpu in self._since if (found := self._steady(gpu))}, listed)

    def _is_wanted(self, gpu: GpuSwitch) -> bool:
        """Whether it is to be offered, or would be but for processes. One that is cordoned is anybody's."""
        return gpu.wanted.mode is not Mode.OFF or gpu.wanted.reason in (
            REASON,
            self._lingering.found.get(gpu.uuid),
        )

    def _see(
        self, gpu: str, pids: Collection[int], owners: Mapping[int, str], explained: Collection[str] | None
    ) -> None:
        """`explained`: pods that are, or were a moment ago, on the GPU by right; None: any may be."""
        now, before = anyio.current_time(), self._since.get(gpu, {})
        others = {
            (pid, owners[pid])
            for pid in pids
            if pid in owners and not (owners[pid] and (explained is None or owners[pid] in explained))
        }
        self._since[gpu] = {each: before.get(each, now) for each in others}

    def _steady(self, gpu: str) -> Mapping[int, str]:
        until = min(anyio.current_time() - STEADY_SECONDS, self._record.began)
        return {pid: uid for (pid, uid), since in self._since[gpu].items() if since <= until}

    def _publish(self, found: Mapping[str, Mapping[int, str]], listed: Collection[str]) -> None:
        before, self.found = self.found, found
        for gpu, processes in found.items():
            known = before.get(gpu, {})
            if new := {pid: uid for pid, uid in processes.items() if known.get(pid) != uid}:
                log.warning("gpu_used_by_others", gpu=gpu, processes=_named(new), strict=self.strict)
        for gpu in before.keys() - found.keys():
            log.info("gpu_left_by_others", gpu=gpu)
        self.counts = {gpu: len(found.get(gpu, ())) for gpu in listed}
        withheld = dict.fromkeys(found, REASON) if self.strict else {}
        if withheld != self.withheld.value:
            self.withheld.publish(withheld)

    def sentences(self) -> list[str]:
        """One of each GPU that has such processes, for status."""
        index = {gpu.uuid: gpu.index for gpu in self._switch.value.gpus}
        word, outcome = "report", "it is offered all the same"
        if self.strict:
            word, outcome = "strict", "no free unit of it is offered until they have ended"
        return [
            f"GPU {index.get(gpu, '?')} ({gpu}) is used by {len(processes)} process(es) of nobody who holds "
            f"it: {_named(processes)}; {outcome} (unexplainedProcesses: {word}); end them, or leave the GPU "
            "to them by a cordon"
            for gpu, processes in self.found.items()
        ]


def _named(processes: Mapping[int, str]) -> str:
    more = f" and {len(processes) - MOST_NAMED} more" if len(processes) > MOST_NAMED else ""
    first = sorted(processes.items())[:MOST_NAMED]
    return ", ".join(f"{pid} of {f'pod {uid}' if uid else 'no pod'}" for pid, uid in first) + more
