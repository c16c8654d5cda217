"""Files of others that the agent reads: the kubelet's checkpoint, and CDI specifications."""

import json
from pathlib import Path

import pytest

from agent.cluster.node import NodeInfo
from agent.holdings.record import FILE_NAME, Checkpoint, CheckpointUnreadable, Evidence, View, join
from agent.injection.inject import TOOLKIT_KIND, choose, toolkit_devices
from agent.model.holding import Holding, Record
from agent.settings import Settings
from tests.fuzz.campaign import Campaign

GPU = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"


def _entry(
    uid: str, container: str, *ids: str, resource: str = "tencent.com/vcuda-core"
) -> dict[str, object]:
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": {"-1": list(ids)},
        "AllocResp": "CkIKFk5WSURJQV9WSVNJQkxF",
    }


CHECKPOINTS = tuple(
    json.dumps(document).encode()
    for document in (
        {"Data": {"PodDeviceEntries": None, "RegisteredDevices": None}, "Checksum": 1},
        {"Data": {"PodDeviceEntries": [_entry("u1", "main", f"{GPU}::c1", f"{GPU}::c2")]}, "Checksum": 2},
        {
            "Data": {
                "PodDeviceEntries": [_entry("u1", "main", f"{GPU}::c1"), _entry("u2", "init", f"{GPU}::c3")],
                "RegisteredDevices": {"tencent.com/vcuda-core": [f"{GPU}::c1"]},
            },
            "Checksum": 3,
        },
    )
)


NESTED = b'{"a":' * 3000


def test_checkpoint(campaign: Campaign, tmp_path: Path) -> None:
    held = tuple(
        Holding("ns", name, "main", "tencent.com/vcuda-core", (f"{GPU}::c{number}",))
        for number, name in enumerate(("a", "b"))
    )
    listed = Record(held, tuple(("ns", each.pod, "main") for each in held))
    file = tmp_path / FILE_NAME

    def act(data: bytes) -> str:
        file.unlink(missing_ok=True)  # some file systems wait for the disk where a file is overwritten
        file.write_bytes(data)
        try:
            entries = Checkpoint(tmp_path).read()
        except CheckpointUnreadable:
            return "refused"
        for view in (View(), View(complete=True)):
            for same in (True, False):
                joined = join(Evidence(), listed, entries, view, same_kubelet=same, fresh=True).joined
                # What the kubelet lists stays held, whatever the file says: it is not offered again.
                assert set(held) <= set(joined.holdings)
        return "read"

    campaign.run(act, (*CHECKPOINTS, NESTED), (b'"PodUID":', b'"DeviceIDs":', b'{"0":[', b"null", b"GPU-"))


SPECIFICATIONS = (
    b'{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"GPU-1","containerEdits":{}}]}',
    b"cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: '0'\n  containerEdits: {}\n- name: GPU-1\n",
    (
        b"kind: nvidia.com/gpu\na: &a [x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"
        b"c: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\n"
        b"f: &f [*e,*e,*e,*e,*e,*e,*e,*e]\ng: &g [*f,*f,*f,*f,*f,*f,*f,*f]\ndevices: [{name: *g}]\n"
    ),
    b"kind: other.example/thing\ndevices: [{name: x}]\n",
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_cdi_specifications(campaign: Campaign, tmp_path: Path) -> None:
    settings = Settings()
    software = NodeInfo("v1.36.3", "containerd://2.4.2")
    file = tmp_path / "nvidia.yaml"

    def act(data: bytes) -> str:
        file.unlink(missing_ok=True)  # some file systems wait for the disk where a file is overwritten
        file.write_bytes(data)
        devices = toolkit_devices([tmp_path])
        assert all(isinstance(name, str) for name in devices)
        choice = choose(settings, software, devices)
        assert choice.cdi == any(name.startswith("GPU-") for name in devices)
        return f"{'no ' * (not devices)}devices"

    campaign.run(
        act, SPECIFICATIONS, (b"&a", b"*a", b"!!python/object", b"<<: ", TOOLKIT_KIND.encode(), b"- ")
    )


VERSIONS = (
    "v².³ containerd://²".encode(),
    b"v1.36.3 containerd://2.4.2",
    b"v1.28.0 cri-o://1.30.1",
    b" ",
    b"v1 docker://20.10",
)


def test_versions_of_the_node(campaign: Campaign) -> None:
    def act(data: bytes) -> str:
        kubelet, _, runtime = data.decode(errors="replace").partition(" ")
        chosen = choose(Settings(), NodeInfo(kubelet, runtime), frozenset({"GPU-1"}))
        return "cdi" if chosen.cdi else "no cdi"

    campaign.run(act, VERSIONS, (b"v", b".", b"://"))
