"""Faults of a configuration each of whose keys is right."""

import os
from typing import TYPE_CHECKING

from agent.model.cuda import LONGEST_SOCKET as LONGEST_MPS_SOCKET
from agent.model.modes import ALIASES, FOREIGN_VALUES, OFFERED_MODES, SWITCHING, UNCLAIMED
from agent.model.node_inventory import faults_of

if TYPE_CHECKING:
    from agent.settings import Settings

# sun_path holds 108 bytes with its end (unix(7)).
LONGEST_SOCKET_PATH = 107
CONTROL_SOCKET = "/agent.sock"  # below host.run


def impossible(settings: "Settings") -> list[tuple[str, str]]:
    """Combinations that no single key shows to be wrong: (key path, sentence)."""
    faults = _bad_layouts(settings)
    if settings.injection.strategy == "cdi" and settings.injection.device_nodes:
        faults.append(
            (
                "injection.deviceNodes",
                "true cannot go with injection.strategy: cdi, whose devices bring their nodes; change one",
            )
        )
    if settings.mig.strategy == "single" and settings.modes.mig and settings.modes.pgpu:
        sentence = "offers instances by the name of whole GPUs: set modes.pgpu: false, or mig.strategy: mixed"
        faults.append(("mig.strategy", sentence))
    faults += _long_socket_path(settings)
    if settings.https.port is not None and settings.cluster.access == "off":
        sentence = "needs the API server, which says who may scrape: set cluster.access, or https.port: null"
        faults.append(("https.port", sentence))
    if settings.https.port and settings.https.port == settings.http.port:
        faults.append(("https.port", f"is {settings.https.port}, as http.port is: give one of them another"))
    sampling = settings.sampling
    if sampling.window_seconds < sampling.interval_seconds:
        sentence = (
            f"is {sampling.window_seconds:g}, less than sampling.intervalSeconds "
            f"({sampling.interval_seconds:g}): most of the time it would hold no sample; raise it"
        )
        faults.append(("sampling.windowSeconds", sentence))
    return faults


def _long_socket_path(settings: "Settings") -> list[tuple[str, str]]:
    """A run folder below which a task would fail for ever to make a socket."""
    owner, below, remedy = "the agent's socket", CONTROL_SOCKET, "name a shorter folder"
    if settings.modes.mps:
        owner, below = "the socket of an MPS control daemon", LONGEST_MPS_SOCKET
        remedy += ", or set modes.mps: false"
    length = len(os.fsencode(settings.host.run)) + len(below)
    text = (
        f"makes the path of {owner} {length} bytes long, and the kernel takes {LONGEST_SOCKET_PATH}; {remedy}"
    )
    return [("host.run", text)] if length > LONGEST_SOCKET_PATH else []


def _bad_layouts(settings: "Settings") -> list[tuple[str, str]]:
    modes = [mode.value for mode in OFFERED_MODES]
    dra = UNCLAIMED.value
    words = ("none", "disable", *modes, dra)
    # Meanings of words of the label by which no layout can be called.
    meanings = dict.fromkeys(words, "the name of a mode") | {
        **{alias: f"a name that is read as {mode}" for alias, mode in ALIASES.items()},
        **{word: f"a name that leaves the node to {owner}" for word, owner in FOREIGN_VALUES.items()},
        SWITCHING: "the word that nodes show during a switch",
    }
    faults = [
        (f"layouts.{name}", f"has {meanings[name]}; call the layout otherwise")
        for name in settings.layouts
        if name in meanings
    ]
    default = settings.default_mode
    if default not in (*words, *settings.layouts):
        known = ", ".join((*words, *sorted(settings.layouts)))
        faults.append(("defaultMode", f"must be a mode or a layout of this file ({known}), not {default!r}"))
    off = {each: f"modes.{each}: false" for each in modes if not getattr(settings.modes, each)}
    if not settings.dra.enabled:
        off[dra] = "dra.enabled: false"
    if default in off:
        faults.append(("defaultMode", f"is {default}, which {off[default]} turns off"))
    for name, entries in settings.layouts.items():
        if not entries and name not in meanings:
            faults.append(
                (f"layouts.{name}", "has no entry; a node that is to offer nothing is labelled disable")
            )
        faults.extend(
            (f"layouts.{name}[{number}]", f"has mode {each.mode}, which {off[each.mode]} turns off")
            for number, each in enumerate(entries)
            if each.mode in off
        )
        made = [each.resolved() for each in entries]
        faults.extend((f"layouts.{name}[{number}]", fault) for number, fault in faults_of(made))
        profiles = sorted({profile for each in made for profile in each.instances})
        if settings.mig.strategy == "single" and len(profiles) > 1:
            text = f"names instances of {', '.join(profiles)}, and mig.strategy: single offers one profile"
            faults.append((f"layouts.{name}", f"{text}; name one, or set mixed"))
        if not settings.mig.manage:
            text = "asks for instances that are made only with mig.manage: true; set it, or leave mig out"
            faults.extend(
                (f"layouts.{name}[{number}].mig", text) for number, each in enumerate(made) if each.instances
            )
    return faults
