"""Programs that set up the demo; run from the checkout with `python -m scripts.NAME`."""
