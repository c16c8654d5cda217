"""How much of the agent somebody has to read to follow one request."""

import json
import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import pytest

ROOT = Path(__file__).parents[2]
# Files of `agent/` on the way of a request, all that it causes counted; what happens meanwhile adds none.
# Of an Xid the probe that it causes (`inventory/prober.py`) is counted where it comes in time.
# What should be reached: pair 25, scrape 25, resize 30, Xid 40, label 50.
MOST = {"pair": 29, "scrape": 30, "resize": 42, "Xid": 48, "label": 59}


def _files() -> dict[str, list[str]]:
    command = [sys.executable, "-m", "tests.component.journeys"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(180)
async def test_journeys_pass_through_few_files() -> None:
    found = await anyio.to_thread.run_sync(_files)
    # Nothing is counted that is not followed: each passes through the rooms of its first and its last step.
    assert {"kubelet/service.py", "pairing/pairing.py", "injection/inject.py"} <= set(found["pair"])
    assert {"web/server.py", "telemetry/rendering.py"} <= set(found["scrape"])
    assert {"modes/desired.py", "modes/switcher.py", "kubelet/service.py"} <= set(found["label"])
    assert {"inventory/reducer.py", "kubelet/service.py"} <= set(found["Xid"])
    assert {"vgpu/resize.py", "lists/shared_pair.py", "kubelet/service.py"} <= set(found["resize"])
    assert {name: len(files) for name, files in found.items() if len(files) > MOST[name]} == {}, found
