from typing import Any

import pytest

from jaxspec.config.kv_events import KvEventsConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.errors import ConfigError


def test_events_are_off_by_default():
    assert not KvEventsConfig.read(None).is_on
    assert not KvEventsConfig.read({"endpoint": "tcp://*:1"}).is_on
    on = {"enable_kv_cache_events": True}
    assert KvEventsConfig.read(on).is_on
    assert not KvEventsConfig.read(on | {"publisher": "null"}).is_on
    assert EngineArgs(model="m").kv_events_config is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("on", "kv_events_config must be a dict"),
        ({"endpont": "tcp://*:1"}, "did you mean endpoint"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events must be"),
        ({"publisher": "kafka"}, "publisher must be"),
        ({"endpoint": "*:5557"}, "endpoint must be an address of ZeroMQ"),
        ({"endpoint": "tcp://*"}, "endpoint must be tcp:// with a port"),
        ({"replay_endpoint": 5}, "replay_endpoint must be an address"),
        ({"buffer_steps": 0}, "buffer_steps must be"),
        ({"topic": None}, "topic must be text"),
    ],
)
def test_rejects_bad_values(given: Any, message: str):
    with pytest.raises(ConfigError, match="kv_events_config") as caught:
        KvEventsConfig.read(given)
    assert message in str(caught.value)
