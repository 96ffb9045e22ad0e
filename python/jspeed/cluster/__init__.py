"""Many processes as one program: start them, let them meet, join them by JAX, end all when one fails."""
