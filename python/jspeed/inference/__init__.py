"""What a trained model does: text, and how good it is; from wherever its parameters lie."""
