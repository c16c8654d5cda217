"""Three tests of claims once more, on the earliest Kubernetes on which the agent offers them."""

from collections.abc import Iterator

import pytest

from tests.cluster import test_dra
from tests.cluster.build.peers import EARLIER_KUBERNETES
from tests.cluster.conftest import parts_of
from tests.cluster.rig import Cluster
from tests.cluster.test_dra import node, served

__all__ = ["node", "served"]
pytestmark = pytest.mark.timeout(180, func_only=True)


@pytest.fixture(scope="module")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    with Cluster(parts_of(pytestconfig, EARLIER_KUBERNETES)) as running:
        yield running


test_dra_random_mix_is_exact = test_dra.test_dra_random_mix_is_exact
test_dra_race_has_one_winner = test_dra.test_dra_race_has_one_winner
test_dra_unequal_mps_shares_of_strangers = test_dra.test_dra_unequal_mps_shares_of_strangers
