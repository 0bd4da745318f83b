"""Tiny random Qwen3 models, made on the spot: the conventions of every engine test.

Two layers, hidden 64, 4 heads, 2 KV heads, head_dim 32, bf16, every matrix times 4 so that the
distributions are not flat. The byte-level tokenizer decodes 128 ids to the same text on purpose.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

DATA = Path(__file__).parent / "data"
COUNTDOWN = DATA / "countdown-llama"
Kind = Literal["untied", "tied", "odd", "gc", "tied-gc", "tied-copy", "tied-odd", "moe"]

BOS, EOS, SECOND_EOS = 0, 1, 2
VOCAB = 512
GENERATION_CONFIG = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 5,
    "repetition_penalty": 1.3,
    "do_sample": True,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, SECOND_EOS],
}
"""A model repository's opinion on sampling (L6)."""
CONTEXT = 2048
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def tiny_qwen3(directory: Path, kind: Kind) -> Path:
    """Write a tiny model of one kind; the same weights at every call.

    ``odd`` and ``tied-odd`` have 517 tokens, so that a padded vocabulary differs; ``gc`` and
    ``tied-gc`` come with a ``generation_config.json`` that changes sampling; ``tied-copy`` is tied
    and its checkpoint holds the head all the same, as Qwen3-0.6B's does; ``moe`` has 4 experts, of
    which a token uses 2.
    """
    from transformers import (
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    vocab = VOCAB + 5 if kind.endswith("odd") else VOCAB
    moe = kind == "moe"
    config = (Qwen3MoeConfig if moe else Qwen3Config)(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=kind.startswith("tied"),
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="bfloat16",
        **(EXPERTS if moe else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (Qwen3MoeForCausalLM if moe else Qwen3ForCausalLM)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    model.to(torch.bfloat16).save_pretrained(directory)
    if kind == "tied-copy":
        tensors = weights_of(directory)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "generation_config.json").unlink(missing_ok=True)
    if kind.endswith("gc"):
        (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    _write_tokenizer(directory, vocab)
    return directory


def _write_tokenizer(directory: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<bos>", "<eos>", "<eot>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"x{index}" for index in range(len(names), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(directory)


def large_logits(directory: Path) -> Path:
    """``countdown-llama`` with every logit near +40 and the distribution unchanged."""
    shutil.copytree(COUNTDOWN, directory, dirs_exist_ok=True)
    shift = json.loads((DATA / "large_logits_shift.json").read_text())
    tensors = weights_of(COUNTDOWN)
    head = tensors["lm_head.weight"].float() + shift["scale"] * torch.tensor(shift["u"])
    tensors["lm_head.weight"] = head.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """A model directory's tensors, by checkpoint name."""
    return load_file(directory / "model.safetensors")


def noisy(
    tensors: dict[str, torch.Tensor], seed: int, sd: float = 0.5, only: str = ""
) -> dict[str, torch.Tensor]:
    """A new policy: ``sd`` standard deviations of noise on every matrix (named ``only``)."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * sd
        change = tensor.ndim == 2 and only in name
        result[name] = (tensor.float() + noise).to(tensor.dtype) if change else tensor
    return result
