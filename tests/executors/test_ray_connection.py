"""The Ray executor where no cluster runs: addresses that nobody answers."""

import socket

import pytest

from rowmill.core.errors import ConfigError
from rowmill.executors import RayExecutor


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
