"""A kubelet that is given a device which has left its list ends by a nil pointer: none leaves meanwhile."""

from collections.abc import Callable, Collection, Sequence

import anyio
import pytest

from agent._proto import v1beta1
from agent.kubelet.wire import Allocation, PreferenceRequest, Refused
from agent.lists.shared_pair import SharedPairPlugin, Sharing
from agent.model.gpu import Gpu
from agent.model.holding import PairMember, Record
from agent.model.modes import Assignment, GpuMode, Offering
from agent.model.pod import MPS, VGPU, Container, Stage
from agent.pairing.pair_rules import Grant
from agent.pairing.pairing import LONGEST_ADMISSION_SECONDS
from agent.pairing.resolver import resource_of
from tests.unit.pairing.kubelet_model import Admission, pod, share
from tests.unit.pairing.test_lists import Kubelet

CORE, MEMORY = PairMember.CORE, PairMember.MEMORY


class Follower(Kubelet):
    """Its lists are those that the agent sends of its own accord; each grant is looked up in them."""

    def read(self) -> None:
        """The plugins' tasks are woken by whatever has changed."""
        for member, plugin in self.plugins.items():
            plugin._refresh_if_changed()
            self.known[member] = on_list(plugin, healthy=True)

    def take_up(self, name: str, *containers: Container) -> None:
        waiting = pod(name, *containers)
        self.api[waiting.key], self.taken_up[waiting.key] = waiting, Admission(waiting)

    def offer(self, offering: Offering) -> None:
        """The switcher refreshes all lists itself."""
        (gpu,) = self.pairing.ledger.pools
        self.modes.publish(Assignment({gpu: GpuMode(self.mode, offering)}))
        for plugin in self.plugins.values():
            plugin.refresh()
        self.read()

    async def wait(self, *seconds: float) -> None:
        """So much time passes, with a reading after each."""
        for each in seconds:
            self.now += each
            await self.refresh()
            self.read()

    async def ask(self, name: str, container: str, member: PairMember, inherited: Sequence[str] = ()) -> None:
        """Both calls for one member."""
        ids = await self.prefer(name, container, member, inherited)
        self.read()
        await self.allocate(name, container, member, ids)

    async def prefer(
        self, name: str, container: str, member: PairMember, inherited: Sequence[str] = ()
    ) -> Sequence[str]:
        size = self.size(name, container, member)
        free = self.listed(member) - self.in_use(member)
        assert len(free) + len(inherited) >= size, "requested number of devices unavailable"
        return await self.plugins[member].prefer(request([*free, *inherited], size, inherited))

    async def allocate(self, name: str, container: str, member: PairMember, ids: Sequence[str]) -> None:
        plugin = self.plugins[member]
        await plugin.allocate(ids)
        for _ in range(2):  # the kubelet may take in the next list before the answer
            assert on_list(plugin) >= set(ids), "nil pointer dereference"
            self.read()
        held = self.taken_up["default", name].held
        held[container, resource_of(self.pair, member)] = frozenset(ids)

    def size(self, name: str, container: str, member: PairMember) -> int:
        limits = {each.name: each.limits for each in self.api["default", name].containers}
        return limits[container][resource_of(self.pair, member)]


def on_list(plugin: SharedPairPlugin, *, healthy: bool = False) -> frozenset[str]:
    devices = v1beta1.ListAndWatchResponse.parse(plugin.lists.value).devices
    return frozenset(each.id for each in devices if each.health == "Healthy" or not healthy)


def request(available: Collection[str], size: int, inherited: Sequence[str] = ()) -> PreferenceRequest:
    return PreferenceRequest(tuple(sorted(available)), tuple(inherited), size)


def while_read(kubelet: Follower, act: Callable[[], None]) -> None:
    """Have something happen once, while a call waits for the kubelet's record."""
    look, acts = kubelet.look, [act]

    async def slow(deadline: float = 1.0) -> Record:
        if acts:
            acts.pop()()
        return await look(deadline)

    kubelet.look = slow  # type: ignore[method-assign]


async def begun(*, trim: bool, drains: bool) -> Follower:
    """A pod that has its memory, of a GPU that has no more of it, or that closes."""
    kubelet = Follower(gpus=1, trim=trim)
    await kubelet.admit(pod("filler", share("main", 60, 20)))
    kubelet.take_up("a", share("main", 20, 20))
    await kubelet.ask("a", "main", MEMORY)
    if drains:
        kubelet.offer(Offering.CLOSING)
        kubelet.offer(Offering.CLOSED)
    return kubelet


@pytest.mark.parametrize("seen", ["by its timer", "by the call"])
@pytest.mark.parametrize(("trim", "drains"), [(True, False), (False, True)])
async def test_a_second_half_that_comes_after_the_promise_is_on_the_list(
    trim: bool, drains: bool, seen: str
) -> None:
    """Another plugin's Allocate comes between the halves; a reading shows the first."""
    kubelet = await begun(trim=trim, drains=drains)
    await kubelet.wait(3.0)
    if seen == "by its timer":
        await kubelet.wait(8.0)
    else:
        kubelet.now += 8.0
        while_read(kubelet, kubelet.read)
    await kubelet.ask("a", "main", CORE)
    kubelet.read()
    assert len(kubelet.listed(CORE)) == (0 if drains else 80)  # the rest is of no use to anybody


@pytest.mark.parametrize("until", ["it ends", "nothing came of it", "another pod asks"])
async def test_a_second_half_is_waited_for_as_long_as_its_pod_has_the_first(until: str) -> None:
    kubelet = await begun(trim=True, drains=False)
    await kubelet.wait(3.0, 8.0, 60.0)
    assert kubelet.pairing.waiting == 1
    assert len(kubelet.listed(CORE)) == 100
    if until == "it ends":
        kubelet.end(("default", "a"))
        await kubelet.wait(3.0)
    elif until == "nothing came of it":
        del kubelet.taken_up["default", "a"].held["main", VGPU.memory]
        await kubelet.wait(3.0)
    else:
        # The kubelet has no second pod under way.
        kubelet.api["default", "a"] = pod("a", *kubelet.api["default", "a"].containers, phase="Running")
        kubelet.take_up("b", share("main", 40, 1))
        with pytest.raises(Refused):
            await kubelet.ask("b", "main", CORE)
        kubelet.read()
        assert len(kubelet.listed(CORE)) == 60
    assert kubelet.pairing.waiting == 0


async def test_a_later_container_that_comes_after_the_promise_is_on_the_list() -> None:
    kubelet = Follower(gpus=1)
    await kubelet.admit(pod("filler", share("main", 50, 39)))
    kubelet.take_up("a", share("init", 25, 1, Stage.INIT), share("main", 40, 1))
    await kubelet.ask("a", "init", CORE)
    await kubelet.ask("a", "init", MEMORY)
    await kubelet.wait(3.0, 8.0)
    held = kubelet.taken_up["default", "a"].held
    await kubelet.ask("a", "main", CORE, sorted(held["init", VGPU.core]))
    await kubelet.allocate("a", "main", MEMORY, sorted(held["init", VGPU.memory]))
    kubelet.read()
    assert len(kubelet.listed(CORE)) == 90


async def test_a_later_container_is_waited_for_no_longer_than_an_admission_takes() -> None:
    """One that gets units again, from a kubelet that has lost its records, is followed by no other."""
    kubelet = Follower(gpus=1)
    kubelet.take_up("a", share("main", 25, 1), share("second", 40, 1))
    await kubelet.ask("a", "main", CORE)
    await kubelet.ask("a", "main", MEMORY)
    await kubelet.wait(LONGEST_ADMISSION_SECONDS)
    assert kubelet.pairing.continuing()
    await kubelet.wait(kubelet.pairing.rules.reservation_seconds)
    assert not kubelet.pairing.continuing()


async def test_a_call_that_waits_its_turn_is_not_late() -> None:
    kubelet = Follower(gpus=1)
    kubelet.take_up("a", share("main", 25, 1), share("second", 40, 1))
    await kubelet.ask("a", "main", CORE)
    await kubelet.ask("a", "main", MEMORY)
    # As while units are set aside for another container.
    async with anyio.create_task_group() as group, kubelet.pairing._turn:
        group.start_soon(kubelet.ask, "a", "second", CORE)
        await anyio.wait_all_tasks_blocked()
        kubelet.now += 12.0
        assert kubelet.pairing.continuing()


async def test_of_a_container_that_is_the_last_of_its_pair_nothing_more_is_waited_for() -> None:
    kubelet = Follower(gpus=1)
    kubelet.take_up("a", share("main", 25, 1), share("other", 25, 1, pair=MPS))
    await kubelet.ask("a", "main", CORE)
    await kubelet.ask("a", "main", MEMORY)
    assert not kubelet.pairing.continuing()


async def test_what_is_asked_for_stays_on_the_list_until_the_answer() -> None:
    kubelet = Follower(gpus=1)
    await kubelet.admit(pod("filler", share("main", 60, 20)))
    kubelet.take_up("a", share("main", 20, 20))
    asked = kubelet.listed(CORE) - kubelet.in_use(CORE)
    meanwhile: list[frozenset[str]] = []

    def closed() -> None:
        kubelet.offer(Offering.CLOSED)
        meanwhile.append(on_list(kubelet.plugins[CORE]))

    while_read(kubelet, closed)
    with pytest.raises(Refused):
        await kubelet.prefer("a", "main", CORE)
    assert meanwhile[0] >= asked
    assert on_list(kubelet.plugins[CORE]) == kubelet.in_use(CORE)


@pytest.mark.parametrize("call", ["prefer", "allocate"])
async def test_what_has_left_the_list_is_neither_preferred_nor_granted(call: str) -> None:
    kubelet = Follower(gpus=1)
    await kubelet.admit(pod("filler", share("main", 20, 40)))
    left = sorted(kubelet.listed(CORE) - kubelet.in_use(CORE))
    await kubelet.wait(3.0)
    assert not on_list(kubelet.plugins[CORE]).intersection(left)
    # The kubelet has yet to take in that list; by the record the units are of use again.
    kubelet.end(("default", "filler"))
    kubelet.take_up("a", share("main", 20, 20))
    plugin = kubelet.plugins[CORE]
    with pytest.raises(Refused, match="not offered any more" if call == "allocate" else "do not fit"):
        await (plugin.allocate(left[:20]) if call == "allocate" else plugin.prefer(request(left, 20)))


class Slow(Sharing):
    """To make what a container gets takes longer than a pair is reserved for."""

    def __init__(self, kubelet: Follower) -> None:
        super().__init__(kubelet.pair, kubelet.mode, trim=False)
        self._kubelet = kubelet

    async def additions(self, member: PairMember, grant: Grant, gpus: Sequence[Gpu]) -> Allocation:
        await self._kubelet.wait(3.0, 12.0)  # readings that cannot show it yet
        return await super().additions(member, grant, gpus)


async def test_what_is_granted_is_kept_though_its_answer_takes_long() -> None:
    kubelet = Follower(gpus=1)
    kubelet.shares.sharing = Slow(kubelet)
    kubelet.take_up("a", share("main", 20, 20))
    ids = await kubelet.prefer("a", "main", CORE)
    kubelet.offer(Offering.CLOSING)
    kubelet.offer(Offering.CLOSED)
    await kubelet.allocate("a", "main", CORE, ids)
    assert kubelet.pairing.waiting == 1


@pytest.mark.parametrize("member", PairMember)
async def test_a_pair_is_completed_of_a_gpu_that_closes_before_its_first_half_is_granted(
    member: PairMember,
) -> None:
    kubelet = Follower(gpus=1)
    kubelet.take_up("a", share("main", 30, 10))
    ids = await kubelet.prefer("a", "main", member)
    kubelet.offer(Offering.CLOSING)
    # The kubelet goes on at once, with the list that it has.
    assert len(kubelet.listed(member.other)) > 0
    await kubelet.allocate("a", "main", member, ids)
    kubelet.offer(Offering.CLOSED)
    await kubelet.ask("a", "main", member.other)
    kubelet.read()
    assert not kubelet.listed(CORE) | kubelet.listed(MEMORY)


async def test_a_pair_begun_on_a_gpu_that_has_closed_is_completed_by_lists_that_are_sent() -> None:
    kubelet = Follower(gpus=1)
    kubelet.take_up("a", share("main", 30, 10))
    ids = await kubelet.prefer("a", "main", CORE)
    kubelet.offer(Offering.CLOSED)
    await kubelet.allocate("a", "main", CORE, ids)
    await kubelet.ask("a", "main", MEMORY)
