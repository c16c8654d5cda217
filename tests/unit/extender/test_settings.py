"""The extender's own configuration."""

from pathlib import Path

import pytest

from agent.extender.app import running
from agent.extender.settings import load, schema
from agent.kit.configuration import ConfigurationError
from agent.kit.tasks import FatalError


def test_defaults_are_those_of_the_documents() -> None:
    found = load(None, {})
    assert (found.placement, found.http.port, found.tls.port) == ("fragmentation", 3456, None)
    assert (found.lease.duration_seconds, found.lease.renew_seconds) == (15, 10)


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "extender.yaml"
    file.write_text('placement: spread\nassumeSeconds: 50\nmix: {"100": 1, "50": 3}\n')
    given = {"GPU_NODE_EXTENDER_PLACEMENT": "binpack", "GPU_NODE_EXTENDER_CONFIG": str(file)}
    found = load(file, given, ["assumeSeconds=60"])
    assert (found.placement, found.assume_seconds) == ("binpack", 60)
    assert found.mix == {"100": 1, "50": 3}


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("lease.renewSeconds=20", "two replicas could serve at once"),
        ("placement=best", "placement"),
        ("http.mostMebibytes=0", "mostMebibytes"),
        ("nonsense=1", "nonsense"),
    ],
)
def test_what_cannot_work_is_refused_with_the_key(flag: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load(None, {}, [flag])


def test_there_is_a_schema() -> None:
    assert "Lease" in schema()["$defs"]


async def test_an_extender_that_nobody_can_ask_does_not_start() -> None:
    with pytest.raises(FatalError, match=r"http\.verbs is false and tls\.port is null.* set tls\.port"):
        async with running(load(None, {})):
            pass
