"""Degradations while pods are served, as /readyz and status show them."""

from agent.app.agent import Agent
from agent.model.modes import Mode
from agent.modes.switch_state import Phase
from agent.node.driver_upgrade import Stage


def remarks(agent: Agent) -> list[str]:
    """Each in a sentence; empty: all is well."""
    found = []
    if profile := agent.settings.simulator.profile:
        found.append(f"the GPUs are simulated (simulator.profile: {profile}): pods get none")
    if agent.cluster:
        reflectors = (agent.cluster.node.reflector, agent.cluster.pods.reflector)
        if problem := next((each.problem for each in reflectors if each.problem), None):
            found.append(
                f"the API server cannot be followed: {problem}; the last mode asked for stays in force, and "
                "the scheduler hears of changes at the kubelet's next tick"
            )
        else:
            writers = [
                ("node.status", agent.node.capacity if agent.node else None),
                ("the node's taint", agent.node.taint if agent.node else None),
                ("the Node object", agent.state_writer),
            ]
            found.extend(f"{what} cannot be patched: {w.problem}" for what, w in writers if w and w.problem)
    if agent.configuration_problem:
        found.append(
            f"the newest configuration was rejected, an older one is in force: {agent.configuration_problem}"
        )
    if agent.gpu_specification and (problem := agent.gpu_specification.devices.value.problem):
        found.append(f"the CDI specification of the GPUs is not as it should be: {problem}")
    if agent.mps:
        found.extend(agent.mps.remarks())
    if agent.limits and (problem := agent.limits.problem) and _offers_vgpu(agent):
        found.append(f"vGPU containers start without the enforcement library: {problem}")
    if agent.cordons and agent.cordons.problem:
        found.append(f"{agent.cordons.problem}; the GPUs cordoned before stay so")
    if agent.driver_upgrade and agent.driver_upgrade.stage is not Stage.NONE:
        found.append(
            f"the GPU operator exchanges the driver of this node (label {agent.driver_upgrade.label}): GPUs "
            "leave their modes when their pods have ended, and nothing is offered until the label changes"
        )
    if agent.switcher and (state := agent.switcher.state.value).phase in (Phase.BLOCKED, Phase.FAILED):
        found.append(f"mode {state.desired} is not in force: {state.message}")
    return found


def _offers_vgpu(agent: Agent) -> bool:
    gpus = agent.switcher.state.value.gpus if agent.switcher else ()
    return any(each.active.mode is Mode.VGPU for each in gpus)
