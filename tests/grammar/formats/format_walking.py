"""Random walks through grammars, with a liking for tokens that bring the text to its end."""

import numpy as np

from grammar.compiler import allocate_bitmask


class Walker:
    def __init__(self, tokenizer, width, stops):
        self._stops = frozenset(stops)
        endings = ('"', '"}', '"]', '",', "}", "]", "\n", "</", "1", "a", ")", "]", "</", "parameter", ">", "arg", "_", "value")
        self._liked = {token for text in endings for token in tokenizer.encode(text, add_special_tokens=False).ids}
        added = tokenizer.get_added_tokens_decoder().items()
        self._closing = {token for token, text in added if text.content.startswith(("</arg", "</tool", "<|end|>"))}
        self._width = width
        self._mask = allocate_bitmask(1, width)

    def walk(self, matcher, random, start=(), most=400):
        """(ids, whether it came to an end), from `start` on."""
        ids = list(start)
        assert all(matcher.accept(token) for token in ids)
        while len(ids) < most:
            token = self._choose(self.allowed(matcher), random, min(0.95, 0.3 + len(ids) / 150))
            assert matcher.accept(token)
            ids.append(token)
            if matcher.is_terminated():
                return ids, True
        return ids, False

    def allowed(self, matcher):
        matcher.fill_bitmask(self._mask, 0)
        return np.nonzero(np.unpackbits(self._mask.numpy().view(np.uint8), bitorder="little")[: self._width])[0].tolist()

    def _choose(self, allowed, random, hurry):
        for kind in (self._stops, self._closing, self._liked):
            some = [token for token in allowed if token in kind]
            if some and random.random() < hurry:
                return random.choice(some)
        return random.choice(allowed)
