"""Rendering each values file once is enough, and so is reading each schema."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from kubernetes_validate import utils

from tests.chart import helm
from tests.chart.helm import Manifest


@cache
def _rendered(values: Path) -> tuple[Manifest, ...]:
    return tuple(helm.template(values))


@pytest.fixture(params=helm.VALUES, ids=lambda path: path.name.removesuffix("-values.yaml"))
def values(request: pytest.FixtureRequest) -> Path:
    """Each values file of the chart's ci folder."""
    found: Path = request.param
    return found


@pytest.fixture
def objects(values: Path) -> tuple[Manifest, ...]:
    """The chart as helm renders it."""
    return _rendered(values)


@pytest.fixture(autouse=True, scope="session")
def _schemas_are_read_once() -> Iterator[None]:
    """All definitions of Kubernetes, a megabyte, were read for each object."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("schema_contents", "all_versions"):
            patched.setattr(utils, name, cache(getattr(utils, name)))
        yield
