"""The odd model's gradients are what it says."""

from megalith.testing.tiny import OddSizedModel


def test_gradients_match_the_stated_values() -> None:
    model = OddSizedModel()
    model(2.5).backward()
    results = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert (
        list(results)
        == [shard.name for shard in OddSizedModel.SHARDS]
        == list(OddSizedModel.gradients(2.5))
    )
    for name, expected in OddSizedModel.gradients(2.5).items():
        gradient = results[name]
        assert expected == 0 if gradient is None else bool(gradient.eq(expected).all())
