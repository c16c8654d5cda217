"""The API server as service accounts see it, and when a changed policy is in force."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tests.cluster.api import ApiClient, ApiError
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually

RBAC = "rbac.authorization.k8s.io"


def acting_as(
    cluster: Cluster, namespace: str, name: str, more: Mapping[str, Any] = MappingProxyType({})
) -> ApiClient:
    """The API server as a service account sees it."""
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [], **more},
    }
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    return cluster.client(cluster.api.request("POST", path, request)["status"]["token"])


def service_account(cluster: Cluster, namespace: str, name: str, role: str) -> ApiClient:
    """A new service account with a ClusterRole."""
    account = {"name": name, "namespace": namespace}
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    cluster.apply(
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{namespace}-{name}"},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", **account}],
        }
    )
    return acting_as(cluster, namespace, name)


def in_force(act: Callable[[], object]) -> None:
    """Wait until a changed policy lets it pass: the API server takes it up a moment after it was written."""

    def taken_up() -> None:
        try:
            act()
        except ApiError as error:
            raise NotYet(str(error)) from error

    eventually(taken_up, timeout=20, what="the changed policy is in force")
