"""URLs of object stores, requests through real implementations of fsspec, and their errors."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalith import object_store, storage
from megalith.config.checkpoint import CheckpointConfig, checkpoint_problems
from megalith.errors import CheckpointError, ConfigError
from megalith.object_store import (
    FsspecClient,
    StoreOptions,
    StorePath,
    describe_url_problem,
    hide_credentials,
    parse_url,
)
from megalith.testing.object_store import NoCredentialsError, SimulatedStore, use_store


def test_paths_of_a_store_have_names_and_parents() -> None:
    path = parse_url("s3://bucket/runs/a/", StoreOptions(retries=2)) / "step_0000001"
    assert str(path) == "s3://bucket/runs/a/step_0000001"
    assert (path.scheme, path.bucket, path.name) == ("s3", "bucket", "step_0000001")
    assert path.parent / "x" == path.with_name("x") == parse_url("s3://bucket/runs/a/x")
    assert path.parent.options.retries == 2
    bucket = parse_url("s3://bucket")
    assert (bucket.name, bucket.parent, str(bucket / "a")) == ("", bucket, "s3://bucket/a")
    assert parse_url("memory://a/b").bucket == ""
    assert storage.parse_path("file:///a/b") == storage.parse_path("/a/b") == Path("/a/b")
    assert storage.parse_path("~/a") == Path.home() / "a"


@pytest.mark.parametrize(
    "url, problem",
    [
        ("msc://profile/a/b", r"multi-storage-client are not supported.* such as s3://BUCKET/a/b"),
        ("s3:/bucket/a", r"two slashes after its scheme. Use s3://bucket/a\."),
        ("s3:bucket/a", r"two slashes after its scheme. Use s3://bucket/a\."),
        ("s3://", r"names no bucket. Use s3://BUCKET/PREFIX\."),
        ("s3:///a", r"names no bucket. Use s3://BUCKET/PREFIX\."),
        ("s3://key:secret@bucket/a", r"must not contain credentials or parameters"),
        ("s3://bucket/a?versionId=1", r"must not contain credentials or parameters"),
        ("s3://bucket/a//b", r"an empty part, \. or \.\. in its path"),
        ("s3://bucket/../b", r"an empty part, \. or \.\. in its path"),
    ],
)
def test_url_that_cannot_be_used_is_rejected_before_the_run(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        storage.parse_path(url)
    problems = checkpoint_problems(CheckpointConfig(folder=url, load=url))
    assert len(problems) == 2 and problems[0].startswith("checkpoint.folder=")
    assert problems[1].startswith("checkpoint.load=")
    assert "secret@" not in f"{caught.value} {problems}"


def test_url_that_can_be_used_is_accepted() -> None:
    for url in ("s3://bucket", "gs://b/a b/c", "az://c@account.host/a", "memory://a", "runs/a"):
        assert describe_url_problem(url) is None, url


def test_missing_packages_and_unknown_schemes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="foo:// is not a URL scheme that fsspec knows. Use .*s3"):
        FsspecClient("foo")
    fsspec = pytest.importorskip("fsspec")

    def without_package(scheme: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", without_package)
    text = "s3:// needs s3fs, which is not installed. Run: pip install 'megalith.object.' s3fs"
    with pytest.raises(ConfigError, match=text):
        FsspecClient("s3")
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    text = "gs:// needs fsspec, which is not installed. Run: pip install 'megalith.object.' gcsfs"
    with pytest.raises(ConfigError, match=text):
        FsspecClient("gs")


def test_errors_and_logs_contain_no_credentials(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    caplog.set_level(logging.DEBUG)
    leak = (
        "GET https://key:pass1234@host/a?X-Amz-Credential=AKIA99&X-Amz-Signature=ab12&sig=x%2Fy"
        " wJalrXUtnFEMI"
    )

    class Leaky(SimulatedStore):
        def count_bytes(self, key: str) -> int:
            raise RuntimeError(leak)

    path = parse_url("s3://bucket/a", StoreOptions(retries=1))
    with use_store(Leaky()), pytest.raises(OSError, match="failed 2 times") as caught:
        storage.file_nbytes(path)
    text = f"{caught.value} {caught.value.__cause__} {caplog.text} {hide_credentials(leak)}"
    for secret in ("wJalrXUtnFEMI", "pass1234", "AKIA99", "ab12", "x%2Fy"):
        assert secret not in text
    assert "https://key:***@host/a?X-Amz-Credential=***" in text


def test_missing_credentials_are_not_repeated() -> None:
    class Anonymous(SimulatedStore):
        def put(self, key: str, data: memoryview) -> None:
            self.enter("put", key)
            raise NoCredentialsError("Unable to locate credentials")

    text = "s3://bucket/a: the bucket bucket cannot be used: .* no credentials .*Unable to locate"
    with use_store(Anonymous(bucket="s3://bucket")) as store:
        with pytest.raises(CheckpointError, match=text):
            storage.check_writable(parse_url("s3://bucket/a"), "checkpoint.folder")
    assert len(store.calls) == 1


def check_requests(folder: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check all requests of an implementation of fsspec."""
    monkeypatch.setattr(object_store, "PART_NBYTES", 5 * 2**20)  # the minimum of S3
    storage.check_writable(folder, "checkpoint.folder")
    assert storage.list_names(folder) == []
    storage.write_new(folder / "a" / "b", b"hello")
    storage.replace_file(folder / "c", b"old")
    storage.replace_file(folder / "c", b"new")
    assert storage.list_names(folder) == ["a", "c"] and storage.list_names(folder / "a") == ["b"]
    assert storage.list_names(folder / "x") == []
    assert storage.read_bytes(folder / "c") == b"new"
    assert storage.read_range(folder / "a/b", 1, 3) == b"ell"
    assert bytes(storage.mapped(folder / "a/b", 3, 99)) == b"lo"
    assert storage.exists(folder / "c") and not storage.exists(folder / "x")
    assert storage.is_folder(folder / "a") and not storage.exists(folder / "a")
    with pytest.raises(FileNotFoundError, match="no such object or bucket"):
        storage.read_bytes(folder / "x")
    lengths = storage.file_lengths(folder, ["c", "x"])
    assert lengths["c"] == 3 and isinstance(lengths["x"], FileNotFoundError)

    data = os.urandom(5 * 2**20 + 1000)
    with storage.open_new(folder / "parts") as file:
        file.write(data)
        storage.sync_file(file)
    assert storage.read_bytes(folder / "parts") == data
    upload = object_store.open_client(folder.scheme).begin_upload(str(folder / "aborted"))
    upload.put_part(memoryview(data[: 5 * 2**20]))
    upload.abort()
    del upload
    gc.collect()
    with storage.open_new(folder / "unfinished") as file:
        file.write(data)  # without sync
    assert storage.list_names(folder) == ["a", "c", "parts"]

    storage.remove_file(folder / "c")
    storage.remove_file(folder / "c")  # a missing one is no error
    storage.remove_tree(folder)
    assert object_store.list_object_lengths(folder) == {}


def test_requests_to_memory_and_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    check_requests(parse_url("memory://bucket/run"), monkeypatch)
    check_requests(parse_url(f"local://{tmp_path}/run"), monkeypatch)


def test_large_files_are_on_the_disk_until_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MAX_MEMORY_NBYTES", 1000)
    with use_store(SimulatedStore()) as store:
        with storage.open_new(parse_url("sim://bucket/a")) as file:
            for _ in range(5):
                file.write(b"x" * 300)
            storage.sync_file(file)
        assert store.objects == {"sim://bucket/a": b"x" * 1500}


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket `models` in a server of moto on loopback; returns boto3's client."""
    pytest.importorskip("s3fs", reason="s3fs is not installed (group dev)")
    server_module = pytest.importorskip("moto.server", reason="moto is not installed (group dev)")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (brought by moto)")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing-key",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    object_store.open_client.cache_clear()
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    yield client
    object_store.open_client.cache_clear()
    server.stop()


@pytest.mark.slow
def test_requests_through_s3fs(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_requests(parse_url("s3://models/run"), monkeypatch)
    lease = parse_url("s3://models/run/lease.json")
    assert object_store.create_object(lease, b"first")
    assert not object_store.create_object(lease, b"second")
    assert storage.read_bytes(lease) == b"first"
    assert "Uploads" not in s3_server.list_multipart_uploads(Bucket="models")
    with pytest.raises(CheckpointError, match="the bucket missing does not exist"):
        storage.check_writable(parse_url("s3://missing/run"), "checkpoint.folder")


@pytest.mark.slow
def test_run_with_checkpoints_in_s3_resumes_bitwise(s3_server: Any, tmp_path: Path) -> None:
    import torch

    from megalith.checkpoint.load import open_checkpoint
    from megalith.parallel.mesh import build_single_rank_mesh
    from megalith.testing.tiny import tiny_run
    from megalith.train.loop import run_training
    from megalith.train.run_folder import RunFolder

    def train(name: str, **settings: str) -> None:
        base = {"train.eval_steps": "0", "checkpoint.every": "2", "schedule.decay_steps": "4"}
        run = tiny_run(base | {name.replace("__", "."): each for name, each in settings.items()})
        folder = RunFolder(tmp_path / name)
        run_training(run, folder, build_single_rank_mesh(), torch.device("cpu"), show=False)

    def boxes(path: storage.StoragePath) -> dict[str, list[str]]:
        tensors = open_checkpoint(path).manifest.tensors
        return {key: [box.sha256 for box in each.boxes] for key, each in tensors.items()}

    train("plain", train__steps="4")
    for steps in ("2", "4"):
        train("stored", train__steps=steps, checkpoint__folder="s3://models/a/run")
    folder = parse_url("s3://models/a/run")
    assert storage.list_names(folder) == ["latest", "step_0000002", "step_0000004"]
    assert boxes(folder / "step_0000004") == boxes(tmp_path / "plain/checkpoints/step_0000004")
    assert "testing-secret" not in (tmp_path / "stored/config.yaml").read_text()
    assert "testing-secret" not in (tmp_path / "stored/log.txt").read_text()


def test_secret_with_a_slash_in_a_url_is_rejected_and_hidden() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("s3://AKIAKEY:ab/cdSECRET@bucket/run")
    assert "a URL must not contain credentials" in str(caught.value)
    assert "cdSECRET" not in str(caught.value)
