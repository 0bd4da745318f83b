"""TRL's own gathering under FSDP2, two processes on CPU, and what is sent of it (W20).

Properties: tied and untied, before and after an optimizer step, every name of the bare model comes
exactly once, with its full shape and the hash of the single-process model; a tied pair stays one
tensor, and one that falls apart is refused; a sharded LoRA model is sent merged, and has its names
and shapes; every process iterates to the end; shards that were not gathered are refused.

``accelerate`` switches FSDP off on CPU, so the model is sharded here by hand with PyTorch's
``fully_shard``; the iteration is ``VLLMGeneration._iter_named_params``, TRL's code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.models import Kind
from trl_callbacks.policy_tensors import check_ties, merged_tensors, policy_tensors
from vllm_parity_plugin.errors import ParityError

PROCESSES = 2
IDS = [[5, 17, 3, 250, 99, 401, 7, 31], [8, 2, 300, 44, 12, 6, 77, 500]]
RATE = 0.5
Sent = list[tuple[str, list[int], str]]


def load(path: Path, adapter: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if not adapter:
        return model
    torch.manual_seed(0)
    # Random factors: an adapter at its usual start is zero, and merging would show nothing.
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )


def described(tensors: Iterable[tuple[str, torch.Tensor]]) -> Sent:
    """(name, shape, hash of the bits) of what is sent, in order."""
    return [
        (name, list(tensor.shape), hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest())
        for name, tensor in tensors
    ]


def step(model: Any) -> None:
    """One optimizer step on the same batch everywhere: its averaged gradient is everyone's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ids = torch.tensor(IDS)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def sharded(model: Any) -> Any:
    """Each layer a unit; embedding, norm and head in the root, as accelerate does for tied ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trl_generation(model: Any) -> Any:
    """TRL's backend with what its iteration reads, and without the server its constructor wants."""
    from accelerate import Accelerator
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    generation = object.__new__(VLLMGeneration)
    generation.model = model
    generation.accelerator = Accelerator(cpu=True)
    generation._dist = DistributedBackend(generation.accelerator)
    generation._dist.fsdp_version = 2
    return generation


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except ParityError as error:
        return str(error)
    return ""


def process(rank: int, path: Path, out: Path) -> None:
    """One of the two processes: shard, iterate, step, iterate."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
    }
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(out / "store"), PROCESSES)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    model = sharded(load(path))
    generation = trl_generation(model)
    before = described(policy_tensors(generation._iter_named_params()))
    step(model)
    after = described(policy_tensors(generation._iter_named_params()))
    names = {name for name, _, _ in after}
    check_ties(model, names)
    result = {
        "before": before,
        "after": after,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "shards": refusal(lambda: list(policy_tensors(model.named_parameters()))),
    }
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    result["fallen apart"] = refusal(lambda: check_ties(model, names))
    (out / f"{rank}.json").write_text(json.dumps(result))
    adapted = trl_generation(sharded(load(path, adapter=True)))
    merged = dict(policy_tensors(adapted._iter_named_params()))
    torch.save(merged, out / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_w20_gathered_tensors_are_the_whole_model(
    tiny_model: Callable[[Kind], Path], tmp_path: Path, kind: Kind
) -> None:
    """W20: shapes and hashes of the single-process model, from both processes."""
    path = tiny_model(kind)
    mp.spawn(process, args=(path, tmp_path), nprocs=PROCESSES)
    torch.set_num_threads(1)
    single = load(path)
    start = described(single.named_parameters())
    step(single)
    end = described(single.named_parameters())
    assert all(one[2] != other[2] for one, other in zip(start, end, strict=True))
    names = [name for name, _, _ in end]
    assert ("lm_head.weight" in names) == (kind == "untied")
    assert "model.embed_tokens.weight" in names
    adapted = dict(policy_tensors(merged_tensors(load(path, adapter=True))))
    for rank in range(PROCESSES):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [tuple(row) for row in result["before"]] == start
        assert [tuple(row) for row in result["after"]] == end
        assert result["tied"] == (kind == "tied")
        # The controls: half of each tensor, and a pair that drifts apart from the next step on.
        assert "is a DTensor" in result["shards"] and "not gathered" in result["shards"]
        assert ("it is another tensor" in result["fallen apart"]) == (kind == "tied")
        merged = torch.load(tmp_path / f"{rank}.pt")
        assert merged.keys() == adapted.keys() == set(names)
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, adapted[name], rtol=0, atol=1e-5)
