"""Put on the path of a process, it sets that process's wall clock a day back and lets it jump by an hour now and then."""

import time

_right, _monotonic = time.time, time.monotonic


def _skewed() -> float:
    return _right() - 86_400 + 3_600 * (int(_monotonic() / 0.3) % 3)


time.time = _skewed
