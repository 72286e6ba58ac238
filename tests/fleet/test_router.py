"""Which replica a request goes to: by what is cached there, as a shadow of the engine's cache says, and by load."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.request import Route
from penstock.fleet.router import MAX_SCANNED, ROUTERS, LeastLoaded, PrefixRouter, ReplicaLoad, RoundRobin
from tests.core.fakes import FakeRunner, make_request, make_scheduler, run_step
from tests.core.images import make_image, placeholders

BLOCK = 4


def request(name, *tokens, namespace=""):
    return Route(replace(make_request(name, list(tokens)), namespace=namespace))


def prefix_router(*replicas, num_blocks=100):
    router = PrefixRouter()
    for replica in replicas:
        router.add_replica(replica, num_blocks, BLOCK)
    return router


def run(router, one, replica, cached=0, answers=()):
    """A whole life: sent, first output, end."""
    router.sent(one, replica)
    router.found(one, cached)
    router.ended(one, answers)


def idle(*replicas):
    return [ReplicaLoad(replica) for replica in replicas]


def test_a_request_goes_to_where_the_longest_part_of_its_prompt_is_cached():
    router = prefix_router(0, 1, 2)
    run(router, request("a", *range(8)), 1)
    run(router, request("b", *range(12)), 2)
    assert router.choose(request("c", *range(16)), idle(0, 1, 2)) == 2
    assert router.missing(request("c", *range(16)), 2) == 4
    assert router.missing(request("c", *range(16)), 1) == 8
    assert router.missing(request("c", *range(16)), 0) == 16
    assert router.choose(request("d", *range(12)), idle(0, 1)) == 1


def test_a_prompt_with_another_image_in_the_same_place_is_another_prompt():
    def with_image(name, number):
        tokens = [1, 2, *placeholders(make_image(number)), 3, 4, 5, 6]
        return Route(make_request(name, tokens, images=(make_image(number, start=2),)))

    router = prefix_router(0, 1)
    run(router, with_image("a", 1), 1, answers=[[7, 8, 9, 10, 11]])
    assert router.missing(with_image("b", 1), 1) == 1
    assert router.missing(with_image("c", 2), 1) == 12


def test_one_token_at_least_is_always_to_be_computed():
    router = prefix_router(0)
    run(router, request("a", *range(8)), 0)
    assert router.missing(request("b", *range(8)), 0) == 1


def test_of_idle_replicas_that_know_nothing_one_with_free_blocks_or_the_oldest_ones_is_taken():
    router, taken = prefix_router(0, 1, num_blocks=2), []
    for number in range(6):
        one = request(str(number), *range(100 * number, 100 * number + 8))
        taken.append(router.choose(one, idle(0, 1)))
        router.sent(one, taken[-1])
    assert taken == [0, 1, 0, 1, 0, 1]
    router.sent(request("again", *range(400, 408)), 0)
    assert router.choose(request("new", *range(900, 908)), idle(0, 1)) == 1


def test_load_outweighs_what_is_cached():
    router = prefix_router(0, 1)
    run(router, request("a", *range(8)), 0)
    other = request("b", *range(16))
    assert router.choose(other, [ReplicaLoad(0, 0, 7), ReplicaLoad(1)]) == 0  # 8 and 7 to compute, or 16
    assert router.choose(other, [ReplicaLoad(0, 0, 9), ReplicaLoad(1)]) == 1
    assert router.choose(other, [ReplicaLoad(0, 2, 0), ReplicaLoad(1)]) == 1  # 8 for three, or 16 for one


def test_other_namespaces_and_what_comes_after_another_beginning_do_not_count():
    router = prefix_router(0, 1)
    run(router, request("a", *range(8), namespace="key"), 0)
    assert router.missing(request("b", *range(8)), 0) == 8
    assert router.missing(request("c", 9, *range(1, 8), namespace="key"), 0) == 8


def test_an_answer_is_cached_too_but_for_its_last_token():
    router = prefix_router(0)
    run(router, request("a", *range(6)), 0, answers=[[6, 7, 8, 9, 10, 11]])
    assert router.missing(request("b", *range(20)), 0) == 12  # token 11 was never computed: no third block


def test_the_least_recently_used_blocks_are_given_up_and_of_a_prompt_the_last_ones_first():
    router = prefix_router(0, num_blocks=4)
    run(router, request("a", *range(8)), 0)
    run(router, request("b", *range(50, 62)), 0)
    assert router.missing(request("c", *range(12)), 0) == 8
    assert router.missing(request("d", *range(50, 64)), 0) == 2


def test_what_is_lost_with_an_engine_is_not_expected_of_the_next():
    router = prefix_router(0, 1)
    run(router, request("a", *range(8)), 1)
    router.lost(1)
    router.add_replica(1, 100, BLOCK)
    assert router.missing(request("b", *range(12)), 1) == 12
    router.remove_replica(1)
    assert router.choose(request("c", *range(12)), idle(0)) == 0


def test_a_miss_tells_that_all_that_is_older_is_gone_too():
    router = prefix_router(0)
    for name, start in (("old", 100), ("a", 0), ("new", 200)):
        run(router, request(name, *range(start, start + 8)), 0)
    again = request("again", *range(12))
    router.sent(again, 0)
    router.found(again, 4)  # its second block was given up, so what is older than that was before
    router.ended(again)
    assert router.missing(request("b", *range(100, 112)), 0) == 12
    assert router.missing(request("c", *range(200, 212)), 0) == 4
    assert router.missing(request("d", *range(16)), 0) == 4


def test_a_miss_of_what_is_still_being_computed_tells_nothing():
    router = prefix_router(0)
    run(router, request("old", *range(100, 108)), 0)
    router.sent(request("first", *range(8)), 0)
    second = request("second", *range(8))
    router.sent(second, 0)
    router.found(second, 0)
    assert router.missing(request("b", *range(100, 112)), 0) == 4


def test_among_very_many_places_holders_are_always_looked_at():
    router = prefix_router(*range(1000))
    run(router, request("a", *range(8)), 777)
    loads = idle(*range(1000))
    assert router.choose(request("b", *range(12)), loads) == 777
    assert {router.choose(request(f"c{i}", 9), loads) for i in range(50)} != {0}
    assert MAX_SCANNED < 1000


def test_replicas_of_different_block_sizes_are_compared_by_tokens():
    router = PrefixRouter()
    router.add_replica(0, 100, 4)
    router.add_replica(1, 100, 8)
    for replica in (0, 1):
        run(router, request(f"a{replica}", *range(12)), replica)
    other = request("b", *range(16))
    assert (router.missing(other, 0), router.missing(other, 1)) == (4, 8)


def test_round_robin_takes_each_in_turn_and_least_loaded_the_fewest_open():
    router = RoundRobin()
    taken = []
    for i in range(5):
        one = request(str(i), 1)
        taken.append(router.choose(one, idle(0, 2, 5)))
        router.sent(one, taken[-1])
    assert taken == [0, 2, 5, 0, 2]
    least = LeastLoaded()
    assert least.choose(request("a", 1), [ReplicaLoad(0, 3), ReplicaLoad(1, 2), ReplicaLoad(2, 2)]) == 1
    least.sent(request("a", 1), 1)
    assert least.choose(request("b", 1), [ReplicaLoad(0, 3), ReplicaLoad(1, 2), ReplicaLoad(2, 2)]) == 2


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_takes_calls_of_unknown_requests(name):
    router = ROUTERS[name]()
    router.add_replica(0, 10, BLOCK)
    router.found(request("never", 1), 3)
    router.ended(request("never", 1), [[1]])
    assert router.choose(request("a", 1, 2), idle(0)) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=40))
def test_a_real_cache_never_has_more_than_its_shadow_and_seldom_less(lives):
    scheduler, runner = make_scheduler(num_blocks=12, block_size=BLOCK, budget=64), FakeRunner(12, BLOCK)
    router = prefix_router(0, num_blocks=12)
    for i, (root, length) in enumerate(lives):
        sent = make_request(str(i), [root, *range(length)], max_tokens=1)
        one = Route(sent)
        expected = len(sent.prompt_token_ids) - router.missing(one, 0)
        scheduler.add_request(sent)
        (output,) = run_step(scheduler, runner)
        assert output.num_cached_tokens <= max(expected, 0)
        run(router, one, 0, output.num_cached_tokens)
        again = len(sent.prompt_token_ids) // BLOCK * BLOCK
        assert len(sent.prompt_token_ids) - router.missing(one, 0) == min(again, len(sent.prompt_token_ids) - 1)
