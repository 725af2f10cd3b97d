"""What compiled calls leave of an exception that is raised within them: all that a rank tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.errors import Cause, TransportError
from sparkdl.failures import Failure, carried

pytestmark = pytest.mark.keras


def reduce(array: Any) -> Any:
    raise TransportError("rank 1 is gone", expected="all ranks", hint="look at 'rank' 1")


def on_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow")

    @tf.function
    def step() -> Any:
        return tf.numpy_function(carried(reduce), [tf.zeros(3)], tf.float32)

    step()


def on_jax() -> None:
    jax = pytest.importorskip("jax")
    from jax.experimental import io_callback

    array = np.zeros(3, np.float32)
    step = jax.jit(lambda x: io_callback(carried(reduce), x, x, ordered=True))
    jax.block_until_ready(step(array))
    jax.effects_barrier()


@pytest.mark.parametrize("step", [on_tensorflow, on_jax])
def test_an_error_of_this_library_leaves_a_compiled_call_whole(step: Any) -> None:
    with pytest.raises(Exception, match="rank 1 is gone") as caught:
        step()
    assert not isinstance(caught.value, TransportError)  # the framework keeps the text alone
    failure = Failure.of(4, caught.value)
    assert (failure.rank, failure.cause) == (4, Cause.LOST)
    raised = failure.library_error()
    assert type(raised) is TransportError
    assert (raised.what, raised.expected) == ("rank 1 is gone (worker 4)", "all ranks")
    assert raised.hint == "look at 'rank' 1"
    assert "--sparkdl-failure--" not in failure.error + failure.traceback
