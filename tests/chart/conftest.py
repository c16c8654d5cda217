"""Rendering each values file once is enough."""

from functools import cache
from pathlib import Path

import pytest

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
