"""Options of the server that go together, and those that do not."""

import pytest

from penstock.errors import ConfigError
from penstock.server.config import ServerConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resources": "CPU=4"}, "resources needs cluster"),
        ({"cluster_host": "10.0.0.1"}, "cluster_host needs cluster"),
        ({"max_engines": "4"}, "max_engines needs cluster"),
        ({"nodes_per_engine": "2"}, "nodes_per_engine needs cluster"),
        ({"nodes_per_engine": "0"}, "nodes_per_engine must be at least 1, not 0"),
        ({"cluster": "auto", "engines": "4", "max_engines": "3"}, r"max_engines \(3\) must be at least engines \(4\)"),
        ({"downscale_delay": "-1"}, "downscale_delay must be at least 0 seconds, not -1"),
        ({"otlp_endpoint": "collector"}, "otlp_endpoint must be like http://localhost:4318, not 'collector'"),
        ({"engines": "0"}, "engines must be from 1 to 1024, not 0"),
        ({"engines": "999999999"}, "engines must be from 1 to 1024, not 999999999"),
        ({"prefill_engines": "1"}, r"from 0 to 0,"),
        ({"engines": "3", "prefill_engines": "3"}, r"from 0 to 2,"),
        ({"cluster": "auto", "engines": "2", "prefill_engines": "1"}, "set kv_transfer to nixl"),
        ({"engines": "2", "kv_transfer": "nixl"}, "kv_transfer nixl needs prefill_engines"),
        ({"uds": "/x.sock", "port": 80}, "leave out port or uds"),
        ({"uds": "/x.sock", "host": "0.0.0.0"}, "leave out host or uds"),
        ({"uds": ""}, "uds names no file"),
        *(({"root_path": path}, "root_path must be a path such as") for path in ("x", "//", "/a//b", "/a b", "/a?b")),
        (
            {"cluster": "auto", "engines": 2, "prefill_engines": 1, "kv_transfer": "nixl", "max_engines": 3},
            "max_engines does not work with prefill_engines",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig.from_options(**options)


def test_engines_may_follow_the_queue_in_a_cluster():
    config = ServerConfig.from_options(cluster="auto", engines="2", max_engines="8", resources="CPU=4")
    assert (config.engines, config.max_engines, config.upscale_delay) == (2, 8, 10.0)
