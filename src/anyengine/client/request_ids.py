"""The names that callers gave to their requests."""

from __future__ import annotations

from anyengine.brief import brief
from anyengine.errors import RequestRefusedError


class RequestIds:
    """Which of the live requests have names, found by either. Its length is their number."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}
        self._ids: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def check_free(self, request_id: str | None) -> None:
        """:raises RequestRefusedError: if a live request has this id"""
        if request_id in self._handles:
            raise RequestRefusedError(f"request_id={brief(request_id)}: a live request has this id")

    def add(self, request_id: str, handle: int) -> None:
        """Give the request with this handle its name, which is free."""
        self._handles[request_id] = handle
        self._ids[handle] = request_id

    def forget(self, handle: int) -> None:
        """The request with this handle is no longer live: its name, if it had one, is free again."""
        request_id = self._ids.pop(handle, None)
        if request_id is not None:
            del self._handles[request_id]

    def clear(self) -> None:
        """No request is live any more."""
        self._handles.clear()
        self._ids.clear()
