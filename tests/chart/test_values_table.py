"""The table of values in the documents is what values.yaml says."""

import pytest

from tests.chart.values_table import DOCUMENT, VALUES, rows, updated


def test_the_documents_have_the_values_of_today() -> None:
    document = DOCUMENT.read_text()
    assert updated(document, VALUES.read_text()) == document, "run `make docs` and commit docs/install.md"


def test_a_value_has_its_path_its_default_and_its_comment() -> None:
    text = """
# Of the block.
one:
  first: 1
  # Two lines,
  # and a | in them.
  second: {a: [b]}
  deeper:
    # Third.
    third: ""
# Of Kubernetes.
affinity:
  nodeAffinity: {}
list:
  - 1
"""
    assert list(rows(text)) == [
        ("one.first", "`1`", "Of the block."),
        ("one.second", '`{"a": ["b"]}`', "Two lines, and a \\| in them."),
        ("one.deeper.third", '`""`', "Third."),
        ("affinity", '`{"nodeAffinity": {}}`', "Of Kubernetes."),
        ("list", "`[1]`", ""),
    ]


def test_a_document_without_its_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table between"):
        updated("text", "a: 1")
