"""What streams tell while engines, or whole nodes of a Ray cluster, are killed: nothing else than undisturbed.

    python -m benchmarks.robustness.kills [--parts engines,nodes,takeover,autoscaling] [--kills 20]

1. engines: a server with three engines of one thread, 64 streams (greedy, sampled, searched, n of 2,
   log-probabilities, grammars, stop strings); 20 times one of the engines is killed or stopped.
2. nodes: the same over a Ray cluster of three nodes on this machine, of which 5 are lost, each with all its processes
   in one moment, and replaced.
3. takeover: seconds from an engine's SIGKILL to the first token of one of its streams on another node of the cluster.
4. autoscaling: a server of one engine, up to three, in a cluster whose nodes Ray's own autoscaler starts and ends as
   processes of this machine: under 60 streams all engines come, and after them one is left.

Each stream is compared with what a server with a single engine tells. Each part's rows are saved as it ends, in
results/<machine>/kills.json. Exits with 1 if a bar is missed. TEST_SEED for other moments.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from benchmarks.report import report
from benchmarks.speed.fleet import kill_once
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.frontend.client import AsyncEngine
from tests.e2e.test_killed_engine import SEED, Told, make_bodies, read_tokens, tell_all
from tests.server.running import RunningServer, running_server
from tests.support.ray_cluster import LocalCluster, local_cluster
from tests.support.waiting import wait_until

Rows = dict[str, tuple[float, float | None]]

FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-cache-memory", "128MiB")
PLACES = 3
START_SECONDS = 180.0
TOKENS_BETWEEN = (200, 1500)
"""Tokens of all streams from one kill to the next, least and most."""


def engines(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/v1/admin/engines", timeout=60).json()["engines"]
    return found


def up(server: RunningServer) -> list[dict[str, Any]]:
    return [engine for engine in engines(server) if engine["state"] == "up"]


def verdicts(answers: Sequence[Told], expected: Sequence[Told]) -> Counter[str]:
    """How many answers are as they would be undisturbed, and what is wrong with the others."""
    found: Counter[str] = Counter()
    for told, undisturbed in zip(answers, expected, strict=True):
        for index, right in undisturbed.items():
            answer = told.get(index, ("", [], [], None))
            if answer == right:
                found["right"] += 1
            elif len(answer[0]) < len(right[0]) and right[0].startswith(answer[0]):
                found["lost"] += 1
            elif len(answer[0]) > len(right[0]):
                found["repeated"] += 1
            else:
                found["changed"] += 1
    return found


async def disturb(
    server: RunningServer,
    kills: int,
    kill: Callable[[dict[str, Any]], None],
    expected: Sequence[Told],
    mend: Callable[[], object] = lambda: None,
) -> Counter[str]:
    """Rounds of all streams, until so many of the engines that were up have been killed under them.

    Args:
        mend: called after each kill, in the main thread.
    """
    rng, found, done = random.Random(SEED), Counter[str](), 0
    killed: set[int] = set()  # process ids: metrics report an engine as up for a moment after its end
    while done < kills:
        telling = asyncio.ensure_future(tell_all(server, make_bodies()))
        while not telling.done() and done < kills:
            enough = await read_tokens(server) + rng.uniform(*TOKENS_BETWEEN)
            while not telling.done() and await read_tokens(server) < enough:
                await asyncio.sleep(0.02)
            alive = await asyncio.to_thread(up, server)
            alive = [engine for engine in alive if engine["pid"] not in killed]
            if not telling.done() and len(alive) > 1:
                victim = rng.choice(alive)
                await asyncio.to_thread(kill, victim)
                killed.add(victim["pid"])
                mend()
                done += 1
        round_found = verdicts(await telling, expected)
        found += round_found
        print(f"{done} kills: {dict(round_found)}", flush=True)
        await asyncio.to_thread(wait_until, lambda: len(up(server)) == PLACES, START_SECONDS)
    return found


def rows_of(what: str, kills: int, found: Counter[str]) -> Rows:
    rows: Rows = {f"{what}: kills": (kills, None), f"{what}: answers told right": (found["right"], None)}
    return rows | {f"{what}: answers {wrong}": (found[wrong], 0.0) for wrong in ("lost", "repeated", "changed")}


def undisturbed() -> list[Told]:
    with running_server(*FLAGS) as server:
        return asyncio.run(tell_all(server, make_bodies()))


def kill_engines(kills: int) -> Rows:
    expected, rng = undisturbed(), random.Random(SEED)

    def kill(victim: dict[str, Any]) -> None:
        os.kill(victim["pid"], rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))

    with running_server(*FLAGS, "--engines", str(PLACES), "--admin") as server:
        found = asyncio.run(disturb(server, kills, kill, expected))
    return rows_of("engines killed under 64 streams", kills, found)


def kill_nodes(kills: int) -> Rows:
    expected = undisturbed()
    with local_cluster(PLACES) as cluster:

        def kill(victim: dict[str, Any]) -> None:
            cluster.lose_node(cluster.node_of(victim["node"]))
            wait_until(lambda: len(up(server)) < PLACES)

        server = RunningServer(*FLAGS, "--engines", str(PLACES), "--admin", "--cluster", cluster.address)
        try:
            server.wait_until_listening(START_SECONDS)
            found = asyncio.run(disturb(server, kills, kill, expected, cluster.add_node))
        finally:
            server.stop()
    return rows_of("nodes lost under 64 streams", kills, found)


def takeover(kills: int) -> Rows:
    with local_cluster(2) as cluster:
        seconds = asyncio.run(_takeover(cluster, kills))
    return {
        f"in a cluster: SIGKILL to the first token on another engine, median of {kills}, s": (
            statistics.median(seconds),
            0.5,
        ),
        "the same, worst, s": (max(seconds), None),
    }


async def _takeover(local: LocalCluster, kills: int) -> list[float]:
    from penstock.fleet.cluster.ray_cluster import RayCluster

    params = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
    config = EngineConfig.from_options(threads=1, dtype="float32", kv_cache_memory="128MiB")
    cluster = RayCluster(local.address, {"CPU": 1})
    engine = await AsyncEngine.start(config, cluster.launch([config] * 2), router="least-loaded")
    try:
        seconds = []
        for number in range(kills):
            seconds.append(await kill_once(engine, params, number))
            print(f"kill {number}: {seconds[-1]:.3f} s", flush=True)
        return seconds
    finally:
        await engine.close()
        cluster.close()


FAKE_HEAD = "f" * 51 + "0" * 5
FAKE_PROVIDER = {
    "type": "fake_multinode",
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
    "use_node_id_as_ip": True,
}
LISTS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands", "rsync_exclude"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_filter"),
)


def autoscaled(port: int, nodes: int) -> dict[str, Any]:
    """A cluster file of `ray up` whose nodes are processes of this machine, each of one CPU."""
    import ray

    address = f"{ray.util.get_node_ip_address()}:{port}"
    worker = {"resources": {"CPU": 1, "object_store_memory": 80 << 20}, "node_config": {}, "max_workers": nodes}
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "kills",
        "max_workers": nodes,
        "upscaling_speed": 9.0,
        "idle_timeout_minutes": 0.1,
        "provider": FAKE_PROVIDER | {"gcs_address": address, "head_node_id": FAKE_HEAD},
        "head_node_type": "ray.head.default",
        "available_node_types": {"ray.head.default": head, "worker": worker | {"min_workers": 0}},
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in LISTS},
    }


def autoscaling(most: int) -> Rows:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    os.environ["RAY_FAKE_CLUSTER"] = "1"  # or the provider refuses
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(autoscaled(port, most), file)
        file.flush()
        head = {"env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD}, "gcs_server_port": port}
        with local_cluster(0, autoscaling_config=file.name, **head) as cluster:
            flags = ["--cluster", cluster.address, "--max-engines", str(most), "--max-num-seqs", "4", "--admin"]
            server = RunningServer(*FLAGS, *flags, "--upscale-delay", "1", "--downscale-delay", "3")
            try:
                server.wait_until_listening(START_SECONDS)
                return asyncio.run(_autoscaling(server, most))
            finally:
                server.stop()


async def _autoscaling(server: RunningServer, most: int) -> Rows:
    """60 long answers at a time until all engines are up; then the wait until one is left."""
    body = {"model": server.model, "prompt": "one two", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    peak, answers, began = 1, Counter[str](), time.monotonic()
    seconds_up = START_SECONDS
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as http:
        while peak < most and time.monotonic() - began < START_SECONDS:
            calls = (http.post("/v1/completions", json=body) for _ in range(60))
            telling = asyncio.ensure_future(asyncio.gather(*calls))
            while not telling.done():
                peak = max(peak, len(await asyncio.to_thread(up, server)))
                if peak == most:
                    seconds_up = min(seconds_up, time.monotonic() - began)
                await asyncio.sleep(0.2)
            answers.update(answer.json()["choices"][0]["text"] for answer in await telling)
    idle = time.monotonic()
    await asyncio.to_thread(wait_until, lambda: len(engines(server)) == 1, START_SECONDS)
    return {
        f"autoscaling: engines that did not come under load, of {most - 1} more": (most - peak, 0.0),
        "autoscaling: seconds of load until all were up, on nodes that Ray's autoscaler started": (seconds_up, None),
        "autoscaling: seconds without load until one engine was left": (time.monotonic() - idle, None),
        "autoscaling: answers under load": (answers.total(), None),
        "autoscaling: answers that differ, to one greedy request": (len(answers) - 1, 0.0),
    }


PARTS: dict[str, tuple[Callable[[int], Rows], int]] = {
    "engines": (kill_engines, 20),
    "nodes": (kill_nodes, 5),
    "takeover": (takeover, 20),
    "autoscaling": (autoscaling, 3),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--kills", type=int, help="default: 20 engines, 5 nodes, 20 engines in a cluster, 3 at most")
    args = parser.parse_args(argv)
    code = 0
    for part in args.parts.split(","):
        run, kills = PARTS[part]
        rows = run(args.kills or kills)
        rows[f"load of the machine after {part}"] = (os.getloadavg()[0], None)
        code |= report("kills", rows, beside=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
