"""What stands below all rooms: files, streams, processes, machines, and what JAX moves between
releases."""
