"""Sentences without names of pods, for those who may read the sentence and not the pods: pure."""

import re

POD = "<pod>"
# namespace/name, and both in a path of the API server.
_NAME = re.compile(
    r"(?<=/namespaces/)[^/\s]+/pods/[^/\s:,;]+|(?<![\w./:-])[a-z0-9][-a-z0-9]*/[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?(?![\w/])"
)
_LIST = re.compile(rf"{POD}(?:, {POD})*(?: and (\d+) more)?")
_TWICE = re.compile(r"(\d+ pod\(s\) to end): \d+ pods?")  # the number stands before the list


def without_pods(text: str) -> str:
    """A sentence on one line, `<pod>` in the place of each name."""
    return _NAME.sub(POD, " ".join(text.split()))


def pods_counted(text: str) -> str:
    """A sentence on one line, `3 pods` in the place of a list of names."""
    return _TWICE.sub(r"\1", _LIST.sub(_count, without_pods(text)))


def _count(found: re.Match[str]) -> str:
    count = found[0].count(POD) + int(found[1] or 0)
    return f"{count} pod{'s' if count > 1 else ''}"
