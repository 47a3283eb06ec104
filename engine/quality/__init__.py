"""What a format costs in quality: perplexity, greedy agreement, distance of the logits; and whether that is within bounds."""
