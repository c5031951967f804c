"""The decoder-only transformer: tokens in, loss or scores out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config.context import ContextConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import DispatcherName, ParallelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.kernels.cross_entropy import LogitTransform
from megalith.kernels.rebuilt import output_tensor
from megalith.kernels.tokens import PackedSeqParams
from megalith.nn.attention import LayerCache
from megalith.nn.block import IdentityNorm, Layer, block_of_layer
from megalith.nn.embedding import InputEmbedding
from megalith.nn.init import init_param_
from megalith.nn.mtp import MTPBlock, MTPInputs, MTPLoss, mtp_acceptance_rate
from megalith.nn.norm import Norm, build_norm, stream_dtype
from megalith.nn.relative_bias import NoBias, RelativeBias
from megalith.nn.rope import RotaryEmbedding
from megalith.parallel.context import build_attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import LayerRunner, SpanHook
from megalith.parallel.rings import RING_EXCHANGE, CollectiveMatmul
from megalith.parallel.tensor import (
    ColumnLinear,
    Init,
    ParameterSpec,
    SequenceParallelComm,
    TensorParallelComm,
    TPComm,
    VocabEmbedding,
    VocabHead,
)
from megalith.plan.initial import start_of
from megalith.plan.shards import Shard, split_evenly
from megalith.plan.stages import Stage, plan_stages, stages_of_rank, table_stages, whole_model

RINGS, KEEP_ALL, KEEP_HERE = ContextConfig(), RecomputeConfig(), OffloadConfig()

TABLES = ("embed.weight", "positions.weight", "relative.weight")
"""What several stages may read."""

ALONE: Mapping[str, tuple[int, ...]] = MappingProxyType({})
NOTHING: Mapping[str, nn.Parameter] = MappingProxyType({})


class Decoder(nn.Module):
    """A decoder-only language model or one pipeline stage of it, built without memory: `allocate`,
    then `initialize` or a checkpoint, fill it.

    ids [t], the same on every rank of a tensor-parallel group -> hidden states [t, h], or [t_tp, h]
    with `sp`.
    """

    embed: VocabEmbedding
    """Only where the stage has the embedding."""

    input_embedding: InputEmbedding
    """Only where the stage has the embedding."""

    memory_norm: Norm | IdentityNorm
    """Only where the memory is taken that later layers look at."""

    norm: Norm
    """Only where the stage has the last norm."""

    head: VocabHead
    """Only where the stage has the loss."""

    mtp: MTPBlock | MTPLoss
    """Only where the stage has the loss, or MTP layers."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        *,
        sp: bool = False,
        dtype: torch.dtype = torch.float32,
        stage: Stage | None = None,
        replica_ranks: Mapping[str, tuple[int, ...]] = ALONE,
        here: Mapping[str, nn.Parameter] = NOTHING,
        context: ContextConfig = RINGS,
        recompute: RecomputeConfig = KEEP_ALL,
        offload: OffloadConfig = KEEP_HERE,
        overlap: bool = True,
        tp_comm_overlap: bool = False,
        products: CollectiveMatmul = RING_EXCHANGE,
        dispatcher: DispatcherName = "alltoall",
    ) -> None:
        """`stage`: what to build; unset: the whole model. Of tables that several stages read,
        `holders` says by name which pipeline ranks hold them, and `here` are those that another
        chunk of this rank has already."""
        super().__init__()
        tp_comm: TPComm = (
            SequenceParallelComm(
                mesh.tp, overlap=overlap, tp_comm_overlap=tp_comm_overlap, products=products
            )
            if sp and mesh.tp.size > 1
            else TensorParallelComm(mesh.tp, overlap=overlap)
        )
        self.config, self.dtype, self.tp_comm = config, dtype, tp_comm
        self.stream_dtype = stream_dtype(config, dtype)
        self.stage = stage or whole_model(config.num_layers, config.mtp.num_layers)
        table = here.get("embed.weight")
        if self.stage.embedding:
            self.embed = VocabEmbedding(_table("embed.weight", config, mesh), tp_comm, dtype=dtype)
            self.input_embedding = InputEmbedding(config, tp_comm, dtype=dtype)
            table = self.embed.weight
        shared = here.get("relative.weight")
        reads = self.stage.reads_biases(config)
        self.relative = (
            RelativeBias(config, mesh, dtype=dtype, shared=shared) if reads else NoBias()
        )
        self.layers = nn.ModuleList(
            block_of_layer(config, index)(
                f"layers.{index}",
                config,
                mesh,
                tp_comm,
                dtype=dtype,
                index=index,
                core=build_attend(context, index, mesh, overlap=overlap),
                recompute=recompute,
                dispatcher=dispatcher,
            )
            for index in self.stage.layers
        )
        self.run_layers = LayerRunner(recompute, offload, mesh.tp)
        self.remember: SpanHook | None = None
        if (before := config.has_cross_layer_source_before(self.stage.layers)) is not None:
            self.memory_norm = _memory_norm(config, tp_comm, dtype=dtype)
            self.remember = SpanHook(before, self._encode_cross_layer_source)
        if self.stage.norm:
            self.norm = build_norm(
                "norm", config.hidden_size, config, invariant=tp_comm.invariant, dtype=dtype
            )
        if self.stage.loss:
            self.head = VocabHead(
                _table("embed.weight" if config.tied_embeddings else "head.weight", config, mesh),
                tp_comm,
                vocab_size=config.vocab_size,
                tied=table if config.tied_embeddings else None,
                dtype=dtype,
                logit_transform=LogitTransform(
                    config.logit_scale / config.width_factor(), config.logit_softcap
                ),
            )
            table = self.head.weight if config.tied_embeddings else table
        if self.stage.loss and config.mtp.num_layers > self.stage.num_mtp_layers:
            self.mtp = MTPLoss(config.mtp.num_layers, self.head)
        elif self.stage.loss or self.stage.num_mtp_layers:
            self.mtp = MTPBlock(
                config,
                mesh,
                tp_comm,
                dtype=dtype,
                table=_table("embed.weight", config, mesh),
                shared=table,
                places=self.input_embedding.places()
                if self.stage.embedding
                else here.get("positions.weight"),
                head=self.head if self.stage.loss else None,
                recompute=recompute,
                dispatcher=dispatcher,
                core=build_attend(context, config.num_layers - 1, mesh, overlap=overlap),
            )
        self.rotations = RotaryEmbedding(config, dtype)
        _note_places(self, (mesh.pp.rank,), replica_ranks)

    def forward(
        self,
        ids: Tensor,
        tokens: PackedSeqParams,
        caches: Sequence[LayerCache] | None = None,
        *,
        x: Tensor | None = None,
        memory: Tensor | None = None,
        mtp_hidden: tuple[Tensor, ...] = (),
        mtp_inputs: MTPInputs = (),
    ) -> Tensor | tuple[Tensor, ...]:
        """ids [t] -> hidden states after the last norm, in the layout of `tp_comm`.

        A stage of a pipeline begins with `x`, the hidden states that the stage before ended with,
        and ends with its own layers; `memory` goes with them where the model has taken it and
        layers that look at it are still to come, and `ahead`, the hidden states of layers that
        predict further tokens (from `further`, what they read and are to find), from their stage to
        that of the loss.
        """
        tokens = replace(self.relative.given_to(self.rotations.given_to(tokens)), memory=memory)
        if self.stage.embedding:
            x = self.input_embedding(self.embed(ids), tokens)
        assert x is not None, f"stage {self.stage} begins with hidden states"
        if caches is None:
            x, tokens = self.run_layers(list(self.layers), x, tokens, self.remember)
        else:
            x = self._read_on(x, tokens, caches)
        if self.stage.norm:
            x = output_tensor(self.norm(x))
        if self.config.needs_cross_layer_source(self.stage.layers.stop):
            assert tokens.memory is not None, f"stage {self.stage} hands on a memory"
            return x, tokens.memory
        if self.stage.num_mtp_layers and not self.stage.loss:
            assert isinstance(self.mtp, MTPBlock)
            mtp_hidden = self.mtp.states(x, mtp_inputs, tokens)
        return (x, *mtp_hidden) if mtp_hidden else x

    def received(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """What the stage before ended with, as `forward` is given it; nothing where the embedding
        is."""
        if not tensors:
            return {}
        x, *rest = tensors
        looked_at = self.config.needs_cross_layer_source(self.stage.layers.start)
        return {"x": x} | ({"memory": rest[0]} if looked_at else {"mtp_hidden": tuple(rest)})

    def _read_on(self, x: Tensor, tokens: PackedSeqParams, caches: Sequence[LayerCache]) -> Tensor:
        """All layers, with a cache for every attention in their order."""
        left = iter(caches)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if self.remember is not None and number == self.remember.before:
                tokens = replace(tokens, memory=self.remember.how(x))
            x = layer(x, tokens, *islice(left, layer.attentions))
        assert next(left, None) is None, "a cache for no attention"
        return x

    def _encode_cross_layer_source(self, x: Tensor) -> Tensor:
        """What later layers look at of x [t, h]."""
        return output_tensor(self.memory_norm(x))

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        tokens: PackedSeqParams,
        *,
        x: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Sum of -log p(label) over the labels [t] that are not negative; the same on every
        tensor-parallel rank."""
        return self.head.loss(self(ids, tokens, x=x, memory=memory), labels)

    def losses(
        self,
        ids: Tensor,
        labels: Tensor,
        tokens: PackedSeqParams,
        *,
        mtp_inputs: MTPInputs = (),
        **received: Any,
    ) -> tuple[Tensor, ...]:
        """`loss`, and after it the same of every MTP depth and has its
        (ids, labels) there.

        received: as `forward` is given it.
        """
        tokens = self.rotations.given_to(tokens)
        hidden = self._hidden(ids, tokens, received)
        own = self.head.loss(hidden[0], labels)
        return own, *self.mtp.losses(hidden, mtp_inputs, self.relative.given_to(tokens))

    def evaluate(
        self,
        ids: Tensor,
        labels: Tensor,
        tokens: PackedSeqParams,
        *,
        mtp_inputs: MTPInputs = (),
        **received: Any,
    ) -> Tensor:
        """For evaluation, float64: `losses`, and behind them what `accepted` says of depths that
        predict further."""
        tokens = self.rotations.given_to(tokens)
        hidden = self._hidden(ids, tokens, received)
        own = self.head.loss(hidden[0], labels, evaluating=True)
        losses, right = self.mtp.evaluate(hidden, mtp_inputs, self.relative.given_to(tokens))
        measured = torch.stack([own, *losses]).double()
        return (
            torch.cat([measured, mtp_acceptance_rate(right, [labels for _, labels in mtp_inputs])])
            if right
            else measured
        )

    def _hidden(
        self, ids: Tensor, tokens: PackedSeqParams, received: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        """The model's hidden states, and those of depths that another stage has computed."""
        found = self(ids, tokens, **received)
        return found if isinstance(found, tuple) else (found,)

    def logits(
        self, ids: Tensor, tokens: PackedSeqParams, caches: Sequence[LayerCache], wanted: Tensor
    ) -> Tensor:
        """Scores [len(wanted), vocab_size] of the tokens numbered `wanted`; every rank must have
        all tokens (no sp)."""
        return self.head.logits(self(ids, tokens, caches)[wanted])


def build_chunks(
    config: ModelConfig,
    mesh: Mesh,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: RecomputeConfig = KEEP_ALL,
    offload: OffloadConfig = KEEP_HERE,
    products: CollectiveMatmul = RING_EXCHANGE,
) -> list[Decoder]:
    """The chunks of the model that this rank holds, by chunk number; the whole model without a
    pipeline.

    A table that several pipeline ranks use is a parameter of the same name on all of them; one that
    several chunks of a rank use is one parameter.

    Raises:
        PlanError: the layers do not divide as asked.
    """
    pp, pipeline = mesh.pp.size, parallel.pipeline
    stages = plan_stages(
        pipeline, pp=pp, num_layers=config.num_layers, depths=config.mtp.num_layers
    )
    replica_ranks, here = table_stages(config, stages, pipeline, pp=pp), dict[str, nn.Parameter]()
    chunks: list[Decoder] = []
    for stage in stages_of_rank(stages, mesh.pp.rank, pipeline, pp=pp):
        chunk = Decoder(
            config,
            mesh,
            sp=parallel.sp,
            dtype=dtype,
            stage=stage,
            replica_ranks=replica_ranks,
            here=here,
            context=parallel.context,
            recompute=recompute,
            offload=offload,
            overlap=parallel.overlap,
            tp_comm_overlap=parallel.tp_comm_overlap,
            products=products,
            dispatcher=parallel.dispatcher,
        )
        found = {
            declared.shard.name: getattr(module, name)
            for declared, module, name in declared_parameters(chunk)
        }
        here |= {name: found[name] for name in TABLES if name in found}
        chunks.append(chunk)
    return chunks


def declared_parameters(model: nn.Module) -> Iterator[tuple[ParameterSpec, nn.Module, str]]:
    """Every parameter once, in the order of the forward pass: what its layer declared, the layer,
    its name there."""
    for module in model.modules():
        for name, declared in module.__dict__.get("declared", {}).items():
            yield declared, module, name


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give every parameter memory on `device`, with undefined values; a tied head keeps sharing its
    parameter."""
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in placed:
                empty = torch.empty_like(parameter, device=device)
                placed[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, placed[id(parameter)])
        if isinstance(module, ColumnLinear):
            _place_below_one_another(module.accumulated_parameters())


def initialize(model: nn.Module, *, seed: int) -> None:
    """Write the first weights, the same for a seed under every layout."""
    for declared, module, name in declared_parameters(model):
        init_param_(getattr(module, name), declared.shard, declared.init, seed=seed)


def _place_below_one_another(parameters: Sequence[nn.Parameter]) -> None:
    """Give matrices that one matmul reads one storage; each matmul would have to copy them into one
    otherwise."""
    both = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(
        parameters, both.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = rows


def _memory_norm(
    config: ModelConfig, tp_comm: TPComm, *, dtype: torch.dtype
) -> Norm | IdentityNorm:
    """Of what later layers look at: as what layers read, so none where a model norms only what they
    give."""
    if config.norm_placement == "after":
        return IdentityNorm(dtype)
    return build_norm(
        "memory_norm", config.hidden_size, config, invariant=tp_comm.invariant, dtype=dtype
    )


def _table(name: str, config: ModelConfig, mesh: Mesh) -> ParameterSpec:
    """My rows of a vocabulary table [v, h]; rows that only pad it are zero."""
    rows = config.padded_vocab_size()
    shard = Shard.full(name, (rows, config.hidden_size))
    shard = shard.split_dim(0, split_evenly(rows, mesh.tp.size), mesh.tp.rank, mesh.tp.axes)
    return ParameterSpec(shard, Init(config.init_std, rows=config.vocab_size))


def _note_places(
    model: Decoder, here: tuple[int, ...], shared: Mapping[str, tuple[int, ...]]
) -> None:
    """Write into every parameter's declaration which pipeline ranks hold it, those of `shared`,
    by name, or `here`; and how its first values are spread."""
    for declared, module, name in list(declared_parameters(model)):
        shard, init = declared.shard, declared.init
        start = start_of(model.config, shard.name, shard.shape, shard.inputs, init.std)
        init = replace(init, std=start.std, uniform=start.uniform)
        shard = replace(shard, stages=shared.get(shard.name) or here)
        module.__dict__["declared"][name] = replace(declared, shard=shard, init=init)
