"""A cluster to install the chart on, and the chart; import what a test module uses."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.cluster.build import BuildError, Parts, agent_image
from tests.cluster.installation import ACCOUNT, Installation, Node
from tests.cluster.options import Options
from tests.cluster.rig import Cluster, logs_folder
from tests.cluster.waiting import RigError


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the API server writes what the agent's account did."""
    return tmp_path_factory.mktemp("audit")


@contextmanager
def with_image(running: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Bring a cluster up and give its node the agent's image; where a test fails its logs are kept."""
    try:
        image = agent_image.build(lambda _line: None)
        running.up()
    except (BuildError, RigError) as error:
        pytest.fail(str(error), pytrace=False)
    try:
        running.import_image(image)
        yield running
    finally:
        if request.session.testsfailed:
            running.save_logs(logs_folder())
        running.down()


@pytest.fixture(scope="module")
def open_cluster(parts: Parts, audit: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster in which pods reach the API server, with the agent's image on its node."""
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "users": [ACCOUNT]}, {"level": "None"}],
    }
    (audit / "policy.yaml").write_text(yaml.safe_dump(policy))
    flags = (
        f"--audit-policy-file={audit}/policy.yaml",
        f"--audit-log-path={audit}/audit.log",
        # As servers before 1.32 are. All other tests of the agent have streaming lists.
        "--feature-gates=WatchList=false",
    )
    cluster = Cluster(parts, Options(private_network=True, apiserver_flags=flags))
    with with_image(cluster, request) as running:
        yield running


@contextmanager
def an_installation(open_cluster: Cluster, kind: type[Installation] = Installation) -> Iterator[Installation]:
    """The chart, not installed yet; afterwards nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="inst-", dir=open_cluster.layout.root) as folder:
        made = kind(open_cluster, Node(open_cluster, Path(folder)))
        try:
            yield made
        finally:
            delete_pods(open_cluster)
            made.remove_traces()
            made.label(None)


@pytest.fixture
def installation(open_cluster: Cluster) -> Iterator[Installation]:
    """For one test."""
    with an_installation(open_cluster) as made:
        yield made


def delete_pods(cluster: Cluster) -> None:
    """Delete what tests have made in the default namespace."""
    for pod in cluster.find_all("Pod"):
        # On a node without a kubelet nobody ends it.
        here = pod["spec"].get("nodeName") in (None, cluster.node)
        cluster.delete("Pod", pod["metadata"]["name"], grace_seconds=1 if here else 0)
