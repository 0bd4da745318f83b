"""Processor time per token of the way that vLLM's logprobs take from engine core to front end.

Only vLLM's own functions, in a loop on one core: encode and decode a step's message of 64 requests,
and append each row to flat lists. `without` is a message that carries tokens alone, as those of
parity rollouts do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

REQUESTS = 64
REPEATS = 50
HEADS = (None, 0, 32, 128)


def message(head: int | None) -> Any:
    """One step of 64 requests, with logprobs of ``head`` entries, or without."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists

    width = 1 + (head or 0)
    generator = np.random.default_rng(0)
    rows = LogprobsLists(
        generator.integers(0, 1000, (REQUESTS, width), dtype=np.int32),
        generator.normal(size=(REQUESTS, width)).astype(np.float32),
        np.ones(REQUESTS, dtype=np.int64),
    )
    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=f"parity-{index:032d}",
                new_token_ids=[5],
                new_logprobs=None if head is None else rows.slice_request(index, 1),
            )
            for index in range(REQUESTS)
        ]
    )


def per_token(action: Callable[[], Any]) -> float:
    """Microseconds of processor time per token."""
    action()
    begun = time.process_time()
    for _ in range(REPEATS):
        action()
    return (time.process_time() - begun) / REPEATS / REQUESTS * 1e6


def main() -> None:
    """Print the table."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    view = Table("K", "frames", "encode, us", "decode, us", "lists, us", "sum, us")
    for head in HEADS:
        step = message(head)
        encoded = encoder.encode(step)
        decoded = decoder.decode(encoded)

        def append() -> None:
            for output in decoded.outputs:  # noqa: B023
                LogprobsProcessor(None, FlatLogprobs(), None, 0.0, head, None).update_from_output(  # noqa: B023
                    output
                )

        times = [
            per_token(lambda: encoder.encode(step)),  # noqa: B023
            per_token(lambda: decoder.decode(encoded)),  # noqa: B023
            0.0 if head is None else per_token(append),
        ]
        name = "without" if head is None else str(head)
        view.add_row(name, str(len(encoded)), *(f"{t:.1f}" for t in (*times, sum(times))))
    Console().print(view)


if __name__ == "__main__":
    main()
