"""`gpu-node-agent simulate`: it says what happened and what did not, and leaves nothing behind."""

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.simulator import demo
from agent.simulator.demo.page import show_page
from agent.simulator.demo.screen import Screen
from agent.simulator.demo.stage import stage
from tests.pace import scaled

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 50


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: the demo would turn to /tmp from a long one."""
    made = Path(tempfile.mkdtemp(prefix="gna-"))
    yield made
    shutil.rmtree(made)


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    return kept | {"TMPDIR": str(folder)} | more


def simulate(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "agent", "simulate", *arguments],
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def tells_the_whole_story(shown: str, gpus: int) -> None:
    for told in (
        f"the node offers nvidia.com/gpu: {gpus}.",
        "training asked for",
        "it stays Pending",
        "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
        "late runs on GPU",
        "no dip",
        "GPU 0 Unhealthy, all others Healthy",
        f"{gpus} models ask for 60 cores",
        "it joins model-",
        "a library keeps each container to its memory",
        f"{gpus} daemons serve",
        "The daemon of GPU 0 is killed",
        "no daemon runs, their compute mode is DEFAULT again",
        "waiting for 1 pod(s) to end",
        "has flipped, too.",
        "nothing was registered again.",
        "Nothing is left behind.",
    ):
        assert told in shown
    assert ("refused: the largest free share is 40 cores" in shown) is (gpus > 2)


@pytest.mark.parametrize(
    ("profile", "gpus"), [("dgx-h200", 8), pytest.param("t4-4", 4, marks=pytest.mark.long)]
)
def test_demo_tells_the_whole_story(folder: Path, profile: str, gpus: int) -> None:
    done = simulate(folder, "--profile", profile)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    tells_the_whole_story(done.stdout, gpus)
    assert "\x1b" not in done.stdout
    assert list(folder.iterdir()) == []


def test_unknown_profile_names_those_there_are(folder: Path) -> None:
    done = simulate(folder, "--profile", "dgx-h2000")
    assert done.returncode == 2
    assert "dgx-h200" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "simulate"],
        cwd=ROOT,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        while b"late asks" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert list(folder.iterdir()) == []


def test_what_did_not_happen_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    out = io.StringIO()
    # A kubelet that never reports its devices: the node cannot offer what the demo announces.
    assert demo.show("dgx-h200", out, patience=0.5, status_tick=3600) == 1
    last = out.getvalue().splitlines()[-1]
    assert "This did not happen as announced: the node offers no GPUs, not 8, after 0.5 s." in last
    assert list(folder.iterdir()) == []


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_only_where_it_is_wanted(variables: Mapping[str, str], coloured: bool) -> None:
    out = Terminal()
    screen = Screen(out, variables)
    screen.act(1, "Start")
    screen.seen("seen")
    screen.table(("GPU", "HEALTH"), [("0", "Healthy"), ("10", "Unhealthy")])
    assert ("\x1b[" in out.getvalue()) is coloured


def test_columns_are_aligned_and_plain_text_stays_plain() -> None:
    out = io.StringIO()
    Screen(out, {}).table(("GPU", "HEALTH", "HELD BY"), [("0", "Healthy", "a"), ("10", "Unhealthy", "free")])
    assert out.getvalue().splitlines() == [
        "",
        "   GPU  HEALTH     HELD BY",
        "     0  Healthy    a",
        "    10  Unhealthy  free",
        "",
    ]


def test_a_terminal_gets_the_whole_story_in_colour(folder: Path) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "simulate", "--profile", "l40s-2"],
        cwd=ROOT,
        env=environment(folder, TERM="xterm"),
        stdout=follower,
    )
    os.close(follower)
    shown, deadline = b"", time.monotonic() + scaled(LIMIT_SECONDS)
    try:
        while time.monotonic() < deadline:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # how Linux shows that the other side is gone
                break
            shown += piece
        assert process.wait(timeout=LIMIT_SECONDS) == 0
    finally:
        process.kill()
        os.close(leader)
    assert b"\x1b[32m" in shown
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).decode()
    tells_the_whole_story(plain, 2)
    assert list(folder.iterdir()) == []


async def test_demo_ends_with_the_page_when_asked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Its last act names the address, and serves the node there until it is interrupted."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    out, view = io.StringIO(), dict[str, Any]()

    def read() -> dict[str, Any]:
        address = next(line for line in out.getvalue().splitlines() if "http://127.0.0.1:" in line).strip()
        with urllib.request.urlopen(f"{address}view", timeout=scaled(10)) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    async with stage("l40s-2", 20.0, 0.1) as node, anyio.create_task_group() as group:
        group.start_soon(show_page, node, Screen(out))
        with anyio.fail_after(30):
            while "http://" not in out.getvalue():
                await anyio.sleep(0.1)
            holders: set[str] = set()
            while len(holders) < 2:
                view = await anyio.to_thread.run_sync(read)
                holders = {
                    each["pod"] for one in view["nodes"] for gpu in one["gpus"] for each in gpu["holders"]
                }
                await anyio.sleep(0.1)
        group.cancel_scope.cancel()
    assert holders == {"default/train", "default/notebook"}
    assert [each["pod"] for each in view["waiting"]] == ["default/waits"]
    assert not await anyio.to_thread.run_sync(os.listdir, folder)
