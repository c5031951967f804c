"""Pipeline settings: round trip and defaults."""

from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.config.tree import from_dict, to_dict
from megalith.plan.schedule import schedule_name


def test_every_setting_round_trips_through_yaml() -> None:
    output = PipelineConfig(
        schedule="zb-v", vpp=2, layout="Et|tL", first_layers=1, last_layers=2, count_loss=True
    )
    assert from_dict(PipelineConfig, to_dict(output)) == output


def test_default_is_no_pipeline_and_schedule_auto() -> None:
    assert (ParallelConfig().pp, ParallelConfig().pipeline) == (1, PipelineConfig())
    assert schedule_name(PipelineConfig()) == "1f1b"
    assert schedule_name(PipelineConfig(vpp=2)) == "interleaved"
