"""Rights as the API server says: the agent's own, and those of callers by their tokens.

https://kubernetes.io/docs/reference/access-authn-authz/webhook/ has the same two reviews the other way round.
"""

from dataclasses import dataclass, field

import anyio
import msgspec

from agent.cluster.api import ApiError, KubeApi, understood

# The agent's rights at the API server, as the server itself answers.
#
# A 403 is either RBAC's, and then holds for every object of its kind in the namespace, or comes from an
# admission plugin or webhook that refuses one object. The status is the same, so the server is asked:
# https://kubernetes.io/docs/reference/access-authn-authz/authorization/#checking-api-access

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
        return not understood(answer, _Review, PATH).status.allowed
    except ApiError:
        return False


# Callers by their tokens, and what they may get, as the API server says: its delegated authorization.

TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class UserInfo(msgspec.Struct, frozen=True):
    """As the review of a token names it."""

    username: str = ""
    uid: str = ""
    groups: list[str] = msgspec.field(default_factory=list)
    extra: dict[str, list[str]] = msgspec.field(default_factory=dict)


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: UserInfo = msgspec.field(default_factory=UserInfo)


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


@dataclass(frozen=True, slots=True)
class TokenVerdict:
    """Of one token; a name where the API server knows it."""

    user: str = ""
    allowed: bool = field(default=False)


class Reviews:
    """Asks for each token whether its holder may `get` a path that is no resource of Kubernetes."""

    def __init__(self, api: KubeApi, path: str, seconds: float) -> None:
        """`seconds`: for both calls of one review."""
        self._api = api
        self._path = path
        self._seconds = seconds

    async def review(self, token: str) -> TokenVerdict:
        """Raises ApiError where the API server gives no answer."""
        try:
            with anyio.fail_after(self._seconds):
                user = await self._user(token)
                return (
                    TokenVerdict() if user is None else TokenVerdict(user.username, await self._allowed(user))
                )
        except TimeoutError as error:
            raise ApiError(f"the API server has not reviewed a token within {self._seconds:g} s") from error

    async def _user(self, token: str) -> UserInfo | None:
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        answer = await self._api.post(TOKENS, {**kind, "spec": {"token": token}}, self._seconds)
        status = understood(answer, _TokenReview, TOKENS).status
        return status.user if status.authenticated and status.user.username else None

    async def _allowed(self, user: UserInfo) -> bool:
        spec = {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups,
            "extra": user.extra,
            "nonResourceAttributes": {"path": self._path, "verb": "get"},
        }
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        answer = await self._api.post(ACCESS, {**kind, "spec": spec}, self._seconds)
        return understood(answer, _AccessReview, ACCESS).status.allowed
