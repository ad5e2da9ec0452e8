"""Real SGLang with kvdepot, beside its own host cache and its own storage in files, measured in the same minutes."""
