"""What can be awaited, or entered with ``async with``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Generic, Protocol, TypeVar


class _Closing(Protocol):
    async def aclose(self) -> None: ...


C = TypeVar("C", bound=_Closing)


class Opening(Generic[C]):
    """Something that is being opened: ``await`` it, or use it in ``async with``, which also closes it."""

    def __init__(self, make: Callable[[], Coroutine[object, object, C]]) -> None:
        self._make = make
        self._made: C | None = None

    def __await__(self) -> Generator[object, None, C]:
        return self._make().__await__()

    async def __aenter__(self) -> C:
        self._made = await self._make()
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.aclose()
