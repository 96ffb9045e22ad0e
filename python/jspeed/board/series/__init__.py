"""Several related runs: preregistered, in turn, reproduced."""
