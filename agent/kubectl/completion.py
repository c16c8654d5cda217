"""Completion: kubectl runs `kubectl_complete-gpu` of PATH with the words so far, the last one unfinished."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote

from agent.kubectl.claims import claim_names
from agent.kubectl.kube import Kubectl, KubectlFailed
from agent.kubectl.view import VisiblePods, asks, node_view

COMPLETE = "__complete"  # the word by which the script below asks
SCRIPT = f"""\
#!/bin/sh
# Completion of kubectl gpu: put this file into a folder of PATH as kubectl_complete-gpu, executable.
exec kubectl-gpu {COMPLETE} "$@"
"""
NO_FILES = ":4"  # the end of an answer, as kubectl knows it: no names of files beside these
ANSWER_SECONDS = 3
MODES = ("pgpu", "vgpu", "mps", "dra", "disable")


def completions(root: argparse.ArgumentParser, words: Sequence[str], passed_on: Iterable[str]) -> list[str]:
    """Words that may stand in the place of the last one; names in the cluster as the viewer may read them."""
    *before, last = words or [""]
    parser, flags, namespace, place, option = root, [], "", 0, None
    for word in before:
        if option is not None:  # its value
            flags += [f"{_long(option)}={word}"] if option.dest in passed_on else []
            namespace = word if option.dest == "namespace" else namespace
            option = None
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            found = _option(parser, name)
            if found and found.nargs != 0 and not equals:
                option = found
            elif found and equals:
                flags += [word] if found.dest in passed_on else []
                namespace = value if found.dest == "namespace" else namespace
        elif word in _commands(parser):
            parser = _commands(parser)[word]
        else:
            place += 1
    if option is not None:
        offered = [str(each) for each in option.choices or ()]
    elif last.startswith("-"):
        offered = [name for each in parser._actions for name in each.option_strings]  # noqa: SLF001  no public way
    elif commands := _commands(parser):
        offered = list(commands)
    else:
        places = [each for each in parser._actions if not each.option_strings]  # noqa: SLF001  as above
        kubectl = Kubectl([*flags, f"--request-timeout={ANSWER_SECONDS}s"], asks=False)
        offered = _values(kubectl, places[place], namespace) if place < len(places) else []
    return [each for each in offered if each.startswith(last)]


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:  # noqa: SLF001  argparse has no public way to them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  as above
            return dict(action.choices)
    return {}


def _option(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    return next((each for each in parser._actions if name in each.option_strings), None)  # noqa: SLF001  as above


def _long(option: argparse.Action) -> str:
    return option.option_strings[-1]


def _values(kubectl: Kubectl, place: argparse.Action, namespace: str) -> list[str]:
    """Values of a place among the arguments; none where the cluster does not give them in time."""
    known: dict[str, Callable[[], list[str]]] = {
        "node": lambda: [name for name, _ in _nodes(kubectl)],
        "gpu": lambda: [f"{name}/{index}" for name, indices in _nodes(kubectl) for index in indices],
        "pod": lambda: _pods(kubectl, namespace),
        "mode": lambda: list(MODES),
    }
    try:
        return known[place.dest]() if place.dest in known else [str(each) for each in place.choices or ()]
    except KubectlFailed:
        return []


def _nodes(kubectl: Kubectl) -> list[tuple[str, list[int]]]:
    """Nodes with GPUs, and the indices of these."""
    views = (node_view(each, VisiblePods([])) for each in kubectl.get("/api/v1/nodes")["items"])
    return [(view["name"], [gpu["index"] for gpu in view["gpus"]]) for view in views if view]


def _pods(kubectl: Kubectl, namespace: str) -> list[str]:
    where = quote(namespace or kubectl.namespace(), safe="")
    pods = kubectl.get(f"/api/v1/namespaces/{where}/pods")["items"]
    return [each["metadata"]["name"] for each in pods if asks(each) or claim_names(each)]
