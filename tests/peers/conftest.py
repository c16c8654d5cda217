"""The parts of the test cluster, and the programs of the peers."""

from collections.abc import Callable

import pytest

from tests.cluster.build import BuildError
from tests.cluster.build.peers import BuiltPeer, Peer, built
from tests.cluster.conftest import parts, port

__all__ = ["parts", "peer", "port"]


@pytest.fixture(scope="session")
def peer() -> Callable[[Peer], BuiltPeer]:
    """A peer's program and manifests, built now where the cache lacks them."""

    def find(wanted: Peer) -> BuiltPeer:
        try:
            return built(wanted)
        except BuildError as error:
            pytest.fail(str(error), pytrace=False)

    return find
