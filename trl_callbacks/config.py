"""Configuration of ``ParityGRPOTrainer``. The help strings are the documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from trl import GRPOConfig

from trl_callbacks.importance_weights import Weight, resolve_weight
from trl_callbacks.weight_sync import KV, Transport
from vllm_parity_plugin.errors import ParityError

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL losses whose only difference is how tokens are averaged; centering fits each of them."""
WEIGHTS = ("none", "tis", "mis")


@dataclass
class ParityGRPOConfig(GRPOConfig):
    """``GRPOConfig`` with score centering and parity rollouts.

    Differences from TRL's defaults: ``use_vllm`` is on in server mode, and TRL's own importance
    correction is off while score centering is on (``score_centering_weight`` takes its place).
    """

    use_vllm: bool = field(default=True, metadata={"help": "Sample from a vLLM server."})
    vllm_mode: str = field(
        default="server", metadata={"help": "Parity rollouts come from a server: `vllm serve`."}
    )
    score_centering: bool = field(
        default=True,
        metadata={
            "help": "Subtract the sampler's expected score at each prefix (arXiv 2609.20807). "
            "Off gives TRL's own loss, unchanged."
        },
    )
    score_centering_top_k: int = field(
        default=128,
        metadata={
            "help": "Size K of the sampler's head. The rest of its distribution is modelled as "
            "proportional to the trainer's. Raise it when "
            "parity/score_centering/sampler_head_mass falls below about 0.99."
        },
    )
    score_centering_weight: str = field(
        default="none",
        metadata={
            "help": "Importance weight composed with centering: none, tis (truncated at the cap) "
            "or mis (zero outside the bounds)."
        },
    )
    score_centering_cap: float = field(
        default=2.0, metadata={"help": "Cap of the tis weight on p/q."}
    )
    score_centering_low: float = field(
        default=0.5, metadata={"help": "Lower bound of the mis weight on p/q."}
    )
    score_centering_high: float = field(
        default=5.0, metadata={"help": "Upper bound of the mis weight on p/q."}
    )
    score_centering_support: bool = field(
        default=False,
        metadata={
            "help": "Sampling is truncated (top_k, with or without top_p and min_p) and the head "
            "holds everything the sampler kept; the trainer is renormalised to it."
        },
    )
    parity_mode: str = field(
        default="enforce",
        metadata={
            "help": "Mode of the ParityCallback: enforce refuses unsafe pairs, observe warns."
        },
    )
    parity_max_mismatch: float | None = field(
        default=None,
        metadata={"help": "Stop when the mean |logprob difference| of a step exceeds this."},
    )
    weight_transport: str = field(
        default="auto",
        metadata={
            "help": "How weights travel to the server: file (a directory that both sides see), "
            "http (uploaded, resumable), or auto: the file where the trainer sees the directory."
        },
    )
    weight_kv: str = field(
        default="keep",
        metadata={
            "help": "What becomes of requests in flight when weights change: keep goes on with "
            "their KV cache, recompute prefills them again with the new weights."
        },
    )
    rollout_seed: int | None = field(
        default=None,
        metadata={
            "help": "Seed of the rollouts, for runs that can be repeated. None leaves sampling "
            "to the engine's own generator."
        },
    )
    vllm_importance_sampling_correction: bool | None = field(
        default=None,
        metadata={
            "help": "TRL's own correction. None: off with score centering, on without. With "
            "score centering only the sequence-level modes are allowed."
        },
    )

    def __post_init__(self) -> None:
        if self.vllm_importance_sampling_correction is None:
            self.vllm_importance_sampling_correction = not self.score_centering
        super().__post_init__()
        if self.vllm_mode != "server" or not self.use_vllm:
            raise ParityError(
                f"ParityGRPOConfig has use_vllm={self.use_vllm}, vllm_mode={self.vllm_mode!r}.",
                "ParityGRPOTrainer takes sampler heads from a server.",
                "leave both at their defaults and start `vllm serve`; for colocate mode use "
                "GRPOTrainer with ParityCallback.",
            )
        _check_choice("weight_transport", self.weight_transport, get_args(Transport))
        _check_choice("weight_kv", self.weight_kv, get_args(KV))
        if self.score_centering:
            _check_centering(self)

    def weight(self) -> Weight:
        """The importance weight that the loss composes with centering."""
        params: dict[str, dict[str, float]] = {
            "none": {},
            "tis": {"cap": self.score_centering_cap},
            "mis": {"low": self.score_centering_low, "high": self.score_centering_high},
        }
        name = self.score_centering_weight
        return resolve_weight(name, **params[name])


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ParityError(
            f"ParityGRPOConfig has {name}={value!r}.",
            "It is not one of the choices, and nothing is guessed.",
            f"use one of {', '.join(known)}.",
        )


def _check_centering(config: ParityGRPOConfig) -> None:
    """Refuse what score centering does not fit, with the reason (case S9).

    Raises:
        ParityError: a setting under which the centering term would not be the sampler's
            expected score.
    """
    checks: list[tuple[bool, str, str, str]] = [
        (
            config.score_centering_weight not in WEIGHTS,
            f"score_centering_weight={config.score_centering_weight!r}",
            "There is no such weight",
            f"use one of {', '.join(WEIGHTS)}",
        ),
        (
            config.score_centering_top_k < 1,
            f"score_centering_top_k={config.score_centering_top_k}",
            "Without a head there is nothing to centre with",
            "set it to 32 or more, or score_centering=False",
        ),
        (
            config.loss_type not in LOSS_TYPES,
            f"loss_type={config.loss_type!r}",
            "Its per-token weight is not a function of one token's ratio, so the sampler's "
            "expected score under it cannot be computed from a head",
            f"use one of {', '.join(LOSS_TYPES)}",
        ),
        (
            config.importance_sampling_level != "token",
            f"importance_sampling_level={config.importance_sampling_level!r}",
            "A sequence-level ratio cannot be centred token by token",
            "set importance_sampling_level='token'",
        ),
        (
            config.num_iterations > 1
            or config.gradient_accumulation_steps % (config.steps_per_generation or 1) != 0,
            f"num_iterations={config.num_iterations}, "
            f"steps_per_generation={config.steps_per_generation}, "
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}",
            "Several optimizer steps on one rollout are clipped by a ratio to the old policy, "
            "whose head was not recorded",
            "set num_iterations=1 and steps_per_generation=gradient_accumulation_steps",
        ),
        (
            bool(config.vllm_importance_sampling_correction)
            and not config.vllm_importance_sampling_mode.startswith("sequence"),
            "vllm_importance_sampling_correction=True with "
            f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r}",
            "A token-level weight would be applied twice, and to the sampled token only",
            "set score_centering_weight='tis' (or 'mis') instead, or a sequence_* mode",
        ),
        (
            config.off_policy_mask_threshold is not None,
            f"off_policy_mask_threshold={config.off_policy_mask_threshold}",
            "The mask depends on the whole completion and is not applied by the centred loss",
            "leave it at None",
        ),
        (
            config.entropy_coef != 0.0 or config.use_adaptive_entropy,
            f"entropy_coef={config.entropy_coef}, "
            f"use_adaptive_entropy={config.use_adaptive_entropy}",
            "The fp32 head returns the entropy without a gradient",
            "set entropy_coef=0.0 and use_adaptive_entropy=False",
        ),
        (
            config.use_liger_kernel,
            "use_liger_kernel=True",
            "A fused path would skip the centering term",
            "set use_liger_kernel=False",
        ),
    ]
    for wrong, found, why, fix in checks:
        if wrong:
            raise ParityError(
                f"Score centering with {found} is not supported.",
                f"{why}.",
                f"{fix}, or score_centering=False for TRL's own loss.",
            )
