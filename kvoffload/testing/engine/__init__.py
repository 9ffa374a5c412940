"""The reference engine: a small paged-attention engine that computes nothing and calls a connector as a real one does.

`Engine` schedules, `Device` holds pages and their bytes, `Sequence` is one request. docs/engine.md describes it.
"""

from kvoffload.testing.engine.device import Device
from kvoffload.testing.engine.engine import Engine, FixedCost, Limits, StepCost
from kvoffload.testing.engine.null import NullConnector
from kvoffload.testing.engine.sequence import Sequence, State

__all__ = ["Device", "Engine", "FixedCost", "Limits", "NullConnector", "Sequence", "State", "StepCost"]
