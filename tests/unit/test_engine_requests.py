"""What a sequence of a rollout is to vLLM's engine, on its own parameter class.

Properties:
- no text is made but for stop strings (P3); the head size, seeds and per-prompt parameters arrive;
- what the engine returned and what its core recorded must fit, or the sequence is refused (L11);
  rows past the end, sampled before a stop string was found, are cut; no token, no logprob (L14);
- placeholders of multimodal models are no text.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_parity_plugin.engine_requests import assemble, check, head_limit, sampling_params
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.recorded import Recorded
from vllm_parity_plugin.rollout_wire import RolloutRequest, Sampling


def model_config(**hf: Any) -> Any:
    return SimpleNamespace(
        get_vocab_size=lambda: 100,
        max_model_len=64,
        max_logprobs=50,
        hf_config=SimpleNamespace(**hf),
    )


def test_p3_requests_make_no_text() -> None:
    """P3: ids only, flat logprobs, one output at the end; text where a stop string is given."""
    several = [Sampling(temperature=0.5), Sampling(stop="END", top_k=3)]
    request = RolloutRequest(prompts=[[1], [2]], n=2, head_size=7, seeds=[3, 9], sampling=several)
    plain, stopping = sampling_params(request, 0, 1), sampling_params(request, 1, 0)
    assert (plain.detokenize, plain.flat_logprobs, plain.logprobs) == (False, True, 7)
    assert plain.output_kind.name == "FINAL_ONLY"
    assert (plain.seed, plain.temperature, plain.top_k) == (4, 0.5, 0)
    assert (stopping.detokenize, stopping.stop, stopping.seed) == (True, ["END"], 9)
    assert stopping.top_k == 3


def recorded(tokens: list[int], width: int = 3) -> Recorded:
    """Rows whose first column is the sampled token; the last entry is filler."""
    ids = np.array([[token, 50, 60][:width] for token in tokens], dtype=np.int32).reshape(-1, width)
    logprobs = np.full(ids.shape, -1.5, dtype=np.float32)
    logprobs[:, -1:] = -np.inf
    return Recorded([[0, 4]], ids, logprobs)


def output(tokens: list[int], **more: Any) -> Any:
    completion = {"token_ids": tokens, "finish_reason": "stop", "stop_reason": "END"} | more
    return SimpleNamespace(outputs=[SimpleNamespace(**completion)], num_cached_tokens=16)


def test_rows_past_a_stop_string_are_cut() -> None:
    """The engine was two tokens further when the front end found it."""
    found = assemble(output([7, 8]), recorded([7, 8, 9, 10]), Sampling())
    assert found.token_ids.tolist() == [7, 8]
    assert found.head_ids.tolist() == [[50, -1], [50, -1]]  # filler has no id
    assert (found.policy_versions.tolist(), found.cached_tokens.tolist()) == ([4, 4], [16])
    assert (found.finish_reasons, found.stop_reasons) == (["stop"], ["END"])
    found.check()


def test_l14_no_token_gives_no_logprob() -> None:
    """L14: aborted before its first token."""
    found = assemble(output([], finish_reason="abort"), recorded([7]), Sampling())
    assert found.head_logprobs.shape == (0, 2) and len(found) == 1
    found.check()


@pytest.mark.parametrize(
    ("rows", "word"), [([7], "1 rows of logprobs for 2 tokens"), ([7, 9], "not the sampled token")]
)
def test_l11_what_does_not_fit_is_refused(rows: list[int], word: str) -> None:
    """L11: a row that is missing, and a row of another token."""
    with pytest.raises(ParityError, match=word):
        assemble(output([7, 8]), recorded(rows), Sampling())


def test_placeholders_are_refused() -> None:
    """A multimodal model takes text; the token that stands for an image is none."""
    config = model_config(image_token_id=90, vision_config=object())
    check(RolloutRequest(prompts=[[1, 2]]), config, 10)
    with pytest.raises(ParityError, match="token 90, which stands for an image"):
        check(RolloutRequest(prompts=[[1], [2, 90]]), config, 10)


def test_l16_the_smallest_limit_counts() -> None:
    """L16: the setting, the vocabulary and vLLM's own cap; -1 is no cap."""
    config = model_config()
    assert head_limit(config, 128) == 50
    config.max_logprobs = -1
    assert (head_limit(config, 128), head_limit(config, 30)) == (100, 30)
