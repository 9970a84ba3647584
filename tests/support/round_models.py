"""Target and draft distributions for simulated rounds."""

import numpy as np

VOCAB, DRAFTS, LENGTH = 4, 3, 4


_random = np.random.default_rng(0)


# Next-token probabilities, by last token. The draft model prefers tokens that are rare
# in the target.
TARGET = _random.dirichlet([0.7] * VOCAB, VOCAB)


DRAFT = 0.5 * _random.dirichlet([0.7] * VOCAB, VOCAB) + 0.5 * TARGET
