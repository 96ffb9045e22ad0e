"""Many processes as one program: launch, rendezvous, jax.distributed, and one exit when any process
fails."""
