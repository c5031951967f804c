"""The meter: memory counts once, parameters do not, and what is let go no longer counts."""

import pytest
import torch
from torch import Tensor, nn

from megalith.parallel.recompute import Recomputed
from megalith.testing.meter import measure_saved_activations


class Twice(nn.Module):
    """Two linear layers around a square; fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).square())  # type: ignore[no-any-return]  # torch's own


def test_each_region_reports_the_tensors_it_saves_first_without_parameters() -> None:
    model, x = Twice(), torch.randn(11, 5)
    with measure_saved_activations(model) as meter:
        y = model(x)
    assert meter.kept == {"first": 11 * 5 * 4, "": 11 * 7 * 4, "second": 11 * 7 * 4}
    assert meter.live == meter.peak == sum(meter.kept.values())
    y.sum().backward()
    del y
    assert meter.live == 0 and meter.peak == sum(meter.kept.values())


def test_storage_saved_by_several_operations_is_counted_once() -> None:
    whole = torch.randn(10, 6, requires_grad=True) * 1
    part = whole[:, :2]
    with measure_saved_activations() as meter:
        y = part.square() + part.exp() * part
    # the whole, and exp's result, which `*` keeps too
    assert meter.kept[""] == 10 * 6 * 4 + 2 * 10 * 2 * 4 - 10 * 2 * 4
    del y
    assert meter.live == 0


def test_peak_is_the_maximum_of_live_tensors() -> None:
    x = torch.randn(100, requires_grad=True)
    with measure_saved_activations() as meter:
        for _ in range(3):
            x.square().sum().backward()
            x.exp().sum().backward()
    assert meter.live == 0 and meter.peak == 400


def test_recomputed_region_is_not_counted() -> None:
    model, x = Twice(), torch.randn(11, 5)
    region = Recomputed(model)
    with measure_saved_activations(region) as meter:
        y = region(x)
        assert meter.kept == {"": 11 * 5 * 4}
        y.sum().backward()
        assert meter.path == [""]
    del y
    assert meter.live == 0


def test_layers_sum_their_parts() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Twice(), Twice()])})
    layers = model["layers"]
    assert isinstance(layers, nn.ModuleList)
    with measure_saved_activations(model) as meter:
        for layer in layers:
            layer(torch.randn(2, 5))
    assert meter.layers() == {f"layers.{index}": 2 * (5 + 7 + 7) * 4 for index in range(2)}


def test_hooks_are_removed_afterwards() -> None:
    model = Twice()
    with pytest.raises(RuntimeError, match="shapes"), measure_saved_activations(model) as meter:
        model(torch.randn(3, 4))
    before = dict(meter.kept)
    model(torch.randn(3, 5))
    assert meter.path == [""] and meter.kept == before
