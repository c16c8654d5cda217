"""What pairing has seen since the process started, beyond the kubelet's records.

Losing it costs comfort, not truth: the kubelet never hands an ID out twice, so at worst a pod is refused
that another GPU had room for.
"""

from dataclasses import dataclass, field

from agent.model.demand import Pod, Stage
from agent.model.ledger import Half, Ledger

NOTHING: frozenset[str] = frozenset()


@dataclass
class PairingStats:
    """What happened; read by metrics."""

    granted: int = 0  # pairs
    refused: int = 0
    expired: int = 0  # promises that nobody came back for
    serial: int = 0  # pairs told apart by the order of calls alone


@dataclass(frozen=True, slots=True)
class View:
    """What others may see: the ledger, and IDs held by init containers, which no record shows."""

    ledger: Ledger
    hidden: frozenset[str] = frozenset()

    @property
    def waiting(self) -> int:
        """Pairs that were promised and wait for their second half."""
        return sum(not each.complete for each in self.ledger.reservations)


@dataclass
class Memory:
    """Plain state; the actor owns it."""

    served: set[tuple[str, str, Half]] = field(default_factory=set)  # pod UID, container, half
    refused: set[str] = field(default_factory=set)  # pod UIDs
    # IDs of plain init containers, by pod: the records never show them, the kubelet keeps them for the pod.
    hidden: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    # IDs that a request did not offer though nobody was seen to hold them, and until when to believe it.
    busy: dict[Half, tuple[frozenset[str], float]] = field(default_factory=dict)
    _uids: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def hidden_ids(self) -> frozenset[str]:
        """All IDs of plain init containers."""
        return NOTHING.union(*self.hidden.values())

    def granted(self, pod: Pod, container: str, half: Half, ids: frozenset[str]) -> None:
        """A half was handed to a container."""
        self.served.add((pod.uid, container, half))
        self.recalled(pod, container, ids)

    def recalled(self, pod: Pod, container: str, ids: frozenset[str]) -> None:
        """A container holds IDs, which no record shows if it is a plain init container."""
        self._uids[pod.key] = pod.uid
        found = pod.container(container)
        if found is not None and found.stage is Stage.INIT and not pod.finished:
            self.hidden[pod.key] = self.hidden.get(pod.key, NOTHING) | ids

    def turned_away(self, pod: Pod) -> None:
        """The pod was refused: it never asks again."""
        self._uids[pod.key] = pod.uid
        self.refused.add(pod.uid)

    def forget_others_than(self, listed: frozenset[tuple[str, str]]) -> bool:
        """Let go of pods that the records no longer list; whether there were any."""
        gone = self._uids.keys() - listed
        if gone:
            self.busy.clear()  # whoever held what was kept back may be among them
        for key in gone:
            uid = self._uids.pop(key)
            self.hidden.pop(key, None)
            self.refused.discard(uid)
            self.served = {entry for entry in self.served if entry[0] != uid}
        return bool(gone)

    def kept_back(self, half: Half, now: float) -> frozenset[str]:
        """IDs held out of sight: those of init containers, and those of `half` not offered lately."""
        ids, until = self.busy.get(half, (NOTHING, 0.0))
        return self.hidden_ids | ids if until > now else self.hidden_ids
