"""The hook is the first process of its container: a signal without a handler would be ignored there."""

import signal
import subprocess
import sys
import textwrap

from tests.cluster.processes import children
from tests.cluster.rig import REPOSITORY

PROGRAM = """
    import sys
    import anyio
    from agent.cleanup.request import CleanupFailed
    from agent.cli.cleanup import unless_interrupted

    async def clean() -> int:
        print("asked", flush=True)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
            print("taken back", flush=True)
        return 0

    try:
        anyio.run(unless_interrupted, clean)
    except CleanupFailed as error:
        sys.exit(str(error))
"""


def test_the_first_process_of_a_container_obeys_a_signal() -> None:
    namespace = ["unshare", "--pid", "--fork", "--kill-child"]
    process = subprocess.Popen(
        [*namespace, sys.executable, "-c", textwrap.dedent(PROGRAM)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "asked\n"
        (first,) = children(process.pid)
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", str(first)], check=True)
        said, problem = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert said == "taken back\n"
    assert problem == "interrupted before the nodes were clean; the agents are back in service\n"
    assert process.returncode == 1
