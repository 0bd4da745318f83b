"""Remembers which tensors a model was loaded from: that is what an update must carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_parity_plugin.ledger import Patch
from vllm_parity_plugin.weights.manifest import SAFETENSORS_DTYPE

RECORD = "_parity_checkpoint"
"""Attribute of the loaded model: name -> (safetensors dtype, shape)."""


def _wrap_get_all_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_all_weights(
        self: Any, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        record: dict[str, tuple[str, list[int]]] = {}
        # The first load is the one that counts: going back to the checkpoint reads it again.
        model.__dict__.setdefault(RECORD, record)
        for name, tensor in original(self, model_config, model):
            dtype = str(tensor.dtype).removeprefix("torch.")
            record[name] = (SAFETENSORS_DTYPE.get(dtype, dtype), list(tensor.shape))
            yield name, tensor

    return get_all_weights


CHECKPOINT_PATCH = Patch(
    name="checkpoint-names",
    module="vllm.model_executor.model_loader.default_loader",
    attribute="DefaultModelLoader.get_all_weights",
    wrap=_wrap_get_all_weights,
    why="a weight update cannot be compared with what the model needs",
    versions="0.28-0.32",
    upstream="none",
    delete_when="vLLM can list the checkpoint tensors that a model loads",
)


def record_checkpoint() -> None:
    """Install the recorder; in the worker, just before its model is loaded."""
    CHECKPOINT_PATCH.apply()


def expected_tensors(model: torch.nn.Module) -> dict[str, tuple[str, list[int]]] | None:
    """Tensors that an update must carry: name -> (safetensors dtype, shape).

    The checkpoint's, without what no trainer holds: the second name of a tied head, and rotary
    tables that old checkpoints carry. None when the model was not loaded from a checkpoint
    (``--load-format dummy``), so that nobody knows.
    """
    record = model.__dict__.get(RECORD)
    if not record:
        return None
    tied = has_tied_head(model)
    return {
        name: spec
        for name, spec in record.items()
        if not name.endswith("rotary_emb.inv_freq")
        and not (tied and name.endswith("lm_head.weight"))
    }


def has_tied_head(model: torch.nn.Module) -> bool:
    """Whether the head is the embedding.

    Asked of the tensors first: a checkpoint that holds a copy of a tied head (Qwen3-0.6B does)
    makes vLLM say that the head is untied, and tie it again when both turn out to be equal.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    vocabulary = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    heads = [m.weight for m in vocabulary if isinstance(m, ParallelLMHead)]
    embeddings = [m.weight for m in vocabulary if not isinstance(m, ParallelLMHead)]
    if any(head is embedding for head in heads for embedding in embeddings):
        return True
    # On a pipeline stage that holds one of the two, the configuration is all there is.
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text_config, "tie_word_embeddings", False))
