"""The Ray executor where no cluster runs: addresses that nobody answers, and errors that are tried again."""

import errno
import socket

import pytest

from rowmill.core.errors import ConfigError, UnreachableError
from rowmill.executors import RayExecutor
from rowmill.executors.ray_worker import is_transient_error


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_an_address_where_no_cluster_is_is_refused_soon() -> None:
    pytest.importorskip("ray", reason="ray is absent: pip install 'rowmill[ray]' in an environment of its own")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        executor = RayExecutor(kind="ray", address=address).open(workers=1)

        with pytest.raises(ConfigError, match=r"address: no Ray cluster answers at .* start the cluster"):
            list(executor.map(abs, range(2), size_bytes=1))


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (OSError(errno.ESTALE, "stale file handle"), True),
        (OSError(errno.ENOSPC, "full"), False),
        (PermissionError(errno.EACCES, "denied"), False),
        (FileNotFoundError(errno.ENOENT, "absent"), False),
        (ValueError("a bug"), False),
    ],
)
def test_only_errors_that_may_pass_are_tried_again(error: Exception, passes: bool) -> None:
    assert is_transient_error(error) == passes


@pytest.mark.parametrize(("cause", "passes"), [(ConnectionError("503"), True), (PermissionError("403"), False)])
def test_a_storage_that_refuses_is_not_asked_again(cause: Exception, passes: bool) -> None:
    error = UnreachableError("s3://bucket: cannot be read")
    error.__cause__ = cause

    assert is_transient_error(error) == passes
