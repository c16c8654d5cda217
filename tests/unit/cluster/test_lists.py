"""Answers of the API server that are lists, and those that are not."""

import pytest

from agent.cluster.api import ApiError, ListPage, understood


@pytest.mark.parametrize(
    "answer",
    [
        b"{}",
        b'{"error": "upstream"}',
        b'{"kind": "Status", "metadata": {}, "status": "Success"}',
        b'{"items": []}',
    ],
)
def test_an_answer_that_is_no_list_is_not_an_empty_one(answer: bytes) -> None:
    """As of a proxy in between, with status 200: all pods of the node had ended by it."""
    with pytest.raises(ApiError):
        understood(answer, ListPage, "/api/v1/pods")
    assert understood(b'{"metadata": {}, "items": []}', ListPage, "/api/v1/pods").items == []
