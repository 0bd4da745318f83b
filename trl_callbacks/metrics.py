"""Every metric in the trainer's logs: what it means, and what to do when it moves.

The documentation and a test that compares these names with a real run read this table.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """One entry of the trainer's logs."""

    name: str
    meaning: str
    advice: str


_MISMATCH = (
    ("logprob_diff/mean", "mean |log p - log q| of sampled tokens (nats)",
     "a level above step 1's means updates do not arrive, or arrive as other weights"),
    ("logprob_diff/p99", "99th percentile of the same", "outliers: look at long completions"),
    ("logprob_diff/max", "largest of the same", "one token above 1 nat is normal in bf16"),
    ("kl/k1", "estimate of KL(q || p), may be negative",
     "a steady positive value: sampling is truncated, or temperatures differ"),
    ("kl/k3", "estimate of KL(q || p), never negative", "grows with staleness; sync more often"),
    ("ess", "effective sample size of the ratios p/q, as a share of the tokens",
     "below 0.9: weights of a few tokens dominate; use tis or mis"),
    ("ratio/mean", "mean of p/q before any clipping", "far from 1: the supports differ"),
    ("ratio/min", "smallest p/q", "near 0: the trainer finds a sampled token impossible"),
    ("ratio/max", "largest p/q", "above 10: look for a wrong temperature or a stale policy"),
    ("nan_tokens", "tokens left out because a logprob is not finite",
     "not 0: the sampler's weights or kernels are broken; stop the run"),
)  # fmt: skip
_CENTERING = (
    ("sampler_head_mass", "sum of q over the head", "below 0.99: raise score_centering_top_k"),
    ("trainer_head_mass", "sum of p over the sampler's head",
     "well below the sampler's: the policies put their mass on different tokens"),
    ("rho", "ratio of the tails, (1 - sum q) / (1 - sum p)",
     "far from 1 with a small head mass: the tail model is strained; raise the head size"),
    ("tail_share", "part of the removed drift that comes from outside the head",
     "above 0.1: raise score_centering_top_k"),
    ("weight_mean", "mean p/q of sampled tokens, before cap or mask (p_old/q where one rollout "
     "serves several optimizer steps)", "see parity/ratio/mean"),
    ("weight_min", "smallest of the same", "see parity/ratio/min"),
    ("weight_max", "largest of the same", "see parity/ratio/max"),
    ("weight_used_mean", "mean of what multiplies a sampled token's gradient: the importance "
     "weight times the loss's factor of p/p_old",
     "far below weight_mean: most of the gradient is capped, masked or clipped away"),
    ("weight_used_max", "largest of the same", "large with weight 'is': use tis"),
    ("weight_clipped_share", "tokens whose weight was capped or masked",
     "above 0.1: the policies are far apart; sync more often"),
    ("policy_clipped_share", "tokens whose ratio to the old policy the loss holds at a bound",
     "above 0.2: fewer optimizer steps per rollout, or a smaller learning rate"),
    ("ess", "effective sample size of the weights before cap or mask", "see parity/ess"),
    ("floor_hits", "tokens where a tail mass was below 1e-6", "harmless on peaked policies"),
    ("correction_l1", "sum over the head of |coefficients|", "its growth is the drift's"),
    ("drift_removed", "L1 of the sampler's expected score that was subtracted, by the logits",
     "what an uncentred loss would have followed instead of the reward"),
    ("drift_share", "the same over the L1 of the sampled tokens' own gradients",
     "above 0.1: an uncentred loss would have drifted visibly; look for the mismatch's cause"),
    ("nan_tokens", "tokens left out of the loss", "see parity/nan_tokens"),
    ("tokens", "tokens in the loss, per process", "0 means an empty batch"),
    ("head_gap_mean", "mean |log p - log q| over head entries",
     "dominated by rare tokens; compare with parity/logprob_diff/mean"),
    ("head_gap_l1", "sum over the head of |p - q|, mean over tokens",
     "total variation seen by the head"),
)  # fmt: skip
_AUDIT = (
    ("top_k_gap", "error of the correction against that from all entries which the server "
     "returns, on a few positions of each rollout (score_centering_audit only)",
     "above 0.1: raise score_centering_top_k"),
)  # fmt: skip
_UPDATES = (
    ("policy_version", "version that the server serves", "must grow by one at every sync"),
    ("weight_update/pause_seconds", "how long generation was frozen",
     "grows with the model; the rest of an update does not pause anything"),
    ("weight_update/total_seconds", "the whole update on the server", "slow disk or busy server"),
    ("weight_update/bytes", "size of the update", "changes only with the model"),
    ("dropped_completions", "completions masked because they were aborted or not finite",
     "not 0 for long: look at the server's log"),
)  # fmt: skip

METRICS = (
    *(Metric(f"parity/{name}", meaning, advice) for name, meaning, advice in _MISMATCH),
    *(
        Metric(f"parity/score_centering/{name}", meaning, advice)
        for name, meaning, advice in (*_CENTERING, *_AUDIT)
    ),
    *(Metric(f"parity/{name}", meaning, advice) for name, meaning, advice in _UPDATES),
)
