"""Evidence for a record besides its loss: probes that the loss is valid, and the data it saw."""
