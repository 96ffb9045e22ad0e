"""What works of a device, before the clock starts: each kernel against a reference, the next one
where one fails, versions that are known to be bad."""
