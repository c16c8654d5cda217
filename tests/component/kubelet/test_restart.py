"""The state after a restart of the kubelet, and pods after a reboot."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.simulator.kubelet import EmbeddedKubelet, Phase
from agent.simulator.kubelet.containers import ContainerView
from agent.simulator.kubelet.workers import Containers
from tests.component.kubelet.conftest import FAST
from tests.component.kubelet.peer import GPU, V1BETA1, Plugin, pod_resources
from tests.component.kubelet.steps import EIGHT, held, pod, ready, run
from tests.component.kubelet.waiting import eventually
from tests.pace import scaled


def file(root: Path) -> Path:
    return root / "device-plugins/kubelet_internal_checkpoint"


def document(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(file(root).read_text())
    return loaded


async def test_checkpoint_has_the_kubelets_layout(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        numa = {"a": [0], "b": [1]}
        with Plugin(root / "plugins_registry/p.sock", devices={**EIGHT, "h": False}, numa=numa).serving():
            await ready(kubelet, 7)
            await run(kubelet, pod("p", 7))
            data = document(root)["Data"]
            (entry,) = data["PodDeviceEntries"]
            assert entry["PodUID"] == kubelet.pod(pod("p")).uid
            assert (entry["ContainerName"], entry["ResourceName"]) == ("main", GPU)
            assert {n: set(ids) for n, ids in entry["DeviceIDs"].items()} == {
                "0": {"a"},
                "1": {"b"},
                "-1": set("cdefg"),
            }
            response = V1BETA1.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
            assert set(response.envs["HELD"].split(",")) == set("abcdefg")
            assert set(data["RegisteredDevices"][GPU]) == set("abcdefg")
            mode = (root / "device-plugins/kubelet_internal_checkpoint").stat().st_mode
            assert mode & 0o777 == 0o600


async def test_pods_keep_their_devices_without_a_new_allocate(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving() as plugin:
            await ready(kubelet)
            await run(kubelet, pod("old", 5))
            before = held(kubelet, pod("old"))
            await kubelet.restart(down=0.1)
            await eventually(lambda: plugin.streams == 1 and kubelet.known_devices(GPU) == 8)
            await run(kubelet, pod("new", 3))
            assert kubelet.pod(pod("old")).phase is Phase.RUNNING
            assert held(kubelet, pod("old")) == before
            assert held(kubelet, pod("new")) == set(EIGHT) - before
            assert len(plugin.named("Allocate")) == 2


async def test_a_pod_that_is_still_ending_holds_its_devices_after_a_restart(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    """`HandlePodAdditions` takes up pods with a deletion timestamp as well, which their workers then end."""
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving() as plugin:
            await ready(kubelet)
            ending = pod("ending", 5, grace=scaled(2.0))
            await run(kubelet, ending)
            kubelet.api.delete(ending)
            await kubelet.restart(down=0.1)
            await eventually(lambda: plugin.streams == 1 and kubelet.known_devices(GPU) == 8)
            with pod_resources(kubelet.pod_resources_socket) as lister:
                assert {name for name, _ in await anyio.to_thread.run_sync(lister.held)} == {"ending"}
            await eventually(lambda: ending.key not in kubelet.api.pods)
            await run(kubelet, pod("late", 8))


async def test_nothing_is_listed_until_the_pods_are_told(root: Path) -> None:
    """The socket serves, the plugin is back, units are held; and still no pod is there to hold them."""
    kubelet = EmbeddedKubelet(root, status_tick=0.02, timings=replace(FAST, first_pods=scaled(1.0)))
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, pod("old", 5))
            await kubelet.restart()
            await eventually(lambda: kubelet.known_devices(GPU) == 8)
            assert await listed(kubelet) == {}
            assert {entry["PodUID"] for entry in document(root)["Data"]["PodDeviceEntries"]} == {
                kubelet.pod(pod("old")).uid
            }
            with anyio.fail_after(5):
                while not await listed(kubelet):
                    await anyio.sleep(0.02)
            assert {one for _, one in (await listed(kubelet))["old", "main"]} == held(kubelet, pod("old"))


async def listed(kubelet: EmbeddedKubelet) -> dict[tuple[str, str], list[tuple[str, str]]]:
    def ask() -> dict[tuple[str, str], list[tuple[str, str]]]:
        with pod_resources(kubelet.pod_resources_socket) as lister:
            return lister.held()

    return await anyio.to_thread.run_sync(ask)


async def test_pod_deleted_while_the_kubelet_is_down_goes_at_its_start(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, pod("old", 8))
            await kubelet.stop()
            kubelet.api.delete(pod("old"))
            await kubelet.start()
            await eventually(
                lambda: pod("old").key not in kubelet.api.pods and kubelet.known_devices(GPU) == 8
            )
            await run(kubelet, pod("new", 8))


async def test_pod_that_arrives_before_the_plugin_is_back_is_refused(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    """The node's status still shows the old figures, so the scheduler sends it."""
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            # One that leaves no checkpoint comes back as a new node, whose figures are 0.
            await eventually((root / "device-plugins/kubelet_internal_checkpoint").exists)
            await kubelet.stop()
            kubelet.create_pod(pod("early"))
            await eventually(lambda: kubelet.pod(pod("early")).node_name is not None)
            await kubelet.start()
            await eventually(lambda: kubelet.pod(pod("early")).phase is Phase.FAILED)
            assert "no healthy devices present" in kubelet.pod(pod("early")).message


async def test_without_its_plugin_a_restarted_kubelet_shows_zero(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, pod("old", 5))
            await kubelet.stop()
        await kubelet.start()
        await ready(kubelet, 0)
        assert kubelet.pod(pod("old")).phase is Phase.RUNNING  # running containers are left alone


async def test_reboot_readmits_from_the_checkpoint_or_refuses_for_good(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, pod("old", 5))
            await kubelet.stop()
        # Nobody has registered when the pods come back.
        await kubelet.restart(reboot=True)
        await eventually(lambda: kubelet.pod(pod("old")).phase is Phase.FAILED)
        assert "no healthy devices present" in kubelet.pod(pod("old")).message


async def test_device_that_turns_unhealthy_in_use_evicts_nobody(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving() as plugin:
            await ready(kubelet)
            await run(kubelet, pod("old", 8))
            plugin.publish({**EIGHT, "a": False})
            await ready(kubelet, 7)
            assert kubelet.pod(pod("old")).phase is Phase.RUNNING


@pytest.mark.parametrize("torn", [b"", b"{}", b"[]", b"\xff\xfe", None])
async def test_a_kubelet_goes_on_without_a_checkpoint_that_it_cannot_read(
    kubelet: EmbeddedKubelet, root: Path, torn: bytes | None
) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving() as plugin:
            await ready(kubelet)
            await run(kubelet, pod("old", 8))
            await eventually(lambda: file(root).exists())  # it is written after the list was taken
            await kubelet.stop()
            changed = document(root)
            changed["Data"]["RegisteredDevices"]["nvidia.com/other"] = []
            file(root).write_bytes(json.dumps(changed).encode() if torn is None else torn)
            await kubelet.start()
            await eventually(lambda: plugin.streams == 1 and kubelet.known_devices(GPU) == 8)
            assert not any((await listed(kubelet)).values())


async def test_nothing_is_left_running(kubelet: EmbeddedKubelet, root: Path) -> None:
    tasks = len(anyio.get_running_tasks())
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving() as plugin:
            await ready(kubelet)
            assert len(anyio.get_running_tasks()) > tasks
    assert len(anyio.get_running_tasks()) == tasks
    assert plugin.streams == 0


async def test_a_process_that_had_ended_before_its_kubelet_did_is_not_waited_for() -> None:
    containers, spec = Containers(), pod("p").containers[0]
    containers.started("uid", spec, ContainerView(), ends=False)
    containers.end("uid")
    with anyio.fail_after(scaled(1)):
        await containers.ended("uid", spec.name)
