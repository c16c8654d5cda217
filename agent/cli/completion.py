"""`gpu-node-agent completion`: scripts for shells, made from the parser."""

import argparse
from collections.abc import Iterator, Mapping

from agent.cli.arguments import Commands

SHELLS = ("bash", "zsh", "fish")
_BASH = """\
_gpu_node_agent() {{
    local path="" word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        case "$path/$word" in
            {known}) path="$path/$word" ;;
        esac
    done
    case "$path" in
{cases}
    esac
}}
complete -o default -F _gpu_node_agent {program}
"""
_ZSH = "#compdef {program}\nautoload -U +X bashcompinit && bashcompinit\n"


def add_commands(commands: Commands, root: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("completion", help="print the completion of these commands for a shell")
    parser.add_argument("shell", choices=SHELLS, help="source <(gpu-node-agent completion bash)")
    parser.set_defaults(command=lambda options: _completion(root, options.shell))


def _completion(root: argparse.ArgumentParser, shell: str) -> int:
    print(script(root, shell), end="")
    return 0


def parts_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The commands below a parser, those that its help leaves out, too."""
    for action in parser._actions:  # noqa: SLF001  argparse has no public way to them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  as above
            found: Mapping[str, argparse.ArgumentParser] = action.choices
            return found
    return {}


def shown_parts(parser: argparse.ArgumentParser) -> list[str]:
    """Names of the commands that the parser's help lists."""
    for action in parser._actions:  # noqa: SLF001  as above
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  as above
            return [each.dest for each in action._choices_actions]  # noqa: SLF001  as above
    return []


def paths(parser: argparse.ArgumentParser, at: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command with its path, as /check/node; the empty path is the program."""
    yield at, parser
    for name, part in parts_of(parser).items():
        if name in shown_parts(parser):
            yield from paths(part, f"{at}/{name}")


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options that help lists."""
    return [
        action
        for action in parser._actions  # noqa: SLF001  as above
        if action.option_strings and action.help is not argparse.SUPPRESS
    ]


def _words(parser: argparse.ArgumentParser) -> list[str]:
    words = shown_parts(parser)
    for action in parser._actions:  # noqa: SLF001  as above
        positional = not action.option_strings and not isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
        if positional and action.choices:
            words += [str(choice) for choice in action.choices]
    return words + [text for action in options_of(parser) for text in action.option_strings]


def script(root: argparse.ArgumentParser, shell: str) -> str:
    """The script for a shell."""
    if shell == "fish":
        return "\n".join(_fish(root)) + "\n"
    known = "|".join(path for path, _ in paths(root) if path)
    cases = "\n".join(
        f'        "{path}") COMPREPLY=($(compgen -W "{" ".join(_words(parser))}"'
        ' -- "${COMP_WORDS[COMP_CWORD]}")) ;;'
        for path, parser in paths(root)
    )
    text = _BASH.format(known=known, cases=cases, program=root.prog)
    return _ZSH.format(program=root.prog) + text if shell == "zsh" else text


def _fish(root: argparse.ArgumentParser) -> Iterator[str]:
    for path, parser in paths(root):
        words = path.split("/")[1:]
        parts = " ".join(shown_parts(parser))
        there = [f"__fish_seen_subcommand_from {word}" for word in words]
        if parts:
            there.append(f"not __fish_seen_subcommand_from {parts}")
        condition = "; and ".join(there) or "true"
        for word in _words(parser):
            name = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}"
            given = name if word.startswith("-") else f"-a {word}"
            yield f"complete -c {root.prog} -f -n '{condition}' {given}"
