"""What a user can set, from ``--additional-config '{"parity": {...}}'`` or ``VLLM_PARITY_*``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_parity_plugin.errors import ParityError

ENV_PREFIX = "VLLM_PARITY_"

Mode = Literal["enforce", "strict", "observe", "off"]


class ParitySettings(BaseSettings):
    """Settings of the plugin. The strings below are the only source of their documentation."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    mode: Mode = Field(
        default="enforce",
        description=(
            "enforce: change the engine settings that drift and say so. strict: refuse to start "
            "when an explicit setting contradicts a rule. observe: change nothing, report. "
            "off: do nothing at all."
        ),
    )
    token: SecretStr | None = Field(
        default=None,
        description=(
            "Bearer token of the /v1/parity routes. Without one, only callers on the same host "
            "(or holders of the server's API key) are let in. Set it in the environment, not in "
            "--additional-config, which vLLM prints."
        ),
    )
    weights_dir: Path | None = Field(
        default=None,
        description=(
            "Directory from which weight updates are read; it must be visible to the trainer. "
            "Default: a private directory that the server makes in shared memory and removes."
        ),
    )
    rollback: Literal["keep", "none"] = Field(
        default="keep",
        description=(
            "keep: the served set of weights stays in the weights directory, and a weight update "
            "that fails while it is loaded goes back to it. none: saves that memory; after such "
            "a failure generation stays paused and /health answers 503 until a full update."
        ),
    )
    upload_timeout: float = Field(
        default=60.0,
        gt=0.0,
        description=(
            "Seconds without bytes after which a weight upload is dropped and another trainer "
            "may send one. The old weights are served all the while."
        ),
    )
    rollout_grace: float = Field(
        default=10.0,
        gt=0.0,
        description=(
            "Seconds that a rollout goes on after its caller's connection broke, if the request "
            "has an idempotency key to come back with (vllm-parity's own client sends one)."
        ),
    )
    head_size: int = Field(
        default=128,
        ge=1,
        description=(
            "Largest number of top logprobs per token a trainer may ask for (K of score "
            "centering). It raises vLLM's max_logprobs to at least this value."
        ),
    )
    prefix_caching: Literal["off", "versioned"] = Field(
        default="off",
        description=(
            "off: every prompt is computed anew. versioned: vLLM's prefix cache is on and keyed by "
            "policy, so that the completions of one prompt share its prefill and no prompt uses KV "
            "from before a weight update. It changes nothing in mode observe."
        ),
    )


def load_settings(additional_config: object = None) -> ParitySettings:
    """Settings of this process.

    ``additional_config["parity"]`` wins over ``VLLM_PARITY_*``, which wins over the defaults.

    Raises:
        ParityError: unknown name or bad value; nothing is guessed.
    """
    given: Any = {}
    if isinstance(additional_config, Mapping):
        given = additional_config.get("parity") or {}
    if not isinstance(given, Mapping):
        raise ParityError(
            f'--additional-config has "parity": {given!r}, which is not an object.',
            "The plugin cannot tell what is meant.",
            """write --additional-config '{"parity": {"mode": "enforce"}}'.""",
        )
    known = set(ParitySettings.model_fields)
    unknown_env = [
        name
        for name in os.environ
        if name.startswith(ENV_PREFIX) and name.removeprefix(ENV_PREFIX).lower() not in known
    ]
    if unknown_env:
        raise ParityError(
            f"Unknown environment variable {', '.join(sorted(unknown_env))}.",
            "A misspelt setting would be ignored silently.",
            f"use one of {', '.join(ENV_PREFIX + name.upper() for name in sorted(known))}.",
        )
    try:
        return ParitySettings(**given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        raise ParityError(
            f"Bad vllm-parity settings ({problems}).",
            "A setting that is not understood must not be ignored.",
            f"the settings are {', '.join(sorted(known))}; modes are enforce, strict, observe "
            "and off.",
        ) from None
