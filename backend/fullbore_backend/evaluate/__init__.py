"""Which precision of a model is good enough: perplexity, accuracy, speed and memory of each."""
