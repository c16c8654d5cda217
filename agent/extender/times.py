"""How long the extender waits for whom, in seconds, and in which order these times must stand.

Each has to outlast the one above it, or the ledger lets go of GPUs that are held; the table of all of them is
in `tests/unit/extender/test_times.py`.
"""

from agent.cluster.reflector import SILENCE_SECONDS

# Until the API server has answered a Binding. Less than the time between losing and giving up a lease: no
# late write of a former leader.
BIND_SECONDS = 4.0
# After which (settings: assumeSeconds) a choice without an answer may go, with the next sign of life of the
# watch of bound pods: one that is silent would not have shown the pod.
ASSUME_SECONDS = 30.0
# An API server sends a bookmark about once a minute; a watch that brings nothing for SILENCE_SECONDS is
# opened again from where it stood. A binding that was confirmed and is not shown even then gets a new list.
UNSHOWN_SECONDS = SILENCE_SECONDS + 10.0
# A watch that shows no life for so long is dead: pods that others bind would be missing from the ledger.
DEAD_WATCH_SECONDS = 120.0
