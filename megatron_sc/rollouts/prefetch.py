"""Load ahead in a thread, within a memory bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence


class Prefetcher[Key: Hashable, Value]:
    """A cache that a thread fills with what will be wanted next.

    Args:
        load: from key to value; called from both threads, for different keys.
        size: bytes that a value takes, known before it is loaded.
        budget: most bytes to hold. One value may exceed it: what is asked for is always loaded.
    """

    def __init__(self, load: Callable[[Key], Value], size: Callable[[Key], int], budget: int):
        self._load, self._size, self._budget = load, size, budget
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._errors: dict[Key, Exception] = {}
        self._wanted: list[Key] = []
        self._loading: set[Key] = set()  # in either thread
        self._used = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rollout-prefetch", daemon=True)
        self._thread.start()

    @property
    def used(self) -> int:
        """Bytes held."""
        return self._used

    def get(self, key: Key) -> Value:
        """A value, loaded now if the thread has not yet. Raises what loading raised."""
        with self._changed:
            while key in self._loading:
                self._changed.wait()
            if key in self._errors:
                raise self._errors.pop(key)
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            self._loading.add(key)
        try:
            value = self._load(key)
            with self._changed:
                self._make_room(self._size(key))
                self._insert(key, value)
        finally:
            with self._changed:
                self._loading.discard(key)
                self._changed.notify_all()
        return value

    def want(self, keys: Sequence[Key]) -> None:
        """Say what will be asked for next, in order. The thread loads it as far as memory allows."""
        with self._changed:
            self._wanted = list(dict.fromkeys(keys))
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and forget everything."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._values.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (key := self._next()) is None and not self._stopped:
                    self._changed.wait()
                if key is None or self._stopped:
                    return
                self._loading.add(key)
            value: Value | None = None
            error: Exception | None = None
            try:
                value = self._load(key)
            except Exception as caught:  # handed to the thread that asks
                error = caught
            with self._changed:
                if error is not None:
                    self._errors[key] = error
                elif value is not None:
                    self._insert(key, value)
                self._loading.discard(key)
                self._changed.notify_all()

    def _next(self) -> Key | None:
        """The first wanted key that is missing, once there is room for it."""
        for key in self._wanted:
            if not (key in self._values or key in self._errors or key in self._loading):
                size = self._size(key)
                self._make_room(size)
                return key if self._used + size <= self._budget else None
        return None

    def _make_room(self, size: int) -> None:
        """Evict what is not wanted, least recently used first."""
        wanted = set(self._wanted)
        for key in [key for key in self._values if key not in wanted]:
            if self._used + size <= self._budget:
                return
            self._used -= self._values.pop(key)[1]

    def _insert(self, key: Key, value: Value) -> None:
        if key not in self._values:
            self._values[key] = (value, self._size(key))
            self._used += self._values[key][1]
