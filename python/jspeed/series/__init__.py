"""Series of runs: preregistered, raced against another recipe's, or reproducing a record."""
