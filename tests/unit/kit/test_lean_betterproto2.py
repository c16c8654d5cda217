"""betterproto2 comes in without importlib.metadata, and the check that this skips is made here."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).parents[3] / "agent" / "_proto"


def test_messages_come_in_without_importlib_metadata() -> None:
    script = "import sys, agent._proto.v1, agent.kubelet.wire; print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_generated_messages_fit_the_library() -> None:
    """The rule of betterproto2's own check: major and minor version are the compiler's."""
    generated = [file for file in PROTO.rglob("__init__.py") if "betterproto2.Message" in file.read_text()]
    assert generated
    library = importlib.metadata.version("betterproto2").split(".")[:2]
    for file in generated:
        compiler = re.search(r'^_COMPILER_VERSION = "([\d.]+)"$', file.read_text(), re.MULTILINE)
        assert compiler
        assert compiler[1].split(".")[:2] == library, file
