"""Logging under vLLM's own logger, whose handlers vLLM configures."""

import logging

logger = logging.getLogger("vllm.parity")
