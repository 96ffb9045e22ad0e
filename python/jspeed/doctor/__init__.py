"""``jspeed doctor``: what a machine offers to a run."""
