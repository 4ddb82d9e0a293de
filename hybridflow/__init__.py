"""hybridflow: reinforcement-learning post-training of language models, one controller between models."""

__version__ = "0.1.0"
