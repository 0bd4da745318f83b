"""The trainer's fp32 head on real Transformers models, under TRL's fused forward.

Properties: logits are fp32 products of the weights rounded to the served dtype, and the gradient
passes that rounding; a tied embedding keeps its tie and its dtype; the model's own forward is
unchanged; head log-probabilities come from the same logits as the label's; logit scales and soft
caps are those of the model; what cannot be reproduced is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from tests.models import Kind
from trl_callbacks.lm_head import install_parity_head
from vllm_parity_plugin.errors import ParityError

TEMPERATURE = 0.7
IDS = torch.tensor([[5, 17, 3, 250, 99, 401, 7, 31], [8, 2, 300, 44, 12, 6, 77, 500]])
HEADS = torch.stack([(IDS[:, 1:] * 7 + k) % 512 for k in range(5)], dim=-1)


def load(path: Path, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model.eval()


def fused(model: Any, **kwargs: Any) -> Any:
    return model(
        input_ids=IDS,
        attention_mask=torch.ones_like(IDS),
        labels=IDS,
        fused_lm_head=True,
        **kwargs,
    )


def reference(model: Any, weight: torch.Tensor) -> torch.Tensor:
    """[B, S - 1, V] log-probabilities in float64 from the model's own hidden states."""
    hidden = model.model(input_ids=IDS).last_hidden_state[:, :-1]
    return torch.log_softmax(hidden.double() @ weight.double().T / TEMPERATURE, -1)


def pick(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logprobs.gather(-1, ids)


@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_fp32_on_served_weights(
    tiny_model: Callable[[Kind], Path], kind: Kind, dtype: torch.dtype
) -> None:
    """H4, H7: bf16 or fp32 master weights, tied or not, give the served head's logits in fp32."""
    model = load(tiny_model(kind), dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(3e-3)  # bits that bf16 rounds away
        before = fused(model).log_probs
        install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
        output = fused(model, head_ids=HEADS)
        served = model.get_output_embeddings().weight.to(torch.bfloat16)
        expected = reference(model, served)
    for ours in (fused(model).log_probs, output.log_probs):
        assert (ours - pick(expected, IDS[:, 1:, None])[..., 0]).abs().max() < 2e-5
    assert (output.head_log_probs - pick(expected, HEADS)).abs().max() < 2e-5
    assert (output.entropy - torch.special.entr(expected.exp()).sum(-1)).abs().max() < 2e-5
    # The control: TRL's head before, in bf16 or with unrounded master weights.
    assert (before - output.log_probs).abs().max() > 1e-3


def test_logprobs_are_not_bf16_numbers(tiny_model: Callable[[Kind], Path]) -> None:
    """G12: fp32 output, of which bf16 can represent almost nothing."""
    model = load(tiny_model("untied"), torch.bfloat16)
    install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
    with torch.no_grad():
        logprobs = fused(model, head_ids=HEADS).head_log_probs
    assert logprobs.dtype == torch.float32
    representable = logprobs == logprobs.to(torch.bfloat16).float()
    assert representable.float().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tie_is_kept_and_its_gradient_complete(
    tiny_model: Callable[[Kind], Path], dtype: torch.dtype
) -> None:
    """H4: one tensor, its own dtype, and input part + output part in its gradient."""
    model = load(tiny_model("tied"), dtype)
    install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
    weight = model.get_output_embeddings().weight
    assert weight is model.get_input_embeddings().weight
    assert weight.dtype == dtype
    assert model.get_input_embeddings()(IDS).dtype == dtype
    fused(model, head_ids=HEADS).log_probs.sum().backward()
    exact = load(tiny_model("tied"), torch.float64)
    shared = exact.get_output_embeddings().weight
    pick(reference(exact, shared), IDS[:, 1:, None]).sum().backward()
    error = (weight.grad.double() - shared.grad).norm() / shared.grad.norm()
    assert error < (5e-2 if dtype == torch.bfloat16 else 1e-2)


def test_the_rounding_passes_the_gradient(tiny_model: Callable[[Kind], Path]) -> None:
    """With and without ``head_ids`` the master weight gets the served head's gradient."""
    grads = []
    for kwargs in ({}, {"head_ids": HEADS}):
        model = load(tiny_model("untied"), torch.float32)
        install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
        fused(model, **kwargs).log_probs.sum().backward()
        grads.append(model.get_output_embeddings().weight.grad)
    assert grads[0].dtype == torch.float32
    assert grads[0].abs().max() > 0
    assert (grads[0] - grads[1]).abs().max() < 1e-4 * grads[0].abs().max()


def test_the_models_own_forward_is_unchanged(tiny_model: Callable[[Kind], Path]) -> None:
    """Generation and other callers see the same logits, bit for bit."""
    model = load(tiny_model("untied"), torch.bfloat16)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
        assert torch.equal(model(input_ids=IDS).logits, before)


def test_padding_entries_and_unscored_positions_are_inert(
    tiny_model: Callable[[Kind], Path],
) -> None:
    """Ids of -1 give -inf and no gradient; labels of -100 give zeros."""
    model = load(tiny_model("untied"), torch.float32)
    install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
    heads = HEADS.clone()
    heads[..., -1] = -1
    labels = IDS.clone()
    labels[:, :4] = -100
    output = model(
        input_ids=IDS,
        attention_mask=torch.ones_like(IDS),
        labels=labels,
        fused_lm_head=True,
        head_ids=heads,
    )
    assert torch.isneginf(output.head_log_probs[:, 3:, -1]).all()
    assert (output.log_probs[:, :3] == 0).all()
    output.head_log_probs[:, 3:, :-1].sum().backward()
    assert model.get_output_embeddings().weight.grad.isfinite().all()


def test_installing_twice_is_once(tiny_model: Callable[[Kind], Path]) -> None:
    """A callback and a trainer may both ask."""
    model = load(tiny_model("untied"), torch.bfloat16)
    first = install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
    forward = model.forward
    second = install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
    assert first is second
    assert model.forward == forward


def gemma() -> Any:
    config = Gemma2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        final_logit_softcapping=30.0,
        tie_word_embeddings=False,
    )
    return Gemma2ForCausalLM(config)


def cohere() -> Any:
    config = CohereConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.0625,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return CohereForCausalLM(config)


@pytest.mark.parametrize("build", [gemma, cohere])
def test_logit_processing_is_the_models_own(build: Callable[[], Any]) -> None:
    """H9: a soft cap at 30 with |logits| up to 60, and a scale of 0.0625."""
    torch.manual_seed(0)
    model = build().float().eval()
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight.mul_(60 / model.model(input_ids=IDS).last_hidden_state.matmul(weight.T).abs().max())
        own = torch.log_softmax(model(input_ids=IDS).logits[:, :-1].double() / TEMPERATURE, -1)
        add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
        install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.float32)
        output = fused(model, head_ids=HEADS)
    assert (output.head_log_probs - pick(own, HEADS)).abs().max() < 1e-3
    assert (output.log_probs - pick(own, IDS[:, 1:, None])[..., 0]).abs().max() < 1e-3


def test_unknown_logit_processing_is_refused(tiny_model: Callable[[Kind], Path]) -> None:
    """H9: an architecture that scales its logits in its forward only is not taken for granted."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("untied"), dtype=torch.bfloat16)
    own = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits * 0.25
        return output

    model.forward = scaled
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    with pytest.raises(ParityError, match="processes its logits"):
        install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)


def test_a_head_that_is_not_linear_is_refused(tiny_model: Callable[[Kind], Path]) -> None:
    """A quantised or adapted head has no plain weights to run in fp32."""
    model = load(tiny_model("untied"), torch.bfloat16)
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(ParityError, match="Sequential"):
        install_parity_head(model, temperature=TEMPERATURE, served_dtype=torch.bfloat16)
