"""The plainest attention there is, for comparing decoders with transformers: dense, growing, one sequence."""

import torch

torch.set_num_threads(1)


class DenseAttention:
    """A LayerAttention over one sequence that may come in pieces."""

    def __init__(self, spec):
        self.specs = spec.attention
        self.keys = [None] * spec.num_layers
        self.values = [None] * spec.num_layers
        self.calls = []

    def __call__(self, layer, q, k, v):
        self.calls.append(layer)
        spec = self.specs[layer]
        if self.keys[layer] is not None:
            k, v = torch.cat((self.keys[layer], k)), torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k.clone(), v.clone()
        groups = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(groups, 1).transpose(0, 1), v.repeat_interleave(groups, 1).transpose(0, 1)
        scores = (q.transpose(0, 1) @ k.transpose(1, 2)) * spec.scale
        total, new = k.shape[1], q.shape[0]
        row, column = torch.arange(total - new, total)[:, None], torch.arange(total)[None, :]
        hidden = column > row
        if spec.window is not None:
            hidden = hidden | (column <= row - spec.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v).transpose(0, 1)


def run(decoder, ids, attention, start=0):
    """Logits of every one of `ids`, which stand from position `start` on."""
    positions = torch.arange(start, start + len(ids))
    return decoder.logits(decoder.forward(torch.tensor(ids), positions, attention))


def greedy(decoder, spec, prompt, count, chunk=None):
    """`count` greedy tokens after `prompt`, prefilled in pieces of `chunk` tokens."""
    attention = DenseAttention(spec)
    chunk = chunk or len(prompt)
    for start in range(0, len(prompt), chunk):
        logits = run(decoder, prompt[start : start + chunk], attention, start)
    tokens = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(int(logits[-1].argmax()))
        logits = run(decoder, tokens[-1:], attention, position)
    return tokens


def reference_model(directory, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def reference_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()
