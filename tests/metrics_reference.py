"""Writes the reference of all metrics: `python -m tests.metrics_reference` gives `docs/metrics.md`."""

from agent.telemetry.definitions import ALL, PREFIX, Definition

_HEAD = f"""# Metrics

For on-call engineers and people who build dashboards; ten minutes, or look for the name that you need.

Served at `/metrics` of the agent's HTTP port (9446 unless configured otherwise), in Prometheus' text format
or OpenMetrics, gzipped on request. All names begin with `{PREFIX}`; units are base units. A scrape makes no
NVML call: it shows what the agent read in its last sampling round (`sampling.intervalSeconds`).

`gpu` is the GPU's UUID, `index` its NVML index; the index may change, the UUID does not.

This file is generated from `agent/telemetry/definitions.py` by `make docs`.

| metric | kind | labels | meaning |
| --- | --- | --- | --- |
"""


def reference() -> str:
    """The whole document, in Markdown."""
    return _HEAD + "".join(_row(definition) for definition in ALL)


def _row(definition: Definition) -> str:
    labels = ", ".join(f"`{label}`" for label in definition.labels)
    return f"| `{definition.series}` | {definition.kind} | {labels} | {definition.help} |\n"


if __name__ == "__main__":
    print(reference(), end="")
