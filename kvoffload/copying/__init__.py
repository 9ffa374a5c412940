"""Copy engines: device pages <-> host slots."""

from kvoffload.copying.base import CopyEngine, Direction
from kvoffload.copying.cpu import CpuCopyEngine
from kvoffload.copying.null import NullCopyEngine

__all__ = ["CopyEngine", "CpuCopyEngine", "Direction", "NullCopyEngine"]
