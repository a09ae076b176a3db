"""The bounds of every histogram, in seconds or tokens."""

FIRST_TOKEN_S = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_S = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)
REQUEST_S = (
    *(0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0),
    *(15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
# From a look into a directory to the download of a large adapter, and a broadcast to all replicas.
STEP_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0),
)


def token_counts(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``most``."""
    bounds, power = [], 1
    while power <= most:
        bounds += [float(power * step) for step in (1, 2, 5) if power * step <= most]
        power *= 10
    return tuple(bounds)
