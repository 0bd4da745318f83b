"""Keeps vLLM's CPU engine alive when a seeded request is prefilled in chunks.

A token sampled from an incomplete prefill is thrown away, and the request's generator is rewound
by a CUDA-only offset. A CPU generator has no offset: the engine dies, and one request with a
seed takes every other one with it. Here the generator's whole state is put back instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_parity_plugin.ledger import Patch

RUNNER = "vllm.v1.worker.cpu_model_runner"


def _discarded(runner: Any) -> list[int]:
    """Rows of this step whose sampled token will be thrown away and that have a seed."""
    rows = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    return [int(row) for row in rows if int(row) in runner.input_batch.generators]


def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
    generators = self.input_batch.generators
    states = {row: generators[row].get_state() for row in _discarded(self)}
    output = _parent(self)._sample(self, *args, **kwargs)
    for row, state in states.items():
        generators[row].set_state(state)
    return output


def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
    generators = self.input_batch.generators
    already_rewound = {row: generators.pop(row) for row in _discarded(self)}
    try:
        return _parent(self)._bookkeeping_sync(self, *args, **kwargs)
    finally:
        generators.update(already_rewound)


def _parent(runner: Any) -> Any:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return CPUModelRunner.__mro__[1]


def _row(method: Callable[..., Any]) -> Patch:
    return Patch(
        name=f"cpu-seeds{method.__name__}",
        module=RUNNER,
        attribute=f"CPUModelRunner.{method.__name__}",
        wrap=lambda original: method,
        why="a seeded request whose prefill is chunked kills the CPU engine",
        versions="0.28-0.32 (CPU builds)",
        upstream="vllm#10097 (the CUDA-only rewind)",
        delete_when="GPUModelRunner._bookkeeping_sync no longer calls Generator.set_offset",
        adds=True,
    )


CPU_SEED_PATCHES = (_row(_sample), _row(_bookkeeping_sync))


def protect_seeded_requests() -> None:
    """Install both patches on CPU platforms; in the worker, before its model is loaded."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for patch in CPU_SEED_PATCHES:
            patch.apply()
