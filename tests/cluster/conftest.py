"""One cluster for each worker's whole session, its programs built on the first use."""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.fixtures import SubRequest

from tests.cluster import side_by_side
from tests.cluster.build import BuildError, Parts, agent_image, build_parts
from tests.cluster.extender_process import free_port
from tests.cluster.options import Options
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster, logs_folder
from tests.cluster.waiting import RigError

DEFAULT_TICK_SECONDS = 10.0
LIMIT = 180
"""Seconds for the body of one test, unless its module has another LIMIT; every wait has a shorter one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The first fixture may have to compile Kubernetes: only the bodies are timed.
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            limit = getattr(getattr(item, "module", None), "LIMIT", LIMIT)
            item.add_marker(pytest.mark.timeout(limit, func_only=True))
    items.sort(key=lambda item: side_by_side.place(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> side_by_side.Schedule:
    """Each worker has clusters of its own: tests that share one stay together."""
    config.option.loadscopereorder = False
    return side_by_side.Schedule(config, log)


failures: Counter[str] = Counter()
"""Of fixtures that several tests share, by name and place."""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: SubRequest) -> Iterator[None]:
    """A shared fixture that failed fails the test that asked for it; the next test tries once more."""
    try:
        return (yield)
    except pytest.skip.Exception:
        raise
    except BaseException:
        where = f"{fixturedef.baseid}::{fixturedef.argname}"
        failures[where] += 1
        if fixturedef.scope != "function" and failures[where] < ATTEMPTS:
            fixturedef.finish(request)  # else pytest would show the same failure to all that come after
        raise


ATTEMPTS = 2
"""How often a fixture is tried that many tests share: where it fails for good, each try may take a minute."""


def parts_of(config: pytest.Config, minor: str = "") -> Parts:
    """A cluster's programs and images, of a Kubernetes minor; what the cache lacks is built now."""
    if os.geteuid() != 0:
        reason = "the cluster tests need root (namespaces, mounts, cgroups)"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    capture = config.pluginmanager.getplugin("capturemanager")

    def report(line: str) -> None:
        # Minutes of silence look like a hang, so progress goes past pytest's capture.
        assert capture is not None
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"\n{line}")

    try:
        return build_parts(report, minor)
    except BuildError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def parts(pytestconfig: pytest.Config) -> Parts:
    """Those of the minor in the environment variable K8S."""
    return parts_of(pytestconfig)


@pytest.fixture(scope="session")
def cluster(parts: Parts, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running cluster, shared by all tests: each removes what it made."""
    running = Cluster(parts)
    try:
        running.up()
    except RigError as error:
        pytest.fail(f"the cluster does not start: {error}", pytrace=False)
    try:
        yield running
    finally:
        if request.session.testsfailed:
            running.save_logs(logs_folder())
        running.down()


@pytest.fixture(scope="session")
def archive() -> Path:
    """The agent's image, built if the sources have changed."""
    try:
        return agent_image.build(lambda _line: None)
    except BuildError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def port() -> int:
    """Where kube-scheduler finds the extender."""
    return free_port()


@pytest.fixture(scope="session")
def patient(parts: Parts) -> Iterator[Cluster]:
    """A cluster with the tick of production: the node's status is up to 10 s behind the kubelet."""
    with Cluster(parts, Options(status_tick=DEFAULT_TICK_SECONDS)) as running:
        yield running


@pytest.fixture
async def rig(cluster: Cluster) -> AsyncIterator[RealRig]:
    """The rig of the scenarios in `tests/scenarios`."""
    async with real_rig(cluster) as made:
        yield made
