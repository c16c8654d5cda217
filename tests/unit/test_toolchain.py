"""The tool chain itself: generated code is current, and the blocking detector is really on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blockbuster import BlockingError

from agent import settings

ROOT = Path(__file__).resolve().parents[2]


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_generated_messages_are_current(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "proto/generate.py", str(fresh)], cwd=ROOT, check=True, timeout=60)
    assert _files(fresh) == _files(ROOT / "agent" / "_proto"), "run `make proto` and commit the result"


async def test_blocking_calls_of_agent_code_raise(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("version: 1\n")
    with pytest.raises(BlockingError):
        settings.load(file, environment={})


def test_locks_name_no_address() -> None:
    for lock in ("requirements.lock", "requirements-dev.lock"):
        text = (ROOT / lock).read_text()
        assert "://" not in text
        assert text.count("==") > 20
        assert "--hash=sha256:" in text


@pytest.mark.parametrize("script", ["venv", "lock", "run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = ROOT / ".ci" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
