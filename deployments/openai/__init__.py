"""The OpenAI-compatible HTTP surface: bodies, routes, streams. Talks to a ``Backend`` alone."""
