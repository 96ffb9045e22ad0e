"""Several runs that belong together: announced before the first, raced in turn, or a record made again."""
