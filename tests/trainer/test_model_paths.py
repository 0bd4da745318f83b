"""Other ways to run the model: gradient checkpointing and torch.compile, in real training steps.

Property: the gradient of the centred loss is that of the plain model, on one and the same batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.trainer.runs import parity_trainer, relative
from trl_callbacks import ParityGRPOTrainer
from vllm_parity_plugin.serving import Server


class Replay(ParityGRPOTrainer):
    """Trains on one batch that an earlier run sampled."""

    batch: dict[str, Any] | None = None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if Replay.batch is None:
            Replay.batch = super()._generate_and_score_completions(inputs)
        return dict(Replay.batch)


class Gradients(TrainerCallback):
    """The gradients of each optimizer step, and how often the first layer began."""

    def __init__(self, model: Any) -> None:
        self.grads: list[dict[str, torch.Tensor]] = []
        self.calls = 0
        model.model.layers[0].mlp.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.grads.append({name.removeprefix("_orig_mod."): p.grad.clone() for name, p in named})


CHECKPOINTING = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    "setting",
    [
        {**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=["checkpointing", "reentrant", "compile"],
)
def test_other_paths_have_the_same_gradient(
    model_path: Path, tokenizer: Any, restored: Server, tmp_path: Path, setting: dict[str, Any]
) -> None:
    """G5: checkpointing and torch.compile change how the gradient is computed, not what it is."""
    Replay.batch, found = None, []
    for values in ({}, setting):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        watching = Gradients(model)
        trainer = parity_trainer(
            model,
            tokenizer,
            restored.url,
            tmp_path,
            kind=Replay,
            trainer={"callbacks": [watching]},
            max_grad_norm=0.0,
            max_steps=1,
            **values,
        )
        trainer.train()
        found.append(watching)
    plain, other = found
    assert len(plain.grads) == len(other.grads) == 1
    if "gradient_checkpointing" in setting:
        assert other.calls > plain.calls
    else:
        assert hasattr(trainer.model_wrapped, "_orig_mod")
    assert all(grad.norm() > 0 for grad in plain.grads[0].values())
    for ours, theirs in zip(other.grads, plain.grads, strict=True):
        assert relative(ours, theirs) < 1e-4
