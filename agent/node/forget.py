"""Takes the agent's labels, annotations, taint and condition off a Node object."""

from collections.abc import Collection, Mapping

from agent.cluster.api import KubeApi
from agent.cluster.node import OwnNode, read_node
from agent.modes.withholding import ANNOTATION as CORDON
from agent.node.capacity import EFFECT, TAINT
from agent.node.conditions import CONDITION, beside_gfd, left_over, scale_down_changes, written

OWN_PREFIX = "gpu-node-agent.io/"
CUDA_LABELS = ("cuda-major-version", "cuda-minor-version")
# GPU Feature Discovery, where it runs, sets these itself.
GPU_LABELS = tuple(
    f"nvidia.com/gpu.{name}"
    for name in ("product", "count", "replicas", "memory", "compute.major", "compute.minor")
)


async def forget(api: KubeApi, name: str, keep: Collection[str] = ()) -> None:
    """Remove everything that the agent wrote to the node but the annotations in `keep`; again is nothing.

    Entries by hand stay: the mode's label, a cordon. Raises ApiError.
    """
    node = await read_node(api, name)
    if node is None:
        return
    metadata = node.metadata
    labels = {key: None for key in metadata.labels if is_ours(key, metadata.labels, metadata.annotations)}
    kept = {CORDON, *keep}
    annotations = {
        key: None for key in metadata.annotations if key.startswith(OWN_PREFIX) and key not in kept
    } | dict(scale_down_changes(metadata.annotations, held=False))
    if labels or annotations:
        body = {"metadata": {"labels": labels, "annotations": annotations}}
        await api.merge_patch(f"/api/v1/nodes/{name}", body)
    if any(each.get("key") == TAINT for each in node.spec.taints):
        await OwnNode(api, name).write_taint(TAINT, EFFECT, present=False)
    condition = {"type": CONDITION, "$patch": "delete"}
    await api.strategic_patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}})


def is_ours(key: str, present: Mapping[str, str], notes: Mapping[str, str]) -> bool:
    """Whether the agent set a label of a node with these labels and annotations."""
    if key.startswith(OWN_PREFIX) or key in CUDA_LABELS:
        return True
    if beside_gfd(present):
        return key in left_over(notes)
    return key in GPU_LABELS or key in written(notes)
