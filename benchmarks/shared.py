"""What the benchmarks share: models made on the spot, servers, statistics, results.

The functions above `Models and servers` are pure and have unit tests.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Row = Mapping[str, Any]


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The same names in another order at every turn, so that none always runs first.

    ``rotated(["a", "b", "c"], 1)`` is ``["b", "c", "a"]``.
    """
    start = turn % len(names) if names else 0
    return [*names[start:], *names[:start]]


def medians(rows: Sequence[Row], columns: Sequence[str]) -> dict[str, float]:
    """Median of every column, over the rows that have it; a column nobody has is left out."""
    values = {
        name: [float(row[name]) for row in rows if row.get(name) not in (None, "")]
        for name in columns
    }
    return {name: median(found) for name, found in values.items() if found}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of y over x; 0 for fewer than two different x.

    ``slope([0, 1, 2], [1, 3, 5])`` is 2.
    """
    if len(x) < 2:
        return 0.0
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - middle_x) ** 2 for value in x)
    if spread == 0.0:
        return 0.0
    return sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def flatness(values: Sequence[float], windows: int = 10) -> float:
    """Largest deviation of a window's median from the first window's, as a share of it.

    100 values that rise by 1 each from 1000 in 10 windows: the medians are 1004.5 and 1094.5 at
    the ends, so 0.0896. Spikes shorter than half a window do not count.
    """
    size = max(1, len(values) // windows)
    found = [median(values[i : i + size]) for i in range(0, size * (len(values) // size), size)]
    return max((abs(value / found[0] - 1.0) for value in found), default=0.0)


# Models and servers.

SERVE_ARGS = (
    *("--dtype", "bfloat16", "--enforce-eager"),
    # vLLM's CPU build refuses to start unless this share of all memory is free.
    *("--gpu-memory-utilization", "0.1"),
)
VOCABULARY = 32768


def serve_environment(threads: int) -> dict[str, str]:
    """Environment of both servers: the same threads, and nothing looked up on a hub."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # vLLM pins spinning threads to every core, and two servers would fight for them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }


def qwen3(*, vocabulary: int, layers: int, width: int, heads: int, head_dim: int) -> Any:
    """Configuration of an untied Qwen3 model; KV heads are half the heads, the MLP is 3 wide."""
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )


def sized(gigabytes: float) -> Any:
    """A model of that size in bf16, with Qwen3-0.6B's widths and 32,768 tokens.

    0.94 gives 26 layers: 26 x 15.73 M and twice 33.6 M parameters are 0.952 GB.
    """
    width, heads, head_dim = 1024, 16, 128
    layer = width * head_dim * heads * 3 + 3 * width * 3 * width
    layers = round((gigabytes * 1e9 / 2 - 2 * VOCABULARY * width) / layer)
    return qwen3(
        vocabulary=VOCABULARY, layers=max(1, layers), width=width, heads=heads, head_dim=head_dim
    )


def write_model(directory: Path, config: Any) -> Path:
    """A random model of that configuration, with a tokenizer."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    weights = random_weights(config, seed=0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    test_models()._write_tokenizer(directory, config.vocab_size)
    return directory


def random_weights(config: Any, seed: int) -> dict[str, Any]:
    """A policy of that architecture: normal matrices, norms of one."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.03, generator=generator)
        for name, shape in shapes.items()
    }


def test_models() -> Any:
    """The models of the tests, which are not installed."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tests import models

    return models


# Results.


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    """Rows as CSV; the columns are those of all rows, in the order in which they appear."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def replace_table(page: Path, name: str, text: str) -> None:
    """Put text between a page's ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``.

    Raises:
        ValueError: the page has no such pair of markers; it is left as it is.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no {begin} followed by {end}: add both where the table goes")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def machine() -> str:
    """Processor, cores and memory, for the caption of a table."""
    name = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{name}, {os.cpu_count()} cores, {pages * page / 2**30:.0f} GiB"
