"""Which processes may be a daemon of the agent's, by the text of /proc/<pid>/cgroup."""

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from agent.holdings.process_owners import container_of_process, pods_of_processes, pods_of_strangers
from agent.kit import bounded
from agent.mps import processes
from agent.mps.binary import CONTROL
from agent.mps.processes import effective_user, outside_pods
from tests.pace import scaled

ID, UID = "0123456789abcdef" * 4, "3fa85f64-5717-4562-b3fc-2c963f66afa6"
SLICE = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
AGENT_V1 = f"5:cpuset:/kubepods/burstable/pod{UID}/{ID}\n4:pids:/kubepods/burstable/pod{UID}/{ID}\n"
AGENT_V2 = f"0::/{SLICE}/cri-containerd-{ID}.scope\n"
OTHER, OTHER_V2 = (text.replace("3fa85f64", "aaaaaaaa") for text in (AGENT_V1, AGENT_V2))


@pytest.mark.parametrize(
    ("cgroups", "own", "trusted"),
    [
        # Started by this agent or an earlier one, on v1 and v2.
        ("5:cpuset:/gpu-node-agent-mps\n4:pids:/gpu-node-agent-mps\n", AGENT_V1, True),
        ("0::/gpu-node-agent-mps\n", AGENT_V2, True),
        # With a cgroup namespace of the agent's own.
        ("0::/../../../gpu-node-agent-mps\n", "0::/\n", True),
        # Below a node's own cgroup, as in kind on v1.
        (f"4:pids:/docker/{ID}/gpu-node-agent-mps\n", AGENT_V1, True),
        # An older agent could not join one of the hierarchies, and left its pod's there.
        (OTHER.splitlines()[0] + "\n4:pids:/gpu-node-agent-mps\n", AGENT_V1, True),
        # No cgroup could be had: it stays in the agent's.
        (AGENT_V1, AGENT_V1, True),
        (AGENT_V2, AGENT_V2, True),
        # Started by hand on the node.
        ("0::/user.slice/user-0.slice/session-1.scope\n", AGENT_V2, True),
        # A pod's, also where it made itself a cgroup of that name.
        (OTHER, AGENT_V1, False),
        (OTHER_V2, AGENT_V2, False),
        (
            OTHER_V2.replace(".scope", ".scope/gpu-node-agent-mps"),
            AGENT_V2,
            False,
        ),
        (f"0::/../../podaaaaaaaa{UID[8:]}/{ID}/gpu-node-agent-mps\n", "0::/\n", False),
        (f"4:pids:/\n3:cpu:/kubepods/podaaaaaaaa{UID[8:]}/{ID}\n", AGENT_V1, False),
        # Nor where a name holds what only looks like the end of a line.
        (OTHER_V2.replace(".scope", ".scope/a\v0::/gpu-node-agent-mps"), AGENT_V2, False),
        (OTHER_V2.replace(".scope", ".scope/a\r0::/gpu-node-agent-mps"), AGENT_V2, False),
    ],
)
def test_a_daemon_is_known_by_its_cgroup(cgroups: str, own: str, trusted: bool) -> None:
    assert outside_pods(cgroups, own) is trusted


def test_processes_are_of_a_pod_of_none_or_ours(tmp_path: Path) -> None:
    texts = {
        "self": AGENT_V2,
        "7": AGENT_V2,
        "8": "0::/gpu-node-agent-mps\n",
        "41": "0::/system.slice/monitor.service\n",
        "42": OTHER_V2,
        "43": OTHER_V2.replace(".scope", ".scope/gpu-node-agent-mps"),
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup").write_text(text)
    pids = (0, 7, 8, 41, 42, 43, 99)
    other = UID.replace("3fa85f64", "aaaaaaaa")
    assert pods_of_processes(pids, tmp_path) is None
    (tmp_path / "2").mkdir()
    # In another PID namespace the second process is any.
    (tmp_path / "2" / "comm").write_text("python3\n")
    assert pods_of_processes(pids, tmp_path) is None
    (tmp_path / "2" / "comm").write_text("kthreadd\n")
    assert pods_of_processes(pids, tmp_path) == {41: "", 42: other, 43: other}
    # An agent's pod that is gone may have left an MPS server; 42 has ended since.
    (tmp_path / "43" / "comm").write_text("python3\n")
    assert pods_of_strangers(pids, tmp_path) == {43: other}
    # Another kubelet on this host knows its pods, and ours none of them.
    own = (tmp_path / "43" / "cgroup").read_text()
    (tmp_path / "43" / "cgroup").write_text(own.replace("/kubepods", f"/docker/{ID}/kubelet/kubepods", 1))
    assert pods_of_strangers(pids, tmp_path) == {}
    (tmp_path / "43" / "cgroup").write_text(own)
    (tmp_path / "43" / "comm").write_text("nvidia-cuda-mps\n")
    assert pods_of_strangers(pids, tmp_path) == {}


def test_the_user_of_a_process_is_what_it_acts_as(tmp_path: Path) -> None:
    assert effective_user(os.getpid()) == os.geteuid()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nUid:\t0\t1000\t0\t0\n")
    assert effective_user(7, tmp_path) == 1000


def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    """Its sockets do, too: one that is ended is gone when nobody listens any more."""
    code = (
        "import ctypes, platform, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print(flush=True)\nctypes.CDLL(None).syscall(60 if platform.machine() == 'x86_64' else 93, 0)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout
        assert child.stdout.readline()
        deadline = time.monotonic() + scaled(30)
        while ") Z" not in (processes.PROC / str(child.pid) / "stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = processes.identify(child.pid)
        assert found is not None
        found.send(signal.SIGKILL)
        while found.alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("name", [b"\x1cUid: 0 0 0", b"\rUid: none", b"\vUid:"])
def test_no_process_chooses_its_user_by_its_name(name: bytes) -> None:
    """The kernel leaves in a name what Python takes for an end of line; prctl(2) lets anybody choose one."""
    code = (
        "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nos.setuid(65534)\n"
        f"libc.prctl(15, {name!r})\nprint(flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline()
        assert effective_user(process.pid) == 65534
        assert set(processes.user_ids(process.pid)) == {65534}
    finally:
        process.kill()
        process.communicate()


def test_a_cgroup_s_name_need_not_be_text(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_bytes(OTHER_V2.strip().encode() + b"/\xff\n")
    found = container_of_process(7, tmp_path)
    assert found
    assert found.container_id == ID


def test_a_command_line_without_end_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process can make its own description of any length, by prctl(PR_SET_MM_MAP) without a privilege."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    process = tmp_path / "7"
    for folder, cgroups in (tmp_path / "self", AGENT_V2), (process, OTHER_V2):
        folder.mkdir()
        (folder / "cgroup").write_text(cgroups)
    for name in ("cmdline", "environ"):
        with (process / name).open("wb") as file:
            file.write(os.fsencode(f"/usr/bin/{CONTROL}") + b"\0-d\0")
            file.truncate(256 << 20)
    tracemalloc.start()
    try:
        assert processes.impostors(tmp_path / "pipe") == ()
        assert processes.arguments(7)[:2] == (f"/usr/bin/{CONTROL}", "-d")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_process_that_keeps_its_readers_waiting_holds_up_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it hangs in execve(2) or mmap(2), nobody gets its command line; here a fifo has none either."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    for name, cgroups in {"self": AGENT_V2, "7": OTHER_V2}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup").write_text(cgroups)
    os.mkfifo(tmp_path / "7" / "cmdline")
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    began = time.monotonic()
    assert processes.daemons(tmp_path / "pipe") == processes.servers(tmp_path / "pipe") == ()
    assert processes.impostors(tmp_path / "pipe") == ()
    assert time.monotonic() - began > 0.9 * bounded.SECONDS
    monkeypatch.setattr(bounded, "SECONDS", 60.0)
    began = time.monotonic()
    assert processes.impostors(tmp_path / "pipe") == ()  # it is not asked again
    assert time.monotonic() - began < 0.9 * bounded.SECONDS
    os.close(os.open(tmp_path / "7" / "cmdline", os.O_WRONLY))


@pytest.mark.parametrize(
    ("cgroups", "found"),
    [
        (OTHER_V2, True),
        (OTHER, True),
        ("0::/system.slice/dcgm.service\n", False),
        (AGENT_V2, False),
        (None, False),
    ],
)
def test_processes_in_pods_are_told_from_those_of_the_host(
    cgroups: str | None, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    for name, text in {"self": AGENT_V2, "7": "0::/\n", "8": cgroups}.items():
        if text:
            (tmp_path / name).mkdir()
            (tmp_path / name / "cgroup").write_text(text)
    assert processes.in_pods([7, 8]) is found
