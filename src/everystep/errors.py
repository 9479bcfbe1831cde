"""The error tree: every failure says where it is, what was expected, and what to do.

EverystepError
├── UsageError               the call is wrong; nothing was read or written (exit status 2)
│   ├── Unsupported          a value or module that cannot be stored exactly
│   └── NotRestored          `step()` on a run that already has steps, without `restore()`
├── LayoutMismatch           the stored state does not fit the objects at hand
├── RunBusy                  another live process owns this run
├── NothingToRestore         no step that was asked for is there
├── CannotRestore            steps are there, and not one of them can be proved
├── ReplicasDiffer           data-parallel ranks hold different bits of one tensor
├── RanksDisagree            ranks called with different arguments, or see different directories
├── TooManyFailedSteps       the limit on steps without a checkpoint was reached
├── TapError                 packets could not be read off a network
│   ├── NotACapture          the file is no capture that can be read, or is damaged
│   └── CaptureFailed        the interface cannot be captured
└── StoreError               the store answered with a failure
    ├── Damaged              bytes are there, and they are not what was written
    ├── Missing              a file that must be there is not
    ├── NotARun              the directory holds something else
    ├── StoreFull            no space or quota left
    └── StoreFailed          input/output error, permission, read-only or vanished directory
"""

from __future__ import annotations


class EverystepError(Exception):
    """The root of the tree.

    Every field is optional and stands in `str(error)` when it is set. `hint` says what to do next;
    the command line prints it as `try:`.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        step: object | None = None,
        rank: int | None = None,
        path: object | None = None,
        at: int | None = None,
        expected: object | None = None,
        found: object | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.rank = rank
        self.path = path
        self.at = at
        self.expected = expected
        self.found = found
        self.hint = hint

    def headline(self) -> str:
        """The error on one line, without its hint."""
        where = []
        if self.step is not None:
            where.append(f"step {self.step}")
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        if self.path is not None:
            where.append(str(self.path))
        if self.at is not None:
            where.append(f"byte {self.at:,}")
        line = ", ".join(where) + ": " + self.message if where else self.message
        if self.expected is not None or self.found is not None:
            line += f" (expected {self.expected}, found {self.found})"
        return line

    def __str__(self) -> str:
        return f"{self.headline()}\n  try: {self.hint}" if self.hint else self.headline()


class UsageError(EverystepError):
    """The call is wrong; nothing was read or written."""

    exit_code = 2


class Unsupported(UsageError):
    """A value, tensor or module that cannot be stored exactly, named by its place in the state."""


class NotRestored(UsageError):
    """`step()` was called on a run that already has steps, and `restore()` was not."""


class LayoutMismatch(EverystepError):
    """The stored state does not fit the objects at hand: names, shapes, dtypes or shards."""


class RunBusy(EverystepError):
    """Another live process owns this run directory."""


class NothingToRestore(EverystepError):
    """No step that was asked for is there."""


class CannotRestore(EverystepError):
    """Steps are there, and not one of them can be proved."""


class ReplicasDiffer(EverystepError):
    """Ranks that must hold the same bits of a tensor do not."""


class RanksDisagree(EverystepError):
    """Ranks called with different arguments, or do not see the same run directory."""


class TooManyFailedSteps(EverystepError):
    """Steps in a row could not be stored, and the user's limit was reached."""


class TapError(EverystepError):
    """Packets could not be read off a network."""


class NotACapture(TapError):
    """The file is no capture that can be read, or it is damaged; `at` says where."""


class CaptureFailed(TapError):
    """The interface cannot be captured: it is not there, or this process may not."""


class StoreError(EverystepError):
    """The store answered with a failure."""


class Damaged(StoreError):
    """Bytes are there, and they are not what was written."""


class Missing(StoreError):
    """A file that must be there is not."""


class NotARun(StoreError):
    """The directory holds something that is not a run of everystep."""


class StoreFull(StoreError):
    """No space or quota is left."""


class StoreFailed(StoreError):
    """Input/output error, permission denied, a read-only or vanished directory."""
