"""How rollouts travel from a server to a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.rollout_wire import HeadDtype, Rollout, RolloutRequest


@dataclass(frozen=True)
class Transfer:
    """How rollouts travel.

    Attributes:
        head_dtype: of the head's logprobs.
        zstd: whether the answer is compressed.
        per_prompt: one request for each prompt with its completions, all at once, instead of one
            for the batch.
    """

    head_dtype: HeadDtype = "float32"
    zstd: bool = False
    per_prompt: bool = False

    def fetch(self, client: ParityClient, request: RolloutRequest) -> Rollout:
        """The completions of a request that holds a prompt once per completion."""
        if not self.per_prompt:
            return client.rollout(request, head_dtype=self.head_dtype, zstd=self.zstd)
        seeds = request.seeds
        requests = [
            request.model_copy(
                update={
                    "prompts": request.prompts[rows],
                    "seeds": None if seeds is None else seeds[rows],
                }
            )
            for rows in runs_of_equal(request.prompts)
        ]
        parts = client.rollouts(requests, head_dtype=self.head_dtype, zstd=self.zstd)
        return Rollout.join(parts, request.sampling)


PLAIN = Transfer()


def runs_of_equal(items: Sequence[object]) -> list[slice]:
    """Where equal neighbours stand: ``[a, a, b]`` gives the slices 0:2 and 2:3."""
    starts = [i for i in range(len(items)) if i == 0 or items[i] != items[i - 1]]
    return [slice(begin, end) for begin, end in pairwise([*starts, len(items)])]
