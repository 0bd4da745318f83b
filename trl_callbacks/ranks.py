"""What one process of a trainer does for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

from vllm_parity_plugin.errors import ParityError

T = TypeVar("T")


def on_main_process(accelerator: Any, action: Callable[[], T]) -> T:
    """Run ``action`` on the main process and give every process its result, or its error.

    Without this, a failure on the main process leaves the others waiting in a collective.

    Raises:
        ParityError: what the main process raised, on all processes.
    """
    outcome: list[Any] = [None]
    failure: BaseException | None = None
    if accelerator.is_main_process:
        try:
            outcome = [("ok", action())]
        except ParityError as error:
            failure = error
            outcome = [("refused", (error.found, error.why, error.fix))]
        except Exception as error:
            failure = error
            outcome = [("failed", repr(error))]
    broadcast_object_list(outcome, from_process=0)
    if failure is not None:
        raise failure
    kind, value = outcome[0]
    if kind == "refused":
        raise ParityError(*value)
    if kind == "failed":
        raise ParityError(
            f"The main process failed ({value}).",
            "The other processes cannot go on alone.",
            "look at the main process's traceback.",
        )
    return value
