"""How TRL's own forward pass is made to score heads as well as labels.

Shapes: B rows, T tokens of the padded completions, K head.
"""

from __future__ import annotations

from typing import Any

import torch


class HeadScorer:
    """Stands where TRL calls the model, and asks for log-probabilities of heads as well.

    TRL's own code then builds inputs, batches and labels, and sees the output it expects.

    Args:
        model: what TRL would call.
        head_ids: [B, T, K] of the rows that will be scored, in order; -1 is padding.
        entropy_grad: the entropy is differentiated.
    """

    def __init__(self, model: Any, head_ids: torch.Tensor, *, entropy_grad: bool = False) -> None:
        self._model, self._head_ids, self._entropy_grad = model, head_ids, entropy_grad
        self._outputs: list[Any] = []

    def __call__(self, **inputs: Any) -> Any:
        first = sum(len(output.log_probs) for output in self._outputs)
        ids = self._head_ids[first : first + len(inputs["input_ids"])]
        # Position t of the output predicts token t + 1; prompt positions carry no head.
        before = inputs["labels"].size(1) - 1 - ids.size(1)
        padded = torch.nn.functional.pad(ids, (0, 0, before, 0), value=-1)
        output = self._model(**inputs, head_ids=padded, entropy_grad=self._entropy_grad)
        self._outputs.append(output)
        return output

    def scored(self, name: str) -> torch.Tensor:
        """``log_probs`` [B, T], ``entropy`` [B, T] or ``head_log_probs`` [B, T, K]."""
        tokens = self._head_ids.size(1)
        return torch.cat([getattr(output, name)[:, -tokens:] for output in self._outputs])
