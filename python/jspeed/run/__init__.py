"""One run: find the recipe, compile, warm up, train under the clock, evaluate, write the record."""
