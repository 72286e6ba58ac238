"""An engine that hangs while it loads, without ever giving up the interpreter's lock."""

import re
from pathlib import Path

from penstock.config.engine_config import EngineConfig
from penstock.system.start import Start

HANGING_CORE = "tests.engine.hanging_engine:hang"


def hang(config: EngineConfig, start: Start) -> None:
    Path(config.model.model or "", "hangs").touch()
    re.match("(.*.*)*(.*.*)*(.*.*)*Z", "x" * 100)


if __name__ == "__main__":
    import sys
    import time

    from penstock.engine.protocol import Launch
    from penstock.fleet.engine_process import EngineProcess

    process = EngineProcess(lambda folder: Launch(EngineConfig.from_options(model=sys.argv[1]), HANGING_CORE, folder))
    print(process.pid, flush=True)
    time.sleep(600)
