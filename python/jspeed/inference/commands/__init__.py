"""The commands of a trained model: sample, evaluate, export."""
