"""Load a trained model, generate text, evaluate it."""
