"""The settings of activation memory: by default everything is kept, and where it is."""

from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.tree import from_dict, to_dict
from megalith.plan.recompute import layer_spans, modules_again


def test_every_setting_survives_a_file() -> None:
    output = RecomputeConfig(granularity="selective", modules=("norm", "mlp_act"), check=True)
    assert from_dict(RecomputeConfig, to_dict(output)) == output
    assert from_dict(
        OffloadConfig, to_dict(OffloadConfig(layers=3, min_numel=10))
    ) == OffloadConfig(layers=3, min_numel=10)


def test_by_default_nothing_is_computed_again_or_sent_away() -> None:
    assert not modules_again(RecomputeConfig())
    assert not any(span.recomputed for span in layer_spans(RecomputeConfig(), OffloadConfig(), 4))
    assert OffloadConfig().layers == 0
