"""Requests of pods, the part that they have not got yet, and the UID in their cgroups."""

from typing import Any

import msgspec

from agent.cluster.pods import HASH_ANNOTATION, PodCache, cgroup_uids
from agent.model.pod import ContainerSpec, Metadata, OwnerReference, Pod, PodSpec, PodStatus, Requirements
from agent.pairing.cluster_pods import ClusterPods

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
OURS = frozenset({CORE, MEMORY})
PAIR = ContainerSpec("main", Requirements({CORE: "20", MEMORY: "50", "cpu": "1"}))


def pod(*containers: ContainerSpec, init: tuple[ContainerSpec, ...] = ()) -> Pod:
    return Pod(Metadata("p"), PodSpec(list(containers), list(init)))


def test_half_a_pair_is_not_enough() -> None:
    wanting = pod(PAIR)
    assert wanting.lacks(OURS, frozenset())
    assert wanting.lacks(OURS, {("main", CORE)})
    assert not wanting.lacks(OURS, {("main", CORE), ("main", MEMORY)})
    assert not pod(ContainerSpec("main", Requirements({"cpu": "1"}))).lacks(OURS, frozenset())


def test_init_containers_that_have_ended_lack_nothing() -> None:
    staged = pod(PAIR, init=(ContainerSpec("prepare", Requirements({CORE: "10", MEMORY: "5"})),))
    assert staged.lacks(OURS, frozenset())
    assert not staged.lacks(OURS, {("main", CORE), ("main", MEMORY)})


NODE = OwnerReference("v1", "Node", "node", "node-uid", controller=True)


def mirror(uid: str, config_hash: str, *owners: OwnerReference) -> Pod:
    annotations = {HASH_ANNOTATION: config_hash, "kubernetes.io/config.mirror": config_hash}
    return Pod(Metadata(uid, uid=uid, annotations=annotations, owner_references=[*owners] or [NODE]))


def test_a_pod_with_a_start_time_was_admitted_or_turned_away() -> None:
    for text, started in ((b"{}", False), (b'{"startTime": "2026-01-01T00:00:00Z"}', True)):
        assert Pod(Metadata("p"), status=msgspec.json.decode(text, type=PodStatus)).started is started


def test_a_pod_has_ended_when_the_complete_list_says_so() -> None:
    cache = PodCache(None, "node")  # type: ignore[arg-type]
    assert not ClusterPods(cache).view().ended("a")  # nothing is known yet
    cache.reflector.items.publish(
        {
            "a": Pod(Metadata("a", uid="a"), PodSpec([]), PodStatus(phase="Running")),
            "b": Pod(Metadata("b", uid="b"), PodSpec([]), PodStatus(phase="Succeeded")),
            "mirror": mirror("mirror", "s"),
        }
    )
    cache.reflector.synced = True
    # While the watch is interrupted a pod that is not there may be one that came since.
    assert [ClusterPods(cache).view().ended(uid) for uid in ("a", "b", "gone")] == [False, True, False]
    cache.reflector.problem = None
    assert [ClusterPods(cache).view().ended(uid) for uid in ("a", "b", "gone", "s")] == [
        False,
        True,
        True,
        False,
    ]


def test_a_hash_counts_where_the_node_owns_the_object_that_tells_it() -> None:
    def owned(**fields: Any) -> Pod:
        return mirror("m", "h", msgspec.structs.replace(NODE, **fields))

    for pod, node_uid, found in (
        (owned(), "node-uid", ["m", "h"]),
        (owned(), None, ["m", "h"]),  # the Node object has not been read yet
        (owned(uid="another"), "node-uid", ["m"]),
        (owned(uid="another"), None, ["m", "h"]),
        (owned(name="another"), "node-uid", ["m"]),
        (owned(kind="ReplicaSet"), "node-uid", ["m"]),
        (owned(api_version="v2"), "node-uid", ["m"]),
        (owned(controller=False), "node-uid", ["m"]),
        (owned(controller=None), "node-uid", ["m"]),
        (Pod(Metadata(uid="m", annotations={HASH_ANNOTATION: "h"})), "node-uid", ["m"]),
    ):
        assert list(cgroup_uids({"m": pod}, "node", node_uid).pods) == found, pod.metadata.owner_references


def test_a_hash_that_is_claimed_twice_is_nobody_s() -> None:
    twice = cgroup_uids({"a": mirror("a", "h"), "b": mirror("b", "h"), "c": mirror("c", "k")}, "node", None)
    assert sorted(twice.pods) == ["a", "b", "c", "k"]
    assert twice.contested == {"h"}
    cache = PodCache(None, "node")  # type: ignore[arg-type]
    cache.reflector.items.publish({"a": mirror("a", "h"), "b": mirror("b", "h")})
    cache.reflector.synced, cache.reflector.problem = True, None
    # A static pod's units are not given away because somebody contests its UID.
    assert not ClusterPods(cache).view().ended("h")


def test_a_pod_that_claims_another_uid_stays_known_by_its_own() -> None:
    """A tenant may write annotation and owner onto its own running pod."""
    cache = PodCache(None, "node", lambda: "node-uid")  # type: ignore[arg-type]
    cache.reflector.synced, cache.reflector.problem = True, None
    for pods in ({"a": mirror("a", "made-up")}, {"a": mirror("a", "made-up"), "b": mirror("b", "made-up")}):
        cache.reflector.items.publish(pods)
        assert not ClusterPods(cache).view().ended("a")
        assert ClusterPods(cache).view().pods["a"].name == "a"


def test_the_mapping_follows_pods_and_node() -> None:
    node_uid: list[str | None] = [None]
    cache = PodCache(None, "node", lambda: node_uid[0])  # type: ignore[arg-type]
    cache.reflector.items.publish({"m": mirror("m", "h")})
    assert list(cache.cgroup_uids().pods) == ["m", "h"]
    assert cache.cgroup_uids().pods is cache.cgroup_uids().pods
    node_uid[0] = "made again"
    assert list(cache.cgroup_uids().pods) == ["m"]
    cache.reflector.items.publish({})
    assert not cache.cgroup_uids().pods
