"""Checkpoint directories: how they are put in place, checked and read."""
