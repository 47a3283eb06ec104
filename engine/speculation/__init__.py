"""Several tokens in one forward pass: drafts that are cheap to guess, verified by the sampling that would have made them."""
