"""``Setting``: a read-only attribute, for the settings of a ``SparkModel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from sparkdl.errors import ReadOnlyError

if TYPE_CHECKING:
    from sparkdl.spark.model_settings import ModelSettings

T = TypeVar("T")


class Setting(Generic[T]):
    """A read-only attribute of a :class:`SparkModel`: an argument that it was made with.

    Args:
        read: Gives the value.
    """

    def __init__(self, read: Callable[[ModelSettings], T]) -> None:
        self._read = read

    def __set_name__(self, owner: type[ModelSettings], name: str) -> None:
        self._name = name
        self.__doc__ = f"The argument ``{name}``, or what was chosen for it; read-only."

    @overload
    def __get__(self, model: None, owner: type[ModelSettings]) -> Setting[T]: ...
    @overload
    def __get__(self, model: ModelSettings, owner: type[ModelSettings]) -> T: ...
    def __get__(self, model: ModelSettings | None, owner: type[ModelSettings]) -> T | Setting[T]:
        return self if model is None else self._read(model)

    def __set__(self, model: ModelSettings, value: T) -> None:
        raise ReadOnlyError(
            f"{self._name} of a SparkModel cannot be changed",
            expected=f"{self._name}={self._read(model)!r}, with which it was made",
            received=repr(value),
            hint=f"make another one: SparkModel(spark_model.model, ..., {self._name}={value!r})",
        )
