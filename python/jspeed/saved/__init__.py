"""The programs of a run, saved where they are first compiled and loaded by its next start."""
