"""What an engine reserves in a cluster."""

import pytest

from penstock.config.engine_config import CacheConfig, EngineConfig
from penstock.errors import ConfigError
from penstock.fleet.cluster.host import share_memory
from penstock.fleet.cluster.resources import parse_resources, resources_for
from penstock.system.host import free_memory


def test_resources_are_named_as_ray_names_them():
    assert parse_resources("CPU=4, GPU=0.5,memory=2GiB,rack:7=0.001") == {
        "CPU": 4,
        "GPU": 0.5,
        "memory": 2 << 30,
        "rack:7": 0.001,
    }


@pytest.mark.parametrize("text", ["", "CPU", "CPU=", "CPU=many", "=1", "GPU=-1", "CPU=0", "CPU=inf", "CPU=nan"])
def test_what_is_no_list_of_resources_is_refused(text):
    with pytest.raises(ConfigError, match="CPU=4,GPU=1"):
        parse_resources(text)


def test_without_a_word_an_engine_reserves_a_cpu_a_thread_and_a_gpu_if_it_is_to_use_one():
    assert resources_for(None, EngineConfig()) == {"CPU": 1}
    assert resources_for(None, EngineConfig.from_options(threads=6, device="cuda")) == {"CPU": 6, "GPU": 1}
    both = EngineConfig.from_options(threads=3, tensor_parallel_size=2, device="cuda")
    assert resources_for(None, both) == {"CPU": 3, "GPU": 2}
    assert resources_for(None, EngineConfig.from_options(tensor_parallel_size=2)) == {"CPU": 2}
    assert resources_for("CPU=2", EngineConfig.from_options(threads=6)) == {"CPU": 2}


def test_resources_are_of_each_node_of_an_engine():
    four = EngineConfig.from_options(threads=6, tensor_parallel_size=4, device="cuda")
    assert resources_for(None, four, num_nodes=2) == {"CPU": 3, "GPU": 2}
    assert resources_for("CPU=2", four, num_nodes=4) == {"CPU": 2}
    with pytest.raises(ConfigError, match=r"nodes_per_engine=3 must divide tensor_parallel_size \(4\)"):
        resources_for(None, four, num_nodes=3)


def test_engines_of_one_node_plan_within_their_part_of_its_memory():
    free = free_memory()
    assert share_memory(EngineConfig(), 2, 8).cache.max_memory == pytest.approx(free / 4, rel=0.5)
    assert share_memory(EngineConfig(), 8, 8) == EngineConfig()
    assert share_memory(EngineConfig(), 0, 8) == EngineConfig(), "it has a GPU, perhaps"
    assert share_memory(EngineConfig(), 2, 8, num_nodes=3).cache.max_memory == pytest.approx(free * 3 / 4, rel=0.5)
    assert share_memory(EngineConfig(), 8, 8, num_nodes=2).cache.max_memory == pytest.approx(free * 2, rel=0.5)
    given = EngineConfig(cache=CacheConfig(max_memory="1GiB"))
    assert share_memory(given, 2, 8) == given
