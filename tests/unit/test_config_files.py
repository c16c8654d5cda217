"""The files in config/: complete, current, and loadable."""

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agent import settings
from agent.settings import ConfigurationError, Settings

CONFIG = Path(__file__).resolve().parents[2] / "config"
SCHEDULER_FILES = sorted((CONFIG / "scheduler").glob("*.yaml"))
EXAMPLES = sorted((CONFIG / "examples").glob("*.yaml"))


def keys(block: object, path: str = "") -> set[str]:
    """Paths of all keys of a document."""
    if not isinstance(block, dict) or not block:
        return {path}
    return {found for key, value in block.items() for found in keys(value, f"{path}.{key}" if path else key)}


def document(value: object) -> Any:
    return msgspec.to_builtins(value)


def test_the_default_file_has_every_key_at_its_default() -> None:
    file = CONFIG / "default.yaml"
    assert settings.load(file, {}) == Settings(), "a value in config/default.yaml is not the default"
    written = keys(yaml.safe_load(file.read_text()))
    assert written == keys(document(Settings())), "config/default.yaml must show every key"


def test_every_block_of_the_default_file_is_explained() -> None:
    lines = (CONFIG / "default.yaml").read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if line and not line[0].isspace() and not line.startswith("#"):
            assert above.startswith("#"), f"say above {line} what it is for"


def test_the_schema_is_current() -> None:
    committed = json.loads((CONFIG / "schema.json").read_text())
    assert committed == settings.schema(), "run `make docs` and commit config/schema.json"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_loads_and_changes_something(file: Path) -> None:
    assert settings.load(file, {}) != Settings()
    assert file.read_text().startswith("# "), "an example says what it is for"


def test_there_are_examples_and_a_fault_in_one_would_show(tmp_path: Path) -> None:
    assert len(EXAMPLES) >= 4
    broken = tmp_path / "broken.yaml"
    broken.write_text(EXAMPLES[0].read_text() + "\nunknownKey: 1\n")
    with pytest.raises(ConfigurationError, match="unknownKey"):
        settings.load(broken, {})


@pytest.mark.parametrize("file", SCHEDULER_FILES, ids=lambda file: file.stem)
def test_a_scheduler_file_has_a_profile_that_looks_at_all_nodes(file: Path) -> None:
    found = yaml.safe_load(file.read_text())
    assert (found["apiVersion"], found["kind"]) == (
        "kubescheduler.config.k8s.io/v1",
        "KubeSchedulerConfiguration",
    )
    # For all profiles at once it would cost pods without GPUs, too.
    assert "percentageOfNodesToScore" not in found
    assert found["profiles"] == [
        {"schedulerName": "default-scheduler"},
        {"schedulerName": "gpu-scheduler", "percentageOfNodesToScore": 100},
    ]
    # Extenders serve every profile.
    assert all(each["filterVerb"] == "predicates" for each in found["extenders"])


def test_there_are_scheduler_files() -> None:
    assert {file.stem for file in SCHEDULER_FILES} == {"extender", "legacy-names", "proxied"}
