"""Scoring leaves the quantization state of training as it was: on stand-ins, and on Transformer Engine itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_sc.precision.scoring_guard import UnprotectedStateError, scoring
from tests import transformer_engine_stand_in as stand_in
from tests.distributed import run_ranks

WIDTH = 16
PLACES = ("before a step", "in the first forward step", "between micro-batches", "after the update")


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> type:
    """The stand-in's state manager where the guard looks for Transformer Engine's."""
    module = ModuleType("transformer_engine.pytorch.quantization")
    module.FP8GlobalStateManager = stand_in.FP8GlobalStateManager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    stand_in.FP8GlobalStateManager.quantization_state = stand_in.GlobalState()
    return stand_in.FP8GlobalStateManager


def build(recompute: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(stand_in.Linear(WIDTH, recompute), nn.SiLU(), stand_in.Linear(WIDTH, recompute))


def batch(seed: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def start_step(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True


def train(
    model: nn.Sequential, at: dict[str, Callable[[], Any]] | None = None, recompute: bool = False
) -> list[Tensor]:
    """Three steps of two micro-batches; calls ``at[place]`` in every step. Losses, then weights and buffers."""
    at = at or {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = []
    for step in range(3):
        at.get("before a step", lambda: None)()
        start_step(model)
        at.get("in the first forward step", lambda: None)()  # Megatron's schedule has raised the flag by then
        for micro_batch in range(2):
            if micro_batch:
                at.get("between micro-batches", lambda: None)()
            with stand_in.autocast(stand_in.Recipe()):
                loss = model(batch(10 * step + micro_batch)).square().mean()
            if recompute:
                record += [model[0].kept_scale(), model[2].kept_scale()]
            loss.backward()
            record.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        at.get("after the update", lambda: None)()
    for layer in (model[0], model[2]):
        own = layer.fp8_meta["scaling_fwd"]
        record += [layer.weight.detach().clone(), own.scale.clone(), own.amax_history.clone()]
    return record


def score(model: nn.Module, size: float = 30.0) -> Tensor:
    """A forward pass on larger inputs than training's."""
    with torch.no_grad(), stand_in.autocast(stand_in.Recipe()):
        output: Tensor = model(batch(99, size))
        return output


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("places", [*([place] for place in PLACES), PLACES])
def test_training_is_the_same_to_the_last_bit_with_scores_in_between(manager, places, recompute):
    expected = train(build(recompute), recompute=recompute)
    manager.quantization_state = stand_in.GlobalState()
    model = build(recompute)

    def guarded() -> None:
        with scoring(model):
            score(model)

    assert same(train(model, dict.fromkeys(places, guarded), recompute), expected)
    manager.quantization_state = stand_in.GlobalState()
    model = build(recompute)
    unguarded = train(model, dict.fromkeys(places, lambda: score(model)), recompute)
    assert not same(unguarded, expected), "the stand-in must be one that a score disturbs"


def test_a_score_uses_the_weights_of_now(manager):
    model = build()
    train(model)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    stale = score(model)
    with scoring(model):
        assert model[0].is_first_microbatch
        fresh = score(model)
    model[0]._fp8_workspaces.clear()
    model[2]._fp8_workspaces.clear()
    assert not torch.equal(stale, fresh)
    assert torch.equal(score(model), fresh)


def test_training_does_not_use_the_weights_that_were_scored(manager):
    """An embedded sampler changes the weights, scores, and puts them back."""
    expected = train(build())
    manager.quantization_state = stand_in.GlobalState()
    model = build()

    def sample() -> None:
        with scoring(model):
            before = model[0].weight.detach().clone()
            model[0].weight.mul_(1.5)
            score(model)
            model[0].weight.copy_(before)

    assert same(train(model, {"between micro-batches": sample}), expected)


def test_the_same_tensors_are_restored_because_others_hold_views_of_them(manager):
    model = build()
    train(model)
    own = model[0].fp8_meta["scaling_fwd"]
    workspace, amax = model[0]._fp8_workspaces["weight"], own.amax_history.clone()

    def fail() -> None:
        with scoring(model):
            score(model)
            assert not torch.equal(own.amax_history, amax)
            raise RuntimeError("score failed")

    with pytest.raises(RuntimeError, match="score failed"):
        fail()
    assert torch.equal(own.amax_history, amax)
    assert model[0]._fp8_workspaces["weight"] is workspace
    assert model[0].quantizers["scaling_fwd"][0].amax.data_ptr() == own.amax_history.data_ptr()
    assert manager.quantization_state.global_amax_history_buffer["forward_delayed"][0] is own.amax_history
    assert not model[0].is_first_microbatch


def test_the_autocast_that_scoring_runs_in_is_restored(manager):
    model = build()
    with stand_in.autocast(stand_in.Recipe()):
        manager.quantization_state.is_first_fp8_module = True
        with scoring(model):
            manager.quantization_state.is_first_fp8_module = False
            manager.quantization_state.fp8_enabled = False
        assert manager.quantization_state.fp8_enabled
        assert manager.quantization_state.is_first_fp8_module


def test_scores_nest(manager):
    model = build()
    train(model)
    own = model[0].fp8_meta["scaling_fwd"]
    before = own.amax_history.clone()
    with scoring(model):
        outer = score(model, 5.0)
        within = own.amax_history.clone()
        with scoring(model):
            score(model, 50.0)
        assert torch.equal(own.amax_history, within)
        assert torch.equal(score(model, 5.0), outer)
    assert torch.equal(own.amax_history, before)


def test_modules_without_quantization_are_only_run_without_gradients():
    model = nn.Linear(3, 3)
    with scoring(model):
        assert not model(torch.ones(2, 3)).requires_grad
    assert model(torch.ones(2, 3)).requires_grad


def sampled_on_rank() -> tuple[list[Tensor], list[Tensor]]:
    """Training without, and with what every sampler of the plugin runs inside."""
    from unittest import mock

    from megatron_sc.sampling.isolation import inference_only

    module = ModuleType("transformer_engine.pytorch.quantization")
    module.FP8GlobalStateManager = stand_in.FP8GlobalStateManager  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        stand_in.FP8GlobalStateManager.quantization_state = stand_in.GlobalState()
        expected = train(build())
        stand_in.FP8GlobalStateManager.quantization_state = stand_in.GlobalState()
        model = build()

        def sample() -> None:
            with inference_only(model):
                score(model)

        return expected, train(model, dict.fromkeys(PLACES, sample))


def test_the_embedded_sampler_is_guarded():
    ((expected, found),) = run_ranks(sampled_on_rank, 1, megatron=True)
    assert same(found, expected)


class Stateful(stand_in.Quantizer):
    """Keeps a list."""

    def __init__(self) -> None:
        super().__init__(torch.ones(1), torch.zeros(1))
        self.seen: list[int] = []


class PlainQuantizer(stand_in.Quantizer):
    """Keeps a number and a quantizer."""

    def __init__(self) -> None:
        super().__init__(torch.ones(1), torch.zeros(1))
        self.inner = stand_in.Quantizer(torch.ones(1), torch.zeros(1))
        self.calls = 3


def custom(quantizer: stand_in.Quantizer) -> nn.Module:
    model = stand_in.Linear(WIDTH)
    model.fp8_meta["recipe"] = stand_in.Recipe("custom")
    model.fp8_meta["scaling_fwd"] = SimpleNamespace(_ds_state=None)
    model.quantizers["scaling_fwd"] = [quantizer]
    return model


def test_a_custom_recipe_is_restored_through_nested_quantizers_or_refused(manager):
    quantizer = PlainQuantizer()
    with scoring(custom(quantizer)):
        quantizer.calls = 4
        quantizer.inner.amax.fill_(7.0)
    assert quantizer.calls == 3
    assert quantizer.inner.amax == 0.0
    with pytest.raises(UnprotectedStateError, match="attribute seen of quantizer Stateful is a list"):
        scoring(custom(Stateful())).__enter__()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cuda_graph_impl": "local", "fp8": "e4m3"}, "--cuda-graph-impl none"),
        ({"cuda_graph_impl": "transformer_engine", "fp4": "e2m1"}, "--cuda-graph-impl none"),
        ({"use_kitchen": True}, "Kitchen"),
    ],
)
def test_what_cannot_be_protected_is_refused(manager, config, message):
    model = build()
    model.config = SimpleNamespace(**config)
    with pytest.raises(UnprotectedStateError, match=message):
        scoring(model).__enter__()
    model.config = SimpleNamespace(cuda_graph_impl="none", fp8="e4m3")
    with scoring(model):
        pass


def test_a_transformer_engine_that_keeps_its_state_elsewhere_is_refused(manager, monkeypatch):
    monkeypatch.delattr(stand_in.FP8GlobalStateManager, "quantization_state")
    with pytest.raises(UnprotectedStateError, match="quantization_state"):
        scoring(build()).__enter__()


def test_operations_of_the_fuser_are_restored(manager):
    """``te.ops`` keeps a dictionary of metas, one a direction, and no weight copies."""
    operation = nn.Module()
    state = stand_in.DelayedScalingRecipeState(2)
    operation._fp8_metas = {"forward": {"scaling_fwd": state, "recipe": stand_in.Recipe()}, "backward": None}
    operation._quantizers = {"forward": state.make_quantizers(), "backward": []}
    with scoring(operation):
        operation._quantizers["forward"][0].quantize(torch.full((2, 2), 9.0))
        assert state.amax_history[0, 0] == 9.0
    assert state.amax_history.abs().max() == 0.0


@contextmanager
def transformer_engine_autocast(recipe: Any) -> Iterator[None]:
    import transformer_engine.pytorch as te

    with te.autocast(enabled=True, recipe=recipe):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
def test_transformer_engine_trains_the_same_with_scores_in_between(place):
    """``te.Linear`` as Megatron's ``TELinear`` calls it, under every recipe that the device has."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import quantization

    supported = {
        recipes.DelayedScaling: quantization.check_fp8_support,
        recipes.Float8CurrentScaling: quantization.check_fp8_support,
        recipes.Float8BlockScaling: quantization.check_fp8_block_scaling_support,
        recipes.MXFP8BlockScaling: quantization.check_mxfp8_support,
    }
    assert supported[recipes.DelayedScaling]()[0]
    for kind in (kind for kind, check in supported.items() if check()[0]):
        expected = _train_transformer_engine(kind(), {})
        assert same(_train_transformer_engine(kind(), {place: scoring}), expected), kind
        if kind is recipes.DelayedScaling:
            assert not same(_train_transformer_engine(kind(), {place: lambda _: nullcontext()}), expected)


def _train_transformer_engine(recipe: Any, guards: dict[str, Callable[[nn.Module], Any]]) -> list[Tensor]:
    """Three steps of two micro-batches of two ``te.Linear``; ``guards[place]`` is entered around a score there."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(te.Linear(128, 128, bias=False, params_dtype=torch.bfloat16) for _ in range(2)))
    for layer in model:
        layer.is_first_microbatch = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = []

    def forward(inputs: Tensor) -> Tensor:
        with transformer_engine_autocast(recipe):
            for layer in model:
                first, layer.is_first_microbatch = layer.is_first_microbatch, False
                inputs = layer(inputs, is_first_microbatch=first)
        return inputs

    def inputs(seed: int, size: float = 1.0) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return size * torch.randn(128, 128, generator=generator, device="cuda", dtype=torch.bfloat16)

    def maybe_score(place: str) -> None:
        if place in guards:
            with guards[place](model), torch.no_grad():
                forward(inputs(99, 30.0))

    for step in range(3):
        maybe_score("before a step")
        for layer in model:
            layer.is_first_microbatch = True
        maybe_score("in the first forward step")
        for micro_batch in range(2):
            if micro_batch:
                maybe_score("between micro-batches")
            loss = forward(inputs(10 * step + micro_batch)).float().square().mean()
            loss.backward()
            record.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        maybe_score("after the update")
    return record + [weight.detach().clone() for weight in model.parameters()]
