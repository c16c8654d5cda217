"""`gpu-node-agent status`, `clear-health` and `release` against a running agent on the embedded kubelet."""

import json
import subprocess
import sys

import anyio
import anyio.to_thread

from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.scenarios.skeleton import gpu_pod, running

QUIET = {"health.kernelLog": None}


async def command(rig: EmbeddedRig, *words: str) -> tuple[int, str]:
    """Run the command line with the agent's configuration; exit code, and what it said."""
    config = rig._folder / "config.yaml"
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-m", "agent", *words, f"--config={config}"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    )
    if done.returncode:
        print((rig._folder / "agent.log").read_text()[-3000:])
    return done.returncode, done.stdout + done.stderr


async def test_status_tells_of_holders_and_sick_gpus_and_clear_brings_them_back() -> None:
    async with embedded_rig() as rig:
        await rig.start_agent(QUIET)
        await rig.wait_allocatable(8)
        pod = gpu_pod("holder", 2)
        await running(rig, [pod])
        held = await rig.held_ids(pod, "main")
        rig.machine.xid(7, 119)
        rig.machine.lose(6)
        await rig.wait_allocatable(6)
        code, text = await command(rig, "status", "--json")
        assert code == 0, text
        document = json.loads(text)
        gpus = {gpu["uuid"]: gpu for gpu in document["gpus"]}
        assert {uuid for uuid, gpu in gpus.items() if gpu["holders"]} == held
        assert gpus[next(iter(held))]["holders"][0]["pod"] == "default/holder"
        assert gpus[rig.machine.uuid(7)]["health"]["state"] == "unhealthy"
        assert gpus[rig.machine.uuid(7)]["lastXid"] == 119
        assert gpus[rig.machine.uuid(7)]["mode"]["active"] == "pgpu"
        code, text = await command(rig, "status")
        assert code == 0, text
        assert "GPU 7: Xid 119, GSP RPC timeout" in text
        assert "what to do: reset the GPU" in text
        code, text = await command(rig, "clear-health", rig.machine.uuid(6))
        assert code == 1
        assert "cannot be cleared while it does not answer" in text
        code, text = await command(rig, "clear-health", "0", "--removed")
        assert code == 1
        assert "is still there: the driver lists it" in text
        code, text = await command(rig, "clear-health", rig.machine.uuid(6), "--removed")
        assert code == 0, text
        assert "is forgotten; it was: " in text
        with anyio.fail_after(10):
            while await rig.capacity() != 7:
                await anyio.sleep(0.05)
        code, text = await command(rig, "clear-health", "7")
        assert code == 0, text
        assert "it was: Xid 119" in text
        await rig.wait_allocatable(7)
        code, text = await command(rig, "clear-health", "9")
        assert code == 1
        assert "this node has no GPU '9'; there are: 0 = GPU-" in text


async def test_a_gpu_in_mig_mode_is_not_sold_and_status_says_why() -> None:
    async with embedded_rig() as rig:
        rig.machine.set_mig(3, enabled=True)
        await rig.start_agent(QUIET)
        await rig.wait_allocatable(7)
        code, text = await command(rig, "status")
        assert code == 0, text
        assert "GPU 3: not offered: the GPU is in MIG mode" in text


async def test_release_takes_all_gpus_away_and_gives_them_back() -> None:
    async with embedded_rig() as rig:
        await rig.start_agent(QUIET)
        await rig.wait_allocatable(8)
        code, text = await command(rig, "release", "--for", "10m")
        assert code == 0, text
        await rig.wait_allocatable(0)
        assert await rig.capacity() == 8
        code, text = await command(rig, "status")
        assert "RELEASED for" in text
        await rig.kill_agent()
        async with rig.watching_allocatable() as seen:
            await rig.start_agent(QUIET)
            with anyio.fail_after(30):
                while "RELEASED for" not in (await command(rig, "status"))[1]:
                    await anyio.sleep(0.1)
            await anyio.sleep(1)
            assert not any(seen)
            code, text = await command(rig, "release", "--end")
            assert code == 0, text
        await rig.wait_allocatable(8)
        code, text = await command(rig, "release", "--for", "soon")
        assert code == 2
        assert await rig.stop_agent() == 0
        code, text = await command(rig, "status")
        assert code == 1
        assert "no agent answers" in text


async def test_a_cordon_shows_while_the_kubelet_is_away() -> None:
    """And GPUs that no mode is put in force on say what is waited for."""
    async with embedded_rig() as rig:
        nobody = rig._folder / "no-kubelet"
        await anyio.to_thread.run_sync((nobody / "plugins_registry").mkdir, 0o755, True)
        await rig.start_agent({**QUIET, "kubelet.root": str(nobody)})
        with anyio.fail_after(20):
            while (done := await command(rig, "cordon", "3", "--reason", "fan"))[0]:
                await anyio.sleep(0.2)
        assert "is cordoned" in done[1]
        assert "which pods are on it is not known" in done[1]
        _, text = await command(rig, "status", "-o", "json")
        gpus = json.loads(text)["gpus"]
        assert gpus[3]["cordon"]["reason"] == "fan"
        assert gpus[3]["mode"]["reason"].endswith(": fan")
        assert "which pods hold it is not known" in gpus[0]["mode"]["reason"]
        _, text = await command(rig, "status")
        assert "off (cordoned)" in text
        assert max(map(len, text.splitlines())) <= 100
