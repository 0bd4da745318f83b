"""Weight updates on the server's own ``/metrics``."""

from __future__ import annotations

import time
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from vllm_parity_plugin.weights.messages import Outcome
from vllm_parity_plugin.weights.swap import Record

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class WeightMetrics:
    """One per API-server process; Prometheus adds the processes up.

    Args:
        version: policy version that is served.
    """

    def __init__(self, version: int) -> None:
        self.updates = Counter(
            "vllm_parity:weight_updates",
            "Weight updates by outcome: applied, repeated (already served), refused (nothing "
            "touched), restored (failed, old weights served), unhealthy (failed, generation "
            "paused), aborted (upload whose trainer went silent).",
            ["outcome"],
        )
        for outcome in get_args(Outcome):  # a rate needs the 0 before the first 1
            self.updates.labels(outcome)
        self.pause = Histogram(
            "vllm_parity:weight_update_pause_seconds",
            "Time that generation was paused by an update.",
            buckets=SECONDS,
        )
        self.total = Histogram(
            "vllm_parity:weight_update_seconds",
            "Time from an update's request to its answer, checks included.",
            buckets=SECONDS,
        )
        self.bytes = Counter("vllm_parity:weight_update_bytes", "Bytes of applied updates.")
        self.version = Gauge(
            "vllm_parity:policy_version",
            "Version of the served policy; 0 is the checkpoint.",
            multiprocess_mode="mostrecent",
        )
        self.changed = Gauge(
            "vllm_parity:weights_timestamp_seconds",
            "Unix time at which the served weights were loaded; their age is time() minus this.",
            multiprocess_mode="mostrecent",
        )
        self.version.set(version)
        self.changed.set(time.time())

    def observe(self, record: Record) -> None:
        """Count one update."""
        self.updates.labels(record.outcome).inc()
        if record.outcome in {"applied", "restored"}:
            self.pause.observe(record.pause_seconds)
        if record.outcome != "aborted":
            self.total.observe(record.total_seconds)
        if record.outcome == "applied":
            self.bytes.inc(record.bytes)
            self.version.set(record.version)
            self.changed.set(time.time())
