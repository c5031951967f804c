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
from megalith.kernels.cross_entropy import Readout
from megalith.kernels.rebuilt import value_of
from megalith.kernels.tokens import Tokens
from megalith.nn.attention import LayerCache
from megalith.nn.block import Layer, Unnormed, block_of_layer
from megalith.nn.embedding import Entrance
from megalith.nn.init import fill
from megalith.nn.mtp import Further, FurtherLosses, FurtherPredictions, accepted
from megalith.nn.norm import Norm, build_norm, stream_dtype
from megalith.nn.relative_bias import NoBias, RelativeBias
from megalith.nn.rope import Rotations
from megalith.parallel.context import build_attend
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import LayerRunner, Remember
from megalith.parallel.rings import MESSAGES, RingProducts
from megalith.parallel.tensor import (
    ColumnLinear,
    Declared,
    Init,
    Region,
    SplitTokens,
    VocabEmbedding,
    VocabHead,
    WholeTokens,
)
from megalith.plan.initial import start_of
from megalith.plan.shards import cut_dim, split_evenly, whole
from megalith.plan.stages import Stage, plan_stages, stages_of_rank, table_holders, whole_model

RINGS, KEEP_ALL, KEEP_HERE = ContextConfig(), RecomputeConfig(), OffloadConfig()

TABLES = ("embed.weight", "positions.weight", "relative.weight")
"""What several stages may read."""

ALONE: Mapping[str, tuple[int, ...]] = MappingProxyType({})
NOTHING: Mapping[str, nn.Parameter] = MappingProxyType({})


class Decoder(nn.Module):
    """A decoder-only language model or one pipeline stage of it, built without memory: `allocate`,
    then `initialise` or a checkpoint, fill it.

    ids [t], the same on every rank of a tensor-parallel group -> hidden states [t, h], or [t_tp, h]
    with `sp`.
    """

    embed: VocabEmbedding
    """Only where the stage has the embedding."""

    entrance: Entrance
    """Only where the stage has the embedding."""

    memory_norm: Norm | Unnormed
    """Only where the memory is taken that later layers look at."""

    norm: Norm
    """Only where the stage has the last norm."""

    head: VocabHead
    """Only where the stage has the loss."""

    further: FurtherPredictions | FurtherLosses
    """Only where the stage has the loss, or layers that predict further ahead."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        *,
        sp: bool = False,
        dtype: torch.dtype = torch.float32,
        stage: Stage | None = None,
        holders: Mapping[str, tuple[int, ...]] = ALONE,
        here: Mapping[str, nn.Parameter] = NOTHING,
        context: ContextConfig = RINGS,
        recompute: RecomputeConfig = KEEP_ALL,
        offload: OffloadConfig = KEEP_HERE,
        overlap: bool = True,
        rings: bool = False,
        products: RingProducts = MESSAGES,
        dispatcher: DispatcherName = "exchange",
    ) -> None:
        """`stage`: what to build; unset: the whole model. Of tables that several stages read,
        `holders` says by name which pipeline ranks hold them, and `here` are those that another
        chunk of this rank has already."""
        super().__init__()
        region: Region = (
            SplitTokens(mesh.tp, overlap=overlap, rings=rings, products=products)
            if sp and mesh.tp.size > 1
            else WholeTokens(mesh.tp, overlap=overlap)
        )
        self.config, self.dtype, self.region = config, dtype, region
        self.stream_dtype = stream_dtype(config, dtype)
        self.stage = stage or whole_model(config.num_layers, config.mtp.depths)
        table = here.get("embed.weight")
        if self.stage.embedding:
            self.embed = VocabEmbedding(_table("embed.weight", config, mesh), region, dtype=dtype)
            self.entrance = Entrance(config, region, dtype=dtype)
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
                region,
                dtype=dtype,
                index=index,
                core=build_attend(context, index, mesh, overlap=overlap),
                recompute=recompute,
                dispatcher=dispatcher,
            )
            for index in self.stage.layers
        )
        self.run_layers = LayerRunner(recompute, offload, mesh.tp)
        self.remember: Remember | None = None
        if (before := config.remembers_before(self.stage.layers)) is not None:
            self.memory_norm = _memory_norm(config, region, dtype=dtype)
            self.remember = Remember(before, self._remembered)
        if self.stage.norm:
            self.norm = build_norm(
                "norm", config.hidden_size, config, invariant=region.invariant, dtype=dtype
            )
        if self.stage.loss:
            self.head = VocabHead(
                _table("embed.weight" if config.tied_embeddings else "head.weight", config, mesh),
                region,
                vocab_size=config.vocab_size,
                tied=table if config.tied_embeddings else None,
                dtype=dtype,
                readout=Readout(config.logit_scale / config.width_factor(), config.logit_softcap),
            )
            table = self.head.weight if config.tied_embeddings else table
        if self.stage.loss and config.mtp.depths > self.stage.further:
            self.further = FurtherLosses(config.mtp.depths, self.head)
        elif self.stage.loss or self.stage.further:
            self.further = FurtherPredictions(
                config,
                mesh,
                region,
                dtype=dtype,
                table=_table("embed.weight", config, mesh),
                shared=table,
                places=self.entrance.places()
                if self.stage.embedding
                else here.get("positions.weight"),
                head=self.head if self.stage.loss else None,
                recompute=recompute,
                dispatcher=dispatcher,
                core=build_attend(context, config.num_layers - 1, mesh, overlap=overlap),
            )
        self.rotations = Rotations(config, dtype)
        _note_places(self, (mesh.pp.rank,), holders)

    def forward(
        self,
        ids: Tensor,
        tokens: Tokens,
        caches: Sequence[LayerCache] | None = None,
        *,
        x: Tensor | None = None,
        memory: Tensor | None = None,
        ahead: tuple[Tensor, ...] = (),
        further: Further = (),
    ) -> Tensor | tuple[Tensor, ...]:
        """ids [t] -> hidden states after the last norm, as the region has tokens.

        A stage of a pipeline begins with `x`, the hidden states that the stage before ended with,
        and ends with its own layers; `memory` goes with them where the model has taken it and
        layers that look at it are still to come, and `ahead`, the hidden states of layers that
        predict further ahead (from `further`, what they read and are to find), from their stage to
        that of the loss.
        """
        tokens = replace(self.relative.given_to(self.rotations.given_to(tokens)), memory=memory)
        if self.stage.embedding:
            x = self.entrance(self.embed(ids), tokens)
        assert x is not None, f"stage {self.stage} begins with hidden states"
        if caches is None:
            x, tokens = self.run_layers(list(self.layers), x, tokens, self.remember)
        else:
            x = self._read_on(x, tokens, caches)
        if self.stage.norm:
            x = value_of(self.norm(x))
        if self.config.needs_memory(self.stage.layers.stop):
            assert tokens.memory is not None, f"stage {self.stage} hands on a memory"
            return x, tokens.memory
        if self.stage.further and not self.stage.loss:
            assert isinstance(self.further, FurtherPredictions)
            ahead = self.further.states(x, further, tokens)
        return (x, *ahead) if ahead else x

    def received(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """What the stage before ended with, as `forward` is given it; nothing where the embedding
        is."""
        if not tensors:
            return {}
        x, *rest = tensors
        looked_at = self.config.needs_memory(self.stage.layers.start)
        return {"x": x} | ({"memory": rest[0]} if looked_at else {"ahead": tuple(rest)})

    def _read_on(self, x: Tensor, tokens: Tokens, caches: Sequence[LayerCache]) -> Tensor:
        """All layers, with a cache for every attention in their order."""
        left = iter(caches)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if self.remember is not None and number == self.remember.before:
                tokens = replace(tokens, memory=self.remember.how(x))
            x = layer(x, tokens, *islice(left, layer.attentions))
        assert next(left, None) is None, "a cache for no attention"
        return x

    def _remembered(self, x: Tensor) -> Tensor:
        """What later layers look at of x [t, h]."""
        return value_of(self.memory_norm(x))

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        tokens: Tokens,
        *,
        x: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Sum of -log p(label) over the labels [t] that are not negative; the same on every
        tensor-parallel rank."""
        return self.head.loss(self(ids, tokens, x=x, memory=memory), labels)

    def losses(
        self, ids: Tensor, labels: Tensor, tokens: Tokens, *, further: Further = (), **received: Any
    ) -> tuple[Tensor, ...]:
        """`loss`, and after it the same of every depth that predicts further ahead and has its
        (ids, labels) there.

        received: as `forward` is given it.
        """
        tokens = self.rotations.given_to(tokens)
        hidden = self._hidden(ids, tokens, received)
        own = self.head.loss(hidden[0], labels)
        return own, *self.further.losses(hidden, further, self.relative.given_to(tokens))

    def judged(
        self, ids: Tensor, labels: Tensor, tokens: Tokens, *, further: Further = (), **received: Any
    ) -> Tensor:
        """For evaluation, float64: `losses`, and behind them what `accepted` says of depths that
        predict further."""
        tokens = self.rotations.given_to(tokens)
        hidden = self._hidden(ids, tokens, received)
        own = self.head.loss(hidden[0], labels, judged=True)
        losses, right = self.further.judged(hidden, further, self.relative.given_to(tokens))
        measured = torch.stack([own, *losses]).double()
        return (
            torch.cat([measured, accepted(right, [labels for _, labels in further])])
            if right
            else measured
        )

    def _hidden(
        self, ids: Tensor, tokens: Tokens, received: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        """The model's hidden states, and those of depths that another stage has computed."""
        found = self(ids, tokens, **received)
        return found if isinstance(found, tuple) else (found,)

    def logits(
        self, ids: Tensor, tokens: Tokens, caches: Sequence[LayerCache], wanted: Tensor
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
    products: RingProducts = MESSAGES,
) -> list[Decoder]:
    """The chunks of the model that this rank holds, by chunk number; the whole model without a
    pipeline.

    A table that several pipeline ranks use is a parameter of the same name on all of them; one that
    several chunks of a rank use is one parameter.

    Raises:
        PlanError: the layers do not divide as asked.
    """
    pp, pipeline = mesh.pp.size, parallel.pipeline
    stages = plan_stages(pipeline, pp=pp, num_layers=config.num_layers, depths=config.mtp.depths)
    holders, here = table_holders(config, stages, pipeline, pp=pp), dict[str, nn.Parameter]()
    chunks: list[Decoder] = []
    for stage in stages_of_rank(stages, mesh.pp.rank, pipeline, pp=pp):
        chunk = Decoder(
            config,
            mesh,
            sp=parallel.sp,
            dtype=dtype,
            stage=stage,
            holders=holders,
            here=here,
            context=parallel.context,
            recompute=recompute,
            offload=offload,
            overlap=parallel.overlap,
            rings=parallel.rings,
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


def declared_parameters(model: nn.Module) -> Iterator[tuple[Declared, nn.Module, str]]:
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
            _place_below_one_another(module.sunk())


def initialise(model: nn.Module, *, seed: int) -> None:
    """Write the first weights, the same for a seed under every layout."""
    for declared, module, name in declared_parameters(model):
        fill(getattr(module, name), declared.shard, declared.init, seed=seed)


def _place_below_one_another(parameters: Sequence[nn.Parameter]) -> None:
    """Give matrices that one matmul reads one storage; each matmul would have to copy them into one
    otherwise."""
    both = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(
        parameters, both.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = rows


def _memory_norm(config: ModelConfig, region: Region, *, dtype: torch.dtype) -> Norm | Unnormed:
    """Of what later layers look at: as what layers read, so none where a model norms only what they
    give."""
    if config.norm_placement == "after":
        return Unnormed(dtype)
    return build_norm(
        "memory_norm", config.hidden_size, config, invariant=region.invariant, dtype=dtype
    )


def _table(name: str, config: ModelConfig, mesh: Mesh) -> Declared:
    """My rows of a vocabulary table [v, h]; rows that only pad it are zero."""
    rows = config.padded_vocab_size()
    shard = whole(name, (rows, config.hidden_size))
    shard = cut_dim(shard, 0, split_evenly(rows, mesh.tp.size), mesh.tp.rank, mesh.tp.axes)
    return Declared(shard, Init(config.init_std, rows=config.vocab_size))


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
