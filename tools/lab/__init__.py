"""Programs for demonstrations and measurements, and their helpers: depots, engines, models, prompts."""
