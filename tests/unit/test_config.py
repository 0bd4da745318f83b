"""ParityGRPOConfig: what score centering fits, and what it refuses at construction (S9).

Properties: every refused setting is named with a reason and a fix; with score centering off TRL's
settings are untouched; the documented defaults are the real ones.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from trl_callbacks import ParityGRPOConfig
from trl_callbacks.config import LOSS_TYPES
from trl_callbacks.importance_weights import MaskedWeight, NoWeight, TruncatedWeight
from vllm_parity_plugin.errors import ParityError


def config(**values: Any) -> ParityGRPOConfig:
    return ParityGRPOConfig(use_cpu=True, bf16=False, report_to=[], **values)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_averaging_losses_are_accepted(loss_type: str) -> None:
    """S9: losses that differ only in how they average tokens."""
    assert config(loss_type=loss_type).loss_type == loss_type


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
        ({"loss_type": "luspo"}, "loss_type='luspo'"),
        ({"loss_type": "sapo"}, "loss_type='sapo'"),
        ({"loss_type": "vespo"}, "loss_type='vespo'"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"num_iterations": 2}, "num_iterations=2"),
        ({"steps_per_generation": 4}, "steps_per_generation=4"),
        ({"score_centering_weight": "is"}, "score_centering_weight='is'"),
        ({"score_centering_top_k": 0}, "score_centering_top_k=0"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
        ({"entropy_coef": 0.01}, "entropy_coef=0.01"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        (
            {
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": "token_truncate",
            },
            "token_truncate",
        ),
        ({"vllm_mode": "colocate"}, "colocate"),
        ({"use_vllm": False}, "use_vllm=False"),
    ],
)
def test_what_centering_does_not_fit_is_refused(values: dict[str, Any], word: str) -> None:
    """S9, G5: refused in the constructor, with the setting's value and a fix."""
    with pytest.raises(ParityError) as caught:
        config(**values)
    assert word in str(caught.value)
    assert "Fix:" in str(caught.value)


def test_without_centering_trl_decides() -> None:
    """score_centering=False gives TRL's loss and its own correction back."""
    plain = config(score_centering=False, loss_type="cispo", num_iterations=2)
    assert plain.vllm_importance_sampling_correction is True


def test_centering_replaces_trls_correction() -> None:
    """A token weight must not be applied twice; a sequence weight composes as an outer factor."""
    assert config().vllm_importance_sampling_correction is False
    outer = config(
        vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="sequence_mask"
    )
    assert outer.vllm_importance_sampling_correction is True


def test_weights_come_from_the_settings() -> None:
    """none, tis with its cap, mis with its bounds."""
    assert config().weight() == NoWeight()
    assert config(score_centering_weight="tis", score_centering_cap=3.0).weight() == (
        TruncatedWeight(3.0)
    )
    assert config(score_centering_weight="mis").weight() == MaskedWeight(0.5, 5.0)


@pytest.mark.parametrize("values", [{"weight_transport": "nccl"}, {"weight_kv": "drop"}])
def test_choices_are_checked(values: dict[str, Any]) -> None:
    """A transport or KV treatment that does not exist is refused by name, before training."""
    ((name, value),) = values.items()
    with pytest.raises(ParityError, match=f"{name}='{value}'"):
        config(**values)


def test_every_setting_of_ours_is_documented() -> None:
    """The help string under a field is its documentation, so it must be there."""
    own = set(ParityGRPOConfig.__annotations__)
    missing = [f.name for f in fields(ParityGRPOConfig) if f.name in own and not f.metadata["help"]]
    assert missing == []
