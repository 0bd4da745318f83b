"""ParityGRPOConfig: what score centering fits, and what it refuses at construction (S9).

Properties: every refused setting is named with a reason and a fix; with score centering off TRL's
settings are untouched; the documented defaults are the real ones.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from trl_callbacks import ParityGRPOConfig
from trl_callbacks.importance_weights import FullWeight, MaskedWeight, NoWeight, TruncatedWeight
from trl_callbacks.loss_types import LOSSES, SUPPORTED, support_table
from trl_callbacks.policy_ratio import CappedRatio, ClippedRatio, GatedRatio
from vllm_parity_plugin.errors import ParityError


def config(**values: Any) -> ParityGRPOConfig:
    return ParityGRPOConfig(use_cpu=True, bf16=False, report_to=[], **values)


@pytest.mark.parametrize("loss_type", SUPPORTED)
@pytest.mark.parametrize("weight", ["none", "tis", "mis", "is"])
@pytest.mark.parametrize("steps", [1, 3])
def test_supported_losses_are_accepted(loss_type: str, weight: str, steps: int) -> None:
    """S9: whatever the table calls supported can be constructed."""
    values = {"loss_type": loss_type, "score_centering_weight": weight, "num_iterations": steps}
    accepted = config(**values)
    assert accepted.several_steps == (steps > 1)
    row = next(row for row in support_table() if row[0] == loss_type)
    assert set(row[2:]) == {"supported"}


def test_every_loss_of_trl_is_in_the_table() -> None:
    """A loss that TRL adds is refused until it was read, and this test says so."""
    help_text = next(f for f in fields(ParityGRPOConfig) if f.name == "loss_type").metadata["help"]
    # The only other word in quotes is a value of importance_sampling_level.
    named = set(re.findall(r"'([a-z_]+)'", help_text)) - {"sequence"}
    assert named == set(LOSSES)
    with pytest.raises(ParityError, match="loss_type='new_loss'"):
        config(loss_type="new_loss")


def test_ratios_come_from_trls_settings() -> None:
    """epsilon, epsilon_high, delta and SAPO's temperatures, with TRL's defaults."""
    assert config(loss_type="dapo").ratio() == ClippedRatio(0.2, 0.2)
    assert config(loss_type="grpo", epsilon=0.1, epsilon_high=0.28, delta=2.0).ratio() == (
        ClippedRatio(0.1, 0.28, 2.0)
    )
    assert config(loss_type="cispo", epsilon_high=5.0).ratio() == CappedRatio(5.0)
    assert config(loss_type="sapo").ratio() == GatedRatio(1.0, 1.05)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"loss_type": "luspo"}, "loss_type='luspo'"),
        ({"loss_type": "vespo"}, "loss_type='vespo'"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"score_centering_weight": "best"}, "score_centering_weight='best'"),
        ({"score_centering_top_k": 0}, "score_centering_top_k=0"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        (
            {
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": "token_truncate",
            },
            "token_truncate",
        ),
        ({"use_vllm": False}, "use_vllm=False"),
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
    assert config(score_centering_weight="is").weight() == FullWeight()


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
