"""What a record says beside its loss: where it comes from, the data it saw, probes that its loss is valid."""
