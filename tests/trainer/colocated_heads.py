"""Heads from an engine in this process, in a child process of the tests: see test_colocated_heads.

One engine, made by TRL for a ``ParityGRPOTrainer``, serves everything; the result is a JSON file.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

K = 64


def trainer_of(model: str, directory: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.trainer.colocated import ENGINE, spread
    from tests.trainer.runs import arguments, countdown
    from tests.trainer.test_trainer import Recording
    from trl_callbacks import ParityGRPOConfig

    path = Path(model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    values = {"vllm_mode": "colocate", "score_centering_top_k": K, "rollout_seed": 0, **ENGINE}
    values |= {"score_centering_audit": 4}
    values |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 16}
    return Recording(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=spread,
        args=ParityGRPOConfig(
            **arguments(directory, beta=0.0, **values | {"learning_rate": 3e-3, "max_steps": 2})
        ),
        train_dataset=countdown.problems(64, 0, tokenizer),
        eval_dataset=countdown.problems(4, 1, tokenizer),
    )


def against_generate(llm: Any) -> dict[str, Any]:
    """The arrays against ``LLM.generate`` with vLLM's own containers, one sequence at a time."""
    from vllm import SamplingParams

    from vllm_parity_plugin.colocated_rollouts import colocated_rollout
    from vllm_parity_plugin.rollout_wire import RolloutRequest, Sampling

    sampling = Sampling(temperature=0.7, max_tokens=24, ignore_eos=True)
    prompts, seeds = [[5, 6, 7, 8], [9, 10, 11]], [3, 40]
    found: dict[str, Any] = {"same": []}
    for prompt, seed in zip(prompts, seeds, strict=True):
        request = RolloutRequest(prompts=[prompt], seeds=[seed], head_size=K, sampling=sampling)
        ours = colocated_rollout(llm, request)
        params = SamplingParams(
            temperature=0.7, max_tokens=24, ignore_eos=True, seed=seed, logprobs=K
        )
        (stock,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        rows = stock.outputs[0].logprobs
        heads = [
            [row[token].logprob for token in ids]
            for row, ids in zip(rows, ours.head_ids.tolist(), strict=True)
        ]
        found["same"].append(
            ours.token_ids.tolist() == list(stock.outputs[0].token_ids)
            and np.array_equal(np.array(heads, dtype=np.float32), ours.head_logprobs)
        )
    several = RolloutRequest(prompts=prompts, seeds=seeds, n=2, head_size=3, sampling=sampling)
    again = RolloutRequest(prompts=[prompts[1]], seeds=[41], head_size=3, sampling=sampling)
    many, one = colocated_rollout(llm, several), colocated_rollout(llm, again)
    found["lengths"] = np.diff(many.sequence_offsets).tolist()
    found["seed_plus_sample"] = np.array_equal(many.part(3, 4).token_ids, one.token_ids)
    stop = int(one.token_ids[7])
    ends = sampling.model_copy(update={"stop_token_ids": [stop]})
    stopped = colocated_rollout(llm, again.model_copy(update={"sampling": ends}))
    found["stopped"] = [len(stopped.token_ids), stopped.finish_reasons, stopped.stop_reasons]
    found["expected_stop"] = one.token_ids.tolist().index(stop) + 1
    return found | failures(llm, several) | objects(llm)


def failures(llm: Any, request: Any) -> dict[str, Any]:
    """What is refused, and what is left in the engine when a step fails."""
    from vllm_parity_plugin.colocated_rollouts import colocated_rollout
    from vllm_parity_plugin.errors import ParityError

    found: dict[str, Any] = {}
    try:
        colocated_rollout(llm, request.model_copy(update={"head_size": 500}))
    except ParityError as error:
        found["too_large"] = str(error)
    engine, step = llm.llm_engine, llm.llm_engine.step
    from vllm import SamplingParams

    engine.add_request("somebody's", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=2))
    try:
        colocated_rollout(llm, request)
    except ParityError as error:
        found["busy"] = str(error)
    while engine.has_unfinished_requests():
        engine.step()
    calls: list[int] = []

    def failing() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a step that fails")
        return step()

    engine.step = failing
    try:
        colocated_rollout(llm, request)
    except RuntimeError as error:
        found["failed"] = str(error)
    engine.step = step
    records = engine.engine_core.engine_core.scheduler._parity_records.records
    found["left"] = [engine.has_unfinished_requests(), len(records)]
    found["goes_on"] = len(colocated_rollout(llm, request))
    return found


def objects(llm: Any) -> dict[str, Any]:
    """P1: tracked objects after a rollout of 16 x 64 tokens, with arrays and with dictionaries."""
    from vllm import SamplingParams

    from vllm_parity_plugin.colocated_rollouts import colocated_rollout
    from vllm_parity_plugin.rollout_wire import RolloutRequest, Sampling

    prompts = [[5, 6, 7]] * 16
    request = RolloutRequest(
        prompts=prompts, head_size=K, sampling=Sampling(max_tokens=64, ignore_eos=True)
    )
    params = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=K)
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    counts = {}
    for name, sample in (
        ("arrays", lambda: colocated_rollout(llm, request)),
        ("dictionaries", lambda: llm.generate(inputs, params, use_tqdm=False)),
    ):
        gc.collect()
        before = len(gc.get_objects())
        held = sample()
        gc.collect()
        counts[name] = len(gc.get_objects()) - before
        del held
    return {"objects": counts}


def main(source: str, target: str) -> None:
    from trl_callbacks.heads import HEAD_IDS, HEAD_LOGPROBS

    directory = Path(target)
    trainer = trainer_of(json.loads(Path(source).read_text())["model"], directory / "run")
    generation = trainer.vllm_generation
    asked: list[int] = []
    fetch = generation.fetch
    generation.fetch = lambda request: (asked.append(request.head_size), fetch(request))[1]
    trainer.train()
    result: dict[str, Any] = {"asked": asked, "log": trainer.state.log_history, "shares": []}
    for batch in trainer.batches:
        if HEAD_IDS not in batch:
            continue
        mask = batch["completion_mask"].bool()
        ids, logprobs = batch[HEAD_IDS][mask], batch[HEAD_LOGPROBS][mask]
        at = ids == batch["completion_ids"][mask].unsqueeze(1)
        same = logprobs[at] == batch["sampling_per_token_logps"][mask][at.any(1)]
        result["shares"].append([ids.shape[1], float(at.any(1).float().mean()), bool(same.all())])
    result |= against_generate(generation.llm)
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
