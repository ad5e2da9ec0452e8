"""Real SGLang on CPU in a separate process."""
