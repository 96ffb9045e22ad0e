"""What the devices compute: the training step, its compiled programs, and what the kind of device decides."""
