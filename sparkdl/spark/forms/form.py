"""``Form``: the rows that a user gives, in one of the forms that they may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from sparkdl.errors import ConfigError
from sparkdl.spark.session.frames import is_frame, is_rdd

if TYPE_CHECKING:
    from sparkdl.learner.signature import Signature
    from sparkdl.spark.forms.sources import Columns, Source


class Form(ABC):
    """Rows in one form; :func:`sparkdl.spark.forms.opening.form_of` makes it. On the driver.

    A method that a form does not override says that the form has no such thing.
    """

    words: ClassVar[str]
    """The form, for messages."""
    has_columns: ClassVar[bool] = False
    """Whether the rows have columns with names, so that the user says which one means what."""
    endless: ClassVar[bool] = False
    """Whether the rows have no end."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @abstractmethod
    def open(self, signature: Signature, columns: Columns) -> Source:
        """Checks the rows against the model and selects what it needs of them.

        Args:
            columns: Which columns mean what, for rows that have columns.

        Raises:
            DataError: The rows do not fit the model.
            ConfigError: Not a form of data that is known.
        """

    def frame(self, spark: Any = None) -> Any | None:
        """The rows as a DataFrame of Spark; None for rows without columns.

        Args:
            spark: The session for rows that belong to none; None: the active one.

        Raises:
            ResourceError: The session has been stopped.
        """
        return None

    def numbered(self, spark: object = None) -> Any:
        """:meth:`frame`, with a column ``PLACE`` beside those of rows that the driver has."""
        return self.frame(spark)

    def settled(self) -> Any:
        """The data as ``fit`` takes them, for several calls: tables of this process are shipped."""
        return self.data

    def arrays(
        self, signature: Signature, columns: Columns | None = None
    ) -> tuple[Any, ...] | None:
        """Arrays of numbers of this process, with the names of the model's inputs and outputs."""
        return None

    def has_column(self, name: str) -> bool:
        """Whether a text means a column of these rows, and not a path."""
        return False

    def cut(self, share: float, signature: Signature) -> tuple[Form, Form] | None:
        """The rows but the last ones, and these; None where Spark must choose them."""
        return None

    def like(self, training: Form, signature: Signature, columns: Columns) -> Form:
        """These rows in the form of others, if that can be made of them.

        Args:
            training: The others, which the model trains on.
            columns: Which columns of the others mean what.
        """
        return self

    def weights_apart(self, columns: Columns) -> tuple[Form, Columns]:
        """The rows with weights in columns that are no feature or label, too."""
        return self, columns

    def refuse_frames(self, argument: str) -> None:
        """Refuses DataFrames in a tuple, as arrays are passed.

        Raises:
            ConfigError: The data are such a tuple.
        """
        parts = self.data if isinstance(self.data, (tuple, list)) else ()
        if any(is_frame(part) or is_rdd(part) for part in parts):
            raise ConfigError(
                f"{argument} must be one DataFrame, without a tuple",
                expected="one DataFrame (or RDD) that has both features and labels",
                received=f"a tuple of {', '.join(type(part).__name__ for part in parts)}",
                hint=f"{argument}=df; features='column' and label='column' name the columns",
            )
