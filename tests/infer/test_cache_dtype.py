"""Engines whose KV cache is int8 or fp8 give the log-probs of a forward pass over dequantized keys
and values, however tokens are divided into steps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig, MTPConfig
from megalith.config.serve import KVCacheDtype
from megalith.errors import ConfigError
from megalith.infer.batch_invariance import logprob_values
from megalith.infer.cache import attention_views, check_cache_dtype, plan_cache
from megalith.infer.draft_model import DraftModelProposer
from megalith.infer.layout import generation_layout
from megalith.infer.mtp_drafts import MTPProposer
from megalith.kernels import cpu_threads
from megalith.kernels.attention.kv_blocks import KVBlocks
from megalith.kernels.layer_inputs import Attend
from megalith.kernels.packed import PackedSeqParams
from megalith.models.decoder import Decoder
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from tests.infer.engines import (
    SAMPLED,
    ReferenceProposer,
    build,
    check_logprobs,
    count_accepted,
    forward_logprobs,
    run,
)
from tests.infer.test_engine import (
    KINDS,
    SETTINGS,
    alone,
    blocks_for_one,
    random_requests,
    tokens_of,
    used_blocks,
)

DTYPES: tuple[KVCacheDtype, ...] = ("int8", "fp8_e4m3")


def round_to_int8(x: Tensor) -> Tensor:
    """Round float64 numbers in [-127, 127] to integers, ties to even."""
    return x.round()


def round_to_e4m3(x: Tensor) -> Tensor:
    """Round float64 numbers in [-448, 448] to three bits of mantissa and exponents from -6 on."""
    spacing = torch.exp2(x.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (x / spacing).round() * spacing


ROUNDING: dict[KVCacheDtype, tuple[float, Callable[[Tensor], Tensor]]] = {
    "int8": (127.0, round_to_int8),
    "fp8_e4m3": (448.0, round_to_e4m3),
}


class RoundingCache:
    """Layer cache of one forward pass, whose keys and values are rounded as a quantized cache does;
    written without its code."""

    def __init__(self, dtype: KVCacheDtype) -> None:
        self._dtype = dtype

    def round_rows(self, rows: Tensor) -> Tensor:
        """Quantize and dequantize rows [t, g, d]."""
        largest, round_numbers = ROUNDING[self._dtype]
        scales = (rows.abs().amax(-1, keepdim=True) / largest).float().double()
        return round_numbers((rows / scales).clamp(-largest, largest)) * scales

    def attend(
        self, core: Attend, q: Tensor, k: Tensor, v: Tensor, params: PackedSeqParams, **options: Any
    ) -> Tensor:
        """Attention to rounded keys and values."""
        return core(q, self.round_rows(k), self.round_rows(v), params, **options)

    def attend_latent(
        self,
        core: Attend,
        q: Tensor,
        latent: Tensor,
        params: PackedSeqParams,
        *,
        value_size: int,
        **options: Any,
    ) -> Tensor:
        """Attention to rounded latents."""
        rows = self.read(latent, value_size=value_size)
        return core(q, rows, rows[..., :value_size], params, **options)

    def read(self, rows: Tensor, *, value_size: int) -> Tensor:
        """Round latents and rotated keys."""
        parts = rows[..., :value_size], rows[..., value_size:]
        return torch.cat([self.round_rows(part) for part in parts], dim=-1)


def rounded_logprobs(dtype: KVCacheDtype, model: Decoder, ids: Sequence[int]) -> Tensor:
    """Log-probs [t, v] from one forward pass with rounded keys and values."""
    caches: Any = [RoundingCache(dtype) for _ in attention_views(model.config)]
    return forward_logprobs(model, ids, caches)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("full", "int8"),
        ("full", "fp8_e4m3"),
        ("window with sinks and softcap", "int8"),
        ("chunks", "fp8_e4m3"),
        ("MLA", "int8"),
        ("relative", "int8"),
    ],
)
def test_log_probs_are_those_of_dequantized_keys_in_any_batch(
    kind: str, dtype: KVCacheDtype, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64)
    requests = random_requests(len(kind), model.config.vocab_size)
    forward = partial(rounded_logprobs, dtype)
    reference = alone(lambda: build(model, prefix_caching=False, cache_dtype=dtype), requests)
    for output in reference:
        check_logprobs(model, output, forward=forward)
    ids = reference[0].prompt_token_ids
    assert (forward(model, ids) - forward_logprobs(model, ids)).abs().max() > 1e-6
    preempted = cached = num_accepted = 0
    for number, settings in enumerate(SETTINGS):
        settings = dict(settings)
        pool = settings.pop("pool", None)
        if pool is not None:
            settings["num_blocks"] = blocks_for_one(model, settings, pool)
        if number % 2:
            settings["proposer"] = ReferenceProposer(reference, seed=number)
        engine = build(model, max_model_len=64, cache_dtype=dtype, **settings)
        draw = random.Random(number)
        arrivals = {index: draw.randint(0, 12) for index in range(len(requests))}
        outputs = run(engine, requests, arrivals)
        assert tokens_of(outputs) == tokens_of(reference), settings
        for output in outputs:
            check_logprobs(model, output, forward=forward)
        preempted += sum(output.num_preemptions for output in outputs)
        cached += sum(output.num_cached_tokens for output in outputs)
        num_accepted += count_accepted(engine)[1]
        assert used_blocks(engine) == 0
    assert preempted > 0 and cached > 0 and num_accepted > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant_log_probs_have_the_same_bits(
    dtype: KVCacheDtype, tiny: SimpleNamespace
) -> None:
    if not cpu_threads.openmp():
        pytest.skip("the kernels need torch's OpenMP library")
    sizes = {"hidden_size": 96, "ffn_hidden_size": 160, "init_std": 0.1}
    model = tiny.model(tiny.config(**sizes), dtype=torch.bfloat16)
    requests = random_requests(3, model.config.vocab_size, count=8)
    invariant: dict[str, Any] = {"batch_invariant": True, "cache_dtype": dtype}
    reference = alone(lambda: build(model, **invariant, prefix_caching=False), requests)
    for settings in SETTINGS[:3]:
        outputs = run(build(model, **invariant, **settings), requests, {2: 3, 5: 4})
        for one, other in zip(outputs, reference, strict=True):
            assert logprob_values(one) == logprob_values(other), settings


def test_bytes_of_a_quantized_cache_equal_the_formula(tiny: SimpleNamespace) -> None:
    for kind, changes in KINDS.items():
        model = tiny.model(tiny.config(**changes), dtype=torch.float64)
        for dtype in DTYPES:
            engine = build(model, num_blocks=40, max_model_len=32, cache_dtype=dtype)
            run(engine, [([1, 2], replace(SAMPLED, max_new_tokens=1))])
            cache = engine.runner.cache
            assert cache.num_bytes == cache.plan.bytes_per_token * 40 * 4, (kind, dtype)
            assert f"dtype {dtype}" in engine.describe()


def test_bytes_per_token_include_the_scales(tiny: SimpleNamespace) -> None:
    config = tiny.config(head_dim=64, num_heads=4, num_kv_heads=2)
    sizes = {
        (tp, dtype): plan_cache(config, tp=tp, element_size=2, dtype=dtype).bytes_per_token
        for tp in (1, 2)
        for dtype in ("auto", "int8", "fp8_e4m3")
    }
    per_head = config.num_layers * 2
    assert sizes[1, "auto"] == per_head * 2 * 64 * 2
    assert sizes[1, "int8"] == sizes[1, "fp8_e4m3"] == per_head * 2 * (64 + 4)
    for dtype in ("auto", "int8", "fp8_e4m3"):
        assert sizes[2, dtype] * 2 == sizes[1, dtype]


def generate_on_rank(rank: int, world: int, config: ModelConfig, make: Any) -> list[Any]:
    mesh = build_mesh(model_grid(generation_layout(config, world), config, world), rank=rank)
    model = make(config, mesh, dtype=torch.float64)
    engine = build(model, cache_dtype="int8", max_num_batched_tokens=8, max_num_seqs=8)
    return run(engine, [(prompt, SAMPLED) for prompt in ([5, 17, 3], list(range(12)))])


def test_tensor_parallel_ranks_have_the_scales_of_their_heads(tiny: SimpleNamespace) -> None:
    config = tiny.config(num_heads=6, num_kv_heads=2)
    for outputs in run_ranks(generate_on_rank, 2, config, tiny.model):
        for output in outputs:
            check_logprobs(
                tiny.model(config, dtype=torch.float64),
                output,
                forward=partial(rounded_logprobs, "int8"),
            )


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_drafts_have_a_cache_of_the_same_dtype(method: str, tiny: SimpleNamespace) -> None:
    mtp = MTPConfig(num_layers=2 if method == "mtp" else 0)
    model = tiny.model(tiny.config(mtp=mtp), dtype=torch.float64)
    drafts: dict[str, Any] = {"speculation": "mtp"}
    if method == "draft_model":
        drafts = {"draft_model": tiny.model(tiny.config(), dtype=torch.float64)}
    requests = [([3, 1, 4, number], replace(SAMPLED, seed=number)) for number in range(3)]
    reference = run(build(model, cache_dtype="int8"), requests)
    engine = build(model, cache_dtype="int8", num_blocks=60, max_model_len=40, **drafts)
    outputs = run(engine, requests)
    assert tokens_of(outputs) == tokens_of(reference)
    assert engine._speculator is not None
    proposer = engine._speculator.proposer
    assert isinstance(proposer, DraftModelProposer | MTPProposer)
    cache = proposer._runner.cache if method == "draft_model" else proposer._kv_cache  # type: ignore[union-attr]  # of the class for the method
    assert cache.plan.dtype == "int8"
    assert cache.num_bytes == cache.plan.bytes_per_token * cache.num_blocks * cache.block_size


def test_unsupported_device_is_rejected() -> None:
    message = r"cache.dtype=fp8_e4m3 is not supported on mps.* Set cache.dtype to int8 or auto"
    with pytest.raises(ConfigError, match=message):
        check_cache_dtype("fp8_e4m3", torch.device("mps"))
    check_cache_dtype("int8", torch.device("mps"))
    check_cache_dtype("fp8_e4m3", torch.device("cpu"))


# --- planted faults


def check_choices(model: Decoder) -> None:
    """Choices with a common prompt, whose last block is copied, in blocks of 4 tokens."""
    engine = build(model, cache_dtype="int8", max_num_batched_tokens=9, max_num_seqs=4)
    (output,) = run(engine, [([3, 1, 4, 1, 5, 9], replace(SAMPLED, n=3, prompt_logprobs=0))])
    check_logprobs(model, output, forward=partial(rounded_logprobs, "int8"))


def read_scales_of(dim: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Read the scales of the next head (1) or token (2) of a block."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        read = KVBlocks.read

        def planted(self: KVBlocks, *arguments: Any) -> Tensor:
            assert self.scales is not None
            return read(self._replace(scales=self.scales.roll(-1, dim)), *arguments)

        monkeypatch.setattr(KVBlocks, "read", planted)

    return plant


def copy_without_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy-on-write copies the data of a block only; the scales of the copy are old ones."""
    copy = KVBlocks.copy

    def planted(self: KVBlocks, pairs: Sequence[tuple[int, int]]) -> None:
        KVBlocks.copy = copy  # type: ignore[method-assign]
        self._replace(scales=None, data=self.data.view(torch.uint8)).copy(pairs)
        assert self.scales is not None
        self.scales[[destination for _, destination in pairs]] = 1.0
        KVBlocks.copy = planted  # type: ignore[method-assign]

    monkeypatch.setattr(KVBlocks, "copy", planted)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "scale of another head": read_scales_of(1),
    "scale of another token": read_scales_of(2),
    "scales are not copied": copy_without_scales,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_scales_is_caught(
    fault: str, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(tiny.config(num_heads=6, num_kv_heads=2), dtype=torch.float64)
    check_choices(model)
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        check_choices(model)
