"""Caps of GPU memory in real containers: containerd, an ordinary image, the driver by our own CDI kind.

Nothing is NVIDIA's but generator and hooks: libcuda.so.1 is the CUDA double, which counts what was really
taken. The enforcement library comes into the containers as on any node, by the answer of Allocate.
"""

import json
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clib.build_library import cached
from tests.chart import helm
from tests.cluster import manifests
from tests.cluster.accounts import in_force, service_account
from tests.cluster.api import ApiClient, ApiError
from tests.cluster.build import python_image
from tests.cluster.capped_pods import BLOCK, CONTEXT, CappedPods, capped_pods, thread, until
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually
from tests.cuda_double.machine import MIB, OUT_OF_MEMORY
from tests.pace import scaled
from tests.scenarios.vgpu import MEMORY

CAP = 8  # blocks
GRANULE = 2 * MIB  # in which the driver gives memory
# Takes memory until it is refused; how many bytes it got, and the answer to one byte more.
FILL = (
    f"got = 0\nwhile call('cuMemAlloc_v2', ctypes.byref(u64()), size({GRANULE})) == 0: got += {GRANULE}",
    "[got, call('cuMemAlloc_v2', ctypes.byref(u64()), size(1))]",
)
FULL = [CAP * BLOCK - CONTEXT, OUT_OF_MEMORY]
# Runs commands in a further process, which has nothing in its environment and is another user.
CHILD = (
    "import subprocess",
    (
        "def child(*commands):\n"
        "    argv = [sys.executable, '-I', '-S', sys.argv[0], sys.argv[1]]\n"
        "    lines = '\\n'.join(json.dumps(each) for each in commands)\n"
        "    done = subprocess.run(argv, input=lines, env={}, user=65534, stdout=-1, text=True, check=True)\n"
        "    return json.loads(done.stdout.splitlines()[-1])['value']"
    ),
)
NVML = """
nvml = ctypes.CDLL("libnvidia-ml.so.1")
gpu = ctypes.c_void_p()
figures, more = (ctypes.c_uint64 * 3)(), (ctypes.c_uint64 * 5)()
more[0] = 40 | 2 << 24  # sizeof(nvmlMemory_v2_t) and its version
processes, count = (ctypes.c_uint64 * 64)(), ctypes.c_uint(16)
codes = [
    nvml.nvmlInit_v2(),
    nvml.nvmlDeviceGetHandleByUUID(UUID, ctypes.byref(gpu)),
    nvml.nvmlDeviceGetMemoryInfo(gpu, figures),
    nvml.nvmlDeviceGetMemoryInfo_v2(gpu, more),
    nvml.nvmlDeviceGetComputeRunningProcesses(gpu, ctypes.byref(count), processes),
]
"""
SEEN_BY_NVML = (
    "{'codes': codes, 'v1': list(figures), 'v2': [more[1], more[3], more[4]], "
    "'processes': {str(processes[2 * n] & 0xffffffff): processes[2 * n + 1] for n in range(count.value)}}"
)
RESIZE = "gpu-node-agent.io/resize"
# When the container's own cuMemGetInfo says so, by the clock that the test has, too.
SEEN_AT = "\nwhile memory()[1] != {}: time.sleep(0.002)\nseen_at = time.time()\n"


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> None:
    """The ordinary image of all pods here."""
    cluster.import_image(python_image.build(cluster.parts.program("busybox")))


@pytest.fixture
async def pods(cluster: Cluster, image: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CappedPods]:
    async with capped_pods(cluster, monkeypatch.setenv) as made:
        yield made


async def test_memory_cap_holds_in_a_real_pod(pods: CappedPods) -> None:
    """To the cap and not a byte more, however the program is started."""
    await pods.start()
    await pods.run("capped", CAP)
    await pods.learn_contexts("capped")
    gpu = await pods.gpu_of("capped")
    ways: Mapping[str, tuple[str, ...]] = {
        "plain": (),
        "environment emptied": ("env", "-i"),
        "LD_PRELOAD unset": ("env", "-u", "LD_PRELOAD"),
        "LD_PRELOAD of its own": ("env", "LD_PRELOAD=libm.so.6"),
        "limits of its own": ("env", "NVIDIA_GPU_MEMORY_LIMIT=65536", "CUDA_DEVICE_MEMORY_LIMIT=64g"),
        "a shell between": ("sh", "-c", 'env -i "$@"', "sh"),
    }
    for name, way in ways.items():
        assert await pods.ask_cuda("capped", f"init({gpu})", *FILL, way=way) == FULL, name
    # A subprocess, as another user and with nothing in its environment, gets what its parent has left.
    child = f"child{(f'init({gpu})', *FILL)!r}"
    assert await pods.ask_cuda("capped", *CHILD, child) == FULL
    left = await pods.ask_cuda("capped", *CHILD, f"init({gpu})", "alloc(100)", child)
    assert left == [FULL[0] - CONTEXT - 100 * MIB, OUT_OF_MEMORY]
    assert pods.machine.peak(gpu) == CAP * BLOCK
    assert pods.machine.used(gpu) == 0
    # What is in the container: four files, of which one is its own to write.
    mounts = await pods.mounts("capped")
    assert sorted(path for path, (_, options) in mounts.items() if options.startswith("rw")) == [
        "/usr/lib/gpu-node-agent/usage"
    ]
    assert len(mounts) == 4
    with pytest.raises(Exception, match="Read-only file system"):
        await pods.sh("capped", "echo > /etc/ld.so.preload")


async def test_container_sees_its_cap(pods: CappedPods) -> None:
    """By CUDA and by NVML, as nvidia-smi asks; each of two containers sees its own, not the other's."""
    await pods.start()
    caps = (CAP, CAP + 2)
    await pods.run("seeing", *caps)
    await pods.learn_contexts("seeing")
    gpu = await pods.gpu_of("seeing")
    uuid = pods.rig.gpu_uuids()[gpu].encode()

    def asked() -> list[tuple[int, Any, Any, int]]:
        with pods.program("seeing", "c0") as one, pods.program("seeing", "c1") as two:
            found = []
            for number, program in enumerate((one, two)):
                program(f"init({gpu})", f"alloc({100 * (number + 1)})", f"UUID = {uuid!r}")
            for number, program in enumerate((one, two)):
                cuda = program("list(memory())")
                found.append((number, cuda, program(NVML, SEEN_BY_NVML), program("os.getpid()")))
            return found

    for number, cuda, nvml, pid in await thread(asked):
        total, used = caps[number] * BLOCK, CONTEXT + 100 * (number + 1) * MIB
        assert cuda == [total - used, total]
        assert nvml["codes"] == [0] * 5
        assert nvml["v1"] == [total, total - used, used]
        assert nvml["v2"] == [total, total - used, used]
        assert nvml["processes"] == {str(pid): used}
    # The agent has seen that the library is there, and says which fences hold.
    cap = {"fences": ["library", "sweep"]}
    told = {f"c{number}": {**cap, "memoryBytes": blocks * BLOCK} for number, blocks in enumerate(caps)}

    async def published() -> bool:
        return await pods.limits_told("seeing") == told

    await until(published, "the annotation says which fences hold")
    assert await pods.events("seeing") == {"LimitsApplied"}


async def test_two_containers_one_gpu_two_caps(pods: CappedPods) -> None:
    """Of two pods, one of them of another user; what one has taken is not missed by the other."""
    await pods.start()
    await pods.run("large", 2 * CAP)
    await pods.learn_contexts("large")
    await pods.run("small", CAP, user=65534)
    gpu = await pods.gpu_of("large")
    assert await pods.gpu_of("small") == gpu

    def filled() -> tuple[list[int], list[int], dict[int, int]]:
        with pods.program("large") as large, pods.program("small") as small:
            first, second = large(f"init({gpu})", *FILL), small(f"init({gpu})", *FILL)
            return first, second, pods.machine.processes(gpu)

    large, small, holders = await thread(filled)
    assert large == [2 * CAP * BLOCK - CONTEXT, OUT_OF_MEMORY]
    assert small == FULL
    assert sorted(holders.values()) == [CAP * BLOCK, 2 * CAP * BLOCK]
    assert pods.machine.peak(gpu) == 3 * CAP * BLOCK
    one, two = await pods.status_of("large"), await pods.status_of("small")
    assert [each["memoryBytes"] for each in (one, two)] == [2 * CAP * BLOCK, CAP * BLOCK]


def resize_policy(cluster: Cluster, resizer: str) -> list[dict[str, Any]]:
    """The chart's policy on who may resize, applied."""
    made = helm.template(
        settings=[f"vgpu.resizers={json.dumps([resizer])}", 'config.vgpu.enforcement="library"']
    )
    found = [helm.one(made, kind, "-resizes") for kind in POLICY_KINDS]
    for each in found:
        cluster.apply(each)
    return found


POLICY_KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


async def test_resize_of_a_running_pod(pods: CappedPods) -> None:
    cluster = pods.cluster
    await pods.start(**{"vgpu.resize": True})
    await pods.run("resized", CAP)
    await pods.learn_contexts("resized")
    gpu = await pods.gpu_of("resized")
    path = cluster.api.path("v1", "Pod", "default", "resized")
    offered = await pods.rig.allocatable(MEMORY)
    assert offered is not None

    def annotate(client: ApiClient, blocks: int, query: str = "") -> float:
        """When the API server had taken it."""
        text = json.dumps({"c0": blocks})
        client.merge_patch(path + query, {"metadata": {"annotations": {RESIZE: text}}})
        return time.time()

    def who_may() -> tuple[ApiClient, ApiClient]:
        resizer, foreign = (
            service_account(cluster, "default", name, "edit") for name in ("resizer", "foreign")
        )
        policy = resize_policy(cluster, "system:serviceaccount:default:resizer")
        made.extend(policy)

        def refused() -> None:
            try:
                annotate(foreign, CAP + 1, "?dryRun=All")
            except ApiError as error:
                if "vgpu.resizers only" in str(error):
                    return
                raise
            raise NotYet("the policy is not in force yet")

        eventually(refused, timeout=20, what="a foreign account is refused")
        new = manifests.pod("born-large")
        new["metadata"]["annotations"] = {RESIZE: "{}"}
        with pytest.raises(ApiError, match=r"vgpu\.resizers only"):
            foreign.apply(new)
        in_force(lambda: annotate(resizer, CAP + 1, "?dryRun=All"))
        return resizer, foreign

    made: list[dict[str, Any]] = []

    def resized(resizer: ApiClient) -> list[float]:
        took = []
        with pods.program("resized") as program:
            program(f"init({gpu})")
            for blocks in (CAP + 8, CAP + 2, CAP + 16):
                program.send(SEEN_AT.format(blocks * BLOCK))
                asked = annotate(resizer, blocks)
                program.receive()
                took.append(program("seen_at") - asked)
            # What it may have now it gets, to the byte.
            assert program(*FILL) == [(CAP + 16) * BLOCK - CONTEXT, OUT_OF_MEMORY]
        return took

    try:
        resizer, _ = await thread(who_may)
        took = await thread(resized, resizer)
        print(f"effective after {[round(each, 3) for each in took]} s")
        assert sorted(took)[1] < scaled(1.0)  # not the slowest: this machine may have other things to do
        await pods.rig.wait_allocatable(offered - 16, MEMORY)
        assert await pods.events("resized") == {"LimitsApplied", "LimitsResized"}

        async def check() -> None:
            figures = await pods.status_of("resized")
            assert (figures["admittedBytes"], figures["memoryBytes"]) == (CAP * BLOCK, (CAP + 16) * BLOCK)
            assert await pods.ask_cuda("resized", f"init({gpu})", "memory()[1]") == (CAP + 16) * BLOCK

        await check()
        await pods.rig.kill_agent()
        await pods.start(**{"vgpu.resize": True})
        await pods.rig.wait_allocatable(offered - 16, MEMORY)
        await check()
        await pods.delete("resized")
        await pods.rig.wait_allocatable(offered, MEMORY)
    finally:
        for each in made:
            delete = partial(cluster.delete, each["kind"], each["metadata"]["name"])
            await thread(partial(delete, api_version=each["apiVersion"]))


@pytest.fixture
def newer_library(tmp_path: Path) -> Path:
    """That of another version of the agent."""
    file = tmp_path / "libgna-limits.so"
    file.write_bytes(cached().read_bytes() + b"newer")  # behind what the loader reads
    return file


async def test_agent_update_keeps_limits(pods: CappedPods, newer_library: Path) -> None:
    """By an agent with another library: containers that run keep theirs, over their own restart as well."""
    await pods.start()
    await pods.run("before", CAP, restart="Always")
    await pods.learn_contexts("before")
    gpu = await pods.gpu_of("before")
    before = await pods.mounts("before")
    await pods.rig.stop_agent()
    await pods.start(**{"vgpu.library": str(newer_library)})
    await pods.run("after", CAP)
    after = await pods.mounts("after")
    assert await pods.mounts("before") == before
    builds = [{path for path in mounts if path.endswith(".so")} for mounts in (before, after)]
    assert len(builds[0]) == len(builds[1]) == 1
    assert builds[0] != builds[1]
    for name in ("before", "after"):
        assert await pods.ask_cuda(name, f"init({gpu})", *FILL) == FULL
        loaded = await pods.ask_cuda(name, "[line.split()[-1] for line in open('/proc/self/maps')]")
        assert set(loaded) & (builds[0] | builds[1]) == builds[name == "after"]

    # A program that dies with its container holds nothing in the next one.
    first = await pods.process("before")
    silent = "null = os.open('/dev/null', os.O_RDWR); [os.dup2(null, number) for number in range(3)]"
    child = f"{silent}; init({gpu}); alloc(1000); time.sleep(3600)"
    await pods.ask_cuda("before", f"fork({child!r})")

    async def taken() -> bool:
        return pods.machine.used(gpu) == 1000 * MIB + CONTEXT

    await until(taken, "a program that nobody waits for has its memory")
    # A reboot empties /run, where limits lie; the kubelet repeats the mounts that it was answered once.
    await pods.rig.stop_agent()
    await thread(shutil.rmtree, pods.rig.run_folder / "limits")
    await pods.start(**{"vgpu.library": str(newer_library)})
    await pods.sh("before", "kill 1")

    async def again() -> bool:
        status = (await pods.pod("before"))["status"]["containerStatuses"][0]
        return bool(status["restartCount"] == 1 and status["ready"])

    await until(again, "the container was started again", 60)
    assert await pods.process("before") != first
    assert await pods.mounts("before") == before
    await pods.learn_contexts("before")  # what was learned before a reboot is forgotten
    assert await pods.ask_cuda("before", f"init({gpu})", *FILL) == FULL

    # The old library goes with the last container that has it.
    async def libraries() -> int:
        return len(await thread(lambda: list((pods.rig.folder / "state" / "lib").glob("*.so"))))

    assert await libraries() == 2
    await pods.delete("before")

    async def tidied() -> bool:
        return await libraries() == 1

    await until(tidied, "the library that nobody has any more is gone", 60)
