"""BoundedDict: a cache that does not grow without end."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """A dict that drops all entries when it would exceed `most`. Several threads may use it at a time."""

    def __init__(self, most: int = 4096) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)
