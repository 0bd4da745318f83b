"""A ``rollout_func`` for a stock ``GRPOTrainer``: completions from a parity server, in step with
the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trl_callbacks.generation import ParityGeneration, generation_for, log_update
from trl_callbacks.heads import unusable_rows
from trl_callbacks.weight_sync import KV, Transport
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.errors import ParityError


class ParityRollout:
    """A TRL ``rollout_func``: samples from a parity server and keeps it in step with the trainer.

    ``GRPOTrainer(..., rollout_func=ParityRollout(url), callbacks=[ParityCallback(url)])``

    Args:
        server_url: base URL of the server.
        token: its VLLM_PARITY_TOKEN, if it has one.
        seed: makes rollouts repeatable.
        timeout: seconds that one rollout may take.
        transport: how weights travel: ``file`` through a directory that both sides see, ``http``,
            or ``auto``.
        kv: what becomes of the KV cache of requests in flight when weights change.
    """

    def __init__(
        self,
        server_url: str,
        *,
        token: str | None = None,
        seed: int | None = None,
        timeout: float = 600.0,
        transport: Transport = "auto",
        kv: KV = "keep",
    ) -> None:
        self.client = ParityClient(server_url, token=token, timeout=timeout)
        self._seed = seed
        self._transport: Transport = transport
        self._kv: KV = kv
        self._generation: ParityGeneration | None = None
        self._synced_step = -1

    def __call__(self, prompts: Iterable[Any], trainer: Any) -> dict[str, Any]:
        """TRL's contract: prompt_ids, completion_ids and logprobs, one entry per prompt."""
        if self._generation is None:
            self._generation = generation_for(
                trainer, self.client, self._seed, self._transport, self._kv
            )
        generation = self._generation
        generation.begin(trainer.state.global_step, trainer.model.training)
        if trainer.state.global_step != self._synced_step:
            generation.sync_weights()
            self._synced_step = trainer.state.global_step
            log_update(trainer, generation)
        prompt_ids, images, _ = trainer._tokenize_prompts(list(prompts))
        _, completion_ids, logprobs, _ = generation.generate(prompt_ids, images, 1)
        assert generation.last_rollout is not None
        for row, reason in unusable_rows(generation.last_rollout).items():
            raise ParityError(
                f"Completion {row} of this rollout cannot be trained on: {reason}.",
                "A rollout_func cannot mask a completion, and training on it would count noise "
                "as an answer.",
                "look at the server's log; ParityGRPOTrainer masks such completions instead.",
            )
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[token[0] for token in row] for row in logprobs],
        }
