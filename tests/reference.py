"""The trainer's side of a comparison: Transformers, bf16 body, eager attention, a chosen head."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trl_callbacks.token_logprobs import token_logprobs

Head = Literal["float32", "bfloat16"]


@functools.cache
def _model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def reference(
    path: Path,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    head: Head = "float32",
    weights: dict[str, torch.Tensor] | None = None,
) -> np.ndarray:
    """Logprobs of all completion tokens, [N], one sequence after the other.

    Args:
        weights: other weights than the directory's, by checkpoint name.
    """
    model = _model(path)
    tensors = model.state_dict() if weights is None else dict(weights)
    output = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        body = {
            name.removeprefix("model."): t for name, t in tensors.items() if "lm_head" not in name
        }
        states = torch.func.functional_call(model.model, body, (ids,)).last_hidden_state[0]
        states = states[len(prompt) - 1 : -1]
        chosen = torch.tensor(list(completion))[:, None]
        if head == "float32":
            logprobs, _ = token_logprobs(states, output, chosen, temperature=temperature)
        else:
            logits = (states @ output.T).float() / temperature
            logprobs = logits.log_softmax(-1).gather(1, chosen)
        found.append(logprobs[:, 0].float().numpy())
    return np.concatenate(found)
