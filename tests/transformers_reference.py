"""What transformers generates on the same weights."""

import torch


def reference_greedy(model, prompt, count):
    """The `count` tokens with which its own generate goes on, with its cache and no stop."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return output[0, len(prompt) :].tolist()
