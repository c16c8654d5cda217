"""The requested mode of the node: from its label, a file, or the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.model.modes import ALIASES, FOREIGN_VALUES, OFFERED_MODES, UNCLAIMED, Mode
from agent.model.node_layout import Entry, everywhere
from agent.settings import Settings

LABEL = "nvidia-device-enable"
# Labels of others by which another agent claims the node's GPUs.
FOREIGN_LABELS = {("gpu", "on"): "another GPU device plugin (label gpu=on)"}
NOTHING = ("disable", "none", "")
LONGEST_WORD = 63  # a label value


@dataclass(frozen=True, slots=True)
class Desired:
    """The wanted layout. A `problem` is reported; without entries, nothing changes then."""

    name: str  # as it was asked for: a mode, a layout, or "none"
    entries: tuple[Entry, ...] = ()
    problem: str | None = None

    @property
    def nothing(self) -> bool:
        """Whether it asks for no GPU at all, and nothing stands in its way."""
        return not self.problem and bool(self.entries) and all(one.mode is Mode.OFF for one in self.entries)

    @property
    def word(self) -> str:
        """The mode in force once this is obeyed; none on a node that another agent claims."""
        return "none" if self.problem else self.name


@dataclass(frozen=True, slots=True)
class ModeCatalog:
    layouts: Mapping[str, tuple[Entry, ...]]
    modes: tuple[Mode, ...]  # those that the configuration allows
    default: str

    @property
    def values(self) -> list[str]:
        """All values of the label that have a meaning here."""
        return [mode.value for mode in self.modes] + ["disable"] + sorted(self.layouts)

    def named(self, name: str, source: str) -> Desired:
        """The layout that a word stands for; an unknown word is a problem that names the known ones."""
        if name in NOTHING:
            return Desired("none", everywhere(Mode.OFF))
        known = ALIASES.get(name, name)
        for mode in self.modes:
            if known == mode.value:
                return Desired(known, everywhere(mode))
        if name in self.layouts:
            used = {entry.mode for entry in self.layouts[name]} - {Mode.OFF}
            if off := used - set(self.modes):
                names = ", ".join(sorted(mode.value for mode in off))
                return Desired(name, problem=f"layout {name} uses {names}, which the configuration turns off")
            return Desired(name, self.layouts[name])
        return Desired(name, problem=f"{source} {name!r} is unknown; use one of {', '.join(self.values)}")

    def remembered(self, before: Desired | None) -> Desired | None:
        """A request of before this process, as it was meant then; None: it can be obeyed no more."""
        if before is None:
            return None
        if before.entries:
            allowed = {*self.modes, Mode.OFF}
            return before if all(entry.mode in allowed for entry in before.entries) else None
        desired = self.named(before.name, "remembered mode")
        return None if desired.problem else desired

    def of_labels(self, labels: Mapping[str, str]) -> Desired:
        """The request of a node's labels."""
        value = labels.get(LABEL)
        if value in FOREIGN_VALUES:
            return _claimed(value, f"label {LABEL}={value}", FOREIGN_VALUES[value])
        for (key, foreign), owner in FOREIGN_LABELS.items():
            if labels.get(key) == foreign:
                return _claimed(value or "none", f"label {key}={foreign}", owner)
        if value is None:
            return self.named(self.default, "defaultMode")
        return self.named(value, f"label {LABEL}")


def _claimed(name: str, by: str, owner: str) -> Desired:
    return Desired(
        name,
        everywhere(Mode.OFF),
        problem=f"{by} gives this node to {owner}; two agents cannot offer the same GPUs: remove one of them",
    )


def catalog_of(settings: Settings) -> ModeCatalog:
    """The modes that may be requested under a configuration."""
    allowed = settings.modes
    modes = [mode for mode in OFFERED_MODES if getattr(allowed, mode.value)]
    modes += [UNCLAIMED] if settings.dra.enabled else []
    layouts = {
        name: tuple(entry.resolved() for entry in entries) for name, entries in settings.layouts.items()
    }
    return ModeCatalog(layouts, tuple(modes), settings.default_mode)
