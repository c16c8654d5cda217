"""The few parts of kubernetes-asyncio that the agent needs, without the 1,500 model modules.

A normal import costs about 30 MiB and half a second, because the packages' `__init__` import every
model. Empty packages with the right search path are put in their place first; then only the HTTP
layer, the configuration and the loaders come in. This is the one module that imports the client.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread

_PACKAGES = ("kubernetes_asyncio", "kubernetes_asyncio.client", "kubernetes_asyncio.config")


class NoClusterAccess(Exception):
    """There is no way to the API server from here; the text says what was looked for."""


def _seed() -> None:
    if hasattr(sys.modules.get("kubernetes_asyncio.client"), "Configuration"):
        return
    specification = importlib.util.find_spec("kubernetes_asyncio")
    if specification is None or not specification.submodule_search_locations:
        raise NoClusterAccess("the package kubernetes-asyncio is not installed")
    root = Path(next(iter(specification.submodule_search_locations)))
    for name in _PACKAGES:
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
    client = sys.modules["kubernetes_asyncio.client"]
    if not hasattr(client, "Configuration"):
        # A mebibyte for basic authentication, which API servers have not had since 1.19.
        with _late("urllib3"):
            configuration = importlib.import_module("kubernetes_asyncio.client.configuration")
        vars(client)["Configuration"] = configuration.Configuration
        vars(client)["ApiClient"] = object  # named by the kubeconfig loader, never used here


@contextmanager
def _late(name: str) -> Iterator[None]:
    """Who imports a module meanwhile gets a stand-in, which brings the real one in when it is first used."""

    def attribute(wanted: str) -> object:
        return getattr(importlib.import_module(name), wanted)

    if name in sys.modules:
        yield
        return
    stand_in = types.ModuleType(name)
    vars(stand_in)["__getattr__"] = attribute  # PEP 562
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _files(listed: Path) -> tuple[str, str | None]:
    """The files of a list that say something, and the context to use: the first that one of them names.

    As kubectl has it; the client takes the last, and fails on an empty file. Raises OSError, ValueError.
    """
    yaml = importlib.import_module("yaml")
    paths = [Path(part).expanduser() for part in str(listed).split(os.pathsep) if part]
    there = [path for path in paths if path.exists()] or paths[:1]
    found: dict[str, str] = {}
    for path in there:
        with path.open("rb") as file:
            content = yaml.safe_load(file)
        if isinstance(content, dict):
            found[str(path)] = str(content.get("current-context") or "")
        elif content is not None:
            raise ValueError(f"{path} is no kubeconfig")
    if not found:
        raise ValueError("it is empty")
    return os.pathsep.join(found), next(filter(None, found.values()), None)


def _loader(files: str, context: str | None) -> Any:  # noqa: ANN401  the client's own untyped class
    """The first half of the client's load_kube_config, which reads files: it blocks."""
    module = importlib.import_module("kubernetes_asyncio.config.kube_config")
    return module._get_kube_config_loader_for_yaml_file(  # noqa: SLF001  it has no public name
        files, active_context=context, persist_config=True
    )


async def configuration(kubeconfig: Path | None) -> Any:  # noqa: ANN401  the client's own untyped class
    """The client's Configuration: from `kubeconfig` where given, else from the pod's service account.

    It may be a list of files, as in $KUBECONFIG: they are merged by kubectl's rules. Raises NoClusterAccess.
    """
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise NoClusterAccess(
            "not in a pod (KUBERNETES_SERVICE_HOST is not set) and no kubeconfig is configured"
        )
    made = await anyio.to_thread.run_sync(_empty)
    try:
        if kubeconfig is None:
            await anyio.to_thread.run_sync(_service_account, made)
        else:
            # The client prints that there is no file, and then complains of what it does not hold.
            files, context = await anyio.to_thread.run_sync(_files, kubeconfig)
            loader = await anyio.to_thread.run_sync(_loader, files, context)
            await loader.load_and_set(made)
    except Exception as error:
        named = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's service account"
        raise NoClusterAccess(f"{named} cannot be used: {error}") from error
    return made


def _empty() -> Any:  # noqa: ANN401  as above
    _seed()
    importlib.import_module("kubernetes_asyncio.client.rest")  # takes a tenth of a second: here, not later
    return importlib.import_module("kubernetes_asyncio.client.configuration").Configuration()


def _service_account(made: Any) -> None:  # noqa: ANN401  as above
    importlib.import_module("kubernetes_asyncio.config.incluster_config").load_incluster_config(
        client_configuration=made
    )


def rest_client(configured: Any) -> Any:  # noqa: ANN401  as above
    """The client's HTTP layer, one aiohttp session. Call it on the running loop."""
    return importlib.import_module("kubernetes_asyncio.client.rest").RESTClientObject(configured)
