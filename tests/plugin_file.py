"""Joins `agent/kubectl` to the one file `kubectl-gpu` (`make docs`)."""

import ast
from pathlib import Path

from agent import __version__

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "agent" / "kubectl"
FILE = ROOT / "charts" / "gpu-node-agent" / "files" / "kubectl-gpu"
MODULES = (
    "kube",
    "view",
    "claims",
    "fit",
    "cluster",
    "text",
    "commands",
    "page",
    "completion",
    "main",
)  # each before those that import it
HEAD = """\
#!/usr/bin/env python3
# kubectl gpu, of gpu-node-agent {version}: put this file into a folder of PATH as kubectl-gpu, executable.
# It needs kubectl and Python 3.11 or newer, nothing else. Made from agent/kubectl by `make docs`.
"""
# Before imports that an older one lacks, as macOS has it.
GUARD = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("kubectl-gpu needs Python 3.11 or newer, this is " + sys.version.split()[0])

"""


def joined() -> str:
    imports: set[str] = set()
    parts = [_body(SOURCES / f"{name}.py", imports) for name in MODULES]
    html = (SOURCES / "page.html").read_text(encoding="utf-8")
    assert '"""' not in html
    assert "\\" not in html
    read = 'Path(__file__).with_name("page.html").read_text(encoding="utf-8")'
    body = "\n\n".join(parts)
    assert body.count(read) == 1
    imports.discard("from pathlib import Path")
    head = HEAD.format(version=__version__) + "from __future__ import annotations\n\n" + GUARD
    literal = '"""' + html + '"""'
    return f"{head}{chr(10).join(sorted(imports))}\n\n{body.replace(read, literal)}"


def _body(file: Path, imports: set[str]) -> str:
    """A module without its docstring and imports; those of the standard library go to `imports`."""
    source = file.read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    for node in reversed(tree.body):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        assert node.end_lineno is not None
        if isinstance(node, ast.Import):
            imports.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            module = str(node.module)
            if not module.startswith("agent."):
                imports |= {f"from {module} import {each.name}" for each in node.names}
        del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip("\n") + "\n"


if __name__ == "__main__":
    FILE.write_text(joined(), encoding="utf-8")
    FILE.chmod(0o755)
