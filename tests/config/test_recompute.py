"""Settings of activation checkpointing and offload: round trip and defaults."""

from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.config.tree import from_dict, to_dict
from megalith.plan.recompute import layer_spans, recomputed_modules


def test_every_setting_round_trips_through_yaml() -> None:
    output = RecomputeConfig(granularity="selective", modules=("norm", "mlp_act"), check=True)
    assert from_dict(RecomputeConfig, to_dict(output)) == output
    assert from_dict(
        OffloadConfig, to_dict(OffloadConfig(layers=3, min_numel=10))
    ) == OffloadConfig(layers=3, min_numel=10)


def test_recomputation_and_offload_are_off_by_default() -> None:
    assert not recomputed_modules(RecomputeConfig())
    assert not any(span.recomputed for span in layer_spans(RecomputeConfig(), OffloadConfig(), 4))
    assert OffloadConfig().layers == 0
