"""The training step, its compiled programs, and the settings that depend on the device."""
