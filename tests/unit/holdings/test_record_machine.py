"""The record of who holds what under grants, ends, restarts and gaps in every source, in any order."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.holdings import holdings as holdings_module
from agent.holdings.holdings import HoldingsWatch
from agent.holdings.record import Entries, View
from agent.model.holding import Holding, Record
from agent.model.pod import Pod
from tests.pods import a_pod, changed
from tests.unit.state_machines import run

RESOURCE = "nvidia.com/gpu"
UNITS = tuple(f"GPU-{n:08d}" for n in range(8))
STEPS, EXAMPLES = 40, 150

fired: Counter[str] = Counter()


@dataclass(frozen=True)
class Admitted:
    """A pod of the kubelet's: what its plain init container and its app container hold."""

    pod: Pod
    held: Mapping[str, frozenset[str]]  # by container
    recorded: bool = False  # in the checkpoint


class Watch(HoldingsWatch):
    """The record without files: the machine says what stands in them."""

    def __init__(self, machine: "RecordMachine") -> None:
        super().__init__(machine, Path("/nowhere"))  # type: ignore[arg-type]
        self.machine = machine
        self.view = machine.told_view

    async def _entries(self) -> Entries:
        return dict(self.machine.checkpoint)

    async def _kubelet(self) -> tuple[int, int]:
        return self.machine.kubelet, 0


class RecordMachine(RuleBasedStateMachine):
    """A kubelet, its checkpoint, a watch that lags, and an agent that reads all three."""

    now = 0.0  # of both clocks

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        RecordMachine.now = 1e6
        self.kubelet = 1  # which one
        self.heard: set[str] | None = None  # UIDs that a kubelet has learnt; None: all
        self.admitted: dict[str, Admitted] = {}  # by UID
        self.checkpoint: dict[tuple[str, str, str], frozenset[str]] = {}
        self.api: dict[str, Pod] = {}  # pods as they are
        self.told: dict[str, Pod] = {}  # and as the agent's watch has shown them
        self.complete = True
        self.away = False
        self.count = 0
        self.watch = Watch(self)

    def teardown(self) -> None:
        self.loop.close()

    def told_view(self) -> View:
        return View(dict(self.told), self.complete, away=not self.complete)

    async def list(self, deadline: float = 2.0) -> Record:
        """PodResources: plain init containers are left out, and pods that this kubelet has not heard of."""
        holdings, containers = [], []
        for uid, each in self.admitted.items():
            if self.heard is None or uid in self.heard:
                containers.append((*each.pod.key, "main"))
                if ids := each.held["main"]:
                    holdings.append(Holding(*each.pod.key, "main", RESOURCE, tuple(sorted(ids))))
        return Record(tuple(holdings), tuple(containers))

    def shown(self) -> Counter[str]:
        """Every unit that the record of now shows, as often as it does."""
        record = self.loop.run_until_complete(self.watch.look())
        return Counter(unit for holding in record.holdings for unit in holding.ids)

    def in_use(self) -> frozenset[str]:
        return frozenset().union(*(ids for each in self.admitted.values() for ids in each.held.values()))

    @rule(init=st.integers(0, 2), main=st.integers(0, 2), lag=st.booleans(), name=st.integers(0, 4))
    def grant(self, init: int, main: int, lag: bool, name: int) -> None:
        """A namesake comes only after the watch has shown its forerunner's end."""
        fired["grant"] += 1
        free = sorted(set(UNITS) - self.in_use())
        taken = {pod.name for pod in (*self.api.values(), *self.told.values())}
        if self.away or len(free) < init + main or f"pod-{name}" in taken:
            return
        self.count += 1
        pod = a_pod("ns", f"pod-{name}", (), f"uid-{self.count}")
        held = {"prepare": frozenset(free[:init]), "main": frozenset(free[init : init + main])}
        self.api[pod.uid] = pod
        self.admitted[pod.uid] = Admitted(pod, held)
        self.heard = None  # it takes up older pods first
        if not lag:
            self.watch_catches_up()

    @rule()
    def write_checkpoint(self) -> None:
        """As with the next container's allocation: ended pods are forgotten then."""
        fired["checkpoint"] += 1
        self.admitted = {uid: replace(each, recorded=True) for uid, each in self.admitted.items()}
        self.checkpoint = {
            (uid, container, RESOURCE): ids
            for uid, each in self.admitted.items()
            for container, ids in each.held.items()
            if ids
        }

    @rule(choice=st.randoms(use_true_random=False), deleted=st.booleans(), lag=st.booleans())
    def end(self, choice: Any, deleted: bool, lag: bool) -> None:
        fired["end"] += 1
        if not self.admitted or self.away:
            return
        uid = choice.choice(sorted(self.admitted))
        del self.admitted[uid]
        if deleted:
            del self.api[uid]
        else:
            self.api[uid] = changed(self.api[uid], phase="Succeeded")
        if not lag:
            self.watch_catches_up()

    @rule()
    def remove_finished(self) -> None:
        fired["remove"] += 1
        self.api = {uid: pod for uid, pod in self.api.items() if not pod.finished}

    @rule()
    def watch_catches_up(self) -> None:
        fired["watch"] += 1
        if self.complete:
            self.told = dict(self.api)

    @rule()
    def watch_breaks(self) -> None:
        fired["watch breaks"] += 1
        self.complete = False

    @precondition(lambda self: not self.away)
    @rule()
    def watch_is_back(self) -> None:
        fired["watch is back"] += 1
        self.complete = True
        self.watch_catches_up()

    @rule()
    def restart_agent(self) -> None:
        """It follows nothing before its watch has listed."""
        fired["agent restart"] += 1
        self.watch = Watch(self)
        # What the kubelet has forgotten only the agent before knew.
        written = {uid for uid, _, _ in self.checkpoint}
        self.admitted = {
            uid: replace(each, recorded=each.recorded and uid in written)
            for uid, each in self.admitted.items()
        }
        if self.away or not self.complete:
            self.told, self.complete = {}, False
        else:
            self.watch_catches_up()

    @precondition(lambda self: self.told.keys() >= self.admitted.keys() or not self.complete)
    @rule(outage=st.booleans())
    def restart_kubelet(self, outage: bool) -> None:
        """It knows what its checkpoint says, and lists nothing before it has learnt its pods."""
        fired["kubelet restart"] += 1
        self.write_checkpoint()
        self.kubelet, self.heard = self.kubelet + 1, set()
        if outage:
            self.away, self.complete = True, False

    @rule()
    def kubelet_hears_of_one(self) -> None:
        fired["kubelet hears of one"] += 1
        if self.heard is not None:
            self.heard |= set([uid for uid in self.admitted if uid not in self.heard][:1])

    @precondition(lambda self: not self.away and self.told.keys() >= self.admitted.keys())
    @rule()
    def kubelet_forgets_what_it_has_not_heard_of(self) -> None:
        """As when it is asked for its record while it takes its pods up; it writes down the rest."""
        fired["kubelet forgets"] += 1
        if self.heard is not None:
            self.shown()
            self.checkpoint = {place: ids for place, ids in self.checkpoint.items() if place[0] in self.heard}

    @precondition(lambda self: not self.away)
    @rule()
    def kubelet_hears_of_all(self) -> None:
        fired["kubelet hears of all"] += 1
        self.heard = None

    @rule()
    def time_passes(self) -> None:
        """A kubelet that has heard of nobody stays so for as long as it likes."""
        fired["time"] += 1
        self.shown()
        RecordMachine.now += 3600

    @precondition(lambda self: self.away)
    @rule()
    def outage_ends(self) -> None:
        fired["outage ends"] += 1
        self.away = False

    def doubled(self) -> Counter[str]:
        """Units of pods that the kubelet names no more, while nobody says more: others may have them."""
        written = {uid for uid, _, _ in self.checkpoint}
        pods = () if self.complete else self.watch._record.pods.items()
        forgotten = [pod for uid, pod in pods if uid not in written]
        return Counter(text for pod in forgotten for each in pod.holdings.values() for text in each.ids)

    @invariant()
    def nothing_is_lost_and_nothing_is_held_twice(self) -> None:
        """Where every source is up to date the record shows what is held, and no more."""
        self.shown()
        shown = self.shown()
        assert all(count == 1 for count in (shown - self.doubled()).values()), shown
        known: set[str] = set()
        for uid, each in self.admitted.items():
            heard = self.heard is None or uid in self.heard
            for container, ids in each.held.items():
                known |= ids if each.recorded or (heard and container == "main") else frozenset()
        assert shown.keys() >= known
        if self.heard is None and self.complete and self.told == self.api:
            # One that this watch has never shown is kept until the kubelet writes its checkpoint again.
            unknown = (pod for pod in self.watch._record.pods.values() if not pod.watched)
            kept = {unit for pod in unknown for each in pod.holdings.values() for unit in each.ids}
            assert shown.keys() <= self.in_use() | kept


@pytest.mark.timeout(120)
def test_the_record_loses_nothing_over_any_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    fired.clear()
    monkeypatch.setattr(holdings_module, "monotonic", lambda: RecordMachine.now)
    run(RecordMachine, EXAMPLES, STEPS)
    assert len(fired) == 14, fired
    assert min(fired.values()) >= 25, fired
