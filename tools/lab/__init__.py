"""Programs started for a demonstration or a measurement, and what belongs to them: depots, engines, models, prompts."""
