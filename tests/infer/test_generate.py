from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SampleConfig
from megalith.config.model import AttentionConfig, CrossConfig, MLAConfig, ModelConfig, RopeConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.errors import ConfigError, DataError
from megalith.infer import cache
from megalith.infer.cache import AttentionView
from megalith.infer.generate import (
    GeneratedToken,
    attention_views,
    build_prefix_state,
    divide_token_budget,
    generate,
)
from megalith.infer.load import generation_layout
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder
from megalith.nn.moe import Router
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.verify.matrix import VARIANTS

GREEDY = SampleConfig(temperature=0.0, max_new_tokens=20)
PROMPTS = [[5, 17, 36, 3, 14], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def texts(found: list[GeneratedToken], count: int = 3) -> list[list[int]]:
    return [
        [written.token for written in found if written.sequence == number]
        for number in range(count)
    ]


@torch.no_grad()
def slowly(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy text without any cache: everything is read again for each token."""
    ids = list(prompt)
    for _ in range(count):
        hidden = model.hidden_states(
            torch.tensor(ids), LayerInputs(seq_params_from_rows(1, len(ids)))
        )
        ids.append(int(model.head.logits(hidden[-1:])[0].argmax()))
    return ids[len(prompt) :]


WINDOWS = AttentionConfig(window=3, window_layers=(True, False), sinks=True, softcap=2.0)


@pytest.mark.parametrize("attention", [AttentionConfig(), WINDOWS])
def test_text_with_a_cache_equals_text_recomputed_for_every_token(
    attention: AttentionConfig, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(attention=attention), dtype=torch.float64)
    result = texts(list(generate(model, PROMPTS, GREEDY)))
    assert result == [slowly(model, prompt, 20) for prompt in PROMPTS]
    assert all(len(set(text)) > 2 for text in result), "texts that repeat one token show little"


@pytest.mark.parametrize("chunked", [False, True])
def test_text_longer_than_initial_capacity_and_window_matches_recomputation(
    chunked: bool, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "INITIAL_CAPACITY", 4)
    seen = AttentionConfig(window=13, window_layers=(True, False), chunked=chunked)
    model = tiny.model(tiny.config(attention=seen, max_seq_len=64), dtype=torch.float64)
    result = texts(list(generate(model, PROMPTS, replace(GREEDY, max_new_tokens=45))))
    assert result == [slowly(model, prompt, 45) for prompt in PROMPTS]
    assert all(len(set(text)) > 2 for text in result), "texts that repeat one token show little"


LONG = RopeConfig(
    scaling="longrope",
    factor=6.0,
    original_max_position=16,
    short_factors=(1.0, 1.0),
    long_factors=(3.0, 9.0),
)


@pytest.mark.parametrize(
    ("prompt", "room"), [([8, 3], 4096), (list(range(16)), 3), (list(range(30)), 3)]
)
def test_longrope_text_beyond_the_original_length_is_recomputed(
    prompt: list[int], room: int, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(rope=LONG, head_dim=4), dtype=torch.float64)
    expected = slowly(model, prompt, 20)
    assert texts(list(generate(model, [prompt, [4]], GREEDY, step_tokens=room)), 2)[0] == expected
    short = tiny.model(
        tiny.config(rope=replace(LONG, long_factors=LONG.short_factors), head_dim=4),
        dtype=torch.float64,
    )
    assert slowly(short, prompt, 20) != expected
    read = build_prefix_state(model.config)
    for text in (prompt, prompt[:2], [*prompt, 5]):
        result = texts(list(generate(model, [text], GREEDY, before=read)), 1)[0]
        assert result == slowly(model, text, 20)


@pytest.mark.parametrize(
    "variant", [name for name, model in VARIANTS.items() if model.attention.causal]
)
def test_every_layer_type_generates_the_same_text_with_a_cache(
    variant: str, tiny: SimpleNamespace
) -> None:
    # a tied one repeats what it reads
    config = replace(VARIANTS[variant], init_std=0.7, tied_embeddings=False)
    model = tiny.model(config, dtype=torch.float64)
    result = texts(list(generate(model, PROMPTS, GREEDY)))
    assert result == [slowly(model, prompt, 20) for prompt in PROMPTS]
    assert sum(len(set(text)) > 2 for text in result) > 1, "texts that repeat one token show little"


LATENT = MLAConfig(kv_rank=6, q_rank=5, nope_dim=4, rope_dim=2, value_dim=3)
TALKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, ()),
    "windows": ({"attention": WINDOWS}, (3,)),
    "latent": ({"mla": LATENT, "num_kv_heads": 6}, ()),
    "longer than the angles are for": (
        {
            "rope": RopeConfig(scaling="dynamic", factor=2.0, original_max_position=16),
            "head_dim": 4,
        },
        (2, 3),
    ),
    "learned": ({"positions": "learned"}, ()),
    "cross-layer attention": ({"cross": CrossConfig(memory=0), "attention": WINDOWS}, (3,)),
}
"""What the model is like, and turns in which it has to read everything again."""


@pytest.mark.parametrize("kind", TALKS)
def test_cached_conversation_equals_the_recomputed_one(
    kind: str, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "INITIAL_CAPACITY", 4)  # windows let go of rows soon
    settings, again = TALKS[kind]
    model, counts = tiny.model(tiny.config(**settings), dtype=torch.float64), list[int]()
    plain = model.logits

    def counted(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(ids))
        return plain(ids, *rest)  # type: ignore[no-any-return]  # a module's attribute

    read, sample = build_prefix_state(model.config), SampleConfig(temperature=0.0, max_new_tokens=5)
    generated, prompt = list[int](), [3, 1, 4]
    for turn in range(6):
        prompt = [*prompt, *generated, 7 + turn, 20 - turn] if turn != 3 else [*prompt[:4], 9, 9, 9]
        if turn == 5:
            prompt = [30, *prompt]
        expected = [w.token for w in generate(model, [prompt], sample, step_tokens=2 + turn)]
        model.logits = counted
        generated = [
            w.token for w in generate(model, [prompt], sample, before=read, step_tokens=2 + turn)
        ]
        del model.logits
        assert generated == expected
        # The last token that was written, and two more; all where nothing is alike, or too little
        # is left of it.
        assert sum(counts) == (len(prompt) if turn in (0, 5, *again) else 3) + 4
        counts.clear()


def test_interrupted_text_continues_from_its_cache(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    read, expected = (
        build_prefix_state(model.config),
        texts(list(generate(model, PROMPTS[:1], GREEDY)), 1)[0],
    )
    for stop in (1, 4, 2, 20):
        stream = generate(model, PROMPTS[:1], GREEDY, before=read)
        assert [next(stream).token for _ in range(stop)] == expected[:stop]
        del stream


def test_layers_with_a_window_cache_only_the_window(tiny: SimpleNamespace) -> None:
    assert attention_views(tiny.config(attention=WINDOWS)) == [AttentionView(3), AttentionView()]
    assert attention_views(tiny.config(attention=replace(WINDOWS, chunked=True)))[
        0
    ] == AttentionView(3, chunked=True)
    assert attention_views(tiny.config()) == [AttentionView(), AttentionView()]


def test_text_with_length_dependent_rope_is_processed_at_once(tiny: SimpleNamespace) -> None:
    rope = RopeConfig(scaling="dynamic", factor=4.0, original_max_position=6)
    model = tiny.model(tiny.config(rope=rope, head_dim=4), dtype=torch.float64)
    expected = texts(list(generate(model, PROMPTS, GREEDY)))
    assert texts(list(generate(model, PROMPTS, GREEDY, step_tokens=4))) == expected


@pytest.mark.parametrize("room", [1, 4, 7])
@pytest.mark.parametrize("sample", [GREEDY, SampleConfig(max_new_tokens=20, top_k=9, seed=3)])
def test_chunking_and_batching_of_prompts_do_not_change_the_text(
    room: int, sample: SampleConfig, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    expected = texts(list(generate(model, PROMPTS, sample)))
    assert texts(list(generate(model, PROMPTS, sample, step_tokens=room))) == expected
    assert texts(list(generate(model, PROMPTS[:1], sample)), 1) == expected[:1]
    assert texts(list(generate(model, PROMPTS[:2], sample)), 2) == expected[:2]


def test_text_depends_on_the_seed(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    results = [
        texts(list(generate(model, PROMPTS, SampleConfig(max_new_tokens=20, seed=seed))))
        for seed in (1, 1, 2)
    ]
    assert results[0] == results[1] != results[2]
    repeated = texts(
        list(generate(model, [PROMPTS[0]] * 3, SampleConfig(max_new_tokens=20, seed=1)))
    )
    assert repeated[0] == results[0][0] and repeated[0] != repeated[1] != repeated[2], (
        "each has draws of its own"
    )


def test_a_text_ends_at_a_stop_at_its_length_or_at_the_end_of_the_context(
    tiny: SimpleNamespace,
) -> None:
    model = tiny.model(tiny.config(max_seq_len=16))
    free = texts(list(generate(model, PROMPTS, GREEDY)))
    assert [len(text) for text in free] == [11, 15, 5]
    stop = free[1][6]
    results = list(
        generate(
            model,
            PROMPTS,
            SampleConfig(temperature=0.0, max_new_tokens=13),
            stops=frozenset({stop}),
        )
    )
    ends = {written.sequence: written.finish for written in results if written.finish is not None}
    for number, text in enumerate(texts(results)):
        until = free[number].index(stop) + 1 if stop in free[number] else len(free[number])
        assert text == free[number][: min(until, 13)]
    assert ends[1] == "stop" and set(ends.values()) <= {"stop", "context"}
    (last,) = [
        w
        for w in generate(model, [[8]], SampleConfig(temperature=0.0, max_new_tokens=3))
        if w.finish
    ]
    assert last.finish == "length"


def test_tokens_are_returned_as_soon_as_they_are_sampled(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    stream = generate(model, PROMPTS, GREEDY)
    assert [next(stream).sequence for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_generation_computes_no_gradients(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    list(generate(model, PROMPTS, GREEDY))
    assert torch.is_grad_enabled() and all(
        parameter.grad is None for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 2 has 0 tokens: pass at least one"),
        (
            [1] * 96,
            "prompt 2 has 96 tokens, but the context of the model is 96 tokens.* of at most "
            "95 tokens",
        ),
        (
            [1, 37],
            "prompt 2 has token 37, but the ids of the model are below 37. Use the tokenizer",
        ),
        ([-1], "prompt 2 has token -1"),
    ],
)
def test_invalid_prompts_are_rejected(
    prompt: list[int], message: str, tiny: SimpleNamespace
) -> None:
    with pytest.raises(DataError, match=message):
        next(generate(tiny.model(tiny.config()), [[1], prompt], GREEDY))


def test_invalid_settings_are_rejected(tiny: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="top_p=2 must be"):
        next(generate(tiny.model(tiny.config()), [[1]], SampleConfig(top_p=2)))


@pytest.mark.parametrize(
    ("wanted", "counts"), [([3, 5, 1], [3, 3, 0]), ([1], [1]), ([0, 2], [0, 2]), ([9, 9], [6, 0])]
)
def test_token_budget_is_divided_in_order(wanted: list[int], counts: list[int]) -> None:
    assert divide_token_budget(wanted, 6) == counts


def on_a_rank(
    rank: int, world: int, config: ModelConfig, make: Any, sample: SampleConfig
) -> list[GeneratedToken]:
    mesh = build_mesh(model_grid(generation_layout(config, world), config, world), rank=rank)
    return list(generate(make(config, mesh, dtype=torch.float64), PROMPTS, sample))


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 2), (2, 1), (3, 3)])
def test_every_rank_generates_the_text_of_one_process(
    tp: int, kv_heads: int, tiny: SimpleNamespace
) -> None:
    config, sample = (
        tiny.config(num_kv_heads=kv_heads),
        SampleConfig(max_new_tokens=20, top_k=20, top_p=0.95),
    )
    expected = list(generate(tiny.model(config, dtype=torch.float64), PROMPTS, sample))
    for result in run_ranks(on_a_rank, tp, config, tiny.model, sample):
        assert result == expected


ROUTER = RouterConfig(score="sigmoid", expert_bias=True, jitter=0.3)
EXPERTS = MoEConfig(
    num_experts=4,
    top_k=2,
    ffn_hidden_size=7,
    shared_ffn_hidden_size=5,
    shared_gate=True,
    router=ROUTER,
    aux_loss=AuxLossConfig(batch_coeff=0.1),
    capacity=CapacityConfig(factor=0.3),
)


@pytest.mark.parametrize("moe", [EXPERTS, replace(EXPERTS, num_experts=5)])
def test_expert_parallel_ranks_generate_the_text_of_one_process(
    moe: MoEConfig, tiny: SimpleNamespace
) -> None:
    config = tiny.config(moe=moe)
    assert (generation_layout(config, 2).ep, generation_layout(config, 2).etp) == (
        (2, 1) if moe is EXPERTS else (1, None)
    )
    expected = list(generate(tiny.model(config, dtype=torch.float64), PROMPTS, GREEDY))
    for result in run_ranks(on_a_rank, 2, config, tiny.model, GREEDY):
        assert result == expected


def test_generation_neither_counts_nor_drops_tokens_in_experts(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(moe=EXPERTS), dtype=torch.float64)
    result = texts(list(generate(model, PROMPTS, GREEDY)))
    assert all(
        router.balance.record is None for router in model.modules() if isinstance(router, Router)
    )
    for changes in ({"capacity": CapacityConfig()}, {"router": replace(ROUTER, jitter=0.0)}):
        roomy = tiny.model(tiny.config(moe=replace(EXPERTS, **changes)), dtype=torch.float64)
        assert texts(list(generate(roomy, PROMPTS, GREEDY))) == result
