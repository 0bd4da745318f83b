"""Rollouts as they travel: the request, and arrays in a safetensors body.

``docs/wire.md`` specifies the format for other trainers. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.wire import Message

FORMAT = "vllm-parity-rollout-2"
ERROR_FORMAT = "vllm-parity-error-1"
BODY_TYPE = "application/vnd.safetensors"
STREAM_TYPE = "application/vnd.vllm-parity.rollout-stream"
"""Frames: eight bytes little-endian length and a body, one per sequence; a length of 0 ends it."""
KEY_HEADER = "idempotency-key"
RETRY_HEADER = "x-parity-retry"
"""On a repeated request: the server id that the caller last saw, or ``?``."""
SERVER_HEADER = "x-parity-server"
MAX_SEQUENCES = 2**16
"""Completions of one rollout request: prompts times n."""
INT32 = 2**31 - 1
SUPPORT_TOLERANCE = 1e-3
"""How far from 1 the mass of a head may be that holds the sampler's whole support."""
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Seed = Annotated[int, Field(ge=0, le=2**62)]
HeadDtype = Literal["float32", "float16"]
MULTIMODAL = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "images", "features")


class Sampling(Message):
    """Sampling parameters of a rollout; the names and neutral values are vLLM's."""

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=INT32)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[TokenId, float] | None = None
    max_tokens: int = Field(default=16, ge=1, le=INT32)
    min_tokens: int = Field(default=0, ge=0, le=INT32)
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def truncated(self) -> bool:
        """Whether a filter leaves tokens out, so that the support is not the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class RolloutRequest(Message):
    """Body of ``POST /v1/parity/rollouts``.

    Attributes:
        prompts: token ids of each prompt.
        n: completions per prompt.
        head_size: K, the most likely tokens that are returned at each position.
        seeds: one per prompt; completion j of a prompt uses ``seed + j``.
        sampling: for all prompts, or a list with one entry per prompt.
        stream: send each sequence when it is finished, in that order.
    """

    prompts: list[list[int]] = Field(min_length=1, max_length=MAX_SEQUENCES)
    n: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    head_size: int = Field(default=0, ge=0, le=INT32)
    seeds: list[Seed] | None = None
    sampling: Sampling | list[Sampling] = Sampling()
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _token_ids_only(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        prompts = data.get("prompts")
        items = prompts if isinstance(prompts, list) else [prompts]
        keys = {key for item in (data, *items) if isinstance(item, dict) for key in item}
        if found := sorted(keys.intersection(MULTIMODAL)):
            raise ValueError(
                f"the request holds {', '.join(found)}, and parity rollouts carry token ids only: "
                "what a processor makes of an image is not part of the format, so trainer and "
                "sampler could see different inputs. Fix: send text prompts, or use TRL's own "
                "vLLM mode with ParityCallback"
            )
        if any(isinstance(item, str | dict) for item in items):
            raise ValueError(
                "prompts are lists of token ids, not text: the server does not tokenize, so that "
                "trainer and sampler cannot disagree about it. Fix: tokenize with the served "
                "model's tokenizer"
            )
        return data

    @model_validator(mode="after")
    def _bounded(self) -> RolloutRequest:
        if len(self.prompts) * self.n > MAX_SEQUENCES:
            raise ValueError(
                f"{len(self.prompts)} prompts times n={self.n} are more than {MAX_SEQUENCES} "
                "completions: they would hold the server for very long. Fix: send several requests"
            )
        return self

    def sampling_of(self, prompt: int) -> Sampling:
        """The sampling parameters of one prompt."""
        return self.sampling[prompt] if isinstance(self.sampling, list) else self.sampling

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(prompt, which of its n completions) of every sequence, prompt-major."""
        return [(prompt, sample) for prompt in range(len(self.prompts)) for sample in range(self.n)]

    @property
    def sampling_of_sequences(self) -> Sampling | list[Sampling]:
        """One for all, or one per sequence: what the answer says was used."""
        if not isinstance(self.sampling, list):
            return self.sampling
        return [self.sampling[prompt] for prompt, _ in self.sequences]


@dataclass(frozen=True)
class Rollout:
    """Completions as arrays. S sequences (prompt-major), N tokens in all, K head entries.

    Attributes:
        token_ids: [N] int32, the sampled tokens of all sequences, one after the other.
        logprobs: [N] float32, log q of each sampled token under the distribution that drew it.
        head_ids: [N, K] int32, the K most likely tokens at each position, most likely first and
            of equal ones the lowest id first; -1 where the support is smaller than K. The head
            never depends on the sampled token.
        head_logprobs: [N, K] float32 (float16 where that was asked for), their log q; -inf where
            ``head_ids`` is -1.
        sequence_offsets: [S + 1] int64; sequence i is ``[offsets[i], offsets[i + 1])``.
        policy_versions: [N] int32, version of the policy that sampled each token. It changes
            within a sequence that was in flight during a weight update.
        cached_tokens: [S] int32, tokens of the prompt that came from the prefix cache.
        finish_reasons: S strings, vLLM's: ``stop``, ``length``, ``abort``, ...
        stop_reasons: S entries, vLLM's: the stop string or stop token id; None for the model's
            own EOS and for any other end.
        sampling: the parameters the server used; a list has one entry per sequence.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    head_ids: np.ndarray
    head_logprobs: np.ndarray
    sequence_offsets: np.ndarray
    policy_versions: np.ndarray
    cached_tokens: np.ndarray
    finish_reasons: list[str]
    stop_reasons: list[int | str | None]
    sampling: Sampling | list[Sampling] = field(default_factory=Sampling)

    TOKENS = ("token_ids", "logprobs", "head_ids", "head_logprobs", "policy_versions")
    """Arrays with one row per token."""
    DTYPES: ClassVar[dict[str, tuple[str, ...]]] = {
        "token_ids": ("int32",),
        "logprobs": ("float32",),
        "head_ids": ("int32",),
        "head_logprobs": ("float32", "float16"),
        "sequence_offsets": ("int64",),
        "policy_versions": ("int32",),
        "cached_tokens": ("int32",),
    }

    def __len__(self) -> int:
        return len(self.sequence_offsets) - 1

    def span(self, sequence: int) -> slice:
        """Token positions of one sequence in the flat arrays."""
        return slice(int(self.sequence_offsets[sequence]), int(self.sequence_offsets[sequence + 1]))

    @classmethod
    def join(cls, parts: Sequence[Rollout], sampling: Sampling | list[Sampling]) -> Rollout:
        """The sequences of all parts, in their order."""
        lengths = np.concatenate([np.diff(part.sequence_offsets) for part in parts])
        arrays = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in (*cls.TOKENS, "cached_tokens")
        }
        return cls(
            **arrays,
            sequence_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            finish_reasons=[reason for part in parts for reason in part.finish_reasons],
            stop_reasons=[reason for part in parts for reason in part.stop_reasons],
            sampling=sampling,
        )

    def part(self, first: int, stop: int) -> Rollout:
        """Sequences ``first`` up to, without, ``stop``."""
        rows = slice(int(self.sequence_offsets[first]), int(self.sequence_offsets[stop]))
        sampling = self.sampling
        if isinstance(sampling, list):
            sampling = sampling[first:stop]
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in self.TOKENS},
            sequence_offsets=self.sequence_offsets[first : stop + 1] - rows.start,
            cached_tokens=self.cached_tokens[first:stop],
            finish_reasons=self.finish_reasons[first:stop],
            stop_reasons=self.stop_reasons[first:stop],
            sampling=sampling,
        )

    def to_bytes(self, head_dtype: HeadDtype = "float32", sequence: int | None = None) -> bytes:
        """One safetensors body; reasons and sampling travel as its metadata.

        Args:
            head_dtype: of ``head_logprobs``. float16 keeps 11 bits: a relative error of 5e-4 of
                the logprob. The sampled tokens' ``logprobs`` stay float32.
            sequence: index of the one sequence in a stream.
        """
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in self.DTYPES}
        arrays["head_logprobs"] = arrays["head_logprobs"].astype(head_dtype, copy=False)
        several = self.sampling if isinstance(self.sampling, list) else [self.sampling]
        samplings = [one.model_dump(exclude_none=True) for one in several]
        metadata = {
            "format": FORMAT,
            "finish_reasons": json.dumps(self.finish_reasons),
            "stop_reasons": json.dumps(self.stop_reasons),
            "sampling": json.dumps(samplings if isinstance(self.sampling, list) else samplings[0]),
        }
        if sequence is not None:
            metadata["sequence"] = str(sequence)
        return save_arrays(arrays, metadata=metadata)

    @classmethod
    def from_bytes(cls, body: bytes) -> Rollout:
        """Read a body made by :meth:`to_bytes`, checking that the arrays belong together.

        Raises:
            ParityError: not a rollout body, or arrays whose lengths disagree (case L11).
        """
        return cls.from_frame(body)[1]

    @classmethod
    def from_frame(cls, body: bytes) -> tuple[int, Rollout]:
        """The same for a body of a stream, and which sequence of the request it is (or 0).

        Raises:
            ParityError: as ``from_bytes``, or what the server says in place of a sequence.
        """
        try:
            metadata = _metadata(body)
            if metadata["format"] == ERROR_FORMAT:
                raise ParityError(metadata["found"], metadata["why"], metadata["fix"])
            if metadata["format"] != FORMAT:
                raise ValueError(f"its format is {metadata['format']}, not {FORMAT}")
            arrays = load_arrays(body)
            for name, dtypes in cls.DTYPES.items():
                if str(arrays[name].dtype) not in dtypes:
                    raise ValueError(f"{name} is {arrays[name].dtype}, not {dtypes[0]}")
            sampling = json.loads(metadata["sampling"])
            rollout = cls(
                **{name: arrays[name] for name in cls.DTYPES},
                finish_reasons=json.loads(metadata["finish_reasons"]),
                stop_reasons=json.loads(metadata["stop_reasons"]),
                sampling=[Sampling(**one) for one in sampling]
                if isinstance(sampling, list)
                else Sampling(**sampling),
            )
            sequence = int(metadata.get("sequence", 0))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ParityError(
                f"The rollout body cannot be read ({error}).",
                "It is truncated or comes from another version of the plugin.",
                "use the same vllm-parity version on server and trainer.",
            ) from None
        rollout.check()
        return sequence, rollout

    def check(self) -> None:
        """Lengths of ids, logprobs, heads and sequences agree.

        Raises:
            ParityError: they do not; a shifted logprob would enter the loss silently.
        """
        tokens = len(self.token_ids)
        lengths = {name: len(getattr(self, name)) for name in self.TOKENS[1:]}
        offsets = self.sequence_offsets
        ends = int(offsets[-1]) if len(offsets) else -1
        ordered = len(offsets) > 0 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
        if set(lengths.values()) != {tokens} or ends != tokens or not ordered:
            raise ParityError(
                f"The rollout has {tokens} token ids but {lengths}, offsets ending at {ends}"
                + ("." if ordered else ", and not in order."),
                "A token would be paired with another token's logprob.",
                "report this: the server's rollout is inconsistent.",
            )
        if self.head_ids.shape != self.head_logprobs.shape:
            raise ParityError(
                f"The rollout has head ids of shape {self.head_ids.shape} but head logprobs of "
                f"shape {self.head_logprobs.shape}.",
                "A token would be paired with another token's logprob.",
                "report this: the server's rollout is inconsistent.",
            )
        reasons = {len(self.finish_reasons), len(self.stop_reasons), len(self.cached_tokens)}
        if reasons != {len(self)}:
            raise ParityError(
                f"The rollout has {len(self)} sequences but {len(self.finish_reasons)} finish "
                f"reasons, {len(self.stop_reasons)} stop reasons and {len(self.cached_tokens)} "
                "counts of cached tokens.",
                "A truncated sequence could pass for a finished one.",
                "report this: the server's rollout is inconsistent.",
            )

    def check_support(self) -> None:
        """Refuse heads that are not the sampler's whole support.

        The support form of score centering restricts the trainer to the tokens that the filters
        (top_k, top_p, min_p) left, so it needs all of them.

        Raises:
            ParityError: naming the first token whose head does not hold all of q.
        """
        mass = np.exp(self.head_logprobs.astype(np.float32)).sum(-1, dtype=np.float64)
        missing = np.abs(mass - 1.0) > SUPPORT_TOLERANCE
        missing &= np.isfinite(self.logprobs)  # a NaN row is dropped for what it is
        if missing.any():
            token = int(np.flatnonzero(missing)[0])
            sequence = int(np.searchsorted(self.sequence_offsets, token, side="right")) - 1
            raise ParityError(
                f"The head of completion {sequence} at position "
                f"{token - int(self.sequence_offsets[sequence])} holds {mass[token]:.4f} of the "
                f"sampler's mass ({int(missing.sum())} of {len(mass)} tokens are short).",
                f"The filters left more than {self.head_ids.shape[1]} tokens, and the support "
                "form needs every one of them.",
                "sample with a top_k no larger than the head, ask for a larger head, or leave "
                "top_p, top_k and min_p neutral and use the tail model.",
            )


def frame(body: bytes) -> bytes:
    """A body as part of a stream; an empty one is the end of it."""
    return len(body).to_bytes(8, "little") + body


def error_frame(error: ParityError) -> bytes:
    """What a stream carries in place of the sequences that will not come."""
    metadata = {"found": error.found, "why": error.why, "fix": error.fix}
    return frame(save_arrays({}, metadata={"format": ERROR_FORMAT} | metadata))


def read_frames(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The bodies of a stream, as soon as each of them is complete.

    Raises:
        ParityError: the stream breaks off before its end.
    """
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 8:
            size = int.from_bytes(buffer[:8], "little")
            if size == 0:
                return
            if len(buffer) < 8 + size:
                break
            yield bytes(memoryview(buffer)[8 : 8 + size])
            del buffer[: 8 + size]
    raise ParityError(
        f"The stream of completions broke off ({len(buffer)} bytes of an unfinished one).",
        "Which completions are missing depends on how long they are, so the rest must not be "
        "trained on.",
        "look at the server's log; send the request again.",
    )


def _metadata(body: bytes) -> dict[str, str]:
    header_length = int.from_bytes(body[:8], "little")
    header: dict[str, Any] = json.loads(body[8 : 8 + header_length])
    return dict(header["__metadata__"])
