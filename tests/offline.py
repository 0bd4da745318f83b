"""Runs real engines in a child process: ``LLM``, ``AsyncLLM`` and configurations only.

``run_jobs`` (called by tests) starts this file as a script, which does its jobs one after the
other, so that vLLM is imported once. A job is a dictionary:

- ``kind``: ``config`` (``EngineArgs.create_engine_config`` only), ``llm`` or ``async``;
- ``args``: engine arguments; ``env``: environment variables while it runs;
- ``callable_overrides``: use a module-level callable as ``hf_overrides``;
- ``head``: ``bf16`` or ``bf16-cast`` breaks vLLM's fp32 head before the engine starts;
- ``steps``: ``{"op": "generate" | "apply" | "attest" | "context" | "defaults" | "logits", ...}``,
  or those of ``tests.colocated_llm``.

Its result has ``error`` (``Type: message`` or None), ``log`` (the plugin's), and for each step
what it returned.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.colocated_llm import OPS, do_update
from tests.servers import MEMORY_SHARE
from vllm_parity_plugin.weights.stack import CHECKPOINT, Layer, extend

ROOT = Path(__file__).parent.parent
Job = dict[str, Any]
LONGER_CONTEXT = 4096
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""``env`` of a job: whether its engine has a process of its own. Without one it starts sooner."""


def run_jobs(
    jobs: Sequence[Job],
    directory: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    at_once: int = 1,
) -> list[dict[str, Any]]:
    """Results of the jobs, in order; ``env`` is set for all of them.

    ``at_once`` child processes share them out: jobs 0, 2, 4, ... and 1, 3, 5, ... for two.
    """
    shares = [list(jobs)[first::at_once] for first in range(at_once)]
    found: list[dict[str, Any]] = [{}] * len(jobs)
    with ThreadPoolExecutor(at_once) as pool:
        run = partial(_run_share, directory=directory, env=env or {}, timeout=timeout)
        for first, results in enumerate(pool.map(run, range(at_once), shares)):
            found[first::at_once] = results
    return found


def _run_share(
    number: int, jobs: list[Job], directory: Path, env: Mapping[str, str], timeout: float
) -> list[dict[str, Any]]:
    source, target = directory / f"jobs-{number}.json", directory / f"results-{number}.json"
    source.write_text(json.dumps(jobs))
    paths = [path for path in (str(ROOT), env.get("PYTHONPATH")) if path]
    done = subprocess.run(
        [sys.executable, __file__, str(source), str(target)],
        cwd=ROOT,
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(target.read_text())


def longer_context(config: Any) -> Any:
    """An ``hf_overrides`` callable whose effect can be seen; module-level, so picklable."""
    config.max_position_embeddings = LONGER_CONTEXT
    return config


# --- in the child process ---


def break_head(how: str) -> None:
    """Make vLLM's head compute in bf16, as an architecture with its own projection would."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def _apply_head(self: Any, lm_head: Any, hidden_states: Any, bias: Any) -> Any:
        logits = hidden_states @ lm_head.weight.T
        return logits.float() if how == "bf16-cast" else logits

    LogitsProcessor._apply_head = _apply_head


def capture_logits() -> list[Any]:
    """Every tensor of logits that vLLM computes from now on in this process."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    seen: list[Any] = []
    original = LogitsProcessor.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = original(self, *args, **kwargs)
        seen.append(logits)
        return logits

    LogitsProcessor.forward = forward
    return seen


def plain(output: Any) -> dict[str, Any]:
    """One request's first completion."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    return {
        "token_ids": ids,
        "logprobs": [
            entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)
        ],
        "cached": output.num_cached_tokens,
        "finish_reason": completion.finish_reason,
    }


def sampling_params(sampling: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"logprobs": 0, "detokenize": False, **sampling})


def prompts_of(step: dict[str, Any]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in step["prompts"]]


def apply_weights(llm: Any, path: Path, version: int, kind: Any = "full") -> list[Any]:
    """What a weight transaction does to the workers, and nothing around it.

    A ``changed`` update lies on top of the checkpoint.
    """
    found = path.stat()
    layer = Layer(
        version=version,
        kind=kind,
        file=str(path),
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
    )
    stack = [part.model_dump() for part in extend(CHECKPOINT, layer)]
    for step in (("apply", stack, None), ("commit", True)):
        reports = llm.collective_rpc("parity_weights", args=step)
        assert not any(report["error"] for report in reports), reports
    return reports


def do_step(llm: Any, step: dict[str, Any], logits: list[Any]) -> Any:
    import torch

    match step["op"]:
        case op if op in OPS:
            return do_update(llm, step)
        case "generate":
            params = sampling_params(step["sampling"])
            return [plain(o) for o in llm.generate(prompts_of(step), params, use_tqdm=False)]
        case "logits":
            logits.clear()
            llm.generate(prompts_of(step), sampling_params({"max_tokens": 4}), use_tqdm=False)
            values = torch.cat([rows.float().flatten() for rows in logits])
            share = (values == values.to(torch.bfloat16).float()).float().mean()
            return {"bf16_share": float(share), "dtypes": sorted({str(r.dtype) for r in logits})}
        case "apply":
            path, kind = Path(step["path"]), step.get("kind", "full")
            return apply_weights(llm, path, step["version"], kind)
        case "manifest":
            return llm.collective_rpc("parity_attest", kwargs={"manifest": True})[0]["expected"]
        case "attest":
            return llm.collective_rpc("parity_attest")
        case "context":
            return llm.llm_engine.model_config.max_model_len
        case "defaults":
            params = llm.get_default_sampling_params()
            names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            return {name: getattr(params, name) for name in names}
    raise ValueError(step["op"])


def do_config(job: Job) -> list[Any]:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_parity_plugin.engine_args import observed

    config = EngineArgs(**job["args"]).create_engine_config()
    return [observed(config) | {"context": config.model_config.max_model_len}]


def do_llm(job: Job, logits: list[Any]) -> list[Any]:
    from vllm import LLM

    llm = LLM(**job["args"])
    try:
        return [do_step(llm, step, logits) for step in job["steps"]]
    finally:
        shutdown = getattr(llm.llm_engine.engine_core, "shutdown", None)
        if shutdown is not None:
            shutdown()
        del llm
        gc.collect()


async def do_async(job: Job) -> list[Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["args"]))
    try:
        results = []
        for number, step in enumerate(job["steps"]):
            final = []
            for index, prompt in enumerate(prompts_of(step)):
                params = sampling_params(step["sampling"])
                async for output in engine.generate(prompt, params, f"{number}-{index}"):
                    last = output
                final.append(plain(last))
            results.append(final)
        return results
    finally:
        engine.shutdown()


class Records(logging.Handler):
    """Keeps what the plugin logs."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def do_job(job: Job, logits: list[Any]) -> dict[str, Any]:
    from vllm_parity_plugin import engine_args

    os.environ.update(job.get("env", {}))
    records = Records()
    logger = logging.getLogger("vllm.parity")
    logger.addHandler(records)
    engine_args._announced.clear()
    standard = {"dtype": "bfloat16", "enforce_eager": True, "gpu_memory_utilization": MEMORY_SHARE}
    job["args"] = standard | job["args"]
    if job.get("callable_overrides"):
        from tests.offline import longer_context as overrides

        job["args"]["hf_overrides"] = overrides
    if "head" in job:
        break_head(job["head"])
    steps: list[Any] = []
    error = None
    try:
        if job["kind"] == "config":
            steps = do_config(job)
        elif job["kind"] == "llm":
            steps = do_llm(job, logits)
        else:
            steps = asyncio.run(do_async(job))
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        logger.removeHandler(records)
        for name in job.get("env", {}):
            del os.environ[name]
    return {"error": error, "log": "\n".join(records.messages), "steps": steps}


def main(source: str, target: str) -> None:
    jobs = json.loads(Path(source).read_text())
    logits = capture_logits()
    Path(target).write_text(json.dumps([do_job(job, logits) for job in jobs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
