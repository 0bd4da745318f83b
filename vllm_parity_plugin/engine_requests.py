"""What a sequence of a rollout is to vLLM's engine: checks, parameters, and its arrays at the end.

The same for a server and for an ``LLM`` in the trainer's process.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.recorded import Recorded
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest, Sampling
from vllm_parity_plugin.rules import UNLIMITED

PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
"""Where a multimodal model's configuration names the tokens that stand for something else."""


def head_limit(model_config: Any, settings_limit: int) -> int:
    """Most head entries per token that an engine returns.

    Args:
        model_config: vLLM's.
        settings_limit: the plugin's ``head_size``.
    """
    limits = [settings_limit, model_config.get_vocab_size()]
    if model_config.max_logprobs != UNLIMITED:
        limits.append(model_config.max_logprobs)
    return int(min(limits))


def check(request: RolloutRequest, model_config: Any, head_limit: int) -> None:
    """Refuse what the served model cannot take.

    Args:
        model_config: vLLM's.
        head_limit: most head entries per token that the engine returns.

    Raises:
        ParityError: naming the prompt or the parameter.
    """
    vocab = model_config.get_vocab_size()
    if request.head_size > head_limit:
        raise ParityError(
            f"head_size={request.head_size} is more than this server returns ({head_limit}; its "
            f"vocabulary has {vocab} tokens).",
            "The engine would reject the request.",
            f"ask for at most {head_limit}, or restart the server with VLLM_PARITY_HEAD_SIZE.",
        )
    per_prompt: dict[str, list[Any] | None] = {"seeds": request.seeds}
    if isinstance(request.sampling, list):
        per_prompt["sampling parameters"] = request.sampling
    for name, values in per_prompt.items():
        if values is not None and len(values) != len(request.prompts):
            raise ParityError(
                f"{len(values)} {name} came with {len(request.prompts)} prompts.",
                "Which of them belongs to which prompt is unclear.",
                "send one per prompt, or none.",
            )
    max_len = model_config.max_model_len
    placeholders = _placeholders(model_config.hf_config)
    for index, prompt in enumerate(request.prompts):
        if not prompt or len(prompt) >= max_len or min(prompt) < 0 or max(prompt) >= vocab:
            raise ParityError(
                f"Prompt {index} has {len(prompt)} token ids"
                + (f" in [{min(prompt)}, {max(prompt)}]." if prompt else "."),
                f"The served model takes 1 to {max_len - 1} ids in [0, {vocab - 1}].",
                "shorten the prompt, raise --max-model-len, or use the served model's tokenizer.",
            )
        if found := placeholders.intersection(prompt):
            raise ParityError(
                f"Prompt {index} holds token {min(found)}, which stands for an image, a video or "
                "audio.",
                "Parity rollouts carry token ids only, so the model would read the placeholder's "
                "own embedding.",
                "send text prompts, or use TRL's own vLLM mode with ParityCallback.",
            )


def _placeholders(hf_config: Any) -> set[int]:
    found = (getattr(hf_config, name, None) for name in PLACEHOLDERS)
    return {value for value in found if isinstance(value, int)}


def sampling_params(request: RolloutRequest, prompt: int, sample: int) -> Any:
    """vLLM's parameters of one sequence."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling_of(prompt)
    return SamplingParams(
        **sampling.model_dump(exclude_none=True),
        seed=None if request.seeds is None else request.seeds[prompt] + sample,
        logprobs=request.head_size,
        flat_logprobs=True,
        # Text is made where a stop string has to be found in it, and nowhere else.
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def assemble(output: Any, recorded: Recorded, sampling: Sampling) -> Rollout:
    """One sequence, from vLLM's final output and what the engine core recorded.

    Raises:
        ParityError: the two do not fit.
    """
    completion = output.outputs[0]
    tokens = len(completion.token_ids)
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    # A stop string is found in the front end, when the engine may already be a token further.
    ids, logprobs = recorded.ids[:tokens], recorded.logprobs[:tokens]
    if len(ids) != tokens:
        raise ParityError(
            f"The engine recorded {len(ids)} rows of logprobs for {tokens} tokens.",
            "Tokens would be paired with other tokens' logprobs.",
            "report this with the vLLM version.",
        )
    if not np.array_equal(ids[:, 0], token_ids):
        raise ParityError(
            "The engine's first logprob is not the sampled token's.",
            "Every importance ratio would be that of another token.",
            "report this with the vLLM version.",
        )
    head_ids, head_logprobs = ids[:, 1:].copy(), logprobs[:, 1:].copy()
    # A filter (top-p, top-k, min-p) leaves fewer than K tokens; the rest of the list is filler.
    head_ids[np.isneginf(head_logprobs)] = -1
    return Rollout(
        token_ids=token_ids,
        logprobs=logprobs[:, 0].copy(),
        head_ids=head_ids,
        head_logprobs=head_logprobs,
        sequence_offsets=np.asarray([0, tokens], dtype=np.int64),
        policy_versions=recorded.versions(tokens),
        cached_tokens=np.asarray([output.num_cached_tokens or 0], dtype=np.int32),
        finish_reasons=[str(completion.finish_reason)],
        stop_reasons=[completion.stop_reason],
        sampling=sampling,
    )
