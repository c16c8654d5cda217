"""Pairing under a kubelet that does everything in any order: 10,000 steps, each rule at least 100 times."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import structlog
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent.kubelet.wire import Refused
from agent.model.holding import PairMember
from agent.model.pod import CORES, Pod, Stage
from agent.pairing.resolver import PairRefused
from tests.unit.pairing.kubelet_model import AgentKilled, KubeletModel, pod, share, undisturbed
from tests.unit.state_machines import run

GPUS, BLOCKS = 3, 40
STEPS, EXAMPLES = 50, 240  # most examples run all of their steps

fired: Counter[str] = Counter()
outcomes: Counter[str] = Counter()

CORE_SIZES = st.integers(1, 99)
BLOCK_SIZES = st.integers(1, BLOCKS)


class PairingMachine(RuleBasedStateMachine):
    """A node of three small GPUs whose pods come, fail and go while the agent is killed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.kubelet = KubeletModel(GPUS, BLOCKS)
        self.count = 0

    def teardown(self) -> None:
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    def name(self) -> str:
        self.count += 1
        return f"pod-{self.count}"

    def admit(self, new: Pod, interrupt: Callable[[int], None] = undisturbed) -> str | None:
        """None: admitted; else why not."""
        try:
            self.run(self.kubelet.admit(new, interrupt))
        except (PairRefused, Refused) as refusal:
            outcomes["refused"] += 1
            return str(refusal)
        except AgentKilled as death:
            return str(death)
        outcomes["admitted"] += 1
        return None

    @rule(cores=CORE_SIZES, blocks=BLOCK_SIZES)
    def admit_share(self, cores: int, blocks: int) -> None:
        fired["admit"] += 1
        fits = self.kubelet.free_on_best(cores, blocks)
        problem = self.admit(pod(self.name(), share("main", cores, blocks)))
        assert (problem is None) == fits, problem

    @rule(blocks=BLOCK_SIZES)
    def admit_memory_only(self, blocks: int) -> None:
        fired["memory only"] += 1
        fits = self.kubelet.free_on_best(0, blocks)
        problem = self.admit(pod(self.name(), share("main", 0, blocks)))
        assert (problem is None) == fits, problem

    @rule(count=st.integers(1, GPUS), blocks=st.integers(0, 5))
    def admit_whole_gpus(self, count: int, blocks: int) -> None:
        fired["whole card"] += 1
        new = pod(self.name(), share("main", count * CORES, blocks))
        if self.admit(new) is None:
            assert len(self.kubelet.gpus_of(new.key, "main")) == count

    @rule(
        first=CORE_SIZES,
        first_blocks=BLOCK_SIZES,
        cores=st.integers(0, 99),
        blocks=BLOCK_SIZES,
        stage=st.sampled_from([Stage.APP, Stage.SIDECAR]),
    )
    def admit_init_and_app(
        self, first: int, first_blocks: int, cores: int, blocks: int, stage: Stage
    ) -> None:
        fired["init container"] += 1
        containers = [share("init", first, first_blocks, Stage.INIT), share("main", cores, blocks, stage)]
        new = pod(self.name(), *containers, share("second", 5, 2))
        if self.admit(new) is None:
            assert len(self.kubelet.gpus_of(new.key, "init") | self.kubelet.gpus_of(new.key, "main")) == 1

    @rule(cores=CORE_SIZES, blocks=BLOCK_SIZES)
    def fail_second_half(self, cores: int, blocks: int) -> None:
        fired["fail second member"] += 1

        def broken(step: int) -> None:
            if step == 2:
                raise AgentKilled("another resource of the pod could not be had")

        self.admit(pod(self.name(), share("main", cores, blocks)), broken)

    @rule(cores=CORE_SIZES, blocks=BLOCK_SIZES, at=st.integers(0, 3))
    def restart_between_calls(self, cores: int, blocks: int, at: int) -> None:
        fired["restart"] += 1

        def killed(step: int) -> None:
            if step == at:
                self.kubelet.start_agent()

        new = pod(self.name(), share("main", cores, blocks))
        self.admit(new, killed)

    @rule()
    def restart(self) -> None:
        fired["restart"] += 1
        self.kubelet.start_agent()

    @rule(seconds=st.sampled_from([0.5, 11.0, 31.0]))
    def expire(self, seconds: float) -> None:
        fired["expire"] += 1
        self.kubelet.now += seconds

    @rule(choice=st.randoms(use_true_random=False))
    def free(self, choice: Any) -> None:
        fired["free"] += 1
        if self.kubelet.taken_up:
            self.kubelet.end(choice.choice(sorted(self.kubelet.taken_up)))

    @rule()
    def reconcile(self) -> None:
        fired["reconcile"] += 1
        self.run(self.kubelet.refresh())
        truth = self.kubelet.in_use(PairMember.CORE) | self.kubelet.in_use(PairMember.MEMORY)
        ledger = self.kubelet.pairing.ledger
        assert ledger.held.ids == truth
        assert not any(
            each.complete and each.holder.pod_key in self.kubelet.taken_up for each in ledger.reservations
        )

    @rule()
    def restart_kubelet(self) -> None:
        fired["kubelet restart"] += 1
        self.kubelet.heard = set()

    @rule()
    def hear_of_all_pods(self) -> None:
        fired["kubelet hears"] += 1
        self.kubelet.heard = None

    @rule(cores=CORE_SIZES, blocks=BLOCK_SIZES)
    def admit_while_held_units_are_offered(self, cores: int, blocks: int) -> None:
        fired["held units offered"] += 1
        fits = self.kubelet.free_on_best(cores, blocks)
        self.kubelet.offers_held = True
        problem = self.admit(pod(self.name(), share("main", cores, blocks)))
        self.kubelet.offers_held = False
        assert (problem is None) == fits, problem

    @rule(cores=CORE_SIZES, blocks=BLOCK_SIZES, choice=st.randoms(use_true_random=False))
    def admit_a_namesake(self, cores: int, blocks: int, choice: Any) -> None:
        fired["namesake"] += 1
        if not self.kubelet.taken_up:
            return
        before = choice.choice(sorted(self.kubelet.taken_up))
        self.kubelet.end(before)
        fits = self.kubelet.free_on_best(cores, blocks)
        new = pod(before[1], share("main", cores, blocks), uid=f"uid-{self.name()}")
        problem = self.admit(new)
        assert (problem is None) == fits, problem

    @invariant()
    def pairs_are_together(self) -> None:
        for key, admission in self.kubelet.taken_up.items():
            for container in admission.pod.containers:
                gpus = self.kubelet.gpus_of(key, container.name)
                cores = container.limits.get(self.kubelet.pair.core, 0)
                assert len(gpus) == max(1, cores // CORES)

    @invariant()
    def units_are_conserved(self) -> None:
        seen: Counter[str] = Counter()
        for admission in self.kubelet.taken_up.values():
            mine = frozenset().union(*admission.held.values())
            seen.update(mine)
            for container in admission.pod.containers:
                for member in PairMember:
                    resource = (
                        self.kubelet.pair.core if member is PairMember.CORE else self.kubelet.pair.memory
                    )
                    held = admission.held.get((container.name, resource), frozenset())
                    assert len(held) == container.limits.get(resource, 0)
        assert all(count == 1 for count in seen.values())

    @invariant()
    def whole_gpus_are_alone(self) -> None:
        for gpu in self.kubelet.held_whole():
            holders = {
                key
                for key, admission in self.kubelet.taken_up.items()
                for ids in admission.held.values()
                if any(each.startswith(gpu) for each in ids)
            }
            assert len(holders) == 1


@pytest.mark.timeout(400)
def test_pairs_stay_together_over_ten_thousand_steps() -> None:
    fired.clear()
    outcomes.clear()
    with structlog.testing.capture_logs():
        run(PairingMachine, EXAMPLES, STEPS)
    rules = {
        "admit",
        "memory only",
        "whole card",
        "init container",
        "fail second member",
        "restart",
        "expire",
        "free",
        "reconcile",
        "kubelet restart",
        "kubelet hears",
        "held units offered",
        "namesake",
    }
    assert set(fired) == rules
    assert sum(fired.values()) >= 10_000, fired
    assert min(fired.values()) >= 100, fired
    assert min(outcomes.values()) >= 100, outcomes
