"""What is raised when a checkpoint cannot be written, found or read."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint is absent, incomplete, unreadable or of another kind; the message says what to do."""
