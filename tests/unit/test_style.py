"""Words that docs/style.md bans stay out of comments, docstrings, messages and documents. Files are short."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "style.md"
MOST_LINES = 500  # of a file of Python
# Docstrings that begin like this say nothing without the name above them, or have no subject.
HEADLESS = ('"""What ', '"""Whom ', '"""Whose ', '"""Do it')
BANNED = re.compile(
    r"\b(anew|befall\w*|sell(?:s|ing)?|sold|tell(?= of\b| apart\b)|telling|tells|told|whom?ever|"
    r"wish(?:es|ed)?)\b",
    re.IGNORECASE,
)
TEXTS = (
    *("docs/*.md", "tests/**/*.md", "*.md", "charts/**/*.yaml", "charts/**/*.tpl", "charts/**/*.txt"),
    *("config/**/*.yaml", "Makefile", "Dockerfile", ".ci/*", ".github/**/*.*"),
)
# The changelog is history; the style page quotes.
EXEMPT = {PAGE, ROOT / "CHANGELOG.md"}
# Keys of the verdict file, which earlier agents read, too, and of `status --json`.
STORED_KEYS = {'"told"', '"selling"'}
# On Python 3.12 and newer the text of an f-string is a token of its own.
SPOKEN = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def spoken(source: str) -> Iterator[tuple[int, str]]:
    """Comments and strings of Python source, each line with its number."""
    if not BANNED.search(source):
        return  # most files: reading tokens takes long
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in SPOKEN and token.string not in STORED_KEYS:
            yield from enumerate(token.string.splitlines(), token.start[0])


def banned(lines: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(number, found[0]) for number, line in lines for found in BANNED.finditer(line)]


def test_no_banned_word_in_the_code() -> None:
    found = {
        str(path.relative_to(ROOT)): words
        for folder in ("agent", ".ci")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_proto" not in path.parts and (words := banned(spoken(path.read_text())))
    }
    assert not found


def test_no_file_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in ("agent", "tests", "proto", ".ci")
        for path in (ROOT / folder).rglob("*.py")
        if "_proto" not in path.parts
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_docstring_is_a_headless_clause() -> None:
    """A noun says it: `Messages to the actor.`, not `What the actor is sent.`"""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("agent", "tests", ".ci")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.lstrip().startswith(HEADLESS)
    ]
    assert not found


def test_no_banned_word_in_the_c_library() -> None:
    found = {
        path.name: words
        for path in sorted((ROOT / "agent" / "vgpu" / "clib").glob("*.[ch]"))
        if (words := banned(iter(enumerate(path.read_text().splitlines(), 1))))
    }
    assert not found


def described(source: str) -> Iterator[tuple[int, str]]:
    """Comments and docstrings of Python source, each line with its number."""
    if not BANNED.search(source):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield from enumerate(text.splitlines(), node.body[0].lineno)


def test_no_banned_word_in_comments_and_docstrings_of_tests() -> None:
    """Strings are left out: they are messages of programs under test, too."""
    found = {
        str(path.relative_to(ROOT)): words
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (words := banned(described(path.read_text())))
    }
    assert not found


@pytest.mark.parametrize("pattern", TEXTS)
def test_no_banned_word_in_documents(pattern: str) -> None:
    files = sorted({path for path in ROOT.glob(pattern) if path.is_file()} - EXEMPT)
    assert files
    found = {
        str(path.relative_to(ROOT)): words
        for path in files
        if (words := banned(iter(enumerate(path.read_text().splitlines(), 1))))
    }
    assert not found


def test_the_search_finds_comments_docstrings_and_messages() -> None:
    source = '"""It tells."""\nsold = f"told {1}"  # anew\n'
    assert [word for _, word in banned(spoken(source))] == ["tells", "told", "anew"]


def test_the_search_in_tests_finds_comments_and_docstrings() -> None:
    source = 'def test_it_is_told() -> None:\n    """It tells."""\n    sold = "told"  # anew\n'
    assert sorted(word for _, word in banned(described(source))) == ["anew", "tells"]


def test_the_page_has_ten_pairs_whose_second_half_is_clean() -> None:
    section = PAGE.read_text().split("## Before and after")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[2:]
    assert len(rows) >= 10
    assert not [after for _, after in rows if BANNED.search(after)]
