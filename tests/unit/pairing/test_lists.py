"""Pods that wait for units, under a kubelet that sees the agent's real lists."""

from collections.abc import Awaitable, Callable

import pytest

from agent._proto import v1beta1
from agent.injection.inject import Injector
from agent.kubelet.wire import Refused
from agent.lists.shared_pair import SharedPairPlugin, Sharing
from agent.model.holding import PairMember
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.model.pod import Stage
from agent.pairing.resolver import PairRefused
from agent.settings import load
from tests.unit.pairing.asking import InOrder, index
from tests.unit.pairing.kubelet_model import KubeletModel, pod, share

SEEDS = range(20)


class Kubelet(KubeletModel):
    """Takes its devices from the lists that the plugins publish, as they were when it read them last."""

    def __init__(self, trim: bool = True, gpus: int = 2, blocks: int = 40, seed: int = 0) -> None:
        self.trim = trim
        self.known: dict[PairMember, frozenset[str]] = {}
        super().__init__(gpus, blocks, seed)

    def start_agent(self) -> None:
        super().start_agent()
        self.shares.sharing = Sharing(self.pair, self.mode, trim=self.trim)
        injector = Injector(load(None, {}, []))
        self.plugins = {member: SharedPairPlugin(self.shares, member, injector) for member in PairMember}
        self.read()

    def read(self) -> None:
        """The kubelet takes in the lists of now."""
        for member, plugin in self.plugins.items():
            plugin.refresh()
            found = v1beta1.ListAndWatchResponse.parse(plugin.lists.value).devices
            self.known[member] = frozenset(each.id for each in found if each.health == "Healthy")

    def read_before(self, call: int) -> None:
        """The kubelet is as quick as the agent: it takes in the lists before each call."""
        self.read()

    def listed(self, member: PairMember) -> frozenset[str]:
        return self.known[member]

    async def told(self) -> None:
        """The pod watch has shown an end, or the record was read; the lists follow at once."""
        await self.refresh()
        self.read()

    def figures(self) -> dict[PairMember, tuple[int, int]]:
        return {member: plugin.figures(self.modes.value) for member, plugin in self.plugins.items()}


async def outcome(admission: Awaitable[None]) -> str:
    try:
        await admission
    except (PairRefused, Refused) as refusal:
        return str(refusal)
    return "runs"


def deleted(kubelet: Kubelet) -> None:
    kubelet.end(("default", "a"))


def completed(kubelet: Kubelet) -> None:
    # The object stays in the API; the kubelet has freed the devices, and lists the pod no more.
    kubelet.api["default", "a"] = pod("a", *kubelet.api["default", "a"].containers, phase="Succeeded")
    del kubelet.taken_up["default", "a"]


@pytest.mark.parametrize("end", [completed, deleted])
@pytest.mark.parametrize("trim", [False, True])
async def test_waiting_pod_gets_the_freed_gpu(end: Callable[[Kubelet], None], trim: bool) -> None:
    for seed in SEEDS:
        kubelet = Kubelet(trim, seed=seed)
        await kubelet.admit(pod("a", share("main", 50, 40)))
        await kubelet.admit(pod("b", share("main", 70, 30)))
        await kubelet.told()
        assert len(kubelet.listed(PairMember.CORE)) == (150 if trim else 200)
        end(kubelet)
        if trim:
            await kubelet.told()
        # Where nothing is trimmed no list has to be read first.
        assert await outcome(kubelet.admit(pod("c", share("main", 60, 20)))) == "runs"


@pytest.mark.parametrize("first", [share("main", 10, 40), share("main", 100, 0)])
async def test_waiting_pod_fits_after_agent_update(first: object) -> None:
    for seed in SEEDS:
        kubelet = Kubelet(seed=seed)
        await kubelet.admit(pod("a", first))  # type: ignore[arg-type]
        kubelet.start_agent()
        await kubelet.told()
        kubelet.now += 100
        await kubelet.admit(pod("b", share("main", 80, 30)))
        await kubelet.told()
        kubelet.now += 1
        deleted(kubelet)
        await kubelet.told()
        assert await outcome(kubelet.admit(pod("c", share("main", 50, 30)))) == "runs"


async def test_a_container_gets_what_it_needs_more_than_the_init_container_that_took_the_last_memory() -> (
    None
):
    for seed in SEEDS:
        kubelet = Kubelet(gpus=1, seed=seed)
        await kubelet.admit(pod("a", share("main", 50, 39)))
        await kubelet.told()

        growing = pod("b", share("init", 25, 1, Stage.INIT), share("main", 40, 1))
        assert await outcome(kubelet.admit(growing, kubelet.read_before)) == "runs"
        await kubelet.told()
        assert len(kubelet.listed(PairMember.CORE)) == 90  # the rest is of no use to anybody


async def test_cores_are_of_use_only_while_the_pod_that_began_is_admitted() -> None:
    kubelet = Kubelet(gpus=1)
    await kubelet.admit(pod("a", share("main", 50, 39)))

    def killed(call: int) -> None:
        if call == 4:  # the second container's
            raise Refused("the kubelet gave the pod up")

    growing = pod("b", share("init", 25, 1, Stage.INIT), share("main", 40, 1))
    assert await outcome(kubelet.admit(growing, killed)) != "runs"
    assert len(kubelet.listed(PairMember.CORE)) == 100
    kubelet.now += 60
    await kubelet.admit(pod("c", share("main", 10, 1)))
    await kubelet.told()
    assert len(kubelet.listed(PairMember.CORE)) == 60


async def test_restarted_kubelet_that_lists_nothing() -> None:
    for seed in SEEDS:
        kubelet = Kubelet(seed=seed)
        await kubelet.admit(pod("a", share("main", 100, 0)))
        await kubelet.admit(pod("b", share("prepare", 60, 30, Stage.INIT), share("main", 10, 5)))
        await kubelet.told()
        before = kubelet.figures()
        lists = [plugin.lists.value for plugin in kubelet.plugins.values()]
        for agent in ("the same", "another"):
            kubelet.heard = set()
            if agent == "another":
                kubelet.start_agent()
            await kubelet.told()
            assert kubelet.figures() == before
            assert [plugin.lists.value for plugin in kubelet.plugins.values()] == lists
        # A backlog, of pods that ask for memory alone, too: nobody gets what is held, and nobody dies of it.
        for number in range(3):
            assert await outcome(kubelet.admit(pod(f"late-{number}", share("main", 0, 3)))) == "runs"
        kubelet.heard = None
        await kubelet.told()
        assert kubelet.pairing.ledger.held.ids == kubelet.in_use(PairMember.CORE) | kubelet.in_use(
            PairMember.MEMORY
        )


async def test_a_gpu_that_drains_keeps_its_holders_under_a_restarted_kubelet() -> None:
    kubelet = Kubelet()
    await kubelet.admit(pod("a", share("prepare", 60, 30, Stage.INIT), share("main", 10, 5)))
    await kubelet.told()
    first = kubelet.inventory.value.gpus[0].uuid
    drains = GpuMode(Mode.VGPU, Offering.CLOSED, reason="drains")
    kubelet.modes.publish(Assignment({**kubelet.modes.value.gpus, first: drains}))
    await kubelet.told()
    before = kubelet.figures()
    assert before == {PairMember.CORE: (160, 100), PairMember.MEMORY: (70, 40)}
    kubelet.heard = set()
    await kubelet.told()
    assert kubelet.figures() == before


@pytest.mark.parametrize("offering", [Offering.CLOSING, Offering.CLOSED])
@pytest.mark.parametrize("member", PairMember)
async def test_a_begun_pair_gets_its_second_half_from_a_gpu_that_closes(
    offering: Offering, member: PairMember
) -> None:
    kubelet = Kubelet(gpus=1)
    (gpu,) = kubelet.pairing.ledger.pools
    healthy: list[int] = []

    def closes(call: int) -> None:
        if call == 2:  # between the halves
            kubelet.modes.publish(Assignment({gpu: GpuMode(kubelet.mode, offering)}))
        kubelet.read()
        healthy.append(len(kubelet.listed(member.other)))

    kubelet.random = InOrder([member, member.other], [member, member.other])
    assert await outcome(kubelet.admit(pod("a", share("main", 30, 10)), closes)) == "runs"
    assert healthy[2] > 0
    # From then on nothing of it is on offer, and the next pod finds nothing.
    kubelet.read()
    assert not kubelet.listed(member)
    assert not kubelet.listed(member.other)
    assert await outcome(kubelet.admit(pod("b", share("main", 30, 10)))) != "runs"


@pytest.mark.parametrize("seconds", [0.5, 11.0, 3600.0])
async def test_a_second_half_that_comes_late_lies_where_the_first_does(seconds: float) -> None:
    """After the promise has expired the record says on which GPU the container is."""
    for seed in SEEDS:
        kubelet = Kubelet(gpus=3, seed=seed)

        def late(call: int, kubelet: Kubelet = kubelet) -> None:
            if call == 2:
                kubelet.now += seconds
            kubelet.read()

        await kubelet.admit(pod("filler", share("main", 60, 10)), late)
        spread = pod("a", share("main", 20, 20), annotations={"gpu-node-agent.io/placement": "spread"})
        assert await outcome(kubelet.admit(spread, late)) == "runs"
        (gpu,) = kubelet.gpus_of(spread.key, "main")
        assert gpu not in kubelet.gpus_of(("default", "filler"), "main")


async def test_a_gpu_of_which_the_kubelet_may_lack_units_is_chosen_where_no_other_has_room() -> None:
    """On the cluster a pod got cores of a GPU whose memory had not reached the kubelet, and was refused."""
    kubelet = KubeletModel(gpus=2)

    def listed(*without_memory: int) -> None:
        for member in PairMember:
            counts = {
                pool.gpu: 0
                if member is PairMember.MEMORY and pool.index in without_memory
                else len(pool.ids(member))
                for pool in kubelet.pairing.ledger.pools.values()
            }
            kubelet.pairing.listed(member, counts)

    async def gpu_of(name: str, cores: int) -> int:
        await kubelet.admit(pod(name, share("main", cores, 4)))
        (found,) = index(kubelet, ("default", name))
        return found

    listed()
    assert await gpu_of("first", 60) == 0
    listed(0)
    kubelet.now += 5.0
    assert await gpu_of("while it is withheld", 10) == 1
    listed()
    kubelet.now += 0.5
    assert await gpu_of("just after", 10) == 1
    kubelet.now += 1.0
    assert await gpu_of("settled", 10) == 0
    listed(1)
    assert await gpu_of("too large for the other", 75) == 1
