"""A real ``GRPOTrainer`` with ``vllm_mode="colocate"`` on CPU, in a child process of the tests.

``train`` (called by tests) starts this file as a script, because the engine lives in the trainer's
process and keeps its memory. A run is a dictionary:

- ``model``: directory; ``steps``; ``trainer``: further ``GRPOConfig`` values;
- ``callback``: mode of the ``ParityCallback``, or None for stock TRL;
- ``install``: install the transaction by hand (for callbacks in mode observe, which change
  nothing);
- ``callback_at_last``: mode of a callback that is set up on the trainer when all is over;
- ``arm``: make this file when all engines run, so that the first process's next load fails;
- ``lora``: train an adapter.

Its result has ``error`` (``Type: message`` or None), the last callback's ``refusal``, the trainer's
``log``, the callback's ``status``, what the engine ``held`` at the end (version, phase, failure;
None for stock TRL), and for each generation (``syncs``) the mean absolute difference between the
sampler's logprobs and a fresh Transformers reference: with the trainer's weights of that moment
(``now``), and with those that it began with (``first``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.servers import MEMORY_SHARE
from vllm_parity_plugin.serving import free_port

ROOT = Path(__file__).parents[2]
Run = dict[str, Any]
ENGINE = {"vllm_gpu_memory_utilization": MEMORY_SHARE, "vllm_max_model_length": 256}


def train(
    run: Run, directory: Path, *, processes: int = 1, env: Mapping[str, str] | None = None
) -> list[Run]:
    """Results of one run, one for each process."""
    source = directory / "run.json"
    source.write_text(json.dumps(run))
    results = [directory / f"result-{rank}.json" for rank in range(processes)]
    launch(__file__, source, results, env or {})
    return [json.loads(path.read_text()) for path in results]


def launch(script: str, source: Path, results: list[Path], env: Mapping[str, str]) -> None:
    """Run a script of the tests, on as many processes as there are results to be written."""
    paths = [path for path in (str(ROOT), env.get("PYTHONPATH")) if path]
    launcher = [sys.executable]
    env = {"MASTER_PORT": str(free_port()), **env}  # torch's default may be another run's
    if len(results) > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        launcher += [str(len(results))]
    done = subprocess.run(
        [*launcher, script, str(source), str(source.parent)],
        cwd=ROOT,
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    written = all(path.exists() for path in results)
    assert done.returncode == 0 and written, done.stdout[-6000:]


# --- in the child process ---


def spread(prompts: list[Any], completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that differs between the completions of a random model."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def policy_of(trainer: Any) -> dict[str, Any]:
    """The trainer's weights as a server should hold them: merged, and rounded once."""
    import torch

    from trl_callbacks.generation import named_params
    from trl_callbacks.policy_tensors import policy_tensors

    named = policy_tensors(named_params(trainer.vllm_generation))
    return {name: tensor.detach().to(torch.bfloat16, copy=True) for name, tensor in named}


def compare_generations(trainer: Any, path: Path, head: str) -> list[dict[str, float]]:
    """From now on, compare what each generation samples with the reference."""
    import numpy as np

    from tests.reference import reference

    generation, seen, first = trainer.vllm_generation, [], policy_of(trainer)
    original = generation.generate

    def generate(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = original(prompts, *args, **kwargs)
        sampled = np.array([token[0] for row in outcome[2] for token in row])
        weights = {"now": policy_of(trainer), "first": first}
        found = {
            name: reference(path, prompts, outcome[1], head=head, weights=tensors)
            for name, tensors in weights.items()
        }
        seen.append({name: float(np.abs(sampled - v).mean()) for name, v in found.items()})
        return outcome

    generation.generate = generate
    return seen


def build(run: Run, directory: Path, callbacks: list[Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tests.trainer.runs import arguments, countdown

    path = Path(run["model"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    extra: dict[str, Any] = {}
    if run.get("lora"):
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    values = {**ENGINE, "learning_rate": 3e-3, "max_steps": run["steps"], **run.get("trainer", {})}
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=spread,
        args=GRPOConfig(
            **arguments(directory, use_vllm=True, vllm_mode="colocate", beta=0.0, **values)
        ),
        train_dataset=countdown.problems(64, 0, tokenizer),
        callbacks=callbacks,
        **extra,
    )


def held(trainer: Any) -> list[Any] | None:
    updates = getattr(trainer.vllm_generation, "parity_updates", None)
    if updates is None:
        return None
    (report,) = trainer.vllm_generation.llm.collective_rpc("parity_weights", args=("report",))
    return [report["version"], report["phase"], updates.failure]


def main(source: str, target: str) -> None:
    from trl_callbacks import ParityCallback
    from trl_callbacks.colocate import install_colocated_sync

    run = json.loads(Path(source).read_text())
    callbacks = [] if run["callback"] is None else [ParityCallback(mode=run["callback"])]
    directory = Path(target)
    trainer = build(run, directory / "run", callbacks)
    rank = trainer.accelerator.process_index
    result: dict[str, Any] = {"error": None}
    result["syncs"] = compare_generations(trainer, Path(run["model"]), run.get("head", "float32"))
    try:
        if run.get("install"):
            install_colocated_sync(trainer)
        if "arm" in run and rank == 0:
            Path(run["arm"]).touch()
        elif "arm" in run:
            os.environ["PARITY_TEST_FAULT"] += ".elsewhere"
        trainer.accelerator.wait_for_everyone()
        trainer.train()
    except Exception as problem:
        result["error"] = f"{type(problem).__name__}: {problem}"
    if "callback_at_last" in run:
        try:
            ParityCallback(mode=run["callback_at_last"]).setup(trainer)
        except Exception as problem:
            result["refusal"] = f"{type(problem).__name__}: {problem}"
    result["held"] = held(trainer)
    status = callbacks[0].status if callbacks else None
    result["status"] = None if status is None else status.model_dump()
    result["log"] = [entry for entry in trainer.state.log_history if "reward" in entry]
    (directory / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
