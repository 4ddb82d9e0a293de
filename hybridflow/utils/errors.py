"""The one family of exceptions that hybridflow raises on purpose.

Every class also inherits the stdlib error it refines, so callers may catch either, and every instance survives pickling
(an error raised in a worker is re-raised on the driver as the same class).
"""

from __future__ import annotations


class HybridFlowError(Exception):
    """Root of all exceptions raised on purpose by hybridflow."""


class ConfigError(HybridFlowError, ValueError):
    """A configuration that cannot work: says the dotted key, what was given, what is allowed and what to do."""


class MachineError(HybridFlowError, RuntimeError):
    """This machine (or cluster) lacks what the configuration asks for: devices, files, ports, packages."""


class ShortageError(MachineError):
    """The cluster lacks slots that a pool asks for; a node that comes back may bring them."""


class ColumnError(HybridFlowError, KeyError):
    """A batch column is missing, duplicated with other values, or has another shape than its table entry."""

    def __str__(self) -> str:  # KeyError would show the message quoted
        return str(self.args[0]) if self.args else ""


class EngineError(HybridFlowError, RuntimeError):
    """A training or rollout engine was used in a way that would give wrong numbers."""


class StateError(HybridFlowError, RuntimeError):
    """An illegal transition of a state machine; names both states."""


class WorkerError(HybridFlowError, RuntimeError):
    """A worker raised or died; names role, rank, node and method, and carries the worker's traceback as text."""


class LostError(WorkerError):
    """A worker's process or node is gone; the call that noticed it says which, where and why."""


class DeadlineError(HybridFlowError, TimeoutError):
    """A wait passed its deadline; names the phase and who was waited for."""


class NotFiniteError(HybridFlowError, FloatingPointError):
    """Losses or gradients were not finite too often in a row; names the folder from which the last can be replayed."""


class DeviceMemoryError(HybridFlowError, MemoryError):
    """A device has too little memory for a single row, or for a pass that cannot be cut smaller; names phase, tokens,
    biggest consumers and settings.
    """


class DataError(HybridFlowError, ValueError):
    """A data file or row that cannot be used; names the file, the row and the column."""
