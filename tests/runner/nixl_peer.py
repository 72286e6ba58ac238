"""A process that offers a file of blocks by NIXL, for tests: says what others need to read it, until its input ends."""

import json
import os
import sys
from dataclasses import asdict

from penstock.runner.block_file import open_temporary
from penstock.runner.nixl_memory import NixlMemory
from tests.runner.blocks import LAYOUT, SIZE, put


def main() -> None:
    file = open_temporary(LAYOUT, SIZE)
    put(file)
    offering = NixlMemory(LAYOUT, file)
    memory = offering.memory
    assert memory is not None
    offer = asdict(memory) | {
        "agent": memory.agent.hex(),
        "mark": file.mark,
        "file": f"/proc/{os.getpid()}/fd/{file.descriptor}",
    }
    print(json.dumps(offer), flush=True)
    sys.stdin.read()
    offering.close()


if __name__ == "__main__":
    main()
