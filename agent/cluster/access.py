"""The agent's rights at the API server, as the server itself answers.

A 403 is either RBAC's, and then holds for every object of its kind in the namespace, or comes from an
admission plugin or webhook that refuses one object. The status is the same, so the server is asked:
https://kubernetes.io/docs/reference/access-authn-authz/authorization/#checking-api-access
"""

import msgspec

from agent.cluster.api import ApiError, KubeApi

PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class _Status(msgspec.Struct):
    allowed: bool


class _Review(msgspec.Struct):
    status: _Status


async def lacks_right(api: KubeApi, verb: str, resource: str, namespace: str) -> bool:
    """Whether the agent's account may not do `verb` on a resource of the core group in a namespace.

    False also where the server does not say so: some clusters take the right to ask from service accounts.
    """
    attributes = {"namespace": namespace, "verb": verb, "resource": resource}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    try:
        answer = await api.post(PATH, body)
        return not msgspec.json.decode(answer, type=_Review).status.allowed
    except (ApiError, msgspec.DecodeError):
        return False
