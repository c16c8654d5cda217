"""The opaque configuration of a class or a claim: strict, so that nothing meant is passed over. Pure."""

from typing import Literal

import msgspec

API_VERSION = "gpu-node-agent.io/v1"
KIND = "ShareConfiguration"


class BadConfiguration(Exception):
    """Parameters that are not understood; the text says what is wrong, and what is right."""


class ShareConfiguration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the devices of a request."""

    # The order of the slices is that of binpack. Which device it is kube-scheduler says: no other can be had.
    placement: Literal["binpack"] = "binpack"
    # Among MPS shares of one GPU: kernels of low ones give way (CUDA_MPS_CLIENT_PRIORITY).
    priority: Literal["normal", "low"] = "normal"


def parse(parameters: object) -> ShareConfiguration:
    """Raises BadConfiguration."""
    if not isinstance(parameters, dict):
        raise BadConfiguration("it is no object")
    given = {**parameters}
    version, kind = given.pop("apiVersion", None), given.pop("kind", None)
    if (version, kind) != (API_VERSION, KIND):
        text = f"apiVersion {version!r} and kind {kind!r}"[:200]
        raise BadConfiguration(f"it has {text}; known is {API_VERSION}, {KIND}")
    try:
        return msgspec.convert(given, ShareConfiguration)
    except msgspec.ValidationError as error:
        raise BadConfiguration(
            f"{str(error)[:200]}; keys are placement (binpack) and priority (normal, low)"
        ) from error
