"""Ways to spoil an update before it is sent: each a function of the draft and a random source."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.server.faultlab.policies import Draft
from vllm_parity_plugin.weights.manifest import LORA_A, LORA_B

Spoiler = Callable[[Draft, random.Random], Any]
HUGE = 3.4e38
"""Finite in float32, infinite once rounded to bfloat16."""


def _any(draft: Draft, rng: random.Random) -> str:
    return rng.choice(sorted(draft.header))


def _both(draft: Draft, name: str) -> list[dict[str, Any]]:
    """The entries of a tensor in file and manifest."""
    return [where[name] for where in (draft.header, draft.entries) if where and name in where]


def _alike(draft: Draft, rng: random.Random) -> tuple[str, str]:
    """Two tensors of the same dtype and shape with different bytes."""
    pairs = [
        (a, b)
        for a in draft.header
        for b in draft.header
        if a < b
        and draft.header[a]["shape"] == draft.header[b]["shape"]
        and draft.data[draft.range(a)] != draft.data[draft.range(b)]
    ]
    return rng.choice(pairs)


# Bytes.


def nothing(draft: Draft, rng: random.Random) -> None:
    """The control: a good update."""


def flip_bit(draft: Draft, rng: random.Random) -> None:
    draft.data[rng.randrange(len(draft.data))] ^= 1 << rng.randrange(8)


def flip_bits(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.randint(2, 64)):
        flip_bit(draft, rng)


def flip_header(draft: Draft, rng: random.Random) -> None:
    raw = bytearray(draft.header_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    draft.raw_header = bytes(raw)


def zero_page(draft: Draft, rng: random.Random) -> None:
    """A torn write: a page that never reached the file."""
    draft.data[:4096] = bytes(len(draft.data[:4096]))


def truncate_data(draft: Draft, rng: random.Random) -> None:
    del draft.data[rng.randrange(len(draft.data)) :]


def truncate_header(draft: Draft, rng: random.Random) -> None:
    raw = draft.header_bytes()
    draft.raw_header, draft.data = raw[: rng.randrange(len(raw))], bytearray()


def empty_file(draft: Draft, rng: random.Random) -> None:
    draft.raw_header, draft.data = b"\0" * rng.randrange(8), bytearray()


def append_bytes(draft: Draft, rng: random.Random) -> None:
    draft.data += bytes(rng.randint(1, 100))


def swap_data(draft: Draft, rng: random.Random) -> None:
    a, b = map(draft.range, _alike(draft, rng))
    draft.data[a], draft.data[b] = draft.data[b], draft.data[a]


# Which tensors there are.


def _cut(draft: Draft, name: str) -> None:
    """Remove a tensor's bytes, and move those behind it up."""
    gone = draft.range(name)
    del draft.data[gone]
    size = gone.stop - gone.start
    for entries in filter(None, (draft.header, draft.entries)):
        for entry in entries.values():
            begin, end = entry["data_offsets"]
            if begin >= gone.stop:
                entry["data_offsets"] = [begin - size, end - size]


def drop_tensor(draft: Draft, rng: random.Random) -> None:
    """Gone from file and manifest, which agree."""
    name = _any(draft, rng)
    _cut(draft, name)
    for entries in filter(None, (draft.header, draft.entries)):
        del entries[name]


def drop_from_file(draft: Draft, rng: random.Random) -> None:
    name = sorted(draft.header, key=lambda n: draft.header[n]["data_offsets"])[-1]
    del draft.data[draft.range(name)]
    del draft.header[name]


def drop_from_manifest(draft: Draft, rng: random.Random) -> None:
    assert draft.entries is not None
    del draft.entries[_any(draft, rng)]


def add_tensor(draft: Draft, rng: random.Random) -> None:
    end = len(draft.data)
    entry = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [end, end + 8]}
    draft.data += bytes(8)
    for entries in filter(None, (draft.header, draft.entries)):
        entries["model.layers.7.mlp.up_proj.weight"] = dict(entry)
    draft.resum()


def rename_tensor(draft: Draft, rng: random.Random) -> None:
    name = _any(draft, rng)
    new = rng.choice([f"module.{name}", name.replace("model", "mode1"), f"{name}.base", ""])
    new = f"{name}_" if new == name else new
    for where in ("header", "entries"):
        old = getattr(draft, where)
        setattr(draft, where, {new if n == name else n: entry for n, entry in old.items()})


def swap_names(draft: Draft, rng: random.Random) -> None:
    """In the file only: two tensors under each other's name."""
    a, b = _alike(draft, rng)
    draft.header[a], draft.header[b] = draft.header[b], draft.header[a]


def reorder(draft: Draft, rng: random.Random) -> None:
    """All of it in another order, consistently: a good update."""
    names = sorted(draft.header)
    rng.shuffle(names)
    # Wider dtypes first, as safetensors wants them for alignment.
    names.sort(key=lambda name: -int(draft.header[name]["dtype"][-2:]))
    data, header, entries = bytearray(), {}, {}
    assert draft.entries is not None
    for name in names:
        place = [len(data), len(data) + len(draft.data[draft.range(name)])]
        data += draft.data[draft.range(name)]
        header[name] = {**draft.header[name], "data_offsets": place}
        entries[name] = {**draft.entries[name], "data_offsets": place}
    draft.data, draft.header, draft.entries = data, header, entries


def reorder_entries(draft: Draft, rng: random.Random) -> None:
    """The manifest lists tensors in another order than their bytes come in."""
    assert draft.entries is not None
    draft.entries = dict(reversed(draft.entries.items()))


def duplicate_name(draft: Draft, rng: random.Random) -> None:
    """A file whose header has one name twice, for two ranges."""
    name = _any(draft, rng)
    fields = [f"{json.dumps(n)}:{json.dumps(entry)}" for n, entry in draft.header.items()]
    fields.append(f"{json.dumps(name)}:{json.dumps(draft.header[name])}")
    body = ("{" + ",".join(fields) + "}").encode()
    draft.raw_header = len(body).to_bytes(8, "little") + body


def share_bytes(draft: Draft, rng: random.Random) -> None:
    """Two tensors that claim the same bytes."""
    a, b = _alike(draft, rng)
    for entry in _both(draft, a):
        entry["data_offsets"] = list(draft.header[b]["data_offsets"])


# What they are.


def transpose(draft: Draft, rng: random.Random) -> None:
    names = [n for n, e in draft.header.items() if len(set(e["shape"])) == 2]
    for entry in _both(draft, rng.choice(sorted(names))):
        entry["shape"] = entry["shape"][::-1]


def flatten(draft: Draft, rng: random.Random) -> None:
    names = [n for n, e in draft.header.items() if len(e["shape"]) == 2]
    for entry in _both(draft, rng.choice(sorted(names))):
        entry["shape"] = [entry["shape"][0] * entry["shape"][1]]


def resize(draft: Draft, rng: random.Random) -> None:
    """One row more, in file and manifest."""
    name = max(draft.header, key=lambda n: draft.header[n]["data_offsets"])
    size = draft.range(name).stop - draft.range(name).start
    row = size // draft.header[name]["shape"][0]
    draft.data += bytes(row)
    for entry in _both(draft, name):
        begin, end = entry["data_offsets"]
        entry["shape"] = [entry["shape"][0] + 1, *entry["shape"][1:]]
        entry["data_offsets"] = [begin, end + row]
    draft.resum()


def wrong_dtype(draft: Draft, rng: random.Random) -> None:
    name = _any(draft, rng)
    narrow = draft.header[name]["dtype"] == "BF16"
    for entry in _both(draft, name):
        entry["dtype"] = rng.choice(["F16", "F16"] if narrow else ["I32", "I32"])


def unknown_dtype(draft: Draft, rng: random.Random) -> None:
    for entry in _both(draft, _any(draft, rng)):
        entry["dtype"] = "BF17"


def not_finite(draft: Draft, rng: random.Random) -> None:
    """One element is NaN or infinite, and the checksum is that of the bytes."""
    name = _any(draft, rng)
    place = draft.range(name)
    value = rng.choice([float("nan"), float("inf"), float("-inf")])
    dtype = torch.bfloat16 if draft.header[name]["dtype"] == "BF16" else torch.float32
    tensor = torch.frombuffer(bytearray(draft.data[place]), dtype=dtype)
    tensor[rng.randrange(len(tensor))] = value
    draft.data[place] = tensor.view(torch.uint8).numpy().tobytes()
    draft.resum()


def overflow(draft: Draft, rng: random.Random) -> None:
    """float32 tensors of which one value is finite there and infinite in the served dtype."""
    as_float32(draft, rng)
    place = draft.range(_any(draft, rng))
    values = np.frombuffer(bytes(draft.data[place]), dtype="<f4").copy()
    values[rng.randrange(len(values))] = HUGE
    draft.data[place] = values.tobytes()
    draft.resum()


def as_float32(draft: Draft, rng: random.Random) -> None:
    """The same values in float32: a good update."""
    tensors = {
        name: torch.frombuffer(bytearray(draft.data[draft.range(name)]), dtype=torch.bfloat16)
        .float()
        .view(entry["shape"])
        if entry["dtype"] == "BF16"
        else torch.frombuffer(bytearray(draft.data[draft.range(name)]), dtype=torch.float32).view(
            entry["shape"]
        )
        for name, entry in draft.header.items()
    }
    wide = Draft.of(tensors)
    draft.data, draft.header, draft.entries = wide.data, wide.header, wide.entries


# What the manifest says.


def no_manifest(draft: Draft, rng: random.Random) -> None:
    draft.entries = None


def no_checksum(draft: Draft, rng: random.Random) -> None:
    assert draft.entries is not None
    draft.entries[_any(draft, rng)]["checksum"] = None


def wrong_checksum(draft: Draft, rng: random.Random) -> None:
    assert draft.entries is not None
    entry = draft.entries[_any(draft, rng)]
    entry["checksum"] = rng.choice(["0" * 32, entry["checksum"][:-1], "", "not hexadecimal"])


def upper_checksum(draft: Draft, rng: random.Random) -> None:
    """Hexadecimal in capitals: a good update."""
    for entry in (draft.entries or {}).values():
        entry["checksum"] = entry["checksum"].upper()


def wrong_offsets(draft: Draft, rng: random.Random) -> None:
    assert draft.entries is not None
    entry = draft.entries[_any(draft, rng)]
    begin, end = entry["data_offsets"]
    entry["data_offsets"] = rng.choice(
        [[begin + 2, end + 2], [end, begin], [begin, end + 2], [-begin - 2, end], [begin, 2**62]]
    )


def wrong_header_offsets(draft: Draft, rng: random.Random) -> None:
    name = _any(draft, rng)
    begin, end = draft.header[name]["data_offsets"]
    draft.header[name]["data_offsets"] = rng.choice([[begin + 2, end + 2], [begin, end + 2]])


def wrong_model(draft: Draft, rng: random.Random) -> None:
    draft.manifest["model"] = f"{rng.getrandbits(128):032x}"


def older(draft: Draft, rng: random.Random) -> None:
    draft.manifest["version"] -= 1 + rng.randint(1, 3)


def repeated(draft: Draft, rng: random.Random) -> None:
    draft.manifest["version"] -= 1


def skipping(draft: Draft, rng: random.Random) -> None:
    draft.manifest["version"] += rng.randint(1, 9)


def impossible_version(draft: Draft, rng: random.Random) -> None:
    draft.manifest["version"] = rng.choice([0, -1, 2**31, 1.5, "next", None])


def wrong_base(draft: Draft, rng: random.Random) -> None:
    draft.manifest["base_version"] += rng.choice([-1, 1, 2])


def no_base(draft: Draft, rng: random.Random) -> None:
    draft.manifest["base_version"] = None


def base_of_full(draft: Draft, rng: random.Random) -> None:
    draft.manifest["base_version"] = draft.manifest["version"] - 1


def unknown_field(draft: Draft, rng: random.Random) -> None:
    draft.manifest[rng.choice(["verison", "force", "path"])] = 1


# Adapters.


def half_pair(draft: Draft, rng: random.Random) -> None:
    name = rng.choice(sorted(draft.header))
    _cut(draft, name)
    for entries in filter(None, (draft.header, draft.entries)):
        del entries[name]


def other_target(draft: Draft, rng: random.Random) -> None:
    for where in ("header", "entries"):
        entries = getattr(draft, where)
        setattr(draft, where, {n.replace("layers.", "layers.9"): e for n, e in entries.items()})


def swapped_pair(draft: Draft, rng: random.Random) -> None:
    """A under the name of B."""
    for where in ("header", "entries"):
        names = {
            n: n.replace(LORA_A, ".x").replace(LORA_B, LORA_A).replace(".x", LORA_B)
            for n in getattr(draft, where)
        }
        setattr(draft, where, {names[n]: e for n, e in getattr(draft, where).items()})


def endless_scaling(draft: Draft, rng: random.Random) -> None:
    """A scaling that makes every merged weight NaN or infinite."""
    draft.manifest["scaling"] = rng.choice([float("nan"), float("inf"), -float("inf"), 1e300])


def huge_adapter(draft: Draft, rng: random.Random) -> None:
    """Finite pairs whose product is not."""
    for name in draft.header:
        place = draft.range(name)
        values = np.frombuffer(bytes(draft.data[place]), dtype="<f4") * np.float32(1e25)
        draft.data[place] = values.tobytes()
    draft.resum()


SPOILERS: dict[str, Spoiler] = {
    name: function
    for name, function in list(globals().items())
    if callable(function)
    and getattr(function, "__module__", "") == __name__
    and not name.startswith("_")
}
