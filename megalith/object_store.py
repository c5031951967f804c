"""Object stores through fsspec: paths that are URLs, and requests that are repeated after errors.

An object appears when its upload is complete, and there is no rename. Every object that is put is
then requested by name, because a listing may be old. Credentials are those of the client (its
environment variables and profiles).
"""

import contextlib
import errno
import functools
import importlib
import io
import itertools
import logging
import mmap
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import IO, Any, Protocol, TypeVar

from megalith.errors import ConfigError

PART_NBYTES = 32 * 2**20
"""Larger objects are uploaded in parts of this size. Heuristic: S3 needs at least 5 MiB, and
recommends parts from about 100 MB in total on."""

MAX_MEMORY_NBYTES = 2**28
"""Files that become larger are written to the disk until they are stored (heuristic: four times
the objects of a save)."""

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 30.0
"""Bounds of the delay before a request is repeated. Heuristic: S3 recommends backoff of seconds
after 503 Slow Down."""

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "adl": "adlfs",
}
"""Package of the fsspec implementation of a URL scheme."""

WITHOUT_BUCKET = ("memory", "local")
"""Schemes of stores without buckets, for tests."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_ONE_SLASH = re.compile(rf"({'|'.join((*PACKAGES, *WITHOUT_BUCKET, 'msc'))}):/?([^/].*)")

_CREDENTIAL_ERRORS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
)
"""Names of the exceptions of botocore, google-auth and azure-core for missing credentials, which
have no common base class."""

_EXISTS = "PreconditionFailed", "pre-conditions", "ResourceExistsError", "conditionNotMet"
"""Parts of the errors of S3, Google Cloud Storage and Azure for an object that exists."""

_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING")
_SIGNATURE = re.compile(
    r"((?:X-Amz-\w+|X-Goog-\w+|sig|Signature|AccountKey|AWSAccessKeyId)(?:=|%3D))[^&\s'\";]+", re.I
)

T = TypeVar("T")

_log = logging.getLogger(__name__)


# --- paths


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How requests to a store are repeated."""

    retries: int = 8
    """Number of times that a failed request is repeated."""

    timeout_seconds: float = 600.0
    """Time for one request with all its repetitions."""


DEFAULT_OPTIONS = StoreOptions()


@dataclass(frozen=True, slots=True, order=True)
class StorePath:
    """Path in an object store: the URL of an object, or of a prefix that objects share."""

    url: str
    """Without a slash at the end."""

    options: StoreOptions = field(default=DEFAULT_OPTIONS, compare=False, repr=False)

    @property
    def scheme(self) -> str:
        """Scheme of the URL, such as s3."""
        return self.url.partition("://")[0]

    @property
    def bucket(self) -> str:
        """Name of the bucket or container; empty if the store has none."""
        return "" if self.scheme in WITHOUT_BUCKET else self.url.split("/")[2]

    @property
    def name(self) -> str:
        """Last part of the path; empty for a bucket."""
        return self.url.partition("://")[2].partition("/")[2].rpartition("/")[2]

    def absolute(self) -> "StorePath":
        """Return the path itself: URLs are absolute."""
        return self

    @property
    def parent(self) -> "StorePath":
        """Path without its last part; a bucket is its own parent."""
        return replace(self, url=self.url.rpartition("/")[0]) if self.name else self

    def with_name(self, name: str) -> "StorePath":
        """Return the path with another last part."""
        return self.parent / name

    def __truediv__(self, name: str) -> "StorePath":
        return replace(self, url=f"{self.url}/{name.strip('/')}")

    def __str__(self) -> str:
        return self.url


def is_url(text: str) -> bool:
    """Return whether a path is a URL.

    >>> is_url("s3://bucket/run"), is_url("runs/a")
    (True, False)
    """
    return _URL.fullmatch(text) is not None


def describe_url_problem(text: str) -> str | None:
    """Describe why a path cannot be used as a URL; None for paths that are not URLs, and for valid
    URLs. Opens no connection.

    >>> describe_url_problem("s3:/bucket/run")
    'a URL has two slashes after its scheme. Use s3://bucket/run.'
    """
    url = _URL.fullmatch(text)
    if url is None:
        one_slash = _ONE_SLASH.fullmatch(text)
        if one_slash is None:
            return None
        return f"a URL has two slashes after its scheme. Use {one_slash[1]}://{one_slash[2]}."
    scheme, rest = url[1].lower(), url[2]
    if scheme == "msc":
        path = rest.partition("/")[2] or "PREFIX"
        return (
            "URLs of multi-storage-client are not supported; object stores are opened through "
            f"fsspec. Use the store's own URL, such as s3://BUCKET/{path}."
        )
    bucket = rest.partition("/")[0]
    # A secret may contain slashes, so the @ after it is not always in the part of the bucket.
    if "?" in rest or (":" in bucket and "@" in rest):
        return (
            "a URL must not contain credentials or parameters. Remove them, and set the "
            "environment variables or the profile of the store's client."
        )
    if not bucket and scheme not in (*WITHOUT_BUCKET, "file"):
        return f"the URL names no bucket. Use {scheme}://BUCKET/PREFIX."
    if any(part in ("", ".", "..") for part in rest.strip("/").split("/")[1:]):
        return "the URL has an empty part, . or .. in its path. Use a URL without them."
    return None


def parse_url(text: str, options: StoreOptions = DEFAULT_OPTIONS) -> StorePath:
    """Return the path of a URL.

    Raises:
        ConfigError: it cannot be used.
    """
    problem = describe_url_problem(text)
    url = _URL.fullmatch(text)
    if problem is not None or url is None:
        raise ConfigError(f"{hide_credentials(text)}: {problem or 'this is not a URL.'}")
    return StorePath(f"{url[1].lower()}://{url[2].rstrip('/')}", options)


def hide_credentials(text: str) -> str:
    """Return a text without passwords, signatures and the values of secret environment
    variables.

    >>> hide_credentials("https://host/key?X-Amz-Signature=12ab&part=1")
    'https://host/key?X-Amz-Signature=***&part=1'
    """
    for name, value in os.environ.items():
        if _SECRET_NAMES.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    text = re.sub(r"(://[^/\s:@]*):[^\s@]+@", r"\1:***@", text)
    return _SIGNATURE.sub(r"\1***", text)


# --- requests


class StoreUpload(Protocol):
    """Upload of one object in parts."""

    def put_part(self, data: memoryview) -> None:
        """Upload the next part."""

    def complete(self) -> None:
        """Make the object of the parts appear."""

    def abort(self) -> None:
        """Delete the parts."""


class StoreClient(Protocol):
    """Requests to a store; keys and prefixes are URLs. Errors are of any class; FileNotFoundError
    means that there is no such object or bucket."""

    def put(self, key: str, data: memoryview) -> None:
        """Store an object with one request."""

    def create(self, key: str, data: memoryview) -> None:
        """Store an object that does not exist; FileExistsError: it does; NotImplementedError: the
        store cannot do that with one request."""

    def begin_upload(self, key: str) -> StoreUpload:
        """Begin to upload an object in parts."""

    def read(self, key: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object; fewer if it ends before."""

    def count_bytes(self, key: str) -> int:
        """Return the length of an object."""

    def list_names(self, prefix: str) -> list[str]:
        """Return the names directly under a prefix."""

    def list_lengths(self, prefix: str) -> dict[str, int]:
        """Return the lengths of all objects under a prefix, by key."""

    def delete(self, key: str) -> None:
        """Delete an object."""

    def reconnect(self) -> None:
        """Read the credentials again."""


class FsspecUpload:
    """Upload through a file of fsspec."""

    def __init__(self, file_system: Any, key: str) -> None:  # fsspec has no types
        self._file_system, self._key = file_system, key
        self._file = file_system.open(key, "wb", block_size=PART_NBYTES)

    def put_part(self, data: memoryview) -> None:
        """Upload the next part."""
        self._file.write(data)

    def complete(self) -> None:
        """Make the object of the parts appear."""
        self._file.close()

    def abort(self) -> None:
        """Delete the parts, and what stores without multipart uploads show of the object."""
        if hasattr(self._file, "_initiate_upload"):
            try:
                self._file.discard()
            finally:
                self._file.closed = True  # the destructor would complete the upload
            return
        self._file.close()
        self._file_system.rm_file(self._key)


class FsspecClient:
    """Requests through the fsspec implementation of a URL scheme."""

    def __init__(self, scheme: str) -> None:
        """Open the file system.

        Raises:
            ConfigError: a package is not installed, or the scheme is unknown.
        """
        self._scheme = scheme
        self._file_system = _open_file_system(scheme)

    def reconnect(self) -> None:
        """Read the credentials again."""
        self._file_system = _open_file_system(self._scheme)

    def put(self, key: str, data: memoryview) -> None:
        """Store an object with one request."""
        self._file_system.pipe_file(key, bytes(data))

    def create(self, key: str, data: memoryview) -> None:
        """Store an object that does not exist."""
        try:
            self._file_system.pipe_file(key, bytes(data), mode="create")
        except TypeError:
            raise NotImplementedError from None  # an implementation without this parameter
        except Exception as error:  # each client has exceptions of its own
            texts = str(error), type(error).__name__
            if any(word in text for word in _EXISTS for text in texts):
                raise FileExistsError(key) from error
            if any("NotImplemented" in text for text in texts):
                raise NotImplementedError from error
            raise

    def begin_upload(self, key: str) -> StoreUpload:
        """Begin to upload an object in parts."""
        return FsspecUpload(self._file_system, key)

    def read(self, key: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object; fewer if it ends before."""
        return bytes(self._file_system.cat_file(key, start=start, end=stop))

    def count_bytes(self, key: str) -> int:
        """Return the length of an object."""
        self._file_system.invalidate_cache()
        info = self._file_system.info(key)
        if info["type"] == "directory":
            raise FileNotFoundError(key)
        return int(info["size"])

    def list_names(self, prefix: str) -> list[str]:
        """Return the names directly under a prefix."""
        self._file_system.invalidate_cache()
        try:
            paths = self._file_system.ls(prefix, detail=False)
        except FileNotFoundError:
            return []
        own = self._file_system._strip_protocol(prefix)
        children = (path.rstrip("/") for path in paths if path.rstrip("/") != own)
        return sorted({path.rpartition("/")[2] for path in children})

    def list_lengths(self, prefix: str) -> dict[str, int]:
        """Return the lengths of all objects under a prefix, by key."""
        self._file_system.invalidate_cache()
        own = self._file_system._strip_protocol(prefix)
        infos = self._file_system.find(prefix, detail=True)
        return {
            f"{prefix}/{path.removeprefix(own).strip('/')}": int(info["size"])
            for path, info in infos.items()
            if path.startswith(f"{own}/")
        }

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._file_system.rm_file(key)


def _open_file_system(scheme: str) -> Any:  # fsspec has no types
    """Open the fsspec implementation of a scheme, with new credentials and without caches.

    Raises:
        ConfigError: a package is not installed, or the scheme is unknown.
    """
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        packages = f"'megalith[object]' {PACKAGES.get(scheme, '')}".strip()
        raise ConfigError(
            f"{scheme}:// needs fsspec, which is not installed. Run: pip install {packages}"
        ) from None
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ValueError:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise ConfigError(
            f"{scheme}:// is not a URL scheme that fsspec knows. Use one such as {known}."
        ) from None
    except ImportError as error:
        package = PACKAGES.get(scheme)
        advice = (
            f"Run: pip install 'megalith[object]' {package}" if package else f"fsspec says: {error}"
        )
        raise ConfigError(
            f"{scheme}:// needs {package or 'a package'}, which is not installed. {advice}"
        ) from None
    options = {"auto_mkdir": True} if scheme == "local" else {}
    return kind(skip_instance_cache=True, use_listings_cache=False, **options)


@functools.cache
def open_client(scheme: str) -> StoreClient:
    """Return this process's client of a URL scheme.

    Raises:
        ConfigError: a package is not installed, or the scheme is unknown.
    """
    return FsspecClient(scheme)


def _call(path: StorePath, action: str, request: Callable[[StoreClient], T]) -> T:
    """Execute a request, and repeat it after errors that may be transient.

    The delay before a repetition is random between zero and a bound that doubles (full jitter).
    Source: Brooker 2015, "Exponential backoff and jitter", AWS Architecture Blog.

    Raises:
        OSError: there is no such object, it must not be accessed, or the request has failed too
            often; the text contains no credentials.
        ConfigError: a package is not installed.
    """
    options, started = path.options, time.monotonic()
    client = open_client(path.scheme)
    for attempt in itertools.count():
        left = options.timeout_seconds - (time.monotonic() - started)
        try:
            return _run_limited(functools.partial(request, client), left)
        except ConfigError:
            raise
        except Exception as error:  # each client has exceptions of its own
            if (permanent := _permanent_error(path, action, error)) is not None:
                raise permanent from None
            cause = _describe_cause(error)
            delay = random.uniform(0, min(MAX_DELAY_S, FIRST_DELAY_S * 2**attempt))
            elapsed = time.monotonic() - started
            if attempt >= options.retries or elapsed + delay > options.timeout_seconds:
                raise OSError(
                    errno.EIO,
                    f"{action} failed {attempt + 1} times in {elapsed:.0f} s, the last time with "
                    f"{cause}",
                    path.url,
                ) from None
            _log_cause_once(path.scheme, path.bucket, action, type(error).__name__, cause)
            if _is_expired(error):
                client.reconnect()
        time.sleep(delay)
    raise AssertionError("the loop ends by return or raise")


def _run_limited(request: Callable[[], T], seconds: float) -> T:
    """Run a request in a thread of its own, and give up waiting for it after some time.

    Raises:
        TimeoutError: it has not returned.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(request())
        except BaseException as error:
            errors.append(error)

    # A thread that hangs does not prevent the end of the process.
    thread = threading.Thread(target=run, name="object-store-request", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no response within {seconds:.0f} s")
    return results[0]


def _permanent_error(path: StorePath, action: str, error: Exception) -> OSError | None:
    """Return the error to raise if repeating the request does not help; None if it may help."""
    text = _describe_cause(error)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such object or bucket", path.url)
    if type(error).__name__ in _CREDENTIAL_ERRORS:
        return PermissionError(errno.EACCES, f"{action} failed: no credentials ({text})", path.url)
    if isinstance(error, PermissionError) and not _is_expired(error):
        return PermissionError(errno.EACCES, f"{action} is not permitted ({text})", path.url)
    return None


def _is_expired(error: Exception) -> bool:
    return "expired" in str(error).lower() or "ExpiredToken" in type(error).__name__


def _describe_cause(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {hide_credentials(lines[0])[:300] if lines else ''}".rstrip(
        ": "
    )


@functools.lru_cache(maxsize=1000)
def _log_cause_once(scheme: str, bucket: str, action: str, kind: str, cause: str) -> None:
    """Log why a request is repeated; the cache omits causes that were logged before."""
    del kind
    _log.warning(
        "%s://%s: %s failed with %s; repeating it (logged once)", scheme, bucket, action, cause
    )


# --- objects


class StoreFile(io.RawIOBase):
    """File that becomes an object by `put`; without that, nothing is stored. Its contents are in
    memory, or if they are large in a temporary file."""

    def __init__(self, path: StorePath) -> None:
        super().__init__()
        self.path = path
        self.name = path.url
        self._memory = bytearray()
        self._file: IO[bytes] | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:  # any bytes-like object
        """Append bytes."""
        if self._file is None and len(self._memory) + len(data) > MAX_MEMORY_NBYTES:
            self._file = tempfile.TemporaryFile(prefix="megalith-")  # noqa: SIM115 - see `close`
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += data
        else:
            self._file.write(data)
        return len(data)

    def put(self) -> None:
        """Store the contents.

        Raises:
            OSError: the store has not accepted them.
        """
        if self._file is None:
            put_object(self.path, self._memory)
            return
        self._file.flush()
        put_object(self.path, mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))

    def close(self) -> None:
        """Forget the contents."""
        if self._file is not None:
            self._file.close()
        self._memory = bytearray()
        super().close()


def put_object(path: StorePath, data: bytes | bytearray | memoryview | mmap.mmap) -> None:
    """Store an object, which a reader sees complete or not at all, and request it by name.

    Raises:
        OSError: the store has not accepted it; parts of it are deleted.
    """
    view = memoryview(data)

    def put(client: StoreClient) -> None:
        if len(view) > PART_NBYTES:
            _upload(client, path.url, view)
        else:
            client.put(path.url, view)
        try:
            stored = client.count_bytes(path.url)
        except FileNotFoundError:
            raise OSError(errno.EIO, "the object is missing after its upload") from None
        if stored != len(view):
            raise OSError(
                errno.EIO, f"the object has {stored:,} bytes after an upload of {len(view):,}"
            )

    _call(path, "writing an object", put)


def create_object(path: StorePath, data: bytes) -> bool:
    """Store an object if there is none; return whether it was stored. After an error of the
    connection, the object that exists may be this one. Warns if the store has no request for this.

    Raises:
        OSError: the store cannot be used.
    """

    def create(client: StoreClient) -> bool:
        try:
            client.create(path.url, memoryview(data))
        except FileExistsError:
            return False
        except NotImplementedError:
            _log.warning(
                "%s:// has no conditional requests: two processes that begin at the same time may "
                "both believe that they have created %s",
                path.scheme,
                path,
            )
            try:
                client.count_bytes(path.url)
            except FileNotFoundError:
                client.put(path.url, memoryview(data))
                return True
            return False
        return True

    return _call(path, "creating an object", create)


def _upload(client: StoreClient, key: str, data: memoryview) -> None:
    upload = client.begin_upload(key)
    try:
        for start in range(0, len(data), PART_NBYTES):
            upload.put_part(data[start : start + PART_NBYTES])
        upload.complete()
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            upload.abort()
        raise


def read_object(path: StorePath, start: int, nbytes: int) -> bytearray:
    """Return bytes [start, start + nbytes) of an object; fewer if the object ends before.

    Raises:
        OSError: it cannot be read.
    """

    def read(client: StoreClient) -> bytearray:
        data = client.read(path.url, start, start + nbytes)
        if len(data) < nbytes:
            expected = min(nbytes, max(0, client.count_bytes(path.url) - start))
            if len(data) != expected:
                raise OSError(errno.EIO, f"{len(data):,} of {expected:,} bytes were received")
        return bytearray(data)

    return _call(path, "reading an object", read) if nbytes else bytearray()


def object_nbytes(path: StorePath) -> int:
    """Return the length of an object.

    Raises:
        FileNotFoundError: there is no such object.
    """
    return _call(path, "requesting an object", lambda client: client.count_bytes(path.url))


def list_object_names(prefix: StorePath) -> list[str]:
    """Return the names directly under a prefix, sorted. The listing may be old."""
    return sorted(_call(prefix, "listing objects", lambda client: client.list_names(prefix.url)))


def list_object_lengths(prefix: StorePath) -> dict[StorePath, int]:
    """Return the lengths of all objects under a prefix. The listing may be old."""
    lengths = _call(prefix, "listing objects", lambda client: client.list_lengths(prefix.url))
    return {replace(prefix, url=key): nbytes for key, nbytes in sorted(lengths.items())}


def delete_object(path: StorePath) -> None:
    """Delete an object, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        _call(path, "deleting an object", lambda client: client.delete(path.url))
