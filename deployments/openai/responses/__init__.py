"""POST /v1/responses, without memory: what a client wants remembered, it sends again."""
