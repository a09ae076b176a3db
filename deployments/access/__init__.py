"""Who may ask for what, and how much of it. Knows neither HTTP nor Ray."""
