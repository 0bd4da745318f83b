"""One run of the stability benchmark: a method, a sampler that differs, and what is measured.

The trainer is the real ``ParityGRPOTrainer``. What differs from a plain run is the policy that is
sent to the server (noisy, rounded or old), and for raw rewards the advantages.

The functions and tables above `Sampler` are pure and have unit tests.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)

import trl_callbacks
from trl_callbacks import ParityGRPOConfig, ParityGRPOTrainer
from trl_callbacks.generation import ParityGeneration
from trl_callbacks.policy_tensors import policy_tensors
from trl_callbacks.score_centering import resolve_weight
from trl_callbacks.weight_sync import WeightSync
from vllm_parity_plugin.client import ParityClient
from vllm_parity_plugin.rollout_wire import RolloutRequest, Sampling
from vllm_parity_plugin.weights.messages import WeightUpdateResult

sys.path.append(str(shared.ROOT / "examples"))
import countdown

MODEL = shared.ROOT / "tests" / "data" / "countdown-llama"
GENERATIONS = 8
HEAD = 128
TOKENS = 24
"""The longest completion; an answer has about 10 tokens."""
LEARNING_RATE = 3e-4
CAP, LOW, HIGH = 2.0, 0.5, 5.0
"""Cap of TIS, band of MIS: the same numbers with and without centering."""
OWN_PROBLEMS, OWN_SEED = 128, 1_000_003
"""Held-out problems for the trainer's own policy, and the seed that they are made from."""

_TIS = {"mode": "token_truncate", "clip_max": CAP, "clip_min": None}
_MIS = {"mode": "token_mask", "clip_max": HIGH, "clip_min": LOW}


def _trl_weight(values: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's own correction, by the last part of its option names."""
    names = {f"vllm_importance_sampling_{name}": value for name, value in values.items()}
    return {"score_centering": False, "vllm_importance_sampling_correction": True, **names}


def _centred(weight: str) -> dict[str, Any]:
    bounds = {"cap": CAP, "low": LOW, "high": HIGH}
    return {
        "score_centering_top_k": HEAD,
        "score_centering_weight": weight,
        **{f"score_centering_{name}": value for name, value in bounds.items()},
    }


METHODS: dict[str, dict[str, Any]] = {
    "plain": {"score_centering": False, "vllm_importance_sampling_correction": False},
    "grpo": {
        "score_centering": False,
        "vllm_importance_sampling_correction": True,
        "scale_rewards": "group",
    },
    "tis": _trl_weight(_TIS),
    "mis": _trl_weight(_MIS),
    "sc": _centred("none"),
    "sc_tis": _centred("tis"),
    "sc_mis": _centred("mis"),
}
"""Method -> arguments of ``ParityGRPOConfig``. ``grpo`` keeps TRL's defaults for both options."""

COLUMNS = {
    "solved": "reward",
    "logprob_diff": "parity/logprob_diff/mean",
    "head_mass": "parity/score_centering/sampler_head_mass",
    "drift_removed": "parity/score_centering/drift_removed",
    "ess": "parity/ess",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "ratio_mean": "parity/ratio/mean",
    "ratio_max": "parity/ratio/max",
    "clipped_share": "parity/score_centering/weight_clipped_share",
    "trl_weight_mean": "sampling/importance_sampling_ratio/mean",
}
"""Column of the CSV -> name in the trainer's log. The first is the share of problems solved."""


@dataclass(frozen=True)
class Level:
    """How the sampler differs from the trainer, and what the advantages are.

    Attributes:
        sigma: standard deviation of the fixed noise on every sampler weight.
        bits: 8 or 4 rounds every matrix by rows; 0 does not round.
        interval: optimizer steps between two syncs; 0 sends the first policy only.
        rewards: ``centred`` (minus the group's mean), ``raw01`` (+1/0) or ``raw11`` (+1/-1).
    """

    sigma: float = 0.0
    bits: int = 0
    interval: int = 1
    rewards: str = "centred"


@dataclass(frozen=True)
class Run:
    """One training run. ``seed`` decides problems, rollouts and noise, whatever the method."""

    experiment: str
    level: str
    method: str
    seed: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the other runs of its experiment's CSV."""
        return (self.level, self.method, str(self.seed))


def rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Absmax rounding of each row [R, C] to signed integers of that many bits, and back.

    Vectors (norms) stay as they are, as in common INT8 servers. With 8 bits the row (1.27, 0.004)
    has the step 0.01 and becomes (1.27, 0). A row of zeros stays zero.
    """
    if bits == 0 or tensor.dim() < 2:
        return tensor
    top = 2 ** (bits - 1) - 1
    step = tensor.abs().amax(-1, keepdim=True) / top
    step = torch.where(step == 0, torch.ones_like(step), step)
    return (tensor / step).round().clamp(-top, top) * step


def noise(name: str, shape: torch.Size, sigma: float, seed: int) -> torch.Tensor:
    """Gaussian noise that depends on the tensor's name and the seed, on nothing else."""
    mixed = np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(mixed))
    return sigma * torch.randn(shape, generator=generator)


def raw_advantages(solved: torch.Tensor, rewards: str) -> torch.Tensor:
    """Advantages without a baseline [B], from a reward of 1 or 0.

    (1, 0) is (1, 0) for ``raw01`` and (1, -1) for ``raw11``.
    """
    return {"raw01": solved, "raw11": 2.0 * solved - 1.0}[rewards]


def sampler_policy(level: Level, seed: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """The sampler's tensor for one of the trainer's. Noise is drawn once and kept."""
    drawn: dict[str, torch.Tensor] = {}

    def policy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        changed = rounded(tensor.detach(), level.bits)
        if level.sigma:
            if name not in drawn:
                drawn[name] = noise(name, tensor.shape, level.sigma, seed)
            changed = changed + drawn[name]
        return changed.clone()

    return policy


class Sampler(WeightSync):
    """Sends what the level makes of the trainer's policy, and only as often as it says."""

    def __init__(self, client: ParityClient, level: Level, seed: int) -> None:
        super().__init__(client)
        self._policy = sampler_policy(level, seed)
        self.interval = level.interval
        self._turn = 0
        self._sent: dict[str, torch.Tensor] = {}
        self._last: WeightUpdateResult | None = None

    def push(self, tensors: Iterable[Any], kv: Any = "keep") -> WeightUpdateResult:
        """The trainer's sync, once for each optimizer step."""
        turn, self._turn = self._turn, self._turn + 1
        due = turn % self.interval == 0 if self.interval else turn == 0
        if due or self._last is None:
            self._sent = {name: self._policy(name, tensor) for name, tensor in tensors}
            self._last = super().push(self._sent.items(), kv)
        return self._last

    def push_clean(self, tensors: Iterable[Any]) -> None:
        """The trainer's own policy, for a measurement."""
        super().push(tensors)

    def restore(self) -> None:
        """The policy that sampled before ``push_clean``."""
        if self.interval != 1:  # else the next step sends a new one anyway
            super().push(self._sent.items())


class StabilityTrainer(ParityGRPOTrainer):
    """``ParityGRPOTrainer`` with a ``Sampler`` and, where asked, advantages without baseline."""

    def __init__(self, *args: Any, run: Run, level: Level, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run, self.level = run, level
        self.sampler = Sampler(self.vllm_generation.client, level, run.seed)
        self.vllm_generation._sync = self.sampler
        self._checked = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not self._checked:
            self._check_weight(output)
            self._checked = True
        if self.level.rewards != "centred":
            self._replace_advantages(output)
        return output

    def _replace_advantages(self, output: dict[str, Any]) -> None:
        """Raw rewards in place of TRL's, after a check that they are the same rollout's."""
        given = output["advantages"]
        solved = torch.tensor(list(self._logs["rewards"]["solved"])[-len(given) :])
        if self.scale_rewards == "none":
            groups = solved.view(-1, self.num_generations)
            expected = (groups - groups.mean(1, keepdim=True)).flatten()
            if not torch.allclose(expected, given, atol=1e-5):
                raise SystemExit("the logged rewards are not those of these advantages")
        output["advantages"] = raw_advantages(solved, self.level.rewards).to(given)

    def _check_weight(self, output: dict[str, Any]) -> None:
        """TRL's TIS and MIS must be the f(p / q) that centering composes with."""
        method = self.run.method
        if method not in ("tis", "mis"):
            return
        params = {"cap": CAP} if method == "tis" else {"low": LOW, "high": HIGH}
        mask = output["completion_mask"].bool()
        log_ratio = output["old_per_token_logps"] - output["sampling_per_token_logps"]
        expected = resolve_weight(method, **params).sample_weight(log_ratio)[mask]
        found = output["importance_sampling_ratio"][mask]
        if not torch.allclose(found, expected, rtol=1e-5):
            raise SystemExit(f"TRL's {method} is not the weight of sc_{method}")


@dataclass
class OwnPolicy(TrainerCallback):
    """Every ``every`` steps and at the end: problems that the trainer's own policy solves.

    Clean weights are sent, held-out problems sampled once each at T=1, and the sampler's policy
    is restored. The trainer's generator and the seeds of its rollouts are not touched.
    """

    every: int
    tokenizer: Any
    trainer: StabilityTrainer | None = None
    found: dict[int, float] = field(default_factory=dict)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure when it is time."""
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        trainer = self.trainer
        assert trainer is not None
        generation: ParityGeneration = trainer.vllm_generation
        trainer.sampler.push_clean(policy_tensors(trainer.model.named_parameters()))
        self.found[state.global_step] = solved_share(generation.client, self.tokenizer)
        trainer.sampler.restore()


def solved_share(client: ParityClient, tokenizer: Any) -> float:
    """Share of the held-out problems that the served policy solves, one sample each at T=1."""
    prompts = countdown.problems(OWN_PROBLEMS, OWN_SEED, tokenizer)["prompt"]
    rollout = client.rollout(
        RolloutRequest(
            prompts=tokenizer(list(prompts))["input_ids"],
            seeds=list(range(OWN_PROBLEMS)),
            sampling=Sampling(temperature=1.0, max_tokens=TOKENS),
        )
    )
    answers = [
        tokenizer.decode(rollout.token_ids[rollout.span(row)], skip_special_tokens=True)
        for row in range(len(rollout))
    ]
    return sum(countdown.solved(list(prompts), answers)) / OWN_PROBLEMS


def configuration(run: Run, url: str, steps: int, prompts: int, directory: Path) -> Any:
    """The settings that all methods share, and those of this method."""
    values: dict[str, Any] = {
        "vllm_server_base_url": url,
        "rollout_seed": run.seed,
        "seed": run.seed,
        "output_dir": str(directory),
        "use_cpu": True,
        "bf16": False,
        "max_steps": steps,
        "per_device_train_batch_size": prompts * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": TOKENS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "beta": 0.0,
        "scale_rewards": "none",
        "loss_type": "dapo",
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return ParityGRPOConfig(**{**values, **METHODS[run.method]})


def train(
    run: Run, level: Level, url: str, *, steps: int, prompts: int, own_every: int, directory: Path
) -> list[dict[str, Any]]:
    """Do one run and return its rows, one for each optimizer step."""
    check_sources()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    own = OwnPolicy(own_every, tokenizer)
    trainer = StabilityTrainer(
        # Float32 master weights: bf16 would swallow steps of 3e-4.
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=countdown.solved,
        args=configuration(run, url, steps, prompts, directory),
        train_dataset=countdown.problems(prompts * steps, run.seed, tokenizer),
        callbacks=[own],
        run=run,
        level=level,
    )
    own.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rows = rows_of(run, trainer.state.log_history, own.found)
    if len(rows) != steps:
        raise SystemExit(f"{len(rows)} steps were logged of {steps}")
    return [{**row, "prompts": prompts} for row in rows]


def rows_of(
    run: Run, history: Iterable[Mapping[str, Any]], own: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Rows of the CSV from a trainer's log; what a method does not log stays empty."""
    rows = []
    for entry in history:
        if "reward" in entry:
            values = {name: entry.get(key, "") for name, key in COLUMNS.items()}
            values = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in values.items()}
            step = int(entry["step"])
            rows.append({**vars(run), "step": step, **values, "own_solved": own.get(step, "")})
    return rows


def check_sources() -> None:
    """Refuse to measure another copy of the product than the one beside this file."""
    if not Path(trl_callbacks.__file__).resolve().is_relative_to(shared.ROOT):
        raise SystemExit(f"trl_callbacks comes from {trl_callbacks.__file__}, not {shared.ROOT}")
