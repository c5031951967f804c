"""Decoder-only transformer: token ids to loss or logits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.errors import ConfigError
from megalith.kernels.layer_inputs import LayerCache, LayerInputs
from megalith.nn.build import BuildContext, init_param_
from megalith.nn.embedding import InputEmbedding, NoBias, RelativeBias, insert_embeddings
from megalith.nn.layer import IdentityNorm, Layer, MTPBlock, MTPInputs, select_block_class
from megalith.nn.norm import Norm, build_norm, stream_dtype
from megalith.nn.rope import RotaryEmbedding
from megalith.parallel.cross_entropy import LogitTransform, VocabShard
from megalith.parallel.recompute import FrozenLayerRunner, LayerRunner, SpanHook
from megalith.parallel.tensor import (
    ColumnParallelLinear,
    Init,
    ParameterSpec,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megalith.plan.shards import Shard, split_evenly
from megalith.plan.stages import (
    CROSS_LAYER_SOURCE,
    HIDDEN,
    Stage,
    mtp_hidden_name,
    plan_stages,
    select_rank_stages,
    single_stage,
    table_stages,
)

TABLES = ("embed.weight", "positions.weight", "relative.weight")
"""Parameters that several pipeline stages may use."""

NO_TABLES: Mapping[str, nn.Parameter] = MappingProxyType({})


StageTensors = Mapping[str, Tensor]
"""Tensors between pipeline stages by name: see `plan/stages.stage_boundary`."""

NOTHING_RECEIVED: StageTensors = MappingProxyType({})


CachedLayers = Callable[[Tensor, LayerInputs, Sequence[LayerCache]], tuple[Tensor, LayerInputs]]
"""(x [t, h], inputs, caches) -> (x [t, h], inputs with the cross-layer source): the layers of a
stage."""

CachedLayersRunner = Callable[
    [CachedLayers, Tensor, LayerInputs, Sequence[LayerCache]], tuple[Tensor, LayerInputs]
]
"""Runs the layers of a stage with these arguments, or repeats an earlier forward pass."""


@dataclass(frozen=True, slots=True)
class DecoderOutputs:
    """Outputs of the model that losses are computed from; full logits are never materialized."""

    hidden: tuple[Tensor, ...]
    """Hidden states after the final norm, then those of each MTP depth of the microbatch: each
    [t, h] in the layout of the heads' `tp_comm`."""

    heads: tuple[VocabParallelHead, ...]
    """Output head of the model, then of each MTP depth; they share one weight."""

    differentiated_depths: set[int] = field(default_factory=set)
    """Depths whose losses have been computed with gradients."""

    def loss(self, labels: Tensor, *, depth: int = 0, evaluating: bool = False) -> Tensor:
        """Return the training loss of a depth (0: the next token), summed over the labels [t] that
        are not negative; `evaluating`: the sum of -log p(label).

        Raises:
            ConfigError: a loss of this depth has been computed before.
        """
        if not evaluating:
            self._check_first_loss(depth)
        return self.heads[depth].loss(self.hidden[depth], labels, evaluating=evaluating)

    def token_losses(self, labels: Tensor, *, depth: int = 0) -> Tensor:
        """Return -log p(label) of each token [t], 0 where the label is negative.

        Raises:
            ConfigError: a loss of this depth has been computed before.
        """
        self._check_first_loss(depth)
        return self.heads[depth].token_losses(self.hidden[depth], labels)

    def is_most_likely(self, labels: Tensor, *, depth: int = 0) -> Tensor:
        """Return where the label is the most likely token: bool [t], False without a label."""
        return self.heads[depth].best(self.hidden[depth]) == labels

    def _check_first_loss(self, depth: int) -> None:
        """Check that the head of a depth computes gradients once: the reduction of a gradient
        starts after one contribution of each microbatch."""
        if not torch.is_grad_enabled():
            return
        if depth in self.differentiated_depths:
            raise ConfigError(
                f"train.loss_plugin computes the losses of depth {depth} twice in a microbatch. "
                "Call outputs.token_losses(labels) once, and compute all losses of a depth from "
                "its result, or compute the others under torch.no_grad()."
            )
        self.differentiated_depths.add(depth)


class Decoder(nn.Module):
    """Decoder-only language model or one pipeline stage of it, built on the meta device:
    `allocate`, then `initialize` or load a checkpoint.

    ids [t], equal on all ranks of the tensor-parallel group -> hidden states [t, h], or [t_tp, h]
    with `sp`.
    """

    embed: VocabParallelEmbedding
    """Only in the stage with the embedding."""

    input_embedding: InputEmbedding
    """Only in the stage with the embedding."""

    memory_norm: Norm | IdentityNorm
    """Only in the stage that computes the cross-layer source of later layers."""

    norm: Norm
    """Only in the stage with the final norm."""

    head: VocabParallelHead
    """Only in the stage with the loss."""

    mtp_heads: nn.ModuleList
    """Output head of every MTP depth; only in the stage with the loss."""

    def __init__(
        self,
        context: BuildContext,
        *,
        stage: Stage | None = None,
        shared_tables: Mapping[str, nn.Parameter] = NO_TABLES,
    ) -> None:
        """`stage`: what to build; unset: the whole model. `shared_tables`: tables that several
        stages use and another chunk of this rank already has, by name."""
        super().__init__()
        config, tp_comm = context.model, context.tp_comm
        self.config, self.dtype, self.tp_comm = config, context.dtype, tp_comm
        self.kv_replicas = context.mesh.over("tp_copy")
        """Tensor-parallel ranks with the same KV head."""
        self.stream_dtype = stream_dtype(config, context.dtype)
        self.stage = stage or single_stage(config.num_layers, config.mtp.num_layers)
        first_trained = context.first_backward_layer
        num_frozen = sum(
            first_trained is not None and index < first_trained for index in self.stage.layers
        )
        table = shared_tables.get("embed.weight")
        if self.stage.embedding:
            self.embed = VocabParallelEmbedding(
                _table("embed.weight", context), tp_comm, dtype=context.dtype
            )
            self.input_embedding = InputEmbedding(
                config, context, requires_grad=first_trained is not None and num_frozen == 0
            )
            table = self.embed.weight
        self.relative = (
            RelativeBias(config, context, shared=shared_tables.get("relative.weight"))
            if self.stage.reads_biases(config)
            else NoBias()
        )
        self.layers = nn.ModuleList(
            select_block_class(config, index)(f"layers.{index}", config, context.at_layer(index))
            for index in self.stage.layers
        )
        before = config.find_cross_layer_source(self.stage.layers)
        self.run_layers = _build_layer_runner(context, num_frozen, has_source=before is not None)
        self.source_hook: SpanHook | None = None
        if before is not None:
            self.memory_norm = _memory_norm(config, context)
            self.source_hook = SpanHook(before, self._encode_cross_layer_source)
        if self.stage.norm:
            self.norm = build_norm("norm", config.hidden_size, config, context)
        if self.stage.loss:
            self.head = _build_head(context, table)
            table = self.head.weight if config.tied_embeddings else table
        self.mtp = MTPBlock(
            config,
            context,
            depths=self.stage.num_mtp_layers,
            table=_table("embed.weight", context),
            shared=table,
            places=self.input_embedding.position_table()
            if self.stage.embedding
            else shared_tables.get("positions.weight"),
        )
        if self.stage.loss:
            depths = range(config.mtp.num_layers)
            self.mtp_heads = nn.ModuleList(self.head.share_weight() for _ in depths)
        self.rotations = RotaryEmbedding(config, context.dtype)

    def forward(
        self,
        ids: Tensor,
        inputs: LayerInputs,
        caches: Sequence[LayerCache] | None = None,
        *,
        received: StageTensors = NOTHING_RECEIVED,
        mtp_inputs: MTPInputs = (),
        run_cached_layers: CachedLayersRunner | None = None,
    ) -> dict[str, Tensor]:
        """ids [t] -> named hidden states, each [t, h] in the layout of `tp_comm`.

        `hidden` is the output of the last layer, after the final norm if the stage has it. A stage
        starts with `received`, the outputs of the previous stage. It passes on the
        `cross_layer_source` to stages with layers that attend to it, and `mtp_hidden.DEPTH`, the
        outputs of MTP layers, from their stage to that of the loss: see `plan/stages`.
        `mtp_inputs` are the ids and labels of the MTP layers. `run_cached_layers` replaces
        the forward pass of the layers if there are caches: see `infer/recorded_forward`.
        """
        inputs = replace(
            self.relative.add_to(self.rotations.add_to(inputs)),
            encoder_hidden=received.get(CROSS_LAYER_SOURCE),
        )
        if self.stage.embedding:
            x = self.embed(ids)
            if inputs.inserted is not None:
                x = insert_embeddings(x, inputs.inserted, len(ids), self.tp_comm)
            x = self.input_embedding(x, inputs)
        else:
            x = received[HIDDEN]
        if caches is None:
            x, inputs = self.run_layers(list(self.layers), x, inputs, self.source_hook)
        elif run_cached_layers is None:
            x, inputs = self._forward_with_caches(x, inputs, caches)
        else:
            x, inputs = run_cached_layers(self._forward_with_caches, x, inputs, caches)
        if self.stage.norm:
            x = self.norm(x)
        outputs = dict(received) | {HIDDEN: x}
        outputs.pop(CROSS_LAYER_SOURCE, None)
        if self.config.needs_cross_layer_source(self.stage.layers.stop):
            assert inputs.encoder_hidden is not None, f"stage {self.stage} has no source to pass on"
            outputs[CROSS_LAYER_SOURCE] = inputs.encoder_hidden
        if self.stage.num_mtp_layers:
            for depth, hidden in enumerate(self.mtp(x, mtp_inputs, inputs), start=1):
                outputs[mtp_hidden_name(depth)] = hidden
        return outputs

    def hidden_states(
        self, ids: Tensor, inputs: LayerInputs, caches: Sequence[LayerCache] | None = None
    ) -> Tensor:
        """Run the whole model: ids [t] -> hidden states after the final norm [t, h]."""
        hidden: Tensor = self(ids, inputs, caches)[HIDDEN]
        return hidden

    def _forward_with_caches(
        self, x: Tensor, inputs: LayerInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, LayerInputs]:
        """Run all layers with a KV cache for each attention; returns x, and the inputs with the
        cross-layer source."""
        remaining = iter(caches)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if self.source_hook is not None and number == self.source_hook.before:
                inputs = replace(inputs, encoder_hidden=self.source_hook.how(x))
            cache, cross_cache = [*islice(remaining, layer.attentions), None, None][:2]
            x = layer(x, replace(inputs, cache=cache, cross_cache=cross_cache))
        assert next(remaining, None) is None, "more caches than attentions"
        return x, inputs

    def _encode_cross_layer_source(self, x: Tensor) -> Tensor:
        """Return the normalized x [t, h] that later layers attend to."""
        return self.memory_norm(x)

    def outputs(
        self,
        ids: Tensor,
        inputs: LayerInputs,
        *,
        received: StageTensors = NOTHING_RECEIVED,
        mtp_inputs: MTPInputs = (),
    ) -> DecoderOutputs:
        """Return the hidden states and the output heads, on the stage with the loss; arguments as
        of `forward`."""
        tensors = self(ids, inputs, received=received, mtp_inputs=mtp_inputs)
        depths = range(1, 1 + len(mtp_inputs))
        hidden = (tensors[HIDDEN], *(tensors[mtp_hidden_name(depth)] for depth in depths))
        mtp_heads = (head for head in self.mtp_heads if isinstance(head, VocabParallelHead))
        return DecoderOutputs(hidden, (self.head, *mtp_heads))

    def loss(self, ids: Tensor, labels: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the sum of -log p(label) over the labels [t] that are not negative; equal on all
        tensor-parallel ranks."""
        return self.outputs(ids, inputs).loss(labels)


def build_chunks(context: BuildContext) -> list[Decoder]:
    """Return the model chunks of this pipeline rank, by chunk number; without a pipeline the whole
    model.

    A table that several pipeline ranks use is a parameter of the same name on each; within a rank
    it is one parameter.

    Raises:
        PlanError: the layers cannot be divided into these stages.
    """
    config, pp, pipeline = context.model, context.mesh.pp, context.parallel.pipeline
    stages = plan_stages(
        pipeline, pp=pp.size, num_layers=config.num_layers, depths=config.mtp.num_layers
    )
    context = replace(context, replica_ranks=table_stages(config, stages, pipeline, pp=pp.size))
    shared_tables = dict[str, nn.Parameter]()
    chunks: list[Decoder] = []
    for stage in select_rank_stages(stages, pp.rank, pipeline, pp=pp.size):
        chunk = Decoder(context, stage=stage, shared_tables=shared_tables)
        own_parameters = {
            spec.shard.name: getattr(module, name)
            for spec, module, name in iter_parameter_specs(chunk)
        }
        shared_tables |= {name: own_parameters[name] for name in TABLES if name in own_parameters}
        chunks.append(chunk)
    return chunks


def iter_parameter_specs(model: nn.Module) -> Iterator[tuple[ParameterSpec, nn.Module, str]]:
    """Yield every parameter once, in the order of the forward pass: its specification, its module,
    its name in the module."""
    for module in model.modules():
        for name, spec in module.__dict__.get("param_specs", {}).items():
            yield spec, module, name


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate every parameter on `device`, uninitialized; a tied head keeps sharing its
    parameter."""
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in allocated:
                empty = torch.empty_like(parameter, device=device)
                allocated[id(parameter)] = nn.Parameter(
                    empty, requires_grad=parameter.requires_grad
                )
            setattr(module, name, allocated[id(parameter)])
        if isinstance(module, ColumnParallelLinear):
            _make_contiguous(module.accumulated_parameters())


def initialize(model: nn.Module, *, seed: int) -> None:
    """Initialize the weights; the values depend on the seed and not on the parallel layout."""
    for spec, module, name in iter_parameter_specs(model):
        init_param_(getattr(module, name), spec.shard, spec.init, seed=seed)


def _make_contiguous(parameters: Sequence[nn.Parameter]) -> None:
    """Store matrices that one matmul reads contiguously, so that it does not copy them."""
    both = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(
        parameters, both.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = rows


def _memory_norm(config: ModelConfig, context: BuildContext) -> Norm | IdentityNorm:
    """Return the norm of the cross-layer source; the identity in models that only normalize outputs
    of layers."""
    if config.norm_placement == "after":
        return IdentityNorm(context.dtype)
    return build_norm("memory_norm", config.hidden_size, config, context)


def _build_layer_runner(
    context: BuildContext, num_frozen: int, *, has_source: bool
) -> Callable[..., tuple[Tensor, LayerInputs]]:
    """Return what runs the layers of a stage: with activation checkpointing, offload, leading
    frozen layers and the cross-layer source, or one after the other."""
    runner = LayerRunner(context.recompute, context.offload, context.mesh.tp)
    if num_frozen:
        return FrozenLayerRunner(runner, num_frozen)
    return runner if runner.reduces_saved_activations or has_source else run_layers_in_sequence


def run_layers_in_sequence(
    layers: Sequence[nn.Module], x: Tensor, inputs: LayerInputs, span_hook: None = None
) -> tuple[Tensor, LayerInputs]:
    """Run layers one after the other: x [t, h] -> [t, h], and the inputs."""
    for layer in layers:
        x = layer(x, inputs)
    return x, inputs


def _build_head(context: BuildContext, table: nn.Parameter | None) -> VocabParallelHead:
    """Build the output head; `table`: the embedding table, if this rank has it, which a tied head
    uses."""
    config = context.model
    weight = _table("embed.weight" if config.tied_embeddings else "head.weight", context)
    vocab = VocabShard(
        context.tp_comm.group,
        weight.shard.box[0][0],
        config.vocab_size,
        LogitTransform(config.logit_scale / config.width_factor(), config.logit_softcap),
        matmul_ops=context.build_matmul_ops(weight.shard.name),
    )
    return VocabParallelHead(
        weight,
        context.tp_comm,
        vocab,
        tied=table if config.tied_embeddings else None,
        dtype=context.dtype,
        build_loss=context.build_loss,
        backends=context.backends,
    )


def _table(name: str, context: BuildContext) -> ParameterSpec:
    """Return the specification of the local rows of a vocabulary table [v, h]; padding rows are
    zero."""
    config, tp = context.model, context.mesh.tp
    rows = config.padded_vocab_size()
    shard = Shard.full(name, (rows, config.hidden_size))
    shard = shard.split_dim(0, split_evenly(rows, tp.size), tp.rank, tp.axes)
    return context.spec(shard, Init(config.init_std, rows=config.vocab_size))
