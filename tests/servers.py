"""How the servers of the tests are started."""

from __future__ import annotations

# vLLM's CPU build refuses to start unless this share of all memory is free, and servers add up.
MEMORY_SHARE = 0.1
MEMORY = ("--gpu-memory-utilization", str(MEMORY_SHARE))
STANDARD = ("--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager", *MEMORY)
LONG = ("--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", *MEMORY)
TOKEN = "a-token-for-tests"
API_KEY = "an-api-key-for-tests"
CONFLICTS = (
    "--enable-prefix-caching",
    "--async-scheduling",
    "--logprobs-mode",
    "raw_logits",
    "--hf-overrides",
    '{"head_dtype": "model"}',
)
"""Explicit flags that contradict four rules."""
