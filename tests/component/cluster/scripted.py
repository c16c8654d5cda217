"""A client of a scripted API server."""

from contextlib import asynccontextmanager
from typing import Any

from tests.component.cluster.server import FakeApi, client


@asynccontextmanager
async def serving(**scripts: Any) -> Any:
    fake = FakeApi()
    async with fake.serving(), client(fake.url) as api:
        yield fake, api
