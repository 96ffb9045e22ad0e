"""Evidence for a record besides its loss: provenance, the data it saw, probes that the loss is
valid."""
