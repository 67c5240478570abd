"""Replayed routes on Megatron's own router: the recorded experts, the router's own, slices, recomputation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from megatron_sc.rollouts import ExpertRoutes
from tests.distributed import run_ranks

EXPERTS, TOPK, HIDDEN = 4, 2, 8


def config(**options: object):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=3, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=TOPK,
        moe_router_load_balancing_type="none", moe_layer_freq=[1, 0, 1], add_bias_linear=False,
        moe_enable_routing_replay=True, **options,
    )  # fmt: skip


def routers(settings):
    """Layers 1 and 3 as a model; 2 is dense."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = torch.nn.ModuleList([TopKRouter(settings, groups) for _ in range(2)])
    for number, router in enumerate(model):
        router.set_layer_number(2 * number + 1)
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(number))
    return model


def chosen(router, hidden: torch.Tensor) -> list[set[int]]:
    """The experts of each token of hidden states [s, b, h], s-major."""
    _, routing_map = router(hidden)
    return [set(row.nonzero().flatten().tolist()) for row in routing_map]


def recorded_experts_are_used() -> None:
    from megatron_sc.training.replay import RouteReplay

    settings = config()
    model = routers(settings)
    hidden = torch.randn(4, 2, HIDDEN, generator=torch.Generator().manual_seed(5))  # s = 4, b = 2
    own = [chosen(router, hidden) for router in model]
    replay = RouteReplay(model, settings, ExpertRoutes(2, TOPK, EXPERTS))
    routes = torch.tensor([[i % EXPERTS, (i + 1) % EXPERTS] for i in range(2 * 4 * 2)]).view(2, 4, 2 * TOPK).int()
    routes[1, 3] = -1  # the last token of the second rollout was not reported
    routes[0, 1, 1] = -1  # nor was one expert of this token, so none of this layer's is used
    replay.set_routes(routes, step=0)
    for layer, router in enumerate(model):
        found = chosen(router, hidden)
        for position in range(4):
            for row in range(2):
                wanted = routes[row, position].view(2, TOPK)[layer].tolist()
                place = position * 2 + row
                assert found[place] == (own[layer][place] if -1 in wanted else set(wanted)), (layer, position, row)
    # Under sequence parallelism the second rank's routers see the second half of the sequence.
    replay.set_routes(routes, step=0, part=1, parts=2)
    half = chosen(model[0], hidden[2:])
    replay.set_routes(routes, step=0)
    assert half == chosen(model[0], hidden)[4:]


def recomputation_takes_the_routes_of_its_own_micro_batch() -> None:
    from megatron.core.tensor_parallel import checkpoint

    from megatron_sc.training.replay import RouteReplay

    settings = config()
    model = routers(settings)
    router = model[0]
    replay = RouteReplay(model, settings, ExpertRoutes(2, TOPK, EXPERTS))
    batches = [torch.randn(3, 1, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    routes = [torch.full((1, 3, 4), -1).int(), torch.full((1, 3, 4), -1).int()]
    routes[0][..., :2] = torch.tensor([0, 1])
    routes[1][..., :2] = torch.tensor([2, 3])

    def gradients(recompute: bool, step: int) -> list[torch.Tensor]:
        inputs = [batch.clone().requires_grad_() for batch in batches]
        outputs = []
        for values, route in zip(inputs, routes, strict=True):  # both are in flight
            replay.set_routes(route, step)
            run = lambda x: router(x)[0].square()  # noqa: E731
            outputs.append(checkpoint(run, False, values) if recompute else run(values))
        for output in outputs:
            output.sum().backward()
        return [values.grad for values in inputs]

    plain_gradients = gradients(False, 0)
    replay.set_routes(routes[1], 0)
    checkpoint(
        lambda x: router(x)[0], False, batches[1].clone().requires_grad_()
    )  # a forward pass that came to nothing
    for plain, again in zip(plain_gradients, gradients(True, 1), strict=True):
        assert plain.abs().sum() > 0
        torch.testing.assert_close(again, plain, rtol=0, atol=0)


def contradictions_are_refused() -> None:
    from megatron.core.transformer.enums import CudaGraphModule

    from megatron_sc.training.replay import RouteReplay

    for recorded, message in (
        (ExpertRoutes(3, TOPK, EXPERTS), "MoE layers 2: the buffer's expert routes were recorded with 3"),
        (ExpertRoutes(2, 1, EXPERTS), "--moe-router-topk 2"),
        (ExpertRoutes(2, TOPK, 8), "--num-experts 4"),
    ):
        with pytest.raises(ValueError, match=message):
            RouteReplay(torch.nn.ModuleList(), config(), recorded)
    settings = config()
    settings.moe_router_load_balancing_type = "sinkhorn"
    with pytest.raises(ValueError, match="--moe-router-load-balancing-type sinkhorn ignores"):
        RouteReplay(torch.nn.ModuleList(), settings, ExpertRoutes(2, TOPK, EXPERTS))
    for modules, is_refused in (
        ([], True), ([CudaGraphModule.moe_router], True), ([CudaGraphModule.attn], False),
    ):  # fmt: skip
        settings = config()
        settings.cuda_graph_impl, settings.cuda_graph_modules = "local", modules  # without a GPU Megatron refuses it
        refused = pytest.raises(ValueError, match="--cuda-graph-impl local would capture the routes")
        with refused if is_refused else nullcontext():
            RouteReplay(torch.nn.ModuleList(), settings, ExpertRoutes(2, TOPK, EXPERTS))


def a_recomputation_without_routes_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    from megatron_sc.training.replay import RouteReplay

    settings = config()
    model = routers(settings)
    replay = RouteReplay(model, settings, ExpertRoutes(2, TOPK, EXPERTS))
    replay.set_routes(torch.zeros((1, 3, 4)).int(), step=0)
    hidden = torch.randn(3, 1, HIDDEN, requires_grad=True)
    scores = checkpoint(lambda x: model[0](x)[0], hidden, use_reentrant=False)  # its forward pass has gradients
    with pytest.raises(RuntimeError, match="recomputed more often"):
        scores.sum().backward()


def a_chunk_takes_the_routes_of_its_own_layers() -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from megatron_sc.training.replay import RouteReplay

    settings = config()
    model = routers(settings)[1:]  # a pipeline stage that holds layer 3 alone
    instances = len(RouterReplay.global_router_replay_instances)
    replay = RouteReplay(model, settings, ExpertRoutes(2, TOPK, EXPERTS))
    assert len(RouterReplay.global_router_replay_instances) == instances  # ours in the place of Megatron's
    routes = torch.tensor([[[0, 1, 2, 3], [1, 2, 0, 3], [2, 3, 0, 1]]]).int()  # of layers 1 and 3
    replay.set_routes(routes, step=0)
    hidden = torch.randn(3, 1, HIDDEN, generator=torch.Generator().manual_seed(7))
    assert chosen(model[0], hidden) == [{2, 3}, {0, 3}, {0, 1}]
    with torch.no_grad():
        scores, _ = model[0](hidden)
        logits = (hidden.flatten(0, 1) @ model[0].weight.T).gather(1, routes[0, :, TOPK:].long())
    torch.testing.assert_close(scores.gather(1, routes[0, :, TOPK:].long()), logits.softmax(dim=1))
    replay.set_routes(routes - 10, step=1)  # none reported: nothing of the step before is left
    _, own = routers(settings)[1](hidden)
    assert chosen(model[0], hidden) == [set(row.nonzero().flatten().tolist()) for row in own]


def on_megatron(name: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    try:
        model_parallel_cuda_manual_seed(1)
        globals()[name]()
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    "name",
    [
        "recorded_experts_are_used",
        "recomputation_takes_the_routes_of_its_own_micro_batch",
        "contradictions_are_refused",
        "a_recomputation_without_routes_is_refused",
        "a_chunk_takes_the_routes_of_its_own_layers",
    ],
)
def test_replay(name):
    run_ranks(on_megatron, 1, name, megatron=True)
