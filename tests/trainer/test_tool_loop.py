"""Tool calls: TRL's own loop, with a model that really calls, on a real server.

The countdown model writes ``(7+6)*3=39``. A response template reads an expression in front of ``=``
as a call of a calculator, so that TRL parses a call, runs the tool and samples a second turn; no
part of it is replaced.

Properties: heads and logprobs sit at the tokens they were sampled with in both turns; a tool's
tokens have neither, and are not in the loss; what stands in their place changes no bit of loss and
gradient; later tokens see them all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from tests.trainer.runs import countdown, gradients, logged, one_batch, parity_trainer
from tests.trainer.test_trainer import Recording
from trl_callbacks.heads import HEAD_IDS, HEAD_LOGPROBS, OLD_HEAD_LOGPROBS
from vllm_parity_plugin.rollout_wire import Rollout, RolloutRequest
from vllm_parity_plugin.serving import Server

CHAT_TEMPLATE = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor -%}
{{ eos_token }}
{%- else -%}
{{ bos_token }}{{ message.content }}
{%- endif -%}
{%- endfor -%}
"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ":",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\((?P<first>\d+)(?P<sign>[+*-])(?P<second>\d+)\)[^=]*=",
            "close_pattern": "<eos>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {
                    "name": "calculate",
                    "arguments": {"first": "{first}", "sign": "{sign}", "second": "{second}"},
                },
            },
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def calculate(first: str, sign: str, second: str) -> str:
    """Ask for the next number.

    Args:
        first: a number.
        sign: + - or *.
        second: another number.
    """
    value = countdown.evaluate(f"{first}{sign}{second}")
    return f"use {first},{second},2 to make {value}:"


@pytest.fixture
def calling(model_path: Path) -> Any:
    """The tokenizer, with templates for tool calls."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


class Turns:
    """Passes requests on and keeps requests and answers."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.asked: list[RolloutRequest] = []
        self.answers: list[Rollout] = []

    def rollout(self, request: RolloutRequest, **form: Any) -> Rollout:
        self.asked.append(request)
        self.answers.append(self._client.rollout(request, **form))
        return self.answers[-1]


def graded(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within every group: any function of the text does."""
    return [float(sum(map(ord, str(messages))) % 7) for messages in completions]


class NoBegin:
    """A tokenizer without a begin-of-text token, as far as the task looks."""

    bos_token = None


def conversations() -> Dataset:
    """The lines that the model was trained on, as chats; the template adds <bos>."""
    lines = countdown.problems(16, 0, NoBegin())["prompt"]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": line}]} for line in lines])


def tool_trainer(policy: Any, tokenizer: Any, url: str, directory: Path, **values: Any) -> Any:
    trainer = parity_trainer(
        policy,
        tokenizer,
        url,
        directory,
        kind=Recording,
        max_completion_length=40,
        max_tool_calling_iterations=1,
        temperature=1.5,
        trainer={"tools": [calculate]},
        **values,
    )
    trainer.train_dataset, trainer.reward_funcs = conversations(), [graded]
    trainer.vllm_generation.client = Turns(trainer.vllm_generation.client)
    return trainer


def spans(trainer: Any, batch: dict[str, Any]) -> list[list[tuple[Rollout, slice, slice]]]:
    """Each row's turns: the rollout, its tokens there, and its tokens in the batch."""
    first, second = trainer.vllm_generation.client.answers
    calls = batch["tool_mask"].eq(0).any(1)
    later = iter(range(len(second)))
    rows = []
    for row, called in enumerate(calls.tolist()):
        span = first.span(row)
        turns = [(first, span, slice(0, span.stop - span.start))]
        if called:
            start = int(batch["tool_mask"][row].eq(0).nonzero().max()) + 1
            stop = int(batch["completion_mask"][row].sum())
            at = second.span(next(later)).start
            turns.append((second, slice(at, at + stop - start), slice(start, stop)))
        rows.append(turns)
    assert next(later, None) is None
    return rows


def test_heads_sit_at_their_tokens_in_both_turns(
    policy: Any, calling: Any, restored: Server, tmp_path: Path
) -> None:
    """G3, L15, S7: every turn's ids, logprobs and heads, against what the server sent."""
    trainer = tool_trainer(policy, calling, restored.url, tmp_path)
    batch = one_batch(trainer)
    tool = batch["tool_mask"] == 0
    assert 0 < tool.any(1).sum() < len(tool)  # some call the calculator, and some do not
    assert (batch[HEAD_IDS][tool] == -1).all() and (batch[HEAD_LOGPROBS][tool] == -np.inf).all()
    assert (batch["completion_mask"][tool] == 1).all()
    assert batch["num_items_in_batch"] == (batch["completion_mask"] * batch["tool_mask"]).sum()
    own = torch.zeros_like(tool)
    for row, turns in enumerate(spans(trainer, batch)):
        for rollout, sent, here in turns:
            own[row, here] = True
            for name, values in (
                ("completion_ids", rollout.token_ids),
                ("sampling_per_token_logps", rollout.logprobs),
                (HEAD_IDS, rollout.head_ids),
                (HEAD_LOGPROBS, rollout.head_logprobs),
            ):
                assert np.array_equal(batch[name][row, here].numpy(), values[sent]), name
    assert torch.equal(own, (batch["completion_mask"] == 1) & ~tool)
    found = (batch[HEAD_IDS] == batch["completion_ids"].unsqueeze(-1)) & own.unsqueeze(-1)
    values = batch["sampling_per_token_logps"].unsqueeze(-1).expand_as(found)
    assert torch.equal(batch[HEAD_LOGPROBS][found], values[found])
    assert found.any(-1).sum() > 0.8 * own.sum()


def test_what_stands_at_tool_tokens_does_not_matter(
    policy: Any, calling: Any, restored: Server, tmp_path: Path
) -> None:
    """G3: NaN logprobs and other heads at a tool's tokens leave every bit of loss and gradient."""
    trainer = tool_trainer(policy, calling, restored.url, tmp_path, num_iterations=2)
    batch = one_batch(trainer)
    tool = batch["tool_mask"] == 0
    changed = {name: value.clone() for name, value in batch.items()}
    for name in ("sampling_per_token_logps", HEAD_LOGPROBS, OLD_HEAD_LOGPROBS):
        changed[name][tool] = np.nan
    changed[HEAD_IDS][tool] = torch.arange(batch[HEAD_IDS].size(-1), dtype=torch.int32)
    changed["old_per_token_logps"][tool] = 3.0  # the trainer's own, so never NaN
    found = []
    for inputs in (batch, changed):
        loss = trainer.compute_loss(trainer.model, inputs)
        found.append((loss.detach(), gradients(trainer, loss)))
    (loss, plain), (other, garbage) = found
    assert loss.isfinite() and torch.equal(loss, other)
    assert all(grad.norm() > 0 for grad in plain.values())
    assert all(torch.equal(grad, garbage[name]) for name, grad in plain.items())


def seen(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """log p of every completion token, as the pass of the loss computed it."""
    trainer.compute_loss(trainer.model, batch)
    return trainer.parity._log_probs[:, -batch["completion_ids"].size(1) :]


def test_later_tokens_see_what_the_tool_said(
    policy: Any, calling: Any, restored: Server, tmp_path: Path
) -> None:
    """G4: the second turn is scored with the tool's tokens as context, as it was sampled."""
    trainer = tool_trainer(policy, calling, restored.url, tmp_path)
    batch = one_batch(trainer)
    own = (batch["completion_mask"] * batch["tool_mask"]).bool()
    second = own & (batch["tool_mask"].eq(0).cumsum(1) > 0)
    plain = seen(trainer, batch)
    unmasked = seen(trainer, {**batch, "tool_mask": torch.ones_like(batch["tool_mask"])})
    assert torch.equal(plain[own], unmasked[own])
    assert (plain - batch["sampling_per_token_logps"])[second].abs().mean() < 0.02
    another = {**batch, "completion_ids": batch["completion_ids"].clone()}
    another["completion_ids"][batch["tool_mask"] == 0] = calling.convert_tokens_to_ids("7")
    assert (seen(trainer, another) - plain)[second].abs().mean() > 0.1
    assert torch.equal(seen(trainer, another)[own & ~second], plain[own & ~second])


def test_training_with_a_tool(policy: Any, calling: Any, restored: Server, tmp_path: Path) -> None:
    """G1, G3: real steps, two on each rollout, that count the model's own tokens only."""
    trainer = tool_trainer(
        policy,
        calling,
        restored.url,
        tmp_path,
        max_steps=2,
        num_iterations=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
    )
    trainer.train()
    client = trainer.vllm_generation.client
    assert [len(answer) for answer in client.answers][::2] == [16]
    assert len(client.answers) == 2  # one rollout of two turns
    for batch in trainer.batches:
        own = batch["completion_mask"] * batch["tool_mask"]
        assert (batch[HEAD_IDS][own == 0] == -1).all()
        assert own.sum() < batch["completion_mask"].sum()
    for entry in logged(trainer):
        assert entry["tools/call_frequency"] > 0.5
        assert entry["parity/logprob_diff/mean"] < 0.02
    assert all(p.isfinite().all() for p in trainer.model.parameters())
