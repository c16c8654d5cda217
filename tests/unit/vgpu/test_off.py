"""A room that is off costs nothing: it is not even imported."""

import subprocess
import sys


def test_the_agent_imports_no_limits_before_they_are_wanted() -> None:
    script = (
        "import sys, agent.app.run, agent.app.build_vgpu, agent.mps.wing; "
        "print([each for each in sys.modules if each.startswith('agent.vgpu.') and each[11:] != 'plugin'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
