"""What pods ask for, and what they have not got yet."""

from agent.cluster.pods import Container, Pod, PodCache, PodSpec, PodStatus, Resources
from agent.cluster.reflector import Metadata

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
OURS = frozenset({CORE, MEMORY})
PAIR = Container("main", Resources({CORE: "20", MEMORY: "50", "cpu": "1"}))


def pod(*containers: Container, init: tuple[Container, ...] = ()) -> Pod:
    return Pod(Metadata("p"), PodSpec(list(containers), list(init)))


def test_half_a_pair_is_not_enough() -> None:
    wanting = pod(PAIR)
    assert wanting.lacks(OURS, frozenset())
    assert wanting.lacks(OURS, {("main", CORE)})
    assert not wanting.lacks(OURS, {("main", CORE), ("main", MEMORY)})
    assert not pod(Container("main", Resources({"cpu": "1"}))).lacks(OURS, frozenset())


def test_init_containers_that_have_ended_lack_nothing() -> None:
    staged = pod(PAIR, init=(Container("prepare", Resources({CORE: "10", MEMORY: "5"})),))
    assert staged.lacks(OURS, frozenset())
    assert not staged.lacks(OURS, {("main", CORE), ("main", MEMORY)})


def test_a_pod_has_ended_when_the_complete_list_says_so() -> None:
    cache = PodCache(None, "node")  # type: ignore[arg-type]
    assert not cache.ended("a")  # nothing is known yet
    cache.reflector.items.publish(
        {
            "a": Pod(Metadata("a", uid="a"), PodSpec([]), PodStatus(phase="Running")),
            "b": Pod(Metadata("b", uid="b"), PodSpec([]), PodStatus(phase="Succeeded")),
            "mirror": Pod(
                Metadata("s", uid="mirror", annotations={"kubernetes.io/config.hash": "s"}), PodSpec([])
            ),
        }
    )
    cache.reflector.synced = True
    # While the watch is interrupted a pod that is not there may be one that came since.
    assert [cache.ended(uid) for uid in ("a", "b", "gone")] == [False, True, False]
    cache.reflector.problem = None
    assert [cache.ended(uid) for uid in ("a", "b", "gone", "s")] == [False, True, True, False]
