"""Recorded expert routes drive Megatron's routers, so that an MoE policy is scored on the experts the sampler used.

Megatron's own switch, ``--moe-enable-routing-replay``, gives every router a ``RouterReplay``. Ours takes its place: it
keeps a router's own choice for the tokens whose routes the engine did not report, and finds the routes of the right
micro-batch when activations are recomputed in backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..rollouts import ExpertRoutes

TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayedRoutes(RouterReplay):
    """One router's routes: the sampler's where it reported them, else the router's own.

    Recomputation runs inside a backward pass, when another micro-batch's routes may be set. What a forward pass without
    gradients used is therefore kept, and taken again, first in first out, by the recomputations: both pipeline
    schedules run backward in the order of forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._routes: Tensor | None = None
        self._recomputed: deque[Tensor] = deque()

    def start_step(self) -> None:
        """Forget the step before."""
        self._routes = None
        self._recomputed.clear()

    def set_routes(self, routes: Tensor) -> None:
        """Of the micro-batch whose forward pass comes next: integer ``[tokens, top-k]``; -1 where not reported."""
        self._routes = routes

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Megatron's class: (scores ``[tokens, top-k]``, experts ``[tokens, top-k]``).

        Raises:
            RuntimeError: for a recomputation whose forward pass kept no routes: it would take other experts.
        """
        assert default_compute_topk is not None
        own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes = self._routes
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass: this is a recomputation
            if routes is not None:
                if not self._recomputed:
                    raise RuntimeError(
                        "a router is recomputed more often than its forward pass ran without gradients, so its expert "
                        "routes are not known: change --recompute-granularity or remove --moe-enable-routing-replay"
                    )
                routes = self._recomputed.popleft()
        elif routes is not None and not torch.is_grad_enabled():
            self._recomputed.append(routes)
        if routes is None:
            return own
        experts = torch.where((routes >= 0).all(dim=1, keepdim=True), routes, own[1])  # int64, as Megatron's own
        return scores.gather(1, experts), experts


class RouteReplay:
    """The routers of one model chunk.

    Args:
        model: a chunk of the model, possibly wrapped.
        config: of the model.
        recorded: shape of the buffer's routes.

    Raises:
        ValueError: naming the flag, where routes cannot drive this model.
    """

    def __init__(self, model: nn.Module, config: TransformerConfig, recorded: ExpertRoutes):
        check_routes(config, recorded)
        self._topk = recorded.topk
        place = {layer: i for i, layer in enumerate(moe_layers(config))}
        self._routers: list[tuple[int, ReplayedRoutes]] = []
        for module in model.modules():
            if isinstance(module, TopKRouter):
                _forget(module.router_replay)
                module.router_replay = ReplayedRoutes()
                self._routers.append((place[module.layer_number], module.router_replay))
        layers = [layer for layer, _ in self._routers]
        self._first, self._last = min(layers, default=0), max(layers, default=0)
        self._step = -1

    def set_routes(self, routes: Tensor, step: int, part: int = 0, parts: int = 1) -> None:
        """Of the micro-batch whose forward pass comes next.

        Args:
            step: the optimizer step under way.
            routes: integer ``[b, s, layers * top-k]``, positions as in the micro-batch's tokens.
            part: which part of the sequence this rank's routers see: the tensor-parallel rank under sequence
                parallelism.
            parts: of how many.
        """
        if step != self._step:
            self._step = step
            for _, router in self._routers:
                router.start_step()
        mine = routes.chunk(parts, dim=1)[part] if parts > 1 else routes
        own = mine.unflatten(2, (-1, self._topk))[:, :, self._first : self._last + 1]  # all that is kept till backward
        by_layer = own.transpose(0, 1).flatten(0, 1).contiguous()
        for layer, router in self._routers:
            router.set_routes(by_layer[:, layer - self._first])


def moe_layers(config: TransformerConfig) -> list[int]:
    """Numbers of the MoE layers, the model's first layer being 1 (``--moe-layer-freq``)."""
    frequency = config.moe_layer_freq
    pattern = (
        [int(layer % frequency == 0) for layer in range(config.num_layers)] if isinstance(frequency, int) else frequency
    )
    return [layer + 1 for layer, is_moe in enumerate(pattern) if is_moe]


def check_routes(config: TransformerConfig, recorded: ExpertRoutes) -> None:
    """Refuse routes of another model, and settings under which Megatron would ignore them.

    Raises:
        ValueError: naming the flag.
    """
    layers = len(moe_layers(config))
    for flag, trainer, sampler in (
        ("--num-experts", config.num_moe_experts, recorded.experts),
        ("--moe-router-topk", config.moe_router_topk, recorded.topk),
        ("--num-layers with --moe-layer-freq: MoE layers", layers, recorded.layers),
    ):
        if trainer != sampler:
            raise ValueError(f"{flag} {trainer}: the buffer's expert routes were recorded with {sampler}")
    if config.moe_router_fusion:
        raise ValueError("--moe-router-fusion ignores replayed routes; remove it")
    modules = [module.name for module in config.cuda_graph_modules or []]
    if config.cuda_graph_impl != "none" and (not modules or any(name.startswith("moe") for name in modules)):
        raise ValueError(
            f"--cuda-graph-impl {config.cuda_graph_impl} would capture the routes of one micro-batch and use them for "
            "all; remove it, or leave the MoE layers out: --cuda-graph-modules attn"
        )
    balancing = config.moe_router_load_balancing_type
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind in ("sinkhorn", "quantile_balancing"):
            raise ValueError(f"--moe-router-load-balancing-type {kind} ignores replayed routes; use none or aux_loss")


def _forget(replay: RouterReplay | None) -> None:
    """Take a replaced instance out of Megatron's list of all."""
    instances = RouterReplay.global_router_replay_instances
    instances[:] = [each for each in instances if each is not replay]
