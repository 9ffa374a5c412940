"""`kvoffload replay` with real bytes and the page pool on the device: `replay_hbm.py REPLAY-ARGUMENTS`.

Every page that is loaded back is compared with what its key must hold, as in any replay that moves bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_world import MirroredEngine

from kvoffload import cli, native
from kvoffload.replay import tiers


def main() -> None:
    """Run the command with the device's copy engine in the place of the CPU's."""
    found = native.device_module()
    module = found.module or native.simulation()
    sys.stdout.write(f"page pool on {module.device_info(0)[0]}\n")
    tiers.CpuCopyEngine = lambda: MirroredEngine(module)
    cli.app(["replay", *sys.argv[1:]], standalone_mode=True)


if __name__ == "__main__":
    main()
