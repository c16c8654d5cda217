"""Writes the reference of all metrics: `python -m tests.metrics_reference` gives `docs/metrics.md`."""

from collections.abc import Iterator

from agent.telemetry.definitions import ALL, PREFIX, Definition

_HEAD = f"""# Metrics

For on-call engineers and people who build dashboards; ten minutes, or look for the name that you need.

Served at `/metrics` (port 9446) as Prometheus text or OpenMetrics; a scrape shows the last sampling round
(`sampling.intervalSeconds`). Names begin with `{PREFIX}`; `_total` is a counter, `_info` a constant 1 whose
labels say something, all others are gauges. `gpu` is the UUID, `index` NVML's index, which may change.
What cannot be read is missing. Made by `make docs`. The extender's: [extender.md](extender.md#metrics).
"""
# Labels that a table's metrics have in common. The first that fits counts.
_TABLES = {
    "Each container and GPU": ("namespace", "pod", "container", "gpu", "index", "mode"),
    "Each vGPU container": ("namespace", "pod", "container", "gpu"),
    "Each GPU": ("gpu", "index"),
    "Each GPU in mode mps": ("gpu",),
    "Each resource": ("resource",),
    "The node and the agent": (),
}
_MORE = {"Each vGPU container": " Refusals, peak, repairs and unmeasured processes: by its own word."}


def reference() -> str:
    """The whole document, in Markdown."""
    found: dict[str, list[Definition]] = {title: [] for title in ("Each GPU", *_TABLES)}
    for definition in ALL:
        found[next(title for title, common in _TABLES.items() if _has(definition, common))].append(definition)
    return _HEAD + "".join(line for title, each in found.items() for line in _table(title, each))


def _has(definition: Definition, common: tuple[str, ...]) -> bool:
    return definition.labels[: len(common)] == common


def _table(title: str, definitions: list[Definition]) -> Iterator[str]:
    common = _TABLES[title]
    yield f"\n## {title}\n\n"
    if common:
        yield f"Labels {_quoted(common)}, and those named.{_MORE.get(title, '')}\n\n"
    yield "| metric | meaning |\n| --- | --- |\n"
    for each in definitions:
        more = ",".join(each.labels[len(common) :])
        yield f"| `{each.series}{f'{{{more}}}' if more else ''}` | {each.help} |\n"


def _quoted(labels: tuple[str, ...]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


if __name__ == "__main__":
    print(reference(), end="")
