"""The decoder-only transformer: tokens in, loss or scores out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

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
from megalith.nn.mtp import FurtherPredictions, accepted
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
from megalith.plan.stages import Stage, bias_ranks, plan_stages, stages_of_rank, table_ranks, whole_model

RINGS, KEEP_ALL, KEEP_HERE = ContextConfig(), RecomputeConfig(), OffloadConfig()


class Decoder(nn.Module):
    """A decoder-only language model or one pipeline stage of it, built without memory: `allocate`, then `initialise` or
    a checkpoint, fill it.

    ids [t], the same on every rank of a tensor-parallel group -> hidden states [t, h], or [t_tp, h] with `sp`.
    """

    embed: VocabEmbedding
    """Only where the stage has the embedding."""

    entrance: Entrance
    """Only where the stage has the embedding."""

    memory_norm: Norm | Unnormed
    """Only where the memory is taken that later layers look at."""

    norm: Norm
    """Only where the stage has the loss."""

    head: VocabHead
    """Only where the stage has the loss."""

    further: FurtherPredictions
    """Only where the stage has the loss."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, *, sp: bool = False, dtype: torch.dtype = torch.float32,
        stage: Stage | None = None, table: Sequence[int] | None = None, tied: nn.Parameter | None = None,
        biased: Sequence[int] | None = None, biases: nn.Parameter | None = None, places: nn.Parameter | None = None,
        context: ContextConfig = RINGS, recompute: RecomputeConfig = KEEP_ALL, offload: OffloadConfig = KEEP_HERE,
        overlap: bool = True, rings: bool = False, products: RingProducts = MESSAGES,
        dispatcher: DispatcherName = "exchange",
    ) -> None:  # fmt: skip
        """`stage`: what to build; unset: the whole model. Where both ends need the embedding's table, `table` says
        which pipeline ranks hold it, and `tied` is it where another chunk of this rank has the embedding; `biased` and
        `biases` say the same of the table of relative positions, and `places` is that of learnt ones."""
        super().__init__()
        region: Region = (
            SplitTokens(mesh.tp, overlap=overlap, rings=rings, products=products)
            if sp and mesh.tp.size > 1
            else WholeTokens(mesh.tp, overlap=overlap)
        )
        self.config, self.dtype, self.region = config, dtype, region
        self.stream_dtype = stream_dtype(config, dtype)
        self.stage = stage or whole_model(config.num_layers)
        if self.stage.embedding:
            self.embed = VocabEmbedding(_table("embed.weight", config, mesh), region, dtype=dtype)
            self.entrance = Entrance(config, region, dtype=dtype)
            tied, places = self.embed.weight, self.entrance.places()
        needed = config.needs_biases(layers=len(self.stage.layers), loss=self.stage.loss)
        self.relative = RelativeBias(config, mesh, dtype=dtype, shared=biases) if needed else NoBias()
        self.layers = nn.ModuleList(
            block_of_layer(config, index)(
                f"layers.{index}", config, mesh, region, dtype=dtype, index=index,
                core=build_attend(context, index, mesh, overlap=overlap), recompute=recompute, dispatcher=dispatcher,
            )
            for index in self.stage.layers
        )  # fmt: skip
        self.run_layers = LayerRunner(recompute, offload, mesh.tp)
        self.remember: Remember | None = None
        if (before := config.remembers_before(self.stage.layers)) is not None:
            self.memory_norm = _memory_norm(config, region, dtype=dtype)
            self.remember = Remember(before, self._remembered)
        if self.stage.loss:
            self.norm = build_norm("norm", config.hidden_size, config, invariant=region.invariant, dtype=dtype)
            self.head = VocabHead(
                _table("embed.weight" if config.tied_embeddings else "head.weight", config, mesh), region,
                vocab_size=config.vocab_size, tied=tied if config.tied_embeddings else None, dtype=dtype,
                readout=Readout(config.logit_scale / config.width_factor(), config.logit_softcap),
            )  # fmt: skip
            self.further = FurtherPredictions(
                config, mesh, region, dtype=dtype, table=_table("embed.weight", config, mesh), head=self.head,
                shared=self.head.weight if config.tied_embeddings else tied, recompute=recompute,
                core=build_attend(context, config.num_layers - 1, mesh, overlap=overlap), dispatcher=dispatcher,
                places=places,
            )  # fmt: skip
        self.rotations = Rotations(config, dtype)
        alone = (mesh.pp.rank,)
        ends = {"embed.weight": config.shares_table(), "positions.weight": config.shares_places()}
        shared = {name: tuple(table or alone) for name, by_both in ends.items() if by_both}
        _note_places(self, alone, shared | {"relative.weight": tuple(biased or alone)})

    def forward(
        self, ids: Tensor, tokens: Tokens, caches: Sequence[LayerCache] | None = None, *, x: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """ids [t] -> hidden states after the last norm, as the region has tokens.

        A stage of a pipeline begins with `x`, the hidden states that the stage before ended with, and ends with its
        own layers; `memory` goes with them where the model has taken it and layers that look at it are still to come.
        """
        tokens = replace(self.relative.given_to(self.rotations.given_to(tokens)), memory=memory)
        if self.stage.embedding:
            x = self.entrance(self.embed(ids), tokens)
        assert x is not None, f"stage {self.stage} begins with hidden states"
        if caches is None:
            x, tokens = self.run_layers(list(self.layers), x, tokens, self.remember)
        else:
            x = self._read_on(x, tokens, caches)
        if self.stage.loss:
            return value_of(self.norm(x))
        if not self.config.needs_memory(self.stage.layers.stop):
            return x
        assert tokens.memory is not None, f"stage {self.stage} hands on a memory"
        return x, tokens.memory

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
        self, ids: Tensor, labels: Tensor, tokens: Tokens, *, x: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """Sum of -log p(label) over the labels [t] that are not negative; the same on every tensor-parallel rank."""
        return self.head.loss(self(ids, tokens, x=x, memory=memory), labels)

    def losses(
        self, ids: Tensor, labels: Tensor, tokens: Tokens, *, x: Tensor | None = None, memory: Tensor | None = None,
        further: tuple[tuple[Tensor, Tensor], ...] = (),
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`loss`, and after it the same of every depth that predicts further ahead and has its (ids, labels) there."""
        tokens = self.rotations.given_to(tokens)
        x = self(ids, tokens, x=x, memory=memory)
        return self.head.loss(x, labels), *self.further.losses(x, further, self.relative.given_to(tokens))

    def judged(
        self, ids: Tensor, labels: Tensor, tokens: Tokens, *, x: Tensor | None = None, memory: Tensor | None = None,
        further: tuple[tuple[Tensor, Tensor], ...] = (),
    ) -> Tensor:  # fmt: skip
        """For evaluation, float64: `losses`, and behind them what `accepted` says of depths that predict further."""
        tokens = self.rotations.given_to(tokens)
        x = self(ids, tokens, x=x, memory=memory)
        own = self.head.loss(x, labels, judged=True)
        losses, right = self.further.judged(x, further, self.relative.given_to(tokens))
        measured = torch.stack([own, *losses]).double()
        return torch.cat([measured, accepted(right, [labels for _, labels in further])]) if right else measured

    def logits(self, ids: Tensor, tokens: Tokens, caches: Sequence[LayerCache], wanted: Tensor) -> Tensor:
        """Scores [len(wanted), vocab_size] of the tokens numbered `wanted`; every rank must have all tokens (no sp)."""
        return self.head.logits(self(ids, tokens, caches)[wanted])


def build_chunks(
    config: ModelConfig, mesh: Mesh, parallel: ParallelConfig, *, dtype: torch.dtype = torch.float32,
    recompute: RecomputeConfig = KEEP_ALL, offload: OffloadConfig = KEEP_HERE, products: RingProducts = MESSAGES,
) -> list[Decoder]:  # fmt: skip
    """The chunks of the model that this rank holds, by chunk number; the whole model without a pipeline.

    A table that two pipeline ranks use is a parameter of the same name on both; one that two chunks of a rank use is
    one parameter.

    Raises:
        PlanError: the layers do not divide as asked.
    """
    pp, pipeline = mesh.pp.size, parallel.pipeline
    stages = plan_stages(pipeline, pp=pp, num_layers=config.num_layers)
    table, biased = table_ranks(stages, pipeline, pp=pp), bias_ranks(config, stages, pipeline, pp=pp)
    chunks: list[Decoder] = []
    for stage in stages_of_rank(stages, mesh.pp.rank, pipeline, pp=pp):
        tied = next((chunk.embed.weight for chunk in chunks if chunk.stage.embedding), None)
        biases = next((c.relative.weight for c in chunks if isinstance(c.relative, RelativeBias)), None)
        places = next((chunk.entrance.places() for chunk in chunks if chunk.stage.embedding), None)
        chunks.append(
            Decoder(
                config, mesh, sp=parallel.sp, dtype=dtype, stage=stage, table=table, tied=tied,
                biased=biased, biases=biases, places=places,
                context=parallel.context, recompute=recompute, offload=offload, overlap=parallel.overlap,
                rings=parallel.rings, products=products, dispatcher=parallel.dispatcher,
            )
        )  # fmt: skip
    return chunks


def declared_parameters(model: nn.Module) -> Iterator[tuple[Declared, nn.Module, str]]:
    """Every parameter once, in the order of the forward pass: what its layer declared, the layer, its name there."""
    for module in model.modules():
        for name, declared in module.__dict__.get("declared", {}).items():
            yield declared, module, name


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give every parameter memory on `device`, with undefined values; a tied head keeps sharing its parameter."""
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
    """Give matrices that one matmul reads one storage; each matmul would have to copy them into one otherwise."""
    both = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, both.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = rows


def _memory_norm(config: ModelConfig, region: Region, *, dtype: torch.dtype) -> Norm | Unnormed:
    """Of what later layers look at: as what layers read, so none where a model norms only what they give."""
    if config.norm_placement == "after":
        return Unnormed(dtype)
    return build_norm("memory_norm", config.hidden_size, config, invariant=region.invariant, dtype=dtype)


def _table(name: str, config: ModelConfig, mesh: Mesh) -> Declared:
    """My rows of a vocabulary table [v, h]; rows that only pad it are zero."""
    rows = config.padded_vocab_size()
    shard = whole(name, (rows, config.hidden_size))
    shard = cut_dim(shard, 0, split_evenly(rows, mesh.tp.size), mesh.tp.rank, mesh.tp.axes)
    return Declared(shard, Init(config.init_std, rows=config.vocab_size))


def _note_places(model: Decoder, here: tuple[int, ...], shared: Mapping[str, tuple[int, ...]]) -> None:
    """Write into every parameter's declaration which pipeline ranks hold it, those of `shared`, by name, or `here`; and
    how its first values are spread."""
    for declared, module, name in list(declared_parameters(model)):
        shard, init = declared.shard, declared.init
        start = start_of(model.config, shard.name, shard.shape, shard.inputs, init.std)
        init = replace(init, std=start.std, uniform=start.uniform)
        shard = replace(shard, stages=shared.get(shard.name, here))
        module.__dict__["declared"][name] = replace(declared, shard=shard, init=init)
