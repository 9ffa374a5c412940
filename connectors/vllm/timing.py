"""How long the engine's threads are inside the connector."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Spender(Protocol):
    """Counts nanoseconds inside its timed methods."""

    spent_ns: int


S = TypeVar("S", bound=Spender)


def timed(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Count the time that the engine's thread spends in a method."""

    @wraps(method)
    def counted(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        begun = time.perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.spent_ns += time.perf_counter_ns() - begun

    return counted
