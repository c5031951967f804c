"""What tests of families share: parameters counted, and a published config.json there and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.checkpoint.boxes import describe_tiling_problem
from megalith.config.model import ModelConfig
from megalith.hf.release import parameters
from megalith.hf.tensor_rules import Family, group_by_parameter, unpadded_shape
from megalith.plan.costs import num_parameters
from megalith.rules.model import network_problems


def num_declared(config: ModelConfig) -> int:
    """Weights of the whole model as its layers declare them, without padded rows, and biases that
    nothing trains."""
    shards = parameters(replace(config, pad_vocab_to_multiple_of=1))
    return sum(shard.numel for shard in shards if not shard.name.endswith(".balancing_bias"))


def check_published(
    family: Family, raw: Mapping[str, Any], count: int, *, reworded: tuple[str, ...] = ()
) -> None:
    """Fail unless a config.json as published has `count` parameters and survives, `reworded` fields
    aside."""
    config = family.read_config(raw)
    assert network_problems(config) == []
    assert (
        num_declared(config) == num_parameters(replace(config, pad_vocab_to_multiple_of=1)) == count
    )
    again = family.write_config(config)
    same = (again.keys() & raw.keys()) - {*reworded, "use_cache"}
    assert {name: again[name] for name in same} == {name: raw[name] for name in same}
    assert family.read_config(again) == config


def check_rules(family: Family, config: ModelConfig) -> None:
    """Fail unless the rules cover every element of every parameter once."""
    found = group_by_parameter(family.rules(config))
    declared = {
        shard.name: shard.shape for shard in parameters(replace(config, pad_vocab_to_multiple_of=1))
    }
    assert found.keys() == declared.keys()
    for name, shape in declared.items():
        assert unpadded_shape(found[name]) == shape
        assert describe_tiling_problem(shape, [rule.box for rule in found[name]]) is None
