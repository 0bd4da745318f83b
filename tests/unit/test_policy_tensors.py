"""What the trainer sends: names, ties and merged values, on real Transformers and PEFT models.

Properties:
- under every wrapper and combination of wrappers, the cleaned names are the bare model's, each
  once, with its values (W12); path components are stripped wherever they stand;
- two tensors under one name, and a tensor that is not whole, are refused (W12, W13);
- a model of merged tensors computes the adapted model's logits; LoRA is base + scaling * B @ A in
  float32; five updates leave every bit of the model in place, as merge and unmerge do not;
- a head that is trained but not served, or served but not trained, is refused (W11);
- ParityGeneration sends merged tensors, asks about ties first, and finishes TRL's gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from tests.models import Kind, weights_of
from trl_callbacks.policy_tensors import (
    WRAPPERS,
    check_ties,
    merged_tensors,
    policy_tensors,
    served_name,
)
from vllm_parity_plugin.errors import ParityError
from vllm_parity_plugin.weights.errors import ManifestError
from vllm_parity_plugin.weights.manifest import TensorSpec, compare

IDS = torch.tensor([[5, 17, 3, 250, 99, 401, 7, 31]])
Load = Callable[..., Any]


@pytest.fixture
def load(tiny_model: Callable[[Kind], Path]) -> Load:
    def load(kind: Kind = "untied", dtype: torch.dtype = torch.bfloat16) -> Any:
        return AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=dtype).eval()

    return load


@pytest.fixture
def bare(tiny_model: Callable[[Kind], Path]) -> dict[str, torch.Tensor]:
    """The untied checkpoint, as any server of it would list it."""
    return weights_of(tiny_model("untied"))


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, **{"target_modules": ["q_proj"], **settings})


def peft(model: Any, config: Any = None, seed: int = 0) -> Any:
    """An adapted model whose adapter is not the zero that PEFT starts it at."""
    model = get_peft_model(model, config or lora())
    return trained(model, seed)


@torch.no_grad()
def trained(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.add_(noise.to(parameter.dtype))
    return model.eval()


class DataParallel(nn.Module):
    """The prefix of DistributedDataParallel, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def checkpointed(model: Any) -> Any:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    return model


def with_head(model: Any) -> Any:
    return get_peft_model(model, lora(modules_to_save=["lm_head"]))


def with_reference(model: Any) -> Any:
    """As TRL adds it for beta > 0: a second, frozen adapter."""
    model = with_head(model)
    model.add_adapter("ref", lora(modules_to_save=["lm_head"]))
    return model


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "bare": lambda model: model,
    "data parallel": DataParallel,
    "compile": torch.compile,
    "checkpoint": checkpointed,
    "peft": with_head,
    "peft, two adapters": with_reference,
    "compiled peft": lambda model: torch.compile(with_head(model)),
    "peft of checkpoint": lambda model: with_head(checkpointed(model)),
    "compiled layers": lambda model: with_compiled_layer(model),
    "everything": lambda model: DataParallel(torch.compile(with_reference(checkpointed(model)))),
}


def with_compiled_layer(model: Any) -> Any:
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return with_head(model)


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("source", ["named_parameters", "merged_tensors"])
def test_w12_names_and_values_are_the_bare_models(
    load: Load, bare: dict[str, torch.Tensor], wrapped: str, source: str
) -> None:
    """W12: an adapter at its start is zero, so even the values are the checkpoint's."""
    model = WRAPPED[wrapped](load())
    named = merged_tensors(model) if source == "merged_tensors" else model.named_parameters()
    sent = list(policy_tensors(named))
    assert sorted(name for name, _ in sent) == sorted(bare)
    for name, tensor in sent:
        assert torch.equal(tensor, bare[name].to(tensor.dtype)), name


def test_w12_the_wrappers_do_add_names(load: Load, bare: dict[str, torch.Tensor]) -> None:
    """The control: uncleaned, the names of every wrapper are not the bare ones."""
    for name in WRAPPED.keys() - {"bare"}:
        assert {key for key, _ in WRAPPED[name](load()).named_parameters()} != bare.keys()


EXTRA = [*sorted(WRAPPERS), "base_model.model", "modules_to_save.default"]


def test_w12_the_documented_name() -> None:
    name = "_orig_mod.base_model.model.lm_head.modules_to_save.default.weight"
    assert served_name(name) == "lm_head.weight"


@given(st.data())
def test_w12_components_are_stripped_anywhere(data: st.DataObject) -> None:
    parts = data.draw(st.sampled_from(["model.layers.0.self_attn.q_proj", "lm_head", "model.norm"]))
    path = parts.split(".")
    for extra in data.draw(st.lists(st.sampled_from(EXTRA), unique=True)):
        path.insert(data.draw(st.integers(0, len(path))), extra)
    # Each insertion is one unit: nothing is put inside it.
    assert served_name(".".join([*path, "weight"])) == f"{parts}.weight"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.embed_tokens.lora_embedding_B.default",
        "model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight",
        "_orig_mod.base_model.model.lm_head.original_module.weight",
        "lm_head.modules_to_save.ref.weight",
        "module.lm_head.modules_to_save.ref.weight",
    ],
)
def test_w12_what_no_server_has(name: str) -> None:
    assert served_name(name) is None


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.modules.0.weight", "model.submodule.weight", "module", "a"]
)
def test_w12_other_names_are_kept(name: str) -> None:
    """Only whole components count."""
    assert served_name(name) == name


def specs(named: Any) -> dict[str, TensorSpec]:
    return {name: TensorSpec(dtype="BF16", shape=tuple(value.shape)) for name, value in named}


def test_w12_an_unknown_name_is_for_the_server_to_refuse(
    load: Load, bare: dict[str, torch.Tensor]
) -> None:
    model = load()
    model.model.value_head = nn.Linear(64, 1, bias=False)
    sent = specs(policy_tensors(model.named_parameters()))
    with pytest.raises(ManifestError, match=r"unknown tensor.*model\.value_head\.weight"):
        compare(sent, specs(bare.items()))


def test_w12_two_tensors_under_one_name() -> None:
    """The same tensor again is one; another is refused, even at the first one's old address."""
    one = torch.ones(64)
    assert len(list(policy_tensors([("x", one), ("module.x", one), ("x", one.data)]))) == 1
    with pytest.raises(ParityError, match=r"Two tensors .* 'x' .*: x and module\.x"):
        list(policy_tensors([("x", one), ("module.x", one.clone())]))
    with pytest.raises(ParityError, match="Two tensors"):  # two pieces of one flat buffer
        list(policy_tensors([("x", one[:32]), ("module.x", one[32:])]))

    memory = np.ones(64, dtype=np.float32)  # what an allocator gives away again once it is free

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield "x", torch.from_numpy(memory)
        yield "module.x", torch.from_numpy(memory)

    with pytest.raises(ParityError, match="Two tensors"):
        list(policy_tensors(gathered()))


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.empty(0), r"empty \(shape \[0\]\)"),
        (torch.empty(4, device="meta"), "on the meta device"),
    ],
)
def test_w13_what_was_not_gathered_is_refused(tensor: torch.Tensor, found: str) -> None:
    """ZeRO-3 leaves empty parameters; DTensors are in tests/trainer/test_gathering.py."""
    with pytest.raises(ParityError, match=rf"x is {found}.*not gathered"):
        list(policy_tensors([("x", tensor)]))


# --- merged values ------------------------------------------------------------------------------

ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "all linear": lambda: lora(target_modules="all-linear", use_rslora=True),
    "head": lambda: lora(modules_to_save=["lm_head"]),
    "embedding": lambda: lora(target_modules=["embed_tokens"]),
    "dora": lambda: lora(use_dora=True),
    "loha": lambda: LoHaConfig(r=4, target_modules=["q_proj"]),
    "ia3": lambda: IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_merged_tensors_are_the_adapted_model(load: Load, adapter: str) -> None:
    """In float32 a bare model of what is sent has the adapted model's logits."""
    model = peft(load(dtype=torch.float32), ADAPTERS[adapter]())
    served = load(dtype=torch.float32)
    start = served(IDS).logits
    served.load_state_dict(dict(policy_tensors(merged_tensors(model))))
    with torch.no_grad():
        expected = model(IDS).logits
        assert (expected - start).abs().max() > 0.05
        assert (served(IDS).logits - expected).abs().max() < 2e-4


@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
def test_merged_lora_is_computed_in_float32(load: Load, factors: torch.dtype) -> None:
    """base + scaling * B @ A, without PEFT's rounding of a bf16 adapter's product to bf16."""
    model = peft(load())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(factors)
    sent = dict(policy_tensors(merged_tensors(model)))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    expected = layer.base_layer.weight.double() + 8 / 4 * b @ a
    name = "model.layers.0.self_attn.q_proj.weight"
    assert sent[name].dtype == torch.float32
    assert (sent[name] - expected).abs().max() < 1e-6
    assert sent["model.layers.0.self_attn.k_proj.weight"].dtype == torch.bfloat16
    if factors == torch.bfloat16:  # the control
        stock = layer.base_layer.weight.double() + layer.get_delta_weight("default").double()
        assert (stock - expected).abs().max() > 1e-5


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], model: Any) -> set[str]:
    return {name for name, value in model.state_dict().items() if not value.equal(before[name])}


def test_merging_leaves_every_bit_in_place(load: Load) -> None:
    """Five syncs; PEFT's own merge and unmerge in bf16, the control, change the base at one."""
    model = peft(load(), lora(target_modules="all-linear", modules_to_save=["lm_head"]))
    before = bits(model)
    for _ in range(5):
        list(policy_tensors(merged_tensors(model)))
    assert changed(before, model) == set()
    first = dict(policy_tensors(merged_tensors(model)))
    model.merge_adapter()
    merged = {n: value.clone() for n, value in policy_tensors(model.named_parameters())}
    assert all(merged[name].equal(value.bfloat16()) for name, value in first.items())
    model.unmerge_adapter()
    drifted = changed(before, model)
    assert len(drifted) == 14 and all(name.endswith("base_layer.weight") for name in drifted)


def test_the_documented_drift() -> None:
    """bf16(1.0) + 0.003 - 0.003, as merge and unmerge round it."""
    weight, delta = torch.ones(1, dtype=torch.bfloat16), torch.tensor([0.003])
    weight += delta
    assert weight.item() == 1.0
    weight -= delta.to(torch.bfloat16)
    assert weight.item() == 0.99609375


def test_only_the_active_adapter_is_merged(load: Load) -> None:
    model = peft(load(), lora(modules_to_save=["lm_head"]))
    alone = dict(policy_tensors(merged_tensors(model)))
    model.add_adapter("ref", lora(modules_to_save=["lm_head"]))
    for name, parameter in model.named_parameters():
        if ".ref." in name:
            parameter.data.add_(1.0)
    both = dict(policy_tensors(merged_tensors(model)))
    assert both.keys() == alone.keys()
    assert all(both[name].equal(value) for name, value in alone.items())
    model.set_adapter("ref")
    other = dict(policy_tensors(merged_tensors(model)))
    assert {name for name in other if not other[name].equal(alone[name])} == {
        "lm_head.weight",
        *(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)),
    }


def test_what_cannot_be_merged_is_refused(load: Load) -> None:
    alora = lora(task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    with pytest.raises(ParityError, match=r"cannot merge the adapter of .*q_proj.*aLoRA"):
        list(merged_tensors(peft(load(), alora)))
    model = peft(load())
    layer = model.get_base_model().model.layers[1].self_attn.q_proj.base_layer
    whole = layer.weight
    layer.weight = nn.Parameter(whole.to(torch.int8), requires_grad=False)
    with pytest.raises(ParityError, match=r"layers\.1.*q_proj.*int8: the base model is quantised"):
        list(merged_tensors(model))
    layer.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    with pytest.raises(ParityError, match=r"layers\.1.*q_proj.*not gathered"):
        list(merged_tensors(model))


# --- ties ---------------------------------------------------------------------------------------

TIED_HEADS = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}


@pytest.fixture
def names(tiny_model: Callable[[Kind], Path]) -> Callable[[Kind], set[str]]:
    """What a server of this model expects."""
    return lambda kind: (
        weights_of(tiny_model(kind)).keys() - ({"lm_head.weight"} if kind == "tied" else set())
    )


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_w11_pairs_that_agree(load: Load, names: Any, kind: Kind) -> None:
    """W11: tied sends the embedding only, untied both; the names are the server's."""
    pairs = [load(kind), peft(load(kind)), torch.compile(load(kind))]
    pairs.append(peft(load(kind), lora(**TIED_HEADS)) if kind == "tied" else with_head(load(kind)))
    for model in pairs:
        check_ties(model, names(kind))
        sent = dict(policy_tensors(merged_tensors(model)))
        assert sent.keys() == names(kind)
        assert ("lm_head.weight" in sent) == (kind == "untied")


def untied_by_hand(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


BROKEN: dict[str, tuple[Kind, Callable[[Any], Any], Kind, str]] = {
    "head in modules_to_save": ("tied", with_head, "tied", "it is another tensor"),
    "untied by hand": ("tied", untied_by_hand, "tied", "it is another tensor"),
    "adapter on the embedding": (
        "tied",
        lambda model: get_peft_model(model, lora(target_modules=["embed_tokens"])),
        "tied",
        "an adapter changes one of the two",
    ),
    "server unties": ("tied", peft, "untied", r"server has a head of its own \(lm_head"),
    "server ties": ("untied", peft, "tied", r"trainer has a head of its own \(lm_head"),
    "server ties, trained head": ("untied", with_head, "tied", "expects no such tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_w11_contradictions_are_refused_before_training(load: Load, names: Any, case: str) -> None:
    """W11: also while the two tensors still have equal values."""
    kind, wrap, served, found = BROKEN[case]
    with pytest.raises(ParityError, match=found):
        check_ties(wrap(load(kind)), names(served))


def logits_gap(model: Any, served: Any, sent: dict[str, torch.Tensor]) -> float:
    """Largest difference between the trainer's logits and those of a tied server, in float32."""
    loaded = served.load_state_dict(sent, strict=False)
    assert set(loaded.missing_keys) <= {"lm_head.weight"}
    served.tie_weights()
    with torch.no_grad():
        return float((model(IDS).logits - served(IDS).logits).abs().max())


def test_w11_what_slips_through_without_the_check(load: Load, names: Any) -> None:
    """The controls: a head that vLLM drops, and an adapter that passes every comparison of names
    and shapes and still serves another head than the trainer's."""
    model = peft(load("tied", torch.float32), lora(modules_to_save=["lm_head"]))
    sent = dict(policy_tensors(merged_tensors(model)))
    assert sent.pop("lm_head.weight") is not None  # as vLLM does, silently
    assert sent.keys() == names("tied")
    assert logits_gap(model, load("tied", torch.float32), sent) > 0.1

    model = peft(load("tied", torch.float32), lora(target_modules=["embed_tokens"]))
    sent = dict(policy_tensors(merged_tensors(model)))
    assert sent.keys() == names("tied")
    assert logits_gap(model, load("tied", torch.float32), sent) > 0.1

    model = peft(load("tied", torch.float32), lora(**TIED_HEADS))
    sent = dict(policy_tensors(merged_tensors(model)))
    assert logits_gap(model, load("tied", torch.float32), sent) < 2e-4


# --- ParityGeneration ---------------------------------------------------------------------------


class Recorder:
    """In place of WeightSync: rounds what it gets, and can fail half-way."""

    fail_at: int | None = None

    def __init__(self, client: Any, transport: str) -> None:
        self.expected = client.expected
        self.pushed: list[dict[str, torch.Tensor]] = []

    def push(self, tensors: Any, kv: str = "keep") -> int:
        policy = {}
        for index, (name, tensor) in enumerate(tensors):
            if index == self.fail_at:
                raise ParityError("Full disk.", "Nothing fits.", "make room.")
            policy[name] = tensor.to(torch.bfloat16, copy=True)
        self.pushed.append(policy)
        return len(self.pushed)


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch, names: Any) -> Callable[[Any, Kind], Any]:
    from trl_callbacks import generation

    monkeypatch.setattr(generation, "WeightSync", Recorder)

    def make(model: Any, served: Kind) -> Any:
        return generation.ParityGeneration(
            model=model,
            accelerator=Accelerator(cpu=True),
            processing_class=None,
            client=SimpleNamespace(expected=dict.fromkeys(names(served))),
            seed=None,
        )

    return make


def test_five_updates_of_a_peft_trainer(load: Load, generation: Any, names: Any) -> None:
    """The model is the same to the bit; TRL's own sync, the control, changes it."""
    model: PeftModel = peft(load())
    backend = generation(model, "untied")
    for seed in range(5):
        trained(model, seed)
        before = bits(model)
        backend.sync_weights()
        assert changed(before, model) == set()
    first, last = backend._sync.pushed[0], backend._sync.pushed[-1]
    assert len(backend._sync.pushed) == 5 and first.keys() == last.keys() == names("untied")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not first[name].equal(last[name])
    stock = {name: value.clone() for name, value in backend._iter_named_params()}
    assert all(stock[name].equal(value) for name, value in last.items())
    assert changed(before, model) != set()


def test_w11_the_backend_asks_before_it_trains(load: Load, generation: Any) -> None:
    with pytest.raises(ParityError, match="another tensor"):
        generation(with_head(load("tied")), "tied")


def test_w20_a_failed_update_finishes_the_gathers(
    load: Load, generation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes are in the same collectives, and PEFT unmerges at the end of them."""
    monkeypatch.setattr(Recorder, "fail_at", 3)
    backend = generation(load(), "untied")
    gathered: list[str] = []
    stock = backend._iter_named_params

    def counting() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stock():
            gathered.append(name)
            yield name, tensor

    backend._iter_named_params = counting
    with pytest.raises(ParityError, match="Full disk"):
        backend.sync_weights()
    assert gathered == [name for name, _ in load().named_parameters()]
