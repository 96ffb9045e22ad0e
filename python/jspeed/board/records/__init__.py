"""The records folder: runs, plans, tracks, and whether they agree."""
