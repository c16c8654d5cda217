"""Who stands in the way of a clean-up: pods that live, also those that PodResources never list; no others."""

import json
from pathlib import Path
from types import MappingProxyType

import pytest

from agent.cleanup import this_node
from agent.cleanup.request import CleanupFailed, CleanupRefused
from agent.cluster.api import KubeApi
from agent.cluster.pods import PodCache
from agent.holdings.record import FILE_NAME
from agent.model.holding import Holding, Record
from agent.model.pod import Metadata, Pod
from agent.settings import Settings, load

GPU = "GPU-00000000-0000-0000-0000-00000000000a"
CORE, SHARE = "nvidia.com/mps-core", f"{GPU}::sc1"
OTHER = ("team", "other", "main")  # a pod that has nothing of ours


class Kubelet:
    """Answers PodResources."""

    def __init__(self, root: Path) -> None:
        self.path = root / "kubelet.sock"
        self.holdings: tuple[Holding, ...] = ()

    async def list(self, deadline: float = 2.0) -> Record:
        return Record(self.holdings, (OTHER, *((h.namespace, h.pod, h.container) for h in self.holdings)))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "device-plugins").mkdir()
    (tmp_path / "kubelet.sock").touch()
    return load(None, {}, [f"kubelet.root={tmp_path}"])


@pytest.fixture
def kubelet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubelet:
    made = Kubelet(tmp_path)
    monkeypatch.setattr(this_node, "PodResources", lambda _: made)
    monkeypatch.setattr(this_node, "SYNC_SECONDS", 0.0)
    return made


def cache(*uids: str, problem: str | None = None) -> PodCache:
    """The node's pods by the API server; their names are their UIDs."""
    made = PodCache(KubeApi(None, None), "node1")
    pods = {uid: Pod(Metadata(name=uid, namespace="team", uid=uid)) for uid in (*uids, "other")}
    made.reflector.items.publish(MappingProxyType(pods))
    made.reflector.synced, made.reflector.problem = True, problem
    return made


def remember(settings: Settings, uid: str) -> None:
    """The kubelet's checkpoint names a share of that pod."""
    entry = {
        "PodUID": uid,
        "ContainerName": "main",
        "ResourceName": CORE,
        "DeviceIDs": {"-1": [SHARE]},
    }
    document = {"Data": {"PodDeviceEntries": [entry]}, "Checksum": 0}
    (settings.device_plugins_folder / FILE_NAME).write_text(json.dumps(document))


async def test_a_pod_that_the_kubelet_lists_stands_in_the_way(settings: Settings, kubelet: Kubelet) -> None:
    kubelet.holdings = (Holding("team", "a", "main", CORE, (SHARE,)),)
    for known in (cache("a"), None):
        with pytest.raises(CleanupRefused, match=r"1 pod\(s\) hold MPS shares.*team/a"):
            await this_node.refuse_holders(settings, known)


async def test_one_that_holds_an_instance_loses_nothing(settings: Settings, kubelet: Kubelet) -> None:
    kubelet.holdings = (Holding("team", "a", "main", "nvidia.com/mig-1g.18gb", ("MIG-1",)),)
    assert await this_node.refuse_holders(settings, cache("a")) == {"team/a"}


async def test_so_does_one_that_only_the_checkpoint_shows(settings: Settings, kubelet: Kubelet) -> None:
    """Its plain init container has the share."""
    remember(settings, "a")
    with pytest.raises(CleanupRefused, match="team/a"):
        await this_node.refuse_holders(settings, cache("a"))


async def test_entries_of_pods_that_have_ended_hold_nothing(settings: Settings, kubelet: Kubelet) -> None:
    """The kubelet keeps them until the next pod with devices comes."""
    remember(settings, "ended")
    await this_node.refuse_holders(settings, cache())
    await this_node.refuse_holders(settings, None)


async def test_without_the_api_server_s_word_nobody_can_tell(settings: Settings, kubelet: Kubelet) -> None:
    with pytest.raises(CleanupFailed, match=r"the API server does not list.*\(gone away\)"):
        await this_node.refuse_holders(settings, cache(problem="gone away"))
