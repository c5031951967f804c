"""Mixture-of-experts layer: route, dispatch, apply the experts, combine; and its router, which
chooses the experts of each token, with expert bias, noise, replay and capacity, aux losses and
records of the expert load.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.kernels.activation import GatedActivation, weighted_activate, weighted_gated
from megalith.kernels.backend import AUTO, Backends
from megalith.kernels.dropout import DropoutKey, hashed_uniform, key_of
from megalith.kernels.grouped_linear import experts
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs
from megalith.kernels.linear import PLAIN, CastMatmulOps
from megalith.kernels.packed import ContextShard
from megalith.kernels.routing import (
    Choice,
    attach_aux_loss,
    balancing_offsets,
    choose_experts,
    count_choices,
    drop_choices,
    expert_capacity,
    expert_weights,
    global_load_balancing_loss,
    load_balancing_loss,
    normalized_scores,
    score_experts,
    select_within_capacity,
    sinkhorn,
    top_k_indices,
    z_loss,
)
from megalith.nn.build import BuildContext
from megalith.nn.mlp import build_mlp
from megalith.parallel.collectives import all_gather_no_grad
from megalith.parallel.expert import DispatchedTokens, ExpertCapacity, build_transport
from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import Recomputed
from megalith.parallel.tensor import (
    ZEROS,
    ExpertMatrix,
    Init,
    ReplicatedLinear,
    TPComm,
    register_param,
)
from megalith.plan.recompute import recomputed_modules
from megalith.plan.shards import Shard, split_evenly

# --- load balancing of experts: aux losses, and records of routing statistics per step

LOSSES = "sequence", "batch", "global_batch", "z"
"""The aux losses of a router: load-balancing losses over a sequence, a microbatch and the global
batch; z-loss."""

LOSS_COEFFS = "sequence_coeff", "batch_coeff", "global_batch_coeff", "z_loss_coeff"
"""Fields of `AuxLossConfig`, in the order of `LOSSES`."""


@dataclass(slots=True)
class RoutingStats:
    """Routing statistics of a layer in a step, by microbatch. Recomputation overwrites them with
    equal values; evaluation does not change them."""

    counts: Tensor
    """float64 [microbatches, E]: local tokens routed to each expert, without padding and dropped
    choices."""

    chosen: Tensor
    """float64 [microbatches, E]: choices that the global-batch loss counts, over all ranks."""

    num_dropped: Tensor
    """float64 [microbatches]: local choices that were dropped."""

    losses: Tensor
    """float64 [microbatches, kinds of loss]: the local part of each aux loss, without its
    coefficient."""

    offsets: Tensor
    """float64 [microbatches, E + 1]: logit offsets that would have balanced the experts, and 1 if
    there were tokens."""


class LoadBalancing:
    """Attaches the aux losses to the router weights and records routing statistics."""

    def __init__(self, moe: MoEConfig, tp_comm: TPComm, mesh: Mesh) -> None:
        self.moe, self.tp_comm = moe, tp_comm
        self.sequence_group, self.batch_group = mesh.over("cp", "tp"), mesh.over("dp", "cp", "tp")
        self.weights = tuple(getattr(moe.aux_loss, name) for name in LOSS_COEFFS)
        self.record: RoutingStats | None = None

    def __call__(
        self, choice: Choice, before_dropping: Tensor, logits: Tensor, inputs: LayerInputs
    ) -> Choice:
        """Return the choice with the aux losses attached to its weights. Collective over the ranks
        that share tokens.

        before_dropping: int64 [t, k], the experts before token dropping.
        """
        share = inputs.router_inputs.aux_loss_scale
        if share is None:
            return choice
        record = self.step_record(share, logits)
        valid, sequence = (
            self.tp_comm.select_local(inputs.seq_params.valid),
            self.tp_comm.select_local(inputs.seq_params.document_ids),
        )
        one, experts = torch.zeros_like(sequence), self.moe.num_experts
        with torch.no_grad():
            used = count_choices(choice.experts, one, valid, sequences=1, num_experts=experts)
            record.counts[share.microbatch] = used[0]
            record.num_dropped[share.microbatch] = (valid.unsqueeze(1) & (choice.experts < 0)).sum()
        weights = choice.weights
        for kind, loss in self.losses(before_dropping, logits, valid, sequence, inputs, record):
            with torch.no_grad():
                record.losses[share.microbatch, kind] = loss * share.part
            weights = attach_aux_loss(weights, loss, share.weight * self.weights[kind])
        return Choice(choice.experts, weights)

    def losses(
        self,
        before_dropping: Tensor,
        logits: Tensor,
        valid: Tensor,
        sequence: Tensor,
        inputs: LayerInputs,
        record: RoutingStats,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the local part of every aux loss with a coefficient."""
        if not any(self.weights):
            return
        moe, by_sequence, by_batch, by_step, has_z_loss = (
            self.moe,
            *(weight > 0 for weight in self.weights),
        )
        shares = normalized_scores(logits, moe.router.score)
        counted_experts = (
            before_dropping
            if moe.aux_loss.of_choices
            else top_k_indices(shares.detach(), moe.top_k)
        )
        sequences = len(inputs.seq_params.lengths)
        counts = count_choices(
            counted_experts, sequence, valid, sequences=sequences, num_experts=moe.num_experts
        )
        counts = all_reduce_(counts, self.sequence_group)
        batch_counts = counts.sum(0, keepdim=True)
        if by_sequence:
            yield 0, load_balancing_loss(shares, counts, sequence, valid, top_k=moe.top_k)
        if by_batch:
            yield (
                1,
                load_balancing_loss(
                    shares, batch_counts, torch.zeros_like(sequence), valid, top_k=moe.top_k
                ),
            )
        if by_step:
            yield 2, self.global_loss(shares, batch_counts[0], valid, inputs, record)
        if has_z_loss:
            yield 3, z_loss(logits, batch_counts.sum() / moe.top_k, valid)

    def global_loss(
        self,
        shares: Tensor,
        counts: Tensor,
        valid: Tensor,
        inputs: LayerInputs,
        record: RoutingStats,
    ) -> Tensor:
        """Return the load-balancing loss over the step's microbatches up to this one, on all
        ranks."""
        assert inputs.router_inputs.aux_loss_scale is not None
        number = inputs.router_inputs.aux_loss_scale.microbatch
        # Ranks of the sequence group have equal counts, so the sum counts them several times.
        global_counts = all_reduce_(counts / self.sequence_group.size, self.batch_group)
        with torch.no_grad():
            record.chosen[number] = global_counts
        so_far = record.chosen[: number + 1].sum(0)
        return global_load_balancing_loss(shares, counts, so_far, valid, top_k=self.moe.top_k)

    def step_record(self, share: AuxLossScale, like: Tensor) -> RoutingStats:
        """Return the record of this step's microbatches."""
        m = share.microbatches
        if (
            self.record is None
            or len(self.record.counts) != m
            or self.record.counts.device != like.device
        ):
            return self.reset_record(m, like.device)
        return self.record

    def reset_record(self, num_microbatches: int, device: torch.device) -> RoutingStats:
        """Return a new record of zeros."""
        m, e = num_microbatches, self.moe.num_experts
        shapes = (m, e), (m, e), (m,), (m, len(LOSSES)), (m, e + 1)
        self.record = RoutingStats(
            *(torch.zeros(s, dtype=torch.float64, device=device) for s in shapes)
        )
        return self.record


@dataclass(frozen=True, slots=True)
class RouterNoise:
    """Random changes of routing in training, equal for a token under every layout and in
    recomputation."""

    router: RouterConfig
    layer: int
    tp_comm: TPComm

    def on_input(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Multiply x [t, h] by uniform noise between 1 - jitter and 1 + jitter."""
        if self.router.jitter == 0 or inputs.dropout_key is None:
            return x
        noise = self._draw(inputs.dropout_key, "jitter", x.shape[1])
        return x * (1 + self.router.jitter * noise).to(x.dtype)

    def for_logits(self, logits: Tensor, inputs: LayerInputs) -> Tensor:
        """Replace logits [t, E] by random ones with force_load_balancing, and shift each expert's
        with force_biased; gradients flow to the logits unchanged."""
        if inputs.dropout_key is None:
            return logits
        if self.router.force_load_balancing:
            drawn = self._draw(inputs.dropout_key, "forced balance", logits.shape[1]).to(
                logits.dtype
            )
            logits = logits + (drawn - logits).detach()
        if self.router.force_biased > 0:
            logits = logits + self.expert_shift(inputs.dropout_key.seed, logits)
        return logits

    def expert_shift(self, seed: int, logits: Tensor) -> Tensor:
        """Return a normal random shift of each expert's logits, [E], drawn once per run and layer.

        Source: Box and Muller 1958, Ann. Math. Statist. 29(2).
        """
        key, one = (
            key_of(seed, "router", "forced bias", self.layer),
            torch.zeros(1, dtype=torch.int64),
        )
        # Uniform numbers from 0 to 1.
        sizes, angles = ((hashed_uniform(key, one, 2 * logits.shape[1])[0] + 1) / 2).chunk(2)
        normal = (-2 * sizes.clamp(min=2.0**-32).log()).sqrt() * (2 * math.pi * angles).cos()
        return (self.router.force_biased * normal).to(logits)

    def _draw(self, source: DropoutKey, purpose: str, features: int) -> Tensor:
        place = key_of(source.seed, "router", purpose, self.layer)
        return hashed_uniform(place, self.tp_comm.select_local(source.numbers), features)


class Router(nn.Module):
    """Chooses each token's experts and their weights: x [t, h] -> [t, k], of the local tokens.

    Its weights are replicated. Source: Shazeer et al. 2017, arXiv:1701.06538, section 2.1.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        moe: MoEConfig,
        context: BuildContext,
    ) -> None:
        super().__init__()
        mesh, tp_comm, dtype = context.mesh, context.tp_comm, context.dtype
        self.layer = name.removesuffix(".moe")
        self.moe, self.sequence_group = moe, mesh.over("cp", "tp")
        self.cp_first = mesh.grid.strides("cp")[1] < mesh.grid.strides("tp")[1]
        """Whether cp is inside tp in `parallel.order`."""
        self.noise = RouterNoise(moe.router, context.dropout_layer, tp_comm)
        wide = torch.promote_types(dtype, torch.float32)
        inside = {"fp32": wide, "fp64": torch.float64, "model": dtype}[moe.router.dtype]
        shard = Shard.full(
            f"{name}.router", (moe.num_experts, config.hidden_size), invariant=tp_comm.invariant
        )
        matmul_ops = context.build_matmul_ops(shard.name)
        self.gate = ReplicatedLinear(
            context.spec(shard, Init(config.init_std)),
            dtype=dtype,
            matmul_ops=CastMatmulOps(inside) if matmul_ops is PLAIN else matmul_ops,
        )
        vector = partial(
            Shard.full, shape=(moe.num_experts,), invariant=tp_comm.invariant, inputs=0
        )
        if moe.router.bias:
            context.register_param(self, "router_bias", vector(f"{name}.router_bias"), ZEROS)
        # set after each step: the expert bias from the counts, the offset from the logits
        untrained = {
            "balancing_bias": moe.router.expert_bias,
            "balancing_offset": moe.aux_loss.quantile,
        }
        for word in [word for word, exists in untrained.items() if exists]:
            spec = replace(context.spec(vector(f"{name}.{word}"), ZEROS), trained=False)
            register_param(self, word, spec, dtype=wide)
        self.balance = LoadBalancing(moe, tp_comm, mesh)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Choice:
        """x [t, h], of the local tokens -> experts and weights [t, k]."""
        logits = self.gate(self.noise.on_input(x, inputs))
        if self.moe.router.bias:
            logits = logits + self.router_bias.to(logits.dtype)
        logits = self.noise.for_logits(logits, inputs)
        choice = self.chosen(logits, inputs)
        self.record_offsets(logits, inputs)
        within = self.within_capacity(choice, inputs)
        _, first_pass, routing = inputs.router_inputs
        if first_pass is not None:
            first_pass.record(self.layer, choice.experts, within.experts)
        if routing is not None:
            routing.show(self.layer, x, logits, within.weights, self.own())
        return self.balance(within, choice.experts, logits, inputs)

    def own(self) -> dict[str, Tensor]:
        """Return the router's parameters: `weight` [E, h], and biases and offsets [E] by name."""
        names = self._parameters.keys() & {"router_bias", "balancing_bias", "balancing_offset"}
        return {"weight": self.gate.accumulated_parameters()[0]} | {
            name: getattr(self, name) for name in sorted(names)
        }

    @property
    def expert_bias(self) -> Tensor | None:
        """The expert bias, or None."""
        return self._parameters.get("balancing_bias")

    @property
    def offset(self) -> Tensor | None:
        """The offsets subtracted from the experts' logits, or None."""
        return self._parameters.get("balancing_offset")

    def chosen(self, logits: Tensor, inputs: LayerInputs) -> Choice:
        """Choose experts: logits [t, E] -> [t, k]; those of the first pass in recomputation, or
        recorded ones in routing replay."""
        router = self.moe.router
        aux_loss_scale, first_pass, routing = inputs.router_inputs
        decided = None if first_pass is None else first_pass.chosen(self.layer)
        if decided is not None:
            return Choice(
                decided,
                expert_weights(logits, score_experts(logits, router.score), decided, router),
            )
        if routing is None or not routing.routing.followed:
            choice = self.choose(logits, training=aux_loss_scale is not None)
            if routing is not None:
                routing.record(self.layer, choice.experts)
            return choice
        experts = routing.recall(self.layer, (len(logits), self.moe.top_k)).to(logits.device)
        return Choice(
            experts, expert_weights(logits, score_experts(logits, router.score), experts, router)
        )

    def choose(self, logits: Tensor, *, training: bool) -> Choice:
        """Choose experts by the logits [t, E] -> [t, k]."""
        moe, router = self.moe, self.moe.router
        if moe.aux_loss.sinkhorn and training:
            total = partial(all_reduce_, group=self.sequence_group)
            plan = sinkhorn(logits, total, tokens=len(logits) * self.sequence_group.size)
            experts = top_k_indices(plan, moe.top_k)
            return Choice(
                experts,
                expert_weights(logits, score_experts(logits, router.score), experts, router),
            )
        return choose_experts(logits, router, moe.top_k, self.expert_bias, offsets=self.offset)

    def record_offsets(self, logits: Tensor, inputs: LayerInputs) -> None:
        """Record the logit offsets that would have balanced this microbatch, over all ranks that
        share it."""
        share, offset = inputs.router_inputs.aux_loss_scale, self.offset
        if share is None or offset is None:
            return
        with torch.no_grad():
            text = self.noise.tp_comm.select_local(inputs.seq_params.valid).unsqueeze(1)
            all_logits = all_gather_no_grad(
                logits.detach().where(text, -math.inf), self.sequence_group
            )
            valid = all_logits[:, 0] > -math.inf  # sent with the logits in one collective
            new_offsets = balancing_offsets(all_logits, offset, valid, self.moe.top_k)
            has_tokens = valid.any()
            row = torch.cat(
                [new_offsets.where(has_tokens, 0.0), has_tokens.to(new_offsets).unsqueeze(0)]
            )
            self.balance.step_record(share, logits).offsets[share.microbatch] = row

    def within_capacity(self, choice: Choice, inputs: LayerInputs) -> Choice:
        """Drop the choices over the expert capacity. All ranks that share a microbatch decide
        together, so that every layout drops the same tokens."""
        capacity, (aux_loss_scale, first_pass, _) = self.moe.capacity, inputs.router_inputs
        if capacity.factor is None or aux_loss_scale is None:
            return choice
        decided = None if first_pass is None else first_pass.kept(self.layer)
        if decided is not None:
            return drop_choices(choice, decided)
        group, num_local = self.sequence_group, len(choice.experts)
        # padding is dropped first, so that it does not displace tokens
        is_padding = ~self.noise.tp_comm.select_local(inputs.seq_params.valid)
        local_choices = Choice(
            choice.experts, choice.weights.detach().masked_fill(is_padding.unsqueeze(1), -1.0)
        )
        all_choices = Choice(
            *(all_gather_no_grad(part.contiguous(), group) for part in local_choices)
        )
        limit = expert_capacity(
            capacity.factor, len(all_choices.experts), self.moe.top_k, self.moe.num_experts
        )
        places = self.token_order(inputs.seq_params.context, all_choices.weights[:, 0] < 0)
        taken = select_within_capacity(
            all_choices, limit, capacity.drop, num_experts=self.moe.num_experts, order=places
        )
        # A copy, because a view would keep the choices of all ranks in memory for backward.
        local_taken = taken.narrow(0, group.rank * num_local, num_local).clone()
        return drop_choices(choice, local_taken)

    def token_order(self, context: ContextShard | None, padding: Tensor) -> Tensor:
        """Return the place in the microbatch of the tokens of all ranks that share it, rank after
        rank, padding last: padding bool [t of all] -> int64 [t of all]."""
        order = torch.arange(len(padding), device=padding.device)
        if context is not None:
            back, slices = context.all_ranks.back, context.slices.ranks
            parts = back.view(slices, self.sequence_group.size // slices, -1)
            order = (parts.transpose(0, 1) if self.cp_first else parts).flatten()
        return order + padding * len(padding)


# The experts of an MoE layer: MLPs of equal shape, sharded over expert parallelism and expert
# tensor parallelism.


class Experts(nn.Module):
    """Apply each expert to its rows: [r, d] -> [r, d], a partial sum over etp.

    The router weight of a row multiplies its expert's output. Source: Shazeer et al. 2017,
    arXiv:1701.06538.
    """

    def __init__(
        self, name: str, config: ModelConfig, moe: MoEConfig, context: BuildContext
    ) -> None:
        super().__init__()
        self.inner = weighted_activation(config, context.backends)
        self.compute = context.backends.bind("experts", experts)
        self.apply_router_weight_on_input = moe.apply_router_weight_on_input
        features = moe.latent_size or config.hidden_size
        halves, word = ((2,), "gate_up") if config.gated else ((), "up")
        inside = moe.num_experts, *halves, moe.ffn_hidden_size
        cut = partial(_cut, moe=moe, mesh=context.mesh)
        up = cut(f"{name}.{word}", (*inside, features), inner=1 + len(halves))
        down = cut(f"{name}.down", (moe.num_experts, features, moe.ffn_hidden_size), inner=2)
        up_bias = cut(f"{name}.{word}_bias", inside, inner=1 + len(halves), inputs=0)
        down_bias = cut(f"{name}.down_bias", (moe.num_experts, features), inner=None, inputs=0)
        std = config.init_std
        self.up = ExpertMatrix(
            context.spec(up, Init(std)),
            context.spec(up_bias, ZEROS) if moe.biases else None,
            dtype=context.dtype,
            matmul_ops=context.build_grouped_matmul_ops(up.name),
        )
        self.down = ExpertMatrix(
            context.spec(down, Init(std / math.sqrt(2 * config.num_layers))),
            context.spec(down_bias, ZEROS) if moe.biases else None,
            dtype=context.dtype,
            matmul_ops=context.build_grouped_matmul_ops(down.name),
        )

    def forward(self, sent: DispatchedTokens) -> Tensor:
        """Rows [r, d], sorted by expert -> [r, d]."""
        rows, weights, groups = sent
        if self.apply_router_weight_on_input:
            rows = rows * weights.unsqueeze(1).to(rows.dtype)
            weights = torch.ones_like(weights)
        return self.compute(rows, weights, groups, self.up(), self.down(), self.inner)


def weighted_activation(
    config: ModelConfig, backends: Backends = AUTO
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the activation between an expert's matmuls: that of the model's MLP, times the router
    weight of each row."""
    if not config.gated:
        weighted = backends.bind("activation", weighted_activate)
        return partial(weighted, activation=config.activation)
    return partial(
        backends.bind("activation", weighted_gated),
        gate=GatedActivation(config.activation, config.activation_clamp, config.up_offset),
    )


def _cut(
    name: str,
    shape: tuple[int, ...],
    *,
    moe: MoEConfig,
    mesh: Mesh,
    inner: int | None,
    inputs: int = 1,
) -> Shard:
    """Return the local experts' shard of a parameter [E, ...]: whole, or sharded along dim `inner`
    over etp."""
    ep, etp = mesh.over("ep"), mesh.over("etp")
    shard = Shard.full(name, shape, inputs=inputs).split_dim(
        0,
        split_evenly(moe.num_experts, ep.size),
        ep.rank,
        ep.axes,
    )
    if inner is not None:
        shard = shard.split_dim(
            inner, split_evenly(moe.ffn_hidden_size, etp.size), etp.rank, etp.axes
        )
    return Shard(shard.name, shard.shape, shard.box, shard.cut, grid="expert", inputs=inputs)


class MoE(nn.Module):
    """Mixture of experts: the weighted sum of the outputs of each token's experts: x [t, h] -> [t,
    h], of the local tokens.

    Source: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        moe: MoEConfig,
        context: BuildContext,
    ) -> None:
        super().__init__()
        mesh, recompute = context.mesh, context.recompute
        self.router = Router(name, config, moe, context)
        build = partial(
            build_transport,
            context.parallel.dispatcher,
            mesh,
            moe.num_experts,
            overlap_fn=context.overlap_fn,
        )
        self.dispatch = build()
        self.dispatch_within_capacity = build(
            drops_tokens=moe.capacity.factor is not None, room=fixed_expert_capacity(moe, mesh)
        )
        self.experts = Experts(f"{name}.experts", config, moe, context)
        self.narrow, self.widen = latent_matrices(name, config, moe, context)
        self.shared = nn.ModuleList()
        if moe.shared_ffn_hidden_size is not None:
            shared = SharedExperts(name, config, moe, context)
            is_recomputed = "shared_experts" in recomputed_modules(recompute)
            self.shared.append(
                Recomputed(shared, check=recompute.check) if is_recomputed else shared
            )

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        return inputs.call_in_each_step(self._forward, x)  # the sizes depend on the routing

    def _forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        # `aux_loss_scale` is set in training only, where the expert capacity applies.
        dispatch = (
            self.dispatch
            if inputs.router_inputs.aux_loss_scale is None
            else self.dispatch_within_capacity
        )
        dispatched = dispatch(self.narrow(x), self.router(x, inputs))
        # The shared experts overlap the dispatch, and in backward that of the gradients.
        shared_outputs = [shared(x, inputs) for shared in self.shared]
        expert_input, return_path = dispatched.wait()
        y: Tensor = self.widen(return_path.combine(self.experts(expert_input)))
        for shared_output in shared_outputs:
            y = y + shared_output
        return y


def fixed_expert_capacity(moe: MoEConfig, mesh: Mesh) -> ExpertCapacity | None:
    """Return the fixed number of rows of every expert; None: as many as are routed to it."""
    capacity = moe.capacity
    if capacity.factor is None or not capacity.pad:
        return None
    return ExpertCapacity(capacity.factor, moe.top_k, moe.num_experts, mesh.over("cp", "tp").size)


class SharedExperts(nn.Module):
    """Shared experts, an MLP for all tokens, optionally with a scalar gate per token: x [t, h] ->
    [t, h].

    Source: Dai et al. 2024, arXiv:2401.06066, section 3.2; the gate: Qwen Team 2024,
    arXiv:2407.10671.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        moe: MoEConfig,
        context: BuildContext,
    ) -> None:
        super().__init__()
        assert moe.shared_ffn_hidden_size is not None
        sized = replace(config, ffn_hidden_size=moe.shared_ffn_hidden_size)
        self.mlp = build_mlp(f"{name}.shared", sized, context)
        self.weigh = nn.ModuleList()
        if moe.shared_gate:
            self.weigh.append(
                _matrix(f"{name}.shared_gate", 1, config.hidden_size, config.init_std, context)
            )

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        y: Tensor = self.mlp(x, inputs)
        for weigh in self.weigh:
            y = y * weigh(x).sigmoid()
        return y


def latent_matrices(
    name: str, config: ModelConfig, moe: MoEConfig, context: BuildContext
) -> tuple[nn.Module, nn.Module]:
    """Build the projections to the experts' features and back; identities if these are equal to the
    hidden size."""
    h, latent = config.hidden_size, moe.latent_size
    if latent is None:
        return nn.Identity(), nn.Identity()
    return (
        _matrix(f"{name}.latent_in", latent, h, config.init_std, context),
        _matrix(f"{name}.latent_out", h, latent, config.init_std, context),
    )


def _matrix(name: str, outputs: int, inputs: int, std: float, context: BuildContext) -> nn.Module:
    """Build a replicated matrix for the local tokens."""
    shard = Shard.full(name, (outputs, inputs), invariant=context.tp_comm.invariant)
    return context.replicated_linear(shard, Init(std))
