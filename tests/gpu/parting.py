"""A GPU that may be partitioned, an agent of its own, and the embedded kubelet: the steps of `test_mig.py`.

NVML is open in this process only where it is asked something: a driver switches MIG mode of no GPU that
others have open.
"""

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from agent.model.gpu import Gpu
from agent.nvml.binding import NvmlBinding
from agent.nvml.port import MigProfile
from agent.simulator.kubelet import EmbeddedKubelet, Phase, PodSpec, Timings
from agent.simulator.kubelet.pod_specs import ContainerSpec
from tests.cluster.agent_process import AgentProcess
from tests.gpu.programs import binding
from tests.pace import scaled

PLAIN = re.compile(r"[0-9]+g\.[0-9]+gb")
PREFIX = "nvidia.com/mig-"
WAIT_SECONDS = 90.0  # with the reset of a GPU
TIMINGS = Timings(registry_poll=0.2, wiping=2.0, terminate_retry=1.0)
SPACING_SECONDS = 1.5  # the agent takes a second request within a second for a flapping one


class Parting:
    """GPU 0, whose MIG mode and instances are afterwards what they were before."""

    def __init__(
        self, folder: Path, library: Path | None = None, more: Mapping[str, object] | None = None
    ) -> None:
        """`library`: NVML's in place of the driver's; `more`: settings of the agent."""
        self._folder = folder
        self._library = library
        self._more = dict(more or {})
        self._agent = AgentProcess(folder, {}, lambda _: None)
        self.kubelet = EmbeddedKubelet(
            folder / "k", status_tick=0.5, timings=TIMINGS, cdi_folder=folder / "cdi"
        )

    @contextmanager
    def nvml(self) -> Iterator[NvmlBinding]:
        """Open. Blocks."""
        found = NvmlBinding(self._library) if self._library else binding()
        found.open()
        try:
            yield found
        finally:
            found.close()

    def gpu(self) -> Gpu:
        with self.nvml() as nvml:
            return nvml.describe(0)

    def free(self) -> Gpu:
        """The GPU, which nobody uses. Raises AssertionError with what is in the way. Blocks."""
        with self.nvml() as nvml:
            gpu = nvml.describe(0)
            assert gpu.mig_switch, f"{gpu.product} has no MIG mode: leave MIG=yes out"
            there = nvml.partition(gpu.uuid).instances if gpu.mig_enabled else ()
            assert not there, f"GPU 0 has {len(there)} instances: nvidia-smi mig -dci, -dgi destroy them"
            used = nvml.sample(gpu.uuid).processes
            assert not used, f"GPU 0 is not free: {', '.join(str(each.pid) for each in used or ())}"
            return gpu

    def profiles(self, gpu: Gpu) -> tuple[MigProfile, MigProfile]:
        """The smallest, and the largest of which there is room for two. Blocks."""
        with self.nvml() as nvml:
            if not gpu.mig_enabled:
                nvml.set_mig_mode(gpu.uuid, True)
            known = [each for each in nvml.partition(gpu.uuid).profiles if PLAIN.fullmatch(each.name)]
            if not gpu.mig_enabled:
                nvml.set_mig_mode(gpu.uuid, False)
        small = min(known, key=lambda each: (each.slices, each.size))
        return small, max((each for each in known if each.most == 2), key=lambda each: each.slices)

    def put_back(self, gpu: Gpu) -> None:
        """Whatever has happened. Blocks."""
        with self.nvml() as nvml:
            now = nvml.describe(0).mig_enabled
            for each in nvml.partition(gpu.uuid).instances if now else ():
                nvml.destroy_instance(gpu.uuid, each, "")  # the GPU is this test's own
            if now is not gpu.mig_enabled:
                nvml.set_mig_mode(gpu.uuid, gpu.mig_enabled)

    def placed(self) -> dict[str, int]:
        """How many instances there are, by profile, whole or half made. Blocks."""
        with self.nvml() as nvml:
            found = nvml.partition(nvml.describe(0).uuid)
        names = {each.number: each.name for each in found.profiles}
        profiles = [names[each.profile] for each in found.instances]
        return {name: profiles.count(name) for name in profiles}

    async def start(self, layouts: Mapping[str, tuple[str, ...]]) -> None:
        rest = {"gpus": ["rest"], "mode": "pgpu"}
        settings: dict[str, object] = {
            "defaultMode": "pgpu",
            "modeFile": str(self._folder / "mode"),
            "layouts": {
                name: [{"gpus": [0], "mode": "mig", "mig": list(profiles)}, rest]
                for name, profiles in layouts.items()
            },
            "mig.manage": True,
            "mig.allowReset": True,
            "injection.strategy": "envvar",
            "cluster.access": "off",
            "logging.format": "json",
            "http.address": "127.0.0.1",
            "http.port": 0,
            "kubelet.root": str(self.kubelet.root),
            **{f"host.{name}": str(self._folder / name) for name in ("state", "run", "cdi")},
        }
        if self._library:
            settings["driver.library"] = str(self._library)
        await anyio.to_thread.run_sync(self._agent.start, settings | self._more)

    async def end(self) -> None:
        await self._agent.end(signal.SIGKILL, 5)

    async def want(self, name: str) -> None:
        """A layout, or a mode."""
        await anyio.sleep(SPACING_SECONDS)
        await anyio.Path(self._folder / "mode").write_text(name)

    async def run(self, name: str, resource: str) -> tuple[PodSpec, str]:
        """A pod with one instance, and the instance's UUID."""
        pod = PodSpec(name, (ContainerSpec("main", {resource: 1}),))
        self.kubelet.create_pod(pod)
        await self.until(lambda: self.kubelet.pod(pod).phase is Phase.RUNNING, f"pod {name} runs")
        return pod, self.kubelet.container(pod, "main").env["NVIDIA_VISIBLE_DEVICES"]

    async def offered(self, resource: str, count: int) -> None:
        await self.until(
            lambda: self.kubelet.api.allocatable.get(resource, 0) == count,
            f"{count} of {resource} are on offer",
        )

    async def there(self, expected: Mapping[str, int]) -> None:
        with anyio.move_on_after(scaled(WAIT_SECONDS)):
            while (found := await anyio.to_thread.run_sync(self.placed)) != expected:
                await anyio.sleep(0.5)
            return
        raise TimeoutError(f"the GPU has {found}, not {expected}; the agent's log:\n{self._agent.log_tail()}")

    async def mig_is_off(self) -> None:
        with anyio.move_on_after(scaled(WAIT_SECONDS)):
            while (await anyio.to_thread.run_sync(self.gpu)).mig_enabled:
                await anyio.sleep(0.5)
            return
        raise TimeoutError(f"MIG mode stays; the agent's log:\n{self._agent.log_tail()}")

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(scaled(WAIT_SECONDS)):
            while not reached():
                self._agent.assert_not_crashed()
                await anyio.sleep(0.05)
            return
        raise TimeoutError(f"not in time: {what}; the agent's log:\n{self._agent.log_tail()}")


async def part(parting: Parting) -> None:
    """MIG mode on, two profiles, pods on both, another layout around a held one, and all of it taken back."""
    before = await anyio.to_thread.run_sync(parting.free)
    try:
        small, large = await anyio.to_thread.run_sync(parting.profiles, before)
        async with parting.kubelet.running():
            try:
                await _parted(parting, before, small.name, large.name)
            finally:
                with anyio.CancelScope(shield=True):
                    await parting.end()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(parting.put_back, before)
    after = await anyio.to_thread.run_sync(parting.gpu)
    assert (after.mig_enabled, after.instances) == (before.mig_enabled, ())


async def _parted(parting: Parting, before: Gpu, small: str, large: str) -> None:
    smalls, larges = f"{PREFIX}{small}", f"{PREFIX}{large}"
    await parting.start({"mixed": (large, small), "alike": (large, large)})
    await parting.want("mixed")
    await parting.offered(smalls, 1)
    await parting.offered(larges, 1)
    keeps, stays = await parting.run("keeps", larges)
    leaves, goes = await parting.run("leaves", smalls)
    print(f"{before.product}: {large} is {stays}, {small} is {goes}")

    # The small one is held, and in the way of a second large one: it drains.
    await parting.want("alike")
    await parting.offered(smalls, 0)
    await parting.there({large: 1, small: 1})
    await parting.kubelet.delete_pod(leaves, 30)
    await parting.there({large: 2})
    await parting.offered(larges, 2)
    comes, second = await parting.run("second", larges)
    assert second != stays  # the driver may give the UUID of the one that went again
    assert parting.kubelet.pod(keeps).phase is Phase.RUNNING
    for pod in (keeps, comes):
        await parting.kubelet.delete_pod(pod, 30)

    # Without a layout MIG mode that the agent turned on goes, and its instances with it.
    if not before.mig_enabled:
        await parting.want("pgpu")
        await parting.mig_is_off()
