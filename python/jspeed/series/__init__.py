"""Several related runs: announced before the first, interleaved with another recipe's, or reproducing a record."""
