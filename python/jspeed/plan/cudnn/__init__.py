"""What the real cuDNN says of attention on a GPU that is not here."""
