"""Pickles and archives of other programs: values, attacks, limits, and mutations of real files."""

import argparse
import collections
import enum
import io
import os
import pathlib
import pickle
import random
import subprocess
import sys
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalith import storage
from megalith.checkpoint import pickle_interpreter
from megalith.checkpoint.pickle_interpreter import iter_children
from megalith.checkpoint.safe_pickle import (
    ArchiveTensor,
    Placeholder,
    Record,
    parse_archive,
    parse_pickle,
    read_archive,
    require_plain,
)
from megalith.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
METADATA = "torch.distributed.checkpoint.metadata"


def parse(data: bytes) -> Any:
    return parse_pickle(data, source="common.pt")


def reject(data: bytes) -> str:
    """Return the error of a pickle, which is one line and names the file."""
    with pytest.raises(CheckpointError) as error:
        parse(data)
    text = str(error.value)
    assert text.startswith("cannot read common.pt: ") and "\n" not in text, text
    assert len(text) < 500, text
    return text


def archive(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def read_saved(value: object) -> Any:
    return parse_archive(memoryview(bytearray(archive(value))), source="common.pt")


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Return plain data that contains every kind of value, some of them several times."""
    shared: Any = rng.choice([[1, 2], {"k": 1.5}, (1,), "text"])
    scalars: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False, 0, -1, 255, 256, -129, 65536, 2**31, -(2**31)]),
        lambda: rng.getrandbits(rng.choice([8, 40, 63, 65, 200, 2000])) * rng.choice([1, -1]),
        lambda: rng.choice([0.0, -0.0, 1e300, 2**-1074, float("inf"), rng.random()]),
        lambda: "".join(chr(rng.choice([65, 10, 92, 39, 0xE9, 0x4E2D, 0x1F600])) for _ in range(5)),
        lambda: rng.randbytes(rng.choice([0, 3, 300])),
        lambda: complex(rng.random(), 2),
    ]
    if depth == 4 or rng.random() < 0.3:
        return rng.choice(scalars)()
    keys = [rng.choice([scalars[0], scalars[3], scalars[4]])() for _ in range(4)]
    values = [random_value(rng, depth + 1) for _ in range(4)] + [shared, shared]
    return rng.choice(
        [
            values,
            tuple(values[: rng.randrange(5)]),
            dict(zip(keys, values)),
            set(keys),
            frozenset(keys),
            {(keys[0], (keys[1],)): values},
            bytearray(b"abc"),
        ]
    )


def test_plain_data_equals_pickle_loads() -> None:
    for seed in range(60):
        value = random_value(random.Random(seed))
        for protocol in range(6):
            data = pickle.dumps(value, protocol)
            expected = pickle.loads(data)  # lint: allow pickle-load: written by this test
            assert parse(data) == expected, (seed, protocol)
            assert repr(parse(data)) == repr(expected).replace("bytearray(b'abc')", "b'abc'"), seed


def test_types_of_plain_values_are_kept() -> None:
    for protocol in range(6):
        value = parse(pickle.dumps([True, 1, 1.0, "1", b"1", (1,), {1}], protocol))
        assert [type(item) for item in value] == [bool, int, float, str, bytes, tuple, set]


def test_strings_of_python_2_become_text_or_bytes() -> None:
    assert parse(b"(S'a\\n\\x41\\'b'\np0\nU\x02\xc3\xa9T\x01\x00\x00\x00\xffI01\nL12L\nt.") == (
        "a\nA'b",
        "é",
        b"\xff",
        True,
        12,
    )


class Color(enum.Enum):
    """An enum that no table has."""

    RED = 1


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_of_the_table_become_records_and_values(protocol: int) -> None:
    value = parse(
        pickle.dumps(
            {
                "args": argparse.Namespace(lr=0.5, dtype=torch.bfloat16, path=pathlib.Path("/a/b")),
                "simple": types.SimpleNamespace(a=1),
                "size": torch.Size([2, 3]),
                "ordered": collections.OrderedDict(b=1, a=2),
                "default": collections.defaultdict(list, {"x": [1]}),
                "device": torch.device("cuda", 1),
                "layout": torch.strided,
                "scalars": [np.float32(0.5), np.int64(-3), np.bool_(True), np.float64(2)],
                "big_endian": np.array([7], ">i4")[0],
            },
            protocol,
        )
    )
    args = value["args"]
    assert isinstance(args, Record) and args.name == "argparse.Namespace"
    assert args.state == {"lr": 0.5, "dtype": torch.bfloat16, "path": "/a/b"}
    assert value["simple"].name == "types.SimpleNamespace" and value["simple"].state == {"a": 1}
    assert value["size"] == (2, 3) and type(value["size"]) is tuple
    assert list(value["ordered"].items()) == [("b", 1), ("a", 2)]
    assert value["default"] == {"x": [1]} and type(value["default"]) is dict
    assert (value["device"].name, value["device"].args) == ("torch.device", ("cuda", 1))
    assert (value["layout"].name, value["layout"].args) == ("torch.layout", ("torch.strided",))
    assert value["scalars"] == [0.5, -3, True, 2.0]
    assert [type(item) for item in value["scalars"]] == [float, int, bool, float]
    assert value["big_endian"] == 7
    assert require_plain(value, what="args", source="common.pt") is value


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_numpy_arrays_become_records_with_their_bytes(protocol: int) -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    record = parse(pickle.dumps(values, protocol))
    assert record.name == "numpy.ndarray" and record.state["shape"] == (2, 3)
    assert record.state["data"] == values.tobytes() and record.state["fortran_order"] is False
    assert record.state["dtype"].args[0] == "i4" and record.state["dtype"].state["byteorder"] == "<"


@pytest.mark.parametrize(
    "name",
    [
        "megatron.core.enums.ModelType",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.LayerType",
        "megatron.model.enums.AttnMaskType",
        "megatron.core.rerun_state_machine.RerunMode",
        "signal.Signals",
    ],
)
def test_enums_of_megatron_become_records(name: str) -> None:
    module, _, class_name = name.rpartition(".")
    member = parse(f"c{module}\n{class_name}\n(I2\ntR.".encode())
    assert (type(member), member.name, member.args) == (Record, name, (2,))
    by_name = f"cbuiltins\ngetattr\n(c{module}\n{class_name}\nVcausal\ntR."
    member = parse(by_name.encode())
    assert (type(member), member.name, member.state) == (Record, name, {"name": "causal"})


def test_old_locations_of_classes_have_their_newest_name() -> None:
    old = b"ctorch.distributed._shard.checkpoint.metadata\nMetadataIndex\n)\x81}(Vfqn\nVw\nub."
    index = parse(old)
    assert (index.name, index.state) == (f"{METADATA}.MetadataIndex", {"fqn": "w"})
    properties = parse(
        b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n)\x81"
        b"(ctorch\nbfloat16\nctorch.serialization\n_get_layout\n(Vtorch.strided\ntRI00\n"
        b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\n(I0\ntRI00\ntb."
    )
    assert properties.name == f"{METADATA}.TensorProperties"
    assert properties.state["dtype"] is torch.bfloat16


# --- attacks


class Attack:
    """Object whose pickle calls a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


class Stateful:
    """Object whose state would be set by its own method."""

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: object) -> None:
        raise AssertionError("executed")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (pickle.dumps(Attack(os.system, ("touch executed",))), "posix.system"),
        (pickle.dumps(Attack(eval, ("1/0",)), 0), "builtins.eval"),
        (pickle.dumps(Attack(exec, ("1/0",)), 2), "builtins.exec"),
        (pickle.dumps(len, 2), "builtins.len"),
        (b"(S'touch executed'\nios\nsystem\n.", "os.system"),
        (b"(cos\nsystem\nS'touch executed'\no.", "os.system"),
        (b"cos\nsystem\nS'touch executed'\n\x85R.", "os.system"),
        (b"cos\nsystem\nS'touch executed'\n\x85\x81.", "os.system"),
        (b"cos\nsystem\nS'touch executed'\n\x85}\x92.", "os.system"),
        (b"cos\nsystem\n)}Vx\nI1\ns\x92.", "os.system"),
        (b"Vos\nVsystem\n\x93S'touch executed'\n\x85R.", "os.system"),
        (b"c__builtin__\ngetattr\n(cos\npath\nVos\ntR.", "builtins.getattr"),
        (b"cbuiltins\ngetattr\n(cos\npath\nVos\ntR)R.", "builtins.getattr"),
        (b"cbuiltins\nexec\n(V1/0\ntR(Vx\ntR.", "builtins.exec"),
        (b"ccopyreg\n_reconstructor\n(cos\nsystem\ncbuiltins\nobject\nNtR.", "os.system"),
        (b"ccopyreg\n__newobj__\n(cos\nsystem\nVx\ntR.", "os.system"),
        (b"cnumpy\nload\n(Vfile\ntR.", "numpy.load"),
        (b"ctorch\nload\n(Vfile\ntR.", "torch.load"),
        (b"cargparse.Namespace\n__init__\n(Vx\ntR.", "argparse.Namespace.__init__"),
        (b"\x82\x01.", "copyreg.extension_1"),
        (b"\x83\x01\x02)R.", "copyreg.extension_513"),
        (b"\x84\x01\x00\x00\x00)R}Va\nI1\nsb.", "copyreg.extension_1"),
        (b"Pos.system\n.", "persistent id"),
        (b"Vos.system\nQ.", "persistent id"),
        (pickle.dumps(Stateful()), f"{Stateful.__module__}.Stateful"),
        (pickle.dumps(Color.RED), f"{Color.__module__}.Color"),
        (pickle.dumps(collections.deque([1, 2])), "collections.deque"),
        (pickle.dumps(collections.Counter("a")), "collections.Counter"),
    ],
)
def test_calls_of_other_names_become_placeholders(
    data: bytes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = parse(data)
    assert isinstance(value, Placeholder) and value.name == name
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as error:
        require_plain({"a": [value]}, what="args", source="common.pt")
    assert str(error.value).startswith(f"common.pt references {name}, which is not a plain value")


def test_placeholders_store_arguments_state_and_items() -> None:
    call = parse(b"cos\nsystem\nS'ls'\n\x85R}Va\nI1\nsb.")
    assert (call.name, call.args, call.state) == ("os.system", ("ls",), {"a": 1})
    items = parse(pickle.dumps(collections.deque([1, 2])))
    assert items.items == [1, 2]


def test_state_of_a_record_changes_no_class() -> None:
    record = parse(b"cargparse\nNamespace\n)\x81}(V__class__\ncos\nsystem\nV__dict__\nNub.")
    assert type(record) is Record and record.state["__class__"].name == "os.system"
    parts = parse(b"ctypes\nSimpleNamespace\n)\x81N}Vslot\nI1\ns\x86b.")
    assert parts.state == {"slot": 1}


def test_errors_name_an_unprintable_name_in_one_line() -> None:
    value = parse(b"V" + b"a" * 10_000 + rb"\u000a\u001b" + b"\nVx\n\x93.")
    with pytest.raises(CheckpointError) as error:
        require_plain(value, what="args", source="common.pt")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


# --- malformed pickles


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated pickle"),
        (b"]", "truncated pickle"),
        (b".", "it does not end with one object"),
        (b"]].", "it does not end with one object"),
        (b"(].", "it does not end with one object"),
        (b"\xff.", "unknown opcode 0xff at byte 0"),
        (b"a.", "an empty stack"),
        (b"2.", "an empty stack"),
        (b"b.", "an empty stack"),
        (b"e.", "it has no mark"),
        (b"t.", "it has no mark"),
        (b"1.", "it has no mark"),
        (b"0.", "it has no mark"),
        (b"h\x05.", "its memo has no entry 5"),
        (b"g-1\n.", "its memo has no entry -1"),
        (b"gx\n.", "malformed pickle"),
        (b"NNa.", "it appends to a NoneType"),
        (b"NNNs.", "it sets items of a NoneType"),
        (b"N(N\x90.", "it appends to a NoneType"),
        (b"}(Nu.", "a key without a value"),
        (b"}]Ns.", "a list is a key"),
        (b"}]\x85Ns.", "a list is a key"),
        (b"\x8f(]\x90.", "a list is a key"),
        (b"}\x8a\x09" + b"\x01" * 9 + b"Ns.", "an integer of more than 64 bits is a key"),
        (b"N)R.", "it calls a NoneType"),
        (b"I1\n)}\x92.", "it calls a int"),
        (b"cos\nsystem\nNR.", "arguments are a NoneType"),
        (b"INone\n.", "malformed pickle"),
        (b"I" + b"9" * 5000 + b"\n.", "an integer of 5,000 digits"),
        (b"F" + b"9" * 5000 + b"\n.", "a number of 5,000 digits"),
        (b"\x8b\xff\xff\xff\x7f", "truncated pickle"),
        (b"\x8b\xff\xff\xff\xff", "truncated pickle"),
        (b"\x8b\x00\x10\x00\x00" + bytes(4096) + b".", "an integer of 4,096 bytes"),
        (b"\x8d" + b"\xff" * 8, "truncated pickle"),
        (b"\x96" + b"\xff" * 8, "truncated pickle"),
        (b"\x95" + b"\xff" * 8 + b"N.", "truncated pickle"),
        (b"\x95\x03" + bytes(7) + b"N.", "truncated pickle"),
        (b"\x80\x06N.", "protocol 6, expected 0 to 5"),
        (b"\x97.", "buffers that are not in the file"),
        (b"S'a\n.", "a string without quotes"),
        (b"S'\\q'\n.", "a string with an unknown escape"),
        (b"X\x01\x00\x00\x00\xff.", "malformed pickle"),
        (b"VN\n\x93.", "an empty stack"),
        (b"NN\x93.", "a name that is not a string"),
        (b"I1\nNb.", "it sets the state of a int"),
        (b"]q\x00h\x00a.", "contains itself"),
        (b"}q\x00Vk\nh\x00s.", "contains itself"),
        (b"](h\x00e.", "its memo has no entry 0"),
        (b"cargparse\nNamespace\n)\x81q\x00}Va\nh\x00sb.", "contains itself"),
        (b"cos\nsystem\nq\x00]q\x01h\x01aR.", "arguments are a list"),
        (b"cos\nsystem\n]q\x01h\x01a\x85R.", "contains itself"),
        (b"(" * 1100 + b".", "nested more than 1,000 levels deep"),
        (b"]" * 2000 + b"a" * 1999 + b".", "nested more than 1,000 levels deep"),
        (b")" + b"\x85" * 50_000 + b".", "nested more than 1,000 levels deep"),
        (b"cos\nsystem\n" + b")R" * 20_000 + b".", "nested more than 1,000 levels deep"),
        (
            b"cargparse\nNamespace\nq\x000N" + b"\x85q\x010h\x00h\x01R" * 2000 + b".",
            "nested more than 1,000 levels deep",
        ),
        (b"})" + b"2\x86" * 50 + b"Ns.", "a key of more than 200 values"),
        (b"})" + b"\x85" * 300 + b"Ns.", "a key of more than 200 values"),
        (b"}(" + b"N" * 300 + b"tNs.", "a key of more than 200 values"),
    ],
)
def test_malformed_pickles_are_rejected(data: bytes, reason: str) -> None:
    assert reason in reject(data)


def test_nesting_up_to_the_limit_is_read() -> None:
    value = parse(b"]" * 1000 + b"a" * 999 + b".")
    for _ in range(999):
        value = value[0]
    assert value == []


def test_bombs_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_interpreter, "MAX_OBJECTS", 10_000)
    monkeypatch.setattr(pickle_interpreter, "MIN_MEMORY", 2**16)
    monkeypatch.setattr(pickle_interpreter, "MIN_REFERENCES", 10_000)
    too_many = "a pickle of more than 10,000 objects"
    too_large = "a pickle that takes more than 4 times the memory of its file"
    sizes = b"](" + b"I5\n" * 2000 + b"eq\x000"
    assert reject(b"(" + b"]" * 20_000 + b"l.") == f"cannot read common.pt: {too_many}"
    assert "more than 10,820 references" in reject(b")" + b"2\x86" * 40 + b".")  # billion laughs
    assert "references to its objects" in reject(b"](" + b"N" * 9 + b"e" + b"2\x86" * 40 + b".")
    memo = b"]q\x00" + b"".join(b"](" + b"h%c" % n * 9 + b"eq%c" % (n + 1) for n in range(9))
    assert "references to its objects" in reject(b"(" + memo + b"l.")
    assert too_large in reject(b"(" + b"N" * 50_000 + b"l.")
    assert too_large in reject(b"N" + b"2" * 50_000 + b".")
    assert too_large in reject(b"(" + b"\x8f" * 5_000 + b"l.")
    assert too_large in reject(sizes + b"(" + b"ctorch\nSize\nh\x00\x85R" * 90 + b"l.")
    assert too_large in reject(sizes + b"(" + b"cbuiltins\nset\nh\x00\x85R" * 90 + b"l.")
    text = b"V" + b"x" * 5000 + b"\nq\x000"
    assert too_large in reject(text + b"(" + b"c_codecs\nencode\nh\x00Vlatin1\n\x86R" * 90 + b"l.")
    assert too_large in reject(text + b"(" + b"cpathlib\nPath\nh\x00\x85R" * 90 + b"l.")
    assert too_large in reject(text + b"(" + b"h\x00h\x00\x93" * 200 + b"l.")
    attributes = b"}(" + b"".join(b"Va%d\nN" % n for n in range(2000)) + b"uq\x000"
    assert too_large in reject(
        attributes + b"(" + b"cargparse\nNamespace\n)\x81h\x00b" * 90 + b"l."
    )
    assert "more entries than objects" in reject(b"N" + b"\x94" * 100 + b".")


def test_a_pickle_truncated_at_any_byte_is_rejected() -> None:
    args = argparse.Namespace(lr=0.5, names=["a", "b"], dtype=torch.bfloat16)
    for protocol in range(6):
        data = pickle.dumps({"args": args, "n": [1, 2**70, "é", b"\xff"]}, protocol)
        for length in range(len(data)):
            assert reject(data[:length]), (protocol, length)


# --- archives


def check_equal(saved: object, expected: object) -> None:
    """Raise unless the tensor has the values of torch.load, bit for bit."""
    assert isinstance(saved, ArchiveTensor) and isinstance(expected, torch.Tensor)
    values = saved.read()
    assert (values.dtype, values.shape, values.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    bits = [part.contiguous().flatten().view(torch.uint8) for part in (values, expected.detach())]
    assert torch.equal(*bits)


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(60, dtype=torch.float32)
    dtypes = (
        *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
        *(torch.complex64, torch.uint64, torch.float8_e8m0fnu),
    )
    return {
        "base": base,
        "part": base[7:19],
        "matrix": base[12:36].view(4, 6).t(),
        "steps": base[1::7],
        "expanded": base[3:4].expand(5, 2, 1),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "empty_part": base[60:],
        "parameter": torch.nn.Parameter(base[2:5].clone()),
        "flipped": base.flip(0).requires_grad_(),
        **{str(dtype): torch.arange(7).to(dtype) for dtype in dtypes},
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_equal_those_of_torch_load(tmp_path: Path) -> None:
    saved = tensors()
    torch.save(saved, tmp_path / "common.pt")
    expected = torch.load(tmp_path / "common.pt", weights_only=True)
    whole = memoryview((tmp_path / "common.pt").read_bytes())
    for state in (
        read_archive(tmp_path / "common.pt"),
        parse_archive(whole, source="common.pt"),
        parse_archive(memoryview(bytearray(whole)), source="common.pt"),
    ):
        assert isinstance(state, dict) and list(state) == list(expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as for a read-only buffer
            for name, tensor in state.items():
                check_equal(tensor, expected[name])


def test_tensors_of_a_file_are_mapped_in_the_range_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"part": torch.arange(1000.0)[10:20]}, tmp_path / "w.pt")
    state: Any = read_archive(tmp_path / "w.pt")
    ranges = []
    mapped = storage.mapped
    monkeypatch.setattr(storage, "mapped", lambda *args: ranges.append(args) or mapped(*args))
    assert state["part"].read().tolist() == list(range(10, 20))
    assert [nbytes for _, _, nbytes in ranges] == [40]


def test_state_dicts_of_modules_are_plain() -> None:
    state = read_saved({"model": torch.nn.Linear(2, 3).state_dict(), "args": argparse.Namespace()})
    assert list(state["model"]) == ["weight", "bias"] and state["model"]["weight"].shape == (3, 2)
    assert require_plain(state, what="model", source="common.pt") is state


class Subclass(torch.Tensor):
    """A tensor that needs its own code."""


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.eye(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (torch.zeros(2).as_subclass(Subclass), "torch._tensor._rebuild_from_type_v2"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "torch._utils._rebuild_tensor_v2"),
        (torch.empty(2, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage"),
    ],
)
def test_tensors_of_other_kinds_become_placeholders(value: torch.Tensor, name: str) -> None:
    saved = read_saved(value)
    assert isinstance(saved, Placeholder) and saved.name == name


def test_tensors_with_attributes_are_read() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined] # as Megatron sets
    tensor = torch.ones(2)
    tensor.shared = True  # type: ignore[attr-defined] # as above
    for value in (parameter, tensor):
        assert read_saved(value).read().tolist() == [1, 1]


def rezip(
    data: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED
) -> memoryview:
    """Return an archive with changed entries; None removes an entry."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w", method) as new:
        for info in old.infolist():
            part = change(info.filename, old.read(info))
            if part is not None:
                new.writestr(info.filename, part)
    return memoryview(bytearray(changed.getvalue()))


def replace_entry(name: str, data: bytes | None) -> Callable[[str, bytes], bytes | None]:
    return lambda entry, old: data if entry.endswith(name) else old


TWO_BY_THREE = archive(torch.arange(6.0).view(2, 3))


def tensor_pickle(sizes: str, numel: str = "I6\n") -> bytes:
    """Return the pickle of a float32 tensor with an offset, shape and stride."""
    return (
        "ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\n"
        f"{numel}tQ{sizes}I00\nNtR."
    ).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (memoryview(b""), "not an archive of torch.save, or a truncated one"),
        (memoryview(b"PK\x05\x06"), "not an archive of torch.save"),
        (memoryview(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.rest"), "torch before 1.6"),
        (memoryview(bytes(257) + b"ustar"), "torch before 1.6"),
        (memoryview(TWO_BY_THREE[:-1]), "not an archive of torch.save"),
        (
            rezip(TWO_BY_THREE, lambda _, data: data, zipfile.ZIP_DEFLATED),
            "is compressed, expected stored",
        ),
        (rezip(TWO_BY_THREE, replace_entry("byteorder", b"big")), "byte order big, expected"),
        (rezip(TWO_BY_THREE, replace_entry("data.pkl", None)), "without data.pkl"),
        (rezip(TWO_BY_THREE, replace_entry("data/0", None)), "without archive/data/0"),
        (rezip(TWO_BY_THREE, replace_entry("data/0", bytes(23))), "has 23 bytes, expected 6"),
        (rezip(TWO_BY_THREE, replace_entry("data.pkl", b"]")), "truncated pickle"),
    ],
)
def test_other_archives_are_rejected(data: memoryview, reason: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_archive(data, source="common.pt")
    assert reason in str(error.value)
    assert str(error.value).startswith("cannot read common.pt: ")


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (tensor_pickle("I0\n(I2\nI3\nt(I3\nI1\nt"), None),
        (tensor_pickle("I0\n(I2\nI2\nI3\nt(I0\nI3\nI1\nt"), None),
        (tensor_pickle("I1\n(I2\nI3\nt(I3\nI1\nt"), "ends at byte 28 of a storage of 24 bytes"),
        (tensor_pickle("I0\n(I2\nI3\nt(I4\nI1\nt"), "ends at byte 28"),
        (tensor_pickle("I0\n(I3\nI3\nt(I3\nI1\nt"), "ends at byte 36"),
        (tensor_pickle("I-1\n(I2\nt(I1\nt"), "not whole numbers"),
        (tensor_pickle("I0\n(I2\nt(I-1\nt"), "not whole numbers"),
        (tensor_pickle("I0\n(I2\nt(F1\nt"), "not whole numbers"),
        (tensor_pickle("I0\n(I2\nt(I1\nI1\nt"), "not whole numbers"),
        (tensor_pickle("I0\n(I9999999999\nt(I0\nt"), "repeats a storage of 24 bytes"),
        (tensor_pickle("I0\n(I0\nI9999999999\nt(I0\nI0\nt"), "repeats a storage of 24 bytes"),
        (tensor_pickle("I0\nN(I1\nt"), "a shape of at most 64 dims"),
        (tensor_pickle("I0\n(" + "I1\n" * 65 + "t(" + "I1\n" * 65 + "t"), "at most 64 dims"),
        (tensor_pickle("I0\n(I2\nt(I1\nt", "I7\n"), "has 24 bytes, expected 7 elements"),
        (tensor_pickle("I0\n(I2\nt(I1\nt", "I-1\n"), "a storage without name and length"),
        (tensor_pickle("I0\n(I2\nt(I1\nt", "N"), "a storage without name and length"),
        (b"Vstorage\nQ.", "a storage without name and length"),
    ],
)
def test_tensors_beyond_their_storage_are_rejected(pickled: bytes, reason: str | None) -> None:
    data = rezip(TWO_BY_THREE, replace_entry("data.pkl", pickled))
    if reason is None:
        tensor: Any = parse_archive(data, source="common.pt")
        assert tensor.read().flatten()[-1] == 5
    else:
        with pytest.raises(CheckpointError) as error:
            parse_archive(data, source="common.pt")
        assert reason in str(error.value)


def test_archives_with_64_bit_offsets_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    data = rezip(TWO_BY_THREE, lambda _, part: part)
    assert b"PK\x06\x06" in bytes(data)
    tensor: Any = parse_archive(data, source="common.pt")
    assert tensor.read().tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name_are_rejected() -> None:
    data = io.BytesIO(TWO_BY_THREE)
    with zipfile.ZipFile(data, "a") as changed:
        changed.writestr("archive/data/0", bytes(24))
    with pytest.raises(CheckpointError, match="two entries archive/data/0"):
        parse_archive(memoryview(data.getvalue()), source="common.pt")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.pt", tmp_path):
        with pytest.raises(CheckpointError, match=f"cannot read {path}: it is not a regular file"):
            read_archive(path)
    torch.save(torch.ones(4096), tmp_path / "short.pt")
    tensor: Any = read_archive(tmp_path / "short.pt")
    os.truncate(tmp_path / "short.pt", 200)
    with pytest.raises(CheckpointError, match="it was truncated while it was read"):
        tensor.read()


# --- files of torch.distributed.checkpoint


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    state = {
        "model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
        "args": argparse.Namespace(lr=1.0),
        "step": 3,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_metadata_of_torch_distributed_checkpoint_is_read(dcp_folder: Path) -> None:
    data = (dcp_folder / ".metadata").read_bytes()
    metadata: Any = parse_pickle(data, source=".metadata")
    expected = pickle.loads(data)  # lint: allow pickle-load: written by this test
    assert metadata.name == f"{METADATA}.Metadata"
    for key, tensor in expected.state_dict_metadata.items():
        record = metadata.state["state_dict_metadata"][key]
        assert record.name == f"{METADATA}.{type(tensor).__name__}"
        if isinstance(tensor, dcp.metadata.TensorStorageMetadata):
            assert record.state["properties"].state["dtype"] is tensor.properties.dtype
            assert record.state["size"] == tuple(tensor.size)
            assert [
                (chunk.state["offsets"], chunk.state["sizes"]) for chunk in record.state["chunks"]
            ] == [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
    locations = {
        (index.state["fqn"], index.state.get("offset")): (
            info.state["relative_path"],
            info.state["offset"],
            info.state["length"],
        )
        for index, info in metadata.state["storage_data"].items()
    }
    assert locations == {
        (index.fqn, None if index.offset is None else tuple(index.offset)): (
            info.relative_path,
            info.offset,
            info.length,
        )
        for index, info in expected.storage_data.items()
    }
    for (name, _), (path, start, length) in locations.items():
        value: Any = parse_archive(
            storage.mapped(dcp_folder / path, start, length), source=f"{path}: {name}"
        )
        if name == "model.w":
            assert value.read().tolist() == [[0, 1, 2], [3, 4, 5]]
        if name == "args":
            assert (value.name, value.state) == ("argparse.Namespace", {"lr": 1.0})


# --- mutations of real files

SNIPPETS = (
    *(b"cos\nsystem\n", b"R", b"b", b"\x93", b"0", b"2", b"1", b"(", b"t", b"e", b"u", b"s", b"a"),
    *(b"\x81", b"\x92", b"Q", b"h\x00", b"h\x01", b"q\x00", b"\x94", b"N", b".", b"]", b"}", b"o"),
    *(b"\x90", b"\x91", b"\x8f", b"\x85", b"\x86", b"\x87", b"\x82\x01", b"cbuiltins\neval\n"),
    *(b"\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\xff", b"\x80\x05", b"\x95" + bytes(8)),
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a file with one to four random changes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(changed) + 1)
        stop = min(len(changed), at + rng.choice([1, 1, 2, 4, 30]))
        kind = rng.randrange(6)
        if kind == 0:
            changed[at:stop] = rng.randbytes(stop - at)
        elif kind == 1:
            changed[at:at] = rng.choice(SNIPPETS)
        elif kind == 2:
            changed[at : at + 1] = rng.choice(SNIPPETS)
        elif kind == 3:
            del changed[at:stop]
        elif kind == 4:
            source = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[source : source + rng.choice([1, 8, 60])]
        elif rng.random() < 0.2:
            del changed[at:]
        elif at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def walk(value: object) -> Iterator[object]:
    pending = [value]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(iter_children(node))


def read_all(data: bytes) -> bool:
    """Parse a file and read its tensors; return whether that succeeded."""
    try:
        if data[:2] == b"PK":
            value = parse_archive(memoryview(bytearray(data)), source="file")
        else:
            value = parse_pickle(data, source="file", load_persistent=None)
        for node in walk(value):
            if isinstance(node, ArchiveTensor):
                node.read().clone()
        require_plain(value, what="it", source="file")
    except CheckpointError as error:
        text = str(error)
        if "\n" in text or not text.startswith(("cannot read file: ", "file references ")):
            raise ValueError(f"not an error for users: {text}") from error
        return False
    return True


def parse_mutations(folder: Path, num_mutations: int) -> None:
    """Parse mutated files under an audit hook; prints the events that it saw."""
    archive_path = folder / "common.pt"
    files = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert all(map(read_all, files))  # also imports what the first read of a tensor needs
    events: set[str] = set()
    active = True
    allowed = "builtins.id", "object.__getattr__"

    def record(event: str, args: tuple[object, ...]) -> None:
        if active and event not in allowed:
            events.add(f"{event} {args!r:.200}")

    sys.addaudithook(record)
    num_parsed = 0
    for seed in range(num_mutations):
        rng = random.Random(seed)
        data = mutate(rng.choice(files), rng)
        try:
            num_parsed += read_all(data)
        except BaseException as error:
            active = False
            raise AssertionError(f"seed {seed}: {error!r}") from error
    in_memory = sorted(events)
    events.clear()
    tensor = next(node for node in walk(read_archive(archive_path)) if hasattr(node, "shape"))
    tensor.read()
    active = False
    opened = [event for event in events if str(archive_path) not in event]
    others = in_memory + [event for event in opened if not event.startswith("mmap.__new__")]
    print(f"read {num_parsed}, events {others}")


def run_mutations(folder: Path, dcp_folder: Path, num_mutations: int) -> None:
    args = argparse.Namespace(lr=0.5, names=["a"], dtype=torch.bfloat16, shape=torch.Size([2, 3]))
    state = {"args": args, "iteration": 3, "w": torch.arange(6.0).view(2, 3).t()}
    state |= {"scale": np.float32(2), "nested": [{"a": (1, None, b"x")}, {1, 2}], "big": 2**80}
    (folder / "common.pt").write_bytes(archive(state))
    (folder / "args.pkl").write_bytes(pickle.dumps([args, {"a": [1.5, "é"]}], 0))
    (folder / "args_5.pkl").write_bytes(pickle.dumps([args, state["nested"], 2**80], 5))
    (folder / "metadata.pkl").write_bytes((dcp_folder / ".metadata").read_bytes())
    program = (
        "from pathlib import Path\n"
        "from tests.checkpoint.test_safe_pickle import parse_mutations\n"
        f"parse_mutations(Path({str(folder)!r}), {num_mutations})\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("events []\n"), result.stdout
    num_parsed = int(result.stdout.split()[1].rstrip(","))
    assert 0.02 * num_mutations < num_parsed < 0.9 * num_mutations, result.stdout


def test_mutated_files_execute_nothing_and_raise_checkpoint_errors(
    tmp_path: Path, dcp_folder: Path
) -> None:
    run_mutations(tmp_path, dcp_folder, 2_000)


@pytest.mark.slow
def test_many_mutated_files_execute_nothing_and_raise_checkpoint_errors(
    tmp_path: Path, dcp_folder: Path
) -> None:
    run_mutations(tmp_path, dcp_folder, 100_000)


@pytest.mark.slow
def test_memory_of_a_bomb_is_bounded() -> None:
    program = (
        "import resource, sys\n"
        "from megalith.checkpoint.safe_pickle import parse_pickle\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for data in (b')' + b'2\\x86' * 60 + b'.', b'(' + b']' * 9_000_000 + b'l.',\n"
        "             b'(' + b'\\x8f' * 9_000_000 + b'l.', b'N' + b'2' * 9_000_000 + b'.'):\n"
        "    try:\n"
        "        parse_pickle(data, source='x')\n"
        "        sys.exit('accepted')\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) < 1200, result.stdout  # MiB
