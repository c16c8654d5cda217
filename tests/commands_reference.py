"""The tables of commands in docs/commands.md, written from the parsers (`make docs`)."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from agent.cli import main as cli
from agent.cli.completion import parts_of, shown_parts
from agent.kubectl.main import PASSED_ON, plugin_parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
PLUGIN_BEGIN, PLUGIN_END = "<!-- kubectl gpu: written by make docs -->", "<!-- end of kubectl gpu -->"
BEGIN, END = "<!-- commands: written by make docs -->", "<!-- end of commands -->"
Row = tuple[str, argparse.ArgumentParser, str]  # path, parser, help
LEFT_OUT = ("help", "config", "set", "namespace", "output", *PASSED_ON)  # of many; the page says so once


def written() -> str:
    """The page with its tables as the parsers have them."""
    text = _between(PAGE.read_text(encoding="utf-8"), BEGIN, END, tables())
    return _between(text, PLUGIN_BEGIN, PLUGIN_END, plugin_table())


def _between(text: str, begin: str, end: str, inner: str) -> str:
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{inner}\n{end}{rest.split(end)[1]}"


def tables() -> str:
    """Without hooks of the chart, which help leaves out, too."""
    shown = [(path, parser, text) for path, parser, text, hidden in leaves(cli._parser()) if not hidden]
    return _table("gpu-node-agent", shown)


def plugin_table() -> str:
    whole = plugin_parser()
    overview = ("", whole, "the nodes: GPUs, modes, free shares, fragments, waiting pods")
    found = [overview, *((path, parser, text) for path, parser, text, _ in leaves(whole) if path)]
    return _table("kubectl gpu", found)


def leaves(
    parser: argparse.ArgumentParser, path: str = "", text: str = "", hidden: bool = False
) -> Iterator[tuple[str, argparse.ArgumentParser, str, bool]]:
    """Each command that can be given: path, parser, help, and whether help leaves it out."""
    parts = parts_of(parser)
    if path and (not parts or parser.get_default("command")):
        yield path, parser, text, hidden
    helps = {
        each.dest: each.help
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for each in action._choices_actions
    }
    for name, part in parts.items():
        words = helps.get(name) or part.description or ""
        yield from leaves(part, f"{path} {name}".strip(), words, hidden or name not in shown_parts(parser))


def _table(program: str, rows: list[Row]) -> str:
    lines = ["| command | does |", "| --- | --- |"]
    for path, parser, text in rows:
        lines.append(f"| `{f'{program} {path}'.strip()}{''.join(_arguments(parser))}` | {_plain(text)} |")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").rstrip(".")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or action.dest in LEFT_OUT:
            continue
        if isinstance(action, argparse._SubParsersAction):
            continue
        value = str(action.metavar or "")
        if not value and action.choices:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        if action.option_strings:
            name = action.option_strings[-1]
            takes = action.nargs != 0
            words = f"{name} {value or action.dest.upper()}" if takes else name
            yield f" {words}" if action.required else f" [{words}]"
        else:
            yield (
                f" [{value or action.dest.upper()} ...]"
                if action.nargs == "*"
                else f" {value or action.dest}"
            )


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
