"""Steps of ``tests.offline`` that update the weights of an ``LLM`` with ``ColocatedUpdates``.

Each returns ``{"error": "Type: message"}`` where it was refused.

- ``push`` (``path``, and ``kind`` ``full`` or ``changed``), ``adapter`` (``target``, ``path`` of a
  file with ``a`` and ``b``, ``scaling``): the result;
- ``generate-or-error``, ``state``, ``enqueue``, ``drain``, ``sleep``, ``wake``;
- ``touch``: make a file; ``reload``: vLLM's own reload from a model directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

OPS = frozenset(
    {
        "push",
        "adapter",
        "generate-or-error",
        "state",
        "enqueue",
        "drain",
        "sleep",
        "wake",
        "touch",
        "reload",
    }
)


def updates_of(llm: Any, step: dict[str, Any]) -> Any:
    """The engine's one ``ColocatedUpdates``, made at the first step that needs it."""
    from vllm_parity_plugin.weights.colocated import ATTRIBUTE, ColocatedUpdates

    return getattr(llm, ATTRIBUTE, None) or ColocatedUpdates(llm, step.get("rollback", "keep"))


def do_update(llm: Any, step: dict[str, Any]) -> Any:
    """Do one step, and turn a refusal into data."""
    try:
        return _do(llm, step)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _do(llm: Any, step: dict[str, Any]) -> Any:
    from tests.offline import plain, prompts_of, sampling_params

    match step["op"]:
        case "push":
            tensors = load_file(step["path"])
            updates = updates_of(llm, step)
            if step.get("kind") == "changed":
                return updates.push_changed(tensors).model_dump()
            named = list(tensors.items())
            return updates.push(named + named[: step.get("repeat", 0)]).model_dump()
        case "adapter":
            pair = load_file(step["path"])
            pairs = {step["target"]: (pair["a"], pair["b"])}
            return updates_of(llm, step).push_adapter(pairs, step["scaling"]).model_dump()
        case "generate-or-error":
            params = sampling_params(step["sampling"])
            return [plain(o) for o in llm.generate(prompts_of(step), params, use_tqdm=False)]
        case "state":
            updates = updates_of(llm, step)
            return {
                "version": updates.policy_version,
                "failure": updates.failure,
                "files": sorted(path.name for path in updates._staging.path.glob(".set-*")),
                "workers": llm.collective_rpc("parity_weights", args=("report",)),
                "label": llm.get_weight_version(),
            }
        case "enqueue":
            return llm.enqueue(prompts_of(step), sampling_params(step["sampling"]), use_tqdm=False)
        case "drain":
            return len(llm.wait_for_completion(use_tqdm=False))
        case "sleep":
            return llm.sleep(level=1)
        case "wake":
            return llm.wake_up(tags=step["tags"])
        case "touch":
            return Path(step["path"]).touch()
        case "reload":
            return llm.collective_rpc("reload_weights", kwargs={"weights_path": step["path"]})
