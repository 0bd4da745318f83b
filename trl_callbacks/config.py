"""Configuration of ``ParityGRPOTrainer``. The help strings are the documentation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import get_args

from trl import GRPOConfig

from trl_callbacks.importance_weights import WEIGHTS, Weight, resolve_weight
from trl_callbacks.loss_types import LOSSES, SUPPORTED, refusal
from trl_callbacks.policy_ratio import PolicyRatio
from trl_callbacks.weight_sync import KV, Transport
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.rollout_wire import HeadDtype


@dataclass
class ParityGRPOConfig(GRPOConfig):
    """``GRPOConfig`` with score centering and parity rollouts.

    Differences from TRL's defaults: ``use_vllm`` is on in server mode, and TRL's own importance
    correction is off while score centering is on (``score_centering_weight`` takes its place).
    """

    use_vllm: bool = field(default=True, metadata={"help": "Sample from a vLLM server."})
    vllm_mode: str = field(
        default="server",
        metadata={
            "help": "server: rollouts come from `vllm serve`. colocate: from an engine in each "
            "trainer process, which the plugin changes as it would a server."
        },
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
            "help": "Importance weight composed with centering: none, tis (truncated at the cap), "
            "mis (zero outside the bounds) or is (never truncated: nothing is left to centre "
            "but what the loss clips)."
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
    score_centering_audit: int = field(
        default=0,
        metadata={
            "help": "Positions of each rollout at which the correction is also computed from all "
            "entries that the server returns, and compared "
            "(parity/score_centering/top_k_gap). The server needs a VLLM_PARITY_HEAD_SIZE above "
            "score_centering_top_k."
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
    rollout_head_dtype: str = field(
        default="float32",
        metadata={
            "help": "Of the head's logprobs on their way: float32, or float16 (a quarter fewer "
            "bytes, relative error 5e-4). Those of the sampled tokens are float32 always."
        },
    )
    rollout_compression: str = field(
        default="none",
        metadata={
            "help": "none, or zstd: fewer bytes for time of both processors; for a slow network."
        },
    )
    rollout_requests: str = field(
        default="batch",
        metadata={
            "help": "batch: one request holds all prompts of a process. prompt: one request for "
            "each, at once, so that a balancer can spread them over several servers."
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
        if not self.use_vllm:
            raise ParityError(
                "ParityGRPOConfig has use_vllm=False.",
                "Without vLLM the sampler is the trainer, and there is no mismatch to correct.",
                "leave use_vllm at its default, or use GRPOTrainer.",
            )
        if self.vllm_structured_outputs_regex is not None:
            raise ParityError(
                "ParityGRPOConfig has vllm_structured_outputs_regex="
                f"{self.vllm_structured_outputs_regex!r}.",
                "The sampler's logprobs would be those under the grammar, and the trainer's not.",
                "leave it out, or use GRPOTrainer.",
            )
        _check_choice("vllm_mode", self.vllm_mode, ("server", "colocate"))
        _check_choice("weight_transport", self.weight_transport, get_args(Transport))
        _check_choice("weight_kv", self.weight_kv, get_args(KV))
        _check_choice("rollout_head_dtype", self.rollout_head_dtype, get_args(HeadDtype))
        _check_choice("rollout_compression", self.rollout_compression, ("none", "zstd"))
        _check_choice("rollout_requests", self.rollout_requests, ("batch", "prompt"))
        if self.vllm_mode == "colocate":
            _refuse_without_a_server(self)
        if self.score_centering:
            _check_centering(self)

    def weight(self) -> Weight:
        """The importance weight that the loss composes with centering."""
        params: dict[str, dict[str, float]] = {
            "none": {},
            "tis": {"cap": self.score_centering_cap},
            "mis": {"low": self.score_centering_low, "high": self.score_centering_high},
            "is": {},
        }
        name = self.score_centering_weight
        return resolve_weight(name, **params[name])

    def ratio(self) -> PolicyRatio:
        """What the loss type makes of a token's ratio to the policy of the rollout."""
        build = LOSSES[self.loss_type].ratio
        assert build is not None  # the others are refused
        return build(self)

    @property
    def several_steps(self) -> bool:
        """Whether one rollout serves several optimizer steps, by TRL's own rule."""
        per_rollout = (self.steps_per_generation or 1) * self.num_iterations
        return self.gradient_accumulation_steps % per_rollout != 0


def _refuse_without_a_server(config: ParityGRPOConfig) -> None:
    names = ("weight_transport", "weight_kv", *(n for n in _FIELDS if n.startswith("rollout_")))
    for name in names:
        value, default = getattr(config, name), _FIELDS[name].default
        if name != "rollout_seed" and value != default:
            raise ParityError(
                f"ParityGRPOConfig has {name}={value!r} with vllm_mode='colocate'.",
                "Nothing travels there, and no request is in flight during an update, so it would "
                "be ignored.",
                f"leave {name} at {default!r}, or use vllm_mode='server'.",
            )


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
    weight, loss_type = config.score_centering_weight, config.loss_type
    checks: list[tuple[bool, str, str, str]] = [
        (
            weight not in WEIGHTS,
            f"score_centering_weight={weight!r}",
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
            config.score_centering_audit < 0,
            f"score_centering_audit={config.score_centering_audit}",
            "It is a number of positions",
            "set it to 0 (off) or to a few, such as 8",
        ),
        (
            weight in WEIGHTS and bool(refusal(loss_type, weight)),
            f"loss_type={loss_type!r}",
            refusal(loss_type, weight),
            f"use one of {', '.join(SUPPORTED)}",
        ),
        (
            config.importance_sampling_level != "token",
            f"importance_sampling_level={config.importance_sampling_level!r}",
            "A sequence-level ratio cannot be centred token by token",
            "set importance_sampling_level='token'",
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


_FIELDS = {one.name: one for one in fields(ParityGRPOConfig)}
