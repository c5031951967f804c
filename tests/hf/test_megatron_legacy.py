"""Legacy Megatron checkpoints (`--ckpt-format torch`), written here in Megatron-LM's layout."""

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.chunks import MegatronFolder
from megalith.config.model import MLAConfig, ModelConfig
from megalith.config.moe import MoEConfig
from megalith.errors import CheckpointError
from megalith.hf.megatron_legacy import read_legacy_folder
from megalith.hf.megatron_names import list_megatron_tensors, normalize_tensors
from megalith.hf.megatron_optimizer import OptimizerState, read_optimizer, verify_buckets

DENSE = ModelConfig(
    vocab_size=30,
    hidden_size=8,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    ffn_hidden_size=12,
    max_seq_len=16,
)
TIED = replace(DENSE, tied_embeddings=True)
MOE = replace(DENSE, num_layers=2, moe=MoEConfig(num_experts=4, ffn_hidden_size=6))
MLA = replace(
    DENSE,
    num_layers=2,
    num_kv_heads=4,
    head_dim=None,
    mla=MLAConfig(kv_rank=6, q_rank=4, nope_dim=3, rope_dim=2, value_dim=2),
)
PADDED_VOCAB = 32
STEP = 7

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
ATTENTION = (
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
)
LATENT_ATTENTION = (
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
)
MLP = ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
ROUTER = ("pre_mlp_layernorm.weight", "mlp.router.weight")
EXPERTS = "mlp.experts.experts"

SPLITS = {
    **dict.fromkeys(("word_embeddings", "output_layer", "linear_qkv", "linear_fc1"), 0),
    **dict.fromkeys(("linear_q_up_proj", "linear_kv_up_proj"), 0),
    **dict.fromkeys(("linear_proj", "linear_fc2"), 1),
}
"""Split dims of matrices by module."""


@dataclass
class LegacyWriter:
    """Writes a model as tp * pp * ep parts, with the steps of Megatron-LM."""

    model: ModelConfig
    tp: int = 2
    pp: int = 2
    vpp: int = 1
    ep: int = 1
    splits: dict[str, int] = field(default_factory=lambda: dict(SPLITS))
    bucket_size: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Roles (weight, param, exp_avg, exp_avg_sq) of each canonical tensor."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in list_megatron_tensors(self.model).items():
            shape = tensor.shape
            if name in (EMBEDDING, OUTPUT):
                shape = (PADDED_VOCAB, *shape[1:])
            master = torch.randn(shape, generator=generator)
            self.tensors[name] = {
                "weight": master.bfloat16(),
                "param": master,
                "exp_avg": torch.randn(shape, generator=generator),
                "exp_avg_sq": torch.rand(shape, generator=generator),
            }

    def args(self) -> Namespace:
        """Return the args of the run."""
        model = self.model
        values: dict[str, Any] = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "world_size": self.tp * self.pp * self.ep,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_heads,
            "kv_channels": model.head_dim,
            "group_query_attention": model.mla is None,
            "num_query_groups": model.num_kv_heads,
            "ffn_hidden_size": model.ffn_hidden_size,
            "padded_vocab_size": PADDED_VOCAB,
            "max_position_embeddings": 16,
            "swiglu": True,
            "untie_embeddings_and_output_weights": not model.tied_embeddings,
            "overlap_grad_reduce": self.bucket_size is not None,
            "ddp_bucket_size": self.bucket_size,
        }
        if model.moe is not None:
            values |= {"num_experts": model.moe.num_experts}
            values |= {"moe_ffn_hidden_size": model.moe.ffn_hidden_size}
        if model.mla is not None:
            values |= {"multi_latent_attention": True, "q_lora_rank": model.mla.q_rank}
            values |= {"kv_lora_rank": model.mla.kv_rank, "v_head_dim": model.mla.value_dim}
            values |= {"qk_head_dim": model.mla.nope_dim}
            values |= {"qk_pos_emb_head_dim": model.mla.rope_dim}
        return Namespace(**values | self.changes)

    def write(self, path: Path, optimizer: str | None = "distributed") -> Path:
        """Write all parts; `optimizer`: distributed, replicated, or None."""
        for pp in range(self.pp):
            for tp in range(self.tp):
                for ep in range(self.ep):
                    name = f"mp_rank_{tp:02d}"
                    name += f"_{pp:03d}" if self.pp > 1 else ""
                    name += f"_{ep:03d}" if self.ep > 1 else ""
                    (path / name).mkdir(parents=True)
                    self._write_part(path / name, tp, pp, ep, optimizer)
        return path

    def _write_part(self, folder: Path, tp: int, pp: int, ep: int, optimizer: str | None) -> None:
        chunks = [list(self._chunk(tp, pp, ep, chunk)) for chunk in range(self.vpp)]
        state: dict[str, Any] = {"args": self.args(), "iteration": 9, "checkpoint_version": 3.0}
        for number, chunk in enumerate(chunks):
            key = f"model{number}" if self.vpp > 1 else "model"
            state[key] = {name: roles["weight"] for name, roles in chunk}
            state[key]["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
        expert = [[one for one in chunk if "local_experts" in one[0]] for chunk in chunks]
        dense = [[one for one in chunk if "local_experts" not in one[0]] for chunk in chunks]
        chained = [dense, expert] if self.ep > 1 else [chunks]
        groups = [{"step": STEP, "wd_mult": mult} for mult in (1.0, 0.0)]
        if optimizer == "distributed":
            inner = [{"optimizer": {"param_groups": groups}} for _ in chained]
            flat = [self._flat(members, pp) for members in chained]
            torch.save(flat if len(flat) > 1 else flat[0], folder / "distrib_optim.pt")
            state["optimizer"] = inner if len(inner) > 1 else inner[0]
        elif optimizer == "replicated":
            full = [_replicated(members) for members in chained]
            state["optimizer"] = full if len(full) > 1 else full[0]
        torch.save(state, folder / "model_optim_rng.pt")

    def _chunk(
        self, tp: int, pp: int, ep: int, chunk: int
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the local parameters of a model chunk in order of registration."""
        per_chunk = self.model.num_layers // (self.pp * self.vpp)
        first = (chunk * self.pp + pp) * per_chunk
        last = pp == self.pp - 1 and chunk == self.vpp - 1
        if pp == 0 and chunk == 0:
            yield EMBEDDING, self._local(EMBEDDING, tp)
        for layer in range(per_chunk):
            source, target = f"decoder.layers.{first + layer}.", f"decoder.layers.{layer}."
            names = LATENT_ATTENTION if self.model.mla else ATTENTION
            for name in (*names, *(ROUTER if self.model.moe else MLP)):
                yield target + name, self._local(source + name, tp)
            num_experts = self.model.moe.num_experts // self.ep if self.model.moe else 0
            for expert in range(num_experts):
                for linear in ("linear_fc1", "linear_fc2"):
                    key = f"{source}{EXPERTS}.{linear}.weight"
                    name = f"{target}mlp.experts.local_experts.{expert}.{linear}.weight"
                    yield name, self._local(key, tp, expert=ep * num_experts + expert)
        if last:
            yield "decoder.final_layernorm.weight", self._local("decoder.final_layernorm.weight", 0)
            if not self.model.tied_embeddings:
                yield OUTPUT, self._local(OUTPUT, tp)
            elif self.pp > 1:
                yield OUTPUT, self._local(EMBEDDING, tp)

    def _local(self, name: str, tp: int, *, expert: int | None = None) -> dict[str, Tensor]:
        module, leaf = name.split(".")[-2:]
        dim = self.splits.get(module) if leaf == "weight" else None
        result = {}
        for role, values in self.tensors[name].items():
            whole = values if expert is None else values[expert]
            if dim is None:
                local = whole
            elif module == "linear_fc1":
                gate, up = whole.chunk(2)
                local = torch.cat([gate.chunk(self.tp)[tp], up.chunk(self.tp)[tp]])
            else:
                local = whole.chunk(self.tp, dim)[tp]
            result[role] = local.clone()
        return result

    def _flat(
        self, chunks: list[list[tuple[str, dict[str, Tensor]]]], pp: int
    ) -> dict[object, Any]:
        """Return the flat buffers: reverse order, 64-element alignment, buckets that close at
        `bucket_size` elements in the first chunk, without the padding at their ends."""
        state: dict[object, Any] = {"buckets_coalesced": True}
        buffers = [(number, chunk) for number, chunk in enumerate(chunks) if chunk]
        for index, (number, chunk) in enumerate(buffers):
            flat: dict[str, Any] = {}
            for role in ("param", "exp_avg", "exp_avg_sq"):
                size = self.bucket_size if pp == number == 0 else None
                flat[role] = torch.cat(list(self._buckets(chunk, role, size)))
            flat["numel_unpadded"] = flat["param"].numel()
            state[index] = {(torch.bfloat16, torch.float32): flat}
        return state

    def _buckets(
        self, chunk: list[tuple[str, dict[str, Tensor]]], role: str, size: int | None
    ) -> Iterator[Tensor]:
        bucket = torch.empty(0)
        for name, roles in reversed(chunk):
            bucket = torch.nn.functional.pad(bucket, (0, -bucket.numel() % 64))
            shared = self.model.tied_embeddings and name in (EMBEDDING, OUTPUT) and self.pp > 1
            if shared and bucket.numel():
                yield bucket
                bucket = torch.empty(0)
            bucket = torch.cat([bucket, roles[role].reshape(-1)])
            if shared or (size is not None and bucket.numel() >= size):
                yield bucket
                bucket = torch.empty(0)
        if bucket.numel():
            yield bucket


def _replicated(chunks: list[list[tuple[str, dict[str, Tensor]]]]) -> dict[str, Any]:
    """Return the state of Float16OptimizerWithFloat16Params: one group of matrices, one of
    vectors."""
    params = [one for chunk in chunks for one in chunk]
    groups: list[dict[str, Any]] = []
    master_weights = []
    state: dict[int, dict[str, Tensor]] = {}
    for is_vector in (False, True):
        own = [roles for _, roles in params if (roles["param"].dim() == 1) == is_vector]
        indices = list(range(len(state), len(state) + len(own)))
        groups.append({"params": indices, "step": STEP})
        master_weights.append([torch.nn.Parameter(roles["param"]) for roles in own])
        for index, roles in zip(indices, own, strict=True):
            state[index] = {key: roles[key] for key in ("exp_avg", "exp_avg_sq")}
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "fp32_from_fp16_params": master_weights,
        "grad_scaler": {"scale": torch.tensor([1024.0]), "growth_tracker": torch.tensor([3])},
    }


CASES = {
    "tp, pp, vpp": LegacyWriter(DENSE, vpp=2),
    "tied": LegacyWriter(TIED),
    "several buckets": LegacyWriter(TIED, vpp=2, bucket_size=100),
    "one rank": LegacyWriter(TIED, tp=1, pp=1),
    "experts": LegacyWriter(MOE, ep=2),
    "experts without pp": LegacyWriter(MOE, pp=1, ep=4, tp=1),
    "experts, ep 1": LegacyWriter(MOE),
    "mla, te": LegacyWriter(MLA),
    "mla, local": LegacyWriter(
        MLA, splits=SPLITS | {"linear_q_down_proj": 0, "linear_kv_down_proj": 0}
    ),
}


def _read_file(path: Path) -> Any:
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path, weights_only=True)


def _load(path: Path, model: ModelConfig) -> tuple[MegatronFolder, dict[str, Any], OptimizerState]:
    folder = read_legacy_folder(path)
    weights = normalize_tensors(folder, model)
    return folder, weights, read_optimizer(folder, model, weights)


@pytest.mark.parametrize("optimizer", ["distributed", "replicated"])
@pytest.mark.parametrize("name", CASES)
def test_legacy_folder_is_read_bit_for_bit(tmp_path: Path, name: str, optimizer: str) -> None:
    writer = CASES[name]
    folder, weights, state = _load(writer.write(tmp_path, optimizer), writer.model)
    assert folder.format == "torch"
    assert folder.common["iteration"] == 9
    assert state.step == STEP
    assert state.needs_verification
    assert state.loss_scale == (1024.0 if optimizer == "replicated" else None)
    verify_buckets(state, weights)
    assert len(state.tensors) == 3 * len(writer.tensors)
    keys = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    for tensor_name, roles in writer.tensors.items():
        shape = weights[tensor_name].shape
        assert torch.equal(weights[tensor_name].read(), roles["weight"][: shape[0]]), tensor_name
        for role, key in keys.items():
            stored = state.tensors[f"{key}.{tensor_name}"].read()
            assert torch.equal(stored, roles[role][: shape[0]]), (tensor_name, role)


def test_swapped_parameters_in_a_buffer_are_rejected_by_name(tmp_path: Path) -> None:
    writer = CASES["tied"]
    writer.write(tmp_path)
    file = tmp_path / "mp_rank_01_001" / "model_optim_rng.pt"
    content = _read_file(file)
    names = [f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in (0, 1)]
    model = content["model"]
    model[names[0]], model[names[1]] = model[names[1]], model[names[0]]
    torch.save(content, file)
    _, weights, state = _load(tmp_path, writer.model)
    share = {}
    for rank in range(4):
        try:
            verify_buckets(state, weights, rank=rank, world_size=4)
        except CheckpointError as error:
            share[rank] = str(error)
    assert share
    for text in share.values():
        assert "master weights of decoder.layers." in text
        assert ".self_attention.linear_qkv.weight do not round to its weights" in text
        assert "checkpoint.load_mode=weights" in text


def test_old_names_and_row_orders_are_read(tmp_path: Path) -> None:
    """Checkpoint versions 0 and 1 order the rows of queries, keys and values differently."""
    model = replace(DENSE, num_kv_heads=4, num_layers=2)
    writer = LegacyWriter(model, pp=1, changes={"group_query_attention": False})
    writer.write(tmp_path / "new", None)
    old_names = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "self_attention.linear_qkv.": "self_attention.query_key_value.",
        "self_attention.linear_proj.": "self_attention.dense.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    }
    for version in (0, 1.0):
        path = tmp_path / str(version)
        shutil.copytree(tmp_path / "new", path)
        for file in path.glob("*/model_optim_rng.pt"):
            content = _read_file(file)
            content["checkpoint_version"] = version
            encoder: dict[str, Tensor] = {}
            for name, value in content["model"].items():
                renamed = name.removeprefix("decoder.")
                for new, old in old_names.items():
                    renamed = renamed.replace(new, old)
                if "query_key_value" in renamed:
                    rows = value.reshape(2, 3, 2, -1)
                    rows = rows.transpose(0, 1) if version == 0 else rows.transpose(1, 2)
                    value = rows.reshape(value.shape)
                encoder[renamed] = value
            word = {"weight": encoder.pop(EMBEDDING)}
            output = {"weight": encoder.pop(OUTPUT)}
            content["model"] = {
                "language_model": {
                    "embedding": {"word_embeddings": word},
                    "encoder": encoder,
                    "output_layer": output,
                }
            }
            torch.save(content, file)
        weights = normalize_tensors(read_legacy_folder(path), model)
        for name, roles in writer.tensors.items():
            expected = roles["weight"][: weights[name].shape[0]]
            assert torch.equal(weights[name].read(), expected), (version, name)


def _edit(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = _read_file(path / file)
        change(content)
        torch.save(content, path / file)

    return apply


FIRST = "mp_rank_00_000/model_optim_rng.pt"
FLAT = "mp_rank_00_000/distrib_optim.pt"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
MODES = r"checkpoint\.load_mode=weights"


def _arg(name: str, value: object) -> Callable[[Path], None]:
    return _edit(FIRST, lambda content: setattr(content["args"], name, value))


BAD: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing part": (
        r"tp=2, pp=2, ep=1, but these parts are missing: mp_rank_01_001\.",
        lambda path: shutil.rmtree(path / "mp_rank_01_001"),
    ),
    "name": (
        r"mp_rank_00_000_000_000: the name is not that of a part",
        lambda path: (path / "mp_rank_00_000_000_000").mkdir(),
    ),
    "other world size": (
        r"to which mp_rank_02_000 does not belong",
        lambda path: (path / "mp_rank_02_000").mkdir(),
    ),
    "no parts": (
        r"no mp_rank_… folder",
        lambda path: [shutil.rmtree(part) for part in path.iterdir()],
    ),
    "no file": (r"model_optim_rng\.pt is missing", lambda path: (path / FIRST).unlink()),
    "layer-wise optimizer": (
        r"layer_wise_optimizer_0\.pt: files of a layer-wise optimizer are not read",
        lambda path: (path / "mp_rank_00_000" / "layer_wise_optimizer_0.pt").touch(),
    ),
    "many parts": (
        r"parts are missing: mp_rank_02_000, mp_rank_03_000, ",
        _edit(
            FIRST,
            lambda c: c["args"].__dict__.update(
                tensor_model_parallel_size=65536, world_size=1 << 17
            ),
        ),
    ),
    "ep": (r"args\.expert_model_parallel_size='x'", _arg("expert_model_parallel_size", "x")),
    "experts": (r"args\.num_experts='x'", _arg("num_experts", "x")),
    "experts over ep": (
        r"num_experts=3 is not a multiple of expert_model_parallel_size=2",
        _edit(
            FIRST,
            lambda c: c["args"].__dict__.update(
                num_experts=3, expert_model_parallel_size=2, world_size=8
            ),
        ),
    ),
    "version": (
        r"checkpoint_version='x' is not a number",
        _edit(FIRST, lambda c: c.update(checkpoint_version="x")),
    ),
    "version 1 with GQA": (
        r"checkpoint_version=1 is older than grouped-query attention.*num_query_groups=2",
        _edit(FIRST, lambda c: c.update(checkpoint_version=1)),
    ),
    "no args": (r"has no args", _edit(FIRST, lambda c: c.pop("args"))),
    "scalar": (
        rf"{QKV} is a scalar",
        _edit(FIRST, lambda c: c["model"].update({QKV: torch.tensor(1.0)})),
    ),
    "shape": (
        rf"{QKV} has the shape \[3, 8\], but the args of the checkpoint give \[16, 8\], whole or",
        _edit(FIRST, lambda c: c["model"].update({QKV: torch.ones(3, 8)})),
    ),
    "unknown tensor": (
        r"x\.weight: the args of the checkpoint give no shape",
        _edit(FIRST, lambda c: c["model"].update({"x.weight": torch.ones(3)})),
    ),
    "layer": (
        r"layers\.2\.mlp\.linear_fc2\.weight: the args of the checkpoint give 2 layers",
        _edit(
            FIRST,
            lambda c: c["model"].update({"decoder.layers.2.mlp.linear_fc2.weight": torch.ones(1)}),
        ),
    ),
    "no model": (r"has no 'model'", _edit(FIRST, lambda c: c.pop("model"))),
    "steps": (
        r"optimizer states of different steps \(7\.0, 8\.0\)",
        _edit(FIRST, lambda c: c["optimizer"]["optimizer"]["param_groups"][0].update(step=8)),
    ),
    "old flat buffers": (
        rf"without buckets_coalesced.*{MODES}",
        _edit(FLAT, lambda c: c.pop("buckets_coalesced")),
    ),
    "short buffer": (
        rf"distrib_optim\.pt\[0\] has 3 elements.*{MODES}",
        _edit(FLAT, lambda c: c[0][torch.bfloat16, torch.float32].update(numel_unpadded=3)),
    ),
    "no buffer": (rf"distrib_optim\.pt\[0\] is missing.*{MODES}", _edit(FLAT, lambda c: c.pop(0))),
    "buffer too many": (
        rf"has 2 buffers, but the weights and the args give 1\. .*{MODES}",
        _edit(FLAT, lambda c: c.update({1: c[0]})),
    ),
    "no optimizer state in one part": (
        r"parts of optimizer\.state\.\w+\.[\w.]+ do not cover it \(.*\), so a part lacks it",
        lambda path: torch.save(None, path / FLAT),
    ),
    "truncated buffers": (
        r"distrib_optim\.pt",
        lambda path: (path / FLAT).write_bytes((path / FLAT).read_bytes()[:500]),
    ),
    "truncated": (
        r"model_optim_rng\.pt",
        lambda path: (path / FIRST).write_bytes((path / FIRST).read_bytes()[:500]),
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES["tied"].write(tmp_path_factory.mktemp("legacy") / "good")


IN_OPTIMIZER = {
    "layer-wise optimizer",
    "steps",
    "old flat buffers",
    "short buffer",
    "no buffer",
    "buffer too many",
    "no optimizer state in one part",
    "truncated buffers",
}
"""Cases of `BAD` whose weights can be loaded."""


@pytest.mark.parametrize("name", BAD)
def test_damaged_legacy_folders_are_rejected(tmp_path: Path, good: Path, name: str) -> None:
    message, damage = BAD[name]
    path = tmp_path / "iter_0000009"
    shutil.copytree(good, path)
    damage(path)
    if name not in IN_OPTIMIZER:
        with pytest.raises(CheckpointError, match=message):
            read_legacy_folder(path)
        return
    assert "checkpoint.load_mode=weights" in str(read_legacy_folder(path).optimizer_problem)
    model, tensors = CASES["tied"].model, CASES["tied"].tensors
    weights = normalize_tensors(read_legacy_folder(path), model)
    for key, weight in weights.items():
        assert torch.equal(weight.read(), tensors[key]["weight"][: weight.shape[0]]), key
    with pytest.raises(CheckpointError, match=message):
        read_optimizer(read_legacy_folder(path), model, weights)


def test_archives_older_than_torch_1_6_are_rejected(tmp_path: Path, good: Path) -> None:
    path = tmp_path / "old"
    shutil.copytree(good, path)
    content = _read_file(path / FIRST)
    torch.save(content, path / FIRST, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"model_optim_rng\.pt.*1\.6"):
        read_legacy_folder(path)


def test_optimizer_states_that_fit_no_param_group_are_rejected(tmp_path: Path) -> None:
    writer = CASES["tied"]
    writer.write(tmp_path, "replicated")

    def shorten(content: dict[str, Any]) -> None:
        content["optimizer"]["optimizer"]["param_groups"][0]["params"].pop()

    _edit(FIRST, shorten)(tmp_path)
    with pytest.raises(CheckpointError, match=rf"param group 0 .* has \d+ parameters.*{MODES}"):
        _load(tmp_path, writer.model)
    weights_only = read_legacy_folder(writer.write(tmp_path / "weights", None))
    weights = normalize_tensors(weights_only, writer.model)
    with pytest.raises(CheckpointError, match=rf"has no optimizer state\. .*{MODES}"):
        read_optimizer(weights_only, writer.model, weights)
